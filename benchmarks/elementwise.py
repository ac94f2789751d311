"""Work on elements that is done as rows are read: seconds, and peak memory beside that of the result."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import page_cache
from benchmarks.machine import CoreUse
from benchmarks.reductions import measured, write_columns
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.options import Options

__all__ = ["run"]

_OURS, _MEMMAP, _DASK = "lazyshards numpy", "numpy on memory maps", "dask of memory maps"
_RESULT = "the result"
_WORKS = ("standard scores", "standard scores, summed", "clipped roots of every other column")
_MEAN, _STD = np.linspace(9, 11, 64, dtype="f4"), np.linspace(1, 2, 64, dtype="f4")


def _ours(folder: Path, name: str) -> Callable[[], object]:
    import lazyshards

    ds = lazyshards.open_shards(folder, engine="numpy")
    return {
        _WORKS[0]: ((ds - _MEAN) / _STD).compute,
        _WORKS[1]: lambda: ((ds - _MEAN) / _STD).sum(axis=0, dtype="f8"),
        _WORKS[2]: lambda: np.sqrt(ds[:, ::2].clip(0, 12)).compute(),
    }[name]


def _memmap(folder: Path, name: str) -> Callable[[], object]:
    """Work on one map after the other by hand, as a person would with NumPy alone: whole expressions of each shard."""
    maps = [np.load(path, mmap_mode="r") for path in sorted(folder.iterdir())]
    return {
        _WORKS[0]: lambda: np.concatenate([(part - _MEAN) / _STD for part in maps]),
        _WORKS[1]: lambda: sum(((part - _MEAN) / _STD).sum(axis=0, dtype="f8") for part in maps),
        _WORKS[2]: lambda: np.concatenate([np.sqrt(part[:, ::2].clip(0, 12)) for part in maps]),
    }[name]


def _dask(folder: Path, name: str) -> Callable[[], object]:
    import dask.array

    parts = [np.load(path, mmap_mode="r") for path in sorted(folder.iterdir())]
    whole = dask.array.concatenate([dask.array.from_array(part, chunks=(16_384, -1)) for part in parts])
    made = {
        _WORKS[0]: lambda: (whole - _MEAN) / _STD,
        _WORKS[1]: lambda: ((whole - _MEAN) / _STD).sum(axis=0, dtype="f8"),
        _WORKS[2]: lambda: np.sqrt(whole[:, ::2].clip(0, 12)),
    }[name]
    return lambda: made().compute()


_PEERS = {_OURS: _ours, _MEMMAP: _memmap, _DASK: _dask}


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark; the data, 1 GB, is written for it and deleted after."""
    nbytes = 128_000_000 if options.quick else 1_000_000_000
    folder = options.cache_dir / "elementwise"
    try:
        write_columns(folder, nbytes)
        page_cache.warm(sorted(folder.iterdir()))
        for name in _WORKS:
            yield from _tables(folder, name, nbytes, options.turns(5))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tables(folder: Path, name: str, nbytes: int, turns: int) -> Iterator[Table]:
    use = CoreUse()
    seconds: dict[str, list[float]] = {peer: [] for peer in _PEERS}
    memory: dict[str, list[float]] = {peer: [] for peer in _PEERS}
    wrong: dict[str, str] = {}
    results: dict[str, NDArray[np.generic] | None] = {}
    result_nbytes = 0
    for _ in range(turns):
        for peer, make in _PEERS.items():
            took, most, results[peer], result_nbytes = measured(make, folder, name)
            seconds[peer].append(took)
            memory[peer].append(most / (1 << 20))
    for peer, result in results.items():
        if not np.allclose(result, results[_OURS], rtol=1e-5):  # type: ignore[arg-type]  # every peer can
            wrong[peer] = f"WRONG RESULT: {result!r:.200}"
    memory[_RESULT] = [result_nbytes / (1 << 20)] * turns
    what = f"{name}, of {nbytes / 1e9:g} GB float32 in npy shards"
    yield Table(
        f"The {what}", "s", seconds, wrong, _OURS, (Target(_OURS, "at most", 1.0, (_MEMMAP, _DASK)),), (use.note(),)
    )
    yield Table(f"Anonymous memory of the {what}", "MiB", memory, wrong, _RESULT)
