"""Tables as rows of numbers: which columns, of which type, how their nulls are filled, and the way into C-order rows.

What Parquet and Arrow files share. Arrow's types are told by their text, and its arrays are used as they come, so
that pyarrow is imported by the formats alone.
"""

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.layout import native_dtype
from lazyshards.selection import Cell, cell_index
from lazyshards.storage.base import Stamp

__all__ = [
    "Cache",
    "Column",
    "ColumnError",
    "Field",
    "Nulls",
    "Options",
    "Scratch",
    "Table",
    "View",
    "agree",
    "describe_type",
    "numpy_type",
    "parse_options",
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
_DECIMAL = re.compile(r"decimal(?:32|64|128|256)\((\d+), (-?\d+)\)")
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


_T = TypeVar("_T")


class Cache(Generic[_T]):
    """What was parsed of files, the last used of it, by path and stamp."""

    def __init__(self, most_nbytes: int) -> None:
        self._most = most_nbytes
        self._nbytes = 0
        self._kept: OrderedDict[tuple[str, Stamp], tuple[_T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, stamp: Stamp) -> _T | None:
        """Return what is kept of a file, or None."""
        with self._lock:
            found = self._kept.get((path, stamp))
            if found is None:
                return None
            self._kept.move_to_end((path, stamp))
            return found[0]

    def put(self, path: str, stamp: Stamp, parsed: _T, nbytes: int) -> None:
        """Keep what was parsed of a file, and let go of what was not used for longest."""
        with self._lock:
            _, before = self._kept.pop((path, stamp), (None, 0))
            self._nbytes += nbytes - before
            self._kept[path, stamp] = parsed, nbytes
            while self._nbytes > self._most and len(self._kept) > 1:
                self._nbytes -= self._kept.popitem(last=False)[1][1]


# What was asked ---------------------------------------------------------------------------------------------------


class Nulls(NamedTuple):
    """What is put where a value is missing."""

    policy: str
    """``"raise"``, ``"nan"`` or ``"fill"``."""
    fill: float = 0
    """The number, if ``policy`` is ``"fill"``."""


class Options(NamedTuple):
    """The keyword arguments that both formats take."""

    columns: tuple[str, ...] | None
    """Names of the columns wanted, in order; None for all."""
    single: bool
    """Whether one column was asked for by its bare name, so that the columns are no axis of a row."""
    nulls: Nulls
    """What is put where a value is missing."""
    dtype: np.dtype[np.generic] | None
    """What every column is converted to, or None if all are of one type."""


def parse_options(options: Mapping[str, object], format: str) -> Options:
    """Return the options, checked.

    Raises
    ------
    TypeError
        If there is one that the format does not have, or of a wrong type.
    ValueError
        If two of them contradict each other, or one has no meaning.
    """
    known = {"columns", "dtype", "fill_value", "nulls"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"the {format} format takes no option {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    columns, single = _parse_columns(options.get("columns"))
    policy, fill = options.get("nulls", "raise"), options.get("fill_value")
    if policy not in ("raise", "nan"):
        raise ValueError(f'nulls={policy!r} is not a policy: use "raise" or "nan", or give a number as fill_value=')
    nulls = Nulls(policy)
    if fill is not None:
        if policy == "nan":
            raise ValueError('nulls="nan" and fill_value= both say what a null becomes: give one of them')
        if isinstance(fill, np.generic):
            fill = fill.item()
        if not isinstance(fill, int | float):
            raise TypeError(f"fill_value={fill!r} is not a number")
        nulls = Nulls("fill", fill)
    dtype = options.get("dtype")
    return Options(columns, single, nulls, None if dtype is None else native_dtype(dtype))


def _parse_columns(columns: object) -> tuple[tuple[str, ...] | None, bool]:
    if columns is None or isinstance(columns, str):
        return (None if columns is None else (columns,)), columns is not None
    if not isinstance(columns, Sequence) or isinstance(columns, bytes) or not all(isinstance(n, str) for n in columns):
        raise TypeError(f"columns={columns!r} is no name and no list of names")
    if not columns:
        raise ValueError("columns=[] asks for no column: name one, or leave it out for all")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise ValueError(f"columns= names {twice[0]!r} more than once")
    return tuple(columns), False


# What is there ----------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """One column of one file, as its header describes it."""

    name: str
    """Its name."""
    type: str
    """The text of its type."""
    leaf: str
    """The text of the type of its elements, that of the column itself if it holds no lists."""
    axes: tuple[int, ...] | None
    """Lengths of its lists, outermost first; None where they differ, and -1 where no row tells."""
    nulls: int = 0
    """How many nulls it has, as far as the header tells."""
    problem: str = ""
    """Why it cannot be read, if that is known."""


class Table(NamedTuple):
    """One file, as its header describes it."""

    path: str
    """Path of the file."""
    rows: int
    """How many rows."""
    fields: tuple[Field, ...]
    """Its columns."""


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


def describe_type(kind: Any) -> tuple[str, list[int]]:
    """Return the text of the type of a column's elements, and the lengths of its lists; -1 where they may vary."""
    text, axes = str(kind), []
    while True:
        if text.startswith("extension<arrow.fixed_shape_tensor") and not _is_permuted(kind):
            axes += kind.shape
            return str(kind.value_type), axes
        if text.startswith("fixed_size_list<"):
            axes.append(kind.list_size)
        elif text.startswith(("list<", "large_list<")):
            axes.append(-1)
        elif text.startswith("dictionary<"):
            return str(kind.value_type), axes
        else:
            return text, axes
        kind = kind.value_type
        text = str(kind)


def _is_permuted(kind: Any) -> bool:
    return kind.permutation not in (None, [*range(len(kind.shape))])


def numpy_type(leaf: str) -> np.dtype[np.generic] | None:
    """Return the NumPy type that holds the same values, or None if there is none."""
    if leaf in _NUMBERS:
        return np.dtype(_NUMBERS[leaf])
    match = _TIMES.fullmatch(leaf)
    if match is not None:
        return np.dtype(f"{'M8' if match[1] == 'timestamp' else 'm8'}[{match[2]}]")
    return None


# What is agreed upon ----------------------------------------------------------------------------------------------


def agree(tables: Sequence[Table], options: Options) -> tuple[View | None, dict[int, Fault]]:
    """Return how all files are read, and by number the files that do not allow it.

    Columns are matched by name. A column may be of different integer types, or of different float types, in different
    files: it is widened to one that holds the values of all.
    """
    faults: dict[int, Fault] = {}
    names = options.columns or _common_names(tables)
    found: list[list[Field]] = []
    for i, table in enumerate(tables):
        fields = _fields(table, names, everything=options.columns is None)
        if isinstance(fields, str):
            faults[i] = Fault(table.path, fields)
            fields = []
        found.append(fields)
    columns: list[Column] = []
    types: list[np.dtype[np.generic]] = []
    if not names:
        return None, {i: Fault(table.path, "has no columns") for i, table in enumerate(tables)}
    for k in range(len(names)):
        there = [(i, fields[k]) for i, fields in enumerate(found) if fields and i not in faults]
        if not there:
            return None, faults
        axes, dtype = _agree_on_column(tables, there, options, faults)
        if axes is None or dtype is None:
            return None, faults
        columns.append(Column(names[k], axes))
        types.append(dtype)
    first = next(i for i, fields in enumerate(found) if fields and i not in faults)
    problem = _agree_on_row(columns, types, found[first], options)
    if problem:
        faults.update({i: Fault(table.path, problem) for i, table in enumerate(tables) if i not in faults})
        return None, faults
    stacked = not options.single and not (options.columns is None and len(columns) == 1 and columns[0].axes)
    return View(tuple(columns), stacked, options.nulls, types[0]), faults


def _common_names(tables: Sequence[Table]) -> tuple[str, ...]:
    """Return the names of the columns that most files have, in the order of the first that has them."""
    counts: Counter[frozenset[str]] = Counter()
    orders: dict[frozenset[str], tuple[str, ...]] = {}
    last: tuple[tuple[Field, ...], frozenset[str]] | None = None
    for table in tables:
        if last is None or table.fields is not last[0]:
            order = tuple([field.name for field in table.fields if not _PANDAS_INDEX.fullmatch(field.name)])
            last = table.fields, frozenset(order)
            orders.setdefault(last[1], order)
        counts[last[1]] += 1
    return orders[counts.most_common(1)[0][0]] if counts else ()


def _fields(table: Table, names: Sequence[str], *, everything: bool) -> list[Field] | str:
    """Return the columns of these names, or what is wrong."""
    by_name = {field.name: field for field in table.fields}
    missing = [name for name in names if name not in by_name]
    if missing:
        return f"has no column {missing[0]!r}; it has {_listed(list(by_name))}"
    if everything:
        extra = [name for name in by_name if name not in set(names) and not _PANDAS_INDEX.fullmatch(name)]
        if extra:
            return (
                f"has a column {extra[0]!r} that others have not, expected {_listed(names)}; "
                "name the columns that are wanted with columns=[...]"
            )
    if len(by_name) < len(table.fields):
        counts = Counter(field.name for field in table.fields)
        twice = [name for name in names if counts[name] > 1]
        if twice:
            return f"has {counts[twice[0]]} columns called {twice[0]!r}, expected one"
    return [by_name[name] for name in names]


def _agree_on_column(
    tables: Sequence[Table], there: Sequence[tuple[int, Field]], options: Options, faults: dict[int, Fault]
) -> tuple[tuple[int, ...] | None, np.dtype[np.generic] | None]:
    """Return the axes and the type of one column, and note each file that does not fit."""
    kinds: dict[tuple[str, tuple[int, ...] | None, int, str], str] = {}
    types: dict[str, np.dtype[np.generic]] = {}
    fit: list[tuple[int, Field]] = []
    for i, field in there:
        key = (field.leaf, field.axes, field.nulls, field.problem)
        if key not in kinds:
            kinds[key] = _problem(field, options, types)
        if kinds[key]:
            faults[i] = Fault(tables[i].path, kinds[key])
        else:
            fit.append((i, field))
    if not fit:
        return None, None
    shapes = Counter(field.axes for _, field in fit if field.axes is not None and -1 not in field.axes)
    axes = shapes.most_common(1)[0][0] if shapes else tuple([max(0, n) for n in fit[0][1].axes or ()])
    leaves = Counter(field.leaf for _, field in fit)
    usual = leaves.most_common(1)[0][0]
    family = _family(types[usual])
    wanted = options.dtype or _widest([types[leaf] for leaf in leaves if _family(types[leaf]) == family])
    for i, field in fit:
        like = f"in {next(tables[j].path for j, other in fit if other.leaf == usual)!r}"
        if options.dtype is None and (wanted is None or _family(types[field.leaf]) != family):
            if wanted is None and field.leaf == usual:
                continue
            faults[i] = Fault(
                tables[i].path,
                f"holds {field.leaf} in column {field.name!r}, expected {usual} as {like}; give dtype= to convert",
            )
        elif not _same_axes(field.axes or (), axes):
            faults[i] = Fault(
                tables[i].path,
                f"holds lists of shape {field.axes} in column {field.name!r}, expected {axes} as {like}",
            )
    return axes, wanted or types[usual]


def _problem(field: Field, options: Options, types: dict[str, np.dtype[np.generic]]) -> str:
    """Return why a column cannot be read, or an empty text; note the type of its elements."""
    what = f"column {field.name!r}"
    if field.problem:
        return f"{what} {field.problem}"
    dtype = numpy_type(field.leaf)
    if dtype is None and _DECIMAL.fullmatch(field.leaf):
        if options.dtype is None or options.dtype.kind not in "iuf":
            return f"{what} is {field.type}, which NumPy cannot hold exactly; give dtype='float64' to convert it"
        dtype = options.dtype
    if dtype is None:
        return f"{what} is {field.type}, expected numbers; name the columns that are wanted with columns=[...]"
    if field.axes is None:
        return f"{what} is {field.type} of varying lengths, expected lists of one length"
    if (
        options.dtype is not None
        and not _DECIMAL.fullmatch(field.leaf)
        and not np.can_cast(dtype, options.dtype, "safe")
    ):
        return f"{what} is {field.type}, which dtype={options.dtype.name!r} cannot hold"
    types[field.leaf] = dtype
    if field.nulls:
        return _null_problem(field.name, field.nulls, options.nulls, options.dtype or dtype)
    return ""


def _null_problem(name: str, count: int, nulls: Nulls, dtype: np.dtype[np.generic]) -> str:
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


def _family(dtype: np.dtype[np.generic]) -> str:
    """Return what types that can be widened to each other have in common."""
    return "i" if dtype.kind in "iu" else "f" if dtype.kind == "f" else dtype.str


def _widest(types: Sequence[np.dtype[np.generic]]) -> np.dtype[np.generic] | None:
    """Return the type that holds the values of all, or None if there is none of their kind."""
    widest = np.result_type(*types)
    return widest if _family(widest) == _family(types[0]) else None


def _same_axes(found: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    return len(found) == len(axes) and all(n in (-1, m) for n, m in zip(found, axes, strict=True))


def _agree_on_row(
    columns: Sequence[Column], types: Sequence[np.dtype[np.generic]], fields: Sequence[Field], options: Options
) -> str:
    """Return why the columns together are no row, or an empty text."""
    if len(set(types)) > 1:
        held = [f"{column.name!r} {field.leaf}" for column, field in zip(columns, fields, strict=True)]
        return (
            f"has columns of different types ({_cut(held)}), expected one type; choose columns of one type with "
            "columns=[...], or give dtype= to convert them"
        )
    if len({column.axes for column in columns}) > 1:
        held = [f"{column.name!r} {column.axes}" for column in columns]
        return f"has columns of different shapes ({_cut(held)}), expected one shape; choose with columns=[...]"
    return ""


def _listed(names: Sequence[str]) -> str:
    return _cut([repr(name) for name in names]) or "none"


def _cut(texts: Sequence[str]) -> str:
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8:,} more" if len(texts) > 8 else "")


# From columns to rows ---------------------------------------------------------------------------------------------


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
        problem = _null_problem(name, nulls, view.nulls, view.dtype)
        if problem:
            raise ColumnError(problem)
        mask = array.is_null().to_numpy(zero_copy_only=False)
    if text == "bool":
        data = array.buffers()[1]
        bits = np.frombuffer(data, np.uint8)[array.offset // 8 :] if data is not None else np.empty(0, np.uint8)
        values = np.unpackbits(bits, count=array.offset % 8 + len(array), bitorder="little")[array.offset % 8 :]
        values = values.view(np.bool_)
    elif decimal := _DECIMAL.fullmatch(text):
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
