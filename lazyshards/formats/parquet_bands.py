"""Rows of plain columns of a Parquet file, decoded without the library: some columns at a time, page after page.

The library decodes a whole column of a row group, and a dictionary anew for each slice. Here as many columns as fit
bounded memory are gone through together, each with a page of its own at hand.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.columns import Scratch
from lazyshards.formats.kept import Kept
from lazyshards.formats.parquet_columns import Column, Writer
from lazyshards.formats.parquet_footers import Footer, load_pyarrow
from lazyshards.formats.parquet_pages import DICTIONARY, Pages, locate_pages, parse_header
from lazyshards.formats.parquet_thrift import CutError, MalformedError
from lazyshards.formats.parquet_values import (
    DICTIONARIES,
    MOST_PAGE_NBYTES,
    LargePageError,
    Leaf,
    OtherwiseError,
    Values,
    decode_dictionary,
)
from lazyshards.layout import Shard
from lazyshards.native import find_library
from lazyshards.storage.base import Part, Storage

__all__ = ["Place", "read_columns"]

_FEW_ROWS = 8192
"""Rows up to which NumPy is as fast as the library, and pages are looked for rather than read through."""
_BAND_NBYTES = 8 << 20
"""Bytes that the pages and dictionaries of columns that are read together may take."""
_PAGES_NBYTES = 48 << 20
"""Bytes that the pages of columns that are read together may take once decompressed."""
_READ_NBYTES = 96 << 10
"""Bytes of each column that are read at a time, if files are near."""
_NEAR_GAP_NBYTES = 32 << 10
"""Bytes up to which reading on costs more than another read, if files are near."""
_MOST_WASTED_ROWS = 8192
"""Rows that are passed over rather than looking for a page to begin with."""
_PAGE_NBYTES = 17 << 16
"""Bytes of a page as writers usually make them at most."""
_HEADER_NBYTES = 256
"""Bytes that the header of a page seldom exceeds."""
_LINE_NBYTES = 64
"""Bytes that memory is written by: columns are taken so many at a time that their values fill them."""

_ENDS: Kept[bool] = Kept(1 << 10)
"""Row groups of which a few rows at one end were read, by path, stamp and number."""


class Place(NamedTuple):
    """Where in a row group rows are read."""

    shard: Shard
    storage: Storage
    footer: Footer
    group: int
    start: int
    """First row wanted, counted from the first of the row group."""
    stop: int
    """Row after the last."""

    @property
    def is_far(self) -> bool:
        """Whether each read has a price, and not each byte."""
        return self.storage.gap_nbytes > _NEAR_GAP_NBYTES

    @property
    def is_few(self) -> bool:
        """Whether so few rows are wanted that their pages are looked for."""
        return self.stop - self.start <= _FEW_ROWS

    @property
    def rows(self) -> int:
        """Rows of the row group."""
        return self.footer.starts[self.group + 1] - self.footer.starts[self.group]

    @property
    def window_nbytes(self) -> int:
        """Bytes that are read together at most, where they must be held besides."""
        return max(self.storage.window_nbytes, _READ_NBYTES)

    def key(self, leaf: Leaf) -> tuple[object, ...]:
        """Return by what a dictionary is kept."""
        return self.shard.path, self.shard.stamp, self.group, leaf.number

    def fetch(self, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Read bytes of the file, from each offset on, if it is the one that was opened."""
        path, stamp = self.shard.path, self.shard.stamp
        self.storage.fetch_into([Part(path, stamp, offset, out) for offset, out in wanted])


