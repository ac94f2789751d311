import threading

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.errors import EngineError, ShardReadError
from lazyshards.testing import assert_same, example_array, write_npy_shards


@pytest.fixture
def pairs(tmp_path):
    """Give a function that makes datasets of different sizes and dtypes on an engine, and what each holds."""

    def make(count, engine):
        made = []
        for number in range(count):
            whole = example_array((150 + 13 * number, 5), ("i4", "f8", "u1", "f4")[number % 4], seed=number)
            paths = write_npy_shards(tmp_path / str(number), np.split(whole, [20 + number, 100]))
            made.append((open_shards(paths, engine=engine), whole))
        return made

    return make


def in_threads(count, function):
    """Run ``function(number)`` in threads that start together; raise what any of them raised."""
    failures, together = [], threading.Barrier(count)

    def run(number):
        try:
            together.wait(30)
            function(number)
        except BaseException as exc:  # noqa: BLE001  # raised again below
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread still waits"
    if failures:
        raise failures[0]


def test_eight_threads_agree(pairs):
    """Eight threads that compute slices of one dataset at once each get their own rows."""
    ((ds, whole),) = pairs(1, "numpy")

    def work(number):
        generator = np.random.default_rng(number)
        for turn in range(40):
            a, b = sorted(generator.integers(0, len(whole) + 1, 2).tolist())
            assert_same(ds[a:b].compute(tiles_per_processor=1 + turn % 3), whole[a:b])

    in_threads(8, work)


def test_eight_threads_of_large_results(tmp_path):
    """Eight threads whose results are tiled over the same pool do not wait for one another for ever."""
    whole = example_array((4000, 100), "f8")
    ds = open_shards(write_npy_shards(tmp_path, np.split(whole, [1000, 3900])), engine="numpy")
    in_threads(8, lambda number: assert_same(ds[number:].compute(tiles_per_processor=4), whole[number:]))


def test_failures_stay_with_their_thread(pairs, tmp_path):
    """A thread whose shard is gone gets the error, and the others get their rows."""
    (good, whole), (bad, _) = pairs(2, "numpy")
    for path in (tmp_path / "1").iterdir():
        path.unlink()

    def work(number):
        for _ in range(20):
            if number % 2:
                with pytest.raises(ShardReadError, match="shard_0000"):
                    bad.compute(tiles_per_processor=3)
            else:
                assert_same(good.compute(tiles_per_processor=3), whole)

    in_threads(6, work)


def test_interleaved_computes_never_mix(pairs, engine):
    """Hundreds of computes of different datasets, in turn, results held: each is its own."""
    made = pairs(10, engine)
    generator = np.random.default_rng(0)
    held = []
    for turn in range(300):
        ds, whole = made[turn % 10]
        a, b = sorted(generator.integers(0, len(whole) + 1, 2).tolist())
        index = (slice(a, b), slice(None, None, -1), generator.integers(0, len(whole), 7), (slice(a, b), turn % 5))[
            turn % 4
        ]
        held.append((ds[index].compute(tiles_per_processor=1 + turn % 3), whole[index]))
        if turn % 50 == 49:
            for found, expected in held:
                assert_same(found, expected)
            held.clear()


def test_results_dropped_at_once(pairs, engine):
    """Hundreds of results that nobody keeps leave the engine able to work."""
    ((ds, whole),) = pairs(1, engine)
    for turn in range(200):
        ds[turn % 50 :].compute(tiles_per_processor=2)
    assert_same(ds.compute(), whole)


def test_failures_between_computes(pairs, engine, tmp_path):
    """Computes that fail between others that do not: each fails or is right, a hundred times."""
    (good, whole), (bad, other) = pairs(2, engine)
    (tmp_path / "1" / "shard_0002.npy").unlink()
    for turn in range(100):
        with pytest.raises(ShardReadError, match="shard_0002"):
            bad[turn % 90 :].compute(tiles_per_processor=2)
        assert_same(good[turn % 90 :].compute(tiles_per_processor=2), whole[turn % 90 :])
    assert_same(bad[:50].compute(), other[:50])


