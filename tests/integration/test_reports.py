"""Faults that users of other software reported, each told again as what must be true here."""

import hashlib
import os
import pickle
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lazyshards import open_shards, write_shards
from lazyshards.errors import LayoutError, LazyShardsError, ShardReadError
from lazyshards.testing import RecordingStorage, assert_same, npy_bytes, with_storage, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")


def block(start, rows, width=3, dtype="f4"):
    """Return rows whose elements tell the global row that they belong to."""
    return np.arange(start * width, (start + rows) * width).reshape(rows, width).astype(dtype)


def shards(directory, counts, **options):
    """Write such rows as shards, and return the directory and all of them."""
    starts = np.cumsum([0, *counts]).tolist()
    arrays = [block(start, rows, **options) for start, rows in zip(starts, counts, strict=False)]
    write_npy_shards(directory, arrays)
    return directory, np.concatenate(arrays)


def digests(directory):
    """Return a digest of each file of a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def free_gib():
    """Return the memory that can be had, in GiB; 0 where the system does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        return 0
    return int(found[1]) / 2**20 if found else 0


# Empty shards -----------------------------------------------------------------------------------------------------


def test_empty_shards_anywhere(tmp_path):
    """Shards without rows at the start, in the middle and at the end leave every row in its place."""
    directory, whole = shards(tmp_path, [0, 0, 3, 0, 2, 0, 0, 4, 0])
    ds = open_shards(directory)
    assert_same(ds.compute(), whole)
    for i in range(9):
        assert_same(ds[i].compute(), whole[i])


def test_empty_data_at_a_page_border(tmp_path):
    """A file that ends where its data would begin, at a page border, is an empty shard."""
    for i, (rows, header_nbytes) in enumerate([(0, 4096), (5, 4096), (0, 8192)]):
        (tmp_path / f"s_{i}.npy").write_bytes(npy_bytes(block(0, rows), header_nbytes=header_nbytes))
    assert_same(open_shards(tmp_path).compute(), block(0, 5))


def test_nothing_but_empty_shards(tmp_path):
    """A dataset of empty shards has its row shape, slices to nothing, and has no row 0."""
    directory, _ = shards(tmp_path, [0, 0])
    ds = open_shards(directory)
    assert_same(ds.compute(), block(0, 0))
    assert_same(ds[0:10].compute(), block(0, 0))
    assert list(ds) == []
    with pytest.raises(IndexError):
        ds[0]


def test_rows_without_elements(tmp_path):
    """Rows of width 0 are counted and computed."""
    directory, _ = shards(tmp_path, [4, 2], width=0)
    ds = open_shards(directory)
    assert_same(ds.compute(), np.zeros((6, 0), "f4"))
    assert_same(ds[1:3].compute(), np.zeros((2, 0), "f4"))


# Damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [-5, -12, 40, 0], ids=["tail", "row", "head", "empty"])
def test_truncated_shards_are_told_and_left_alone(tmp_path, cut):
    """A truncated shard is an error that names it, and no file is repaired, grown or changed by reading."""
    directory, _ = shards(tmp_path, [4, 6, 3])
    path = directory / "shard_0001.npy"
    path.write_bytes(path.read_bytes()[:cut])
    before = digests(directory)
    with pytest.raises(LayoutError, match=r"shard_0001\.npy"):
        open_shards(directory)
    assert digests(directory) == before


