"""Parquet files taken apart into their pages and put together again, to damage what they say and not how it is said."""

import copy

__all__ = ["field", "format_struct", "join_pages", "set_field", "split_pages"]

_INTEGERS, _TRUTHS, _BINARY, _LISTS, _STRUCT = (4, 5, 6), (1, 2), 8, (9, 10), 12


def _parse_unsigned(data, at):
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _parse(kind, data, at):
    """Return a value of Thrift's compact protocol, a struct as a list of [number, kind, value], and where it ends."""
    if kind in _TRUTHS:
        return None, at
    if kind == _STRUCT:
        fields, number = [], 0
        while data[at]:
            head, at = data[at], at + 1
            if head >> 4:
                number += head >> 4
            else:
                coded, at = _parse_unsigned(data, at)
                number = (coded >> 1) ^ -(coded & 1)
            value, at = _parse(head & 15, data, at)
            fields.append([number, head & 15, value])
        return fields, at + 1
    if kind in _LISTS:
        head, at = data[at], at + 1
        count, items = head >> 4, []
        if count == 15:
            count, at = _parse_unsigned(data, at)
        for _ in range(count):
            item, at = (data[at], at + 1) if head & 15 in _TRUTHS else _parse(head & 15, data, at)
            items.append(item)
        return (head & 15, items), at
    coded, at = _parse_unsigned(data, at)
    if kind in _INTEGERS:
        return (coded >> 1) ^ -(coded & 1), at
    assert kind == _BINARY
    return bytes(data[at : at + coded]), at + coded


def _format_unsigned(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _format(kind, value):
    """Return the bytes of a value."""
    if kind in _TRUTHS:
        return b""
    if kind in _INTEGERS:
        return _format_unsigned(value << 1 if value >= 0 else (-value << 1) - 1)
    if kind == _BINARY:
        return _format_unsigned(len(value)) + value
    out, before = bytearray(), 0
    if kind in _LISTS:
        of, items = value
        out += bytes([len(items) << 4 | of]) if len(items) < 15 else bytes([0xF0 | of]) + _format_unsigned(len(items))
        return bytes(out) + b"".join([bytes([item]) if of in _TRUTHS else _format(of, item) for item in items])
    for number, of, item in value:
        short = 0 < number - before < 16
        out += bytes([number - before << 4 | of]) if short else bytes([of]) + _format(5, number)
        out += _format(of, item)
        before = number
    return bytes(out) + b"\0"


def field(struct, *numbers):
    """Return a field of a struct, or of one within it; None if it is not there."""
    for number in numbers:
        struct = next((value for have, _, value in struct or () if have == number), None)
    return struct


def set_field(struct, number, value):
    """Put another value in the place of a field that is there."""
    next(entry for entry in struct if entry[0] == number)[2] = value


def split_pages(data):
    """Return the footer of a file, and of each row group the pages of each column: lists [header, bytes]."""
    footer, _ = _parse(_STRUCT, data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    groups = []
    for group in field(footer, 4)[1]:
        groups.append([])
        for chunk in field(group, 1)[1]:
            described, pages = field(chunk, 3), []
            at = min(field(described, 9), field(described, 11) or field(described, 9))
            end = at + field(described, 7)
            while at < end:
                header, at = _parse(_STRUCT, data, at)
                pages.append([header, bytes(data[at : at + field(header, 3)])])
                at += field(header, 3)
            groups[-1].append(pages)
    return footer, groups


def join_pages(footer, groups):
    """Return the file of these pages, to which its footer points, whatever is in them."""
    footer, out = copy.deepcopy(footer), bytearray(b"PAR1")
    for group, columns in zip(field(footer, 4)[1], groups, strict=True):
        for chunk, pages in zip(field(group, 1)[1], columns, strict=True):
            described, start, places = field(chunk, 3), len(out), {}
            for header, body in pages:
                places.setdefault(field(header, 1) == 2, len(out))
                out += _format(_STRUCT, header) + body
            set_field(described, 9, places.get(False, start))
            if field(described, 11) is not None:
                set_field(described, 11, places.get(True, start))
            set_field(described, 7, len(out) - start)
            chunk[:] = [entry for entry in chunk if entry[0] not in (4, 5, 6, 7)]  # where indices lie
    end = _format(_STRUCT, footer)
    return bytes(out) + end + len(end).to_bytes(4, "little") + b"PAR1"


def format_struct(struct):
    """Return the bytes of a struct, given as a list of [number, kind, value]."""
    return _format(_STRUCT, struct)
