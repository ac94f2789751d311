import ctypes
import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.errors import LazyShardsError, ShardChangedError, ShardChangedWarning, ShardReadError
from lazyshards.storage import LocalStorage, Part, Stamp, open_storage
from lazyshards.storage import heads as heads_module
from lazyshards.storage import local as local_module
from lazyshards.testing import StorageConformance, assert_same, example_array, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")

WHOLE = np.arange(30, dtype="f4").reshape(10, 3)


class TestLocalStorage(StorageConformance):
    """Files of this machine."""

    def make(self, root, files):
        """Write the files below the test's own directory."""
        for name, data in files.items():
            (root / name).write_bytes(data)
        return LocalStorage(), str(root)

    def change(self, path, data):
        """Write the file again."""
        Path(path).write_bytes(data)


@pytest.fixture
def files(tmp_path):
    """Three shards of ten rows of three, as Paths."""
    return [Path(path) for path in write_npy_shards(tmp_path / "set", np.split(WHOLE, [3, 7]))]


# Changes since the dataset was opened -----------------------------------------------------------------------------


def grow(path):
    """Add bytes to the end."""
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path):
    """Take the last byte away."""
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    """Take all bytes away."""
    os.truncate(path, 0)


def rewrite(path):
    """Write to the file in place, keeping its size."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(128)
        file.write(b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path):
    """Put another file of the same size and time in its place."""
    status = path.stat()
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


CHANGES = [grow, shrink, empty, rewrite, replace]
SAYS = {
    grow: "held 176 bytes and now holds 180",
    shrink: "held 176 bytes and now holds 175",
    empty: "held 176 bytes and now holds 0",
    rewrite: "written to",
    replace: "another file of the same size",
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_raise(files, change):
    """Every change of a shard since it was opened is an error that names it, says what changed and what to do."""
    ds = open_shards(files)
    change(files[1])
    with pytest.raises(ShardChangedError, match="open the dataset again") as caught:
        ds.compute()
    assert files[1].name in str(caught.value)
    assert SAYS[change] in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_untouched_shards_are_read_all_the_same(files, change):
    """A change of one shard does not matter to rows of the others, and opening again reads what is there."""
    ds = open_shards(files)
    change(files[1])
    assert_same(ds[:3].compute(), WHOLE[:3])
    assert_same(ds[7:].compute(), WHOLE[7:])


@pytest.mark.parametrize("change", [grow, rewrite, replace])
def test_changes_warn(files, change):
    """on_change="warn" reads the changed shard, and warns once for each compute with its name."""
    ds = open_shards(files, on_change="warn")
    change(files[1])
    with pytest.warns(ShardChangedWarning, match=files[1].name):
        found = ds.compute()
    assert_same(found[:3], WHOLE[:3])
    assert found.shape == WHOLE.shape


@pytest.mark.parametrize("change", [grow, replace])
def test_changes_are_ignored(files, change):
    """on_change="ignore" reads what is there, without a word."""
    ds = open_shards(files, on_change="ignore")
    change(files[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(ds.compute(), WHOLE)


@pytest.mark.parametrize("on_change", ["warn", "ignore"])
@pytest.mark.parametrize("change", [shrink, empty])
@pytest.mark.filterwarnings("ignore::lazyshards.ShardChangedWarning")
def test_missing_rows_are_never_ignored(files, change, on_change):
    """No policy makes rows of what a shard has lost: it is an error that names the shard."""
    ds = open_shards(files, on_change=on_change)
    change(files[1])
    with pytest.raises(ShardReadError, match=rf"{files[1].name}.*truncated"):
        ds.compute()


def test_vanished(files):
    """A shard that vanished is an error that names it and says that it was there."""
    ds = open_shards(files)
    files[1].unlink()
    with pytest.raises(ShardReadError, match=rf"{files[1].name}.*it was there when the dataset was opened"):
        ds.compute()


def test_vanished_directory(files):
    """A shard whose place became a directory, or lost its directory, is an error that names it."""
    ds = open_shards(files)
    files[1].unlink()
    files[1].mkdir()
    with pytest.raises(LazyShardsError, match=files[1].name):
        ds.compute()
    files[0].parent.rename(files[0].parent.with_name("moved"))
    with pytest.raises(ShardReadError, match="shard_0000"):
        ds.compute()


@pytest.mark.parametrize("change", [shrink, rewrite])
def test_large_results_are_not_returned_half_read(tmp_path, change):
    """A change that one of several tiles meets fails the compute, and leaves the engine able to work."""
    whole = example_array((3000, 100), "f8")
    files = [Path(path) for path in write_npy_shards(tmp_path, np.split(whole, 3))]
    ds = open_shards(files)
    change(files[2])
    with pytest.raises(ShardChangedError, match=files[2].name):
        ds.compute(tiles_per_processor=4)
    assert_same(ds[:2000].compute(tiles_per_processor=4), whole[:2000])


def test_a_change_during_the_read_is_seen(files, monkeypatch):
    """The stamp is compared after the bytes were read: a writer that comes in between is noticed."""
    ds = open_shards(files)
    real = os.preadv

    def change_then_read(fd, buffers, offset):
        count = real(fd, buffers, offset)
        rewrite(files[1])
        return count

    monkeypatch.setattr(os, "preadv", change_then_read)
    with pytest.raises(ShardChangedError, match=files[1].name):
        ds[4:5].compute()


def test_inodes_beyond_63_bits(files, monkeypatch):
    """A file system whose inode numbers use all 64 bits is not taken for one that changes."""
    real = os.fstat

    def fstat(fd):
        status = list(real(fd))
        status[1] |= 1 << 63
        return os.stat_result(status, {"st_mtime_ns": 7})

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(heads_module, "find_library", lambda: None)
    assert_same(open_shards(files).compute(), WHOLE)


# Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 5, 7, 100])
def test_short_reads_are_continued(files, monkeypatch, most):
    """A read that returns less than was asked for, as a network file system may, is continued."""
    real = os.preadv

    def preadv(fd, buffers, offset):
        return real(fd, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert_same(open_shards(files).compute(), WHOLE)


@pytest.mark.parametrize("limit", [1, 16, 35, 36, 37, 48])
def test_reads_beyond_the_limit_of_one_call(files, monkeypatch, limit):
    """A read of more than one call returns is made of several, none above the limit, and is complete."""
    real, sizes = os.preadv, []

    def preadv(fd, buffers, offset):
        sizes.append(len(buffers[0]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(local_module, "_MOST_NBYTES", limit)
    monkeypatch.setattr(os, "preadv", preadv)
    assert_same(open_shards(files).compute(), WHOLE)
    assert max(sizes) <= limit


def test_input_output_errors_name_the_shard(files, monkeypatch):
    """An error of the device is an OSError that names the shard, with the system's words and its cause."""
    ds = open_shards(files)

    def preadv(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ShardReadError, match=rf"{files[1].name}.*Input/output error") as caught:
        ds[4:6].compute()
    assert caught.value.__cause__.errno == 5


