"""Which rows of a Parquet file hold wanted values: row groups that cannot are skipped by what its footer tells of them.

The comparisons are pyarrow's own throughout, of the statistics as of the values, so that both agree in every type.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.parquet_footers import Footer, first_line, load_footer, load_pyarrow
from lazyshards.formats.parquet_rows import ShardFile
from lazyshards.formats.parquet_thrift import Chunk, count_values
from lazyshards.layout import Shard
from lazyshards.storage.base import Part, Storage

__all__ = ["Filters", "find_rows", "parse_filters"]

Condition: TypeAlias = tuple[str, str, Any]
"""Name of a column, operator, and value."""

Filters: TypeAlias = tuple[tuple[Condition, ...], ...]
"""Rows are wanted for which all conditions of one of them hold."""

_OPERATORS = ("==", "=", "!=", "<", "<=", ">", ">=", "in", "not in")
_UNIT = re.compile(r"timeUnit=(milli|micro|nano)seconds")
_UNITS = {"milli": "ms", "micro": "us", "nano": "ns"}
_NUMBERS = {"INT32": "i4", "INT64": "i8", "FLOAT": "f4", "DOUBLE": "f8"}
"""NumPy's name of the physical types whose statistics are numbers."""


def parse_filters(filters: object) -> Filters:
    """Return filters as alternatives of conditions.

    Parameters
    ----------
    filters : list of tuples, or list of lists of tuples
        As pyarrow has them: conditions ``(column, operator, value)`` that must all hold, or alternatives of such lists.

    Raises
    ------
    TypeError, ValueError
        If they are not of that form.
    """
    expected = (
        'expected conditions such as [("label", "==", 3), ("age", ">", 20)], or lists of them, one of which holds'
    )
    if not isinstance(filters, list | tuple) or not filters:
        raise TypeError(f"filters={filters!r:.200}: {expected}")
    alternatives = filters if all([isinstance(item, list) for item in filters]) else [filters]
    for alternative in alternatives:
        if not alternative:
            raise ValueError(f"filters={filters!r:.200} has an empty list: {expected}")
        for condition in alternative:
            if not isinstance(condition, tuple) or len(condition) != 3 or not isinstance(condition[0], str):
                raise TypeError(f"filters= holds {condition!r:.200}: {expected}")
            if condition[1] not in _OPERATORS:
                raise ValueError(
                    f"filters= holds the operator {condition[1]!r:.80}: the operators are {', '.join(_OPERATORS)}"
                )
            if condition[1] in ("in", "not in") and not isinstance(condition[2], list | tuple | set | frozenset):
                raise TypeError(f"filters= holds {condition!r:.200}: {condition[1]!r} takes a list of values")
    return tuple([tuple(alternative) for alternative in alternatives])


def find_rows(shard: Shard, footer_nbytes: int, filters: Filters, storage: Storage) -> npt.NDArray[np.int64]:
    """Return the local rows of a file for which filters hold, ascending.

    Read are the columns of the filters, of the row groups of which the footer does not say that they hold no such row.

    Raises
    ------
    ValueError
        If there is no such column, or it cannot be compared so.
    ShardReadError
        If the file cannot be read.
    """
    pa = load_pyarrow()
    names = list(dict.fromkeys([name for alternative in filters for name, _, _ in alternative]))
    footer = load_footer(shard, footer_nbytes, storage)
    _check_columns(shard, footer, names)
    try:
        counts = _counts(shard, footer, storage)
        with _applied(filters, shard):
            expression = pa.parquet.filters_to_expression([list(alternative) for alternative in filters])
            groups = _left(footer, counts, filters)
        if not groups:
            return np.empty(0, np.int64)
        source = pa.PythonFile(ShardFile(shard, storage), "r")
        found = []
        with pa.parquet.ParquetFile(
            source, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True
        ) as file:
            for group in groups:
                table = file.read_row_group(group, columns=names, use_threads=False)
                start, stop = footer.starts[group], footer.starts[group + 1]
                if len(table) != stop - start:
                    raise ShardReadError(f"{shard.path!r} is damaged: its row group {group} ends before row {stop:,}")
                table = table.append_column(_ROW, pa.array(np.arange(start, stop)))
                with _applied(filters, shard):
                    found.append(table.filter(expression).column(_ROW).to_numpy())
    except ShardReadError:
        raise
    except (pa.lib.ArrowException, OSError, UnicodeDecodeError) as exc:
        raise ShardReadError(f"{shard.path!r} cannot be decoded: {first_line(exc)}") from exc
    return np.concatenate(found).astype(np.int64)


_ROW = "__row_of_lazyshards__"


@contextmanager
def _applied(filters: Filters, shard: Shard) -> Iterator[None]:
    """Raise ValueError for a comparison that cannot be made, which is no fault of the file."""
    try:
        yield
    except (load_pyarrow().lib.ArrowException, TypeError, OverflowError) as exc:
        raise ValueError(f"filters={filters!r:.200} cannot be applied to {shard.path!r}: {first_line(exc)}") from exc


def _check_columns(shard: Shard, footer: Footer, names: Sequence[str]) -> None:
    """Raise ValueError for a column that is not there once, or is of lists."""
    fields = {field.name: field for field in footer.schema.fields}
    for name in names:
        if name not in fields:
            known = ", ".join(map(repr, list(fields)[:8]))
            raise ValueError(f"filters= names the column {name!r}, and {shard.path!r} has {known}")
        if fields[name].axes != () or len(footer.schema.leaves[name]) != 1:
            raise ValueError(
                f"filters= names the column {name!r}, which is {fields[name].type} in {shard.path!r}; expected one "
                "value a row"
            )


