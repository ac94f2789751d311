"""From lazy arrays and operands to one lazy array: NumPy's work on elements, done to blocks of rows as they come."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lazyshards.elementwise import Applied, Constant, Elementwise, Node, Taken, applied, cast, constant
from lazyshards.functions import keep_function
from lazyshards.layout import Layout
from lazyshards.selection import Rows, Selection

__all__ = ["View", "combine", "refuse"]

_MOST_DEPTH = 64
"""Functions within one another that are one work; what follows is another, on what that made."""


class View(NamedTuple):
    """A lazy array: what is selected of a layout."""

    layout: Layout
    selection: Selection


class _Origin(NamedTuple):
    """What a view is made of: rows as they were before any work on their elements, and that work."""

    layout: Layout
    rows: Rows
    scalar: bool
    node: Node


def refuse(what: str) -> TypeError:
    """Return the error for what cannot be lazy.

    Parameters
    ----------
    what : str
        What was asked for.
    """
    return TypeError(
        f"{what} cannot be lazy: what can is NumPy's work on the elements of one dataset, with scalars and arrays that "
        "broadcast against a row; compute() first, or use map() with a function of your own"
    )


def combine(function: Callable[..., Any], operands: Sequence[object], output: int = 0) -> View:
    """Return the lazy array that a function of NumPy makes of others, all of the same rows, and of operands.

    Parameters
    ----------
    function : callable
        A ufunc, ``np.where``, ``np.clip`` or ``np.round``.
    operands : sequence
        In the order of the function: views, one at least, scalars and arrays.
    output : int
        Which of a ufunc's outputs.

    Raises
    ------
    TypeError
        If an operand has an axis of rows, is of other rows, or NumPy has no such function for these dtypes.
    ValueError
        If shapes do not broadcast.
    """
    origins = {i: _origin(operand) for i, operand in enumerate(operands) if isinstance(operand, View)}
    first = next(iter(origins.values()))
    name = getattr(function, "__name__", repr(function))
    for other in origins.values():
        if not _same_rows(first, other):
            raise refuse(f"{name} of two datasets with different rows or shards")
    shapes = [origin.node.row_shape for origin in origins.values()]
    if not first.scalar and len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"{name} of rows of the shapes {' and '.join(map(str, shapes))}: with the axis of rows before them, they "
            "do not broadcast; select columns with a slice, such as ds[:, 2:3], to keep an axis"
        )
    row_axes = None if first.scalar else len(shapes[0])
    given = [
        origins[i].node if i in origins else _constant(operand, row_axes, shapes[0])
        for i, operand in enumerate(operands)
    ]
    node = _applied(function, given, output, shapes)
    work = Elementwise(node)
    layout = first.layout.map(work, work.given(first.layout.row_shape), node.dtype, node.row_shape)
    return View(layout, Selection(first.rows, tuple(map(range, node.row_shape)), first.scalar))


def _applied(
    function: Callable[..., Any], given: Sequence["Node | Constant"], output: int, shapes: Sequence[tuple[int, ...]]
) -> Applied:
    others = [operand.shape for operand in given if isinstance(operand, np.ndarray)]
    try:
        np.broadcast_shapes(*shapes, *others)
    except ValueError:
        raise ValueError(
            f"rows of shape {' and '.join(map(str, dict.fromkeys(shapes)))} do not broadcast with operands of shape "
            f"{' and '.join(map(str, others))}"
        ) from None
    node = applied(keep_function(function), given, output)
    if node.dtype.hasobject or not node.dtype.itemsize:
        raise refuse(f"{getattr(function, '__name__', function)} to {node.dtype}")
    return node


def _constant(operand: object, row_axes: int | None, row_shape: tuple[int, ...]) -> Constant:
    """Return an operand that has no axis of rows; ``row_axes`` is None if the dataset has none either."""
    value = constant(operand)
    if not isinstance(value, np.ndarray) or row_axes is None or value.ndim <= row_axes:
        return value
    if value.ndim == row_axes + 1 and len(value) == 1:
        return value[0]
    raise refuse(
        f"work with an array of shape {value.shape}, which has an axis for the rows beside those of a row of shape "
        f"{row_shape},"
    )


def _origin(view: View) -> _Origin:
    layout, selection = view
    work = layout.maps[-1].function if layout.maps else None
    if not isinstance(work, Elementwise) or work.root.depth >= _MOST_DEPTH:
        return _Origin(layout, selection.rows, selection.scalar, Taken(selection.cell, layout.dtype))
    node = work.cut(selection.cell).root
    for dtype in [] if layout.stored is None else [*layout.steps, layout.dtype]:
        node = cast(node, dtype)
    return _Origin(layout.below, selection.rows, selection.scalar, node)


def _same_rows(one: _Origin, other: _Origin) -> bool:
    if one.scalar != other.scalar or type(one.rows) is not type(other.rows):
        return False
    if isinstance(one.rows, range):
        is_same = one.rows == other.rows
    else:
        is_same = one.rows is other.rows or bool(np.array_equal(one.rows, other.rows))
    return is_same and (one.layout is other.layout or one.layout == other.layout)
