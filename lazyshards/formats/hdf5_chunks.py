"""HDF5's chunks, read by position and decoded outside the library, whose one lock lets a single thread work.

Where the chunks of a dataset are is asked of the library once, and kept.
"""

import os
import threading
from collections.abc import Hashable
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.codecs import Bytes, CodecError, Filter, decode, lacking
from lazyshards.formats.grid import Wanted, ascending, spans, wanted
from lazyshards.formats.hdf5_library import ChunkTable, RefusedError, list_chunks, open_file
from lazyshards.formats.kept import DECODED, Kept
from lazyshards.formats.stamps import check_stamps
from lazyshards.selection import Cell
from lazyshards.storage.base import Part, Stamp, Storage

__all__ = ["Chunks", "read_chunks"]

_MOST_LISTED = 1 << 20
"""Chunks of a dataset that are listed at once; of a dataset with more, each is asked for."""
_TABLES_NBYTES = 64 << 20
"""Bytes of lists of chunks that are kept."""
_WINDOW_NBYTES = 1 << 20
"""Bytes of stored chunks that are read together, at least one chunk: few enough to be in the cache yet when decoded."""


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


_tables: Kept[ChunkTable] = Kept(_TABLES_NBYTES)
_listing = threading.Lock()


def _forget() -> None:
    global _listing  # in a child process the lock may be one that another thread held when the process was forked
    _listing = threading.Lock()


os.register_at_fork(after_in_child=_forget)


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
    parts = [spans(*axis) for axis in zip(axes, chunks.chunk, chunks.shape, strict=True)]
    numbers = np.ravel_multi_index(np.ix_(*[[span.number for span in axis] for axis in parts]), chunks.grid).ravel()
    table = _find_table(chunks, path, stamp, storage, numbers)
    entries = np.searchsorted(table.numbers, numbers)
    is_there = entries < len(table.numbers)
    is_there[is_there] = table.numbers[entries[is_there]] == numbers[is_there]
    entries[~is_there] = -1
    reader = _Reader(chunks, path, stamp, dtype, storage, table)
    for entry, want in zip(entries.tolist(), wanted(view, parts), strict=True):
        reader.add(want, entry)
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
        self._coded: list[tuple[Wanted, int, memoryview]] = []
        self._plain: list[tuple[Wanted, npt.NDArray[np.generic]]] = []
        self._staged_nbytes = 0
        self._is_checked = True
        self._scratch: Bytes | None = None

    def add(self, want: Wanted, entry: int) -> None:
        """Take one chunk; ``entry`` is its number in the table, -1 if it was never written."""
        if entry < 0:
            self._fill(want)
            return
        _, offset, size, mask = [int(column[entry]) for column in self._table]
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

    def _add_coded(self, want: Wanted, mask: int, offset: int, size: int) -> None:
        kept = None if want.is_all else DECODED.get(self._key(want))
        if kept is not None:
            want.target[...] = kept[want.source]
            self._is_checked = bool(self._parts)
            return
        raw = np.empty(size, np.uint8).data
        self._parts.append(Part(self._path, self._stamp, offset, raw))
        self._coded.append((want, mask, raw))
        self._staged_nbytes += size

    def _add_plain(self, want: Wanted, offset: int) -> None:
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

    def _decode(self, want: Wanted, mask: int, raw: memoryview) -> None:
        if want.is_straight(self._dtype):
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
            DECODED.put(self._key(want), chunk, self._nbytes)

    def _undo(self, want: Wanted, mask: int, raw: memoryview, out: Bytes) -> None:
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

    def _is_at_edge(self, want: Wanted) -> bool:
        ends = [(n + 1) * size for n, size in zip(want.place, self._chunks.chunk, strict=True)]
        return any([end > length for end, length in zip(ends, self._chunks.shape, strict=True)])

    def _fill(self, want: Wanted) -> None:
        if self._chunks.fill is None:
            raise self._error(want, "it was never written")
        want.target[...] = np.frombuffer(self._chunks.fill, self._dtype)[0]

    def _key(self, want: Wanted) -> Hashable:
        return self._path, self._stamp, self._chunks.name, want.place

    def _error(self, want: Wanted, what: str) -> ShardReadError:
        first = tuple([n * size for n, size in zip(want.place, self._chunks.chunk, strict=True)])
        return ShardReadError(
            f"{self._path!r}: the chunk of dataset {self._chunks.name!r} that begins at {first} cannot be read: {what}"
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