def test_engines_beside_each_other(pairs, engine):
    """A compute on NumPy in a thread and one on another engine on the main thread do not disturb each other."""
    (ds, whole), (other, expected) = pairs(2, engine)
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                assert_same(other.compute(engine="numpy", tiles_per_processor=3), expected)
            except BaseException as exc:  # noqa: BLE001  # raised again below
                failures.append(exc)
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(100):
            assert_same(ds.compute(tiles_per_processor=2), whole)
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def test_other_threads_are_refused_or_served(pairs, engine):
    """On a thread that an engine cannot serve, compute() is a clear error; the process and its datasets go on."""
    ((ds, whole),) = pairs(1, engine)
    if engine == "legate":
        with pytest.raises(EngineError, match=r'main one.*engine="numpy"'):
            in_threads(1, lambda _: ds.compute())
    else:
        in_threads(1, lambda _: assert_same(ds.compute(), whole))
    in_threads(1, lambda _: assert_same(ds.compute(engine="numpy"), whole))
    assert_same(ds.compute(), whole)


FORK = """
    import os, sys, warnings
    import numpy as np, lazyshards
    engine = sys.argv[1]
    whole = np.arange(600_000.0).reshape(-1, 3)
    for i, part in enumerate(np.split(whole, 4)):
        np.save(f"shard_{i}.npy", part)
    ds = lazyshards.open_shards(".", engine=engine)
    assert np.array_equal(np.asarray(ds.compute(tiles_per_processor=2)), whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: it is what is tried here
        child = os.fork()
    if not child:
        right = np.array_equal(ds.compute(engine="numpy", tiles_per_processor=2), whole)
        if engine != "numpy":
            try:
                ds.compute()
                right = False
            except lazyshards.EngineError as exc:
                right = right and "fork" in str(exc)
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    assert np.array_equal(np.asarray(ds.compute(tiles_per_processor=2)), whole)
    print("right")
"""


def test_forked_children(child, engine):
    """A forked child computes on NumPy though its parent's threads are gone, and is told that Legate is not its own."""
    assert child(FORK, engine).splitlines()[-1] == "right"


END = """
    import sys
    import numpy as np, lazyshards
    np.save("shard_0.npy", np.arange(600_000.0))
    ds = lazyshards.open_shards("shard_0.npy", engine=sys.argv[1])
    held = [ds.compute(), ds[::2].compute(tiles_per_processor=3), ds[5].compute(), iter(ds)]
    next(held[-1])
    print("the end")
"""


def test_the_process_ends(child, engine):
    """A process that holds results, an unfinished iterator and a pool of threads ends by itself, with status 0."""
    assert child(END, engine).splitlines()[-1] == "the end"


FAIL = """
    import os, sys
    import numpy as np, lazyshards
    np.save("shard_0.npy", np.arange(600_000.0))
    ds = lazyshards.open_shards("shard_0.npy", engine=sys.argv[1])
    os.truncate("shard_0.npy", 4000)
    try:
        ds.compute(tiles_per_processor=3)
    except lazyshards.ShardChangedError as exc:
        print("told" if "shard_0.npy" in str(exc) else exc)
"""


def test_the_process_survives_a_shrunk_shard(child, engine):
    """A shard that shrank since it was opened is an exception, not a signal that kills the process."""
    assert child(FAIL, engine).splitlines()[-1] == "told"


def test_the_users_generators_are_left_alone(child, engine):
    """Bringing an engine up, opening and computing change neither NumPy's global generator nor Python's."""
    code = """
        import random, sys
        import numpy as np, lazyshards
        np.save("shard_0.npy", np.arange(600_000.0))
        np.random.seed(1), random.seed(1)
        before = np.random.get_state()[1].tolist(), random.getstate()
        lazyshards.open_shards("shard_0.npy", engine=sys.argv[1]).compute()
        print(before == (np.random.get_state()[1].tolist(), random.getstate()))
    """
    assert child(code, engine).splitlines()[-1] == "True"


def test_spawned_children_agree(child):
    """A dataset sent to a spawned process reads there what it reads here."""
    out = child("""
        import pickle, subprocess, sys
        import numpy as np, lazyshards
        np.save("shard_0.npy", np.arange(1000.0))
        ds = lazyshards.open_shards("shard_0.npy", engine="numpy")[10:20]
        code = "import pickle, sys; print(float(pickle.load(sys.stdin.buffer).compute().sum()))"
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(ds), capture_output=True, check=True)
        print(float(done.stdout) == float(ds.compute().sum()))
    """)
    assert out.strip() == "True"
