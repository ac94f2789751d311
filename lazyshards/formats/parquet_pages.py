"""Where the pages of a Parquet column lie, so that a slice far within a row group need not decode all before it.

Each page has a header, a struct in Thrift's compact protocol, that says how long the page is and how many values it
holds: they are walked from the first on, and kept. Source: the format's specification, ``parquet.thrift``.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from lazyshards.formats.parquet_thrift import CutError, MalformedError, Struct, parse_struct
from lazyshards.native import find_library
from lazyshards.storage.base import Storage

__all__ = ["DATA", "DATA_2", "DICTIONARY", "MOST_HEADER_NBYTES", "PageHeader", "Pages", "locate_pages", "parse_header"]

DATA = 0
"""Kind of a page of values."""
DICTIONARY = 2
"""Kind of a page of the values of a dictionary."""
DATA_2 = 3
"""Kind of a page of values whose levels are never compressed."""
_STRUCTS = {DATA: 5, DICTIONARY: 7, DATA_2: 8}
"""Number of the field of a header that says more of a page, by its kind."""
_RLE = 3
_HEADER_NBYTES = 256
"""Bytes that the header of a page seldom exceeds."""
MOST_HEADER_NBYTES = 1 << 20
"""Bytes of the longest header that is parsed: one with the extremes of long texts."""


class PageHeader(NamedTuple):
    """What the header of a page says, as far as it takes to decode it."""

    own_nbytes: int
    """Bytes of the header."""
    kind: int
    """Whether it holds values, those of a dictionary, or something else."""
    nbytes: int
    """Bytes of what follows it, as they lie in the file."""
    inflated_nbytes: int
    """Bytes of the same, decompressed."""
    checksum: int | None
    """Of the bytes in the file; None if there is none."""
    values: int = 0
    """How many, nulls among them."""
    encoding: int = 0
    """Of the values."""
    levels: int = -1
    """Bytes of levels that stand before the values, uncompressed; -1 where the page itself tells."""
    is_raw: bool = False
    """Whether the values are not compressed, whatever the column says."""
    is_full: bool = True
    """Whether its levels are coded as they are today, and it is not known to hold nulls."""


class Pages(NamedTuple):
    """The pages of one column of one row group, as far as they were walked."""

    dictionary: tuple[int, int]
    """First byte of the dictionary page and the byte after its last; empty if there is none."""
    offsets: tuple[int, ...]
    """First byte of each data page, its header included."""
    values: tuple[int, ...]
    """Values before each data page."""
    next_offset: int
    """First byte of what was not walked yet."""
    next_value: int
    """Values before it."""

    def span(self, first: int, stop: int) -> tuple[int, int, int]:
        """Return the first byte of the pages that hold values [first, stop), the byte after, and the values before."""
        i = bisect_right(self.values, first) - 1
        j = bisect_right(self.values, stop - 1)
        return self.offsets[i], self.offsets[j] if j < len(self.offsets) else self.next_offset, self.values[i]


def locate_pages(
    path: str, storage: Storage, chunks: Sequence[tuple[int, int]], until: Sequence[int], known: Sequence[Pages | None]
) -> list[Pages | None]:
    """Return the pages of some columns of a row group, up to a value of each; None where they cannot be told.

    Parameters
    ----------
    path : str
    storage : Storage
    chunks : sequence of (int, int)
        First byte of each column, and the byte after its last.
    until : sequence of int
        Number of the value up to which the pages of each are wanted.
    known : sequence of Pages or None
        What was found before.
    """
    found: list[Pages | None] = [
        pages or Pages((start, start), (), (), start, 0) for pages, (start, _) in zip(known, chunks, strict=True)
    ]
    walks = {i: _Walk(pages) for i, pages in enumerate(found) if pages is not None and pages.next_value < until[i]}
    sizes = dict.fromkeys(walks, _HEADER_NBYTES)
    while sizes:
        reads = []
        for i, nbytes in sizes.items():
            offset = walks[i].next_offset
            reads.append((path, offset, max(0, min(nbytes, chunks[i][1] - offset))))
        for i, data in zip(list(sizes), storage.fetch(reads), strict=True):
            walk = walks[i]
            try:
                walk.go_on(data, chunks[i][1], until[i])
            except CutError:
                sizes[i] *= 16
                if sizes[i] > MOST_HEADER_NBYTES or len(data) < sizes[i] // 16:
                    found[i] = None
                    del sizes[i]
                continue
            except MalformedError:  # the library that decodes it says what is wrong
                found[i] = None
                del sizes[i]
                continue
            if walk.next_value >= until[i]:
                found[i] = walk.pages()
                del sizes[i]
            else:
                sizes[i] = _HEADER_NBYTES
    return found


class _Walk:
    """A walk from page to page of a column, on from those that are known."""

    __slots__ = ("dictionary", "next_offset", "next_value", "offsets", "values")

    def __init__(self, pages: Pages) -> None:
        self.dictionary = pages.dictionary
        self.offsets = list(pages.offsets)
        self.values = list(pages.values)
        self.next_offset = pages.next_offset
        self.next_value = pages.next_value

    def pages(self) -> Pages:
        """Return those that were walked."""
        return Pages(self.dictionary, tuple(self.offsets), tuple(self.values), self.next_offset, self.next_value)

    def go_on(self, data: bytes, end: int, until: int) -> None:
        """Walk the pages whose headers lie in ``data``, which begins where those before end: at least one more."""
        at = 0
        while self.next_value < until and (at < len(data) or not at):
            try:
                header = parse_header(data, at)
            except CutError:
                if at:
                    return
                raise
            size = header.own_nbytes + header.nbytes
            offset = self.next_offset
            if offset + size > end:
                raise MalformedError("no page")
            if header.kind in (DATA, DATA_2):
                if header.values:
                    self.offsets.append(offset)
                    self.values.append(self.next_value)
                self.next_value += header.values
            elif header.kind == DICTIONARY:
                if self.offsets or self.dictionary[0] < self.dictionary[1]:
                    raise MalformedError("a second dictionary")
                self.dictionary = (offset, offset + size)
            self.next_offset, at = offset + size, at + size
            if self.next_offset >= end and self.next_value < until:
                raise MalformedError("no page")


_Facts = ctypes.c_int64 * 9
_MISSING = -(1 << 63)


def parse_header(data: bytes | memoryview, at: int, address: int = 0) -> PageHeader:
    """Return the header of the page that begins at byte ``at`` of some data.

    Parameters
    ----------
    data : bytes or memoryview
    at : int
    address : int
        Of the first byte of the data, if that is known.

    Raises
    ------
    CutError
        If it goes on behind the data.
    MalformedError
        If it is none.
    """
    library = find_library()
    if library is None or not (address or isinstance(data, bytes)):
        struct, end = parse_struct(data, at)
        fields = _listed(struct)
        more = struct.get(_STRUCTS.get(fields[1], 0))
        return _header(fields, _listed(more if isinstance(more, dict) else {}), end - at)
    facts = _Facts()
    place = address + at if address else data[at:] if at else data
    size = library.lazyshards_page(place, len(data) - at, facts)
    if size <= 0:
        raise CutError("a header that is cut") if size == 0 else MalformedError("no header")
    kind, nbytes, inflated_nbytes, checksum, values, encoding, levels, is_raw, is_full = facts
    return PageHeader(
        size,
        kind,
        nbytes,
        inflated_nbytes,
        None if checksum == _MISSING else checksum,
        values,
        encoding,
        levels,
        is_raw == 1,
        is_full == 1,
    )


def _listed(struct: Struct) -> list[int]:
    """Return the integers among fields 0 to 7."""
    found = [struct.get(number) for number in range(8)]
    values = [value if isinstance(value, int) else _MISSING for value in found]
    if any([value != _MISSING and not -(1 << 31) <= value < 1 << 31 for value in values]):
        raise MalformedError("no page")  # others would cut it
    return values


def _header(fields: list[int], more: list[int], own_nbytes: int) -> PageHeader:
    """Return a header of these fields, and of those of the struct that is for its kind."""
    _, kind, inflated_nbytes, nbytes, checksum, *_ = fields
    values, encoding, levels, is_raw, is_full = more[1], more[2], -1, False, True
    if kind == DATA:
        is_full = more[3] == _RLE and more[4] != _MISSING
    elif kind == DATA_2:
        encoding, levels, is_raw, is_full = more[4], more[5] + more[6], more[7] == 0, (more[2] == 0 and more[3] >= 0)
        if min(more[5:7]) < 0:
            raise MalformedError("no page")
    elif kind != DICTIONARY:
        values = encoding = 0
    if min(nbytes, inflated_nbytes, values, encoding) < 0:
        raise MalformedError("no page")
    known = None if checksum == _MISSING else checksum
    return PageHeader(own_nbytes, kind, nbytes, inflated_nbytes, known, values, encoding, levels, is_raw, is_full)
