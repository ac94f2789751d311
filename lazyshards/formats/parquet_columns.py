"""Columns of a Parquet file while they are read: which bytes of each are here, its page, and its values as rows.

They are turned into rows while they are in the cache: by the C library of the package, or where that is missing by
NumPy.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lazyshards.formats.columns import Scratch, write_rows
from lazyshards.formats.parquet_pages import DATA, DATA_2, DICTIONARY, MOST_HEADER_NBYTES, PageHeader, parse_header
from lazyshards.formats.parquet_thrift import CutError
from lazyshards.formats.parquet_values import (
    MOST_PAGE_NBYTES,
    Dictionary,
    LargePageError,
    Leaf,
    OtherwiseError,
    Values,
    decode_dictionary,
    look_up,
    page_values,
)

__all__ = ["Column", "Writer"]

_HEADER_NBYTES = 256
"""Bytes that the header of a page seldom exceeds."""

_SPARE_NBYTES = 1 << 10
"""Bytes by which a page may be larger in the file than decompressed, besides a share of it."""


class Column:
    """One column while it is read: which bytes of it are here, and its page."""

    __slots__ = (
        "dictionary",
        "dictionary_span",
        "done",
        "end",
        "high",
        "leaf",
        "left",
        "low",
        "next_offset",
        "page_nbytes",
        "passed",
        "plain",
        "room",
        "room_address",
        "values",
        "wanted",
    )

    def __init__(
        self,
        leaf: Leaf,
        dictionary_span: tuple[int, int],
        offset: int,
        end: int,
        wanted: int,
        passed: int,
        page_nbytes: int = 0,
    ) -> None:
        self.leaf = leaf
        self.page_nbytes = page_nbytes
        """Bytes that a page may have once decompressed."""
        self.dictionary_span = dictionary_span
        """First byte of its dictionary in the file, and the byte after its last; empty if that is not known."""
        self.wanted = wanted
        """Bytes from ``next_offset`` on that are likely to be needed."""
        self.next_offset = offset
        """First byte in the file that is not here yet."""
        self.end = end
        """Byte of the file after the last."""
        self.passed = passed
        """Values before the wanted ones."""
        self.room = np.empty(0, np.uint8)
        """What is here lies from byte ``low`` to ``high`` of it."""
        self.room_address = 0
        self.low = self.high = 0
        self.dictionary: Dictionary | None = None
        self.values: Values | None = None
        """Of the page that is at hand."""
        self.plain: tuple[int, int] | None = None
        """First byte in the file of this page, and of its values, if these lie there as they are."""
        self.done = 0
        """Values of it that were used."""
        self.left = 0
        """Values of it that were not."""

    def use(self, room: npt.NDArray[np.uint8], address: int) -> None:
        """Keep what is read from now on in this memory, and what is here already as well."""
        held = self.high - self.low
        room[:held] = self.room[self.low : self.high]
        self.room, self.room_address, self.low, self.high = room, address, 0, held

    @property
    def dictionary_nbytes(self) -> int:
        """Bytes of its dictionary in the file, as far as it is known where it lies."""
        return self.dictionary_span[1] - self.dictionary_span[0]

    def more(self, nbytes: int) -> tuple[int, memoryview]:
        """Return what to read next, and where to: as much as there is room for, and at least ``nbytes`` in all."""
        held = self.high - self.low
        if nbytes > len(self.room):
            room = np.empty(nbytes, np.uint8)
            self.use(room, room.ctypes.data)
        elif self.low:
            self.use(self.room, self.room_address)
        offset, until = self.next_offset, min(len(self.room), held + self.end - self.next_offset)
        self.next_offset += until - held
        self.high = until
        return offset, self.room[held:until].data

    def missing(self, headers: dict[int, PageHeader] | None) -> int:
        """Go to the next page with wanted values; return 0, or how many bytes must be here for that.

        Parameters
        ----------
        headers : dict of int to PageHeader, optional
            Headers that were parsed before, by first byte in the file.
        """
        while True:
            held = self.high - self.low
            header = self._header(held, headers)
            if isinstance(header, int):
                return header
            size = header.own_nbytes + header.nbytes
            if size > min(MOST_PAGE_NBYTES, held + self.end - self.next_offset):
                raise OtherwiseError
            if header.kind != DICTIONARY and self._is_large(header):
                raise LargePageError
            is_passed = header.kind in (DATA, DATA_2) and header.values <= self.passed
            if size > held and (is_passed or header.kind not in (DATA, DATA_2, DICTIONARY)):
                self.next_offset += size - held  # without reading it
                size = held
            elif size > held:
                return size
            data = self.room.data[self.low + header.own_nbytes : self.low + size]
            address = self.room_address + self.low + header.own_nbytes
            self.low += size
            if is_passed:
                self.passed -= header.values
            elif header.kind == DICTIONARY:
                if self.dictionary is not None:
                    raise OtherwiseError
                self.dictionary = decode_dictionary(self.leaf, header, data)
            elif header.kind in (DATA, DATA_2):
                self._open(header, data, address)
                return 0

    def _is_large(self, header: PageHeader) -> bool:
        """Return whether a page is larger than was expected; what cannot be compressed has some bytes more."""
        most = self.page_nbytes
        return header.inflated_nbytes > most or header.nbytes > most + most // 4 + _SPARE_NBYTES

    def _header(self, held: int, headers: dict[int, PageHeader] | None) -> PageHeader | int:
        """Return the header of the page that comes next, or how many bytes must be here for that."""
        behind = self.end - self.next_offset
        if not held:
            if not behind:
                raise OtherwiseError
            return min(_HEADER_NBYTES, behind)
        header = headers.get(self.next_offset - held) if headers is not None else None
        if header is None:
            try:
                header = parse_header(self.room.data[self.low : self.high], 0, self.room_address + self.low)
            except CutError:
                if not behind or held >= MOST_HEADER_NBYTES:
                    raise
                return min(16 * max(held, _HEADER_NBYTES), held + behind)
            if headers is not None:
                headers[self.next_offset - held] = header
        return header

    def _open(self, header: PageHeader, data: memoryview, address: int) -> None:
        """Take the values of a page, whose header was just gone past."""
        self.values = values = page_values(self.leaf, header, data, address)
        self.plain = None
        if values.is_plain:
            if not self.leaf.codec and header.checksum is None:
                first = self.next_offset - (self.high - self.low) - header.nbytes
                self.plain = first - header.own_nbytes, first + values.address - address
        elif self.dictionary is None:
            raise OtherwiseError
        self.left = header.values - self.passed
        self.done, self.passed = self.passed, 0

    def take(self, count: int) -> npt.NDArray[np.generic]:
        """Return the next values of the page."""
        assert self.values is not None
        if self.values.is_plain:
            return np.frombuffer(self.values.data, self.leaf.dtype, count, self.done * self.leaf.dtype.itemsize)
        assert self.dictionary is not None
        return look_up(self.dictionary.values, self.values.data, self.done, self.done + count)

    def state(self) -> tuple[int, ...]:
        """Return what the C library is told: struct column, in parquet.c."""
        assert self.values is not None
        data, address, is_plain = self.values
        if is_plain:
            return address, len(data), 0, 0, 0, 0, 0, 0, self.done
        assert self.dictionary is not None
        return address, len(data), self.dictionary.address, len(self.dictionary.values), 1, 0, 0, 0, self.done


class Writer:
    """Writes the values that columns are at as rows: by the C library of the package if there is one."""

    def __init__(
        self,
        columns: Sequence[Column],
        out: npt.NDArray[np.generic],
        scratch: Scratch,
        library: ctypes.CDLL | None,
    ) -> None:
        self._columns = columns
        self._out = out
        self._scratch = scratch
        self._library = library
        self._states = np.zeros((len(columns), 9), np.int64)
        """What the library knows of each column: struct column, in parquet.c."""
        self._at: list[Values | None] = [None] * len(columns)
        self._address = out.ctypes.data

    def write(self, row: int, count: int) -> None:
        """Write the next values of each column, which its page has, from a row on."""
        out = self._out[row : row + count]
        if self._library is None:
            values = [column.take(count) for column in self._columns]
            write_rows(out, values, (), self._scratch, stacked=True)
            return
        for k, column in enumerate(self._columns):
            if column.values is not self._at[k]:
                self._at[k] = column.values
                self._states[k] = column.state()
        stride = out.strides[0]
        if self._library.lazyshards_columns(
            self._states.ctypes.data, len(self._columns), count, out.itemsize, self._address + row * stride, stride
        ):
            raise OtherwiseError
