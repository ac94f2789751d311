"""Reductions of more than one wants to hold: seconds, and peak memory beside the number of the plan."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import page_cache
from benchmarks.machine import CoreUse
from benchmarks.report import Table, Target
from benchmarks.worker import status_kib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.options import Options

__all__ = ["measured", "run", "write_columns"]

_COLUMNS, _SHARDS = 64, 16
_REDUCTIONS = ("sum of all", "mean by column", "std by column", "max of all", "median of all")
_SAMPLE_S = 0.002
"""Seconds between two looks at a worker's memory."""
_MOST_SENT = 10_000
"""Elements of a result that are sent to be compared."""
_OURS, _MEMMAP, _DASK = "lazyshards numpy", "numpy on memory maps", "dask of memory maps"
_PLAN = "the plan's number"


def _ours(folder: Path, name: str) -> Callable[[], object]:
    import lazyshards

    ds = lazyshards.open_shards(folder, engine="numpy")
    return {
        "sum of all": lambda: ds.sum(dtype="f8"),
        "mean by column": lambda: ds.mean(axis=0, dtype="f8"),
        "std by column": lambda: ds.std(axis=0, dtype="f8"),
        "max of all": ds.max,
        "median of all": ds.median,
    }[name]


def _memmap(folder: Path, name: str) -> Callable[[], object] | None:
    """Reduce one map after the other by hand, in float64: what a person would write with NumPy alone."""
    maps = [np.load(path, mmap_mode="r") for path in sorted(folder.iterdir())]
    rows = sum(map(len, maps))

    def mean() -> object:
        return sum(part.sum(axis=0, dtype="f8") for part in maps) / rows

    def std() -> object:
        middle = mean()
        return np.sqrt(sum(np.square(part - middle).sum(axis=0) for part in maps) / rows)

    return {
        "sum of all": lambda: sum(part.sum(dtype="f8") for part in maps),
        "mean by column": mean,
        "std by column": std,
        "max of all": lambda: max(part.max() for part in maps),
    }.get(name)


def _dask(folder: Path, name: str) -> Callable[[], object] | None:
    import dask.array

    # 4 MiB, as our blocks, so that memory is compared fairly.
    parts = [np.load(path, mmap_mode="r") for path in sorted(folder.iterdir())]
    whole = dask.array.concatenate([dask.array.from_array(part, chunks=(16_384, -1)) for part in parts])
    made = {
        "sum of all": lambda: whole.sum(dtype="f8"),
        "mean by column": lambda: whole.mean(axis=0, dtype="f8"),
        "std by column": lambda: whole.std(axis=0, dtype="f8"),
        "max of all": whole.max,
    }.get(name)
    return None if made is None else lambda: made().compute()


_PEERS = {_OURS: _ours, _MEMMAP: _memmap, _DASK: _dask}


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark; the data, 8 GB, is written for it and deleted after."""
    nbytes = 256_000_000 if options.quick else 8_000_000_000
    folder = options.cache_dir / "reductions"
    try:
        write_columns(folder, nbytes)
        yield from _tables(folder, nbytes, options.turns(3))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_columns(folder: Path, nbytes: int) -> None:
    """Write float32 shards of 64 columns, of so many bytes together."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = nbytes // (4 * _COLUMNS * _SHARDS)
    values = np.random.default_rng(0).standard_normal((rows, _COLUMNS), "f4")
    for i in range(_SHARDS):  # drawing all of them would take longer than the rest
        np.save(folder / f"shard_{i:02}.npy", values + np.float32(10 + i / 16))


def _tables(folder: Path, nbytes: int, turns: int) -> Iterator[Table]:
    import lazyshards

    plan = lazyshards.open_shards(folder, engine="numpy").block_plan()
    page_cache.warm(sorted(folder.iterdir()))
    for name in _REDUCTIONS:
        use = CoreUse()
        seconds: dict[str, list[float]] = {}
        memory: dict[str, list[float]] = {}
        absent: dict[str, str] = {}
        results = {}
        for _ in range(turns):
            for peer, make in _PEERS.items():
                if peer in absent:
                    continue
                took, most, result, _ = measured(make, folder, name)
                if result is None:
                    absent[peer] = "cannot do it without holding everything"
                    continue
                seconds.setdefault(peer, []).append(took)
                memory.setdefault(peer, []).append(most / (1 << 20))
                results[peer] = result
        for peer, result in results.items():
            if not np.allclose(result, results[_OURS], rtol=1e-6):
                absent[peer] = f"WRONG RESULT: {result!r:.200}"
        memory[_PLAN] = [plan.peak_nbytes / (1 << 20)] * turns
        targets = ()
        if name != "median of all":  # which holds tables and what it collects as well
            targets = (Target(_OURS, "at most", 1.0, (_PLAN,)),)
        what = f"{name}, {nbytes / 1e9:g} GB float32, {_SHARDS} npy shards"
        yield Table(f"The {what}", "s", seconds, absent, _OURS, notes=(use.note(),))
        yield Table(f"Anonymous memory of the {what}", "MiB", memory, absent, _PLAN, targets)


def measured(
    make: Callable[[Path, str], Callable[[], object] | None], folder: Path, name: str
) -> tuple[float, int, NDArray[np.generic] | None, int]:
    """Return what a fresh process took for what ``make`` makes there.

    The seconds, the most anonymous memory over that before the call, the result, or some of its elements if they are
    many, and its bytes.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make, folder, name))
    process.start()
    there.close()
    here.recv()
    before = most = status_kib(process.pid or 0, "RssAnon", "RssShmem")
    here.send("go")
    while not here.poll(_SAMPLE_S):
        most = max(most, status_kib(process.pid or 0, "RssAnon", "RssShmem"))
    took, result, nbytes = here.recv()
    process.join()
    return took, (most - before) * 1024, result, nbytes


def _serve(
    connection: Connection, make: Callable[[Path, str], Callable[[], object] | None], folder: Path, name: str
) -> None:
    call = make(folder, name)
    connection.send("ready")
    connection.recv()
    began = time.perf_counter()
    result = None if call is None else np.asarray(call())
    took = time.perf_counter() - began
    nbytes = 0 if result is None else result.nbytes
    if result is not None and result.size > _MOST_SENT:
        result = result.reshape(-1)[:: result.size // _MOST_SENT].copy()
    connection.send((took, result, nbytes))
