"""What a reduction is: a state of each block, merged with its neighbour's, and finished."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Reducer", "Values", "accumulator", "may_hold_nan"]

S = TypeVar("S")

Values: TypeAlias = npt.NDArray[Any]
"""Of a reduction: reduced axes are there, of length 1."""


class Reducer(Protocol[S]):
    """A reduction over some axes of blocks."""

    @property
    def is_plain(self) -> bool:
        """Whether no copies of a block are made in a wider type: then blocks may be larger."""
        ...

    def partial(self, block: Values, first: int) -> S:
        """Return the state of a block that begins at row ``first``, which is neither written to nor kept."""
        ...

    def merge(self, left: S, right: S) -> S:
        """Return the state of two neighbours together."""
        ...

    def finish(self, state: S) -> Values:
        """Return the result, reduced axes kept with length 1."""
        ...

    def is_settled(self, state: S) -> bool:
        """Return whether further blocks can change nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Unsettled(Generic[S]):
    """A reduction that needs every block."""

    @property
    def is_plain(self) -> bool:
        """Return False."""
        return False

    def is_settled(self, state: S) -> bool:
        """Return False."""
        return False


def accumulator(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the type in which values of a result's type are added up: of floating ones at least float64.

    Parameters
    ----------
    dtype : dtype

    Examples
    --------
    >>> accumulator(np.dtype("f2")), accumulator(np.dtype("c8")), accumulator(np.dtype("i8"))
    (dtype('float64'), dtype('complex128'), dtype('int64'))
    """
    if dtype.kind == "f":
        return np.result_type(dtype, np.float64)
    return np.result_type(dtype, np.complex128) if dtype.kind == "c" else dtype


def may_hold_nan(dtype: np.dtype[np.generic]) -> bool:
    """Return whether elements can be NaN."""
    return dtype.kind in "fc"
