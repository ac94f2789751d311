"""Batches of rows: sequential and shuffled, hot and cold, small rows and large, and how reading overlaps work."""

from __future__ import annotations

import multiprocessing
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
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.options import Options

__all__ = ["run"]

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


def _ours(shards: _Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    import lazyshards

    ds = lazyshards.open_shards(shards.paths[0].parent, engine="numpy")
    return iter(ds.batches(batch_rows, shuffle=shuffle, seed=seed))


def _orders(shards: _Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each batch."""
    order = np.random.default_rng(seed).permutation(shards.rows) if shuffle else np.arange(shards.rows)
    for start in range(0, shards.rows, batch_rows):
        yield order[start : start + batch_rows]


def _by_hand(shards: _Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Index memory maps, into a fresh array for each batch; sequential batches are slices."""
    maps = [np.load(path, mmap_mode="r") for path in shards.paths]
    length = len(maps[0])
    for rows in _orders(shards, shuffle, seed, batch_rows):
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


def _take(shards: _Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Take rows shard by shard, left in that order, into one array that stays."""
    out = np.empty((batch_rows, shards.maps[0].shape[1]), np.float32)
    for rows in _orders(shards, shuffle, seed, batch_rows):
        at = 0
        for shard, _, local in shards.locate(rows):
            np.take(shards.maps[shard], local, axis=0, out=out[at : at + len(local)], mode="clip")
            at += len(local)
        yield out[: len(rows)]


def _torch(shards: _Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
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
    return iter(DataLoader(Rows(), sampler=BatchSampler(rows, batch_rows, drop_last=False), batch_size=None))


def _pool(shards: _Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Read each row by position, from many threads: a deep queue for a device."""
    import os

    fds = [os.open(path, os.O_RDONLY) for path in shards.paths]
    row_nbytes = shards.maps[0].shape[1] * 4

    def read(piece: tuple[NDArray[np.float32], list[tuple[int, int]]]) -> None:
        for row, (shard, local) in zip(*piece, strict=True):
            os.preadv(fds[shard], [row.data.cast("B")], 128 + local * row_nbytes)

    with ThreadPoolExecutor(32) as pool:
        for rows in _orders(shards, shuffle, seed, batch_rows):
            out = np.empty((len(rows), shards.maps[0].shape[1]), np.float32)
            places = list(zip(*[each.tolist() for each in np.divmod(rows, len(shards.maps[0]))], strict=True))
            list(pool.map(read, [(out[i : i + 32], places[i : i + 32]) for i in range(0, len(rows), 32)]))
            yield out
    for fd in fds:
        os.close(fd)


_Figures = "tuple[dict[str, list[float]], dict[str, str]]"
_Loader = "Callable[[_Shards, bool, int, int], Iterator[object]]"


def _open(paths: Sequence[Path]) -> _Shards:
    return _Shards(list(paths), [np.asarray(np.load(path, mmap_mode="r")) for path in paths])


def _seconds(loader: _Loader, shards: _Shards, shuffle: bool, seed: int, batch_rows: int, batches: int) -> float:
    """Return the seconds that a batch takes, the first one left out."""
    running = loader(shards, shuffle, seed, batch_rows)
    next(running)
    began = time.perf_counter()
    count = sum(1 for _ in islice(running, batches))
    took = time.perf_counter() - began
    if close := getattr(running, "close", None):
        close()
    return took / count


def _hot(loaders: dict[str, _Loader], shards: _Shards, shuffle: bool, turns: int, size: tuple[int, int]) -> _Figures:
    figures: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for turn in range(turns):
        for name, loader in loaders.items():
            if name in absent:
                continue
            try:
                figures.setdefault(name, []).append(1e6 * _seconds(loader, shards, shuffle, turn, *size))
            except ImportError as exc:
                absent[name] = str(exc)
                figures.pop(name, None)
    return figures, absent


def _in_child(function: Callable[..., float], paths: Sequence[Path], *arguments: object) -> float:
    """Return what a function returns in a fresh process, cold: a page that a process has mapped cannot be dropped."""
    page_cache.drop(paths)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (paths, *arguments))


def _cold_seconds(paths: Sequence[Path], loader: _Loader, seed: int, size: tuple[int, int]) -> float:
    return _seconds(loader, _open(paths), True, seed, *size)


def _working_seconds(paths: Sequence[Path], seed: int, size: tuple[int, int], work: float) -> float:
    """Return the seconds that a batch takes with work that leaves the cores alone, as that of a device does."""
    running = _ours(_open(paths), True, seed, size[0])
    next(running)
    began = time.perf_counter()
    for _ in islice(running, size[1]):
        time.sleep(work)
    return (time.perf_counter() - began) / size[1]


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    nbytes = options.load_nbytes // 4
    for row_nbytes, batch_rows, share in ((256, 1_024, 0.7), (4 << 10, 1_024, 0.85), (150 << 10, 128, 0.85)):
        paths = _write(options.cache_dir, row_nbytes, nbytes)
        rows = nbytes // row_nbytes
        size = (batch_rows, max(2, min(400, rows // batch_rows - 2)))
        what = f"{batch_rows:,} rows of {row_nbytes:,} bytes, of {nbytes / 1e9:g} GB in {_SHARDS} npy shards"
        yield from _cold(paths, (batch_rows, min(size[1], 20)), row_nbytes == 256, what, options.turns(3))
        shards = _open(paths)
        page_cache.warm(paths)
        for each in shards.maps:
            each[:: max(1, 4096 // row_nbytes)].sum()
        for shuffle in (True, False):
            use = CoreUse()
            loaders: dict[str, _Loader] = {_OURS: _ours, _TAKE: _take, _MEMMAP: _by_hand, _TORCH: _torch}
            figures, absent = _hot(loaders, shards, shuffle, options.turns(7), size)
            targets = (
                (Target(_OURS, "at least", share, (_TAKE,)), Target(_OURS, "at least", 1.5, (_MEMMAP,)))
                if shuffle
                else (Target(_OURS, "at least", 0.6, (_MEMMAP,)),)
            )
            title = f"A {'shuffled' if shuffle else 'sequential'} batch of {what}, hot"
            yield Table(title, "us", figures, absent, _MEMMAP, targets, (use.note(),))


def _cold(paths: Sequence[Path], size: tuple[int, int], small: bool, what: str, turns: int) -> Iterator[Table]:
    """Yield the tables of batches that are not in the page cache, each in a fresh process."""
    use = CoreUse()
    loaders: dict[str, _Loader] = {_OURS: _ours, _POOL: _pool, _MEMMAP: _by_hand}
    figures: dict[str, list[float]] = {name: [] for name in (*loaders, "with work as long")}
    for turn in range(turns):
        for name, loader in loaders.items():
            # By hand a small row takes a wait for the device: a batch of them is enough to see it.
            few = (size[0], 1 if name == _MEMMAP else size[1])
            figures[name].append(1e6 * _in_child(_cold_seconds, paths, loader, turn, few))
        work = figures[_OURS][-1] / 1e6
        figures["with work as long"].append(1e6 * _in_child(_working_seconds, paths, turn, size, work))
    targets = (
        Target(_OURS, "at least", 1.2 if small else 0.8, (_POOL,)),
        Target("with work as long", "at most", 1.15, (_OURS,)),
    )
    yield Table(f"A shuffled batch of {what}, cold", "us", figures, {}, _POOL, targets, (use.note(),))
