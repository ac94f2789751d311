import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from lazyshards import ShardChangedError, native, open_shards
from lazyshards.errors import ShardReadError
from lazyshards.reductions import blocks
from lazyshards.storage import lending
from lazyshards.storage.base import Stamp
from lazyshards.testing import assert_same, write_npy_shards

pytestmark = [
    pytest.mark.usefixtures("on_numpy"),
    pytest.mark.skipif(native.find_library() is None, reason="the C library was not built"),
]


def stamp_of(path):
    """Return the stamp of a file as it is now."""
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


@pytest.fixture
def file(tmp_path):
    """Return a file of a megabyte and a bit, which is in the page cache, and its bytes."""
    path = tmp_path / "bytes"
    content = np.random.default_rng(0).integers(0, 256, (1 << 20) + 77, np.uint8)
    path.write_bytes(content.tobytes())
    return path, content


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (4095, 2), (64, 1 << 20), (0, (1 << 20) + 77), (1 << 20, 77)])
def test_lent_bytes_are_the_files(file, offset, nbytes):
    """What is lent is what the file holds, read-only, and good until it is taken back."""
    path, content = file
    lender = lending.Lender()
    lent = lender.lend(str(path), stamp_of(path), offset, nbytes)
    assert_same(lent.copy(), content[offset : offset + nbytes])
    assert not lent.flags.writeable
    assert lender.take_back()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (0, 0), (0, (1 << 20) + 78), (1 << 62, 1)])
def test_nothing_beyond_the_file(file, offset, nbytes):
    """Bytes that the file has not are not lent."""
    assert lending.Lender().lend(str(file[0]), stamp_of(file[0]), offset, nbytes) is None


def test_no_other_file(file):
    """A file that is not the one that was opened, or that is gone, is not lent."""
    path, _ = file
    stamp = stamp_of(path)
    assert lending.Lender().lend(str(path), stamp._replace(mtime_ns=stamp.mtime_ns + 1), 0, 5) is None
    path.unlink()
    assert lending.Lender().lend(str(path), stamp, 0, 5) is None


def test_what_is_not_in_memory_is_not_lent(file):
    """Bytes that would have to be waited for are not lent: reading them is quicker."""
    path, _ = file
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert lending.Lender().lend(str(path), stamp_of(path), 0, 1 << 20) is None


@pytest.mark.parametrize("change", ["written", "replaced"])
def test_a_change_is_noticed(file, change):
    """What was lent of a file that was written to, or replaced, is worth nothing."""
    path, content = file
    lender = lending.Lender()
    assert lender.lend(str(path), stamp_of(path), 0, 4096) is not None
    if change == "written":
        path.write_bytes(content[::-1].tobytes())
        os.utime(path, ns=(1, os.stat(path).st_mtime_ns + 1_000_000))
    else:
        copy = path.with_name("copy")
        copy.write_bytes(content.tobytes())
        os.replace(copy, path)
    assert not lender.take_back()
    assert lender.take_back()  # nothing is left of it


def test_a_file_cut_off_gives_zeros_once(file):
    """Looking at bytes that are gone ends nothing, also where the stamp is put back; the next loan is a new map."""
    path, content = file
    stamp, lender = stamp_of(path), lending.Lender()
    lent = lender.lend(str(path), stamp, 0, 1 << 20)
    os.truncate(path, 8192)
    assert int(lent[8192:].sum()) == 0
    with path.open("r+b") as again:  # the same inode, with its content back
        again.write(content.tobytes())
    os.utime(path, ns=(1, stamp.mtime_ns))
    assert stamp_of(path) == stamp
    assert not lender.take_back()
    again = lending.Lender()
    assert_same(again.lend(str(path), stamp, 0, 1 << 20).copy(), content[: 1 << 20])
    assert again.take_back()


