"""The one leaf that every engine runs: fill a buffer with rows of a layout."""

from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from lazyshards.access import (
    Access,
    Index,
    accesses,
    is_gathered,
    is_in_place,
    is_kept,
    kept_rows,
    mapped_rows,
    wanted_map,
)
from lazyshards.elementwise import Elementwise
from lazyshards.errors import LazyShardsError, MapError, ShardReadError
from lazyshards.formats import Format, find_format
from lazyshards.functions import NamedFunction
from lazyshards.layout import Decoded, Extents, Layout, Mapped, Packed, Planes, Shard
from lazyshards.recording import fetch, gathering, measured, stage
from lazyshards.selection import Cell, Rows, as_slice, cell_index, is_whole
from lazyshards.storage.base import Part, Stamp
from lazyshards.storage.gather import gather_into
from lazyshards.storage.memory import MemoryStorage

__all__ = ["Run", "fill", "packed_runs"]

_FEW_SHARDS = 256
"""Shards whose files are mapped together, whichever of them are read."""
_MOST_PARTS = 4096
"""Reads that are handed to the storage together at most."""


class Run(NamedTuple):
    """Rows of one shard that lie in its file one after the other."""

    path: str
    stamp: Stamp
    offset: int
    """First byte."""
    rows: int
    """How many."""


def fill(out: npt.NDArray[np.generic], rows: Rows, layout: Layout, cell: Cell) -> None:
    """Fill ``out`` with ``rows`` of ``layout``, every element, or raise.

    Parameters
    ----------
    out : ndarray, (len(rows), *cell shape)
        Destination, of the layout's dtype; any strides, fastest if C-contiguous.
    rows : range or ndarray of int64
        Rows of the layout, in the order of ``out``.
    layout : Layout
    cell : tuple
        The basic index on each row.

    Raises
    ------
    ShardReadError
        If a shard cannot be read, ended early, or is not the file that was opened.
    """
    if not out.nbytes:
        return
    if layout.maps:
        _fill_mapped(out, rows, layout, cell)
        return
    if is_kept(layout):
        with stage("read", out.size * layout.stored_dtype(0).itemsize):
            _fill_kept(out, rows, layout, cell)
        return
    contiguous = out.flags.c_contiguous
    if contiguous and _lies_packed(rows, layout, cell):
        fetch(layout.storage, _packed_parts(out, rows, layout))
        return
    if contiguous and is_gathered(rows, layout, cell) and _gather(out, rows, layout):
        return
    queue = _Queue(out, layout)
    shards = layout.shards
    for segment in layout.segments(rows):
        shard = shards[segment.shard]
        source = shard.source
        for access in accesses(shard, segment, layout, cell, contiguous):
            if type(source) is Packed or type(source) is Extents:
                queue.add(access, shard)
            elif type(source) is Planes:
                _fill_planes(out, access, shard, source, layout, cell)
            else:
                _fill_decoded(out, access, shard, layout, cell)
    queue.flush()


def _lies_packed(rows: Rows, layout: Layout, cell: Cell) -> TypeGuard[range]:
    """Return whether the rows are, shard by shard, one run of the very bytes that are wanted."""
    return (
        type(rows) is range
        and (rows.step == 1 or len(rows) == 1)
        and not layout.sources
        and not layout.dtypes
        and layout.stored is None
        and is_whole(cell, layout.row_shape)
    )


def packed_runs(rows: Rows, layout: Layout, cell: Cell) -> Iterator[Run]:
    """Yield where rows lie, shard by shard, if they lie there as the very bytes that are wanted; else nothing.

    Parameters
    ----------
    rows : range or ndarray of int64
    layout : Layout
    cell : tuple
    """
    if not layout.maps and not is_kept(layout) and _lies_packed(rows, layout, cell):
        yield from _runs(rows, layout)


def _runs(rows: range, layout: Layout) -> Iterator[Run]:
    row_nbytes = layout.row_nbytes
    first, stop = rows.start, rows.start + len(rows)
    shard = layout.shard_of(first)
    start = layout.start_stop(shard)[0]
    while first < stop:
        end = layout.end(shard)
        until = min(end, stop)
        if until > first:
            offset = layout.offset(shard) + (first - start) * row_nbytes
            yield Run(layout.path(shard), layout.stamp(shard), offset, until - first)
            first = until
        shard, start = shard + 1, end


def _packed_parts(out: npt.NDArray[np.generic], rows: range, layout: Layout) -> list[Part]:
    """Return the reads of such rows: what the general path would find, without looking for it."""
    data, row_nbytes = _bytes_of(out), layout.row_nbytes
    parts, at = [], 0
    for path, stamp, offset, count in _runs(rows, layout):
        size = count * row_nbytes
        parts.append(Part(path, stamp, offset, data[at : at + size]))
        at += size
    return parts


