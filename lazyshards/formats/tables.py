"""Tables of many files as one: which of their columns are wanted, and the one type and shape that they are read in."""

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from lazyshards.formats.base import Fault
from lazyshards.formats.columns import DECIMAL, Column, Nulls, View, null_problem, numpy_type
from lazyshards.formats.options import check_options
from lazyshards.layout import native_dtype
from lazyshards.storage.base import Stamp

__all__ = ["Cache", "Field", "Options", "Table", "agree", "describe_type", "parse_options"]

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
    check_options(options, format, ("columns", "dtype", "fill_value", "nulls"))
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


# What is agreed upon ----------------------------------------------------------------------------------------------


def agree(tables: Sequence[Table], options: Options) -> tuple[View | None, dict[int, Fault]]:
    """Return how all files are read, and by number the files that do not allow it.

    Columns are matched by name. A column may be of different integer types, or of different float types, in different
    files: it is widened to one that holds the values of all.
    """
    # Most files have the very same columns, which are looked at once.
    groups: dict[int, list[int]] = {}
    for i, table in enumerate(tables):
        groups.setdefault(id(table.fields), []).append(i)
    members = list(groups.values())
    view, problems = _agree([tables[some[0]] for some in members], [len(some) for some in members], options)
    return view, {i: Fault(tables[i].path, problem) for g, problem in problems.items() for i in members[g]}


def _agree(tables: Sequence[Table], weights: Sequence[int], options: Options) -> tuple[View | None, dict[int, str]]:
    """Return how files that stand for ``weights`` of them are read, and by number what is wrong with some."""
    problems: dict[int, str] = {}
    names = options.columns or _common_names(tables, weights)
    if not names:
        return None, dict.fromkeys(range(len(tables)), "has no columns")
    found: dict[int, list[Field]] = {}
    for i, table in enumerate(tables):
        fields = _fields(table, names, everything=options.columns is None)
        if isinstance(fields, str):
            problems[i] = fields
        else:
            found[i] = fields
    columns: list[Column] = []
    types: list[np.dtype[np.generic]] = []
    for k, name in enumerate(names):
        there = {i: fields[k] for i, fields in found.items() if i not in problems}
        agreed = _agree_on_column(tables, weights, there, options, problems)
        if agreed is None:
            return None, problems
        columns.append(Column(name, agreed[0]))
        types.append(agreed[1])
    first = next((fields for i, fields in found.items() if i not in problems), None)
    if first is None:
        return None, problems
    problem = _agree_on_row(columns, types, first, options)
    if problem:
        return None, dict.fromkeys(range(len(tables)), problem) | problems
    stacked = not options.single and not (options.columns is None and len(columns) == 1 and columns[0].axes)
    return View(tuple(columns), stacked, options.nulls, types[0]), problems


def _common_names(tables: Sequence[Table], weights: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the columns that most files have, in the order of the first that has them."""
    counts: Counter[frozenset[str]] = Counter()
    orders: dict[frozenset[str], tuple[str, ...]] = {}
    for table, weight in zip(tables, weights, strict=True):
        order = tuple([field.name for field in table.fields if not _PANDAS_INDEX.fullmatch(field.name)])
        names = frozenset(order)
        orders.setdefault(names, order)
        counts[names] += weight
    return orders[counts.most_common(1)[0][0]] if counts else ()


def _fields(table: Table, names: Sequence[str], *, everything: bool) -> list[Field] | str:
    """Return the columns of these names, or what is wrong."""
    by_name = {field.name: field for field in table.fields}
    missing = [name for name in names if name not in by_name]
    if missing:
        parts = [part.strip(" []'\"") for part in missing[0].split(",")]
        several = ""
        if len(parts) > 1 and set(parts) <= set(by_name):
            several = f"; several columns are a list: columns={json.dumps(parts)}"
        return f"has no column {missing[0]!r}; it has {_listed(list(by_name))}{several}"
    if everything:
        wanted = set(names)
        extra = [name for name in by_name if name not in wanted and not _PANDAS_INDEX.fullmatch(name)]
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
    tables: Sequence[Table],
    weights: Sequence[int],
    there: Mapping[int, Field],
    options: Options,
    problems: dict[int, str],
) -> tuple[tuple[int, ...], np.dtype[np.generic]] | None:
    """Return the axes and the type of one column, and note what is wrong with the files that do not fit."""
    types: dict[str, np.dtype[np.generic]] = {}
    leaves: Counter[str] = Counter()
    shapes: Counter[tuple[int, ...]] = Counter()
    fit: dict[int, Field] = {}
    for i, field in there.items():
        problem = _problem(field, tables[i], options, types)
        if problem:
            problems[i] = problem
            continue
        fit[i] = field
        leaves[field.leaf] += weights[i]
        if field.axes is not None and -1 not in field.axes:
            shapes[field.axes] += weights[i]
    if not fit:
        return None
    usual = leaves.most_common(1)[0][0]
    like = f"in {next(tables[i].path for i, field in fit.items() if field.leaf == usual)!r}"
    family = _family(types[usual])
    fitting = {leaf for leaf in leaves if _family(types[leaf]) == family}
    dtype = options.dtype
    if dtype is None:
        dtype = _widest([types[leaf] for leaf in fitting])
    if dtype is None:
        dtype, fitting = types[usual], {usual}
    unknown = next(iter(fit.values())).axes or ()
    axes = shapes.most_common(1)[0][0] if shapes else tuple([max(0, length) for length in unknown])
    for i, field in fit.items():
        if options.dtype is None and field.leaf not in fitting:
            problems[i] = (
                f"holds {field.leaf} in column {field.name!r}, expected {usual} as {like}; give dtype= to convert"
            )
        elif not _same_axes(field.axes or (), axes):
            problems[i] = f"holds lists of shape {field.axes} in column {field.name!r}, expected {axes} as {like}"
    return axes, dtype


def _problem(field: Field, table: Table, options: Options, types: dict[str, np.dtype[np.generic]]) -> str:
    """Return why a column cannot be read, or an empty text; note the type of its elements."""
    what = f"column {field.name!r}"
    if field.problem:
        return f"{what} {field.problem}"
    dtype = numpy_type(field.leaf)
    if dtype is None and DECIMAL.fullmatch(field.leaf):
        if options.dtype is None or options.dtype.kind not in "iuf":
            return f"{what} is {field.type}, which NumPy cannot hold exactly; give dtype='float64' to convert it"
        dtype = options.dtype
    if dtype is None:
        numbers = [other.name for other in table.fields if not other.problem and numpy_type(other.leaf) is not None]
        there = f", of {_listed(numbers)}" if numbers else ""
        return f"{what} is {field.type}, expected numbers; name the columns that are wanted{there} with columns=[...]"
    if field.axes is None:
        return f"{what} is {field.type} of varying lengths, expected lists of one length"
    if (
        options.dtype is not None
        and not DECIMAL.fullmatch(field.leaf)
        and not np.can_cast(dtype, options.dtype, "safe")
    ):
        return f"{what} is {field.type}, which dtype={options.dtype.name!r} cannot hold"
    types[field.leaf] = dtype
    if field.nulls:
        return null_problem(field.name, field.nulls, options.nulls, options.dtype or dtype)
    return ""


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
