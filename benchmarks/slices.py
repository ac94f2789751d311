"""A slice in a process that has the dataset open: how near indexing, planning and reading come to a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import datasets
from benchmarks.machine import CoreUse
from benchmarks.measure import in_warm_processes
from benchmarks.peers import by_hand, libraries, limits, ours, seed
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.options import Options

__all__ = ["run"]

_PEERS = (
    limits.GATHER,
    limits.MAPS_KEPT,
    by_hand.MEMMAP_SLICE,
    *ours.SLICES,
    seed.SLICE,
    libraries.HDF5_SLICE,
    libraries.DASK_SLICE,
)
_NUMPY, _LEGATE = (peer.name for peer in ours.SLICES)

_STRIDE = 611_953
"""Rows from the start of one slice to the next, modulo what fits: a prime, so that starts do not repeat."""


@dataclass(frozen=True, slots=True)
class _Size:
    """One length of slice and what was promised for it."""

    rows: int
    calls: int
    """Calls in a turn, whose median is the turn's figure."""
    numpy_bound: float
    """Times the hand-written memmap, at most."""
    legate_bound: float
    """Times the seed recipe, at most."""


_SIZES = (
    _Size(100, 301, 3, 0.25),
    _Size(4_000, 101, 1.3, 0.4),
    _Size(1_000_000, 3, 1.05, 1.0),
)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes)
    for size in _SIZES:
        rows = min(size.rows, dataset.rows // 2)
        starts = dataset.rows - rows
        turns = options.turns(7)
        requests = [range(at, at + rows) for i in range(turns * size.calls) for at in [(i + 1) * _STRIDE % starts]]
        use = CoreUse()
        measured = in_warm_processes(
            _PEERS, dataset, [tuple(requests[i * size.calls : (i + 1) * size.calls]) for i in range(turns)]
        )
        yield Table(
            f"A slice of {rows:,} rows of {datasets.ROW_NBYTES} bytes at changing places, "
            f"of {options.load_nbytes / 1e9:g} GB in {len(dataset.shard_rows)} npy shards, hot",
            "ms",
            measured.figures(lambda timing: 1e3 * timing.call),
            measured.absent,
            by_hand.MEMMAP_SLICE.name,
            (
                Target(_NUMPY, "at most", size.numpy_bound, (by_hand.MEMMAP_SLICE.name,)),
                Target(_LEGATE, "at most", size.legate_bound, (seed.SLICE.name,)),
            ),
            (*measured.notes, use.note()),
        )