# What a footer tells ---------------------------------------------------------------------------------------------


class _Extremes(NamedTuple):
    """What is told of one column in all row groups, as Arrow's arrays, null where nothing is."""

    least: Any
    greatest: Any


def _counts(shard: Shard, footer: Footer, storage: Storage) -> list[list[Chunk]]:
    """Return what the footer counts; read again if it was not looked at when the file was opened."""
    if footer.counts:
        return footer.counts
    data = bytearray(footer.nbytes)
    storage.fetch_into([Part(shard.path, shard.stamp, shard.stamp.size - len(data), memoryview(data))])
    return count_values(bytes(data))


def _left(footer: Footer, counts: list[list[Chunk]], filters: Filters) -> list[int]:
    """Return the row groups that may hold wanted rows."""
    groups = [i for i in range(len(footer.starts) - 1) if footer.starts[i + 1] > footer.starts[i]]
    extremes: dict[str, _Extremes | None] = {}
    wanted = np.zeros(len(groups), np.bool_)
    for alternative in filters:
        possible = np.ones(len(groups), np.bool_)
        for name, operator, value in alternative:
            if name not in extremes:
                extremes[name] = _extremes(footer, counts, groups, name)
            told = extremes[name]
            if told is not None:
                possible &= _may_hold(told, operator, value)
        wanted |= possible
    return [group for group, is_wanted in zip(groups, wanted.tolist(), strict=True) if is_wanted]


def _may_hold(told: _Extremes, operator: str, value: Any) -> npt.NDArray[np.bool_]:
    """Return for each row group whether a value between its extremes can meet a condition."""
    pa = load_pyarrow()
    least, greatest = pa.compute.field("least"), pa.compute.field("greatest")
    if operator in ("!=", "not in"):  # NaN, which statistics leave out, is unequal to all
        return np.ones(len(told.least), np.bool_)
    if operator == "in":
        return _may_hold_one(told, value)
    if operator in ("<", "<="):
        expression = least < value if operator == "<" else least <= value
    elif operator in (">", ">="):
        expression = greatest > value if operator == ">" else greatest >= value
    else:
        expression = (least <= value) & (greatest >= value)
    table = pa.table({"least": told.least, "greatest": told.greatest, "group": pa.array(np.arange(len(told.least)))})
    found: npt.NDArray[np.bool_] = np.asarray(told.least.is_null()) | np.asarray(told.greatest.is_null())
    found[table.filter(expression).column("group").to_numpy()] = True
    return found


def _may_hold_one(told: _Extremes, values: Any) -> npt.NDArray[np.bool_]:
    """Return for each row group whether one of some values can lie between its extremes.

    Arrow looks for them in the type of the column: 0.1 is found among 32-bit floats, where none equals it.
    """
    pa = load_pyarrow()
    every = np.ones(len(told.least), np.bool_)
    try:
        wanted = pa.array(list(values)).cast(told.least.type)
    except pa.lib.ArrowException:  # in another type, then
        return every
    if wanted.null_count or (str(wanted.type) in ("float", "double") and np.isnan(wanted.to_numpy()).any()):
        return every  # it finds nulls and NaN, too, and statistics leave them out
    found: npt.NDArray[np.bool_] = np.asarray(told.least.is_null()) | np.asarray(told.greatest.is_null())
    for each in wanted:
        within = pa.compute.and_(pa.compute.less_equal(told.least, each), pa.compute.greater_equal(told.greatest, each))
        found |= np.asarray(within.fill_null(True))
    return found


def _extremes(footer: Footer, counts: list[list[Chunk]], groups: Sequence[int], name: str) -> _Extremes | None:
    """Return the extremes of a column in some row groups, in its own type; None where they are not understood."""
    pa = load_pyarrow()
    (leaf,) = footer.schema.leaves[name]
    column = footer.metadata.schema.column(leaf)
    kind = footer.schema.arrow.field(name).type
    if str(kind).startswith("dictionary<"):
        kind = kind.value_type
    sides = [[counts[i][leaf].least for i in groups], [counts[i][leaf].greatest for i in groups]]
    arrays = [_values(side, column, kind, pa) for side in sides]
    return None if arrays[0] is None or arrays[1] is None else _Extremes(*arrays)


def _values(data: Sequence[bytes | None], column: Any, kind: Any, pa: Any) -> Any:
    """Return values of a column from the bytes of its physical type, or None."""
    text, physical = str(kind), column.physical_type
    if text in ("string", "large_string", "binary", "large_binary") and physical == "BYTE_ARRAY":
        try:
            return pa.array(data, pa.binary()).cast(kind)
        except pa.lib.ArrowInvalid:  # cut within a character, say
            return None
    if physical not in _NUMBERS:
        return None
    dtype = np.dtype(_NUMBERS[physical])
    wide = [item if item is not None and len(item) == dtype.itemsize else None for item in data]
    numbers = np.frombuffer(b"".join([item or bytes(dtype.itemsize) for item in wide]), dtype.newbyteorder("<"))
    missing = np.array([item is None for item in wide], np.bool_) | np.isnan(numbers)
    if text.startswith("uint"):
        numbers = numbers.view(f"u{dtype.itemsize}")
    values = pa.array(numbers, mask=missing)
    if text.startswith("timestamp["):
        unit = _UNIT.search(str(column.logical_type))
        if unit is None or physical != "INT64":
            return None
        return values.cast(pa.timestamp(_UNITS[unit[1]], getattr(kind, "tz", None)))
    if text in ("float", "double") or re.fullmatch(r"u?int\d+|date32\[day\]", text):
        return values.cast(kind, safe=False)
    return None
