"""What would abort, hang or corrupt a Legate process must be an error, or nothing at all, when it comes through us.

Each hazard runs in a process of its own: where the guard were missing, that process would die, and not the suite.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from lazyshards.engines import bringup

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("_legate_present")


@pytest.fixture
def _legate_present():
    """Skip with the reason where Legate cannot run, or fail if it must."""
    reason = bringup.why_unavailable()
    if reason and "legate" in os.environ.get("LAZYSHARDS_REQUIRE_ENGINES", ""):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def shards(tmp_path):
    """Seven uneven shards of 3,000 rows; each row tells its own number."""
    directory = tmp_path / "shards"
    directory.mkdir()
    start = 0
    for i, rows in enumerate([400, 0, 900, 1, 1000, 699, 0]):
        np.save(directory / f"shard_{i}.npy", np.arange(start * 4, (start + rows) * 4, dtype="f4").reshape(rows, 4))
        start += rows
    return directory


def run(code, *args, timeout=120, config="--cpus 2 --gpus 0 --utility 1 --sysmem 400 --logging gpu=none,threads=none"):
    """Run a script that uses Legate, and return what it printed; it must end by itself and in peace."""
    prelude = "import gc, os, sys, threading, time\nimport numpy as np\nimport lazyshards\n"
    environment = {**os.environ, "LEGATE_CONFIG": config, "PYTHONPATH": str(ROOT)}
    environment.pop("LAZYSHARDS_ENGINE", None)
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_failing_leaf_raises_and_the_process_goes_on(shards):
    """A shard that vanishes raises ShardReadError naming it, and the next compute of healthy rows works."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1], engine="legate")
        os.rename(sys.argv[1] + "/shard_4.npy", sys.argv[1] + "/gone")
        try:
            ds.compute(tiles_per_processor=4)
        except lazyshards.ShardReadError as exc:
            print("shard_4.npy" in str(exc), "tiles failed" in str(exc))
        print(float(np.asarray(ds[:400].compute(tiles_per_processor=2)).sum()) == np.arange(1600.0).sum())
        """,
        shards,
    )
    assert out.split() == ["True", "True", "True"]


@pytest.mark.parametrize("thrown", ["KeyboardInterrupt()", "SystemExit(3)", "MemoryError('x' * 9000)", "Odd()"])
def test_nothing_that_a_reader_throws_escapes_the_leaf(shards, thrown):
    """A reader that raises anything, even SystemExit or an exception that cannot be printed, gives an error of ours."""
    out = run(
        f"""
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        class Format:
            name, suffixes, magic, directories = "mean", (".mean",), (), False

            def inspect(self, paths, storage, options):
                shard = lazyshards.open_shards(paths[0], format="npy").shards[0]
                from lazyshards.layout import Decoded
                return [shard._replace(source=Decoded(None))]

            def read_into(self, shard, start, out, cell, storage):
                raise {thrown}

        lazyshards.register_format(Format())
        ds = lazyshards.open_shards(sys.argv[1] + "/shard_2.npy", format="mean", engine="legate")
        try:
            ds.compute(tiles_per_processor=2)
        except lazyshards.LazyShardsError as exc:
            print("error")
        print(lazyshards.open_shards(sys.argv[1], engine="legate")[:10].compute(tiles_per_processor=2).shape)
        """,
        shards,
    )
    assert out.split("\n")[:2] == ["error", "(10, 4)"]


def test_other_threads_get_an_error(shards):
    """compute(engine="legate") off the main thread is an EngineError, also while the main thread computes."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1])
        ds[:10].compute(engine="legate")
        found = []
        def work():
            try:
                ds.compute(engine="legate")
            except lazyshards.EngineError as exc:
                found.append("thread" in str(exc))
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        ds.compute(engine="legate")
        [thread.join() for thread in threads]
        print(found)
        """,
        shards,
    )
    assert out.strip() == "[True, True, True, True]"


def test_first_use_on_another_thread_is_refused(shards):
    """Legate is not started by a thread that is not the main one: the process would not survive it."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1])
        def work():
            try:
                ds.compute(engine="legate")
            except lazyshards.EngineUnavailableError as exc:
                print("main thread" in str(exc))
        thread = threading.Thread(target=work); thread.start(); thread.join()
        print(type(ds[:5].compute(engine="legate")).__module__.split(".")[0])
        """,
        shards,
    )
    assert out.split() == ["True", "cupynumeric"]


def test_compute_inside_a_task_is_refused(shards):
    """compute() in a user's own Legate task is an EngineError, not an abort."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1], engine="legate")
        ds[:1].compute()
        from legate.core.task import task
        @task
        def inside() -> None:
            try:
                ds.compute()
            except lazyshards.EngineError as exc:
                print("task" in str(exc), flush=True)
        inside()
        from legate.core import get_legate_runtime
        get_legate_runtime().issue_execution_fence(block=True)
        """,
        shards,
    )
    assert out.strip() == "True"


def test_forked_child_is_refused_and_numpy_serves(shards):
    """In a forked child Legate is refused with an error, and the NumPy engine works."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1])
        ds[:10].compute(engine="legate")
        if os.fork() == 0:
            try:
                ds[:10].compute(engine="legate")
            except (lazyshards.EngineError, lazyshards.EngineUnavailableError):
                ok = ds.compute(engine="numpy").shape == (3000, 4)
                os._exit(7 if ok else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
        shards,
    )
    assert out.strip() == "7"