def read_columns(
    place: Place,
    leaves: Sequence[Leaf],
    chunks: Sequence[tuple[int, int]],
    out: npt.NDArray[np.generic],
    scratch: Scratch,
) -> bool:
    """Fill ``out`` with rows of a row group, and return whether that was possible; if not, the library must.

    Parameters
    ----------
    place : Place
        What is learned of pages is kept in its footer.
    leaves : sequence of Leaf
    chunks : sequence of (int, int)
        First byte of each leaf's column, and the byte after its last.
    out : ndarray, (rows, columns)
    scratch : Scratch
    """
    library = find_library() if all([leaf.dtype == out.dtype for leaf in leaves]) else None
    asked = (place.group, *[leaf.number for leaf in leaves])
    if (library is None and not place.is_few) or asked in place.footer.refused:
        return False
    pages: list[Pages | None] = [None] * len(leaves)
    if place.start >= _MOST_WASTED_ROWS or (place.is_few and not place.is_far):
        pages = _locate(place, leaves, chunks)
        if None in pages:
            return False
    page_nbytes = MOST_PAGE_NBYTES if asked in place.footer.large else _PAGE_NBYTES
    try:
        if place.is_few and _copy_plain(place, leaves, pages, out, scratch, library):
            return True
        columns = [_column(place, *each, page_nbytes) for each in zip(leaves, chunks, pages, strict=True)]
        keeps = _is_slice(place)
        for some in _bands(place, columns, out.itemsize):
            _read_band(place, columns[some], out[:, some], scratch, library, keeps=keeps)
            for column in columns[some]:
                column.dictionary = column.values = None  # for the memory that they take
    except ShardReadError:
        raise
    except LargePageError:
        if page_nbytes == MOST_PAGE_NBYTES:
            place.footer.refused.add(asked)
            return False
        place.footer.large.add(asked)
        return read_columns(place, leaves, chunks, out, scratch)  # fewer columns at a time
    except (OtherwiseError, CutError, MalformedError, load_pyarrow().lib.ArrowException, OSError, IndexError):
        place.footer.refused.add(asked)
        return False  # what is wrong, if anything is, the library says
    return True


def _locate(place: Place, leaves: Sequence[Leaf], chunks: Sequence[tuple[int, int]]) -> list[Pages | None]:
    """Return the pages of each column, up to the last that is wanted; None where they cannot be told."""
    footer, keys = place.footer, [(place.group, leaf.number) for leaf in leaves]
    known = [footer.pages.get(key) for key in keys]
    found = locate_pages(place.shard.path, place.storage, chunks, [place.stop] * len(leaves), known)
    footer.pages.update({key: pages for key, pages in zip(keys, found, strict=True) if pages is not None})
    return found


