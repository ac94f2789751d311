"""HDF5's chunks, read by position and decoded outside the library, whose one lock lets a single thread work.

Where the chunks of a dataset are is asked of the library once, and kept.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import product
from math import prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.codecs import Bytes, CodecError, Filter, decode, lacking
from lazyshards.formats.hdf5_library import ChunkTable, RefusedError, list_chunks, open_file
from lazyshards.selection import Cell
from lazyshards.storage.base import Part, Stamp, Storage

__all__ = ["Chunks", "ascending", "check_stamps", "read_chunks"]

_MOST_LISTED = 1 << 20
"""Chunks of a dataset that are listed at once; of a dataset with more, each is asked for."""
_TABLES_NBYTES = 64 << 20
"""Bytes of lists of chunks that are kept."""
_DECODED_NBYTES = 64 << 20
"""Bytes of decoded chunks that are kept, because the rest of each may be asked for next."""
_WINDOW_NBYTES = 4 << 20
"""Bytes of stored chunks that are read together, at least one chunk."""

T = TypeVar("T")


class Chunks(NamedTuple):
    """A dataset of chunks that can be decoded here."""

    path: str
    """The file; empty for the shard's own."""
    name: str
    """Name of the dataset in it."""
    shape: tuple[int, ...]
    """Shape of the dataset, rows first."""
    chunk: tuple[int, ...]
    """Shape of a chunk; those at the edges are stored in full size."""
    filters: tuple[Filter, ...]
    """What the chunks went through when they were written, in order."""
    fill: bytes | None
    """The element that stands for what was never written; None if nothing may."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple([-(-length // size) for length, size in zip(self.shape, self.chunk, strict=True)])


class _Kept(Generic[T]):
    """The most recently used of things that can be made again, up to a number of bytes."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self.clear()

    def clear(self) -> None:
        """Forget everything; after a fork, too, when another thread may have held the lock."""
        self._lock = threading.Lock()
        self._items: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._nbytes = 0

    def get(self, key: Hashable) -> T | None:
        """Return what is kept, or None."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: Hashable, value: T, nbytes: int) -> None:
        """Keep it, unless it alone is too large."""
        if nbytes > self._most_nbytes:
            return
        with self._lock:
            if key in self._items:
                self._nbytes -= self._items.pop(key)[1]
            self._items[key] = value, nbytes
            self._nbytes += nbytes
            while self._nbytes > self._most_nbytes:
                self._nbytes -= self._items.popitem(last=False)[1][1]


_tables: _Kept[ChunkTable] = _Kept(_TABLES_NBYTES)
_decoded: _Kept[npt.NDArray[np.generic]] = _Kept(_DECODED_NBYTES)
_listing = threading.Lock()


def _forget() -> None:
    global _listing
    _tables.clear()
    _decoded.clear()
    _listing = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def check_stamps(files: Sequence[tuple[str, Stamp]], storage: Storage) -> None:
    """Raise, or warn, as the storage does, if a file is not the one that was opened; none of them is empty."""
    storage.fetch_into([Part(path, stamp, 0, memoryview(bytearray(1))) for path, stamp in files])


def ascending(
    out: npt.NDArray[np.generic], start: int, cell: Cell
) -> tuple[npt.NDArray[np.generic], tuple[range, ...]]:
    """Return a view of ``out`` with all axes of the dataset, and the ascending positions that belong to each.

    Parameters
    ----------
    out : ndarray, (rows, *cell shape)
    start : int
        Local row of the first.
    cell : tuple
    """
    index: list[slice | None] = [slice(None)]
    axes = [range(start, start + len(out))]
    for axis in cell:
        if isinstance(axis, int):
            index.append(None)
            axes.append(range(axis, axis + 1))
        elif len(axis) > 1 and axis.step < 0:
            index.append(slice(None, None, -1))
            axes.append(axis[::-1])
        else:
            index.append(slice(None))
            axes.append(range(axis.start, axis.start + 1) if len(axis) == 1 else axis)
    return out[tuple(index)], tuple(axes)


class _Span(NamedTuple):
    """What is wanted of the chunks with one number on one axis."""

    number: int
    source: slice
    """Within the chunk."""
    target: slice
    """Within the buffer."""
    is_whole: bool
    """Whether it is the whole length of a chunk."""
    is_all: bool
    """Whether it is all of the chunk that the dataset has: chunks reach beyond its edges."""


def _spans(axis: range, size: int, length: int) -> list[_Span]:
    """Return the parts of ascending positions on an axis of ``length`` that lie in each chunk of ``size``."""
    found = []
    i, count = 0, len(axis)
    while i < count:
        number = axis[i] // size
        first = number * size
        j = min(count, -(-(first + size - axis.start) // axis.step))
        source = slice(axis[i] - first, axis[j - 1] - first + 1, axis.step)
        is_all = axis.step == 1 and j - i == min(size, length - first)
        found.append(_Span(number, source, slice(i, j), is_all and j - i == size, is_all))
        i = j
    return found


class _Wanted(NamedTuple):
    """A chunk, and what is wanted of it."""

    number: int
    source: tuple[slice, ...]
    target: npt.NDArray[np.generic]
    """Where that lands."""
    is_whole: bool
    """Whether it is the whole chunk."""
    is_all: bool
    """Whether it is all of the chunk that the dataset has."""


def read_chunks(
    chunks: Chunks,
    path: str,
    stamp: Stamp,
    dtype: np.dtype[np.generic],
    start: int,
    out: npt.NDArray[np.generic],
    cell: Cell,
    storage: Storage,
) -> None:
    """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell.

    Parameters
    ----------
    chunks : Chunks
    path : str
        The file.
    stamp : Stamp
        What it was when it was opened.
    dtype : dtype
        As stored, byte order included.
    start : int
    out : ndarray
    cell : tuple
    storage : Storage
    """
    view, axes = ascending(out, start, cell)
    if not view.size:
        return
    spans = [_spans(*axis) for axis in zip(axes, chunks.chunk, chunks.shape, strict=True)]
    numbers = np.ravel_multi_index(np.ix_(*[[span.number for span in axis] for axis in spans]), chunks.grid).ravel()
    table = _find_table(chunks, path, stamp, storage, numbers)
    places = np.searchsorted(table.numbers, numbers)
    is_there = places < len(table.numbers)
    is_there[is_there] = table.numbers[places[is_there]] == numbers[is_there]
    places[~is_there] = -1
    reader = _Reader(chunks, path, stamp, dtype, storage, table)
    for number, place, span in zip(numbers.tolist(), places.tolist(), product(*spans), strict=True):
        target = view[tuple([axis.target for axis in span])]
        source = tuple([axis.source for axis in span])
        is_whole, is_all = all([axis.is_whole for axis in span]), all([axis.is_all for axis in span])
        reader.add(_Wanted(number, source, target, is_whole, is_all), place)
    reader.finish()


class _Reader:
    """Reads, decodes and places the chunks of one request, a window of them at a time."""

    def __init__(
        self,
        chunks: Chunks,
        path: str,
        stamp: Stamp,
        dtype: np.dtype[np.generic],
        storage: Storage,
        table: ChunkTable,
    ) -> None:
        self._chunks = chunks
        self._path = path
        self._stamp = stamp
        self._dtype = dtype
        self._storage = storage
        self._table = table
        self._nbytes = prod(chunks.chunk) * dtype.itemsize
        self._window_nbytes = max(storage.window_nbytes, _WINDOW_NBYTES)
        self._parts: list[Part] = []
        self._coded: list[tuple[_Wanted, int, memoryview]] = []
        self._plain: list[tuple[_Wanted, npt.NDArray[np.generic]]] = []
        self._staged_nbytes = 0
        self._is_checked = True
        self._scratch: Bytes | None = None

    def add(self, want: _Wanted, place: int) -> None:
        """Take one chunk; ``place`` is where it is in the table, -1 if it was never written."""
        if place < 0:
            self._fill(want)
            return
        mask, offset, size = (
            int(self._table.masks[place]),
            int(self._table.offsets[place]),
            int(self._table.sizes[place]),
        )
        if offset < 0 or size < 0 or offset + size > self._stamp.size:
            raise self._error(want, f"it lies in bytes {offset:,} to {offset + size:,} of {self._stamp.size:,}")
        if not all([mask >> i & 1 for i in range(len(self._chunks.filters))]):
            self._add_coded(want, mask, offset, size)
        elif size != self._nbytes:
            raise self._error(want, f"it holds {size:,} bytes, expected {self._nbytes:,}")
        else:
            self._add_plain(want, offset)
        if self._staged_nbytes >= self._window_nbytes:
            self._flush()

    def finish(self) -> None:
        """Read what still waits."""
        self._flush()
        if not self._is_checked:
            check_stamps([(self._path, self._stamp)], self._storage)

    def _add_coded(self, want: _Wanted, mask: int, offset: int, size: int) -> None:
        kept = None if want.is_all else _decoded.get(self._key(want))
        if kept is not None:
            want.target[...] = kept[want.source]
            self._is_checked = bool(self._parts)
            return
        raw = np.empty(size, np.uint8).data
        self._parts.append(Part(self._path, self._stamp, offset, raw))
        self._coded.append((want, mask, raw))
        self._staged_nbytes += size

    def _add_plain(self, want: _Wanted, offset: int) -> None:
        """Take a chunk that is stored as it is: only the rows that are wanted are read."""
        rows, *rest = want.source
        row_shape = self._chunks.chunk[1:]
        row_nbytes = self._nbytes // self._chunks.chunk[0]
        is_straight = all([part == slice(0, size, 1) for part, size in zip(rest, row_shape, strict=True)])
        if is_straight and rows.step == 1 and want.target.flags.c_contiguous and want.target.dtype == self._dtype:
            self._parts.append(Part(self._path, self._stamp, offset + rows.start * row_nbytes, _bytes_of(want.target)))
            return
        most = max(1, self._window_nbytes // (row_nbytes * rows.step))
        for i in range(0, len(want.target), most):
            target = want.target[i : i + most]
            first = rows.start + i * rows.step
            block = np.empty(((len(target) - 1) * rows.step + 1, *row_shape), self._dtype)
            self._parts.append(Part(self._path, self._stamp, offset + first * row_nbytes, _bytes_of(block)))
            self._plain.append((want._replace(target=target, source=(slice(None, None, rows.step), *rest)), block))
            self._staged_nbytes += block.nbytes
            if self._staged_nbytes >= self._window_nbytes:
                self._flush()

    def _flush(self) -> None:
        """Read what waits, decode it, and put it where it belongs."""
        if self._parts:
            self._storage.fetch_into(self._parts)
            self._is_checked = True
        for want, block in self._plain:
            want.target[...] = block[want.source]
        for want, mask, raw in self._coded:
            self._decode(want, mask, raw)
        self._parts, self._plain, self._coded, self._staged_nbytes = [], [], [], 0

    def _decode(self, want: _Wanted, mask: int, raw: memoryview) -> None:
        if want.is_whole and want.target.flags.c_contiguous and want.target.dtype == self._dtype:
            self._undo(want, mask, raw, np.frombuffer(_bytes_of(want.target), np.uint8))
            return
        if want.is_all:
            if self._scratch is None:
                self._scratch = np.empty(self._nbytes, np.uint8)
            out = self._scratch
        else:
            out = np.empty(self._nbytes, np.uint8)
        self._undo(want, mask, raw, out)
        chunk = out.view(self._dtype).reshape(self._chunks.chunk)
        want.target[...] = chunk[want.source]
        if not want.is_all:
            # The rest of it is likely to be asked for next: by the tile or the batch beside this one.
            _decoded.put(self._key(want), chunk, self._nbytes)

    def _undo(self, want: _Wanted, mask: int, raw: memoryview, out: Bytes) -> None:
        filters = self._chunks.filters
        try:
            decode(filters, mask, raw, out)
        except CodecError as exc:
            if self._is_at_edge(want) and len(raw) == self._nbytes and lacking(filters, mask) is None:
                # A dataset may be told not to filter the chunks that reach beyond its edges.
                out[...] = np.frombuffer(raw, np.uint8)
                return
            if lacking(filters, mask) is not None:
                raise self._error(want, f"{exc}; plugins for most filters: pip install hdf5plugin") from exc
            raise self._error(want, f"it is damaged: {exc}") from exc

    def _is_at_edge(self, want: _Wanted) -> bool:
        place = np.unravel_index(want.number, self._chunks.grid)
        return any(
            [
                (int(n) + 1) * size > length
                for n, size, length in zip(place, self._chunks.chunk, self._chunks.shape, strict=True)
            ]
        )

    def _fill(self, want: _Wanted) -> None:
        if self._chunks.fill is None:
            raise self._error(want, "it was never written")
        want.target[...] = np.frombuffer(self._chunks.fill, self._dtype)[0]

    def _key(self, want: _Wanted) -> Hashable:
        return self._path, self._stamp, self._chunks.name, want.number

    def _error(self, want: _Wanted, what: str) -> ShardReadError:
        place = np.unravel_index(want.number, self._chunks.grid)
        first = [int(n) * size for n, size in zip(place, self._chunks.chunk, strict=True)]
        return ShardReadError(
            f"{self._path!r}: the chunk of dataset {self._chunks.name!r} that begins at {tuple(first)} cannot be read: "
            f"{what}"
        )


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    """Return the bytes of a C-contiguous array, writable."""
    return array.reshape(-1).view(np.uint8).data


def _find_table(
    chunks: Chunks, path: str, stamp: Stamp, storage: Storage, numbers: npt.NDArray[np.int64]
) -> ChunkTable:
    """Return where the chunks of a dataset are, or at least those with these numbers."""
    key = path, stamp, chunks.name
    table = _tables.get(key)
    if table is not None:
        return table
    with _listing:  # the library would let one thread at a time list them, and each would list the same
        table = _tables.get(key)
        if table is not None:
            return table
        is_listed = prod(chunks.grid) <= _MOST_LISTED
        try:
            with open_file(path, storage, stamp.size) as file:
                table = list_chunks(
                    file, chunks.name, chunks.grid, chunks.chunk, None if is_listed else np.sort(numbers)
                )
        except RefusedError as exc:
            raise ShardReadError(f"{path!r} {exc}") from exc
        check_stamps([(path, stamp)], storage)
        if is_listed:
            _tables.put(key, table, table.nbytes)
    return table
