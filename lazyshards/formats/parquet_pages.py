"""Where the pages of a Parquet column lie, so that a slice far within a row group need not decode all before it.

Each page has a header, a struct in Thrift's compact protocol, that says how long the page is and how many values it
holds: they are walked from the first on, and kept. Source: the format's specification, ``parquet.thrift``.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from lazyshards.formats.parquet_thrift import CutError, MalformedError, parse_struct
from lazyshards.storage.base import Storage

__all__ = ["PageHeader", "Pages", "locate_pages"]

_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_HEADER_NBYTES = 256
"""Bytes that the header of a page seldom exceeds."""
_MOST_HEADER_NBYTES = 1 << 20
"""Bytes of the longest header that is parsed: one with the extremes of long texts."""


class PageHeader(NamedTuple):
    """What the header of a page says, as far as it takes to decode it."""

    own_nbytes: int
    """Bytes of the header."""
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
    sizes = {i: _HEADER_NBYTES for i, pages in enumerate(found) if pages is not None and pages.next_value < until[i]}
    while sizes:
        reads = []
        for i, nbytes in sizes.items():
            pages, stop = found[i], chunks[i][1]
            assert pages is not None
            reads.append((path, pages.next_offset, max(0, min(nbytes, stop - pages.next_offset))))
        for i, data in zip(list(sizes), storage.fetch(reads), strict=True):
            pages = found[i]
            assert pages is not None
            try:
                found[i] = pages = _walk(pages, data, chunks[i][1], until[i])
            except CutError:
                sizes[i] *= 16
                if sizes[i] > _MOST_HEADER_NBYTES or len(data) < sizes[i] // 16:
                    found[i] = None
                    del sizes[i]
                continue
            except MalformedError:  # the library that decodes it says what is wrong
                found[i] = None
                del sizes[i]
                continue
            if pages.next_value >= until[i]:
                del sizes[i]
            else:
                sizes[i] = _HEADER_NBYTES
    return found


def _walk(pages: Pages, data: bytes, end: int, until: int) -> Pages:
    """Return the pages with those whose headers lie in ``data``, which begins where they end: at least one more."""
    dictionary, offsets, values, offset, value = pages
    at, moved = 0, False
    while value < until:
        try:
            header, after = parse_struct(data, at)
        except CutError:
            if moved:
                break
            raise
        kind, nbytes = header.get(1), header.get(3)
        if not isinstance(nbytes, int) or nbytes < 0:
            raise MalformedError("no page")
        size = after - at + nbytes
        if offset + size > end:
            raise MalformedError("no page")
        if kind in (_DATA, _DATA_2):
            described = header.get(5 if kind == _DATA else 8)
            count = described.get(1) if isinstance(described, dict) else None
            if not isinstance(count, int) or count < 0:
                raise MalformedError("no page")
            if count:
                offsets, values = (*offsets, offset), (*values, value)
            value += count
        elif kind == _DICTIONARY and not offsets:
            dictionary = (offset, offset + size)
        offset, at, moved = offset + size, at + size, True
        if offset >= end:
            if value < until:
                raise MalformedError("no page")
            break
        if at >= len(data):
            break
    return Pages(dictionary, offsets, values, offset, value)