def _column(place: Place, leaf: Leaf, chunk: tuple[int, int], pages: Pages | None, page_nbytes: int) -> Column:
    """Return a column, at the first page that is known to be needed."""
    # No page has more bytes than the footer says that all of them have.
    page_nbytes = min(page_nbytes, leaf.inflated_nbytes)
    if pages is not None:
        offset, end, before = pages.span(place.start, place.stop)
        column = Column(leaf, pages.dictionary, offset, end, end - offset, place.start - before, page_nbytes)
    else:
        start, end = chunk
        offset = min(end, start + leaf.dictionary_nbytes)
        wanted = min(end - offset, (end - offset) * place.stop // place.rows + _PAGE_NBYTES)
        column = Column(leaf, (start, offset), offset, end, wanted, place.start, page_nbytes)
    # Where each read has a price, one that goes on through the dictionary is cheaper than two.
    if column.dictionary_nbytes and (not place.is_far or (place.is_few and pages is not None)):
        column.dictionary = DICTIONARIES.get(place.key(leaf))
    return column


def _bands(place: Place, columns: Sequence[Column], itemsize: int) -> Iterator[slice]:
    """Yield which columns are read together, as many as bounded memory holds, and as many each time."""
    costs = []
    for column in columns:
        start, stop = column.dictionary_span
        unread = 0 if column.dictionary is not None else stop - start
        if place.is_far:
            costs.append(unread + min(column.wanted, place.storage.window_nbytes))
        else:  # pages, as they lie there and decompressed
            costs.append(int(unread * column.leaf.inflation) + 2 * min(column.wanted, _READ_NBYTES))
    most = max(1, max(place.storage.window_nbytes, _BAND_NBYTES) // max([1, *costs]))
    most = max(1, min(most, _PAGES_NBYTES // max([1, *[column.page_nbytes for column in columns]])))
    if most < len(columns):
        line = max(1, _LINE_NBYTES // itemsize)
        most -= most % line if most >= line else 0
    for first in range(0, len(columns), most):
        yield slice(first, min(first + most, len(columns)))


def _read_band(
    place: Place,
    columns: Sequence[Column],
    out: npt.NDArray[np.generic],
    scratch: Scratch,
    library: ctypes.CDLL | None,
    *,
    keeps: bool,
) -> None:
    """Fill the rows of some columns; ``keeps`` says whether what dictionaries they have is kept."""
    most = place.storage.window_nbytes if place.is_far else _READ_NBYTES
    rooms = [min(column.wanted, most) for column in columns]
    held = scratch.room("pages", sum(rooms))
    address, at = held.ctypes.data, 0
    for column, nbytes in zip(columns, rooms, strict=True):
        column.use(held[at : at + nbytes], address + at)
        at += nbytes
    _read_dictionaries(place, columns, scratch, keeps=keeps)
    writer = Writer(columns, out, scratch, library)
    headers = place.footer.headers if place.is_few else None
    row = 0
    while row < len(out):
        short = [(column, nbytes) for column in columns if not column.left and (nbytes := column.missing(headers))]
        while short:
            place.fetch([column.more(nbytes) for column, nbytes in short])
            short = [(column, nbytes) for column, _ in short if (nbytes := column.missing(headers))]
        count = min([len(out) - row, *[column.left for column in columns]])
        writer.write(row, count)
        for column in columns:
            column.left -= count
            column.done += count
        row += count
    if place.is_few:
        place.footer.plain.update([column.plain for column in columns if column.plain is not None])


def _read_dictionaries(place: Place, columns: Sequence[Column], scratch: Scratch, *, keeps: bool) -> None:
    """Read the dictionaries that are not here yet, so many at a time as may be held, and with the last what follows."""
    missing = [column for column in columns if column.dictionary is None and column.dictionary_nbytes]
    if max([column.dictionary_nbytes for column in missing], default=0) > MOST_PAGE_NBYTES:
        raise OtherwiseError
    while missing:
        some, nbytes = 0, 0
        while some < len(missing) and (not some or nbytes + missing[some].dictionary_nbytes <= place.window_nbytes):
            nbytes += missing[some].dictionary_nbytes
            some += 1
        room, at = scratch.room("dictionaries", nbytes), 0
        wanted = []
        for column in missing[:some]:
            wanted.append((column.dictionary_span[0], room[at : at + column.dictionary_nbytes].data))
            at += column.dictionary_nbytes
        if some == len(missing):
            wanted += [column.more(0) for column in columns]
        place.fetch(wanted)
        for column, (_, data) in zip(missing[:some], wanted, strict=False):
            header = parse_header(data[:_HEADER_NBYTES].tobytes(), 0)
            if header.kind != DICTIONARY or header.own_nbytes + header.nbytes != len(data):
                raise OtherwiseError
            column.dictionary = decode_dictionary(column.leaf, header, data[header.own_nbytes :])
            if keeps:
                DICTIONARIES.put(place.key(column.leaf), column.dictionary, column.dictionary.values.nbytes)
        del missing[:some]


def _is_slice(place: Place) -> bool:
    """Return whether other rows of the row group are likely to be asked for, so that its dictionaries are kept.

    Few rows at either end of it may be what is left of a long range, which nobody needs again: the second time they
    are asked for they are not.
    """
    if not place.is_few:
        return False
    if place.start > 0 and place.stop < place.rows:
        return True
    key = (place.shard.path, place.shard.stamp, place.group)
    seen = _ENDS.get(key) is not None
    _ENDS.put(key, True, 1)
    return seen


def _copy_plain(
    place: Place,
    leaves: Sequence[Leaf],
    pages: Sequence[Pages | None],
    out: npt.NDArray[np.generic],
    scratch: Scratch,
    library: ctypes.CDLL | None,
) -> bool:
    """Fill a few rows with values that lie in the file as they are, and return whether it is known that they do."""
    plain, start, stop = place.footer.plain, place.start, place.stop
    offsets = []
    for leaf, found in zip(leaves, pages, strict=True):
        if leaf.codec or found is None:
            return False
        at, _, before = found.span(start, stop)
        first = plain.get(at)
        if first is None or found.span(stop - 1, stop)[0] != at:
            return False
        offsets.append(first + (start - before) * leaf.dtype.itemsize)
    columns = []
    nbytes = len(out) * max([leaf.dtype.itemsize for leaf in leaves])
    held = scratch.room("pages", nbytes * len(leaves))
    address, at = held.ctypes.data, 0
    wanted = []
    for leaf, offset in zip(leaves, offsets, strict=True):
        data = held[at : at + len(out) * leaf.dtype.itemsize].data
        wanted.append((offset, data))
        column = Column(leaf, (0, 0), 0, 0, 0, 0)
        column.values, column.left = Values(data, address + at, is_plain=True), len(out)
        columns.append(column)
        at += nbytes
    place.fetch(wanted)
    Writer(columns, out, scratch, library).write(0, len(out))
    return True