def _gather(out: npt.NDArray[np.generic], rows: npt.NDArray[np.int64], layout: Layout) -> bool:
    """Fill ``out`` from memory maps and return whether that was possible."""
    if len(layout) > _FEW_SHARDS:
        layout, moved = layout.narrow(rows)
        assert isinstance(moved, np.ndarray)
        rows = moved
    with gathering(layout, rows):
        return gather_into(out, rows, layout.root, layout.names, layout.stamps, layout.ends, layout.offsets)


class _Queue:
    """Reads of plain bytes that wait to be handed to the storage together."""

    __slots__ = ("_layout", "_nbytes", "_out", "_parts", "_staged", "_storage")

    def __init__(self, out: npt.NDArray[np.generic], layout: Layout) -> None:
        self._out = out
        self._layout = layout
        self._storage = layout.storage
        self._parts: list[Part] = []
        self._staged: list[tuple[npt.NDArray[np.generic], Access]] = []
        self._nbytes = 0

    def add(self, access: Access, shard: Shard) -> None:
        """Queue one read; what has to be staged is staged in bounded memory."""
        if access.source is None:
            # The Ellipsis makes a single element a view, too, and not a copy.
            destination = self._out[(*access.target, ...)]
        else:
            destination = np.empty(access.shape, shard.dtype)
            self._staged.append((destination, access))
            self._nbytes += destination.nbytes
        self._parts.append(Part(access.path, shard.stamp, access.offset, _bytes_of(destination)))
        if self._nbytes >= self._storage.window_nbytes or len(self._parts) >= _MOST_PARTS:
            self.flush()

    def flush(self) -> None:
        """Read what is queued and put what was staged in its place."""
        if self._parts:
            fetch(self._storage, self._parts)
        if self._staged:
            with stage("convert", self._nbytes):
                for block, access in self._staged:
                    _place(self._out, access, block, self._layout)
        self._parts, self._staged, self._nbytes = [], [], 0


def _place(out: npt.NDArray[np.generic], access: Access, block: npt.NDArray[np.generic], layout: Layout) -> None:
    """Put what is wanted of a block where it belongs, cast on the way if the layout says so."""
    _cast_into(out, access.target, block[access.source], layout, access.path)


def _cast_into(
    out: npt.NDArray[np.generic], target: Index, wanted: npt.NDArray[np.generic], layout: Layout, path: str
) -> None:
    """Write elements to their place, through the casts of the layout."""
    stored = wanted.dtype
    try:
        for step in layout.steps:
            wanted = wanted.astype(step)
        out[target] = wanted
    except (ValueError, TypeError, OverflowError) as exc:  # text that is no number, say
        raise ShardReadError(
            f"{path!r} holds a value that cannot be cast from {stored} to {layout.dtype}: {exc}"
        ) from exc


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    """Return the bytes of a C-contiguous array, writable."""
    return array.reshape(-1).view(np.uint8).data


def _fill_planes(
    out: npt.NDArray[np.generic], access: Access, shard: Shard, planes: Planes, layout: Layout, cell: Cell
) -> None:
    """Read a block of rows of each wanted column, and write it transposed."""
    offsets = planes.offsets(shard.row_shape)[cell_index(cell)]
    start, stop = access.block.start, access.block.stop
    scratch = np.empty((offsets.size, stop - start), shard.dtype)
    itemsize = shard.dtype.itemsize
    fetch(
        layout.storage,
        [
            Part(access.path, shard.stamp, offset + start * itemsize, _bytes_of(scratch[i]))
            for i, offset in enumerate(offsets.ravel().tolist())
        ],
    )
    columns = scratch.reshape(*offsets.shape, stop - start)
    with stage("convert", scratch.nbytes):
        _place(out, access, np.moveaxis(columns, -1, 0), layout)


def _fill_decoded(out: npt.NDArray[np.generic], access: Access, shard: Shard, layout: Layout, cell: Cell) -> None:
    """Have the format decode a run of rows, straight into place where it can go there."""
    assert isinstance(shard.source, Decoded)
    reader = find_format(shard.source.format or layout.format)
    start = access.block.start
    if access.source is None:
        _decode(reader, shard, start, out[access.target], cell, layout)
        return
    scratch = np.empty(access.shape, shard.dtype.newbyteorder("="))
    _decode(reader, shard, start, scratch, cell, layout)
    with stage("convert", scratch.nbytes):
        _place(out, access, scratch, layout)


def _decode(reader: Format, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, layout: Layout) -> None:
    with stage("decode", out.nbytes):
        reader.read_into(shard, start, out, cell, measured(layout.storage))


