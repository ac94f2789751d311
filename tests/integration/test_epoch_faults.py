import gc
import os
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest

from lazyshards import open_shards, zip_shards
from lazyshards.errors import CapacityError, MapError, ShardChangedError, ShardReadError
from lazyshards.source import ViewSource
from lazyshards.testing import write_npy_shards


@pytest.fixture
def ten(tmp_path):
    """Ten shards of four rows that hold their own numbers."""
    return write_npy_shards(tmp_path / "ten", np.split(np.arange(80).reshape(40, 2), 10))


def walk(batches):
    """Return the first elements of the batches up to an error, and the error."""
    found = []
    try:
        found.extend(np.asarray(batch)[:, 0].tolist() for batch in batches)
    except Exception as exc:  # noqa: BLE001  # whatever it is, the test looks at it
        return found, exc
    return found, None


def open_files():
    """Return the files below a shard directory that this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return [link for link in links if link.endswith(".npy")]


@pytest.mark.parametrize("prefetch", [0, 1, 5, 50])
@pytest.mark.parametrize("way", ["removed", "truncated", "rewritten"])
def test_error_comes_at_its_batch(ten, engine, prefetch, way):
    """A shard that is gone, cut or changed fails the batch that needs it, after all batches before it, by name."""
    it = open_shards(ten, engine=engine).batches(4, prefetch=prefetch)
    path = Path(ten[5])
    if way == "removed":
        path.unlink()
    elif way == "truncated":
        os.truncate(path, 130)
    else:
        np.save(path, np.zeros((4, 2), np.int64))
    found, error = walk(it)
    assert found == [[i, i + 2, i + 4, i + 6] for i in range(0, 40, 8)]
    assert isinstance(error, ShardReadError)
    assert "shard_0005.npy" in str(error)


@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
def test_a_shard_vanishes_mid_epoch(tmp_path, engine, shuffle):
    """Batches handed out before a shard vanished, and those without its rows, are whole; the first with them fails."""
    whole = np.arange(2_000).reshape(1_000, 2)
    paths = write_npy_shards(tmp_path / "set", np.split(whole, 10))
    it = open_shards(tmp_path / "set", engine=engine).batches(10, shuffle=shuffle, seed=2, block_rows=20)
    order = [np.asarray(it.order(0).rows(a, a + 10)) for a in range(0, 1_000, 10)]
    running = iter(it)
    rows = [np.asarray(next(running))[:, 0] // 2 for _ in range(3)]
    holders = [set((rows_ // 100).tolist()) for rows_ in order[3:]]
    victim = int(order[-1][0]) // 100
    os.remove(paths[victim])
    with pytest.raises(ShardReadError, match=f"shard_{victim:04d}"):
        rows.extend(np.asarray(batch)[:, 0] // 2 for batch in running)
    for found, expected in zip(rows, order, strict=False):
        np.testing.assert_array_equal(found, expected)
    # What was read before it vanished may be handed out; what was not is the first batch that needs the shard.
    assert it.step == len(rows)
    assert victim in holders[len(rows) - 3]


def test_the_failed_batch_is_the_next_one(ten, engine):
    """After an error the position is before the failed batch: once the shard is back, a for goes on with it."""
    it = open_shards(ten[:6], engine=engine).batches(4)
    path = Path(ten[5])
    aside = path.rename(path.with_suffix(".aside"))
    found, error = walk(it)
    assert len(found) == 5
    assert isinstance(error, ShardReadError)
    assert it.step == 5
    aside.rename(path)
    assert walk(it) == ([[40, 42, 44, 46]], None)


def test_a_function_fails_in_a_prefetched_batch(ten, engine):
    """What map() calls fails the batch whose rows it was given, in its turn, and the message names them."""

    def picky(rows):
        if (rows[:, 0] == 48).any():
            raise ValueError("48 is not allowed")
        return rows

    found, error = walk(open_shards(ten, engine=engine).map(picky).batches(4, prefetch=3))
    assert len(found) == 6
    assert isinstance(error, MapError)
    assert "row 0 of" in str(error)
    assert "shard_0006.npy" in str(error)
    assert "48 is not allowed" in str(error)


def test_a_transform_fails(ten, engine):
    """An error of the transform is the user's own, and the batch is not lost."""

    def picky(batch):
        if int(batch[0, 0]) == 16 and not allowed:
            raise LookupError("not yet")
        return batch

    allowed = []
    it = open_shards(ten, engine=engine).batches(4, transform=picky)
    found, error = walk(it)
    assert (len(found), type(error)) == (2, LookupError)
    allowed.append(True)
    assert walk(it)[0][0] == [16, 18, 20, 22]


