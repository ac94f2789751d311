"""What a computation will do, in numbers, before it does any of it."""

import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lazyshards.access import count_reads
from lazyshards.errors import CapacityError
from lazyshards.layout import Layout
from lazyshards.selection import Cell, Rows, Selection

__all__ = ["Capacity", "ReadPlan", "compile_plan"]

SMALL_NBYTES = 1 << 20
"""Bytes up to which a request is one tile: a second worker would cost more than it saves."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold."""

    workers: int
    """Processors that run leaves at the same time."""
    tile_nbytes: int | None = None
    """Most bytes of one tile; None if tiles may be of any size."""
    result_nbytes: int | None = None
    """Most bytes of a result now; None if the operating system decides."""


@dataclass(frozen=True, eq=False, repr=False)
class ReadPlan:
    """The layout narrowed to a request, the rows and cell wanted, and how the result is cut into tiles.

    Frozen and picklable: the same plan runs on every engine. Rows are numbered in the narrowed layout.
    """

    layout: Layout
    """Only the shards that the rows touch."""
    rows: Rows
    """Rows of the narrowed layout, in the order of the result."""
    cell: Cell
    """The basic index applied to each row."""
    cell_shape: tuple[int, ...]
    """Shape of one row of the result."""
    tile_rows: int
    """Rows of each tile but the last, which may be shorter."""

    def __repr__(self) -> str:
        tiles = f"{self.tile_count:,} tile{'s' * (self.tile_count != 1)} of up to {self.tile_rows:,} rows"
        return f"<ReadPlan {self.shape} {self.dtype}, {self.nbytes:,} bytes, {tiles}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, with a row axis."""
        return (len(self.rows), *self.cell_shape)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the result."""
        return self.layout.dtype

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of the result."""
        count = self.dtype.itemsize
        for size in self.cell_shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the result: the bytes wanted."""
        return len(self.rows) * self.row_nbytes

    @property
    def tile_count(self) -> int:
        """Number of tiles; 0 if the result holds nothing."""
        return -(-len(self.rows) // self.tile_rows) if self.nbytes else 0

    @property
    def tiles(self) -> list[slice]:
        """The tiles, as slices of the result's rows."""
        return [
            slice(start, min(start + self.tile_rows, len(self.rows)))
            for start in range(0, self.tile_count * self.tile_rows, self.tile_rows)
        ]

    @property
    def shards(self) -> int:
        """Number of shards that hold rows of the request: not empty ones, nor those that a step jumps over."""
        return sum(1 for _ in self.layout.segments(self.rows))

    @cached_property
    def _tile_reads(self) -> list[tuple[int, int, int]]:
        return [count_reads(self.rows[tile], self.layout, self.cell) for tile in self.tiles]

    @cached_property
    def _reads(self) -> tuple[int, int, int]:
        if not self._tile_reads:
            return 0, 0, 0
        requests, nbytes, scratch = zip(*self._tile_reads, strict=True)
        return sum(requests), sum(nbytes), max(scratch)

    @property
    def requests(self) -> int:
        """Number of reads that the leaves will make."""
        return self._reads[0]

    @property
    def bytes_read(self) -> int:
        """Bytes that the leaves will read; above ``nbytes`` where unwanted bytes are cheaper to read than to skip."""
        return self._reads[1]

    @property
    def scratch_nbytes(self) -> int:
        """Most bytes that one leaf needs besides its tile."""
        return self._reads[2]

    def loads(self, workers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the bytes and the requests that each of ``workers`` processors reads, if tiles are dealt in blocks.

        Legate deals them so, over the ranks and within each; a rank's share is the sum over its processors.
        """
        tiles = len(self._tile_reads)
        counts = np.array(self._tile_reads, np.int64).reshape(tiles, 3)
        holder = np.arange(tiles) * workers // max(1, tiles)
        nbytes, requests = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
        np.add.at(nbytes, holder, counts[:, 1])
        np.add.at(requests, holder, counts[:, 0])
        return nbytes, requests

    def skew(self, workers: int) -> float:
        """Return how much longer the busiest processor reads than the mean one, by bytes: 1 if all read as much."""
        nbytes, _ = self.loads(workers)
        return float(nbytes.max() / nbytes.mean()) if nbytes.any() else 1.0

    def peak_nbytes(self, workers: int) -> int:
        """Return the most bytes that the result and the scratch of ``workers`` leaves take together."""
        return self.nbytes + min(workers, max(1, self.tile_count)) * self.scratch_nbytes


def compile_plan(
    layout: Layout, selection: Selection, capacity: Capacity, *, tiles_per_processor: int | None = None
) -> ReadPlan:
    """Return the plan that reads ``selection``.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    capacity : Capacity
        Of the engine that will run the plan.
    tiles_per_processor : int, optional
        Tiles for each processor; default 1. Small requests are one tile unless this is given.

    Raises
    ------
    CapacityError
        If the result does not fit; the message says how many rows would.
    """
    cell_shape = selection.cell_shape
    narrowed, rows = layout.narrow(selection.rows)
    count = len(rows)
    row_nbytes = layout.dtype.itemsize
    for size in cell_shape:
        row_nbytes *= size
    nbytes = count * row_nbytes
    if capacity.result_nbytes is not None and nbytes > capacity.result_nbytes:
        fits = capacity.result_nbytes // row_nbytes
        raise CapacityError(
            f"the result needs {nbytes:,} bytes, but only {capacity.result_nbytes:,} are free in one piece of the "
            f"engine's memory: at most {fits:,} of the {count:,} rows fit; compute a smaller slice, use batches(), "
            'drop earlier results, give the engine more memory, or use engine="numpy"'
        )
    if tiles_per_processor is None:
        tiles = 1 if nbytes <= SMALL_NBYTES else capacity.workers
    elif operator.index(tiles_per_processor) < 1:
        raise ValueError(f"tiles_per_processor={tiles_per_processor!r} must be an integer, 1 or more")
    else:
        tiles = capacity.workers * tiles_per_processor
    tile_rows = max(1, -(-count // tiles))
    if capacity.tile_nbytes is not None and row_nbytes:
        tile_rows = max(1, min(tile_rows, capacity.tile_nbytes // row_nbytes))
    return ReadPlan(narrowed, rows, selection.cell, cell_shape, tile_rows)