def test_reading_changes_no_file(tmp_path):
    """Opening, computing and iterating change neither a file nor its times."""
    directory, _ = shards(tmp_path, [4, 6])
    before = [(path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(directory.iterdir())]
    ds = open_shards(directory)
    ds.compute()
    list(ds)
    assert [(path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(directory.iterdir())] == before


def test_the_odd_shard_may_be_the_first(tmp_path):
    """Where the first shard is the odd one of two kinds, the error names a file and both kinds."""
    write_npy_shards(tmp_path, [block(0, 3, dtype="f8"), block(3, 2)])
    with pytest.raises(LayoutError, match=r"(?s)shard_000[01]\.npy") as caught:
        open_shards(tmp_path)
    assert "float64" in str(caught.value)
    assert "float32" in str(caught.value)


@pytest.mark.parametrize(
    "dtypes",
    [
        ([("a", "<i4"), ("b", "<f8")], [("b", "<f8"), ("a", "<i4")]),
        (np.dtype([("a", "u1"), ("b", "<f8")]), np.dtype([("a", "u1"), ("b", "<f8")], align=True)),
        ([("a", "<i4")], [("b", "<i4")]),
    ],
    ids=["reordered", "padded", "renamed"],
)
def test_fields_that_do_not_agree(tmp_path, dtypes):
    """Fields in another order, with other padding or of another name are told, never matched by position."""
    write_npy_shards(tmp_path, [np.zeros(3, dtype) for dtype in dtypes], pattern="s{}.npy")
    with pytest.raises(LayoutError, match=r"s1\.npy"):
        open_shards(tmp_path)


def test_a_shard_that_vanishes_during_iteration(tmp_path, monkeypatch):
    """Iteration gives right rows up to a shard that vanished, then the error that names it."""
    monkeypatch.setattr("lazyshards.dataset._ITERATION_NBYTES", 24)
    directory, whole = shards(tmp_path, [4, 4, 4])
    found = []
    rows = iter(open_shards(directory))
    found.append(next(rows))
    (directory / "shard_0002.npy").unlink()
    with pytest.raises(ShardReadError, match=r"shard_0002\.npy"):
        found.extend(rows)
    assert_same(np.array(found), whole[:8])


# Size -------------------------------------------------------------------------------------------------------------

LONG = 2**31 + 1000
WIDE_ROWS, WIDTH = 2**19 + 2**14, 4096


def sparse(path, shape, marks):
    """Write a file of bytes that are 0 but for these, without writing the rest."""
    head = npy_bytes(np.empty((0, *shape[1:]), np.uint8), header_nbytes=128)
    head = head.replace(b"(0,", f"({shape[0]},".encode(), 1)
    head = head[:127].rstrip(b"\n ").ljust(127) + b"\n"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + int(np.prod(shape, dtype=object)))
        for at, value in marks.items():
            file.seek(len(head) + at)
            file.write(bytes([value]))


@pytest.fixture(scope="module")
def long_shards(tmp_path_factory):
    """Give a shard of more than 2**31 rows, and a small one."""
    directory = tmp_path_factory.mktemp("long")
    sparse(directory / "s0.npy", (LONG,), {0: 1, 2**31 - 1: 2, 2**31: 3, LONG - 1: 4})
    np.save(directory / "s1.npy", np.arange(100, 200, dtype="u1"))
    return directory


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(2**31 - 2, 2**31 + 2), [0, 2, 3, 0]),
        (slice(-102, -97), [0, 4, 100, 101, 102]),
        (2**31, 3),
        ([2**31, 0, LONG, -1], [3, 1, 100, 199]),
        (slice(2**31, None, -(2**31)), [3, 1]),
    ],
    ids=str,
)
def test_rows_beyond_31_bits(long_shards, engine, index, expected):
    """Rows on both sides of 2**31 are found, by slice, integer and array, on every engine."""
    ds = open_shards(long_shards, engine=engine)
    assert ds.shape == (LONG + 100,)
    assert_same(ds[index].compute(), np.array(expected, "u1"))