def _fill_kept(out: npt.NDArray[np.generic], rows: Rows, layout: Layout, cell: Cell) -> None:
    """Copy rows that are kept in memory, each byte once."""
    assert isinstance(layout.storage, MemoryStorage)
    wanted = layout.storage.array[(slice(None), *cell_index(cell))]
    path = layout.path(0)
    if isinstance(rows, range):
        _cast_into(out, (slice(None),), wanted[as_slice(rows)], layout, path)
        return
    if layout.stored is None and out.flags.c_contiguous and wanted.flags.c_contiguous:
        np.take(wanted, rows, axis=0, out=out, mode="clip")  # they are within it; "raise" would go by way of a copy
        return
    for done, piece in kept_rows(rows, layout, cell):
        _cast_into(out, (slice(done, done + len(piece)),), wanted[piece], layout, path)


def _fill_mapped(out: npt.NDArray[np.generic], rows: Rows, layout: Layout, cell: Cell) -> None:
    """Fill ``out`` with what the last function of the layout makes of its rows, in bounded blocks."""
    below, step = layout.below, wanted_map(layout, cell)
    function = step.function
    given = tuple([len(axis) for axis in step.cell if type(axis) is range])
    if isinstance(function, Elementwise):
        _fill_worked(out, rows, layout, step, function)
        return
    index = (slice(None), *cell_index(cell))
    done = 0
    for piece in mapped_rows(rows, layout, step):
        block = np.empty((len(piece), *given), step.dtype)
        fill(block, piece, below, step.cell)
        made = _call(block, piece, layout, function)
        with stage("convert", made.nbytes):
            _cast_into(out, (slice(done, done + len(piece)),), made[index], layout, _place_of(piece, layout))
        done += len(piece)


def _fill_worked(out: npt.NDArray[np.generic], rows: Rows, layout: Layout, step: Mapped, work: Elementwise) -> None:
    """Fill ``out`` with what is done to the elements of its rows, in blocks that stay in the cache."""
    below = layout.below
    given = tuple([len(axis) for axis in step.cell if type(axis) is range])
    if layout.stored is not None:
        work = work.cast(*layout.steps, layout.dtype)
    room: npt.NDArray[np.generic] | None = None
    done = 0
    in_place = is_in_place(layout, step)
    for piece in mapped_rows(rows, layout, step):
        if room is None:  # the first piece is the longest
            room = out.view(step.dtype) if in_place else np.empty((len(piece), *given), step.dtype)
        block = room[: len(piece)]
        fill(block, piece, below, step.cell)
        try:
            with stage("map", block.nbytes):
                work.run(block, out[done : done + len(piece)], step.cell)
        except (ValueError, TypeError, OverflowError, FloatingPointError) as exc:
            raise MapError(
                f"{work} raised {type(exc).__name__} for {len(piece):,} rows, {_place_of(piece, layout)}: {exc}"
            ) from exc
        done += len(piece)


def _call(
    block: npt.NDArray[np.generic], rows: Rows, layout: Layout, function: NamedFunction
) -> npt.NDArray[np.generic]:
    """Return what the last function of the layout makes of a block, if it is what was promised."""
    try:
        with stage("map", block.nbytes):
            returned = function.function(block)
            made = np.asarray(returned)
    except LazyShardsError:
        raise
    except Exception as exc:
        raise MapError(
            f"{function}, which map() was given, raised {type(exc).__name__} for {len(rows):,} rows, "
            f"{_place_of(rows, layout)}: {exc}"
        ) from exc
    if isinstance(returned, np.ma.MaskedArray) and np.ma.is_masked(returned):
        raise MapError(
            f"{function}, which map() was given, returned a masked array for {len(rows):,} rows, "
            f"{_place_of(rows, layout)}; expected every element: fill it, with .filled()"
        )
    shape = (len(rows), *layout.row_shape)
    dtype = layout.dtype if layout.stored is None else layout.stored
    if made.shape != shape or made.dtype.newbyteorder("=") != dtype:
        advice = "give map() the dtype= and row_shape= of what it returns"
        if made.shape[:1] != shape[:1]:
            advice = "it must return one row for each that it is given"
        raise MapError(
            f"{function}, which map() was given, returned {made.dtype} of shape {made.shape} for {len(rows):,} rows, "
            f"{_place_of(rows, layout)}; expected {dtype} of shape {shape}: {advice}"
        )
    return made


def _place_of(rows: Rows, layout: Layout) -> str:
    """Return the first and the last of some rows, each with its shard, for a message."""
    places = []
    for row in dict.fromkeys((int(rows[0]), int(rows[-1]))):
        shard = layout.shard_of(row)
        places.append(f"row {row - layout.start_stop(shard)[0]:,} of {layout.path(shard)!r}")
    return " to ".join(places)