def test_a_forked_child_seeds_without_a_warning(shards):
    """Legate warns of seeding, which matters on its ranks; a forked child, as torch's loaders make, is none of them."""
    out = run(
        """
        import random, warnings
        import numpy as np
        lazyshards.open_shards(sys.argv[1])[:10].compute(engine="legate")
        warnings.simplefilter("error")
        expected = random.Random(5).random(), np.random.RandomState(5).random_sample()
        if os.fork() == 0:
            random.seed(5)
            np.random.seed(5)
            os._exit(7 if (random.random(), np.random.random_sample()) == expected else 8)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
        shards,
    )
    assert out.strip() == "7"


def test_too_large_a_result_is_refused_with_numbers(tmp_path):
    """A result above the pool is a CapacityError that says how many rows fit, and so many do."""
    with (tmp_path / "big.npy").open("wb") as file:
        header = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (600000, 1024), }"
        file.write(header.ljust(127) + b"\n")
        file.truncate(128 + 600_000 * 1024)
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1], engine="legate")
        try:
            ds.compute()
        except lazyshards.CapacityError as exc:
            fits = int(str(exc).split("at most ")[1].split(" ")[0].replace(",", ""))
        print(100_000 < fits < 600_000, ds[:fits].compute().shape == (fits, 1024))
        """,
        tmp_path / "big.npy",
    )
    assert out.split() == ["True", "True"]


def test_results_of_many_sizes_never_exhaust_the_pool(tmp_path):
    """Results of random sizes, held and dropped in any order, are computed or refused; the process survives."""
    np.save(tmp_path / "a.npy", np.zeros((25_000, 64), "f4"))
    out = run(
        """
        import random
        random = random.Random(5)
        ds = lazyshards.open_shards([sys.argv[1]] * 16, engine="legate")
        held, refused, done = [], 0, 0
        for _ in range(150):
            rows = random.randrange(1, len(ds) // random.choice([1, 3, 10]))
            while held and random.random() < 0.5:
                held.pop(random.randrange(len(held)))
            try:
                held.append(ds[:rows].compute())
                done += 1
            except lazyshards.CapacityError:
                refused += 1
        print(done > 80, refused > 5)
        """,
        tmp_path / "a.npy",
        config="--cpus 2 --gpus 0 --utility 1 --sysmem 100 --logging gpu=none,threads=none",
    )
    assert out.split() == ["True", "True"]


