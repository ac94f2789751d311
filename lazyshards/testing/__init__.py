"""What tests of lazyshards, and of formats, storages and engines made for it, are written with.

Doubles that record or refuse reads, hypothesis strategies of shards and of indices, and one conformance class for
each Protocol: subclass it, say how to make the thing, and inherit its whole suite. NumPy is the oracle throughout.
"""

import itertools
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from lazyshards.dataset import ShardedDataset
from lazyshards.engines import find_engine
from lazyshards.errors import EngineError, LayoutError, LazyShardsError, ShardChangedError, ShardReadError
from lazyshards.formats import Fault, find_format
from lazyshards.layout import Shard
from lazyshards.opening import open_shards
from lazyshards.storage import Entry, Head, LocalStorage, OnChange, Part, Stamp, Storage

__all__ = [
    "DTYPES",
    "EngineConformance",
    "FormatConformance",
    "RaisingStorage",
    "RecordingStorage",
    "StorageConformance",
    "assert_same",
    "example_array",
    "index_chains",
    "indices",
    "layouts",
    "npy_bytes",
    "with_storage",
    "write_npy_shards",
]

Array: TypeAlias = npt.NDArray[Any]

Arraylike: TypeAlias = Any
"""An array of any engine, or anything else that ``np.asarray`` takes."""

Index: TypeAlias = Any
"""Anything that goes between the brackets."""

_Opened: TypeAlias = tuple[ShardedDataset, Array]
_Shards: TypeAlias = Callable[..., _Opened]
_Place: TypeAlias = tuple[Storage, str]

DTYPES = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
"""The dtypes that every engine holds."""


# Data -----------------------------------------------------------------------------------------------------------


def example_array(shape: Sequence[int], dtype: npt.DTypeLike, *, seed: int = 0) -> Array:
    """Return an array of reproducible bytes, so that NaN payloads, signs and extremes are among its elements.

    Parameters
    ----------
    shape : sequence of int
    dtype : dtype
        Text is made of digits; booleans are 0 or 1.
    seed : int

    Examples
    --------
    >>> example_array((2, 3), ">i2").dtype
    dtype('>i2')
    """
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    generator = np.random.default_rng(seed)
    if kind.kind in "SU":
        return generator.integers(0, 10 ** min(4, kind.itemsize), count).astype(kind).reshape(tuple(shape))
    raw = generator.integers(0, 256, count * kind.itemsize, np.uint8)
    return (raw & 1 if kind.kind == "b" else raw).view(kind).reshape(tuple(shape))


