"""Sums, means and variances of blocks, in float64 at least, and how those of two neighbours are merged."""

import warnings
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.reductions.reducers import Unsettled, Values, accumulator, may_hold_nan

__all__ = ["Mean", "Moments", "State", "Sum", "Variance", "count_rest", "without"]


class State(NamedTuple):
    """What is known of the elements that were reduced."""

    count: Any
    """How many: one number, or, where NaN are left out, one for each result."""
    total: Values
    """Their sum."""
    squares: Values | None = None
    """Sum of the squares of what they differ from their mean."""


@dataclass(frozen=True, slots=True)
class _Summing(Unsettled[State]):
    axes: tuple[int, ...]
    """Axes of a block that are reduced."""
    dtype: np.dtype[np.generic]
    """Of the result."""
    skip_nan: bool

    def _count(self, block: Values) -> tuple[Any, npt.NDArray[np.bool_] | None]:
        """Return how many elements are reduced, and which are not, if any could be; those are to be taken as 0."""
        if not (self.skip_nan and may_hold_nan(block.dtype)):
            return prod([block.shape[axis] for axis in self.axes]), None
        missing = np.isnan(block)
        return count_rest(missing, self.axes), missing


def count_rest(missing: npt.NDArray[np.bool_], axes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return how many elements are not missing."""
    missed = np.add.reduce(missing, axis=axes, dtype=np.int64, keepdims=True)
    rest: npt.NDArray[np.int64] = prod([missing.shape[axis] for axis in axes]) - missed
    return rest


def without(block: Values, missing: npt.NDArray[np.bool_] | None) -> Values:
    """Return a block with 0 in place of what is missing; the block itself if nothing is."""
    if missing is None or not missing.any():
        return block
    return np.where(missing, block.dtype.type(0), block)


@dataclass(frozen=True, slots=True)
class Sum(_Summing):
    """The sum; integers wrap as NumPy's do."""

    @property
    def is_plain(self) -> bool:
        """Return True."""
        return True

    def partial(self, block: Values, first: int) -> State:
        """Return the sum of a block."""
        count, missing = self._count(block)
        block = without(block, missing)
        # NumPy takes no unit of time with a dtype, and needs none.
        dtype = None if self.dtype.kind == "m" else accumulator(self.dtype)
        return State(count, np.add.reduce(block, axis=self.axes, dtype=dtype, keepdims=True))

    def merge(self, left: State, right: State) -> State:
        """Return the sum of both."""
        return State(left.count + right.count, np.add(left.total, right.total))

    def finish(self, state: State) -> Values:
        """Return the sum in the type of the result."""
        return state.total.astype(self.dtype)


@dataclass(frozen=True, slots=True)
class Mean(Sum):
    """The mean."""

    def finish(self, state: State) -> Values:
        """Return the mean; where NaN were left out and nothing is left, NaN with a warning."""
        if self.skip_nan and not np.all(state.count):
            warnings.warn("Mean of empty slice", RuntimeWarning, stacklevel=2)
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = np.true_divide(state.total, state.count)
        else:
            mean = np.true_divide(state.total, state.count)
        return np.asarray(mean, self.dtype)


@dataclass(frozen=True, slots=True)
class Moments(_Summing):
    """Count, sum and sum of squared deviations: of a block in two passes over it, of two blocks as Chan et al. merge.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    def partial(self, block: Values, first: int) -> State:
        """Return the moments of a block."""
        count, missing = self._count(block)
        block = without(block, missing)
        dtype = accumulator(np.result_type(block.dtype, np.float16))
        total = np.add.reduce(block, axis=self.axes, dtype=dtype, keepdims=True)
        rest = np.subtract(block, total / np.maximum(count, 1), dtype=dtype)
        if missing is not None:
            np.copyto(rest, 0, where=missing)
        if dtype.kind == "c":
            squared = np.square(rest.real)
            squared += np.square(rest.imag)
        else:
            squared = np.multiply(rest, rest, out=rest)
        return State(count, total, np.add.reduce(squared, axis=self.axes, keepdims=True))

    def merge(self, left: State, right: State) -> State:
        """Return the moments of both."""
        assert left.squares is not None
        assert right.squares is not None
        a, b = np.asarray(left.count, np.float64), np.asarray(right.count, np.float64)
        both = np.maximum(a + b, 1)
        apart = right.total / np.maximum(b, 1) - left.total / np.maximum(a, 1)
        between = np.square(apart.real) + np.square(apart.imag) if apart.dtype.kind == "c" else np.square(apart)
        between *= a / both * b
        if np.ndim(a):
            # Where one has nothing, its mean says nothing: 0 times infinity would be NaN.
            between = np.where((a == 0) | (b == 0), 0, between)
        return State(left.count + right.count, left.total + right.total, left.squares + right.squares + between)

    def finish(self, state: State) -> Values:
        """Return the sum of squared deviations."""
        assert state.squares is not None
        return state.squares


@dataclass(frozen=True, slots=True)
class Variance(Moments):
    """The variance, or its root."""

    ddof: float
    root: bool

    def finish(self, state: State) -> Values:
        """Return the variance, or the standard deviation; NumPy's warning where there are too few elements."""
        assert state.squares is not None
        freedom = np.asarray(state.count - self.ddof)
        if np.any(freedom <= 0):
            warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
        if np.ndim(state.count):  # NaN were left out; of what holds none, NumPy's nanvar() is var()
            with np.errstate(invalid="ignore", divide="ignore"):
                result = np.where(freedom > 0, state.squares / freedom, np.nan)
        else:
            result = np.true_divide(state.squares, np.maximum(freedom, 0))
        return (np.sqrt(result) if self.root else result).astype(self.dtype)
