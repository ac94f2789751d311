import ctypes
import mmap
import os
import threading

import numpy as np
import pytest

from lazyshards import mix, open_shards, warming, zip_shards
from lazyshards.testing import write_npy_shards
from lazyshards.warming import Warming, is_cold, plan_warming

pytestmark = pytest.mark.usefixtures("on_numpy")


def forget(paths):
    """Take files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@pytest.fixture
def paths(tmp_path):
    """Write 4 shards of 8 MiB, and take them out of the page cache."""
    paths = write_npy_shards(tmp_path / "set", np.split(np.arange(4 << 20).reshape(-1, 32), 4))
    forget(paths)
    ds = open_shards(tmp_path / "set")
    if not is_cold(ds._layout):
        pytest.skip("this file system does not tell whether a read would wait")
    return paths


@pytest.fixture
def ds(paths):
    """Open them."""
    return open_shards(os.path.dirname(paths[0]))


def resident(path):
    """Return whether all of a file is in memory."""
    whole = np.memmap(path, mode="r")
    pages = np.zeros(-(-whole.size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(whole.ctypes.data, whole.size, pages.ctypes.data) == 0
    return bool((pages & 1).all())


def warmer():
    """Return the thread that reads front to back, if there is one."""
    return next((each for each in threading.enumerate() if each.name == "lazyshards-warming"), None)


def test_looking_leaves_files_cold(ds):
    """To see whether files are in memory does not bring them there."""
    for _ in range(5):
        assert is_cold(ds._layout)


def test_files_in_memory_are_not_cold(ds, paths):
    """Files that were read are in memory, and nothing is to be read front to back."""
    ds.compute()
    assert not is_cold(ds._layout)
    assert plan_warming(ds._layout, len(ds)) == Warming()


def test_what_is_worth_it(ds, paths, monkeypatch):
    """Files are read front to back if single rows would take as many bytes, and if all of them fit into memory."""
    nbytes = sum(map(os.path.getsize, paths))
    enough = -(-nbytes // (256 + 4_096))
    assert plan_warming(ds._layout, enough).nbytes == nbytes
    assert plan_warming(ds._layout, enough - 1) == Warming()
    monkeypatch.setattr(warming, "free_nbytes", lambda: 2 * nbytes - 1)
    assert plan_warming(ds._layout, len(ds)) == Warming()


def test_files_are_read_beside_the_work(ds, paths, monkeypatch):
    """Until it is left, the files are read; then they are in memory, and the thread is gone."""
    monkeypatch.setattr(warming, "_READ_NBYTES", 4_096)  # long enough for its thread to be seen
    planned = plan_warming(ds._layout, len(ds))
    with planned.under_way():
        thread = warmer()
        thread.join()
        assert all(map(resident, paths))
    assert not thread.is_alive()


def test_it_ends_when_it_is_left(ds):
    """Leaving it ends the reading, wherever it is."""
    with plan_warming(ds._layout, len(ds)).under_way():
        pass
    assert warmer() is None


def test_a_file_that_is_gone_is_left_to_who_needs_it(ds, paths):
    """A file that vanished ends the reading, without a word."""
    planned = plan_warming(ds._layout, len(ds))
    os.remove(paths[0])
    with planned.under_way():
        thread = warmer()
        if thread is not None:
            thread.join()
    assert not resident(paths[1])


@pytest.mark.parametrize("kind", ["dataset", "bundle", "mixture"])
def test_quality_tells_it(ds, paths, kind):
    """The report of a shuffled epoch says how many bytes are read front to back; in file order there are none."""
    source = {"dataset": ds, "bundle": zip_shards(x=ds), "mixture": mix({ds[:]: 1})}[kind]
    nbytes = sum(map(os.path.getsize, paths))
    quality = source.batches(64, shuffle=True, seed=0).quality()
    assert quality.warmed_nbytes == nbytes
    assert "read front to back" in str(quality)
    assert source.batches(64).quality().warmed_nbytes == 0
    assert source.batches(64, shuffle=True, seed=0, prefetch=0).quality().warmed_nbytes == 0


def test_a_cold_epoch_is_the_same(ds, paths):
    """Rows come whole and in the same order, cold or not, and the files are in memory at the end."""
    batches = ds.batches(1_024, shuffle=True, seed=3)
    cold = [batch.copy() for batch in batches]
    assert all(map(resident, paths))
    batches.reset()
    for one, other in zip(cold, batches, strict=True):
        np.testing.assert_array_equal(one, other)
