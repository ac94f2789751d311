"""The codecs of Zarr: which are known here, how many bytes go into each, and how they are undone.

Every decoder knows how many bytes must come out before it starts, writes no more, and raises CodecError on anything
else. What HDF5 has as well is decoded by ``codecs``; the rest by numcodecs and Python's own modules.

Source: numcodecs' documents of its codecs, https://numcodecs.readthedocs.io.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lazyshards.formats.codecs import Bytes, CodecError, Filter, decode, inflater
from lazyshards.layout import native_dtype

__all__ = [
    "CHECKSUM_NBYTES",
    "FILTERS",
    "Codec",
    "Data",
    "RefusedError",
    "check_codecs",
    "crc32c",
    "drop_checksum",
    "find_codec",
    "stage_nbytes",
    "undo",
]

Data: TypeAlias = bytes | memoryview

CHECKSUM_NBYTES = 4
_CHECKSUMS = {"crc32c": "start", "crc32": "start", "adler32": "start", "fletcher32": "end"}
"""Codecs that add a checksum, and where numcodecs puts it."""
FILTERS = {"delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits"}
"""Codecs of numcodecs that change elements, not bytes."""
_COMPRESSORS = {"blosc", "zstd", "gzip", "zlib", "lz4", "bz2", "lzma"}
_HDF5_IDS = {"zlib": 1, "shuffle": 2, "fletcher32": 3, "blosc": 32001, "zstd": 32015}
"""Codecs that HDF5 has as well, whose decoders are shared."""
_GZIP_WINDOW = 31
"""What zlib takes for the window of a stream in gzip's own framing."""
_LZMA_NBYTES = 128 << 20
"""Bytes of working memory that a stream of lzma may ask for, whatever comes out: its highest preset takes 65 MiB."""


class RefusedError(Exception):
    """Metadata that cannot be read, and why."""


class Codec(NamedTuple):
    """One step that the bytes of a chunk went through when it was written."""

    name: str
    """Its name, as numcodecs has it."""
    config: str = "{}"
    """Its parameters, as JSON."""


def find_codec(name: Any, config: Mapping[str, Any], dtype: np.dtype[np.generic]) -> Codec:
    """Return a codec, if it is known here."""
    if name not in _CHECKSUMS.keys() | FILTERS | _COMPRESSORS | {"shuffle"}:
        raise RefusedError(f"its codec {name!r:.40} is not known here")
    config = dict(config)
    if name == "crc32c" and not config:
        config = {"location": "end"}  # as Zarr has it, where numcodecs has the start
    if name == "crc32c" and crc32c() is None:
        raise RefusedError("its codec 'crc32c' needs google-crc32c: pip install google-crc32c")
    if name in ("blosc", "zstd", "lz4") or name in FILTERS:
        _numcodecs()
    if name in FILTERS - {"bitround", "packbits"}:
        keys = ("encode_dtype", "decode_dtype") if name == "astype" else ("dtype", "astype")
        for key in keys:
            kind = config.get(key, None if key == "astype" else dtype.str)
            if kind is not None:
                native_dtype(kind)  # raises for Python objects
                config[key] = np.dtype(kind).str
    if name == "shuffle" and not 0 < int(config.get("elementsize", 4)) < 1 << 16:
        raise RefusedError(f"its codec 'shuffle' has elements of {config['elementsize']!r:.40} bytes")
    return Codec(name, json.dumps(config, sort_keys=True))


def check_codecs(codecs: Sequence[Codec], count: int, dtype: np.dtype[np.generic]) -> None:
    """Refuse codecs one after the other of which the size of what is in between cannot be known."""
    sizes = stage_nbytes(codecs, count, dtype.itemsize)
    for codec, nbytes in zip(codecs, sizes, strict=True):
        if nbytes is None and codec.name not in _CHECKSUMS:
            raise RefusedError(f"its codec {codec.name!r} comes after another compressor, so that sizes are not known")


