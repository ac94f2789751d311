"""The first load of a process, hot: what a script that loads its data once pays. Its memory, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import datasets
from benchmarks.machine import CoreUse
from benchmarks.measure import in_fresh_processes, memory_of_first_load
from benchmarks.peers import by_hand, limits, ours, seed
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.options import Options

__all__ = ["run"]

_PEERS = (
    *ours.LOADS,
    seed.LOAD,
    by_hand.PREALLOCATED,
    by_hand.CONCATENATE,
    limits.PREAD_WARM,
    limits.PREAD_HUGE,
)
_LEGATE, _NUMPY = (peer.name for peer in ours.LOADS)

_SMALL_ROWS = 8_000
"""Rows loaded before memory is measured: 2 MB, enough to start an engine's workers."""

_LOAD_TARGETS = (
    Target(_LEGATE, "at least", 1.4, (seed.LOAD.name,)),
    Target(_NUMPY, "at most", 1.1, (limits.PREAD_HUGE.name,)),
    Target(_NUMPY, "at least", 3, (by_hand.CONCATENATE.name,)),
)
_BOTH_TARGETS = (Target(_LEGATE, "at least", 4, (seed.LOAD.name,)),)
_ASARRAY_TARGETS = (Target(_LEGATE, "at most", 0.01),)
_MEMORY_TARGETS = (Target(_LEGATE, "at most", 64), Target(_NUMPY, "at most", 64))


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    use = CoreUse()
    dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes)
    rows = range(dataset.rows)
    what = f"{options.load_nbytes / 1e9:g} GB, {len(dataset.shard_rows)} uneven npy shards, hot"
    measured = in_fresh_processes(_PEERS, dataset, rows, options.turns(5), asarray=True)
    notes = (*measured.notes, use.note())
    yield Table(
        f"First load of a process, {what}",
        "s",
        measured.figures(lambda timing: timing.call),
        measured.absent,
        limits.PREAD_HUGE.name,
        _LOAD_TARGETS,
        notes,
    )
    yield Table(
        f"First load of a process and np.asarray of the result, {what}",
        "s",
        measured.figures(lambda timing: timing.call + timing.asarray),
        measured.absent,
        limits.PREAD_HUGE.name,
        _BOTH_TARGETS,
        notes,
    )
    asarray = measured.figures(lambda timing: timing.asarray)
    yield Table(
        f"Of it np.asarray alone, {what}",
        "s",
        {peer.name: asarray[peer.name] for peer in _PEERS if peer.name in asarray and not peer.takes_numpy},
        targets=_ASARRAY_TARGETS,
        notes=notes,
    )
    yield from _memory_tables(dataset, rows, what)


def _memory_tables(dataset: datasets.Dataset, rows: range, what: str) -> Iterator[Table]:
    peers = [peer for peer in _PEERS if peer is not limits.PREAD_WARM]
    memories, absent = memory_of_first_load(peers, dataset, rows, range(_SMALL_ROWS))
    before = f"A load of {_SMALL_ROWS:,} rows went before: what an engine takes once for itself is not counted."
    result = len(rows) * datasets.ROW_NBYTES
    yield Table(
        f"Peak memory of a load over the result's own {result / 2**20:.0f} MiB, {what}",
        "MiB",
        {name: [(memory.anonymous_nbytes - result) / 2**20] for name, memory in memories.items()},
        absent,
        targets=_MEMORY_TARGETS,
        notes=(f"Anonymous memory, sampled every 2 ms from outside. {before}",),
    )
    yield Table(
        f"The same with pages of mapped files, which the kernel can take back, {what}",
        "MiB",
        {name: [(memory.resident_nbytes - result) / 2**20] for name, memory in memories.items()},
        absent,
        notes=(f"Peak resident memory (VmHWM), exact. {before}",),
    )