def test_what_lives_on_in_views_and_in_arrays_of_the_user_counts(tmp_path):
    """A view keeps the whole result's memory, and the user's arrays take theirs: what does not fit is refused."""
    np.save(tmp_path / "a.npy", np.ones((25_000, 64), "f4"))  # 6.4 MB, of a pool of 100 MB
    out = run(
        """
        ds = lazyshards.open_shards([sys.argv[1]] * 4, engine="legate")
        for keep in (lambda a: a[1:], lambda a: a[:, 0], lambda a: a[5], lambda a: a + 1, lambda a: a.T):
            held, refused = [], 0
            for _ in range(8):
                try:
                    held.append(keep(ds.compute()))
                except lazyshards.CapacityError:
                    refused += 1
            sums = {float(each.sum()) / each.size for each in held}
            print(len(held) >= 2, refused >= 4, len(sums) == 1)
            del held
        print(float(ds.compute().sum()) == ds.size)
        """,
        tmp_path / "a.npy",
        config="--cpus 2 --gpus 0 --utility 1 --sysmem 100 --logging gpu=none,threads=none",
    )
    assert out.split() == ["True"] * 16


def test_many_launches_with_dropped_results_do_not_deadlock(shards):
    """Two thousand launches whose results are dropped, with cuPyNumeric work between them, end in seconds."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1], engine="legate")
        total = 0.0
        for i in range(2000):
            part = ds[i : i + 500].compute(tiles_per_processor=1)
            part = part + 1
        print(float(part[0, 0]) == 1999 * 4 + 1)
        """,
        shards,
    )
    assert out.strip() == "True"


def test_garbage_cycles_with_results_survive_threads(shards):
    """Cycles that hold results are not collected on our threads, where dropping one kills the process."""
    out = run(
        """
        gc.set_threshold(50, 2, 2)
        ds = lazyshards.open_shards(sys.argv[1], engine="legate")
        class Node: pass
        for i in range(300):
            a, b = Node(), Node()
            a.other, b.other, a.data = b, a, ds[i : i + 300].compute(tiles_per_processor=2)
            del a, b
            ds[:].compute(engine="numpy", tiles_per_processor=4)
            if i % 10 == 0:
                for batch in ds.batches(100, shuffle=True, seed=i):
                    node = Node(); node.self, node.batch = node, batch
        print(gc.isenabled())
        """,
        shards,
    )
    assert out.strip() == "True"


def test_two_datasets_in_flight_never_mix(shards, tmp_path):
    """Hundreds of computes of two datasets in turn each give their own rows."""
    other = tmp_path / "other"
    other.mkdir()
    for i in range(3):
        np.save(other / f"x_{i}.npy", -np.arange(i * 1000, (i + 1) * 1000, dtype="i8"))
    out = run(
        """
        a = lazyshards.open_shards(sys.argv[1], engine="legate")
        b = lazyshards.open_shards(sys.argv[2], engine="legate")
        want_a = np.arange(12000, dtype="f4").reshape(3000, 4)
        want_b = -np.arange(3000)
        index = np.random.default_rng(0).integers(0, 3000, 500)
        for i in range(150):
            x = a[i : i + 900].compute(tiles_per_processor=2)
            y = b[i : 3000 - i].compute(tiles_per_processor=1)
            z = a[index].compute(tiles_per_processor=2)
            assert np.array_equal(np.asarray(x), want_a[i : i + 900])
            assert np.array_equal(np.asarray(y), want_b[i : 3000 - i])
            assert np.array_equal(np.asarray(z), want_a[index])
        print("ok")
        """,
        shards,
        other,
    )
    assert out.strip() == "ok"


