"""Whether any, whether all, and how many elements of blocks are not zero."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lazyshards.reductions.reducers import Unsettled, Values

__all__ = ["Nonzero", "Truth"]


@dataclass(frozen=True, slots=True)
class Truth:
    """Whether any or all elements are true."""

    axes: tuple[int, ...]
    every: bool

    @property
    def _join(self) -> np.ufunc:
        return np.logical_and if self.every else np.logical_or

    @property
    def is_plain(self) -> bool:
        """Return True."""
        return True

    def partial(self, block: Values, first: int) -> Values:
        """Return that of a block."""
        found: Values = self._join.reduce(block, axis=self.axes, dtype=np.bool_, keepdims=True)
        return found

    def merge(self, left: Values, right: Values) -> Values:
        """Return that of both."""
        found: Values = self._join(left, right)
        return found

    def finish(self, state: Values) -> Values:
        """Return it."""
        return state

    def is_settled(self, state: Values) -> bool:
        """Return whether every result is decided: no further block is read then."""
        return bool(not state.any() if self.every else state.all())


@dataclass(frozen=True, slots=True)
class Nonzero(Unsettled[npt.NDArray[np.intp]]):
    """How many elements are not zero."""

    axes: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Return True."""
        return True

    def partial(self, block: Values, first: int) -> npt.NDArray[np.intp]:
        """Return that of a block."""
        if len(self.axes) == block.ndim:  # NumPy counts all of an array much faster
            return np.full((1,) * block.ndim, np.count_nonzero(block), np.intp)
        return np.asarray(np.count_nonzero(block, axis=self.axes, keepdims=True))

    def merge(self, left: npt.NDArray[np.intp], right: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return that of both."""
        return left + right

    def finish(self, state: npt.NDArray[np.intp]) -> Values:
        """Return it."""
        return state
