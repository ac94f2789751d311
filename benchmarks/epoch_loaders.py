"""Who reads the batches of an epoch: each yields those of the same shards, in an order of its own where it shuffles."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import kernels, legate_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Loader = Callable[["Shards", bool, int, int], Iterator[object]]

__all__ = ["HAND", "HOT", "LEGATE", "OURS", "OURS_LEGATE", "POOL", "SEED", "TAKE", "Shards", "by_hand", "ours", "pool"]

_HEADER_NBYTES = 128
"""What np.save writes before the rows of these shards."""
_POOL_THREADS = 128


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards of equal length, whose rows are read by number."""

    paths: list[Path]
    maps: list[NDArray[np.float32]]

    @classmethod
    def open(cls, paths: Sequence[Path]) -> Shards:
        """Map the files."""
        return cls(list(paths), [np.asarray(np.load(path, mmap_mode="r")) for path in paths])

    @property
    def rows(self) -> int:
        """Return the number of rows of all shards."""
        return sum(map(len, self.maps))

    @property
    def columns(self) -> int:
        """Return the elements of a row."""
        return int(self.maps[0].shape[1])

    def locate(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield shard, places in the batch and local rows, as everyone must find them who reads by hand."""
        holder, local = np.divmod(rows, len(self.maps[0]))
        for shard in range(len(self.maps)):
            places = np.flatnonzero(holder == shard)
            if len(places):
                yield shard, places, local[places]


def ours(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Take batches of the NumPy engine."""
    return _ours(shards, shuffle, seed, batch_rows, "numpy")


def _ours(shards: Shards, shuffle: bool, seed: int, batch_rows: int, engine: str) -> Iterator[object]:
    import lazyshards

    ds = lazyshards.open_shards(shards.paths[0].parent, engine=engine)
    return iter(ds.batches(batch_rows, shuffle=shuffle, seed=seed))


def _orders(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each batch."""
    order = np.random.default_rng(seed).permutation(shards.rows) if shuffle else np.arange(shards.rows)
    for start in range(0, shards.rows, batch_rows):
        yield order[start : start + batch_rows]


def by_hand(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Index memory maps, into a fresh array for each batch; sequential batches are slices."""
    maps = [np.load(path, mmap_mode="r") for path in shards.paths]
    length = len(maps[0])
    for rows in _orders(shards, shuffle, seed, batch_rows):
        out = np.empty((len(rows), shards.columns), np.float32)
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


def _take(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Take rows shard by shard, left in that order, into one array that stays."""
    out = np.empty((batch_rows, shards.columns), np.float32)
    for rows in _orders(shards, shuffle, seed, batch_rows):
        at = 0
        for shard, _, local in shards.locate(rows):
            np.take(shards.maps[shard], local, axis=0, out=out[at : at + len(local)], mode="clip")
            at += len(local)
        yield out[: len(rows)]


def pool(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Read each row by position, from many threads of C: a deep queue for a device."""
    read_rows = kernels.load().read_rows
    fds = np.array([os.open(path, os.O_RDONLY) for path in shards.paths], np.int32)
    row_nbytes = 4 * shards.columns
    try:
        for rows in _orders(shards, shuffle, seed, batch_rows):
            out = np.empty((len(rows), shards.columns), np.float32)
            files, local = np.divmod(rows, len(shards.maps[0]))
            offsets = _HEADER_NBYTES + local * row_nbytes
            where = (fds.ctypes.data, files.ctypes.data, offsets.ctypes.data, len(rows), row_nbytes)
            if read_rows(*where, _POOL_THREADS, out.ctypes.data) != len(rows):
                raise OSError("a row could not be read")
            yield out
    finally:
        for fd in fds.tolist():
            os.close(fd)


class _Rows:
    """Rows of memory maps, as a loader asks for them that takes any class with these two methods."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.rows

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        shard, local = divmod(int(row), len(self._shards.maps[0]))
        return np.array(self._shards.maps[shard][local])


def _torch(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Have a DataLoader ask a dataset of memory maps for the rows of a batch together."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    class Together(_Rows):
        def __getitem__(self, rows: Any) -> Any:
            found = np.asarray(rows)
            out = np.empty((len(found), shards.columns), np.float32)
            for shard, places, local in shards.locate(found):
                out[places] = shards.maps[shard][local]
            return torch.from_numpy(out)

    data: Any = Together(shards)
    generator = torch.Generator().manual_seed(seed)
    rows = RandomSampler(data, generator=generator) if shuffle else SequentialSampler(data)
    return iter(DataLoader(data, sampler=BatchSampler(rows, batch_rows, drop_last=False), batch_size=None))


def _torch_ours(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Have a DataLoader hand out our batches as tensors."""
    from torch.utils.data import DataLoader

    import lazyshards

    ds = lazyshards.open_shards(shards.paths[0].parent, engine="numpy")
    return iter(DataLoader(ds.batches(batch_rows, shuffle=shuffle, seed=seed).to_torch(), batch_size=None))


def _hugging_face(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Iterate over a dataset of the same rows, written in its own format once."""
    import datasets
    import pyarrow as pa

    folder = shards.paths[0].parent / "hugging_face"
    if not folder.exists():
        rows = [pa.FixedSizeListArray.from_arrays(pa.array(each.ravel()), shards.columns) for each in shards.maps]
        datasets.Dataset(pa.table({"x": pa.chunked_array(rows)})).save_to_disk(str(folder))
    data: Any = datasets.load_from_disk(str(folder))
    if shuffle:
        data = data.shuffle(seed=seed, keep_in_memory=True)
    return iter(data.with_format("numpy").iter(batch_size=batch_rows))


def _grain(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Have Grain take the rows of memory maps one by one, on as many threads as it likes, and batch them."""
    import grain

    data: Any = grain.MapDataset.source(_Rows(shards))
    if shuffle:
        data = data.shuffle(seed=seed)
    return iter(data.to_iter_dataset().batch(batch_rows))


OURS = "lazyshards batches"
TAKE = "limit: np.take from maps, one warm destination"
HAND = "np.memmap by hand"
POOL = f"limit: preadv of each row, {_POOL_THREADS} C threads"
HOT: dict[str, Loader] = {
    OURS: ours,
    TAKE: _take,
    HAND: by_hand,
    "torch DataLoader, batched sampler": _torch,
    "torch DataLoader over lazyshards batches": _torch_ours,
    "HF datasets, batches of its iter()": _hugging_face,
    "Grain, row by row": _grain,
}
"""Those whose batches are NumPy arrays or tensors."""


def _ours_legate(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    return _ours(shards, shuffle, seed, batch_rows, "legate")


def _seed(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Load a slice for each batch; the recipe has no shuffle."""
    if shuffle:
        raise ImportError("the recipe knows no shuffle")
    legate_start.start()
    from benchmarks.peers import seed_recipe

    paths, cum_rows = seed_recipe.walk(str(shards.paths[0].parent))
    for start in range(0, cum_rows[-1], batch_rows):
        yield seed_recipe.load(paths, cum_rows, start, min(start + batch_rows, cum_rows[-1]))


def _loaded(shards: Shards, shuffle: bool, seed: int, batch_rows: int) -> Iterator[object]:
    """Load all, then index the cuPyNumeric array."""
    legate_start.start()
    import cupynumeric

    import lazyshards

    whole = lazyshards.open_shards(shards.paths[0].parent, engine="legate").compute()
    for rows in _orders(shards, shuffle, seed, batch_rows):
        yield whole[cupynumeric.array(rows)] if shuffle else whole[int(rows[0]) : int(rows[-1]) + 1]


OURS_LEGATE = "lazyshards batches, Legate"
SEED = "seed recipe, a slice a batch"
LEGATE: dict[str, Loader] = {
    OURS: ours,
    OURS_LEGATE: _ours_legate,
    SEED: _seed,
    "cuPyNumeric, all loaded before, arr[rows]": _loaded,
}
"""Those that are measured in a process where Legate runs."""