def test_open_files_do_not_pile_up(files):
    """However often and however unluckily shards are read, no file stays open."""
    ds, before = open_shards(files), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        ds.compute()
    files[1].unlink()
    for _ in range(20):
        with pytest.raises(ShardReadError):
            ds.compute()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_heads_in_threads(tmp_path, monkeypatch):
    """Where a disk is slow the heads are read by threads, in the same order, errors in their place."""
    monkeypatch.setattr(heads_module, "_SLOW_SECONDS", 0)
    paths = []
    for i in range(300):
        (tmp_path / str(i)).write_bytes(bytes([i % 256]) * (i + 1))
        paths.append(str(tmp_path / str(i)))
    paths[200] += ".gone"
    heads = LocalStorage().heads(paths, 4)
    assert [head.data for head in heads] == [b"" if i == 200 else (bytes([i % 256]) * (i + 1))[:4] for i in range(300)]
    assert isinstance(heads[200].error, FileNotFoundError)


def test_pipes_do_not_hang(tmp_path):
    """The head of a named pipe is an error and no wait."""
    os.mkfifo(tmp_path / "pipe")
    (head,) = LocalStorage().heads([str(tmp_path / "pipe")], 4)
    assert head.error is not None


@pytest.mark.parametrize("rows", [slice(None), [9, 1, 4, 0, 2, 8, 3, 7, 5, 6]], ids=["read", "gathered"])
@pytest.mark.parametrize("on_change", ["raise", "warn", "ignore", "refresh"])
def test_a_pipe_in_the_place_of_a_shard(files, on_change, rows):
    """A named pipe that took a shard's name is an error when it is read, and no wait for somebody to write into it."""
    ds = open_shards(files, on_change=on_change)
    files[1].unlink()
    os.mkfifo(files[1])
    with pytest.raises(ShardReadError, match="shard_0001"):
        ds[rows].compute()
    with pytest.raises(ShardReadError, match="shard_0001"):
        LocalStorage().fetch([(str(files[1]), 0, 4)])
    LocalStorage().open(str(files[1])).close()