@pytest.mark.slow
@pytest.mark.skipif(free_gib() < 6, reason=f"needs 6 GiB of free memory, there are {free_gib():.1f}")
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_more_than_two_gibibytes_in_one_read(tmp_path, backwards):
    """A shard larger than what one call reads is complete: every byte on both sides of the limits."""
    marks = {0: 5, 0x7FFFF000 - 129: 6, 0x7FFFF000: 7, 2**31 - 1: 8, 2**31: 9, WIDE_ROWS * WIDTH - 1: 10}
    sparse(tmp_path / "s0.npy", (WIDE_ROWS, WIDTH), marks)
    ds = open_shards(tmp_path)
    found = ds[::-1].compute()[::-1] if backwards else ds.compute()
    assert found.shape == (WIDE_ROWS, WIDTH)
    at = np.fromiter(marks, np.int64)
    assert found[at // WIDTH, at % WIDTH].tolist() == list(marks.values())
    assert np.count_nonzero(found) == len(marks)


@pytest.mark.slow
@pytest.mark.skipif(free_gib() < 6, reason=f"needs 6 GiB of free memory, there are {free_gib():.1f}")
def test_more_than_two_gibibytes_in_one_tile(tmp_path):
    """One tile of more than 2 GiB, which one leaf reads in one piece, is complete."""
    from lazyshards.leaf import fill

    marks = {0: 5, 0x7FFFF000 - 129: 6, 0x7FFFF000: 7, 2**31: 9, WIDE_ROWS * WIDTH - 1: 10}
    sparse(tmp_path / "s0.npy", (WIDE_ROWS, WIDTH), marks)
    layout = open_shards(tmp_path)._layout
    out = np.full((WIDE_ROWS, WIDTH), 255, np.uint8)
    fill(out, range(WIDE_ROWS), layout, (range(WIDTH),))
    at = np.fromiter(marks, np.int64)
    assert out[at // WIDTH, at % WIDTH].tolist() == list(marks.values())
    assert np.count_nonzero(out) == len(marks)


def test_opening_a_huge_shard_reads_its_head(long_shards):
    """Opening a shard of 2 GiB and slicing it reads a few bytes."""
    ds = open_shards(long_shards)
    storage = RecordingStorage(ds._layout.storage)
    with_storage(ds, storage)[2**31 : 2**31 + 2].compute()
    assert storage.nbytes == 2


# Batches ----------------------------------------------------------------------------------------------------------


def joined(batches):
    """Return the rows of all batches."""
    return np.concatenate([np.asarray(batch) for batch in batches])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 9, 10, 11, 100, 2**40])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_bounds(tmp_path, size, drop_last):
    """Batches cross shards; the last is short, or left out; one larger than the dataset is the dataset, or nothing."""
    directory, whole = shards(tmp_path, [3, 4, 1, 2])
    found = [np.asarray(batch) for batch in open_shards(directory).batches(size, drop_last=drop_last)]
    if drop_last:
        assert [len(batch) for batch in found] == [size] * (10 // size)
    else:
        assert [len(batch) for batch in found] == [min(size, 10 - start) for start in range(0, 10, size)]
    if found:
        assert_same(np.concatenate(found), whole[: sum(map(len, found))])


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", None])
def test_batch_sizes_that_are_none(tmp_path, size):
    """A batch size that is no positive integer is refused at once."""
    directory, _ = shards(tmp_path, [3])
    with pytest.raises((ValueError, TypeError)):
        open_shards(directory).batches(size)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": True, "seed": 1}], ids=str)
def test_batches_of_nothing(tmp_path, options):
    """A dataset without rows has no batch, and asking does not hang."""
    directory, _ = shards(tmp_path, [0, 0])
    assert list(open_shards(directory).batches(4, **options)) == []


SHUFFLES = [{}, {"shuffle": True, "seed": 7}, {"shuffle": True, "seed": 7, "drop_last": True}]


@pytest.fixture
def uneven(tmp_path):
    """Give 53 rows in uneven shards, opened anew by each call."""
    directory, whole = shards(tmp_path, [9, 0, 14, 1, 11, 5, 13], width=2, dtype="i8")
    return (lambda: open_shards(directory)), whole


@pytest.mark.parametrize("options", SHUFFLES, ids=str)
def test_epochs_hold_every_row_once(uneven, options):
    """An epoch gives every row once, whole; with drop_last as many as fill batches; again in the same order."""
    ds, whole = uneven
    found = joined(ds().batches(8, **options))
    assert_same(joined(ds().batches(8, **options)), found)
    assert len(found) == (48 if options.get("drop_last") else 53)
    assert len(np.unique(found[:, 0])) == len(found)
    assert set(found[:, 0].tolist()) <= set(whole[:, 0].tolist())
    assert (found[:, 1] == found[:, 0] + 1).all()


@pytest.mark.parametrize("options", SHUFFLES, ids=str)
def test_a_state_continues_where_it_was_taken(uneven, options):
    """A state taken after any number of batches, pickled, gives exactly the batches that were left."""
    ds, _ = uneven
    full = [np.asarray(batch).copy() for batch in ds().batches(8, **options)]
    walked = ds().batches(8, **options)
    steps, states = iter(walked), []
    for expected in full:
        states.append(pickle.dumps(walked.state_dict()))
        assert_same(next(steps), expected)
    for done, state in enumerate(states):
        resumed = ds().batches(8, **options)
        resumed.load_state_dict(pickle.loads(state))  # noqa: S301  # our own
        assert_same(joined(resumed), np.concatenate(full[done:]))


def test_seeds_matter(uneven):
    """Another seed is another order, and a shuffle is not the order on disk."""
    ds, whole = uneven
    one, two = (joined(ds().batches(8, shuffle=True, seed=seed)) for seed in (1, 2))
    assert not np.array_equal(one, two)
    assert not np.array_equal(one, whole)


def test_a_state_reproduces_an_unseeded_shuffle(uneven):
    """Without a seed, the state of one rank gives its order on another, and no global generator is used."""
    ds, whole = uneven
    np.random.seed(1)  # noqa: NPY002  # the global generator is what is watched
    random.seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    batches = ds().batches(6, shuffle=True, seed=None)
    state = pickle.dumps(batches.state_dict())
    found = joined(batches)
    assert sorted(found[:, 0].tolist()) == whole[:, 0].tolist()
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before  # noqa: NPY002
    other = ds().batches(6, shuffle=True, seed=None)
    other.load_state_dict(pickle.loads(state))  # noqa: S301  # our own
    assert_same(joined(other), found)


def test_a_shard_that_vanishes_between_batches(tmp_path):
    """Batches are right up to a shard that vanished, then comes the error that names it, and no short batch."""
    directory, whole = shards(tmp_path, [4] * 6, width=2)
    ds = open_shards(directory)
    (directory / "shard_0003.npy").unlink()
    found = []
    with pytest.raises(LazyShardsError, match=r"shard_0003\.npy"):  # noqa: PT012  # the loop is what must fail
        for batch in ds.batches(3):
            found.append(np.asarray(batch).copy())  # noqa: PERF401  # those before the error are wanted
    assert all(len(batch) == 3 for batch in found)
    assert len(found) <= 4
    if found:
        assert_same(np.concatenate(found), whole[: 3 * len(found)])
    assert_same(ds[:10].compute(), whole[:10])


def test_unfinished_batches_do_not_keep_the_process(child):
    """A process that left batches unfinished ends by itself."""
    code = """
        import numpy as np, lazyshards
        np.save("shard_0.npy", np.arange(100.0))
        ds = lazyshards.open_shards("shard_0.npy", engine="numpy")
        left = [iter(ds.batches(3)) for _ in range(3)]
        print([float(next(batches)[0]) for batches in left])
    """
    assert child(code).strip() == "[0.0, 0.0, 0.0]"


# Descriptors ------------------------------------------------------------------------------------------------------


FEW_HANDLES = """
    import os, resource, sys
    import numpy as np, lazyshards
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ds = lazyshards.open_shards("set", engine="numpy")
    rows = np.tile(np.arange(12.0).reshape(6, 2), (500, 1))
    order = np.random.default_rng(0).permutation(len(rows))
    print(len(ds.shards), np.array_equal(ds.compute(tiles_per_processor=20), rows))
    print(np.array_equal(ds[order].compute(), rows[order]))
    batches = list(ds.batches(16, shuffle=True, seed=0, prefetch=8))
    print(np.array_equal(np.sort(np.concatenate(batches), axis=None), np.sort(rows, axis=None)))
    os.remove(sys.argv[1])
    try:
        ds.compute()
    except lazyshards.ShardReadError:
        print(len(os.listdir("/proc/self/fd")) < 32)
"""


@pytest.mark.parametrize(
    ("format", "suffix", "file"),
    [("npy", "npy", ""), ("hdf5", "h5", ""), ("parquet", "parquet", ""), ("zarr", "zarr", "c/0/0")],
)
def test_more_shards_than_open_files(child, tmp_path, format, suffix, file):
    """More shards than the process may hold open are read, in every order, and an error in between leaks no handle."""
    pytest.importorskip({"hdf5": "h5py", "parquet": "pyarrow"}.get(format, format) if format != "npy" else "numpy")
    (first,) = write_shards(np.arange(12.0).reshape(6, 2), tmp_path / "first", format=format)
    (tmp_path / "set").mkdir()
    for i in range(500):
        copy = shutil.copytree if os.path.isdir(first) else shutil.copyfile
        copy(first, tmp_path / "set" / f"shard_{i}.{suffix}")
    gone = tmp_path / "set" / f"shard_499.{suffix}" / file
    assert gone.exists()
    assert child(FEW_HANDLES, gone).splitlines() == ["500 True", "True", "True", "True"]


def test_a_new_directory_under_an_old_name(tmp_path):
    """A directory that was replaced as a whole since it was opened is told by its shards, not mixed with the old."""
    directory, whole = shards(tmp_path / "now", [3, 2])
    ds = open_shards(directory)
    other, _ = shards(tmp_path / "next", [3, 2], dtype="f4")
    os.rename(directory, tmp_path / "old")  # as a deployment does it
    os.rename(other, directory)
    with pytest.raises(LazyShardsError, match="shard_0000"):
        ds.compute()
    assert_same(open_shards(directory).compute(), whole)
