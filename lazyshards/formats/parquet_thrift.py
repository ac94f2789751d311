"""As much of Thrift's compact protocol as Parquet's headers need: integers, truths and structs, and past all else.

Used where pyarrow does not say what a header does (pages), or ends the process if it is damaged (statistics). Source:
the protocol's specification, ``thrift-compact-protocol.md``, and the format's, ``parquet.thrift``.
"""

from typing import NamedTuple, TypeAlias

__all__ = ["Chunk", "CutError", "MalformedError", "Struct", "count_values", "parse_struct"]

Struct: TypeAlias = "dict[int, int | Struct]"
"""The integers, truths (1 or 0) and structs that are fields of a struct, by number."""

_MOST_DEPTH = 8
"""Structs and lists within each other."""
_BINARY, _LIST, _STRUCT = 8, 9, 12


class Chunk(NamedTuple):
    """What a footer counts in one column of one row group."""

    values: int | None
    """Its values, nulls among them."""
    nulls: int | None
    """Its nulls; None if no statistics tell."""
    least: bytes | None = None
    """A value that none is less than, in the bytes of its physical type; None if no statistics tell."""
    greatest: bytes | None = None
    """A value that none is greater than, likewise."""


class CutError(ValueError):
    """More bytes are needed."""


class MalformedError(ValueError):
    """These bytes are not of the protocol."""


def parse_struct(data: bytes | memoryview, at: int, depth: int = 0) -> tuple[Struct, int]:
    """Return the integers and structs of the struct that begins at ``at``, and where it ends."""
    fields: Struct = {}
    number = 0
    try:
        while data[at]:
            number, kind, at = _field(data, at, number)
            if kind in (4, 5, 6):
                value, at = _varint(data, at)
                fields[number] = (value >> 1) ^ -(value & 1)
            elif kind in (1, 2):
                fields[number] = 2 - kind
            elif kind == _STRUCT and depth < _MOST_DEPTH:
                fields[number], at = parse_struct(data, at, depth + 1)
            else:
                at = _skip(data, at, kind, depth)
    except IndexError:
        raise CutError("a struct that is cut") from None
    return fields, at + 1


def count_values(data: bytes) -> list[list[Chunk]]:
    """Return what a footer counts in each column of each row group."""
    groups: list[list[Chunk]] = []
    try:
        at, number = 0, 0
        while data[at]:
            number, kind, at = _field(data, at, number)
            if number == 4 and kind == _LIST:  # row_groups
                count, at = _structs(data, at)
                for _ in range(count):
                    found, at = _columns_of_group(data, at)
                    groups.append(found)
            else:
                at = _skip(data, at, kind, 0)
    except IndexError:
        raise CutError("a footer that is cut") from None
    return groups


def _columns_of_group(data: bytes, at: int) -> tuple[list[Chunk], int]:
    """Return what is counted in the columns of the row group that begins at ``at``, and where it ends."""
    found: list[Chunk] = []
    number = 0
    while data[at]:
        number, kind, at = _field(data, at, number)
        if number == 1 and kind == _LIST:  # columns
            count, at = _structs(data, at)
            for _ in range(count):
                values: dict[tuple[int, ...], int] = {}
                texts: dict[tuple[int, ...], bytes] = {}
                at = _pick(data, at, (), values, texts)
                found.append(Chunk(values.get(_VALUES), values.get(_NULLS), texts.get(_LEAST), texts.get(_GREATEST)))
        else:
            at = _skip(data, at, kind, 0)
    return found, at + 1


_VALUES, _NULLS = (3, 5), (3, 12, 3)
"""ColumnChunk.meta_data.num_values, and ColumnChunk.meta_data.statistics.null_count."""
_LEAST, _GREATEST = (3, 12, 6), (3, 12, 5)
"""ColumnChunk.meta_data.statistics.min_value and max_value; the older min and max were compared in several ways."""
_PICKED = frozenset(((3,), (3, 12), _VALUES, _NULLS, _LEAST, _GREATEST))


def _pick(
    data: bytes,
    at: int,
    within: tuple[int, ...],
    found: dict[tuple[int, ...], int],
    texts: dict[tuple[int, ...], bytes],
) -> int:
    """Note the integers and bytes that are wanted of the struct that begins at ``at``; return where it ends."""
    number = 0
    while data[at]:
        number, kind, at = _field(data, at, number)
        place = (*within, number)
        if place not in _PICKED:
            at = _skip(data, at, kind, 0)
        elif kind == _STRUCT:
            at = _pick(data, at, place, found, texts)
        elif kind in (4, 5, 6):
            coded, at = _varint(data, at)
            found[place] = (coded >> 1) ^ -(coded & 1)
        elif kind == _BINARY:
            size, at = _varint(data, at)
            texts[place] = bytes(data[at : at + size])
            at += size
        else:
            at = _skip(data, at, kind, 0)
    return at + 1


def _field(data: bytes | memoryview, at: int, before: int) -> tuple[int, int, int]:
    """Return number and type of the field that begins at ``at``, and where its value begins."""
    head = data[at]
    if head >> 4:
        return before + (head >> 4), head & 15, at + 1
    coded, at = _varint(data, at + 1)
    number = (coded >> 1) ^ -(coded & 1)
    if not -(1 << 15) <= number < 1 << 15:
        raise MalformedError("a field whose number has more than 16 bits")
    return number, head & 15, at


def _structs(data: bytes, at: int) -> tuple[int, int]:
    """Return how many structs the list that begins at ``at`` holds, and where the first begins."""
    count, kind, at = _items(data, at)
    if count and kind != _STRUCT:
        raise MalformedError("a list of something else than structs")
    return count, at


def _items(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    head = data[at]
    at += 1
    count = head >> 4
    if count == 15:
        count, at = _varint(data, at)
    return count, head & 15, at


def _skip(data: bytes | memoryview, at: int, kind: int, depth: int) -> int:
    """Return where a value ends."""
    if kind in (4, 5, 6):
        while data[at] & 128:
            at += 1
        return at + 1
    if kind in (1, 2):
        return at
    if kind == 8:
        size, at = _varint(data, at)
        return at + size
    if kind == 3:
        return at + 1
    if kind == 7:
        return at + 8
    if depth >= _MOST_DEPTH:
        raise MalformedError("structs too deep within each other")
    if kind in (_LIST, 10):
        count, item, at = _items(data, at)
        if item in (1, 2, 3):
            return at + count
        for _ in range(count):
            at = _skip(data, at, item, depth + 1)
        return at
    if kind == _STRUCT:
        number = 0
        while data[at]:
            number, item, at = _field(data, at, number)
            at = _skip(data, at, item, depth + 1)
        return at + 1
    raise MalformedError(f"a value of type {kind}")


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise MalformedError("an integer of more than 64 bits")
