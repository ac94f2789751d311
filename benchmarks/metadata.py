"""What is known of shards before any row is read: a manifest beside them, and one of a million."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import datasets
from benchmarks.machine import CoreUse
from benchmarks.measure import in_warm_processes
from benchmarks.peers import Call, Opened, Peer, limits, opened_fault, ours
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.datasets import Dataset
    from benchmarks.options import Options

__all__ = ["run"]

_MANY = 1_000_000
_FEW = 1_000
_CALLS = 200
"""Slices planned in one turn: each takes microseconds."""


def _with_manifest(dataset: Dataset) -> Call:
    """Open the directory with the manifest that lies in it."""
    return ours.open_with(manifest="require", prepare=_index)(dataset)


def _index(dataset: Dataset) -> None:
    import lazyshards

    lazyshards.open_shards(dataset.folder, engine="numpy", manifest="ignore").save_manifest()


def _without(dataset: Dataset) -> Call:
    return ours.open_with(manifest="ignore", prepare=_index)(dataset)


def _by_name(dataset: Dataset) -> Call:
    """Open the manifest by its own name, so that nothing is listed."""
    import lazyshards

    _index(dataset)
    path = dataset.folder / "_lazyshards.arrow"

    def call(_: range) -> Opened:
        shards = lazyshards.open_shards(path, engine="numpy")
        return Opened(len(shards), shards)

    return call


def _scandir(dataset: Dataset) -> Call:
    """List the directory and look at each file: what tells whether anything changed, in a bare loop."""
    _index(dataset)

    def call(_: range) -> Opened:
        found = [(entry.path, entry.stat()) for entry in os.scandir(dataset.folder)]
        return Opened(dataset.rows, found)

    return call


_OPENING = (
    limits.OPEN,
    Peer("limit: Python loop of scandir and stat", _scandir, opened_fault),
    Peer("lazyshards, manifest in the directory", _with_manifest, opened_fault),
    Peer("lazyshards, manifest by name", _by_name, opened_fault),
    Peer("lazyshards, headers", _without, opened_fault),
)
_OPENING_TARGETS = (
    Target(_OPENING[2].name, "at most", 2.5, (limits.OPEN.name,)),
    Target(_OPENING[2].name, "at least", 1.2, (_OPENING[4].name,)),
)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    for shards in (5_000, 50_000) if options.full else (5_000,):
        dataset = datasets.many_shards(options.cache_dir / "indexed", shards)
        use = CoreUse()
        turns = [(range(dataset.rows),)] * options.turns(5)
        measured = in_warm_processes(_OPENING, dataset, turns)
        yield Table(
            f"Opening {shards:,} npy shards, hot",
            "ms",
            measured.figures(lambda timing: 1e3 * timing.call),
            measured.absent,
            limits.OPEN.name,
            _OPENING_TARGETS,
            (*measured.notes, use.note()),
        )
    yield from _million(options)


def _million(options: Options) -> Iterator[Table]:
    """Yield what a manifest of a million shards costs, none of which is there, beside one of a thousand."""
    import pyarrow as pa

    import lazyshards

    paths = {count: _write_manifest(options.cache_dir / f"manifest-{count}", count) for count in (_FEW, _MANY)}
    path = paths[_MANY]

    def read() -> bytes:
        return path.read_bytes()

    def read_table() -> pa.Table:
        return pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()

    def make_tuples() -> list[tuple[object, ...]]:
        table = read_table()
        return list(zip(*[column.to_pylist() for column in table.columns], strict=True))

    ways = {
        "limit: read the file": read,
        "pyarrow, a table": read_table,
        "pyarrow, a tuple for each shard": make_tuples,
        "lazyshards": lambda: lazyshards.open_shards(path, engine="numpy"),
    }
    use = CoreUse()
    yield Table(
        f"Opening a manifest of {_MANY:,} shards, hot",
        "ms",
        _take_turns(ways, options.turns(5), 1e3),
        baseline="limit: read the file",
        targets=(Target("lazyshards", "at most", 1_000.0),),
        notes=(use.note(), f"{path.stat().st_size / 1e6:.0f} MB."),
    )
    opened = {count: lazyshards.open_shards(place, engine="numpy") for count, place in paths.items()}
    for what, act in _ACTS.items():
        use = CoreUse()
        names = {count: f"{count:,} shards" for count in opened}
        yield Table(
            f"{what}, mean of {_CALLS} calls",
            "µs",
            _take_turns(
                {names[count]: _repeated(act, opened[count]) for count in opened}, options.turns(7), 1e6 / _CALLS
            ),
            baseline=names[_FEW],
            targets=(Target(names[_MANY], "at most", 1.5, (names[_FEW],)),),
            notes=(use.note(),),
        )


_ACTS: dict[str, Callable[..., object]] = {
    "Slicing 4,000 rows": lambda ds: ds[1_000:5_000],
    "Slicing 4,000 rows and planning": lambda ds: ds[1_000:5_000].plan(),
    "Indexing 4 rows and planning": lambda ds: ds[[5, 9_000, 70, -3]].plan(),
    "repr": repr,
}


def _repeated(act: Callable[..., object], ds: object) -> Callable[[], object]:
    def call() -> None:
        for _ in range(_CALLS):
            act(ds)

    return call


def _take_turns(ways: dict[str, Callable[[], object]], turns: int, scale: float) -> dict[str, list[float]]:
    """Time all ways turn by turn, after one call of each that is not timed."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            result = way()
            taken = time.perf_counter() - start
            del result
            if turn:
                figures[name].append(scale * taken)
    return figures


def _write_manifest(folder: Path, count: int) -> Path:
    """Write the manifest of npy shards of 8 to 23 rows that are not there."""
    from lazyshards import manifest
    from lazyshards.layout import Layout, Names
    from lazyshards.storage import LocalStorage

    path = folder / manifest.NAME
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = 8 + np.arange(count) * 7 % 16
        names = Names.of([f"shard_{i:07d}.npy" for i in range(count)])
        stamps = np.stack([128 + rows * 256, 10**18 + np.arange(count), 1 + np.arange(count)], 1)
        shape, dtype = (64,), np.dtype("f4")
        offsets = np.full(count, 128)
        layout = Layout("npy", LocalStorage(), shape, dtype, f"{folder}/", names, np.cumsum(rows), stamps, offsets)
        manifest.save(layout)
    return path
