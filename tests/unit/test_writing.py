import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from lazyshards import open_shards, write_shards, writing
from lazyshards.errors import FormatError, LayoutError, ShardReadError, UnsupportedDtypeError
from lazyshards.manifest import NAME
from lazyshards.testing import assert_same, example_array
from lazyshards.writers import local_work

pytestmark = pytest.mark.usefixtures("on_numpy")

FORMATS = ("arrow", "hdf5", "npy", "parquet", "raw", "zarr")


def listing(folder):
    """Return the names of all files below a directory, hidden ones included."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


class Counted:
    """An array that notes which rows are asked for."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.asked = []

    def __getitem__(self, rows):
        self.asked.append((rows.start, rows.stop))
        return self.array[rows]


# Round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("rows", [0, 1, 10, 12])
def test_round_trip(tmp_path, format, row_shape, rows):
    """What is written in any format is read back bit by bit, from shards of the length that was asked for."""
    whole = example_array((rows, *row_shape), "f4")
    paths = write_shards(whole, tmp_path / "set", format=format, rows_per_shard=4)
    assert len(paths) == max(1, -(-rows // 4))
    # The columns of a table are an axis of its rows, unless one is asked for by its name.
    bare = {"columns": "data"} if format in {"arrow", "parquet"} and not row_shape else {}
    ds = open_shards(tmp_path / "set", **bare)
    assert ds.format == format
    assert [shard.path for shard in ds.shards] == paths
    assert [shard.rows for shard in ds.shards[:-1]] == [4] * (len(paths) - 1)
    assert_same(ds.compute(), whole)
    assert listing(tmp_path) == sorted([f"set/{name}" for name in listing(tmp_path / "set")] + ["set"])


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_are_written(tmp_path, format):
    """Shards of nothing but zeros, of either sign, are read back, and no part of them is taken for lost."""
    whole = np.zeros((10, 3))
    whole[4:8] = -0.0
    write_shards(whole, tmp_path / "set", format=format, rows_per_shard=4)
    assert_same(open_shards(tmp_path / "set").compute(), whole)
    assert np.array_equal(np.signbit(open_shards(tmp_path / "set").compute()), np.signbit(whole))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("counts", [(3, 0, 9, 1), (4, 4), (13,), (0,), (1, 1, 1)])
def test_iterators(tmp_path, format, counts):
    """Arrays of any length are cut and joined to shards of equal length."""
    whole = example_array((sum(counts), 3), "i4")
    paths = write_shards(
        iter(np.split(whole, np.cumsum(counts)[:-1])), tmp_path / "set", format=format, rows_per_shard=4
    )
    assert len(paths) == max(1, -(-len(whole) // 4))
    assert_same(open_shards(tmp_path / "set").compute(), whole)


@pytest.mark.parametrize("format", ["npy", "raw"])
@pytest.mark.parametrize("dtype", ["?", ">i2", "c16", "S3", "U4", "M8[ns]", "f2", [("a", "<i2"), ("b", ">f8", (2,))]])
def test_plain_dtypes(tmp_path, format, dtype):
    """Formats of plain bytes hold every dtype of plain values, as it is stored."""
    whole = np.zeros((5, 2), dtype)
    whole.reshape(-1).view("u1")[::7] = 1
    write_shards(whole, tmp_path / "set", format=format, rows_per_shard=2)
    ds = open_shards(tmp_path / "set")
    assert {shard.dtype for shard in ds.shards} == {np.dtype(dtype)}
    assert ds.compute().tobytes() == whole.astype(whole.dtype.newbyteorder("=")).tobytes()


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", ">i4", "u8", "f2", "f8", "M8[us]", "m8[s]"])
def test_table_dtypes(tmp_path, format, dtype):
    """Tables hold numbers, booleans and times."""
    whole = np.arange(10).astype(dtype).reshape(5, 2)
    write_shards(whole, tmp_path / "set", format=format, rows_per_shard=2)
    assert_same(open_shards(tmp_path / "set").compute(), whole)


@pytest.mark.parametrize(
    ("format", "array"),
    [
        ("parquet", np.zeros(3, "c8")),
        ("arrow", np.zeros(3, "S4")),
        ("parquet", np.zeros((3, 0), "f4")),
        ("hdf5", np.zeros(3, "U4")),
        ("hdf5", np.zeros(3, "M8[s]")),
        ("zarr", np.zeros(3, "M8[s]")),
        ("arrow", np.array(["NaT"], "M8[s]")),
        ("npy", np.array([None, 3])),
    ],
)
def test_refused_dtypes(tmp_path, format, array):
    """A dtype that a format cannot hold is refused by name, and nothing is left at the path."""
    with pytest.raises(UnsupportedDtypeError):
        write_shards(array, tmp_path / "set", format=format)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("format", ["parquet", "arrow", "hdf5"])
def test_compression(tmp_path, format):
    """Compressed shards read the same and are smaller."""
    whole = np.zeros((20_000, 4), "f8")
    kind = {"parquet": "gzip", "arrow": "lz4", "hdf5": "gzip"}[format]
    write_shards(iter([whole]), tmp_path / "set", format=format, rows_per_shard=15_000, compression=kind)
    ds = open_shards(tmp_path / "set")
    assert sum(shard.stamp.size for shard in ds.shards) < whole.nbytes / 4
    assert_same(ds.compute(), whole)


def test_datasets(tmp_path, opened):
    """A view of a dataset is written as it would be computed, casts and maps included."""
    ds, whole = opened((5, 0, 9))
    write_shards(ds[2:12, ::2].astype("f8").map(lambda rows: rows * 2), tmp_path / "out", rows_per_shard=3)
    assert_same(open_shards(tmp_path / "out").compute(), whole[2:12, ::2].astype("f8") * 2)


def test_batches(tmp_path, opened):
    """Batches in a shuffled order are written in that order."""
    ds, whole = opened((50, 30))
    batches = ds.batches(16, shuffle=True, seed=3)
    write_shards(batches, tmp_path / "out", rows_per_shard=33)
    expected = np.concatenate(list(ds.batches(16, shuffle=True, seed=3)))
    assert_same(open_shards(tmp_path / "out").compute(), expected)
    assert not np.array_equal(expected, whole)


def test_engines(tmp_path, opened, engine):
    """Arrays of every engine are written."""
    ds, whole = opened((5, 9))
    write_shards(ds.compute(engine=engine), tmp_path / "out", rows_per_shard=4)
    assert_same(open_shards(tmp_path / "out").compute(), whole)


def test_nbytes_per_shard(tmp_path):
    """A size in bytes is turned into rows, at least one."""
    whole = np.zeros((10, 4), "f4")
    assert len(write_shards(whole, tmp_path / "a", nbytes_per_shard=50)) == 4
    assert len(write_shards(whole, tmp_path / "b", nbytes_per_shard=1)) == 10
    assert len(write_shards(whole, tmp_path / "c")) == 1


def test_memory_is_bounded(tmp_path):
    """An array is read a block at a time, however long a shard is."""
    source = Counted(np.zeros((5_000, 1024), "f8"))
    write_shards(source, tmp_path / "set")
    assert max(stop - start for start, stop in source.asked) * 8192 <= 16 << 20
    assert source.asked[0][0] == 0
    assert source.asked[-1][1] == 5_000


def test_manifest_is_there(tmp_path):
    """What was written is opened without reading a header."""
    write_shards(np.arange(9), tmp_path / "set", rows_per_shard=4)
    assert "not read again" in repr(open_shards(tmp_path / "set", manifest="require"))


# Refusals ---------------------------------------------------------------------------------------------------------


def test_never_overwrites(tmp_path):
    """A dataset that is there stays as it is, unless it is to be replaced; then all of it goes."""
    write_shards(np.arange(9), tmp_path / "set", rows_per_shard=4)
    before = listing(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_shards(np.zeros(3), tmp_path / "set")
    assert listing(tmp_path) == before
    assert_same(open_shards(tmp_path / "set").compute(), np.arange(9))
    write_shards(np.zeros(3), tmp_path / "set", format="raw", overwrite=True)
    assert listing(tmp_path / "set") == sorted([NAME, "meta.json", "shard_00000.bin"])
    assert os.listdir(tmp_path) == ["set"]


@pytest.mark.parametrize("stranger", ["thesis.docx", "folder/a.npy"])
def test_other_files_are_never_replaced(tmp_path, stranger):
    """A directory that holds anything but shards is not replaced, whatever is asked."""
    (tmp_path / "set" / stranger).parent.mkdir(parents=True)
    (tmp_path / "set" / stranger).write_text("two years of work")
    with pytest.raises(FileExistsError, match="not replaced"):
        write_shards(np.zeros(3), tmp_path / "set", overwrite=True)
    assert (tmp_path / "set" / stranger).read_text() == "two years of work"


def test_a_file_is_never_replaced(tmp_path):
    """A file at the path is an error."""
    (tmp_path / "set").write_text("x")
    with pytest.raises(FileExistsError, match="it is a file"):
        write_shards(np.zeros(3), tmp_path / "set", overwrite=True)


def test_through_a_link(tmp_path):
    """A link to a directory stays one: what it leads to is written, and replaced, also from another file system."""
    (tmp_path / "far").mkdir()
    (tmp_path / "set").symlink_to(tmp_path / "far", target_is_directory=True)
    for rows, overwrite in ((example_array((5, 2), "f4"), False), (example_array((7, 2), "f4"), True)):
        paths = write_shards(rows, tmp_path / "set", rows_per_shard=3, overwrite=overwrite)
        assert paths[0] == str(tmp_path / "set" / "shard_00000.npy")
        assert_same(open_shards(tmp_path / "set", engine="numpy", manifest="require").compute(), rows)
    assert (tmp_path / "set").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["far", "set"]


def test_a_mount_point_is_told_before_it_is_written_to(tmp_path, monkeypatch):
    """A directory that cannot be renamed over is refused at once, not when all has been written."""
    (tmp_path / "set").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path / "set"))
    with pytest.raises(OSError, match="it is a mount point"):
        write_shards(example_array((5, 2), "f4"), tmp_path / "set")
    assert os.listdir(tmp_path) == ["set"]
    write_shards(example_array((5, 2), "f4"), tmp_path / "set" / "inner")


def test_onto_its_own_source(tmp_path):
    """A dataset can be rewritten in place: it is read to the end before it is replaced."""
    whole = example_array((20, 3), "f4")
    write_shards(whole, tmp_path / "set", rows_per_shard=3)
    ds = open_shards(tmp_path / "set")
    write_shards(ds[::-1], tmp_path / "set", rows_per_shard=7, overwrite=True)
    assert_same(open_shards(tmp_path / "set").compute(), whole[::-1])


def test_one_writer_at_a_time(tmp_path):
    """While one call writes to a path another is refused, and the first one ends well."""

    def blocks():
        yield np.zeros(3)
        with pytest.raises(FileExistsError, match="another process"):
            write_shards(np.ones(3), tmp_path / "set")
        yield np.zeros(3)

    write_shards(blocks(), tmp_path / "set", rows_per_shard=2)
    assert_same(open_shards(tmp_path / "set").compute(), np.zeros(6))


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        (np.float64(3), {}, ValueError),
        (iter([]), {}, ValueError),
        ([1.0, 2.0], {}, LayoutError),
        ([np.zeros((2, 3)), np.zeros((2, 4))], {}, LayoutError),
        ([np.zeros(2), np.zeros(2, "i4")], {}, LayoutError),
        ("text", {}, TypeError),
        (3, {}, TypeError),
        (np.zeros(3), {"format": "npz"}, FormatError),
        (np.zeros(3), {"rows_per_shard": 0}, ValueError),
        (np.zeros(3), {"nbytes_per_shard": 0}, ValueError),
        (np.zeros(3), {"rows_per_shard": 3, "nbytes_per_shard": 3}, ValueError),
        (np.zeros(3), {"compression": "gzip"}, TypeError),
        (np.zeros(3), {"format": "parquet", "compression": "nonsense"}, FormatError),
        (np.zeros(3), {"format": "hdf5", "compression": "nonsense"}, UnsupportedDtypeError),
    ],
)
def test_wrong_arguments(tmp_path, source, options, error):
    """What cannot be written is refused, and nothing appears at the path."""
    with pytest.raises(error):
        write_shards(source, tmp_path / "set", **options)
    assert not (tmp_path / "set").exists()


def test_options_for_a_path(tmp_path):
    """Options of a storage make no sense for a path of this machine."""
    with pytest.raises(ValueError, match="for URLs"):
        write_shards(np.zeros(3), tmp_path / "set", storage_options={"key": "a"})


# Interrupted ------------------------------------------------------------------------------------------------------


class Failing(Counted):
    """An array that cannot be read from some row on."""

    def __init__(self, array, until):
        super().__init__(array)
        self.until = until

    def __getitem__(self, rows):
        if rows.start >= self.until:
            raise ShardReadError("the disk is gone")
        return super().__getitem__(rows)


def interrupted(path, array, until, **options):
    """Begin to write an array, and fail at a row."""
    with pytest.raises(ShardReadError):
        write_shards(Failing(array, until), path, rows_per_shard=5, **options)
    assert not path.exists()


@pytest.fixture
def watched(monkeypatch):
    """Note which shards are written."""
    written = []
    real = writing._write_shard

    def write(make, target, *rest):
        written.append(os.path.basename(target))
        return real(make, target, *rest)

    monkeypatch.setattr(writing, "_write_shard", write)
    return written


def test_resumes(tmp_path, watched):
    """Shards that an interrupted call had finished, of the same rows, are not written again."""
    whole = example_array((20, 3), "f4")
    interrupted(tmp_path / "set", whole, 10)
    watched.clear()
    write_shards(whole, tmp_path / "set", rows_per_shard=5)
    assert watched == ["shard_00002.npy", "shard_00003.npy"]
    assert_same(open_shards(tmp_path / "set").compute(), whole)
    assert os.listdir(tmp_path) == ["set"]


def test_resume_compares_rows(tmp_path, watched):
    """A finished shard of other rows than the source has now is written again, and all after it."""
    whole = example_array((20, 3), "f4")
    interrupted(tmp_path / "set", whole, 15)
    watched.clear()
    whole[7] = 0
    write_shards(whole, tmp_path / "set", rows_per_shard=5)
    assert watched == ["shard_00001.npy", "shard_00002.npy", "shard_00003.npy"]
    assert_same(open_shards(tmp_path / "set").compute(), whole)


@pytest.mark.parametrize("other", [{"format": "raw"}, {"rows_per_shard": 4}])
def test_resume_of_something_else(tmp_path, other):
    """What was left by a call for other shards is removed."""
    whole = example_array((20, 3), "f4")
    interrupted(tmp_path / "set", whole, 10)
    write_shards(whole, tmp_path / "set", **{"rows_per_shard": 5, **other})
    assert_same(open_shards(tmp_path / "set").compute(), whole)
    assert len({Path(name).suffix for name in listing(tmp_path / "set")} - {".arrow", ".json"}) == 1


def test_shorter_source_on_resume(tmp_path):
    """A source that is shorter than at the interrupted call leaves no shard of the longer one."""
    whole = example_array((20, 3), "f4")
    interrupted(tmp_path / "set", whole, 15)
    write_shards(iter([whole[:7]]), tmp_path / "set", rows_per_shard=5)
    assert_same(open_shards(tmp_path / "set").compute(), whole[:7])


def test_datasets_resume_without_reading(tmp_path, opened, watched, monkeypatch):
    """A dataset whose files did not change is not read again for what is there already."""
    ds, whole = opened((10, 10))
    real = type(ds).__getitem__

    def failing(self, index):
        if index.start >= 10:
            raise ShardReadError("the disk is gone")
        return real(self, index)

    monkeypatch.setattr(type(ds), "__getitem__", failing)
    with pytest.raises(ShardReadError):
        write_shards(ds, tmp_path / "out", rows_per_shard=5)
    asked = []

    def noted(self, index):
        asked.append(index.start)
        return real(self, index)

    monkeypatch.setattr(type(ds), "__getitem__", noted)
    watched.clear()
    write_shards(ds, tmp_path / "out", rows_per_shard=5)
    assert watched == ["shard_00002.npy", "shard_00003.npy"]
    assert asked == [10, 15]
    monkeypatch.undo()
    assert_same(open_shards(tmp_path / "out", engine="numpy").compute(), whole)


def test_damaged_state(tmp_path):
    """A state that makes no sense is a state that is not there."""
    whole = example_array((20, 3), "f4")
    interrupted(tmp_path / "set", whole, 10)
    (tmp_path / ".set.lazyshards" / "state.json").write_text('{"wanted": 3')
    write_shards(whole, tmp_path / "set", rows_per_shard=5)
    assert_same(open_shards(tmp_path / "set").compute(), whole)


def test_without_an_atomic_exchange(tmp_path, monkeypatch):
    """Where the system cannot let two directories change places a dataset is replaced all the same."""
    write_shards(np.arange(9), tmp_path / "set")
    monkeypatch.setattr(local_work.ctypes, "CDLL", lambda *_, **__: object())
    write_shards(np.zeros(3), tmp_path / "set", overwrite=True)
    assert_same(open_shards(tmp_path / "set").compute(), np.zeros(3))
    assert os.listdir(tmp_path) == ["set"]


def test_progress(tmp_path, capsys):
    """A progress bar counts rows."""
    write_shards(np.zeros(3_000), tmp_path / "set", rows_per_shard=1_000, progress=True)
    assert "3,000 of 3,000 rows (100 %)" in capsys.readouterr().err


# The command ------------------------------------------------------------------------------------------------------


def test_convert(tmp_path, opened, capsys):
    """The command converts, refuses to overwrite, and says what it wrote."""
    from lazyshards.cli import main

    ds, whole = opened((5, 0, 9))
    source, target = ds.shards[0].path.rpartition("/")[0], str(tmp_path / "out")
    assert main(["convert", source, target, "--to", "parquet", "--nbytes-per-shard", "1K"]) == 0
    assert capsys.readouterr().out == f"{target}: 1 parquet shard, 14 rows\n"
    assert_same(open_shards(target).compute(), whole)
    assert main(["convert", source, target]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", source, target, "--overwrite", "--rows-per-shard", "2"]) == 0
    assert len(open_shards(target).shards) == 7
    assert main(["convert", source, target, "--rows-per-shard", "none"]) == 2


def test_light_import():
    """What writes a format is imported when it is needed."""
    assert "lazyshards.writers" in sys.modules
    assert json.loads("[]") == []


FULL = """
    import gc, resource, signal, sys
    import numpy as np, lazyshards
    from lazyshards import open_shards, write_shards
    target, format = sys.argv[1], sys.argv[2]
    whole = np.random.default_rng(0).random((40_000, 8))
    write_shards(whole[:100], target + "-warm", format=format)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
    sys.unraisablehook = lambda found: print("UNRAISABLE", found.exc_value)
    try:
        write_shards(whole, target, format=format, rows_per_shard=15_000)
    except OSError as exc:
        print(exc.errno, exc.filename, exc)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write_shards(whole, target, format=format, rows_per_shard=15_000)
    print(np.array_equal(open_shards(target, engine="numpy").compute().reshape(whole.shape), whole))
"""


@pytest.mark.parametrize("format", FORMATS)
def test_full_disk(tmp_path, child, format):
    """Where no more can be written the error names the shard and says what to do, and the next call goes on."""
    first, *rest = child(FULL, tmp_path / "set", format).splitlines()
    assert first.startswith(f"27 {tmp_path}/.set.lazyshards/data/shard_00000")
    assert "make room, and make the same call again" in first
    assert rest == ["True"]
