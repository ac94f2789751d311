"""How the rows of a segment are read: which bytes, in how many reads, and where they land.

The same functions drive the leaf and count for the plan, so that a plan's numbers are what happens.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from lazyshards.elementwise import Elementwise
from lazyshards.errors import ShardReadError
from lazyshards.layout import Decoded, Extent, Extents, Layout, Mapped, Packed, Planes, Segment, Shard
from lazyshards.selection import Block, Cell, Rows, blocks, cell_index, is_whole
from lazyshards.storage import LocalStorage
from lazyshards.storage.memory import MemoryStorage

__all__ = [
    "Access",
    "Index",
    "Reads",
    "Target",
    "accesses",
    "count_reads",
    "is_gathered",
    "is_in_place",
    "is_kept",
    "kept_rows",
    "mapped_rows",
    "wanted_map",
]

BLOCK_NBYTES = 512 << 10
"""Bytes of a staging block of packed rows: it stays in the cache of one core while it is converted."""
NARROW_NBYTES = 2 << 20
"""Bytes of a block of plain rows whose elements are worked on: few enough for a cache, enough for a read's price."""
DECODED_NBYTES = 16 << 20
"""Bytes of a block of decoded rows that a function is given: each block may decode again what the last one did."""
WIDE_NBYTES = 4 << 20
"""Bytes of a staging block of columns, or of decoded rows, where each read has a price of its own."""
PASSED_NBYTES = 16 << 10
"""Bytes of blocks of the format without a wanted row, once decoded, that cost more than decoding another run does."""
UNBOUNDED = 1 << 62
"""Rows that go straight to their destination are read in one piece, however many."""

Target: TypeAlias = slice | npt.NDArray[np.int64]
"""Rows of a buffer: a slice of step 1 or -1, or an index array."""

Index: TypeAlias = tuple[int | slice | npt.NDArray[np.int64], ...]


class Access(NamedTuple):
    """One piece of a segment: what is read, which of it is wanted, and where it lands."""

    path: str
    """The file."""
    offset: int
    """First byte, if ``shape`` is read as plain bytes."""
    shape: tuple[int, ...]
    """Shape of what is read, rows (or, of a giant row, positions on its first axis) first."""
    block: Block
    """The local rows read."""
    source: Index | None
    """Index of what was read that gives what is wanted; None if all of it goes straight to its destination."""
    target: Index
    """Index of the buffer where it lands."""


def accesses(shard: Shard, segment: Segment, layout: Layout, cell: Cell, contiguous: bool) -> Iterator[Access]:
    """Yield what must be read of one shard for one segment.

    Parameters
    ----------
    shard : Shard
    segment : Segment
    layout : Layout
        Gives the dtype of the result and the storage.
    cell : tuple
        The basic index on each row.
    contiguous : bool
        Whether the buffer is C-contiguous, so that plain bytes may go straight into it.
    """
    gap_nbytes = layout.storage.gap_nbytes
    source = shard.source
    if isinstance(source, Packed | Extents):
        whole = is_whole(cell, shard.row_shape)
        same = contiguous and shard.dtype == layout.dtype and not layout.steps
        extents = (Extent(0, shard.rows, "", source.offset),) if isinstance(source, Packed) else source.extents
        row_nbytes = prod(shard.row_shape) * shard.dtype.itemsize
        for (first, _, path, offset), local, a, b in _touched(shard, extents, segment.local):
            row = _Row(path or shard.path, shard.row_shape, shard.dtype.itemsize, cell, whole, same, gap_nbytes)
            yield from _packed(row, offset - first * row_nbytes, local, _part(segment.target, a, b), (), False)
        return
    # The format, or the transposition, applies the cell: what is read has the shape of the result.
    kept = tuple([len(axis) for axis in cell if type(axis) is range])
    row_nbytes = prod(kept) * shard.dtype.itemsize
    planes = type(source) is Planes
    # A format decodes into native byte order, so that only a cast has to be staged.
    straightly = contiguous and not planes and not layout.steps and shard.dtype.newbyteorder("=") == layout.dtype
    # Each column is a read, and each run that is decoded has a price: that of more than a few unwanted rows.
    # On this machine blocks of the format that hold no wanted row are passed by; elsewhere each run would wait for one.
    edges = source.edges if isinstance(source, Decoded) and isinstance(layout.storage, LocalStorage) else ()
    for a, b in _runs(segment.local, edges, row_nbytes):
        for block in blocks(
            segment.local[a:b],
            row_nbytes,
            gap_nbytes=WIDE_NBYTES if planes else max(gap_nbytes, BLOCK_NBYTES),
            block_nbytes=WIDE_NBYTES,
            dense_nbytes=UNBOUNDED if straightly and type(segment.target) is slice else WIDE_NBYTES,
        ):
            target = _part(segment.target, a + block.target.start, a + block.target.stop)
            straight = straightly and block.dense and type(target) is slice and target.step != -1
            shape = (block.stop - block.start, *kept)
            yield Access(shard.path, 0, shape, block, None if straight else (block.source,), (target,))


