"""What an engine is: what allocates the result and runs the leaf once for each tile."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from lazyshards.plan import Capacity, ReadPlan
from lazyshards.progress import Progress

__all__ = ["Array", "Engine", "PendingResult", "overlaps"]

Array: TypeAlias = Any
"""An array of the engine's own type: numpy.ndarray, cupynumeric.ndarray or cupy.ndarray."""


class PendingResult(Protocol):
    """A result that is being read."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for any more."""
        ...

    def result(self) -> Array:
        """Wait for it, or raise what went wrong."""
        ...

    def cancel(self) -> None:
        """Give it up; returns when nobody writes into it any more."""
        ...


class Engine(Protocol):
    """What allocates the result and runs the leaf once for each tile."""

    @property
    def name(self) -> str:
        """The name by which it is asked for."""
        ...

    @property
    def together_nbytes(self) -> int:
        """Bytes of small results that are better read as one result and handed out as views of it."""
        ...

    def why_not(self, dtype: np.dtype[np.generic], ndim: int) -> str | None:
        """Return why arrays of this dtype and number of axes cannot be held, or None if they can."""
        ...

    def capacity(self, nbytes: int = 0, *, ahead: bool = False) -> Capacity:
        """Return what the engine can hold now, of a result of ``nbytes``, which `begin` will read if ``ahead``."""
        ...

    def execute(self, plan: ReadPlan, *, out: Array | None = None, progress: Progress | None = None) -> Array:
        """Run the plan and return the filled array, of the plan's shape, or raise; nothing half-filled is returned.

        Blocks until every tile is done; ``progress`` is called, on this thread, with the rows of each that is.
        """
        ...

    def begin(self, plan: ReadPlan, *, may_block: bool = False) -> PendingResult:
        """Begin to run the plan, to be waited for later; called between entering and leaving `reading`.

        What takes no longer than handing it to another thread may be read at once if ``may_block``; its error, too, is
        raised when it is waited for.
        """
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Return what must be entered while results are pending."""
        ...


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of an array may lie over one another, so that it cannot hold a result.

    Rare arrays whose elements interleave, as only ``as_strided`` makes them, count as if they did.

    Parameters
    ----------
    shape : sequence of int
    strides : sequence of int
        In elements, or in bytes with the size of an element as a last axis.

    Examples
    --------
    >>> overlaps((40, 3), (3, 1)), overlaps((40, 3), (0, 1))
    (False, True)
    """
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
