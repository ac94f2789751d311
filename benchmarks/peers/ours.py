"""lazyshards itself, on each engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import legate_start
from benchmarks.peers import Call, Opened, Peer, opened_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.datasets import Dataset

__all__ = ["LOADS", "OPEN", "SLICES", "open_with"]


def _prepare(engine: str) -> None:
    """Bring the engine up, so that no import is timed: the peers' imports are not either."""
    if engine == "legate":
        legate_start.start()
    import lazyshards

    lazyshards.set_engine(engine)


def _load(engine: str, dataset: Dataset) -> Call:
    """Open and compute in each call, as a script does once."""
    _prepare(engine)
    import lazyshards

    return lambda rows: lazyshards.open_shards(dataset.folder)[rows.start : rows.stop].compute(engine=engine)


def _slice(engine: str, dataset: Dataset) -> Call:
    """Open once, then index, plan and compute in each call."""
    _prepare(engine)
    import lazyshards

    shards = lazyshards.open_shards(dataset.folder)
    return lambda rows: shards[rows.start : rows.stop].compute(engine=engine)


def _open(dataset: Dataset, manifest: str = "auto", before: Callable[[Dataset], None] | None = None) -> Call:
    _prepare("numpy")
    import lazyshards

    if before is not None:
        before(dataset)

    def call(_: range) -> Opened:
        shards = lazyshards.open_shards(dataset.folder, manifest=manifest)
        return Opened(len(shards), shards)

    return call


def open_with(*, manifest: str, prepare: Callable[[Dataset], None]) -> Callable[[Dataset], Call]:
    """Return the setup of opening by a policy, after something was prepared that is not timed."""
    return partial(_open, manifest=manifest, before=prepare)


LOADS = (
    Peer("lazyshards legate", partial(_load, "legate"), takes_numpy=False),
    Peer("lazyshards numpy", partial(_load, "numpy")),
)
SLICES = (
    Peer("lazyshards numpy", partial(_slice, "numpy")),
    Peer("lazyshards legate", partial(_slice, "legate"), takes_numpy=False),
)
OPEN = Peer("lazyshards", _open, opened_fault)