def _runs(local: Rows, edges: Sequence[int], row_nbytes: int) -> list[tuple[int, int]]:
    """Return places [a, b) among ascending rows, cut where blocks lie between two of them, of more than a few bytes.

    Parameters
    ----------
    local : range or ndarray of int64
    edges : sequence of int
        Rows at which blocks begin, ascending; all, or some, of them.
    row_nbytes : int

    Examples
    --------
    >>> _runs(np.array([0, 15, 45, 59]), range(0, 100, 10), 64 << 10)
    [(0, 2), (2, 4)]
    """
    if len(edges) < 3 or len(local) < 2 or (isinstance(local, range) and local.step * row_nbytes <= PASSED_NBYTES):
        return [(0, len(local))]
    rows = np.arange(local.start, local.stop, local.step) if isinstance(local, range) else local
    borders = [0]
    for i in np.flatnonzero(np.diff(rows) * row_nbytes > PASSED_NBYTES).tolist():
        after = bisect_right(edges, rows[i])  # the block after the one that holds the row
        before = bisect_right(edges, rows[i + 1]) - 1  # the block that holds the next row
        if after < before and (edges[before] - edges[after]) * row_nbytes > PASSED_NBYTES:
            borders.append(i + 1)
    return list(pairwise([*borders, len(local)]))


class _Row(NamedTuple):
    """What stays the same while the rows of one extent are cut into reads."""

    path: str
    row_shape: tuple[int, ...]
    itemsize: int
    cell: Cell
    whole: bool
    straight: bool
    gap_nbytes: int


def _packed(row: _Row, start: int, local: Rows, target: Target, place: tuple[int, ...], drop: bool) -> Iterator[Access]:
    """Yield the reads of packed rows that begin at byte ``start``; of giant rows, the wanted parts in bounded pieces.

    ``place`` is where in the buffer ``target`` counts from, and ``drop`` whether the row axis is dropped there.
    """
    path, row_shape, itemsize, cell, whole, straight, gap_nbytes = row
    row_nbytes = prod(row_shape) * itemsize
    if not (whole and straight) and row_shape and _reads_within(row_nbytes, row_shape[0], cell[0], gap_nbytes):
        axis, rest = cell[0], cell[1:]
        positions = range(axis, axis + 1) if isinstance(axis, int) else axis
        backwards = positions.step < 0
        whole = is_whole(rest, row_shape[1:])
        inner = row._replace(row_shape=row_shape[1:], cell=rest, whole=whole)
        spread = slice(len(positions) - 1, None, -1) if backwards else slice(0, len(positions))
        for i, number in enumerate(local):
            within = place if drop else (*place, _position(target, i))
            yield from _packed(
                inner,
                start + int(number) * row_nbytes,
                positions[::-1] if backwards else positions,
                spread,
                within,
                isinstance(axis, int),
            )
        return
    index = cell_index(cell)
    straight = straight and whole
    ordered = type(target) is slice and target.step != -1
    for block in blocks(
        local,
        row_nbytes,
        gap_nbytes=gap_nbytes,
        block_nbytes=BLOCK_NBYTES,
        dense_nbytes=UNBOUNDED if straight and ordered else BLOCK_NBYTES,
    ):
        part = _part(target, block.target.start, block.target.stop)
        shape = (block.stop - block.start, *row_shape)
        offset = start + block.start * row_nbytes
        if straight and block.dense and (ordered or shape[0] == 1):
            where: Index = () if drop else (part,) if ordered else (_position(part, 0),)
            yield Access(path, offset, shape, block, None, place + where)
        else:
            yield Access(
                path, offset, shape, block, (0 if drop else block.source, *index), place if drop else (*place, part)
            )


