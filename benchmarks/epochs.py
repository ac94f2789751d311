"""Batches of rows: sequential and shuffled, hot and cold, small rows and large, and how reading overlaps work."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import page_cache
from benchmarks.epoch_loaders import (
    HAND,
    HOT,
    LEGATE,
    OURS,
    OURS_LEGATE,
    POOL,
    SEED,
    TAKE,
    Shards,
    by_hand,
    ours,
    pool,
)
from benchmarks.machine import CoreUse
from benchmarks.remote_server import Server
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.epoch_loaders import Loader
    from benchmarks.options import Options

    Figures = tuple[dict[str, list[float]], dict[str, str]]

__all__ = ["run"]

_SHARDS = 16
_PATIENCE_S = 2.0
"""Seconds after which a loader that takes rows one by one is stopped: by then it is known how long a batch takes."""
_WORKED = "lazyshards batches, with work as long as a batch takes"
_COMPUTED = "the same, the work being NumPy's on one core"
_ALONE = "lazyshards batches, prefetch=0"
_ALONE_WORKED = "lazyshards batches, prefetch=0, with that work"
_FRESH = "limit: np.take from maps that were just made, into a fresh array"
_ADDED_MS = 40
"""Milliseconds that storage waits before it answers a request, where reading is to wait for nothing else."""


def _write(folder: Path, row_nbytes: int, nbytes: int) -> list[Path]:
    """Write the shards if they are not there yet."""
    rows = nbytes // row_nbytes // _SHARDS
    paths = [folder / f"epochs-{row_nbytes}-{rows}" / f"shard_{i:02d}.npy" for i in range(_SHARDS)]
    if not paths[-1].exists():
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for i, path in enumerate(paths):
            np.save(path, np.random.default_rng(i).random((rows, row_nbytes // 4), dtype=np.float32))
    return paths


def _seconds(loader: Loader, shards: Shards, shuffle: bool, seed: int, size: tuple[int, int]) -> float:
    """Return the seconds that a batch takes, the first one left out."""
    running: Any = loader(shards, shuffle, seed, size[0])
    next(running)
    count, began = 0, time.perf_counter()
    took = 0.0
    while count < size[1] and took < _PATIENCE_S and next(running, None) is not None:
        count += 1
        took = time.perf_counter() - began
    if close := getattr(running, "close", None):
        close()
    return took / count


def _in_turns(loaders: dict[str, Loader], shards: Shards, shuffle: bool, turns: int, size: tuple[int, int]) -> Figures:
    """Return the microseconds of a batch of each loader in each turn, and why others have none."""
    figures: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for turn in range(turns):
        for name, loader in loaders.items():
            if name in absent:
                continue
            try:
                figures.setdefault(name, []).append(1e6 * _seconds(loader, shards, shuffle, turn, size))
            except ImportError as exc:
                absent[name] = str(exc)
                figures.pop(name, None)
    return figures, absent


def _hot(paths: Sequence[Path], legate: bool, shuffle: bool, turns: int, size: tuple[int, int]) -> Figures:
    """Measure hot, in a process of its own: what one library leaves running is not held against another's engine."""
    page_cache.warm(paths)
    shards = Shards.open(paths)
    for each in shards.maps:
        each[:: max(1, 4096 // (4 * shards.columns))].sum()
    if not legate:
        return _in_turns(HOT, shards, shuffle, turns, size)
    from lazyshards.engines import bringup

    if reason := bringup.why_unavailable():
        return {}, {name: str(reason) for name in LEGATE}
    return _in_turns(LEGATE, shards, shuffle, turns, size)


def _cold_seconds(paths: Sequence[Path], loader: Loader, seed: int, size: tuple[int, int]) -> float:
    return _seconds(loader, Shards.open(paths), True, seed, size)


def _working_seconds(paths: Sequence[Path], seed: int, size: tuple[int, int], work: float) -> float:
    """Return the seconds that a batch takes with work that leaves the cores alone, as that of a device does."""
    return _worked(ours(Shards.open(paths), True, seed, size[0]), size[1], partial(time.sleep, work))


def _worked(running: Iterator[object], count: int, work: Callable[[], object]) -> float:
    """Return the seconds that a batch takes with work on each, the first one left out."""
    next(running)
    done, began = 0, time.perf_counter()
    while done < count and next(running, None) is not None:
        work()
        done += 1
    return (time.perf_counter() - began) / done


def _remote_seconds(urls: Sequence[str], size: tuple[int, int], prefetch: int, work: float, computes: bool) -> float:
    """Return the seconds that a batch from a server takes, in file order, with work of so many seconds on each."""
    import lazyshards

    square = np.ones((256, 256), np.float32)

    def compute() -> None:
        until = time.perf_counter() + work
        while time.perf_counter() < until:
            np.sin(square)

    running = iter(lazyshards.open_shards(urls, engine="numpy").batches(size[0], prefetch=prefetch))
    return _worked(running, size[1], compute if computes else partial(time.sleep, work))


def _first_seconds(paths: Sequence[Path], seed: int, batch_rows: int) -> float:
    """Return the seconds from asking for batches of an open dataset to having the first one."""
    import lazyshards

    ds = lazyshards.open_shards(paths[0].parent, engine="numpy")
    ds[:1].compute()
    began = time.perf_counter()
    next(iter(ds.batches(batch_rows, shuffle=True, seed=seed)))
    return time.perf_counter() - began


def _fresh_seconds(paths: Sequence[Path], seed: int, batch_rows: int) -> float:
    """Return the seconds to map the files and to copy rows of them, sorted by file, for the first time."""
    rows = np.random.default_rng(seed).integers(0, Shards.open(paths).rows, batch_rows)
    began = time.perf_counter()
    shards = Shards.open(paths)
    out = np.empty((batch_rows, shards.columns), np.float32)
    at = 0
    for shard, _, local in shards.locate(rows):
        np.take(shards.maps[shard], local, axis=0, out=out[at : at + len(local)], mode="clip")
        at += len(local)
    return time.perf_counter() - began


def _in_child(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what a function returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        return workers.apply(function, arguments)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    for row_nbytes, batch_rows, share in ((256, 1_024, 0.7), (4 << 10, 1_024, 0.85), (150 << 10, 128, 0.85)):
        # Enough for more batches than are read ahead, of large rows as well.
        nbytes = max(options.load_nbytes // 4, 12 * batch_rows * row_nbytes)
        paths = _write(options.cache_dir, row_nbytes, nbytes)
        rows = nbytes // row_nbytes
        size = (batch_rows, max(2, min(400, rows // batch_rows - 2)))
        what = f"{batch_rows:,} rows of {row_nbytes:,} bytes, of {nbytes / 1e9:g} GB in {_SHARDS} npy shards"
        cold_size = (batch_rows, min(size[1], 20 if options.quick else 200))
        yield _cold(paths, cold_size, row_nbytes == 256, what, options.turns(3))
        for shuffle in (True, False):
            order = "shuffled" if shuffle else "sequential"
            use = CoreUse()
            figures, absent = _in_child(_hot, paths, False, shuffle, options.turns(7), size)
            targets = (
                (Target(OURS, "at least", share, (TAKE,)), Target(OURS, "at least", 1.5, (HAND,)))
                if shuffle
                else (Target(OURS, "at least", 0.6, (HAND,)),)
            )
            yield Table(f"A {order} batch of {what}, hot", "us", figures, absent, HAND, targets, (use.note(),))
            use = CoreUse()
            figures, absent = _in_child(_hot, paths, True, shuffle, options.turns(5), size)
            bound, against = (0.5, OURS) if shuffle else (5, SEED)
            promise = Target(OURS_LEGATE, "at least", bound, (against,))
            title = f"A {order} batch of {what}, hot, where Legate runs"
            yield Table(title, "us", figures, absent, OURS, (promise,), (use.note(),))
        yield _first(paths, batch_rows, what, options.turns(7))
        if row_nbytes == 4 << 10:
            yield _waiting(paths, rows, options.turns(5))


def _cold(paths: Sequence[Path], size: tuple[int, int], small: bool, what: str, turns: int) -> Table:
    """Return the table of batches that are not in the page cache.

    Each is read in a fresh process: a page that a process has mapped cannot be dropped.
    """
    use = CoreUse()
    loaders: dict[str, Loader] = {OURS: ours, POOL: pool, HAND: by_hand}
    figures: dict[str, list[float]] = {name: [] for name in (*loaders, _WORKED)}
    for turn in range(turns):
        for name, loader in loaders.items():
            # By hand a small row takes a wait for the device: a batch of them is enough to see it.
            few = (size[0], 1 if name == HAND else size[1])
            page_cache.drop(paths)
            figures[name].append(1e6 * _in_child(_cold_seconds, paths, loader, turn, few))
        page_cache.drop(paths)
        work = figures[OURS][-1] / 1e6
        figures[_WORKED].append(1e6 * _in_child(_working_seconds, paths, turn, size, work))
    targets = (
        Target(OURS, "at least", 1.2 if small else 0.8, (POOL,)),
        Target(_WORKED, "at most", 1.15, (OURS,)),
    )
    title = f"A shuffled batch of {what}, cold, of {size[1]} batches"
    return Table(title, "us", figures, {}, POOL, targets, (use.note(),))


def _waiting(paths: Sequence[Path], rows: int, turns: int) -> Table:
    """Return the table of batches from storage that waits: a server on loopback that sleeps before each answer."""
    size = (256, min(48, rows // 256 - 2))
    what = f"{size[0]:,} rows of 4,096 bytes over HTTP from loopback, {_ADDED_MS} ms added to each request"
    figures: dict[str, list[float]] = {name: [] for name in (OURS, _WORKED, _COMPUTED, _ALONE, _ALONE_WORKED)}
    use = CoreUse()
    with Server(paths[0].parent) as server:
        server.delay(_ADDED_MS)
        urls = [f"{server.url}/{path.name}" for path in paths]
        for _ in range(turns):
            took: dict[str, float] = {}
            for name, found in figures.items():
                ahead, worked = (0 if "prefetch=0" in name else 2), name in (_WORKED, _COMPUTED, _ALONE_WORKED)
                work = took[OURS if ahead else _ALONE] if worked else 0.0
                took[name] = _in_child(_remote_seconds, urls, size, ahead, work, name == _COMPUTED)
                found.append(1e6 * took[name])
    promise = Target(_WORKED, "at most", 1.15, (OURS,))
    return Table(f"A batch of {what}, in order", "us", figures, {}, OURS, (promise,), (use.note(),))


def _first(paths: Sequence[Path], batch_rows: int, what: str, turns: int) -> Table:
    """Return the table of the first batch of an epoch, hot, each in a fresh process."""
    page_cache.warm(paths)
    use = CoreUse()
    figures: dict[str, list[float]] = {OURS: [], _FRESH: []}
    for turn in range(turns):
        for name, seconds in ((OURS, _first_seconds), (_FRESH, _fresh_seconds)):
            figures[name].append(1e3 * _in_child(seconds, paths, turn, batch_rows))
    title = f"The first shuffled batch of {what}, hot, each in a new process where lazyshards and the dataset are open"
    return Table(title, "ms", figures, {}, _FRESH, (Target(OURS, "at most", 5),), (use.note(),))