def npy_bytes(
    array: Array, *, version: tuple[int, int] = (1, 0), header_nbytes: int | None = None, descr: object = None
) -> bytes:
    """Return the bytes of a .npy file with any header that the format allows.

    Parameters
    ----------
    array : ndarray
        Written in Fortran order if it has only that.
    version : (int, int)
        Of the header.
    header_nbytes : int, optional
        Bytes before the data; by default the least that is a multiple of 64.
    descr : object, optional
        What the header says of the dtype; by default the truth.

    Examples
    --------
    >>> len(npy_bytes(np.arange(3, dtype="u1"), header_nbytes=200))
    203
    """
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    if descr is None:
        descr = array.dtype.descr if array.dtype.names else array.dtype.str
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {array.shape!r}, }}"
    body = text.encode("utf-8" if version >= (3, 0) else "latin-1")
    width = 2 if version == (1, 0) else 4
    start = 8 + width
    total = header_nbytes if header_nbytes is not None else -(-(start + len(body) + 1) // 64) * 64
    body = body.ljust(total - start - 1) + b"\n"
    return b"\x93NUMPY" + bytes(version) + len(body).to_bytes(width, "little") + body + array.tobytes("A")


def write_npy_shards(
    directory: str | os.PathLike[str],
    arrays: Sequence[Array],
    *,
    pattern: str = "shard_{:04d}.npy",
    first: int = 0,
) -> list[str]:
    """Write each array to a .npy file of its own, as it is (memory order, byte order), and return the paths.

    Parameters
    ----------
    directory : path
        Made if it is not there.
    arrays : sequence of ndarray
    pattern : str
        Name of a file, given its number.
    first : int
        Number of the first file.

    Examples
    --------
    >>> paths = write_npy_shards("set", [np.zeros((3, 2)), np.ones((0, 2))])
    >>> open_shards("set", engine="numpy").shape
    (3, 2)
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    paths = [str(root / pattern.format(number)) for number, _ in enumerate(arrays, first)]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    return paths


def assert_same(found: Arraylike, expected: Arraylike) -> None:
    """Assert that two arrays have the same shape, the same native dtype and, bit by bit, the same elements."""
    found, expected = np.asarray(found), np.asarray(expected)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    assert found.dtype == expected.dtype, f"dtype {found.dtype}, expected {expected.dtype}"
    if found.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(found, expected)
        raise AssertionError("equal elements of different bits")


# Doubles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordingStorage:
    """A storage that notes every read before it passes it on.

    Examples
    --------
    >>> paths = write_npy_shards("records", [np.arange(8.0)])
    >>> storage = RecordingStorage(LocalStorage())
    >>> ds = with_storage(open_shards(paths, engine="numpy"), storage)
    >>> ds[2:4].compute()
    array([2., 3.])
    >>> [(offset, nbytes) for path, offset, nbytes in storage.reads]
    [(144, 16)]
    """

    inner: Storage
    """What reads."""
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, first byte and number of bytes of each read, in the order in which they were asked for."""

    @property
    def on_change(self) -> OnChange:
        """What the inner storage does about a changed shard."""
        return self.inner.on_change

    @property
    def gap_nbytes(self) -> int:
        """Gap of the inner storage."""
        return self.inner.gap_nbytes

    @property
    def window_nbytes(self) -> int:
        """Window of the inner storage."""
        return self.inner.window_nbytes

    @property
    def paths(self) -> set[str]:
        """The files that were read."""
        return {path for path, _, _ in self.reads}

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
        return sum(nbytes for _, _, nbytes in self.reads)

    def find(self, path: str) -> tuple[str, list[Entry]]:
        """Pass it on: a listing reads no file."""
        return self.inner.find(path)

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        """Note one read for each path, and pass it on."""
        self.reads.extend([(path, 0, nbytes) for path in paths])
        return self.inner.heads(paths, nbytes)

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Note each range, and pass it on."""
        self.reads.extend(ranges)
        return self.inner.fetch(ranges)

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Note each part, and pass it on."""
        self.reads.extend([(part.path, part.offset, len(part.out)) for part in parts])
        self.inner.fetch_into(parts)

    def open(self, path: str) -> BinaryIO:
        """Note a read of no bytes, and pass it on."""
        self.reads.append((path, 0, 0))
        return self.inner.open(path)

    def local_path(self, path: str) -> str | None:
        """Note a read of no bytes, since whoever asks will read it, and pass it on."""
        self.reads.append((path, 0, 0))
        return self.inner.local_path(path)


@dataclass(frozen=True, slots=True)
class RaisingStorage:
    """A storage that raises on every read: what works on it reads nothing.

    Examples
    --------
    >>> paths = write_npy_shards("refuses", [np.arange(8.0)])
    >>> ds = with_storage(open_shards(paths, engine="numpy"), RaisingStorage())
    >>> ds[2:4].shape
    (2,)
    >>> ds[2:4].compute()
    Traceback (most recent call last):
    AssertionError: data was read
    """

    on_change: OnChange = "raise"
    """What it would do about a changed shard, if it read one."""
    gap_nbytes: int = 16 << 10
    """Gap of local files."""
    window_nbytes: int = 512 << 10
    """Window of local files."""

    def find(self, path: str) -> NoReturn:  # as a storage has it
        """Refuse."""
        raise AssertionError("data was read")

    def heads(self, paths: Sequence[str], nbytes: int) -> NoReturn:  # as a storage has it
        """Refuse."""
        raise AssertionError("data was read")

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> NoReturn:  # as a storage has it
        """Refuse."""
        raise AssertionError("data was read")

    def fetch_into(self, parts: Sequence[Part]) -> NoReturn:  # as a storage has it
        """Refuse."""
        raise AssertionError("data was read")

    def open(self, path: str) -> NoReturn:  # as a storage has it
        """Refuse."""
        raise AssertionError("data was read")

    def local_path(self, path: str) -> NoReturn:  # as a storage has it
        """Refuse."""
        raise AssertionError("data was read")


def with_storage(dataset: ShardedDataset, storage: Storage) -> ShardedDataset:
    """Return the same dataset, read through another storage that takes the same paths."""
    layout, selection, engine = dataset._layout, dataset._selection, dataset._engine  # noqa: SLF001  # the same package
    return ShardedDataset(replace(layout, storage=storage), selection, engine)


# Strategies -----------------------------------------------------------------------------------------------------


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    most_shards: int = 5,
    most_rows: int = 7,
    most_axes: int = 3,
) -> list[Array]:
    """Draw the arrays of a sharded dataset: empty ones among them, C or Fortran order, either byte order.

    Parameters
    ----------
    dtypes : sequence of str
        What is drawn from, without byte order.
    most_shards, most_rows : int
        Bounds of the number of shards, and of the rows of each.
    most_axes : int
        Bound of the number of axes, that of the rows included.
    """
    row_shape = tuple(draw(st.lists(st.integers(0, 4), max_size=most_axes - 1)))
    kind = np.dtype(draw(st.sampled_from(dtypes)))
    arrays = []
    for seed, rows in enumerate(draw(st.lists(st.integers(0, most_rows), min_size=1, max_size=most_shards))):
        array = example_array((rows, *row_shape), kind, seed=seed)
        array = array.astype(kind.newbyteorder(draw(st.sampled_from("<>"))))
        arrays.append(np.asarray(array, order=draw(st.sampled_from(("C", "F")))))
    return arrays


