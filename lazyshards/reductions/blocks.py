"""The blocks in which a view is reduced: read ahead on threads, worked on there, and handed back in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lazyshards.engines import find_engine
from lazyshards.engines.threads import cpu_count
from lazyshards.layout import Layout
from lazyshards.leaf import fill
from lazyshards.plan import Capacity, ReadPlan, compile_plan
from lazyshards.progress import Progress
from lazyshards.selection import Selection

__all__ = ["Block", "BlockPlan", "View", "fold", "plan_blocks", "stream"]

S = TypeVar("S")
T = TypeVar("T")

Block: TypeAlias = npt.NDArray[Any]
"""Consecutive rows of a view, in memory."""

BLOCK_NBYTES = 4 << 20
"""Bytes of a block whose elements are 8 bytes; that of a view depends on nothing but its rows."""
_ELEMENT_NBYTES = 8
"""Bytes that an element of a block counts at least: it may be worked on as float64."""
_WORK_BLOCKS = 3
"""Copies of a block, in the type in which it is worked on, that a reduction makes at most at a time."""


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
    """The plan whose tiles are the blocks."""
    readers: int
    """Threads that read a block and work on it."""

    def __repr__(self) -> str:
        return (
            f"<BlockPlan {self.read.tile_count:,} blocks of up to {self.block_rows:,} rows, {self.block_nbytes:,} "
            f"bytes, {self.readers} at a time: at most {self.peak_nbytes:,} bytes of memory>"
        )

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return self.read.tile_count

    @property
    def block_rows(self) -> int:
        """Rows of each block but the last, which may be shorter: the same on every machine."""
        return self.read.tile_rows

    @property
    def block_nbytes(self) -> int:
        """Most bytes of one block."""
        return min(self.block_rows, len(self.read.rows)) * self.read.row_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that blocks, what reading them takes, and working on them take together; results come on top."""
        elements = min(self.block_rows, len(self.read.rows)) * prod(self.read.cell_shape)
        worked = _WORK_BLOCKS * elements * _worked_nbytes(self.read.dtype)
        at_a_time = min(self.readers, max(1, self.block_count))
        return at_a_time * (self.block_nbytes + self.read.scratch_nbytes + worked)


def _worked_nbytes(dtype: np.dtype[np.generic]) -> int:
    return max(16 if dtype.kind == "c" else _ELEMENT_NBYTES, dtype.itemsize)


def reader_count() -> int:
    """Return how many threads read and work: one more than processors, so that one may wait for the storage."""
    return cpu_count() + 1


def plan_blocks(layout: Layout, selection: Selection) -> BlockPlan:
    """Return the blocks of a selection.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    """
    worked = prod(selection.cell_shape) * _worked_nbytes(layout.dtype)
    stored = prod(selection.cell_shape) * layout.dtype.itemsize
    most = BLOCK_NBYTES * stored // max(1, worked)
    return BlockPlan(compile_plan(layout, selection, Capacity(1, max(1, most)), tiles_per_processor=1), reader_count())


def stream(
    plan: BlockPlan, work: Callable[[Block, int], T], progress: Progress | None = None, *, keeps: bool = False
) -> Iterator[T]:
    """Yield what ``work`` makes of each block, in order, whichever thread it ran on.

    Parameters
    ----------
    plan : BlockPlan
    work : callable
        Takes a block, which it may write to, and the row at which it begins. Several run at the same time.
    progress : callable, optional
        Called with the rows of each block that is done.
    keeps : bool
        Whether what it returns may be, or hold, memory of the block.
    """
    tiles = plan.read.tiles
    if not tiles:
        return
    errors, free = {**np.geterr(), "call": np.geterrcall()}, SimpleQueue[Block]()

    def run(tile: slice) -> T:
        read, block = plan.read, None
        shape = (tile.stop - tile.start, *read.cell_shape)
        if not keeps:
            with suppress(Empty):
                block = free.get_nowait()
        if block is None:
            block = np.empty((min(plan.block_rows, len(read.rows)), *read.cell_shape), read.dtype)
        rows = block[: shape[0]]
        fill(rows, read.rows[tile], read.layout, read.cell)
        try:
            with np.errstate(**errors):  # type: ignore[arg-type]  # what geterr() and geterrcall() gave
                return work(rows, tile.start)
        except Exception as exc:
            exc.add_note(f"in rows {tile.start:,} to {tile.stop:,} of the {len(read.rows):,} that are reduced")
            raise
        finally:
            if not keeps:
                free.put(block)

    if len(tiles) == 1:
        yield run(tiles[0])
        if progress is not None:
            progress(tiles[0].stop)
        return
    most = plan.readers if keeps else 2 * plan.readers
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
