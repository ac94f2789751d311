"""Arithmetic on rows and cells: what an index means, before anything is read.

A selection is the rows that are wanted, in order, and the basic index (the cell) applied to each row's own
axes. ``range`` is the slice algebra: ``range(n)[a:b:c][d:e:f]`` composes, clamps, steps and reverses exactly as
NumPy does. Everything here is pure: no file, no layout, no engine.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.errors import SelectionError

__all__ = ["Block", "Cell", "Rows", "Selection", "as_slice", "blocks", "cell_index", "is_whole", "select", "select_all"]

Rows: TypeAlias = range | npt.NDArray[np.int64]
"""Row numbers, in order: a ``range``, or an int64 index array."""

Cell: TypeAlias = tuple[range | int, ...]
"""One entry for each axis of a row: the positions kept, or the one position of an axis that is dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What is wanted of a dataset."""

    rows: Rows
    """Global row numbers, in the order of the result."""
    cell: Cell
    """The basic index on each row's own axes."""
    scalar: bool = False
    """Whether one row was asked for by an integer, so that the row axis is dropped."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, dropped axes left out."""
        return self.cell_shape if self.scalar else (len(self.rows), *self.cell_shape)

    @property
    def cell_shape(self) -> tuple[int, ...]:
        """Shape of one row of the result."""
        return tuple([len(axis) for axis in self.cell if type(axis) is range])


def select_all(rows: int, row_shape: tuple[int, ...]) -> Selection:
    """Return the selection of everything.

    Parameters
    ----------
    rows : int
        Number of rows.
    row_shape : tuple of int
        Shape of one row.
    """
    return Selection(range(rows), tuple(map(range, row_shape)))


def select(selection: Selection, index: object) -> Selection:
    """Return the selection that ``index``, applied as NumPy would, leaves of ``selection``.

    Parameters
    ----------
    selection : Selection
    index : int, slice, Ellipsis, boolean mask, integer array, or a tuple of them
        A mask or an integer array may index the rows only; the other axes take integers and slices.

    Raises
    ------
    SelectionError
        If the index is out of bounds, of a kind that NumPy refuses, or cannot be applied lazily.
    """
    if type(index) is slice and not selection.scalar:
        # The common case, without the general path's bookkeeping; it must mean the same.
        return Selection(_slice(selection.rows, index), selection.cell)
    items = _expand(index, len(selection.shape))
    rows, scalar, cell = selection.rows, selection.scalar, list(selection.cell)
    if not scalar:
        rows, scalar = _select_rows(rows, items.pop(0))
    kept = [axis for axis, positions in enumerate(cell) if type(positions) is range]
    for axis, item in zip(kept, items, strict=True):
        cell[axis] = _select_axis(cell[axis], item, axis + 1)
    return Selection(rows, tuple(cell), scalar)