@pytest.mark.parametrize("name", ["a\0b.npy", "a\ud800b.npy"], ids=ascii)
def test_names_that_no_file_can_have(files, name):
    """A name in a list that cannot be one of a file is a fault of that file, beside those of others."""
    with pytest.raises(LazyShardsError, match="its name is not a path"):
        open_shards([*map(str, files), name])
    (head,) = LocalStorage().heads([name], 0)
    assert isinstance(head.error, OSError)


def test_offsets_beyond_any_file(files):
    """A read at a byte that no file can have is an error that names the file."""
    part = Part(str(files[0]), Stamp(0), 2**63, memoryview(bytearray(1)))
    with pytest.raises(ShardReadError, match=r"shard_0000.* beyond"):
        LocalStorage().fetch_into([part])


# Rights -----------------------------------------------------------------------------------------------------------


def without_root_rights(function):
    """Run a function in a thread of its own to which permission bits matter, even for root; raise what it raises."""

    class Head(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]  # ctypes wants it so

    class Data(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]

    caught = []

    def run():
        libc = ctypes.CDLL(None)
        head, data = Head(0x20080522, 0), (Data * 2)()
        if libc.capget(ctypes.byref(head), data) == 0:
            data[0].effective &= ~((1 << 1) | (1 << 2))  # to override permission, to read and search
            libc.capset(ctypes.byref(head), data)
        try:
            function()
        except BaseException as exc:  # noqa: BLE001  # raised again by the caller
            caught.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def test_permission_at_opening(files):
    """A shard that may not be read is an error that names it, and never fewer rows."""
    files[1].chmod(0)
    with pytest.raises(ShardReadError, match=rf"(?s)1 of 3 shards.*{files[1].name}.*Permission denied"):
        without_root_rights(lambda: open_shards(files[0].parent))


def test_permission_at_reading(files):
    """A shard that may no longer be read is an error that names it, and never zeros."""
    ds = open_shards(files)
    files[1].chmod(0)
    with pytest.raises(ShardReadError, match=rf"{files[1].name}.*Permission denied"):
        without_root_rights(ds.compute)


def test_permission_of_a_directory(files):
    """A directory that may not be listed is an error that names it."""
    files[0].parent.chmod(0)
    try:
        with pytest.raises(ShardReadError, match=r"set.*Permission denied"):
            without_root_rights(lambda: open_shards(files[0].parent))
    finally:
        files[0].parent.chmod(0o755)


# Which storage ----------------------------------------------------------------------------------------------------


def test_paths_of_this_machine_are_local():
    """Paths without a protocol are this machine's, made absolute."""
    storage, paths = open_storage(["/a/b/", "c"], None, "warn")
    assert isinstance(storage, LocalStorage)
    assert storage.on_change == "warn"
    assert paths == ["/a/b", f"{Path.cwd()}/c"]


def test_a_part_of_nothing(files):
    """A part of no bytes reads none, and its file is looked at all the same."""
    (head,) = LocalStorage().heads([str(files[0])], 1)
    LocalStorage().fetch_into([Part(str(files[0]), head.stamp, 0, memoryview(bytearray()))])
