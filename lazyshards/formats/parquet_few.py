"""A few rows of a Parquet column, decoded from their pages without the library, so that dictionaries can be kept.

A dictionary page belongs to a whole row group, and the library decodes it for each slice anew, which then takes most of
the time. What is decoded here is what most columns of numbers are: no lists, no nulls, plain or by a dictionary.
Everything else, and all that looks damaged, is left to the library. Source: the format's specification,
``Encodings.md`` and ``parquet.thrift``.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.columns import numpy_type
from lazyshards.formats.kept import Kept
from lazyshards.formats.parquet_footers import Footer, load_pyarrow
from lazyshards.formats.parquet_pages import PageHeader, Pages, locate_pages
from lazyshards.formats.parquet_thrift import CutError, MalformedError, Struct, parse_struct
from lazyshards.layout import Shard
from lazyshards.storage.base import Part, Storage

__all__ = ["DICTIONARIES", "Leaf", "find_leaf", "read_few"]

_PHYSICAL = {"INT32": "<i4", "INT64": "<i8", "FLOAT": "<f4", "DOUBLE": "<f8"}
_CODECS = {"UNCOMPRESSED": "", "SNAPPY": "snappy", "GZIP": "gzip", "ZSTD": "zstd", "BROTLI": "brotli"}
_PLAIN, _PLAIN_DICTIONARY, _RLE, _DICTIONARY = 0, 2, 3, 8
_DATA, _DATA_2, _DICTIONARY_PAGE = 0, 3, 2
_MOST_PAGE_NBYTES = 16 << 20
"""Bytes of a page that is decoded here: writers make them of about one MiB."""

DICTIONARIES: Kept[npt.NDArray[np.generic]] = Kept(64 << 20)
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


class _OtherwiseError(ValueError):
    """Nothing that is decoded here."""


def find_leaf(footer: Footer, group: int, name: str, leaf_type: str) -> Leaf | None:
    """Return how a column of a row group is decoded here; None if it is not."""
    numbers = footer.schema.leaves[name]
    if len(numbers) != 1:
        return None
    described = footer.metadata.schema.column(numbers[0])
    if described.max_repetition_level or described.max_definition_level > 1:
        return None
    chunk = footer.metadata.row_group(group).column(numbers[0])
    stored, dtype, codec = _PHYSICAL.get(chunk.physical_type), numpy_type(leaf_type), _CODECS.get(chunk.compression)
    if stored is None or dtype is None or codec is None or dtype.kind not in "iuf":
        return None
    if np.dtype(stored).itemsize != dtype.itemsize or (np.dtype(stored).kind == "f") != (dtype.kind == "f"):
        return None
    return Leaf(numbers[0], np.dtype(stored), dtype, codec, described.max_definition_level > 0)


def read_few(
    shard: Shard,
    storage: Storage,
    footer: Footer,
    group: int,
    leaves: Sequence[Leaf],
    chunks: Sequence[tuple[int, int]],
    start: int,
    stop: int,
) -> list[npt.NDArray[np.generic]] | None:
    """Return rows [start, stop) of a row group, counted from its first, of each leaf; None if the library must.

    Parameters
    ----------
    shard : Shard
    storage : Storage
    footer : Footer
        What is learned of pages is kept in it.
    group : int
    leaves : sequence of Leaf
    chunks : sequence of (int, int)
        First byte of each leaf's column, and the byte after its last.
    start, stop : int
    """
    keys = [(group, leaf.number) for leaf in leaves]
    pages = locate_pages(shard.path, storage, chunks, [stop] * len(leaves), [footer.pages.get(key) for key in keys])
    if None in pages:
        return None
    found = [some for some in pages if some is not None]
    footer.pages.update(zip(keys, found, strict=True))
    try:
        dictionaries = _dictionaries(shard, storage, group, leaves, found)
        spans = [some.span(start, stop) for some in found]
        pieces = _fetch(shard, storage, [(at, until) for at, until, _ in spans])
        return [
            _rows(leaf, footer.headers, at, piece, start - before, stop - before, dictionary)
            for leaf, piece, (at, _, before), dictionary in zip(leaves, pieces, spans, dictionaries, strict=True)
        ]
    except ShardReadError:
        raise
    except (_OtherwiseError, CutError, MalformedError, load_pyarrow().lib.ArrowException, OSError, IndexError):
        return None  # what is wrong, if anything is, the library says


def _dictionaries(
    shard: Shard, storage: Storage, group: int, leaves: Sequence[Leaf], pages: Sequence[Pages]
) -> list[npt.NDArray[np.generic] | None]:
    """Return the dictionary of each leaf that has one, kept or read: all that are missing together."""
    keys = [(shard.path, shard.stamp, group, leaf.number) for leaf in leaves]
    found = [DICTIONARIES.get(key) for key in keys]
    missing = [i for i, some in enumerate(pages) if found[i] is None and some.dictionary[0] < some.dictionary[1]]
    for i, data in zip(missing, _fetch(shard, storage, [pages[i].dictionary for i in missing]), strict=True):
        header, at = parse_struct(data, 0)
        described, checksum = header.get(7), header.get(4)
        if header.get(1) != _DICTIONARY_PAGE or not isinstance(described, dict):
            raise _OtherwiseError
        if described.get(2) not in (_PLAIN, _PLAIN_DICTIONARY):
            raise _OtherwiseError
        page = PageHeader(at, _integer(header, 3), _integer(header, 2), checksum if isinstance(checksum, int) else None)
        body = _body(leaves[i], page, data[at:])
        values = np.frombuffer(body, leaves[i].stored)
        if len(values) != described.get(1):
            raise _OtherwiseError
        values = values.view(leaves[i].dtype)
        DICTIONARIES.put(keys[i], values, values.nbytes)
        found[i] = values
    return found


def _fetch(shard: Shard, storage: Storage, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Return the bytes of each span of a shard's file, if it is the one that was opened."""
    if not spans:
        return []
    ends = [0, *accumulate([stop - start for start, stop in spans])]
    room = np.empty(ends[-1], np.uint8).data
    pieces = [room[a:b] for a, b in pairwise(ends)]
    storage.fetch_into([Part(shard.path, shard.stamp, at, piece) for (at, _), piece in zip(spans, pieces, strict=True)])
    return pieces