def _slices(length: int) -> st.SearchStrategy[slice]:
    """Draw any slice, those that reach beyond the ends and those of any step included."""
    bound = st.none() | st.integers(-length - 2, length + 2)
    step = st.none() | st.integers(-length - 1, length + 1).filter(bool) | st.sampled_from((1, -1))
    return st.builds(slice, bound, bound, step)


def _positions(length: int) -> st.SearchStrategy[Any]:
    """Draw a list, an index array of any integer dtype, or a mask."""
    masks = st.lists(st.booleans(), min_size=length, max_size=length).map(lambda mask: np.array(mask, bool))
    if not length:
        return masks | st.just(np.empty(0, np.int64)) | st.just([])
    numbers = st.lists(st.integers(-length, length - 1), max_size=2 * length)
    signed = st.builds(np.array, numbers, st.sampled_from((np.int8, np.int32, np.int64)))
    natural = st.lists(st.integers(0, length - 1), max_size=2 * length)
    unsigned = st.builds(np.array, natural, st.sampled_from((np.uint8, np.uint64)))
    return numbers | signed | unsigned | masks


def indices(shape: Sequence[int], *, arrays: bool = True) -> st.SearchStrategy[Any]:
    """Draw an index that NumPy takes for this shape and that can be lazy.

    Parameters
    ----------
    shape : sequence of int
    arrays : bool
        Whether the first axis is that of the rows, which masks and integer arrays may index.
    """

    def axis(number: int, length: int) -> st.SearchStrategy[Any]:
        either: st.SearchStrategy[Any] = _slices(length)
        if length:
            either |= st.integers(-length, length - 1)
        return either | _positions(length) if arrays and number == 0 else either

    axes = [axis(number, length) for number, length in enumerate(shape)]

    @st.composite
    def tuples(draw: st.DrawFn) -> tuple[Any, ...]:
        dots = draw(st.booleans())
        front = draw(st.integers(0, len(axes)))
        back = draw(st.integers(0, len(axes) - front)) if dots else 0
        items = [draw(strategy) for strategy in axes[:front]]
        if dots:
            items += [Ellipsis, *[draw(strategy) for strategy in axes[len(axes) - back :]]]
        return tuple(items)

    return axes[0] | tuples() if axes else tuples()


@st.composite
def index_chains(draw: st.DrawFn, shape: Sequence[int], *, most: int = 3) -> list[Any]:
    """Draw indices to be applied one after the other, each to what the one before it left.

    Parameters
    ----------
    shape : sequence of int
        Of the dataset.
    most : int
        Bound of their number.
    """
    chain: list[Any] = []
    left = np.broadcast_to(np.int8(0), tuple(shape))
    arrays = True
    for _ in range(draw(st.integers(0, most))):
        index = draw(indices(left.shape, arrays=arrays))
        first = index[0] if isinstance(index, tuple) and index else index
        if first is Ellipsis and isinstance(index, tuple) and 1 < len(index) == left.ndim + 1:
            first = index[1]
        arrays = arrays and not isinstance(first, int)
        chain.append(index)
        left = np.asarray(left[index])
    return chain


