"""Values of a page of a Parquet column, decoded without the library: what most columns of numbers are.

That is no lists, no nulls, plain or by a dictionary. Everything else, and all that looks damaged, is left to the
library, which says what is wrong. Source: the format's specification, ``Encodings.md`` and ``parquet.thrift``.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.formats.columns import numpy_type
from lazyshards.formats.kept import Kept
from lazyshards.formats.parquet_footers import Footer, load_pyarrow
from lazyshards.formats.parquet_pages import PageHeader

__all__ = [
    "DICTIONARIES",
    "MOST_PAGE_NBYTES",
    "Dictionary",
    "LargePageError",
    "Leaf",
    "OtherwiseError",
    "Values",
    "decode_dictionary",
    "find_leaf",
    "look_up",
    "page_values",
]

_PHYSICAL = {"INT32": "<i4", "INT64": "<i8", "FLOAT": "<f4", "DOUBLE": "<f8"}
_CODECS = {"UNCOMPRESSED": "", "SNAPPY": "snappy", "GZIP": "gzip", "ZSTD": "zstd", "BROTLI": "brotli"}
_ENCODINGS = frozenset(("PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"))
"""Of values and of levels, as far as they are decoded here."""
_PLAIN, _PLAIN_DICTIONARY, _DICTIONARY = 0, 2, 8
MOST_PAGE_NBYTES = 16 << 20
"""Bytes of a page that is decoded here, in the file or not: writers make them of about one MiB."""


class Dictionary(NamedTuple):
    """The values that a column of one row group has."""

    values: npt.NDArray[np.generic]
    address: int
    """Of the first of them."""


DICTIONARIES: Kept[Dictionary] = Kept(64 << 20)
"""Decoded dictionaries, by path, stamp, row group and leaf."""


class Leaf(NamedTuple):
    """One column of one row group, as it is decoded here."""

    number: int
    """Of the leaf in the schema."""
    stored: np.dtype[np.generic]
    """Type in the pages."""
    dtype: np.dtype[np.generic]
    """Type of the values: of as many bytes."""
    codec: str
    """pyarrow's name of what its pages are compressed with; empty for nothing."""
    may_be_null: bool
    """Whether its pages say of each value whether it is there."""
    dictionary_nbytes: int
    """Bytes of its dictionary page as they lie in the file, before its other pages; 0 if the footer tells of none."""
    inflated_nbytes: int
    """Bytes of all its pages once decompressed."""
    inflation: float
    """How many times more bytes its pages have once decompressed."""


class Values(NamedTuple):
    """The values of a page without nulls."""

    data: memoryview
    """As they are encoded."""
    address: int
    """Of the first byte."""
    is_plain: bool
    """Whether they are the values themselves, or else places in the dictionary."""


class OtherwiseError(ValueError):
    """Nothing that is decoded here."""


class LargePageError(OtherwiseError):
    """A page that is larger than was expected."""


def find_leaf(footer: Footer, group: int, name: str, leaf_type: str) -> Leaf | None:
    """Return how a column of a row group is decoded here; None if it is not."""
    numbers = footer.schema.leaves[name]
    if len(numbers) != 1:
        return None
    described = footer.metadata.schema.column(numbers[0])
    if described.max_repetition_level or described.max_definition_level > 1:
        return None
    if footer.counts and footer.counts[group][numbers[0]].nulls:
        return None
    chunk = footer.metadata.row_group(group).column(numbers[0])
    stored, dtype, codec = _PHYSICAL.get(chunk.physical_type), numpy_type(leaf_type), _CODECS.get(chunk.compression)
    if stored is None or dtype is None or codec is None or dtype.kind not in "iuf":
        return None
    if not _ENCODINGS.issuperset(chunk.encodings):
        return None
    if np.dtype(stored).itemsize != dtype.itemsize or (np.dtype(stored).kind == "f") != (dtype.kind == "f"):
        return None
    dictionary_nbytes = 0
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        dictionary_nbytes = max(0, chunk.data_page_offset - chunk.dictionary_page_offset)
    return Leaf(
        numbers[0],
        np.dtype(stored),
        dtype,
        codec,
        described.max_definition_level > 0,
        dictionary_nbytes,
        chunk.total_uncompressed_size,
        chunk.total_uncompressed_size / max(1, chunk.total_compressed_size),
    )


def decode_dictionary(leaf: Leaf, header: PageHeader, data: memoryview) -> Dictionary:
    """Return the dictionary that a page holds, whose header came before ``data``."""
    if header.encoding not in (_PLAIN, _PLAIN_DICTIONARY):
        raise OtherwiseError
    body, _ = _body(leaf, header, data, 0)
    if len(body) != header.values * leaf.stored.itemsize or not len(body):
        raise OtherwiseError
    values = np.frombuffer(body, leaf.stored)
    if not leaf.codec:
        values = values.copy()  # the memory that it lies in is used again
    return Dictionary(values.view(leaf.dtype), values.ctypes.data)


