"""The blocks in which a view is reduced: read ahead on threads, worked on there, and handed back in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lazyshards.display import plural, size_text
from lazyshards.engines import find_engine
from lazyshards.engines.threads import cpu_count
from lazyshards.layout import Decoded, Layout
from lazyshards.leaf import fill, packed_runs
from lazyshards.plan import Capacity, ReadPlan, compile_plan
from lazyshards.progress import Progress
from lazyshards.selection import Rows, Selection
from lazyshards.storage import LocalStorage
from lazyshards.storage.lending import Lender

__all__ = ["Block", "BlockPlan", "Blocks", "View", "fold", "plan_blocks", "stream"]

S = TypeVar("S")
T = TypeVar("T")

Block: TypeAlias = npt.NDArray[Any]
"""Consecutive rows of a view, in memory."""
Blocks: TypeAlias = Iterator[tuple[Block, int]]
"""Consecutive blocks, each with the row at which it begins."""

BLOCK_ELEMENTS = 1 << 16
"""Elements of a block of usual rows: as float64 they stay in the cache of one core."""
_PLAIN_BLOCKS = 4
"""Times as many elements of such a block where no copies of it are made as float64."""
WIDE_ELEMENTS, _WIDE_ROWS = 1 << 19, 8
"""Elements of a block of wide rows, of which it has so many if they fit: with one each, merging would take the time."""
RUN_NBYTES, FAR_RUN_NBYTES = 4 << 20, 32 << 20
"""Bytes that are read together; more of decoded shards, and from afar, where a part costs more than its share."""
_LENT_NBYTES = 128 << 10
"""Bytes of a run of one file from which lending them costs less than a copy."""
_WORK_BLOCKS = 5
"""Copies of a block, as float64 or wider, that a reduction makes at most at a time."""


class View(NamedTuple):
    """What is reduced."""

    layout: Layout
    selection: Selection
    engine: str | None
    """Name of the engine that its dataset was opened with."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the elements."""
        return self.layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, without the row axis if that was dropped."""
        return self.selection.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The blocks of a view, and how many of them are read at a time."""

    read: ReadPlan
    """The plan whose tiles are what is read at a time: runs of one block, or of several."""
    block_rows: int
    """Rows of each block but the last, which may be shorter: the same on every machine."""
    readers: int
    """Threads that read a run and work on its blocks."""

    def __repr__(self) -> str:
        blocks = (
            f"{plural(self.block_count, 'block')} of up to {self.block_rows:,} rows, {size_text(self.block_nbytes)}"
        )
        return f"<BlockPlan {blocks}, on {self.readers} threads: at most {size_text(self.peak_nbytes)} of memory>"

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return -(-len(self.read.rows) // self.block_rows) if self.read.nbytes else 0

    @property
    def block_nbytes(self) -> int:
        """Most bytes of one block."""
        return min(self.block_rows, len(self.read.rows)) * self.read.row_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that blocks, what reading them takes, and working on them take together; results come on top."""
        elements = min(self.block_rows, len(self.read.rows)) * prod(self.read.cell_shape)
        worked = _WORK_BLOCKS * elements * max(16 if self.read.dtype.kind == "c" else 8, self.read.dtype.itemsize)
        run = min(self.read.tile_rows, len(self.read.rows)) * self.read.row_nbytes
        return min(self.readers, max(1, self.read.tile_count)) * (run + self.read.scratch_nbytes + worked)


def reader_count() -> int:
    """Return how many threads read and work: one more than processors, so that one may wait for the storage."""
    return cpu_count() + 1


def plan_blocks(layout: Layout, selection: Selection, *, elements: int | None = None, plain: bool = False) -> BlockPlan:
    """Return the blocks of a selection.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    elements : int, optional
        Elements of a block; one row is always allowed, and some if they are wide.
    plain : bool
        Whether what is done makes no copies of a block as float64.
    """
    read = compile_plan(layout, selection, Capacity(1), tiles_per_processor=1)
    width = max(1, prod(selection.cell_shape))
    if elements is None:
        elements = BLOCK_ELEMENTS * (_PLAIN_BLOCKS if plain else 1)
    block_rows = max(1, elements // width, min(_WIDE_ROWS, WIDE_ELEMENTS // width))
    decodes = any(type(source) is Decoded for source in read.layout.sources.values())
    most = FAR_RUN_NBYTES if decodes or type(layout.storage) is not LocalStorage else RUN_NBYTES
    # A power of two, so that merging the blocks of a run first changes nothing in how all of them are merged.
    blocks = 1 << max(0, (most // max(1, block_rows * read.row_nbytes)).bit_length() - 1)
    return BlockPlan(replace(read, tile_rows=block_rows * blocks), block_rows, reader_count())


def stream(
    plan: BlockPlan,
    work: Callable[[Blocks], T],
    progress: Progress | None = None,
    *,
    keeps: bool = False,
    lends: bool = False,
    runs: range | None = None,
) -> Iterator[T]:
    """Yield what ``work`` makes of each run of blocks, in order, whichever thread it ran on.

    Parameters
    ----------
    plan : BlockPlan
    work : callable
        Takes blocks, each with the row at which it begins. Several run at the same time.
    progress : callable, optional
        Called with the rows of each run that is done.
    keeps : bool
        Whether what it returns may be, or hold, memory of the blocks.
    lends : bool
        Whether it may be given blocks that are bytes of files, which it does not write to, and be called once more for
        a run if a file changed meanwhile.
    runs : range, optional
        Which runs; by default all.
    """
    read = plan.read
    tiles = read.tiles if runs is None else read.tiles[runs.start : runs.stop]
    errors, free = {**np.geterr(), "call": np.geterrcall()}, SimpleQueue[Block]()

    def run(tile: slice) -> T:
        buffer = None
        if not keeps:
            with suppress(Empty):
                buffer = free.get_nowait()
        if buffer is None:
            buffer = np.empty((min(read.tile_rows, len(read.rows)), *read.cell_shape), read.dtype)
        try:
            if lends and (done := _work_on_lent(plan, tile, buffer, worked)):
                return done[0]
            rows = buffer[: tile.stop - tile.start]
            fill(rows, read.rows[tile], read.layout, read.cell)
            starts = range(0, len(rows), plan.block_rows)
            return worked(((rows[start : start + plan.block_rows], tile.start + start) for start in starts), tile)
        finally:
            if not keeps:
                free.put(buffer)

    def worked(blocks: Blocks, tile: slice) -> T:
        try:
            with np.errstate(**errors):  # type: ignore[arg-type]  # what geterr() and geterrcall() gave
                return work(blocks)
        except Exception as exc:
            exc.add_note(f"in rows {tile.start:,} to {tile.stop:,} of the {len(read.rows):,} that are reduced")
            raise

    if len(tiles) == 1:
        result = run(tiles[0])
        if progress is not None:
            progress(tiles[0].stop - tiles[0].start)
        yield result
        return
    # What is kept counts as being read until it is handed out.
    most = max(1, plan.readers - 1) if keeps else 2 * plan.readers
    pending: deque[tuple[slice, Future[T]]] = deque()
    with find_engine("numpy").reading(), ThreadPoolExecutor(plan.readers, "lazyshards-reduce") as pool:
        try:
            for tile in tiles:
                pending.append((tile, pool.submit(run, tile)))
                if len(pending) == most:
                    yield _first(pending, progress)
            while pending:
                yield _first(pending, progress)
        finally:
            for _, future in pending:
                future.cancel()


def _work_on_lent(plan: BlockPlan, tile: slice, buffer: Block, work: Callable[[Blocks, slice], T]) -> tuple[T] | None:
    """Return what ``work`` makes of blocks as they lie in the page cache; None if they do not, or a file changed."""
    lender = Lender()
    try:
        lent = _lend(lender, plan.read, plan.read.rows[tile])
        if not lent:
            return None
        done = (work(_lent_blocks(plan, tile, lent, buffer), tile),)
    except Exception:
        if lender.take_back():
            raise
        return None
    finally:
        good = lender.take_back()
    return done if good else None


def _lend(lender: Lender, read: ReadPlan, rows: Rows) -> list[tuple[int, Block]]:
    """Return rows that lie in the page cache as they are wanted, in pieces, each with its place among all."""
    storage = read.layout.storage
    if type(storage) is not LocalStorage or not storage.gathers:
        return []
    lent, at = [], 0
    for path, stamp, offset, count in packed_runs(rows, read.layout, read.cell):
        nbytes = count * read.row_nbytes
        # What does not lie at a multiple of its size, NumPy adds up in another order.
        if nbytes >= _LENT_NBYTES and offset % read.dtype.alignment == 0:
            found = lender.lend(path, stamp, offset, nbytes)
            if found is not None:
                lent.append((at, found.view(read.dtype).reshape(count, *read.cell_shape)))
        at += count
    return lent


def _lent_blocks(plan: BlockPlan, tile: slice, lent: Sequence[tuple[int, Block]], buffer: Block) -> Blocks:
    """Yield the blocks of a run: those that lie within a piece that was lent as they are, others read."""
    read, pieces = plan.read, deque(lent)
    for start in range(0, tile.stop - tile.start, plan.block_rows):
        stop = min(start + plan.block_rows, tile.stop - tile.start)
        while pieces and pieces[0][0] + len(pieces[0][1]) < stop:
            pieces.popleft()
        if pieces and pieces[0][0] <= start:
            at, piece = pieces[0]
            yield piece[start - at : stop - at], tile.start + start
        else:
            block = buffer[: stop - start]
            fill(block, read.rows[tile.start + start : tile.start + stop], read.layout, read.cell)
            yield block, tile.start + start


def _first(pending: "deque[tuple[slice, Future[T]]]", progress: Progress | None) -> T:
    tile, future = pending.popleft()
    result = future.result()
    if progress is not None:
        progress(tile.stop - tile.start)
    return result


def fold(states: Iterable[S], merge: Callable[[S, S], S]) -> S:
    """Merge neighbours pairwise, then pairs with pairs: rounding grows with the logarithm of their number.

    Parameters
    ----------
    states : iterable
        At least one.
    merge : callable
        Takes two neighbours, the left one first.

    Examples
    --------
    >>> fold("abcdefg", lambda left, right: f"({left}{right})")
    '(((ab)(cd))((ef)g))'
    """
    done: list[tuple[int, S]] = []
    for item in states:
        state, level = item, 0
        while done and done[-1][0] == level:
            state = merge(done.pop()[1], state)
            level += 1
        done.append((level, state))
    state = done.pop()[1]
    while done:
        state = merge(done.pop()[1], state)
    return state