# Conformance ----------------------------------------------------------------------------------------------------


class FormatConformance:
    """What every format must do. Subclass it, set ``format`` and write :meth:`write`.

    Each array that is written becomes one shard, of a file whose name ends in the format's first suffix.
    """

    format: str
    """Name of the format."""
    options: Mapping[str, object] = {}
    """What ``open_shards`` needs to be told to read what :meth:`write` writes."""
    dtypes: Sequence[str] = DTYPES
    """The dtypes that the format can hold."""
    row_shapes: Sequence[tuple[int, ...]] = ((), (3,), (2, 3))
    """The row shapes that the format can hold."""
    head_nbytes = 4096
    """Bytes of a small file's shard that opening may read at most."""

    def write(self, path: Path, array: Array) -> None:
        """Write one shard."""
        raise NotImplementedError

    @pytest.fixture
    def shards(self, tmp_path: Path) -> _Shards:
        """Give a function that writes shards of these row counts, and returns them opened, and what they hold."""
        places = itertools.count()

        def make(
            counts: Sequence[int], row_shape: tuple[int, ...] = (3,), dtype: str = "f4"
        ) -> tuple[ShardedDataset, Array]:
            root = tmp_path / f"set_{next(places)}"
            root.mkdir()
            whole = example_array((sum(counts), *row_shape), dtype, seed=1)
            ends = np.cumsum(counts)
            for number, (end, count) in enumerate(zip(ends, counts, strict=True)):
                self.write(root / f"shard_{number}{self._suffix}", whole[end - count : end])
            return open_shards(root, format=self.format, engine="numpy", **self.options), whole

        return make

    @property
    def _suffix(self) -> str:
        return find_format(self.format).suffixes[0]

    def test_every_dtype_and_row_shape(self, shards: _Shards) -> None:
        """Every dtype in every row shape is read bit by bit as it was written."""
        for dtype, row_shape in itertools.product(self.dtypes, self.row_shapes):
            ds, whole = shards([2, 3], row_shape, dtype)
            assert_same(ds.compute(), whole)

    def test_every_slice(self, shards: _Shards) -> None:
        """Every slice across shards, empty ones among them, is NumPy's."""
        ds, whole = shards([0, 2, 0, 3, 1, 0])
        for start, stop, step in itertools.product(range(7), range(7), (1, 2, 5, -1, -2)):
            assert_same(ds[start:stop:step].compute(), whole[start:stop:step])

    def test_gathers(self, shards: _Shards) -> None:
        """Rows in any order, repeated, and by mask are NumPy's."""
        ds, whole = shards([4, 0, 5])
        for index in ([8, 0, 4, 4, 3], [0, 0], [5, 1, 3], np.arange(9) % 2 == 0):
            assert_same(ds[index].compute(), whole[index])

    def test_cells(self, shards: _Shards) -> None:
        """Slices and integers on the rows' own axes are NumPy's."""
        ds, whole = shards([4, 5], (2, 3)) if (2, 3) in self.row_shapes else shards([4, 5])
        for index in ((slice(None), 1), (slice(2, 7), slice(None, None, -1)), (3, 0), (slice(None, None, -2), -1)):
            assert_same(ds[index].compute(), whole[index])

    def test_opening_reads_little(self, shards: _Shards) -> None:
        """Inspecting a large shard reads its head and not its rows."""
        ds, _ = shards([20_000])
        storage = RecordingStorage(LocalStorage())
        (shard,) = find_format(self.format).inspect([ds.shards[0].path], storage, dict(self.options))
        assert isinstance(shard, Shard)
        assert storage.nbytes <= self.head_nbytes

    def test_only_touched_shards_are_read(self, shards: _Shards) -> None:
        """Rows of one shard are read from that shard alone."""
        ds, whole = shards([3, 4, 5])
        storage = RecordingStorage(LocalStorage())
        assert_same(with_storage(ds, storage)[4:6].compute(), whole[4:6])
        assert storage.paths == {ds.shards[1].path}

    def test_damage_is_told(self, shards: _Shards) -> None:
        """A file that is cut anywhere is an error of ours that names it, when it is opened or when it is read."""
        ds, _ = shards([5, 4])
        path = Path(ds.shards[1].path)
        data = path.read_bytes()
        for size in {0, 1, len(data) // 4, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:size])
            with pytest.raises(LazyShardsError, match=path.name):
                open_shards(path.parent, format=self.format, engine="numpy", **self.options).compute()

    def test_change_is_told(self, shards: _Shards) -> None:
        """A shard that was rewritten since it was opened is an error that names it."""
        ds, whole = shards([5, 4])
        path = Path(ds.shards[1].path)
        self.write(path, whole[:4])
        os.utime(path, ns=(1, 1))
        with pytest.raises(ShardChangedError, match=path.name):
            ds.compute()

    def test_faults_are_returned(self, shards: _Shards) -> None:
        """What is wrong with one file is returned in its place, and the others are inspected."""
        ds, _ = shards([5, 4])
        missing = ds.shards[0].path + ".gone"
        paths = [ds.shards[0].path, missing, ds.shards[1].path]
        found = find_format(self.format).inspect(paths, LocalStorage(), dict(self.options))
        assert [type(item) for item in found] == [Shard, Fault, Shard]

    def test_unknown_option(self, shards: _Shards) -> None:
        """An option that the format does not have is a TypeError that names it."""
        ds, _ = shards([1])
        with pytest.raises(TypeError, match="no_such_option"):
            open_shards(ds.shards[0].path, format=self.format, engine="numpy", no_such_option=1)

    def test_layout_pickles(self, shards: _Shards) -> None:
        """A dataset that travelled to another process reads the same."""
        ds, whole = shards([2, 3])
        assert_same(pickle.loads(pickle.dumps(ds)).compute(), whole)  # noqa: S301  # our own


class StorageConformance:
    """What every storage must do. Subclass it and write :meth:`make` and :meth:`change`."""

    def make(self, root: Path, files: Mapping[str, bytes]) -> tuple[Storage, str]:
        """Return a storage that holds these files in one directory, and the path of that directory."""
        raise NotImplementedError

    def change(self, path: str, data: bytes) -> None:
        """Replace the content of a file."""
        raise NotImplementedError

    @pytest.fixture
    def place(self, tmp_path: Path) -> tuple[Storage, str]:
        """Give a storage with two files, and their directory."""
        return self.make(tmp_path, {"a.bin": bytes(range(100)), "b.bin": b"0123456789"})

    def _part(self, storage: Storage, path: str, offset: int, nbytes: int) -> tuple[Part, bytearray]:
        buffer = bytearray(nbytes)
        (head,) = storage.heads([path], 1)
        return Part(path, head.stamp, offset, memoryview(buffer)), buffer

    def test_find(self, place: _Place) -> None:
        """A directory, a pattern, a file and nothing are told apart, with the entries of the first two."""
        storage, root = place
        kind, entries = storage.find(root)
        assert (kind, sorted(entry.path for entry in entries)) == ("directory", [f"{root}/a.bin", f"{root}/b.bin"])
        kind, entries = storage.find(f"{root}/[b]*.bin")
        assert (kind, [entry.path for entry in entries]) == ("glob", [f"{root}/b.bin"])
        assert storage.find(f"{root}/a.bin")[0] == "file"
        assert storage.find(f"{root}/c.bin")[0] == "missing"

    def test_listings_are_fresh(self, place: _Place) -> None:
        """A file that was added is found by the next listing."""
        storage, root = place
        storage.find(root)
        self.change(f"{root}/c.bin", b"new")
        assert len(storage.find(root)[1]) == 3

    def test_heads(self, place: _Place) -> None:
        """First bytes, at most as many as asked for, with the size; errors in their place."""
        storage, root = place
        a, missing, b = storage.heads([f"{root}/a.bin", f"{root}/none", f"{root}/b.bin"], 20)
        assert (a.data, a.stamp.size, a.error) == (bytes(range(20)), 100, None)
        assert (b.data, b.stamp.size) == (b"0123456789", 10)
        assert isinstance(missing.error, FileNotFoundError)
        assert missing.data == b""

    def test_fetch(self, place: _Place) -> None:
        """Every range in its order, shorter only where the file ends."""
        storage, root = place
        ranges = [(f"{root}/b.bin", 8, 5), (f"{root}/a.bin", 50, 3), (f"{root}/b.bin", 0, 2)]
        assert [bytes(data) for data in storage.fetch(ranges)] == [b"89", bytes([50, 51, 52]), b"01"]

    def test_fetch_into(self, place: _Place) -> None:
        """Every part is filled, of several files in any order."""
        storage, root = place
        parts, buffers = zip(
            *[
                self._part(storage, f"{root}/{name}", offset, nbytes)
                for name, offset, nbytes in (("a.bin", 90, 10), ("b.bin", 3, 4), ("a.bin", 0, 2))
            ],
            strict=True,
        )
        storage.fetch_into(parts)
        assert list(map(bytes, buffers)) == [bytes(range(90, 100)), b"3456", bytes([0, 1])]

    def test_fetch_into_nothing(self, place: _Place) -> None:
        """No parts are no work."""
        place[0].fetch_into([])

    def test_short_files_are_told(self, place: _Place) -> None:
        """A part beyond the end of its file is an error that names the file, never zeros."""
        storage, root = place
        part, _ = self._part(storage, f"{root}/b.bin", 5, 6)
        with pytest.raises(ShardReadError, match=r"b\.bin"):
            storage.fetch_into([part])

    def test_missing_files_are_told(self, place: _Place) -> None:
        """A file that is not there is an error that names it."""
        storage, root = place
        with pytest.raises(ShardReadError, match="none"):
            storage.fetch_into([Part(f"{root}/none", Stamp(4), 0, memoryview(bytearray(4)))])

    def test_changed_files_are_told(self, place: _Place) -> None:
        """A file with another stamp is an error that names it."""
        storage, root = place
        part, _ = self._part(storage, f"{root}/b.bin", 0, 4)
        self.change(f"{root}/b.bin", b"another content")
        with pytest.raises(ShardChangedError, match=r"b\.bin"):
            storage.fetch_into([part])

    def test_open(self, place: _Place) -> None:
        """The file that a library is given can seek and read."""
        storage, root = place
        with storage.open(f"{root}/b.bin") as file:
            file.seek(4)
            assert file.read(3) == b"456"

    def test_pickles(self, place: _Place) -> None:
        """A storage that travelled to another process reads the same."""
        storage, root = place
        again = pickle.loads(pickle.dumps(storage))  # noqa: S301  # our own
        assert bytes(again.fetch([(f"{root}/b.bin", 1, 2)])[0]) == b"12"

    def test_threads(self, place: _Place) -> None:
        """Threads that read at once get what they asked for."""
        storage, root = place
        wrong: list[int] = []

        def read(at: int) -> None:
            for _ in range(50):
                part, buffer = self._part(storage, f"{root}/a.bin", at, 10)
                storage.fetch_into([part])
                if bytes(buffer) != bytes(range(at, at + 10)):
                    wrong.append(at)

        threads = [threading.Thread(target=read, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class EngineConformance:
    """What every engine must do. Subclass it and give it a fixture ``engine`` that returns the engine's name."""

    @pytest.fixture
    def example(self, tmp_path: Path, engine: str) -> tuple[ShardedDataset, Array]:
        """Give a dataset of uneven shards on the engine, and what it holds."""
        whole = example_array((23, 4), "i4")
        write_npy_shards(tmp_path / "set", np.split(whole, [5, 5, 12, 13]))
        return open_shards(tmp_path / "set", engine=engine), whole

    @pytest.mark.parametrize(
        "index",
        [
            slice(None),
            slice(4, 14),
            slice(None, None, -3),
            slice(7, 7),
            slice(12, 13),
            7,
            -1,
            [22, 0, 5, 5, 4],
            (slice(None), slice(1, 3)),
            (slice(None, None, 2), 3),
            (20, 1),
            (slice(0, 0), 1),
            (slice(None), slice(2, 2)),
        ],
        ids=str,
    )
    def test_index(self, example: _Opened, index: Index) -> None:
        """The array is NumPy's: shape, dtype, elements; nothing, one row and one element included."""
        ds, whole = example
        assert_same(ds[index].compute(), whole[index])

    def test_result_type(self, example: _Opened, engine: str) -> None:
        """Every result is an array of the engine's own type, however small."""
        ds, _ = example
        module = {"numpy": "numpy", "legate": "cupynumeric", "cupy": "cupy"}.get(engine, engine)
        for index in (slice(None), slice(0, 0), 3, (3, 1)):
            assert type(ds[index].compute()).__module__.split(".")[0] == module

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dtype(self, tmp_path: Path, engine: str, dtype: str) -> None:
        """Every dtype arrives bit by bit, from either byte order."""
        whole = example_array((9, 3), dtype)
        arrays = [whole[:4].astype(whole.dtype.newbyteorder(">")), whole[4:]]
        paths = write_npy_shards(tmp_path, arrays)
        assert_same(open_shards(paths, engine=engine).compute(), whole)

    @pytest.mark.parametrize("tiles_per_processor", [1, 2, 7, 1000])
    def test_tiles(self, example: _Opened, tiles_per_processor: int) -> None:
        """However finely it is tiled, the result is the same."""
        ds, whole = example
        for index in (slice(None), slice(3, 22), [9, 2, 22, 2, 14], (slice(None), 2)):
            assert_same(ds[index].compute(tiles_per_processor=tiles_per_processor), whole[index])

    def test_above_the_small_way(self, tmp_path: Path, engine: str) -> None:
        """A result of several megabytes, which no short cut takes, is NumPy's: forwards, backwards, gathered."""
        whole = example_array((6000, 130), "f4")
        paths = write_npy_shards(tmp_path, np.split(whole, [1, 1000, 1000, 4500]))
        ds = open_shards(paths, engine=engine)
        order = np.random.default_rng(0).permutation(6000)
        for index in (slice(None), slice(5, 5990), slice(None, None, -1), order, (slice(None), slice(None, None, 2))):
            assert_same(ds[index].compute(), whole[index])

    def test_out(self, example: _Opened) -> None:
        """``out`` is filled and returned."""
        ds, whole = example
        out = ds.compute()
        out[...] = 0
        assert ds.compute(out=out) is out
        assert_same(out, whole)

    def test_out_of_one_row(self, example: _Opened) -> None:
        """``out`` is filled where an integer dropped the row axis, too."""
        ds, whole = example
        out = ds[3].compute()
        out[...] = 0
        assert ds[3].compute(out=out) is out
        assert_same(out, whole[3])

    def test_wrong_out(self, example: _Opened, engine: str) -> None:
        """An ``out`` of another shape, dtype or type is an error."""
        ds, _ = example
        for wrong in (
            ds[:5].compute(),
            ds.compute().astype("f4"),
            [0] * 23,
            None if engine == "numpy" else np.empty(23),
        ):
            if wrong is not None:
                with pytest.raises(EngineError):
                    ds.compute(out=wrong)

    def test_failure_leaves_the_engine_whole(self, tmp_path: Path, engine: str) -> None:
        """A tile that cannot be read is an error that names the shard, and the next compute works."""
        whole = example_array((4000, 100), "f8")
        paths = write_npy_shards(tmp_path, np.split(whole, 4))
        ds = open_shards(paths, engine=engine)
        os.truncate(paths[2], 5000)
        with pytest.raises(ShardChangedError, match=Path(paths[2]).name):
            ds.compute()
        assert_same(ds[:2000].compute(), whole[:2000])

    def test_interleaved(self, tmp_path: Path, engine: str) -> None:
        """Computes of different datasets, results held, never mix."""
        pairs = []
        for number in range(5):
            whole = example_array((300 + number, 3), "i8", seed=number)
            paths = write_npy_shards(tmp_path / str(number), np.split(whole, [40, 200 + number]))
            pairs.append((open_shards(paths, engine=engine), whole))
        found = [(ds[turn:].compute(tiles_per_processor=2), whole[turn:]) for turn in range(10) for ds, whole in pairs]
        for array, expected in found:
            assert_same(array, expected)

    def test_many_axes(self, tmp_path: Path, engine: str) -> None:
        """One row less an axis is what the engine must hold: a row of a dataset at its limit of axes is read."""
        most = next(n for n in range(20, 0, -1) if find_engine(engine).why_not(np.dtype("f4"), n) is None)
        whole = example_array((3, *[1] * most), "f4")
        paths = write_npy_shards(tmp_path, [whole])
        assert_same(open_shards(paths, engine=engine)[1].compute(), whole[1])

    def test_faulty_layout_is_told_before_the_engine(self, tmp_path: Path, engine: str) -> None:
        """Shards that do not agree never reach the engine."""
        paths = write_npy_shards(tmp_path, [np.zeros((2, 3)), np.zeros((2, 4))])
        with pytest.raises(LayoutError):
            open_shards(paths, engine=engine)