def test_edges_of_shape_and_dtype(tmp_path):
    """Zero rows, one row, single elements, seven axes and dtypes that Legate lacks work, or are clear errors."""
    np.save(tmp_path / "a.npy", np.arange(24.0).reshape(4, 3, 2))
    np.save(tmp_path / "wide.npy", np.arange(128).reshape(2, 2, 2, 2, 2, 2, 2))
    np.save(tmp_path / "dates.npy", np.arange(5).astype("M8[s]"))
    np.save(tmp_path / "none.npy", np.zeros((0, 3), "i2"))
    out = run(
        """
        import warnings
        warnings.simplefilter("error")
        a = np.arange(24.0).reshape(4, 3, 2)
        ds = lazyshards.open_shards(sys.argv[1] + "/a.npy", engine="legate")
        for index in [slice(0, 0), slice(2, 3), 2, (2, 1), (2, 1, 0), (slice(None), 1, 0), (slice(None), slice(0, 0))]:
            got = ds[index].compute()
            assert got.shape == a[index].shape and np.array_equal(np.asarray(got), a[index]), index
        wide = lazyshards.open_shards(sys.argv[1] + "/wide.npy", engine="legate")
        try:
            wide.compute()
        except lazyshards.UnsupportedDtypeError as exc:
            print("axes" in str(exc), "numpy" in str(exc))
        assert np.array_equal(np.asarray(wide[1].compute()), np.arange(128).reshape((2,) * 7)[1])
        assert np.array_equal(np.asarray(wide[:, 0].compute()), np.arange(128).reshape((2,) * 7)[:, 0])
        dates = lazyshards.open_shards(sys.argv[1] + "/dates.npy")
        try:
            dates.compute(engine="legate")
        except lazyshards.UnsupportedDtypeError as exc:
            print("datetime64" in str(exc), "numpy" in str(exc))
        assert dates.engine == "numpy"
        try:
            dates.compute()
        except lazyshards.EngineFallbackWarning as exc:
            print("NumPy" in str(exc))
        none = lazyshards.open_shards(sys.argv[1] + "/none.npy", engine="legate")
        print(none.compute().shape, len(list(none.batches(3))))
        """,
        tmp_path,
    )
    assert out.split("\n")[:4] == ["True True", "True True", "True", "(0, 3) 0"]


def test_out_is_filled_in_place(shards):
    """out= fills an array of the user's, and refuses one of another shape, dtype or kind."""
    out = run(
        """
        lazyshards.set_engine("legate")
        import cupynumeric
        ds = lazyshards.open_shards(sys.argv[1])
        want = np.arange(12000, dtype="f4").reshape(3000, 4)
        mine = cupynumeric.zeros((3000, 4), "f4")
        print(ds.compute(out=mine) is mine, np.array_equal(np.asarray(mine), want))
        row = cupynumeric.zeros(4, "f4")
        ds[7].compute(out=row)
        print(np.asarray(row).tolist() == want[7].tolist())
        repeated = cupynumeric.broadcast_to(cupynumeric.zeros(4, "f4"), (3000, 4))
        others = cupynumeric.zeros((3000, 4)), cupynumeric.zeros((1, 4), "f4"), np.zeros((3000, 4), "f4")
        for bad in (repeated, *others):
            try:
                ds.compute(out=bad)
            except lazyshards.EngineError as exc:
                print("expected" in str(exc))
                print((bad is others[-1]) == ('engine="numpy"' in str(exc)))
        """,
        shards,
    )
    assert out.split() == ["True"] * 11


def test_shrinking_file_kills_nothing(shards):
    """A shard that is cut while it is open is an error that names it, on both engines."""
    out = run(
        """
        ds = lazyshards.open_shards(sys.argv[1])
        ds.compute(engine="legate"); ds.compute(engine="numpy")
        os.truncate(sys.argv[1] + "/shard_4.npy", 1000)
        for engine in ("legate", "numpy"):
            try:
                ds.compute(engine=engine)
            except lazyshards.ShardChangedError as exc:
                print("shard_4.npy" in str(exc))
        """,
        shards,
    )
    assert out.split() == ["True", "True"]


def test_compute_while_a_module_is_imported(shards, tmp_path):
    """compute() at the top of a module that is being imported does not deadlock on the import lock."""
    (tmp_path / "user_module.py").write_text(
        "import lazyshards, sys\nresult = lazyshards.open_shards(sys.argv[1], engine='legate').compute()\n"
    )
    out = run("sys.path.insert(0, sys.argv[2])\nimport user_module\nprint(user_module.result.shape)", shards, tmp_path)
    assert out.strip() == "(3000, 4)"


def test_interrupt_while_reading_is_a_keyboard_interrupt(shards):
    """Ctrl-C during a compute is a KeyboardInterrupt, and the next compute works."""
    out = run(
        """
        import signal
        ds = lazyshards.open_shards(sys.argv[1], engine="legate")
        ds[:1].compute()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                ds.compute(tiles_per_processor=4)
            print("never")
        except KeyboardInterrupt:
            print("interrupted", gc.isenabled(), ds.compute().shape)
        """,
        shards,
    )
    assert out.strip() == "interrupted True (3000, 4)"