def test_memory_that_is_full_ahead_of_time(ten, monkeypatch):
    """A batch that cannot be begun yet, as memory is full, is begun when its turn comes; it fails only then."""
    begin = ViewSource.begin
    under_way = []

    def scarce(self, rows):
        if len(under_way) == 2:
            raise CapacityError("no room")
        pending = begin(self, rows)
        under_way.append(rows)
        result = pending.result

        def finish():
            under_way.remove(rows)
            return result()

        pending.result = finish
        return pending

    monkeypatch.setattr(ViewSource, "begin", scarce)
    found, error = walk(open_shards(ten, engine="numpy").batches(4, prefetch=6))
    assert (len(found), error) == (10, None)


def leftovers(engine):
    """Return the threads beyond those of a process that has read once, and open shards."""
    gc.collect()
    return [t.name for t in threading.enumerate() if not t.name.startswith(("MainThread", "lazyshards"))], open_files()


def fail(batches):
    """Raise while a batch is worked with."""
    for _ in batches:
        raise KeyError


@pytest.mark.parametrize("kind", ["dataset", "bundle"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_consumer_that_stops_leaves_nothing(ten, engine, kind, shuffle):
    """A consumer that stops, raises or forgets its iterator leaves no thread, no open file, and the collector on."""
    ds = open_shards(ten, engine=engine)
    source = zip_shards(x=ds, y=ds[:, 0]) if kind == "bundle" else ds
    list(source.batches(8))
    before = leftovers(engine)
    for _ in range(3):
        next(iter(source.batches(2, prefetch=4, shuffle=shuffle)))
        with pytest.raises(KeyError):
            fail(source.batches(2, prefetch=4, shuffle=shuffle))
        it = source.batches(2, prefetch=4, shuffle=shuffle)
        running = iter(it)
        next(running)
        it.reset()
        assert next(running, None) is None
    assert leftovers(engine) == before
    assert gc.isenabled()


def test_a_batch_that_is_dropped_is_freed(ten, engine):
    """Nothing keeps a batch alive that the consumer dropped, while it works on the next one or is still on it."""
    running = iter(open_shards(ten, engine=engine).batches(2, prefetch=2))
    batch = next(running)
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
    next(running)


def test_a_batch_that_is_kept_is_not_written_again(ten, engine):
    """Memory of batches is used again only once nobody has them: all of an epoch that are kept keep their rows."""
    wide = write_npy_shards(Path(ten[0]).parent / "wide", [np.repeat(np.arange(64), 2_000).reshape(64, 2_000)])
    ds = open_shards(wide, engine=engine)
    for shuffle in (False, True):
        kept = [np.asarray(batch[:, 0]) for batch in ds.batches(8, shuffle=shuffle, seed=1)]
        views = [batch[1] for batch in ds.batches(8, shuffle=shuffle, seed=1)]
        assert sorted(np.concatenate(kept).tolist()) == list(range(64))
        assert [int(view[5]) for view in views] == [int(batch[1]) for batch in kept]


def test_a_slow_consumer_gets_the_same(ten, engine):
    """What was read ahead long ago is handed out unchanged."""
    found = []
    for batch in open_shards(ten, engine=engine).batches(4, prefetch=8):
        time.sleep(0.002)
        found += np.asarray(batch)[:, 0].tolist()
    assert found == list(range(0, 80, 2))


def test_interrupt_while_waiting(tmp_path, child, engine):
    """Control-C ends an epoch with KeyboardInterrupt, on the main thread, and the process can go on and end."""
    path = tmp_path / "slow.npy"
    np.save(path, np.arange(40))
    out = child(
        """
        import os, signal, sys, threading, time
        import lazyshards
        def slow(rows):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(0.6)
            return rows
        ds = lazyshards.open_shards(sys.argv[1], engine=sys.argv[2])
        ds[:3].compute()
        try:
            for batch in ds.map(slow).batches(40):
                raise SystemExit("a batch came")
        except KeyboardInterrupt:
            print("interrupted", int(ds.batches(40).__iter__().__next__().sum()))
        """,
        path,
        engine,
    )
    assert out.split() == ["interrupted", "780"]


@pytest.mark.slow
def test_ten_thousand_batches(ten, child):
    """Ten thousand batches in a row neither hang nor grow, on each engine that is there."""
    child(
        """
        import resource, sys
        import numpy as np, lazyshards
        from lazyshards.engines import bringup
        engines = {"numpy": 4_000} if bringup.why_unavailable() else {"numpy": 4_000, "legate": 64_000}
        for engine, most in engines.items():  # Legate itself keeps 3 KiB for each array that ever was
            ds = lazyshards.open_shards(sys.argv[1:], engine=engine)
            it = ds.batches(4, shuffle=True, seed=0, epochs=1_000)
            for count, batch in enumerate(it, 1):
                if count == 3_000:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert count == 10_000, count
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < most, f"{engine}: {grown} KiB"
        """,
        *ten,
    )


# Rows out of memory maps ------------------------------------------------------------------------------------------


def shuffled(path):
    """Return a dataset of many rows and numbers that touch all of its pages."""
    whole = np.arange(400_000).reshape(-1, 4)
    write_npy_shards(path, np.split(whole, 4))
    rows = np.random.default_rng(0).permutation(len(whole))[:2_000]
    return open_shards(path, engine="numpy"), whole, rows


@pytest.mark.parametrize("nbytes", [0, 100, 4_096, 400_000])
def test_a_mapped_file_that_shrinks(tmp_path, nbytes):
    """A file that is cut after it was mapped is an error that names it, and does not end the process."""
    ds, whole, rows = shuffled(tmp_path / "set")
    np.testing.assert_array_equal(ds[rows].compute(), whole[rows])
    os.truncate(tmp_path / "set/shard_0002.npy", nbytes)
    for _ in range(2):
        with pytest.raises(ShardChangedError, match="shard_0002"):
            ds[rows].compute()
    np.testing.assert_array_equal(ds[rows % 50_000].compute(), whole[rows % 50_000])


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_a_mapped_file_that_is_replaced(tmp_path, policy):
    """A file that another one replaced after it was mapped is refused, or read as it is now, as on_change says."""
    _, whole, rows = shuffled(tmp_path / "set")
    ds = open_shards(tmp_path / "set", engine="numpy", on_change=policy)
    ds[rows].compute()
    other = -whole
    np.save(tmp_path / "new.npy", np.split(other, 4)[1])
    os.replace(tmp_path / "new.npy", tmp_path / "set/shard_0001.npy")
    if policy == "raise":
        with pytest.raises(ShardChangedError, match="shard_0001"):
            ds[rows].compute()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ds[rows].compute()
    now = np.concatenate([whole[:25_000], other[25_000:50_000], whole[50_000:]])
    np.testing.assert_array_equal(found, now[rows])


@pytest.mark.parametrize("handler", ["none", "faulthandler", "python"])
def test_bus_errors_of_others_still_count(tmp_path, handler):
    """A bus error outside our copies ends the process as it would have: by that signal, whoever had a handler."""
    import subprocess
    import sys

    shuffled(tmp_path / "set")
    code = f"""
import faulthandler, mmap, os, signal, sys
import numpy as np, lazyshards
if {handler!r} == "faulthandler":
    faulthandler.enable(open(os.devnull, "w"))
ds = lazyshards.open_shards({str(tmp_path / "set")!r}, engine="numpy")
ds[np.arange(0, 90_000, 7)[::-1].copy() ^ 1].compute()
if {handler!r} == "python":
    faulthandler.enable(open(os.devnull, "w"))
    ds[np.arange(0, 90_000, 7)[::-1].copy() ^ 1].compute()
with open({str(tmp_path / "own")!r}, "wb+") as file:
    file.truncate(10_000)
    mapped = mmap.mmap(file.fileno(), 10_000)
    file.truncate(0)
    print(mapped[5_000])
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGBUS, done.stderr
