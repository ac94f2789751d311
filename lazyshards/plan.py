"""What a computation will do, in numbers, before it does any of it."""

import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lazyshards import display
from lazyshards.access import Reads, count_reads
from lazyshards.errors import CapacityError
from lazyshards.layout import Layout
from lazyshards.selection import Cell, Rows, Selection
from lazyshards.stages import stages_of, stored_nbytes
from lazyshards.tiling import align_tile_rows, deal_tile_rows

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
    takes_next: bool = False
    """Whether a worker that is done takes the next tile, whichever that is."""
    ships: bool = True
    """Whether plans travel to the workers, so that their layout should be as small as can be."""


@dataclass(frozen=True, eq=False, repr=False)
class ReadPlan:
    """The layout narrowed to a request, the rows and cell wanted, and how the result is cut into tiles.

    Frozen and picklable: the same plan runs on every engine. Rows are numbered in the narrowed layout.
    """

    layout: Layout
    """Only the shards that the rows touch; all of them if plans do not travel, where leaving them out costs more."""
    rows: Rows
    """Rows of that layout, in the order of the result."""
    cell: Cell
    """The basic index applied to each row."""
    cell_shape: tuple[int, ...]
    """Shape of one row of the result."""
    tile_rows: int
    """Rows of each tile but the last, which may be shorter."""
    piece_rows: int | None = None
    """Rows of the pieces in which a leaf shares its tile with the other threads of its process; None if it does not."""

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
    def tile_reads(self) -> list[Reads]:
        """Requests, bytes read, scratch bytes and bytes of the files of each tile."""
        return [count_reads(self.rows[tile], self.layout, self.cell) for tile in self.tiles]

    @cached_property
    def _reads(self) -> tuple[int, int, int]:
        if not self.tile_reads:
            return 0, 0, 0
        requests, nbytes, scratch, _ = zip(*self.tile_reads, strict=True)
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
    def read_amplification(self) -> float:
        """Bytes read for each byte wanted, as stored: 1 if nothing is read that is not wanted.

        Below 1 where a row that is wanted twice is read once.
        """
        wanted = stored_nbytes(self.rows, self.layout, self.cell)
        return self.bytes_read / wanted if wanted else 1.0

    @property
    def stages(self) -> list[tuple[str, str]]:
        """What a leaf does to fill a tile, in order: the name of each stage, and what it is."""
        return stages_of(self.rows, self.layout, self.cell) if self.tile_count else []

    def to_svg(self) -> str:
        """Return a picture: for each tile the rows that it takes of the shards, and the bytes and requests it reads.

        Of many tiles or shards, several are drawn as one. All reads are counted for it, as for :attr:`requests`.

        Returns
        -------
        str
            An SVG document, 720 pixels wide, that reads on light and on dark.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("shard_0.npy", np.zeros((100, 4)))
        >>> plan = lazyshards.open_shards("shard_0.npy", engine="numpy")[10:90].plan()
        >>> plan.to_svg()[:4]
        '<svg'
        """
        return display.plan_svg(self, color="#7f7f7f")

    def _repr_html_(self) -> str:
        return display.plan_html(self)

    @property
    def scratch_nbytes(self) -> int:
        """Most bytes that one leaf needs besides its tile."""
        return self._reads[2]

    def loads(self, workers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the bytes of files and the requests that each of ``workers`` processors reads, tiles dealt in blocks.

        Legate deals them so, over the ranks and within each; a rank's share is the sum over its processors. Encoded
        rows count as they are stored, by the mean of their file; those of a store, or of a file that holds several
        shards, once decoded, since opening does not look up what each takes.
        """
        tiles = len(self.tile_reads)
        holder = np.arange(tiles) * workers // max(1, tiles)
        nbytes, requests = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
        np.add.at(nbytes, holder, [reads.file_nbytes for reads in self.tile_reads])
        np.add.at(requests, holder, [reads.requests for reads in self.tile_reads])
        return nbytes, requests

    def skew(self, workers: int) -> float:
        """Return how much more the busiest processor reads of the files than the mean one: 1 if all read as much."""
        nbytes, _ = self.loads(workers)
        return float(nbytes.max() / nbytes.mean()) if nbytes.any() else 1.0

    def peak_nbytes(self, workers: int) -> int:
        """Return the most bytes that the result and the scratch of ``workers`` leaves take together."""
        leaves = min(workers, max(1, self.tile_count))
        helpers = 0 if self.piece_rows is None else workers
        return self.nbytes + (leaves + helpers) * self.scratch_nbytes


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
        Tiles for each processor. By default small requests are one tile, and larger ones one for each processor; more,
        where shards differ in what they cost and the engine deals tiles as processors get free.

    Raises
    ------
    CapacityError
        If the result does not fit; the message says how many rows would.
    """
    cell_shape = selection.cell_shape
    narrowed, rows = layout.narrow(selection.rows) if capacity.ships else (layout, selection.rows)
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
    most = count
    if capacity.tile_nbytes is not None and row_nbytes:
        most = max(1, capacity.tile_nbytes // row_nbytes)
        tile_rows = min(tile_rows, most)
    aligned = align_tile_rows(rows, narrowed, tile_rows, most)
    pieces = None
    if tiles_per_processor is None and tiles > 1:
        smaller = deal_tile_rows(rows, narrowed, aligned)
        if capacity.takes_next:
            aligned = smaller
        elif smaller < aligned:
            pieces = smaller
    return ReadPlan(narrowed, rows, selection.cell, cell_shape, aligned, pieces)