def page_values(leaf: Leaf, header: PageHeader, data: memoryview, address: int) -> Values:
    """Return the values of a page whose header came before ``data``, which lies at an address."""
    if not header.is_full or header.encoding not in (_PLAIN, _PLAIN_DICTIONARY, _DICTIONARY):
        raise OtherwiseError
    is_plain = header.encoding == _PLAIN
    values, address = _body(leaf, header, data, address)
    if header.levels >= 0:
        _check_levels(leaf, header, data[: header.levels])
    elif leaf.may_be_null:
        nbytes = int.from_bytes(values[:4], "little")
        if nbytes > len(values) - 4:
            raise OtherwiseError
        _check_levels(leaf, header, values[4 : 4 + nbytes])
        values, address = values[4 + nbytes :], address + 4 + nbytes
    if len(values) < (header.values * leaf.stored.itemsize if is_plain else 1):
        raise OtherwiseError
    return Values(values, address, is_plain)


def _check_levels(leaf: Leaf, header: PageHeader, levels: memoryview) -> None:
    """See that all values of a page are there, as one run of ones says; there are other ways, which are rare."""
    if leaf.may_be_null:
        run, at = _varint(levels, 0)
        if run != header.values << 1 or at + 1 != len(levels) or levels[at] != 1:
            raise OtherwiseError


def _body(leaf: Leaf, header: PageHeader, data: memoryview, address: int) -> tuple[memoryview, int]:
    """Return what follows the header and the levels of a page, decompressed, and where it lies.

    Its checksum, if it has one, is compared.
    """
    levels = max(0, header.levels)
    inflated = header.inflated_nbytes - levels
    if header.nbytes > len(data) or levels > header.nbytes or not 0 <= inflated <= MOST_PAGE_NBYTES:
        raise OtherwiseError
    if header.checksum is not None and (zlib.crc32(data[: header.nbytes]) ^ header.checksum) & 0xFFFFFFFF:
        raise OtherwiseError
    coded = data[levels : header.nbytes]
    if not leaf.codec or header.is_raw:
        if len(coded) != inflated:
            raise OtherwiseError
        return coded, address + levels
    pa = load_pyarrow()
    if leaf.codec == "snappy":
        # It begins with the size, and without this the rest of a longer buffer would be anything.
        if _varint(coded, 0)[0] != inflated:
            raise OtherwiseError
        body: Any = pa.decompress(coded, inflated, "snappy")
    else:
        with pa.CompressedInputStream(pa.BufferReader(coded), leaf.codec) as stream:
            body = pa.py_buffer(stream.read(inflated + 1))
    if len(body) != inflated:
        raise OtherwiseError
    return memoryview(body).cast("B"), body.address  # Arrow's own are of signed bytes


def look_up(dictionary: npt.NDArray[np.generic], data: memoryview, start: int, stop: int) -> npt.NDArray[np.generic]:
    """Return values [start, stop) of a page that holds places in a dictionary, in runs, packed or of one value."""
    width = data[0]
    if width > 32:
        raise OtherwiseError
    bits = np.empty(stop - start, np.int64)
    same: list[tuple[int, int, int]] = []
    at, first = 1, 0
    low, high = len(data), 0
    while first < stop:
        run, at = _varint(data, at)
        if run < 2:
            raise OtherwiseError
        if run & 1:
            count, nbytes = (run >> 1) * 8, (run >> 1) * width
        else:
            count, nbytes = run >> 1, (width + 7) // 8
        a, b = max(start - first, 0), min(stop - first, count)
        if a < b:
            to = slice(first + a - start, first + b - start)
            if run & 1:
                bits[to] = np.arange(at * 8 + a * width, at * 8 + b * width, width) if width else at * 8
                low, high = min(low, at + (a * width >> 3)), at + (b * width >> 3) + 8
            else:
                same.append((to.start, to.stop, int.from_bytes(data[at : at + nbytes], "little")))
        at += nbytes
        first += count
        if at > len(data):
            raise OtherwiseError
    for a, b, _ in same:
        bits[a:b] = low * 8
    raw = np.zeros(max(8, high - low), np.uint8)
    shown = np.frombuffer(data[low:high], np.uint8)
    raw[: len(shown)] = shown
    words: npt.NDArray[np.uint64] = np.ndarray((len(raw) - 7,), "<u8", raw, strides=(1,))
    places = (words[(bits >> 3) - low] >> (bits & 7).view(np.uint64)) & np.uint64((1 << width) - 1)
    for a, b, place in same:
        places[a:b] = place
    found: npt.NDArray[np.generic] = dictionary[places.view(np.int64)]  # an index beyond it is an error
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return an unsigned number of up to 32 bits, and where it ends."""
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in (7, 14, 21, 28):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise OtherwiseError
