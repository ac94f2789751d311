"""The chunks of a regular grid that a request needs, what is wanted of each, and where that lands."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.selection import Cell

__all__ = ["Span", "Wanted", "ascending", "spans", "wanted"]


class Span(NamedTuple):
    """What is wanted of the chunks with one number on one axis."""

    number: int
    source: slice
    """Within the chunk; ascending."""
    target: slice
    """Within the buffer."""
    is_whole: bool
    """Whether it is the whole length of a chunk."""
    is_all: bool
    """Whether it is all of the chunk that the array has: chunks reach beyond its edges."""


class Wanted(NamedTuple):
    """A chunk, and what is wanted of it."""

    place: tuple[int, ...]
    """Number of the chunk on each axis."""
    source: tuple[slice, ...]
    """Within the chunk."""
    target: npt.NDArray[np.generic]
    """Where that lands."""
    is_whole: bool
    """Whether it is the whole chunk."""
    is_all: bool
    """Whether it is all of the chunk that the array has."""

    def is_straight(self, dtype: np.dtype[np.generic]) -> bool:
        """Return whether the bytes of the chunk, of elements of ``dtype`` in C order, are those of the target."""
        return self.is_whole and self.target.flags.c_contiguous and self.target.dtype == dtype


def ascending(
    out: npt.NDArray[np.generic], start: int, cell: Cell
) -> tuple[npt.NDArray[np.generic], tuple[range, ...]]:
    """Return a view of ``out`` with all axes of the array, and the ascending positions that belong to each.

    Parameters
    ----------
    out : ndarray, (rows, *cell shape)
    start : int
        Local row of the first.
    cell : tuple

    Examples
    --------
    >>> view, axes = ascending(np.arange(6).reshape(2, 3), 7, (range(2, -1, -1), 5))
    >>> view.shape, axes
    ((2, 3, 1), (range(7, 9), range(0, 3), range(5, 6)))
    >>> view[0, :, 0]
    array([2, 1, 0])
    """
    index: list[slice | None] = [slice(None)]
    axes = [range(start, start + len(out))]
    for axis in cell:
        if isinstance(axis, int):
            index.append(None)
            axes.append(range(axis, axis + 1))
        elif len(axis) > 1 and axis.step < 0:
            index.append(slice(None, None, -1))
            axes.append(axis[::-1])
        else:
            index.append(slice(None))
            axes.append(range(axis.start, axis.start + 1) if len(axis) == 1 else axis)
    return out[tuple(index)], tuple(axes)


def spans(axis: range, size: int, length: int) -> list[Span]:
    """Return the parts of ascending positions on an axis of ``length`` that lie in each chunk of ``size``.

    Examples
    --------
    >>> [(span.number, span.source, span.target) for span in spans(range(3, 9, 2), 5, 10)]
    [(0, slice(3, 4, 2), slice(0, 1, None)), (1, slice(0, 3, 2), slice(1, 3, None))]
    """
    found = []
    i, count = 0, len(axis)
    while i < count:
        number = axis[i] // size
        first = number * size
        j = min(count, -(-(first + size - axis.start) // axis.step))
        source = slice(axis[i] - first, axis[j - 1] - first + 1, axis.step)
        is_all = j - i == min(size, length - first)
        found.append(Span(number, source, slice(i, j), is_all and j - i == size, is_all))
        i = j
    return found


def wanted(view: npt.NDArray[np.generic], axes: Sequence[Sequence[Span]]) -> Iterator[Wanted]:
    """Yield the chunks that the spans of all axes lie in, in C order of the grid.

    Parameters
    ----------
    view : ndarray
        What ``ascending`` returned.
    axes : sequence of sequence of Span
        The spans of each axis.
    """
    for chunk in product(*axes):
        numbers, sources, targets, whole, all_ = zip(*chunk, strict=True)
        yield Wanted(numbers, sources, view[targets], all(whole), all(all_))
