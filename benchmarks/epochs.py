"""Batches of 1,024 rows: sequential and shuffled, hot and cold, small rows and large, and how reading overlaps work."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import page_cache
from benchmarks.machine import CoreUse
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.options import Options

__all__ = ["run"]

_BATCH_ROWS = 1_024
_SHARDS = 16
_OURS = "lazyshards batches"
_TAKE = "limit: np.take from maps, one warm destination"
_MEMMAP = "np.memmap by hand"
_TORCH = "torch DataLoader, batched sampler"
_POOL = "limit: preadv of each row, 32 threads"


@dataclass(frozen=True, slots=True)
class _Shards:
    """Shards of equal length, whose rows are read by number."""

    paths: list[Path]
    maps: list[NDArray[np.float32]]

    @property
    def rows(self) -> int:
        """Return the number of rows of all shards."""
        return sum(map(len, self.maps))

    def locate(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield shard, places in the batch and local rows, as everyone must find them who reads by hand."""
        holder, local = np.divmod(rows, len(self.maps[0]))
        for shard in range(len(self.maps)):
            places = np.flatnonzero(holder == shard)
            if len(places):
                yield shard, places, local[places]


def _write(folder: Path, row_nbytes: int, nbytes: int) -> list[Path]:
    """Write the shards if they are not there yet."""
    rows = nbytes // row_nbytes // _SHARDS
    paths = [folder / f"epochs-{row_nbytes}-{rows}" / f"shard_{i:02d}.npy" for i in range(_SHARDS)]
    if not paths[-1].exists():
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for i, path in enumerate(paths):
            np.save(path, np.random.default_rng(i).random((rows, row_nbytes // 4), dtype=np.float32))
    return paths


# The loaders: each yields batches of the same shards, in an order of its own where it is asked to shuffle ------------


def _ours(shards: _Shards, shuffle: bool, seed: int) -> Iterator[object]:
    import lazyshards

    ds = lazyshards.open_shards(shards.paths[0].parent, engine="numpy")
    return iter(ds.batches(_BATCH_ROWS, shuffle=shuffle, seed=seed))


def _orders(shards: _Shards, shuffle: bool, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each batch."""
    order = np.random.default_rng(seed).permutation(shards.rows) if shuffle else np.arange(shards.rows)
    for start in range(0, shards.rows, _BATCH_ROWS):
        yield order[start : start + _BATCH_ROWS]


def _by_hand(shards: _Shards, shuffle: bool, seed: int) -> Iterator[object]:
    """Index memory maps, into a fresh array for each batch; sequential batches are slices."""
    maps = [np.load(path, mmap_mode="r") for path in shards.paths]
    length = len(maps[0])
    for rows in _orders(shards, shuffle, seed):
        out = np.empty((len(rows), maps[0].shape[1]), np.float32)
        if shuffle:
            for shard, places, local in shards.locate(rows):
                out[places] = maps[shard][local]
        else:
            start, at = int(rows[0]), 0
            while at < len(rows):
                shard, local = divmod(start + at, length)
                part = maps[shard][local : local + len(rows) - at]
                out[at : at + len(part)] = part
                at += len(part)
        yield out


def _take(shards: _Shards, shuffle: bool, seed: int) -> Iterator[object]:
    """Take rows shard by shard, left in that order, into one array that stays."""
    out = np.empty((_BATCH_ROWS, shards.maps[0].shape[1]), np.float32)
    for rows in _orders(shards, shuffle, seed):
        at = 0
        for shard, _, local in shards.locate(rows):
            np.take(shards.maps[shard], local, axis=0, out=out[at : at + len(local)], mode="clip")
            at += len(local)
        yield out[: len(rows)]


def _torch(shards: _Shards, shuffle: bool, seed: int) -> Iterator[object]:
    """Have a DataLoader ask a dataset of memory maps for the rows of a batch together."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    class Rows:
        def __len__(self) -> int:
            return shards.rows

        def __getitem__(self, rows: list[int]) -> torch.Tensor:
            found = np.asarray(rows)
            out = np.empty((len(found), shards.maps[0].shape[1]), np.float32)
            for shard, places, local in shards.locate(found):
                out[places] = shards.maps[shard][local]
            return torch.from_numpy(out)

    generator = torch.Generator().manual_seed(seed)
    rows = RandomSampler(Rows(), generator=generator) if shuffle else SequentialSampler(Rows())
    return iter(DataLoader(Rows(), sampler=BatchSampler(rows, _BATCH_ROWS, drop_last=False), batch_size=None))


def _pool(shards: _Shards, shuffle: bool, seed: int) -> Iterator[object]:
    """Read each row by position, from many threads: a deep queue for a device."""
    import os

    fds = [os.open(path, os.O_RDONLY) for path in shards.paths]
    row_nbytes = shards.maps[0].shape[1] * 4

    def read(piece: tuple[NDArray[np.float32], list[tuple[int, int]]]) -> None:
        for row, (shard, local) in zip(*piece, strict=True):
            os.preadv(fds[shard], [row.data.cast("B")], 128 + local * row_nbytes)

    with ThreadPoolExecutor(32) as pool:
        for rows in _orders(shards, shuffle, seed):
            out = np.empty((len(rows), shards.maps[0].shape[1]), np.float32)
            places = list(zip(*[each.tolist() for each in np.divmod(rows, len(shards.maps[0]))], strict=True))
            list(pool.map(read, [(out[i : i + 32], places[i : i + 32]) for i in range(0, len(rows), 32)]))
            yield out
    for fd in fds:
        os.close(fd)


_Loader = "Callable[[_Shards, bool, int], Iterator[object]]"


def _seconds(loader: _Loader, shards: _Shards, shuffle: bool, seed: int, batches: int) -> float:
    """Return the seconds that a batch takes, the first one left out."""
    running = loader(shards, shuffle, seed)
    next(running)
    began = time.perf_counter()
    count = sum(1 for _ in islice(running, batches))
    took = time.perf_counter() - began
    if close := getattr(running, "close", None):
        close()
    return took / count


def _measure(
    loaders: dict[str, _Loader], shards: _Shards, shuffle: bool, cold: bool, turns: int, batches: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    figures: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for turn in range(turns):
        for name, loader in loaders.items():
            if name in absent:
                continue
            if cold:
                page_cache.drop(shards.paths)
            try:
                figures.setdefault(name, []).append(1e6 * _seconds(loader, shards, shuffle, turn, batches))
            except ImportError as exc:
                absent[name] = str(exc)
                figures.pop(name, None)
    return figures, absent


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    nbytes = options.load_nbytes // 4
    for row_nbytes, share in ((256, 0.7), (4 << 10, 0.85), (150 << 10, 0.85)):
        paths = _write(options.cache_dir, row_nbytes, nbytes)
        shards = _Shards(paths, [np.asarray(np.load(path, mmap_mode="r")) for path in paths])
        batches = max(2, min(400, shards.rows // _BATCH_ROWS - 2))
        what = f"rows of {row_nbytes:,} bytes, of {nbytes / 1e9:g} GB in {_SHARDS} npy shards"
        hot: dict[str, _Loader] = {_OURS: _ours, _TAKE: _take, _MEMMAP: _by_hand, _TORCH: _torch}
        page_cache.warm(paths)
        for each in shards.maps:
            each[:: max(1, 4096 // row_nbytes)].sum()
        for shuffle in (True, False):
            use = CoreUse()
            figures, absent = _measure(hot, shards, shuffle, False, options.turns(7), batches)
            targets = (
                (Target(_OURS, "at least", share, (_TAKE,)), Target(_OURS, "at least", 1.5, (_MEMMAP,)))
                if shuffle
                else (Target(_OURS, "at least", 0.6, (_MEMMAP,)),)
            )
            title = f"A {'shuffled' if shuffle else 'sequential'} batch of {_BATCH_ROWS:,} {what}, hot"
            yield Table(title, "us", figures, absent, _MEMMAP, targets, (use.note(),))
        use = CoreUse()
        cold: dict[str, _Loader] = {_OURS: _ours, _POOL: _pool}
        figures, absent = _measure(cold, shards, True, True, options.turns(3), min(batches, 20))
        bound = 1.2 if row_nbytes == 256 else 0.8
        title = f"A shuffled batch of {_BATCH_ROWS:,} {what}, cold"
        yield Table(title, "us", figures, absent, _POOL, (Target(_OURS, "at least", bound, (_POOL,)),), (use.note(),))
        yield _overlap(shards, options.turns(3))


def _overlap(shards: _Shards, turns: int) -> Table:
    """Return how long an epoch's start takes, cold, where the user's work takes as long as reading."""
    figures: dict[str, list[float]] = {"reading": [], "reading and work": []}
    for turn in range(turns):
        page_cache.drop(shards.paths)
        read = _seconds(_ours, shards, True, turn, 12)
        page_cache.drop(shards.paths)
        running = _ours(shards, True, turn + 100)
        next(running)
        began = time.perf_counter()
        for _ in islice(running, 12):
            time.sleep(read)  # work that leaves the cores alone, as that of a device does
        figures["reading"].append(1e6 * read)
        figures["reading and work"].append(1e6 * (time.perf_counter() - began) / 12)
        running.close()  # type: ignore[attr-defined]  # a generator
    target = Target("reading and work", "at most", 1.15, ("reading",))
    title = "A shuffled batch, cold, with work that takes as long as reading it: the longer of the two is the limit"
    return Table(title, "us", figures, {}, "reading", (target,))
