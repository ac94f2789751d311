"""The recipe that people write by hand today, as plainly as they write it: Legate, module globals, np.load, a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import legate_start
from benchmarks.peers import Call, Opened, Peer, opened_fault

if TYPE_CHECKING:
    from benchmarks.datasets import Dataset

__all__ = ["LOAD", "OPEN", "SLICE"]


def _load(dataset: Dataset) -> Call:
    """Walk the shards and load in each call."""
    legate_start.start()
    from benchmarks.peers import seed_recipe

    def call(rows: range) -> object:
        paths, cum_rows = seed_recipe.walk(str(dataset.folder))
        return seed_recipe.load(paths, cum_rows, rows.start, rows.stop)

    return call


def _slice(dataset: Dataset) -> Call:
    """Walk the shards once, then load a range of rows in each call."""
    legate_start.start()
    from benchmarks.peers import seed_recipe

    paths, cum_rows = seed_recipe.walk(str(dataset.folder))
    return lambda rows: seed_recipe.load(paths, cum_rows, rows.start, rows.stop)


def _open(dataset: Dataset) -> Call:
    legate_start.start()
    from benchmarks.peers import seed_recipe

    def call(_: range) -> Opened:
        paths, cum_rows = seed_recipe.walk(str(dataset.folder))
        return Opened(cum_rows[-1], (paths, cum_rows))

    return call


LOAD = Peer("seed recipe", _load, takes_numpy=False)
SLICE = Peer("seed recipe", _slice, takes_numpy=False)
OPEN = Peer("seed recipe: np.load walk", _open, opened_fault)
