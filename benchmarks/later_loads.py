"""Loads in a process that has loaded before, hot and cold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import datasets
from benchmarks.machine import CoreUse
from benchmarks.measure import in_warm_processes
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
    limits.MAPS_NEW,
    limits.PREAD_HUGE,
)
_LEGATE, _NUMPY = (peer.name for peer in ours.LOADS)

_HOT_TARGETS = (
    Target(_LEGATE, "at most", 1.0, (seed.LOAD.name,)),
    Target(_LEGATE, "at most", 1.05, (limits.PREAD_WARM.name, limits.MAPS_NEW.name)),
    Target(_NUMPY, "at most", 1.1, (limits.PREAD_HUGE.name,)),
    Target(_NUMPY, "at least", 3, (by_hand.CONCATENATE.name,)),
)
_COLD_TARGETS = (
    Target(_LEGATE, "at most", 1.1, (limits.PREAD_WARM.name,)),
    Target(_NUMPY, "at most", 1.1, (limits.PREAD_WARM.name,)),
)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes)
    turns = [(range(dataset.rows),)] * options.turns(7)
    what = f"{options.load_nbytes / 1e9:g} GB, {len(dataset.shard_rows)} uneven npy shards"
    use = CoreUse()
    hot = in_warm_processes((*_PEERS, limits.MEMCPY), dataset, turns, check_first=False)
    yield Table(
        f"Later loads of a process, {what}, hot",
        "s",
        hot.figures(lambda timing: timing.call),
        hot.absent,
        limits.PREAD_WARM.name,
        _HOT_TARGETS,
        (*hot.notes, use.note()),
    )
    use = CoreUse()
    both = in_warm_processes([peer for peer in _PEERS if not peer.takes_numpy], dataset, turns, asarray=True)
    yield Table(
        f"Later loads of a process and np.asarray of the result, {what}, hot",
        "s",
        both.figures(lambda timing: timing.call + timing.asarray),
        both.absent,
        seed.LOAD.name,
        notes=(*both.notes, use.note()),
    )
    use = CoreUse()
    cold = in_warm_processes(_PEERS, dataset, turns, cold=True, check_first=False)
    yield Table(
        f"Later loads of a process, {what}, cold",
        "s",
        cold.figures(lambda timing: timing.call),
        cold.absent,
        limits.PREAD_WARM.name,
        _COLD_TARGETS,
        (*cold.notes, use.note()),
    )