def test_another_signal_handler_is_left_its_own(tmp_path):
    """A bus error that is not of what was lent ends the process as before."""
    program = f"""
        import faulthandler, mmap, os, numpy as np
        faulthandler.enable()
        from lazyshards.storage import lending
        from lazyshards.storage.base import Stamp
        path = {str(tmp_path / "bytes")!r}
        open(path, "wb").write(bytes(1 << 20))
        status = os.stat(path)
        lender = lending.Lender()
        lender.lend(path, Stamp(status.st_size, status.st_mtime_ns, status.st_ino), 0, 1 << 20)
        with open(path, "r+b") as file:
            own = mmap.mmap(file.fileno(), 0)
        os.truncate(path, 0)
        own[5000]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode < 0, done.stderr
    assert "Bus error" in done.stderr


@pytest.fixture
def shards(tmp_path):
    """Write npy shards of which runs cross the borders, and return the directory and all rows."""
    whole = np.random.default_rng(3).standard_normal((30_000, 24), "f4")
    whole[17::1000, 3] = np.nan
    write_npy_shards(tmp_path / "set", np.split(whole, [5_000, 5_000, 5_010, 21_003]))
    return tmp_path / "set", whole


REDUCTIONS = {
    "sum": lambda ds: ds.sum(dtype="f8"),
    "mean by column": lambda ds: ds.mean(axis=0),
    "mean by row": lambda ds: ds.mean(axis=1),
    "std": lambda ds: ds.std(axis=0),
    "nanstd": lambda ds: ds.nanstd(axis=0),
    "nansum": lambda ds: ds.nansum(),
    "max": lambda ds: ds.max(axis=0),
    "nanargmin": lambda ds: ds.nanargmin(axis=0),
    "count_nonzero": lambda ds: ds.count_nonzero(axis=0),
    "any": lambda ds: ds.any(axis=1),
    "gram": lambda ds: ds.gram(),
    "cov": lambda ds: ds.cov(),
    "histogram": lambda ds: ds.histogram(9, (-2, 2))[0],
    "stats": lambda ds: ds.stats().std,
    "median": lambda ds: ds.median(axis=0),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("rows", [slice(None), slice(3, 22_222), slice(None, None, -1)], ids=str)
def test_lent_blocks_give_the_same_bits(shards, monkeypatch, name, rows):
    """A reduction of blocks that are lent is, to the bit, that of blocks that are read."""
    monkeypatch.setattr(blocks, "RUN_NBYTES", 1 << 19)
    lent = []
    lend = blocks.Lender.lend
    monkeypatch.setattr(blocks.Lender, "lend", lambda *given: lent.append(given) or lend(*given))
    ds = open_shards(shards[0], engine="numpy")[rows]
    found = REDUCTIONS[name](ds)
    assert bool(lent) == (name != "median" and rows.step is None)
    monkeypatch.setattr(blocks.Lender, "lend", lambda *_: None)
    assert_same(np.asarray(found), np.asarray(REDUCTIONS[name](ds)))


@pytest.mark.parametrize(
    ("harm", "error"),
    [(lambda path: os.truncate(path, 4096), ShardReadError), (lambda path: os.utime(path, (1, 1)), ShardChangedError)],
    ids=["cut off", "touched"],
)
def test_harm_meanwhile_raises(shards, monkeypatch, harm, error):
    """A shard that is cut off, or changed, while it is reduced raises; no result is made of some of each."""
    lend = blocks.Lender.lend

    def lend_and_harm(self, path, stamp, offset, nbytes):
        found = lend(self, path, stamp, offset, nbytes)
        if "0004" in path and not hasattr(harmed, "done"):
            harmed.done = True
            harm(path)
        return found

    harmed = threading.local()
    monkeypatch.setattr(blocks, "reader_count", lambda: 1)
    monkeypatch.setattr(blocks.Lender, "lend", lend_and_harm)
    ds = open_shards(shards[0], engine="numpy")
    with pytest.raises(error):
        ds.sum()


def test_small_runs_are_read(tmp_path, monkeypatch):
    """Shards of a few rows are read: a loan costs more than a copy."""
    monkeypatch.setattr(blocks.Lender, "lend", lambda *given: pytest.fail(f"lent {given}"))
    whole = np.arange(4_000.0).reshape(-1, 4)
    write_npy_shards(tmp_path / "set", np.split(whole, 10))
    assert open_shards(tmp_path / "set", engine="numpy").sum() == whole.sum()


def test_what_is_not_aligned_is_read(tmp_path, monkeypatch):
    """Elements that do not lie at a multiple of their size are read, since NumPy adds them up in another order."""
    monkeypatch.setattr(blocks.Lender, "lend", lambda *given: pytest.fail(f"lent {given}"))
    whole = np.random.default_rng(0).standard_normal((40_000, 3))
    (tmp_path / "shard.bin").write_bytes(b"xyz" + whole.tobytes())
    ds = open_shards(tmp_path / "shard.bin", format="raw", dtype="f8", row_shape=(3,), offset=3, engine="numpy")
    np.testing.assert_allclose(ds.sum(), whole.sum())
