"""The peers: one adapter for each way to do the job, ours, other people's, and the limits of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from benchmarks.datasets import Dataset

__all__ = ["Call", "Opened", "Peer", "opened_fault", "rows_fault"]

Call = Callable[[range], object]
"""The part that is timed: take global rows, return the result."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening a dataset gave."""

    rows: int
    """Rows found."""
    handle: object
    """Whatever the peer would go on with."""


def rows_fault(result: object, dataset: Dataset, rows: range) -> str:
    """Return what is wrong with a result that should hold the values of ``rows``, or an empty string."""
    return dataset.fault(np.asarray(result), rows)


def opened_fault(result: object, dataset: Dataset, rows: range) -> str:
    """Return what is wrong with an opened dataset that should have ``rows``, or an empty string."""
    if isinstance(result, Opened) and result.rows == len(rows):
        return ""
    return f"found {result!r:.80}, expected {len(rows)} rows in {dataset.folder.name}"


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to do the job, as module-level functions, so that it can be sent to another process."""

    name: str
    """The name in the table."""
    setup: Callable[[Dataset], Call]
    """Import, open and allocate what is not timed, and return what is. An ImportError makes the peer absent."""
    check: Callable[[object, Dataset, range], str] = rows_fault
    """Return what is wrong with a result, or an empty string."""
    home: str = ""
    """Peers with one home share one process, and so its warm memory. By default each has its own."""
    takes_numpy: bool = True
    """Whether the result already is a NumPy array, so that np.asarray of it is free by nature."""
