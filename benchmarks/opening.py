"""Opening a dataset of many shards: listing, ordering, headers, checks."""

from __future__ import annotations

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

_PEERS = (limits.OPEN, ours.OPEN, by_hand.REGEX_OPEN, by_hand.THREADED_OPEN, seed.OPEN)
_SLOW_PEERS = (libraries.DASK_OPEN,)

_HOT_TARGETS = (Target(ours.OPEN.name, "at most", 2.5, (limits.OPEN.name,)),)
_COLD_TARGETS = (Target(ours.OPEN.name, "at most", 1.3, (by_hand.THREADED_OPEN.name,)),)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    for shards in (5_000, 50_000) if options.full else (5_000,):
        dataset = datasets.many_shards(options.cache_dir, shards)
        peers = _PEERS + _SLOW_PEERS * (shards <= 5_000)
        turns = [(range(dataset.rows),)] * options.turns(5)
        for cold in (False, True):
            use = CoreUse()
            measured = in_warm_processes(peers, dataset, turns, cold=cold)
            yield Table(
                f"Opening {shards:,} npy shards, {'cold (headers; directory and inodes stay)' if cold else 'hot'}",
                "ms",
                measured.figures(lambda timing: 1e3 * timing.call),
                measured.absent,
                limits.OPEN.name,
                _COLD_TARGETS if cold else _HOT_TARGETS,
                (*measured.notes, use.note()),
            )