@cache
def stage_nbytes(codecs: Sequence[Codec], count: int, itemsize: int) -> list[int | None]:
    """Return how many bytes of a chunk went into each codec; None where that depends on the data."""
    nbytes: int | None = count * itemsize
    found = []
    for name, config in codecs:
        found.append(nbytes)
        if name in _COMPRESSORS:
            nbytes = None
        elif nbytes is not None and name in _CHECKSUMS:
            nbytes += CHECKSUM_NBYTES
        elif name == "packbits":
            nbytes = 1 + -(-count // 8)
        elif name in FILTERS - {"bitround"}:
            options = json.loads(config)
            kind = options["encode_dtype"] if name == "astype" else options.get("astype", options["dtype"])
            nbytes = count * np.dtype(kind).itemsize
    return found


def undo(codecs: Sequence[Codec], sizes: Sequence[int | None], data: Data, out: Bytes) -> None:
    """Fill ``out`` with what went into the codecs, all of it, or raise CodecError."""
    for i in range(len(codecs) - 1, -1, -1):
        nbytes = sizes[i]
        if codecs[i].name in _CHECKSUMS:
            data = drop_checksum(codecs[i], memoryview(data))
            continue
        assert nbytes is not None
        target = np.empty(nbytes, np.uint8) if i else out
        _undo_one(codecs[i], memoryview(data), target)
        if not i:
            return
        data = target.data
    if len(data) != len(out):
        raise CodecError(f"it holds {len(data):,} bytes, expected {len(out):,}")
    out[...] = np.frombuffer(data, np.uint8)


def _undo_one(codec: Codec, data: memoryview, out: Bytes) -> None:
    name = codec.name
    if name in _HDF5_IDS:
        values = (int(json.loads(codec.config).get("elementsize", 4)),) if name == "shuffle" else ()
        decode((Filter(_HDF5_IDS[name], values),), 0, data, out)
    elif name in ("gzip", "bz2", "lzma"):
        _inflate(name, codec, data, out)
    elif name == "lz4":
        if int.from_bytes(data[:4], "little") != len(out):
            raise CodecError(f"lz4: the header does not promise the expected {len(out):,} bytes")
        _run(name, lambda: _numcodecs().lz4.decompress(data, out))
    else:
        config = json.loads(codec.config)
        found = _run(name, lambda: _numcodecs().get_codec({"id": name, **config}).decode(np.frombuffer(data, np.uint8)))
        values_out: Bytes = np.ascontiguousarray(found).reshape(-1).view(np.uint8)
        if len(values_out) != len(out):
            raise CodecError(f"{name}: {len(values_out):,} bytes come out, expected {len(out):,}")
        out[...] = values_out


def _run(name: str, function: Any) -> Any:
    try:
        return function()
    except Exception as exc:  # numcodecs raises anything
        raise CodecError(f"{name}: {exc}") from exc


def _inflate(name: str, codec: Codec, data: memoryview, out: Bytes) -> None:
    """Inflate one stream after the other until ``out`` is full; what would come after it is an error."""
    new_stream, error = _streams(name, codec, len(out))
    done = 0
    rest: Data = data
    try:
        while len(rest) and (done < len(out) or not done):
            stream = new_stream()
            # One byte more than there can be, so that the end of the stream is reached, and its checksum checked.
            found = stream.decompress(rest, len(out) - done + 1)
            if len(found) > len(out) - done:
                raise CodecError(f"{name}: more than the expected {len(out):,} bytes come out")
            if not stream.eof:
                raise CodecError(f"{name}: the stream ends early")
            out[done : done + len(found)] = np.frombuffer(found, np.uint8)
            done += len(found)
            rest = stream.unused_data
    except (error, EOFError, ValueError) as exc:
        raise CodecError(f"{name}: {exc}") from exc
    if done < len(out) or len(rest):
        raise CodecError(f"{name}: {done:,} bytes come out, expected {len(out):,}, and {len(rest):,} are left over")


def _streams(name: str, codec: Codec, nbytes: int) -> tuple[Callable[[], Any], type[Exception]]:
    """Return what makes a decompressor of one stream, and what it raises; ``nbytes`` will come out."""
    if name == "gzip":
        module = inflater()
        return lambda: module.decompressobj(_GZIP_WINDOW), module.error
    if name == "bz2":
        import bz2  # here, as nearly no store needs it

        return bz2.BZ2Decompressor, OSError
    import lzma

    kind = json.loads(codec.config).get("format", lzma.FORMAT_XZ)
    kind = kind if kind in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE) else lzma.FORMAT_AUTO
    # The stream says how large a dictionary to allocate.
    return lambda: lzma.LZMADecompressor(kind, memlimit=_LZMA_NBYTES + 2 * nbytes), lzma.LZMAError


def drop_checksum(codec: Codec, data: memoryview) -> memoryview:
    """Check and drop a checksum."""
    name, config = codec
    if name == "fletcher32":
        found = np.empty(max(0, len(data) - CHECKSUM_NBYTES), np.uint8)
        decode((Filter(_HDF5_IDS[name]),), 0, data, found)
        return found.data
    if len(data) < CHECKSUM_NBYTES:
        raise CodecError(f"{name}: the chunk is shorter than its checksum")
    if json.loads(config).get("location", _CHECKSUMS[name]) == "end":
        body, stored = data[:-CHECKSUM_NBYTES], data[-CHECKSUM_NBYTES:]
    else:
        stored, body = data[:CHECKSUM_NBYTES], data[CHECKSUM_NBYTES:]
    function = {"crc32c": crc32c(), "crc32": zlib.crc32, "adler32": zlib.adler32}[name]
    if function is None:
        raise CodecError("crc32c: google-crc32c is not installed")
    if function(np.frombuffer(body, np.uint8)) != int.from_bytes(stored, "little"):
        raise CodecError(f"{name}: the checksum is not that of the bytes")
    return body


@cache
def _numcodecs() -> Any:
    try:
        import numcodecs
    except ImportError as exc:
        raise RefusedError("its codecs need numcodecs: pip install 'lazyshards[zarr]'") from exc
    return numcodecs


@cache
def crc32c() -> Any:
    """Return a function, or None where no library for it is installed."""
    try:
        from numcodecs.checksum32 import crc32c_checksum
    except ImportError:
        return None
    return crc32c_checksum