def _reads_within(row_nbytes: int, length: int, axis: range | int, gap_nbytes: int) -> bool:
    """Return whether each row is read by positions of its first axis: a giant row, or one mostly not wanted."""
    if row_nbytes > BLOCK_NBYTES:
        return True
    spread = 1 if isinstance(axis, int) else abs(axis[-1] - axis[0]) + 1 if axis else 0
    return row_nbytes - spread * (row_nbytes // length) > gap_nbytes


def _position(target: Target, i: int) -> int:
    if isinstance(target, slice):
        return int(target.start - i if target.step == -1 else target.start + i)
    return int(target[i])


def _part(target: Target, a: int, b: int) -> Target:
    """Return the rows a to b of a target."""
    if not isinstance(target, slice):
        return target[a:b]
    if target.step != -1:
        return slice(target.start + a, target.start + b)
    stop = target.start - b
    return slice(target.start - a, stop if stop >= 0 else None, -1)


def _touched(shard: Shard, extents: Sequence[Extent], local: Rows) -> Iterator[tuple[Extent, Rows, int, int]]:
    """Yield the extents that hold ascending rows, and of each the rows, and their places [a, b) among all.

    Those between are passed by, however many they are.
    """
    i = at = 0
    while at < len(local):
        row = local[at]
        if not extents[i].first <= row < extents[i].first + extents[i].rows:
            i = bisect_right(extents, row, i, key=_first) - 1
        inside, _, b = _overlap(local[at:], extents[i].first, extents[i].first + extents[i].rows)
        if not b:
            raise ShardReadError(f"{shard.path!r} was described without saying where its row {row:,} lies")
        yield extents[i], inside, at, at + b
        at += b
        i = min(i + 1, len(extents) - 1)


def _first(extent: Extent) -> int:
    return extent.first


def _overlap(local: Rows, start: int, stop: int) -> tuple[Rows, int, int]:
    """Return the ascending rows within [start, stop), and their places [a, b) among all."""
    if isinstance(local, range):
        if not local or (start <= local[0] and local[-1] < stop):
            return local, 0, len(local)
        a = min(len(local), max(0, -(-(start - local.start) // local.step)))
        b = max(a, min(len(local), -(-(stop - local.start) // local.step)))
    else:
        a, b = (int(i) for i in np.searchsorted(local, (start, stop), "left"))
    return local[a:b], a, b


def is_kept(layout: Layout) -> bool:
    """Return whether the rows are those of one array in memory, which are copied and not read."""
    return type(layout.storage) is MemoryStorage and len(layout) == 1 and not layout.maps


def kept_rows(rows: npt.NDArray[np.int64], layout: Layout, cell: Cell) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield rows that are kept in memory in the blocks in which they are staged, each with its place among all."""
    stored = layout.dtype if layout.stored is None else layout.stored
    count = max(1, WIDE_NBYTES // max(1, prod([len(axis) for axis in cell if type(axis) is range]) * stored.itemsize))
    for start in range(0, len(rows), count):
        yield start, rows[start : start + count]


def mapped_rows(rows: Rows, layout: Layout, step: Mapped) -> Iterator[Rows]:
    """Yield the rows of a tile in the blocks in which the last function of a layout is given them.

    Parameters
    ----------
    rows : range or ndarray of int64
    layout : Layout
    step : Mapped
        What `wanted_map` returned.
    """
    if is_in_place(layout, step):
        yield rows
        return
    nbytes = WIDE_NBYTES
    if _is_decoded(layout):
        nbytes = max(nbytes, DECODED_NBYTES)
    elif isinstance(step.function, Elementwise):
        nbytes = min(nbytes, NARROW_NBYTES)
    count = max(1, nbytes // max(1, *_mapped_nbytes(layout, step)))
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


def is_in_place(layout: Layout, step: Mapped) -> bool:
    """Return whether rows are read into the result itself and worked on there.

    So it is where reading in pieces costs more than what a cache gains, and an element takes as much room before the
    work as after it.
    """
    work = step.function
    return (
        isinstance(work, Elementwise)
        and _is_decoded(layout)
        and step.dtype.itemsize == layout.dtype.itemsize
        and tuple([len(axis) for axis in step.cell if type(axis) is range]) == work.root.row_shape
    )


def _is_decoded(layout: Layout) -> bool:
    """Return whether shards are decoded, or read by columns; the first that is not packed tells."""
    return bool(layout.sources) and not isinstance(next(iter(layout.sources.values())), Extents)


def wanted_map(layout: Layout, cell: Cell) -> Mapped:
    """Return the last function of a layout and what it is given, where only a cell of what it makes is wanted.

    Work on elements makes no more than the cell, and is given no more than that takes; other functions make all.

    Parameters
    ----------
    layout : Layout
    cell : tuple
        The basic index on each row of what is made.
    """
    step = layout.maps[-1]
    if not isinstance(step.function, Elementwise):
        return step
    work = step.function.cut(cell)
    return step._replace(function=work, cell=work.given(step.row_shape))


def _mapped_nbytes(layout: Layout, step: Mapped) -> tuple[int, int]:
    """Return the bytes of a row that the last function of a layout is given, and of one that it returns."""
    given = prod([len(axis) for axis in step.cell if type(axis) is range]) * step.dtype.itemsize
    if isinstance(step.function, Elementwise):
        root = step.function.root
        return given, prod(root.row_shape) * root.dtype.itemsize
    made = layout.dtype if layout.stored is None else layout.stored
    return given, prod(layout.row_shape) * made.itemsize


_FEW_ROWS = 8
"""Rows up to which reading each by position costs less than finding the maps."""


def is_gathered(rows: Rows, layout: Layout, cell: Cell) -> TypeGuard[npt.NDArray[np.int64]]:
    """Return whether single rows are copied out of memory maps of their files, bytes as they are wanted.

    Parameters
    ----------
    rows : range or ndarray of int64
    layout : Layout
    cell : tuple
    """
    return (
        isinstance(rows, np.ndarray)
        and len(rows) > _FEW_ROWS
        and type(layout.storage) is LocalStorage
        and layout.storage.gathers
        and not layout.sources
        and not layout.dtypes
        and not layout.maps
        and layout.stored is None
        and is_whole(cell, layout.row_shape)
    )


class Reads(NamedTuple):
    """What filling one tile takes."""

    requests: int
    """Reads."""
    nbytes: int
    """Bytes read; of encoded rows, once decoded."""
    scratch: int
    """Most bytes besides the tile at a time."""
    file_nbytes: int
    """Bytes of the files: of encoded rows as they are stored, by the mean of their file where that is known."""


def count_reads(rows: Rows, layout: Layout, cell: Cell) -> Reads:
    """Return the reads, the bytes read, and the most scratch bytes at a time, of one tile holding ``rows``.

    Parameters
    ----------
    rows : range or ndarray of int64
        Rows of the layout, in the order of the tile.
    layout : Layout
    cell : tuple
    """
    if layout.maps:
        below, step = layout.below, wanted_map(layout, cell)
        pieces = [len(piece) for piece in mapped_rows(rows, layout, step)]
        counts = [count_reads(piece, below, step.cell) for piece in mapped_rows(rows, layout, step)]
        most = max(pieces, default=0) * sum(_mapped_nbytes(layout, step))
        if is_in_place(layout, step):
            most = min(most, NARROW_NBYTES)
        return Reads(
            sum([each.requests for each in counts]),
            sum([each.nbytes for each in counts]),
            most + max([each.scratch for each in counts], default=0),
            sum([each.file_nbytes for each in counts]),
        )
    if is_kept(layout):
        each = prod([len(axis) for axis in cell if type(axis) is range])
        nbytes = len(rows) * each * (layout.dtype if layout.stored is None else layout.stored).itemsize
        block = max(WIDE_NBYTES, nbytes // max(1, len(rows)))
        return Reads(int(len(rows) > 0), nbytes, 0 if isinstance(rows, range) else min(nbytes, block), nbytes)
    if is_gathered(rows, layout, cell):
        once = len(np.unique(rows))
        return Reads(once, once * layout.row_nbytes, 3 * rows.nbytes, once * layout.row_nbytes)
    requests = nbytes = scratch = file_nbytes = 0
    columns = prod([len(axis) for axis in cell if type(axis) is range])
    most_step = max([step.itemsize for step in layout.steps], default=0)
    shards = layout.shards
    for segment in layout.segments(rows):
        shard = shards[segment.shard]
        reads_each = columns if type(shard.source) is Planes else 1
        whole = shard.coded_nbytes
        for access in accesses(shard, segment, layout, cell, True):
            size = prod(access.shape) * shard.dtype.itemsize
            requests += reads_each
            nbytes += size
            file_nbytes += size if whole is None else whole * access.shape[0] // shard.rows
            if access.source is not None:
                scratch = max(scratch, size + most_step * prod(access.shape))
    return Reads(requests, nbytes, scratch, file_nbytes)