def _rows(
    leaf: Leaf,
    headers: dict[int, PageHeader],
    offset: int,
    data: memoryview,
    start: int,
    stop: int,
    dictionary: npt.NDArray[np.generic] | None,
) -> npt.NDArray[np.generic]:
    """Return values [start, stop) of pages that follow each other from an offset on."""
    pieces = []
    at = first = 0
    while first < stop:
        header = headers.get(offset + at)
        if header is None:
            header = headers[offset + at] = _page_header(data, at)
        body = data[at + header.own_nbytes : at + header.own_nbytes + header.nbytes]
        at += header.own_nbytes + header.nbytes
        a, b = max(start - first, 0), min(stop - first, header.values)
        if a < b:
            values = _values(leaf, header, body)
            if header.encoding == _PLAIN:
                if len(values) < header.values * leaf.stored.itemsize:
                    raise _OtherwiseError
                pieces.append(np.frombuffer(values, leaf.dtype, b - a, a * leaf.stored.itemsize))
            elif dictionary is not None and header.encoding in (_PLAIN_DICTIONARY, _DICTIONARY):
                pieces.append(_look_up(dictionary, values, a, b))
            else:
                raise _OtherwiseError
        first += header.values
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _integer(struct: Struct, number: int) -> int:
    """Return a field that must be a natural number."""
    found = struct.get(number)
    if not isinstance(found, int) or found < 0:
        raise _OtherwiseError
    return found


def _page_header(data: memoryview, at: int) -> PageHeader:
    """Return the header of the page that begins at ``at``, a page of data."""
    header, end = parse_struct(data, at)
    kind = _integer(header, 1)
    described = header.get({_DATA: 5, _DATA_2: 8}.get(kind, 0))
    if not isinstance(described, dict):
        raise _OtherwiseError
    checksum = header.get(4)
    levels, is_raw = -1, False
    if kind == _DATA_2:
        if _integer(described, 2):  # nulls
            raise _OtherwiseError
        levels, is_raw = _integer(described, 5) + _integer(described, 6), described.get(7) == 0
    elif _integer(described, 3) != _RLE:
        raise _OtherwiseError
    return PageHeader(
        end - at,
        _integer(header, 3),
        _integer(header, 2),
        checksum if isinstance(checksum, int) else None,
        _integer(described, 1),
        _integer(described, 4 if kind == _DATA_2 else 2),
        levels,
        is_raw,
    )


def _values(leaf: Leaf, header: PageHeader, body: memoryview) -> memoryview:
    """Return the values of a page without nulls, as they are encoded."""
    if header.levels >= 0:
        return _body(leaf, header, body)
    values = _body(leaf, header, body)
    if leaf.may_be_null:
        nbytes = int.from_bytes(values[:4], "little")
        if nbytes > len(values) - 4:
            raise _OtherwiseError
        # All values are there if one run of ones says so; there are other ways, which are rare.
        run, at = _varint(values, 4)
        if run != header.values << 1 or at + 1 != 4 + nbytes or values[at] != 1:
            raise _OtherwiseError
        values = values[4 + nbytes :]
    return values


def _body(leaf: Leaf, header: PageHeader, data: memoryview) -> memoryview:
    """Return what follows the header and the levels of a page, decompressed, after its checksum, if it has one."""
    levels = max(0, header.levels)
    inflated = header.inflated_nbytes - levels
    if header.nbytes > len(data) or levels > header.nbytes or not 0 <= inflated <= _MOST_PAGE_NBYTES:
        raise _OtherwiseError
    if header.checksum is not None and (zlib.crc32(data[: header.nbytes]) ^ header.checksum) & 0xFFFFFFFF:
        raise _OtherwiseError
    coded = data[levels : header.nbytes]
    if not leaf.codec or header.is_raw:
        body: Any = coded
    elif leaf.codec == "snappy":
        # It begins with the size, and without this the rest of a longer buffer would be anything.
        if _varint(coded, 0)[0] != inflated:
            raise _OtherwiseError
        body = load_pyarrow().decompress(coded, inflated, "snappy")
    else:
        pa = load_pyarrow()
        with pa.CompressedInputStream(pa.BufferReader(coded), leaf.codec) as stream:
            body = stream.read(inflated + 1)
    if len(body) != inflated:
        raise _OtherwiseError
    return memoryview(body).cast("B")  # Arrow's own are of signed bytes


def _look_up(dictionary: npt.NDArray[np.generic], data: memoryview, start: int, stop: int) -> npt.NDArray[np.generic]:
    """Return values [start, stop) of a page that holds places in a dictionary, in runs, packed or of one value."""
    width = data[0]
    if width > 32:
        raise _OtherwiseError
    bits = np.empty(stop - start, np.int64)
    same: list[tuple[int, int, int]] = []
    at, first = 1, 0
    low, high = len(data), 0
    while first < stop:
        run, at = _varint(data, at)
        if run < 2:
            raise _OtherwiseError
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
            raise _OtherwiseError
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
    raise _OtherwiseError
