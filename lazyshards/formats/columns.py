"""From columns to rows: the values of Arrow's arrays as NumPy's, nulls filled, lists as axes, turned into C order.

What Parquet and Arrow files share. Arrow's types are told by their text, and its arrays are used as they come, so
that pyarrow is imported by the formats alone.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.selection import Cell, cell_index

__all__ = [
    "DECIMAL",
    "Column",
    "ColumnError",
    "Nulls",
    "Scratch",
    "View",
    "null_problem",
    "numpy_type",
    "to_numpy",
    "values_of",
    "write_rows",
    "write_strip",
]

ArrowArray: TypeAlias = Any
"""A pyarrow.Array, whose library has no types of its own for a type checker."""

_STRIP_COLUMNS = 64
"""Columns that are turned into rows together."""
_STRIP_ROWS = 4096
"""Rows that are turned together, so that what is read stays in the cache of one core."""

_NUMBERS = {
    "bool": "?",
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "halffloat": "f2",
    "float": "f4",
    "double": "f8",
    "date32[day]": "M8[D]",
    "date64[ms]": "M8[ms]",
}
"""NumPy's name of each of Arrow's types, where there is one that holds the same values."""
_TIMES = re.compile(r"(timestamp|duration)\[(s|ms|us|ns)(?:, tz=[^\]]*)?\]")
DECIMAL = re.compile(r"decimal(?:32|64|128|256)\((\d+), (-?\d+)\)")


class Nulls(NamedTuple):
    """What is put where a value is missing."""

    policy: str
    """``"raise"``, ``"nan"`` or ``"fill"``."""
    fill: float = 0
    """The number, if ``policy`` is ``"fill"``."""


class Column(NamedTuple):
    """One column that is read."""

    name: str
    """Its name."""
    axes: tuple[int, ...]
    """Lengths of its lists, outermost first."""


class View(NamedTuple):
    """Which columns of a file are its rows, and how."""

    columns: tuple[Column, ...]
    """Columns, in order."""
    stacked: bool
    """Whether the columns are the first axis of a row."""
    nulls: Nulls
    """What is put where a value is missing."""
    dtype: np.dtype[np.generic]
    """Type of the elements."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        axes = self.columns[0].axes
        return (len(self.columns), *axes) if self.stacked else axes

    def pick(self, cell: Cell) -> tuple[list[Column], Cell]:
        """Return the columns that a cell asks for, and the cell of each one's own axes."""
        if not self.stacked:
            return list(self.columns), cell
        axis = cell[0]
        positions = [axis] if isinstance(axis, int) else axis
        return [self.columns[i] for i in positions], cell[1:]


def numpy_type(leaf: str) -> np.dtype[np.generic] | None:
    """Return the NumPy type that holds the same values, or None if there is none."""
    if leaf in _NUMBERS:
        return np.dtype(_NUMBERS[leaf])
    match = _TIMES.fullmatch(leaf)
    if match is not None:
        return np.dtype(f"{'M8' if match[1] == 'timestamp' else 'm8'}[{match[2]}]")
    return None


def null_problem(name: str, count: int, nulls: Nulls, dtype: np.dtype[np.generic]) -> str:
    """Return why nulls cannot be filled, or an empty text."""
    some = f"column {name!r} holds {count:,} null{'s' * (count > 1)}"
    if nulls.policy == "raise":
        way = "nulls='nan' or fill_value=" if dtype.kind in "fc" else "fill_value="
        return f"{some}, expected values; give {way} to say what they become"
    if nulls.policy == "nan":
        return (
            ""
            if dtype.kind in "fc"
            else f"{some} and is {dtype}, which has no NaN; give fill_value= or dtype='float64'"
        )
    if not _holds(dtype, nulls.fill):
        return f"{some}, and fill_value={nulls.fill!r} is no {dtype}"
    return ""


def _holds(dtype: np.dtype[np.generic], value: float) -> bool:
    """Return whether a number can be an element of this type: exactly, unless it is a fraction."""
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind in "iu":
        bounds = np.iinfo(str(dtype))
        return value == value // 1 and bounds.min <= value <= bounds.max
    return dtype.kind == "f"


class ColumnError(ValueError):
    """What is wrong with the values of a column; whoever knows the file adds its name."""


def to_numpy(array: ArrowArray, column: Column, view: View) -> npt.NDArray[np.generic]:
    r"""Return the values of a column as (rows, \*axes); a view of the array's own memory where they can be.

    Parameters
    ----------
    array : pyarrow.Array
    column : Column
    view : View
        Says what nulls become, and the type of the elements if they must be converted.

    Raises
    ------
    ColumnError
        If there are nulls that the view does not allow, or lists of another length.
    """
    rows = len(array)
    axes = column.axes
    text = str(array.type)
    while True:
        if text.startswith("extension<"):
            array = array.storage
            axes = (prod(axes),)
        elif text.startswith(("fixed_size_list<", "list<", "large_list<")):
            array = _flat(array, column.name, axes[0])
            axes = axes[1:]
        elif text.startswith("dictionary<"):
            array = array.dictionary_decode()
        else:
            break
        text = str(array.type)
    return values_of(array, column.name, view).reshape(rows, *column.axes)


def _flat(array: ArrowArray, name: str, length: int) -> ArrowArray:
    """Return the elements of lists that must all have this length."""
    if array.null_count:
        raise ColumnError(f"column {name!r} holds {array.null_count:,} nulls in place of lists, expected lists")
    flat = array.flatten()
    if len(flat) != length * len(array) or (
        not str(array.type).startswith("fixed_size_list<")
        and len(array)
        and (array.value_lengths().to_numpy(zero_copy_only=False) != length).any()
    ):
        raise ColumnError(f"column {name!r} holds lists of other lengths than {length}, expected lists of one length")
    return flat


def values_of(array: ArrowArray, name: str, view: View) -> npt.NDArray[np.generic]:
    """Return the elements of an array of numbers; ``name`` is that of its column."""
    text = str(array.type)
    values: npt.NDArray[np.generic]
    nulls = array.null_count
    if nulls:
        problem = null_problem(name, nulls, view.nulls, view.dtype)
        if problem:
            raise ColumnError(problem)
        mask = array.is_null().to_numpy(zero_copy_only=False)
    if text == "bool":
        data = array.buffers()[1]
        bits = np.frombuffer(data, np.uint8)[array.offset // 8 :] if data is not None else np.empty(0, np.uint8)
        values = np.unpackbits(bits, count=array.offset % 8 + len(array), bitorder="little")[array.offset % 8 :]
        values = values.view(np.bool_)
    elif decimal := DECIMAL.fullmatch(text):
        values = _decimals(array, int(decimal[1]), int(decimal[2]), view.dtype)
    else:
        kind = numpy_type(text)
        assert kind is not None
        stored = np.dtype("i4") if text == "date32[day]" else kind
        data = array.buffers()[1]
        count = len(array)
        values = (
            np.empty(0, stored) if data is None else np.frombuffer(data, stored, count, array.offset * stored.itemsize)
        )
        if stored is not kind:
            values = values.astype(kind)
    if nulls:
        values = values.astype(view.dtype)
        values[mask] = np.nan if view.nulls.policy == "nan" else view.nulls.fill
    return values


def _decimals(array: ArrowArray, precision: int, scale: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """Return decimals as numbers of another type; nulls become anything."""
    if array.null_count:
        array = array.fill_null(0)
    if dtype.kind in "iu":  # Arrow refuses to lose a fraction
        return np.asarray(array.cast(str(dtype)).to_numpy(zero_copy_only=False))
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    if data is not None and width >= 8 and precision <= 15 and 0 <= scale <= 22:
        # Both are exact as float64, so that the quotient is the nearest there is. Arrow's own cast is one off at times.
        wide = np.frombuffer(data, "<i8")[array.offset * (width // 8) :][: len(array) * (width // 8) : width // 8]
        return (wide / np.float64(10.0**scale)).astype(dtype)
    return np.asarray(array.cast("float64").to_numpy(zero_copy_only=False)).astype(dtype)


class Scratch:
    """Memory that one call uses again and again: fresh memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._kept: dict[str, npt.NDArray[np.uint8]] = {}

    def room(self, purpose: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return this many bytes, which hold anything; what was given before for the same purpose is given again."""
        kept = self._kept.get(purpose)
        if kept is None or len(kept) < nbytes:
            self._kept.pop(purpose, None)
            kept = self._kept[purpose] = np.empty(nbytes, np.uint8)
        return kept[:nbytes]

    def strip(self, columns: int, rows: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """Return scratch of (columns, rows) that is turned into rows quickly.

        If the columns lay a power of two apart, as they would without the line of padding, the elements of one row
        would all want the same place in the processor's cache.
        """
        width = rows * dtype.itemsize + 64
        raw = self.room("strip", columns * width).reshape(columns, width)
        return raw[:, : rows * dtype.itemsize].view(dtype)


def write_rows(
    out: npt.NDArray[np.generic],
    columns: Sequence[npt.NDArray[np.generic]],
    rest: Cell,
    scratch: Scratch,
    *,
    stacked: bool,
) -> None:
    r"""Write columns into rows.

    Parameters
    ----------
    out : ndarray, (rows, \*cell shape)
    columns : sequence of ndarray, (rows, \*axes)
        In the order of ``out``.
    rest : tuple
        The cell of each column's own axes.
    scratch : Scratch
    stacked : bool
        Whether ``out`` has an axis of columns.
    """
    index = (slice(None), *cell_index(rest))
    if not stacked:
        out[...] = columns[0][index]
    elif rest or len(columns) < 4:
        for k, values in enumerate(columns):
            out[:, k] = values[index]
    else:
        for first in range(0, len(columns), _STRIP_COLUMNS):
            some = columns[first : first + _STRIP_COLUMNS]
            strip = scratch.strip(len(some), min(len(out), _STRIP_ROWS), out.dtype)
            for start in range(0, len(out), _STRIP_ROWS):
                rows = out[start : start + _STRIP_ROWS]
                for k, values in enumerate(some):
                    strip[k, : len(rows)] = values[start : start + _STRIP_ROWS]
                rows[:, first : first + len(some)] = strip[:, : len(rows)].T


def write_strip(out: npt.NDArray[np.generic], strip: npt.NDArray[np.generic]) -> None:
    """Write (columns, rows) as rows."""
    for start in range(0, len(out), _STRIP_ROWS):
        for first in range(0, len(strip), _STRIP_COLUMNS):
            part = strip[first : first + _STRIP_COLUMNS, start : start + _STRIP_ROWS]
            out[start : start + _STRIP_ROWS, first : first + _STRIP_COLUMNS] = part.T