def _expand(index: object, ndim: int) -> list[object]:
    """Return one item for each axis, Ellipsis and missing axes filled with full slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        if item is None:
            raise SelectionError("np.newaxis (None) cannot be used in a lazy index; add the axis after compute()")
        if isinstance(item, bool | np.bool_) or (
            isinstance(item, np.ndarray) and item.ndim == 0 and item.dtype == bool
        ):
            raise SelectionError(f"a single boolean ({item!r}) would add an axis; use a mask with one boolean per row")
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise SelectionError("an index can only have a single Ellipsis ('...')")
    missing = ndim - (len(items) - len(dots))
    if missing < 0:
        raise SelectionError(
            f"too many indices: the dataset has {ndim} axes, but {len(items) - len(dots)} were indexed"
        )
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


def _slice(rows: Rows, item: slice) -> Rows:
    try:
        kept = rows[item]
    except (TypeError, ValueError) as exc:
        raise SelectionError(f"{item!r} is not a valid slice: {exc}") from exc
    return _tidy(kept)


def _integer(item: object, length: int, what: str) -> int | None:
    """Return ``item`` as a position counted from the start, or None if it is no integer."""
    try:
        position = operator.index(item)  # type: ignore[arg-type]  # what it raises is the answer
    except TypeError:
        return None
    if not -length <= position < length:
        raise SelectionError(f"index {position} is out of bounds for {what} with size {length}")
    return position % length


def _select_rows(rows: Rows, item: object) -> tuple[Rows, bool]:
    """Return the rows that ``item`` leaves, and whether it was an integer."""
    if isinstance(item, slice):
        return _slice(rows, item), False
    position = _integer(item, len(rows), "the rows (axis 0)")
    if position is not None:
        row = int(rows[position])
        return range(row, row + 1), True
    if isinstance(item, range) and item and min(item[0], item[-1]) >= 0 and max(item[0], item[-1]) < len(rows):
        return _compose(rows, item), False
    return _take(rows, _positions(item, len(rows))), False


def _positions(item: object, length: int) -> npt.NDArray[np.int64]:
    """Return an index array or mask as positions counted from the start, checked against ``length``."""
    if not isinstance(item, np.ndarray | list | tuple | range) and not hasattr(item, "__array__"):
        raise SelectionError(
            f"{item!r} cannot index the rows: only integers, slices (':'), Ellipsis ('...'), "
            "boolean masks and integer arrays can"
        )
    if isinstance(item, range) and item:  # before an array is made of it, which may be of any length
        _check_bounds(min(item[0], item[-1]), max(item[0], item[-1]), length)
    try:
        array = np.asarray(item)
    except ValueError as exc:
        raise SelectionError(f"the index is not a regular array: {exc}") from exc
    if array.size == 0 and isinstance(item, list | tuple | range):
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise SelectionError(
            f"an index array must have one axis, this one has shape {array.shape}; ravel it and reshape the result, "
            "or index the computed array"
        )
    if array.dtype == bool:
        if len(array) != length:
            raise SelectionError(f"the mask has {len(array)} entries, expected one for each of {length} rows")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise SelectionError(f"an index array must hold integers or booleans, this one holds {array.dtype}")
    if array.size == 0:
        return np.empty(0, np.int64)
    low, high = int(array.min()), int(array.max())
    _check_bounds(low, high, length)
    positions = array.astype(np.int64)
    if low < 0:
        positions[positions < 0] += length
    return positions


def _check_bounds(low: int, high: int, length: int) -> None:
    """Raise SelectionError if the least or the largest index has no row."""
    if low < -length or high >= length:
        bad = high if high >= length else low
        raise SelectionError(f"index {bad} is out of bounds for the rows (axis 0) with size {length}")


def _compose(rows: Rows, positions: range) -> Rows:
    """Return ``rows[positions]`` for a range of valid positions, without an index array where there was none."""
    if isinstance(rows, range):
        start, step = rows[positions[0]], rows.step * positions.step
        return range(start, start + step * len(positions), step)
    return _tidy(rows[np.arange(positions.start, positions.stop, positions.step)])


def _take(rows: Rows, positions: npt.NDArray[np.int64]) -> Rows:
    """Return the rows at ``positions``."""
    return _tidy(rows.start + rows.step * positions if isinstance(rows, range) else rows[positions])


def _tidy(taken: Rows) -> Rows:
    """Return the same rows in the one form that they are kept in: a range if evenly spaced, which reads faster."""
    if isinstance(taken, range) and len(taken) > 1:
        return taken
    if len(taken) == 0:
        return range(0)
    if len(taken) == 1:
        return range(int(taken[0]), int(taken[0]) + 1)
    start, step = int(taken[0]), int(taken[1]) - int(taken[0])
    if step and start + step * (len(taken) - 1) == taken[-1] and bool((np.diff(taken) == step).all()):
        return range(start, start + step * len(taken), step)
    assert not isinstance(taken, range)
    return _frozen(taken)


def _frozen(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    array.flags.writeable = False
    return array


def _select_axis(positions: range | int, item: object, axis: int) -> range | int:
    assert isinstance(positions, range)
    if isinstance(item, slice):
        kept = _slice(positions, item)
        assert isinstance(kept, range)
        return kept
    position = _integer(item, len(positions), f"axis {axis}")
    if position is None:
        raise SelectionError(
            f"{item!r} cannot index axis {axis} lazily: axes after the first take integers and slices only; "
            "compute() first, then index the array"
        )
    return positions[position]


def as_slice(positions: range) -> slice:
    """Return the slice that picks ``positions`` from an axis counted from 0."""
    if not positions:
        return slice(0, 0)
    return slice(positions.start, positions.stop if positions.stop >= 0 else None, positions.step)


def cell_index(cell: Cell) -> tuple[slice | int, ...]:
    """Return the cell as an index for NumPy, one item for each axis of a row."""
    return tuple([as_slice(axis) if type(axis) is range else axis for axis in cell])


def is_whole(cell: Cell, row_shape: tuple[int, ...]) -> bool:
    """Return whether the cell keeps every element of a row, in place."""
    return all([type(axis) is range and axis == range(size) for axis, size in zip(cell, row_shape, strict=True)])


class Block(NamedTuple):
    """Rows of one shard that are read together."""

    start: int
    """First local row that is read."""
    stop: int
    """Local row after the last that is read."""
    source: slice | npt.NDArray[np.int64]
    """Which of the rows read are wanted, counted from ``start``."""
    target: slice
    """Where they land, counted in the wanted rows of the segment."""

    @property
    def dense(self) -> bool:
        """Whether every row read is wanted, once and in order."""
        return type(self.source) is slice and self.source.step in (None, 1)


def blocks(local: Rows, row_nbytes: int, *, gap_nbytes: int, block_nbytes: int, dense_nbytes: int) -> Iterator[Block]:
    """Yield the blocks that read ``local`` rows: near rows together, far rows apart.

    Parameters
    ----------
    local : range or ndarray of int64
        Rows of one shard, ascending; an array may hold a row more than once.
    row_nbytes : int
        Bytes of one row on disk.
    gap_nbytes : int
        Unwanted bytes between two wanted rows that are read rather than skipped.
    block_nbytes : int
        Most bytes of a block that holds unwanted rows; one row is always allowed.
    dense_nbytes : int
        Most bytes of a block without unwanted rows; one row is always allowed.
    """
    row_nbytes = max(1, row_nbytes)
    dense_rows = max(1, dense_nbytes // row_nbytes)
    if isinstance(local, range):
        if len(local) <= 1 or local.step == 1:
            yield from _dense(local.start, len(local), 0, dense_rows)
        elif (local.step - 1) * row_nbytes > gap_nbytes:
            for i, row in enumerate(local):
                yield Block(row, row + 1, slice(0, 1), slice(i, i + 1))
        else:
            count = max(1, block_nbytes // (local.step * row_nbytes))
            for i in range(0, len(local), count):
                rows = local[i : i + count]
                yield Block(rows[0], rows[-1] + 1, slice(0, None, local.step), slice(i, i + len(rows)))
        return
    steps = np.diff(local)
    near = gap_nbytes // row_nbytes + 1
    # A border wherever the next row is too far to be read along.
    borders = [0, *(np.flatnonzero(steps > near) + 1).tolist(), len(local)]
    for a, b in pairwise(borders):
        first, last = int(local[a]), int(local[b - 1])
        if last - first == b - a - 1 and (steps[a : b - 1] == 1).all():
            yield from _dense(first, b - a, a, dense_rows)
        else:
            yield from _sparse(local, a, b, max(1, block_nbytes // row_nbytes))


def _dense(start: int, count: int, target: int, most: int) -> Iterator[Block]:
    for i in range(0, count, most):
        n = min(most, count - i)
        yield Block(start + i, start + i + n, slice(0, n), slice(target + i, target + i + n))


def _sparse(local: npt.NDArray[np.int64], a: int, b: int, most: int) -> Iterator[Block]:
    while a < b:
        start = int(local[a])
        c = a + int(np.searchsorted(local[a:b], start + most, "left"))
        yield Block(start, int(local[c - 1]) + 1, local[a:c] - start, slice(a, c))
        a = c
