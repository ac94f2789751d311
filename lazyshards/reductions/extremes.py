"""Least and greatest elements of blocks, and where they are."""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.reductions.reducers import Unsettled, Values, may_hold_nan

__all__ = ["Extreme", "Place", "PlaceOfExtreme"]


@dataclass(frozen=True, slots=True)
class Extreme(Unsettled[Values]):
    """The least or the greatest element; NaN wins unless it is left out."""

    axes: tuple[int, ...]
    greatest: bool
    skip_nan: bool

    @property
    def _pick(self) -> np.ufunc:
        if self.skip_nan:
            return np.fmax if self.greatest else np.fmin
        return np.maximum if self.greatest else np.minimum

    @property
    def is_plain(self) -> bool:
        """Return True."""
        return True

    def partial(self, block: Values, first: int) -> Values:
        """Return that of a block."""
        found: Values = self._pick.reduce(block, axis=self.axes, keepdims=True)
        return found

    def merge(self, left: Values, right: Values) -> Values:
        """Return that of both."""
        found: Values = self._pick(left, right)
        return found

    def finish(self, state: Values) -> Values:
        """Return it, with NumPy's warning where everything was NaN."""
        if self.skip_nan and state.dtype.kind in "fcmM" and np.isnan(state).any():
            warnings.warn("All-NaN slice encountered", RuntimeWarning, stacklevel=2)
        return state


class Place(NamedTuple):
    """Elements, and where they were found."""

    value: Values
    where: npt.NDArray[np.intp]
    empty: Values | None
    """Whether there was nothing but NaN; None if these are not left out."""


@dataclass(frozen=True, slots=True)
class PlaceOfExtreme(Unsettled[Place]):
    """Where the first least or greatest element is; the first NaN wins unless they are left out."""

    axis: int | None
    """Axis of a block; None for all of them, the place then being counted through all elements."""
    greatest: bool
    skip_nan: bool

    def _find(self, values: Values, axis: int) -> npt.NDArray[np.intp]:
        find = np.argmax if self.greatest else np.argmin
        return np.asarray(find(values, axis=axis, keepdims=True))

    def partial(self, block: Values, first: int) -> Place:
        """Return the place in a block, counted from the first row of the view if rows are reduced."""
        shape = (1,) * block.ndim
        values, axis = (block, self.axis) if self.axis is not None else (block.reshape(-1), 0)
        empty = None
        if self.skip_nan and may_hold_nan(values.dtype):
            missing = np.isnan(values)
            empty = np.logical_and.reduce(missing, axis=axis, keepdims=True)
            if missing.any():
                values = np.where(missing, values.dtype.type(-np.inf if self.greatest else np.inf), values)
        index = self._find(values, axis)
        value = np.take_along_axis(values, index, axis)
        if self.axis is None:
            index, value = index.reshape(shape) + first * (block.size // len(block)), value.reshape(shape)
            empty = None if empty is None else empty.reshape(shape)
        elif axis == 0:
            index = index + first
        return Place(value, index, empty)

    def merge(self, left: Place, right: Place) -> Place:
        """Return the place of the extreme of both; NumPy decides between two, and so about ties and NaN."""
        is_right = self._find(np.stack([left.value, right.value]), 0)[0] == 1
        empty = None if left.empty is None or right.empty is None else left.empty & right.empty
        return Place(np.where(is_right, right.value, left.value), np.where(is_right, right.where, left.where), empty)

    def finish(self, state: Place) -> Values:
        """Return the places; NumPy's error where everything was NaN."""
        if state.empty is not None and state.empty.any():
            raise ValueError("All-NaN slice encountered")
        return state.where
