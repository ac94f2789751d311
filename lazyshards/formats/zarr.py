"""Zarr stores, versions 2 and 3: a directory of metadata and chunks, one store a shard.

The metadata is parsed and chunks are read and decoded here, each straight into place where it can go there, with
numcodecs' and zlib's decoders: that needs no event loop, opens a store in a tenth of zarr-python's time, tells a lost
chunk from an empty one, and never inflates more than a chunk holds. What is not known here is refused by its name.

Source: the Zarr specifications, https://zarr-specs.readthedocs.io, and numcodecs' own documents of its codecs.
"""

import base64
import bz2
import json
import lzma
import os
import struct
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from math import prod
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.errors import LazyShardsError, ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.codecs import CodecError, Filter, decode
from lazyshards.layout import Decoded, Shard, native_dtype
from lazyshards.selection import Cell, is_whole
from lazyshards.storage.base import Head, Part, Storage

__all__ = ["ZarrFormat"]

_HEAD_NBYTES = 64 << 10
"""Bytes of the first read of a metadata file: more than any without large attributes."""
_MOST_METADATA_NBYTES = 16 << 20
"""Bytes of the longest metadata that is parsed."""
_MOST_CHUNK_NBYTES = 1 << 32
"""Bytes of the largest chunk that is decoded."""
_MOST_EDGES = 4096
"""Chunk borders that are told to the planner at most."""
_MOST_AHEAD = 64
"""Chunks fetched together at most."""
_ABSENT = 0xFFFF_FFFF_FFFF_FFFF
"""What the index of a shard file has in place of the offset and the size of a chunk that it lacks."""
_CHECKSUM_NBYTES = 4

Bytes: TypeAlias = npt.NDArray[np.uint8]
Data: TypeAlias = bytes | memoryview


class _Refused(Exception):  # noqa: N818  # becomes a Fault
    """Metadata that cannot be read, and why."""


class _Codec(NamedTuple):
    """One step that the bytes of a chunk went through when it was written."""

    name: str
    """Its name, as numcodecs has it."""
    config: str = "{}"
    """Its parameters, as JSON."""


@dataclass(frozen=True, slots=True)
class _Array:
    """What is needed to read a store again."""

    folder: str
    """Path of the array: the store, or a part of it."""
    metadata: str
    """Name of its metadata file."""
    shape: tuple[int, ...]
    """Rows first."""
    chunks: tuple[int, ...]
    """Shape of what is decoded together."""
    files: tuple[int, ...]
    """Shape of what is in one shard file; empty if each chunk is a file."""
    prefix: str
    """What the name of a file begins with."""
    separator: str
    """What stands between the numbers in it."""
    order: tuple[int, ...]
    """Axes of a chunk in the order in which they are stored."""
    codecs: tuple[_Codec, ...]
    """What the bytes of a chunk went through, in that order."""
    fill: bytes | None
    """One element of what an absent chunk holds; None if an absent chunk is an error."""
    is_checked: bool = False
    """Whether the index of a shard file ends with its checksum."""
    is_index_first: bool = False
    """Whether the index stands at the beginning of a shard file."""

    def key(self, numbers: Sequence[int]) -> str:
        """Return the name of the file with these numbers."""
        return self.prefix + self.separator.join(map(str, numbers))


class ZarrFormat:
    """Zarr stores in directories, one array of each.

    Availability: with numcodecs, which ``lazyshards[zarr]`` brings. Options: ``array``, its path within the store,
    found alone if there is only one; ``missing_chunks``, ``"raise"`` or ``"fill"``: what a chunk that is not there is.
    """

    name = "zarr"
    suffixes = (".zarr",)
    magic: tuple[bytes, ...] = ()
    directories = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every store."""
        for option in options:
            if option not in {"array", "missing_chunks"}:
                raise TypeError(f"the zarr format takes no option {option!r}: it takes array and missing_chunks")
        name, missing = options.get("array"), options.get("missing_chunks", "raise")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"array={name!r} is not a name: expected a text")
        if missing not in ("raise", "fill"):
            raise ValueError(f'missing_chunks={missing!r} is not a policy: use "raise" or "fill"')
        folders = [_join(path, name.strip("/")) if name else path for path in paths]
        found: list[Shard | Fault] = []
        for path, folder, head in zip(paths, folders, _metadata(folders, storage), strict=True):
            try:
                found.append(_describe(path, folder, head, storage, fills=missing == "fill"))
            except _Refused as exc:
                found.append(Fault(path, str(exc)))
            except OSError as exc:
                found.append(Fault(path, f"cannot be read: {exc.strerror or exc}", exc))
        return found

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` chunk by chunk."""
        assert isinstance(shard.source, Decoded)
        array = shard.source.detail
        assert isinstance(array, _Array)
        is_local = storage.local_path(_join(array.folder, array.metadata)) is not None
        try:
            with _LocalFiles(storage) if is_local else _RemoteFiles(storage) as files:
                _Reading(shard, array, start, out, cell, files).run()
        finally:
            # The storage compares the stamps of all that it reads: one byte of the metadata, so that it does so here.
            storage.fetch_into([Part(_join(array.folder, array.metadata), shard.stamp, 0, memoryview(bytearray(1)))])


# Metadata ----------------------------------------------------------------------------------------------------------


def _join(folder: str, name: str) -> str:
    """Return the path of something in a directory, which may lie in an archive (``zip://a.zarr::file.zip``)."""
    link, separator, rest = folder.partition("::")
    return f"{link.rstrip('/')}/{name}{separator}{rest}"


class _Metadata(NamedTuple):
    """The metadata file of a node, with its name."""

    name: str
    head: Head


def _metadata(folders: Sequence[str], storage: Storage) -> list[_Metadata]:
    """Return the metadata of every folder: of version 3 if there is some, else of version 2, of an array or a group."""
    found: list[_Metadata | None] = [None] * len(folders)
    left = list(range(len(folders)))
    for name in ("zarr.json", ".zarray", ".zgroup"):
        heads = storage.heads([_join(folders[i], name) for i in left], _HEAD_NBYTES)
        again = []
        for i, head in zip(left, heads, strict=True):
            if isinstance(head.error, FileNotFoundError | NotADirectoryError):
                again.append(i)
                found[i] = found[i] or _Metadata(name, head)
            else:
                found[i] = _Metadata(name, head)
        left = again
    return [item for item in found if item is not None]


def _describe(path: str, folder: str, found: _Metadata, storage: Storage, *, fills: bool) -> Shard | Fault:
    """Return the shard that the metadata describes; of a group, that of its only array."""
    name, head = found
    if head.error is not None:
        return _absent(path, folder, head.error, storage)
    described = _parse(_join(folder, name), head, storage)
    if name == ".zgroup" or (name == "zarr.json" and described.get("node_type") == "group"):
        names = _arrays(folder, described, storage)
        if len(names) != 1:
            listed = ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
            inner = "" if folder == path else f" in {folder!r}"
            raise _Refused(
                f"is a group of {len(names):,} arrays{inner} ({listed}): say which with array="
                if names
                else f"is a group without arrays{inner}: say with array= which array below it"
            )
        (found,) = _metadata([_join(folder, names[0])], storage)
        return _describe(path, _join(folder, names[0]), found, storage, fills=fills)
    try:
        array, dtype = (_array_2 if name == ".zarray" else _array_3)(folder, described, fills=fills)
    except _Refused as exc:
        raise _Refused(f"holds a Zarr array that cannot be read: {exc}") from exc
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error, LazyShardsError) as exc:
        what = f"lacks {exc}" if isinstance(exc, KeyError) else f"makes no sense: {exc}"
        raise _Refused(f"has Zarr metadata ({name}) that {what}") from exc
    rows, step = array.shape[0], array.chunks[0]
    edges = tuple(range(0, rows, step)) if rows <= _MOST_EDGES * step else ()
    return Shard(path, rows, array.shape[1:], dtype, head.stamp, Decoded(array, edges))


def _absent(path: str, folder: str, error: OSError, storage: Storage) -> Fault:
    """Return the fault of a store whose metadata is not there."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return Fault(path, f"cannot be read: {error.strerror or error}", error)
    kind, _ = storage.find(path)
    if kind == "missing":
        return Fault(path, f"cannot be read: {error.strerror or error}", error)
    inner = "" if folder == path else f" at array={folder[len(path) :].strip('/')!r}"
    return Fault(path, f"holds no Zarr array{inner}: neither zarr.json nor .zarray is there")


def _parse(path: str, head: Head, storage: Storage) -> dict[str, Any]:
    data, size = head.data, head.stamp.size
    if size > _MOST_METADATA_NBYTES:
        raise _Refused(f"has metadata {path!r} of {size:,} bytes, expected at most {_MOST_METADATA_NBYTES:,}")
    if size > len(data):
        (data,) = storage.fetch([(path, 0, size)])
    try:
        described = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _Refused(f"has damaged metadata {path!r}: {exc}") from exc
    if not isinstance(described, dict):
        raise _Refused(f"has damaged metadata {path!r}: it is no JSON object")
    return described


def _arrays(folder: str, described: Mapping[str, Any], storage: Storage) -> list[str]:
    """Return the names of the arrays of a group."""
    consolidated = described.get("consolidated_metadata")
    if isinstance(consolidated, dict) and isinstance(consolidated.get("metadata"), dict):
        nodes = consolidated["metadata"].items()
        return sorted(name for name, node in nodes if isinstance(node, dict) and node.get("node_type") == "array")
    _, entries = storage.find(folder)
    names = sorted(
        entry.path.partition("::")[0].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.is_directory
    )
    found = []
    for name, (kind, head) in zip(names, _metadata([_join(folder, name) for name in names], storage), strict=True):
        if head.error is None and (kind == ".zarray" or (kind == "zarr.json" and b'"array"' in head.data)):
            found.append(name)
    return found


def _sizes(values: object, what: str, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int and least <= n < 1 << 62 for n in values):
        raise _Refused(f"its {what} is {values!r:.80}, expected a list of integers, {least} or more")
    return tuple(values)


def _check_shapes(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    if not shape:
        raise _Refused("it has no axes (a single value), expected a row axis")
    if len(chunks) != len(shape):
        raise _Refused(f"its chunks of shape {chunks} have other axes than the array of shape {shape}")
    if prod(chunks) * dtype.itemsize > _MOST_CHUNK_NBYTES:
        raise _Refused(
            f"its chunks have {prod(chunks) * dtype.itemsize:,} bytes each, expected at most {_MOST_CHUNK_NBYTES:,}"
        )


# Version 2 ---------------------------------------------------------------------------------------------------------


def _array_2(folder: str, described: Mapping[str, Any], *, fills: bool) -> tuple[_Array, np.dtype[np.generic]]:
    if described["zarr_format"] != 2:
        raise _Refused(f"it is of version {described['zarr_format']!r}, expected 2")
    shape, chunks = _sizes(described["shape"], "shape", 0), _sizes(described["chunks"], "chunks", 1)
    dtype = _dtype_2(described["dtype"])
    _check_shapes(shape, chunks, dtype)
    separator = described.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise _Refused(f"its dimension_separator is {separator!r}")
    if described["order"] not in ("C", "F"):
        raise _Refused(f"its order is {described['order']!r}")
    axes = tuple(range(len(shape)))
    steps = [*(described.get("filters") or ()), *([described["compressor"]] if described["compressor"] else [])]
    codecs = tuple([_codec(step["id"], {key: step[key] for key in step if key != "id"}, dtype) for step in steps])
    _check_codecs(codecs, prod(chunks), dtype)
    fill = _fill_2(described.get("fill_value"), dtype) if fills else None
    order = axes if described["order"] == "C" else axes[::-1]
    return _Array(folder, ".zarray", shape, chunks, (), "", separator, order, codecs, fill), dtype


def _dtype_2(text: object) -> np.dtype[np.generic]:
    def fields(items: Any) -> Any:
        if isinstance(items, str):
            return items
        return [(name, fields(kind), *map(tuple, shape)) for name, kind, *shape in items]

    dtype: np.dtype[np.generic] = np.dtype(fields(text))
    native_dtype(dtype)
    return dtype


def _fill_2(value: Any, dtype: np.dtype[np.generic]) -> bytes:
    if value is None:
        raise _Refused('its fill_value is null, so that missing_chunks="fill" has nothing to fill with')
    if dtype.kind in "SV" and isinstance(value, str):
        return base64.b64decode(value).ljust(dtype.itemsize, b"\0")[: dtype.itemsize]
    if dtype.kind == "c" and isinstance(value, list):
        value = complex(*map(float, value))
    if dtype.kind in "mM":
        return np.array(value if value != "NaT" else np.iinfo("i8").min, "i8").astype(dtype.str[0] + "i8").tobytes()
    return np.array(value, dtype).tobytes()


# Version 3 ---------------------------------------------------------------------------------------------------------

_PLAIN = {
    "bool": "?",
    **{f"{kind}{bits}": f"{kind[0]}{bits // 8}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)},
    "complex64": "c8",
    "complex128": "c16",
}
del _PLAIN["float8"]


def _array_3(folder: str, described: Mapping[str, Any], *, fills: bool) -> tuple[_Array, np.dtype[np.generic]]:
    if described["zarr_format"] != 3 or described["node_type"] != "array":
        raise _Refused(f"it is a {described['node_type']!r:.40} of version {described['zarr_format']!r:.40}")
    for name in described.keys() - _KNOWN:
        item = described[name]
        if not (isinstance(item, dict) and item.get("must_understand") is False):
            raise _Refused(f"it has {name!r}, which must be understood and is not")
    if described.get("storage_transformers"):
        raise _Refused("it has storage_transformers")
    shape = _sizes(described["shape"], "shape", 0)
    dtype = _dtype_3(described["data_type"])
    grid, config = _named(described["chunk_grid"])
    if grid != "regular":
        raise _Refused(f"its chunk grid is {grid!r}, expected 'regular'")
    chunks = _sizes(config["chunk_shape"], "chunk_shape", 1)
    files: tuple[int, ...] = ()
    encoding, config = _named(described["chunk_key_encoding"])
    if encoding not in ("default", "v2"):
        raise _Refused(f"its chunk_key_encoding is {encoding!r}, expected 'default' or 'v2'")
    separator = config.get("separator", "/" if encoding == "default" else ".")
    if separator not in (".", "/"):
        raise _Refused(f"its separator is {separator!r}")
    prefix = f"c{separator}" if encoding == "default" else ""
    codecs: Any = described["codecs"]
    is_checked = is_index_first = False
    if [_named(codec)[0] for codec in codecs] == ["sharding_indexed"]:
        _, config = _named(codecs[0])
        files, chunks, codecs = chunks, _sizes(config["chunk_shape"], "chunk_shape", 1), config["codecs"]
        if len(chunks) != len(files) or any(size % part for size, part in zip(files, chunks, strict=True)):
            raise _Refused(f"its shards of shape {files} are no multiple of its chunks of shape {chunks}")
        is_checked = _is_index_checked(config.get("index_codecs", _INDEX_CODECS))
        location = config.get("index_location", "end")
        if location not in ("start", "end"):
            raise _Refused(f"its index_location is {location!r}")
        is_index_first = location == "start"
    _check_shapes(shape, chunks, dtype)
    order, steps, endian = _pipeline(codecs, len(shape), dtype)
    dtype = dtype.newbyteorder(">" if endian == ">" else "<")
    _check_codecs(steps, prod(chunks), dtype)
    fill = _fill_3(described["fill_value"], dtype) if fills else None
    array = _Array(
        folder, "zarr.json", shape, chunks, files, prefix, separator, order, steps, fill, is_checked, is_index_first
    )
    return array, dtype


_KNOWN = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "dimension_names",
    "storage_transformers",
    "consolidated_metadata",
}
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def _named(item: Any) -> tuple[str, Mapping[str, Any]]:
    """Return name and configuration of a part of the metadata, which may be a name alone."""
    if isinstance(item, str):
        return item, {}
    config = item.get("configuration") or {}
    if not isinstance(item["name"], str) or not isinstance(config, dict):
        raise _Refused(f"it has the extension {item!r:.80}")
    return item["name"], config


def _dtype_3(item: Any) -> np.dtype[np.generic]:
    name, config = _named(item)
    if name in _PLAIN:
        return np.dtype(_PLAIN[name])
    if name in ("numpy.datetime64", "numpy.timedelta64"):
        unit, scale = config["unit"], config.get("scale_factor", 1)
        kind = "M8" if name == "numpy.datetime64" else "m8"
        return np.dtype(kind if unit == "generic" else f"{kind}[{int(scale)}{unit}]")
    if name == "fixed_length_utf32" and config["length_bytes"] % 4 == 0:
        return native_dtype(f"U{config['length_bytes'] // 4}")
    if name == "null_terminated_bytes":
        return native_dtype(f"S{int(config['length_bytes'])}")
    raise _Refused(f"its data_type is {name!r}, expected one of {', '.join(_PLAIN)}")


def _is_index_checked(codecs: Any) -> bool:
    names = [_named(codec)[0] for codec in codecs]
    endian = _named(codecs[0])[1].get("endian", "little") if names else ""
    if names not in (["bytes"], ["bytes", "crc32c"]) or endian != "little":
        raise _Refused(f"the index of its shards is encoded by {', '.join(names)}, expected bytes and crc32c")
    if len(names) == 2 and _crc32c() is None:
        raise _Refused("the index of its shards has a checksum, which needs google-crc32c: pip install google-crc32c")
    return len(names) == 2


def _pipeline(codecs: Any, ndim: int, dtype: np.dtype[np.generic]) -> tuple[tuple[int, ...], tuple[_Codec, ...], str]:
    """Return the order in which axes are stored, the codecs of bytes, and the byte order."""
    order = list(range(ndim))
    before: list[_Codec] = []
    after: list[_Codec] = []
    endian = ""
    for codec in codecs:
        name, config = _named(codec)
        if name == "transpose" and not endian and not before:
            permutation = config["order"]
            if not isinstance(permutation, list) or sorted(permutation) != list(range(ndim)):
                raise _Refused(f"its axes are transposed by {permutation!r:.80}")
            order = [order[axis] for axis in permutation]
        elif name == "bytes" and not endian:
            endian = {"little": "<", "big": ">"}[config.get("endian", "little")]
        else:
            found = _codec(name.removeprefix("numcodecs."), config, dtype)
            if (found.name in _FILTERS) == bool(endian):
                raise _Refused(f"its codec {name!r} stands where it cannot be")
            (after if endian else before).append(found)
    if not endian:
        raise _Refused(f"its codecs do not make bytes: {[_named(codec)[0] for codec in codecs]}")
    if before and endian == ">":
        raise _Refused(f"its codec {before[0].name!r} comes before big-endian bytes")
    return tuple(order), (*before, *after), endian


def _fill_3(value: Any, dtype: np.dtype[np.generic]) -> bytes:
    def number(item: Any, kind: np.dtype[np.generic]) -> bytes:
        if isinstance(item, str) and item.startswith("0x"):
            data = bytes.fromhex(item[2:])
            return data if kind.byteorder == ">" else data[::-1]
        return np.array(float(item) if isinstance(item, str) else item, kind).tobytes()

    if dtype.kind == "c":
        half = np.dtype(f"{dtype.str[0]}f{dtype.itemsize // 2}")
        return number(value[0], half) + number(value[1], half)
    if dtype.kind in "mM":
        return np.array(np.iinfo("i8").min if value == "NaT" else value, dtype.str[0] + "i8").tobytes()
    if dtype.kind == "S":
        return base64.b64decode(value).ljust(dtype.itemsize, b"\0")[: dtype.itemsize]
    return np.array(value, dtype).tobytes() if dtype.kind == "U" else number(value, dtype)


# Codecs ------------------------------------------------------------------------------------------------------------

_CHECKSUMS = {"crc32c": "start", "crc32": "start", "adler32": "start", "fletcher32": "end"}
"""Codecs that add a checksum, and where numcodecs puts it."""
_FILTERS = {"delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits"}
"""Codecs of numcodecs that change elements, not bytes."""
_COMPRESSORS = {"blosc", "zstd", "gzip", "zlib", "lz4", "bz2", "lzma"}
_HDF5_IDS = {"zlib": 1, "shuffle": 2, "fletcher32": 3, "blosc": 32001, "zstd": 32015}
"""Codecs that HDF5 has as well, whose decoders are shared."""


def _codec(name: Any, config: Mapping[str, Any], dtype: np.dtype[np.generic]) -> _Codec:
    """Return a codec, if it is known here."""
    if name not in _CHECKSUMS.keys() | _FILTERS | _COMPRESSORS | {"shuffle"}:
        raise _Refused(f"its codec {name!r:.40} is not known here")
    config = dict(config)
    if name == "crc32c" and not config:
        config = {"location": "end"}  # as Zarr has it, where numcodecs has the start
    if name == "crc32c" and _crc32c() is None:
        raise _Refused("its codec 'crc32c' needs google-crc32c: pip install google-crc32c")
    if name in ("blosc", "zstd", "lz4") or name in _FILTERS:
        _numcodecs()
    if name in _FILTERS - {"bitround", "packbits"}:
        keys = ("encode_dtype", "decode_dtype") if name == "astype" else ("dtype", "astype")
        for key in keys:
            kind = config.get(key, None if key == "astype" else dtype.str)
            if kind is not None:
                native_dtype(kind)  # raises for Python objects
                config[key] = np.dtype(kind).str
    if name == "shuffle" and not 0 < int(config.get("elementsize", 4)) < 1 << 16:
        raise _Refused(f"its codec 'shuffle' has elements of {config['elementsize']!r:.40} bytes")
    return _Codec(name, json.dumps(config, sort_keys=True))


def _check_codecs(codecs: Sequence[_Codec], count: int, dtype: np.dtype[np.generic]) -> None:
    """Refuse codecs one after the other of which the size of what is in between cannot be known."""
    sizes = _stage_sizes(codecs, count, dtype.itemsize)
    for codec, nbytes in zip(codecs, sizes, strict=True):
        if nbytes is None and codec.name not in _CHECKSUMS:
            raise _Refused(f"its codec {codec.name!r} comes after another compressor, so that sizes are not known")


@cache
def _stage_sizes(codecs: Sequence[_Codec], count: int, itemsize: int) -> list[int | None]:
    """Return how many bytes of a chunk went into each codec; None where that depends on the data."""
    nbytes: int | None = count * itemsize
    found = []
    for name, config in codecs:
        found.append(nbytes)
        if name in _COMPRESSORS:
            nbytes = None
        elif nbytes is not None and name in _CHECKSUMS:
            nbytes += _CHECKSUM_NBYTES
        elif name == "packbits":
            nbytes = 1 + -(-count // 8)
        elif name in _FILTERS - {"bitround"}:
            options = json.loads(config)
            kind = options["encode_dtype"] if name == "astype" else options.get("astype", options["dtype"])
            nbytes = count * np.dtype(kind).itemsize
    return found


def _undo(codecs: Sequence[_Codec], sizes: Sequence[int | None], data: Data, out: Bytes) -> None:
    """Fill ``out`` with what went into the codecs, all of it, or raise CodecError."""
    for i in range(len(codecs) - 1, -1, -1):
        nbytes = sizes[i]
        if codecs[i].name in _CHECKSUMS:
            data = _checked(codecs[i], memoryview(data))
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


def _undo_one(codec: _Codec, data: memoryview, out: Bytes) -> None:
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


def _inflate(name: str, codec: _Codec, data: memoryview, out: Bytes) -> None:
    """Inflate one stream after the other until ``out`` is full; what would come after it is an error."""
    done = 0
    rest: Data = data
    try:
        while len(rest) and (done < len(out) or not done):
            stream = _stream(name, codec)
            # One byte more than there can be, so that the end of the stream is reached, and its checksum checked.
            found = stream.decompress(rest, len(out) - done + 1)
            if len(found) > len(out) - done:
                raise CodecError(f"{name}: more than the expected {len(out):,} bytes come out")
            if not stream.eof:
                raise CodecError(f"{name}: the stream ends early")
            out[done : done + len(found)] = np.frombuffer(found, np.uint8)
            done += len(found)
            rest = stream.unused_data
    except (zlib.error, OSError, EOFError, ValueError, lzma.LZMAError) as exc:
        raise CodecError(f"{name}: {exc}") from exc
    if done < len(out) or len(rest):
        raise CodecError(f"{name}: {done:,} bytes come out, expected {len(out):,}, and {len(rest):,} are left over")


def _stream(name: str, codec: _Codec) -> Any:
    if name == "gzip":
        return zlib.decompressobj(31)
    if name == "bz2":
        return bz2.BZ2Decompressor()
    config = json.loads(codec.config)
    return lzma.LZMADecompressor(config.get("format", 1) if config.get("format", 1) in (1, 2) else 0)


def _checked(codec: _Codec, data: memoryview) -> memoryview:
    """Check and drop a checksum."""
    name, config = codec
    if name == "fletcher32":
        found = np.empty(max(0, len(data) - _CHECKSUM_NBYTES), np.uint8)
        decode((Filter(_HDF5_IDS[name]),), 0, data, found)
        return found.data
    if len(data) < _CHECKSUM_NBYTES:
        raise CodecError(f"{name}: the chunk is shorter than its checksum")
    if json.loads(config).get("location", _CHECKSUMS[name]) == "end":
        body, stored = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
    else:
        stored, body = data[:_CHECKSUM_NBYTES], data[_CHECKSUM_NBYTES:]
    function = {"crc32c": _crc32c(), "crc32": zlib.crc32, "adler32": zlib.adler32}[name]
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
        raise _Refused("its codecs need numcodecs: pip install 'lazyshards[zarr]'") from exc
    return numcodecs


@cache
def _crc32c() -> Any:
    """Return a function, or None where no library for it is installed."""
    try:
        from numcodecs.checksum32 import crc32c_checksum
    except ImportError:
        return None
    return crc32c_checksum


# Files -------------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a chunk lies."""

    path: str
    """The file."""
    offset: int = 0
    """First byte."""
    nbytes: int | None = None
    """Bytes; None for all of the file."""


class _LocalFiles:
    """Files of this machine, one after the other, by positional reads into one buffer."""

    ahead = 1

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._path = ""
        self._fd = -1
        self._size = 0
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, ""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, or None if it is not there."""
        if path != self._path:
            self._close()
            try:
                self._fd = os.open(self._storage.local_path(path) or path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            self._path = path
            self._size = os.fstat(self._fd).st_size
        return self._size

    def stamp(self) -> tuple[int, ...]:
        """Return what tells the file whose size was asked for from what it was before."""
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ino

    def read_into(self, place: _Place, out: memoryview) -> bool:
        """Fill ``out`` from a place; return False if the file ends first."""
        if self.size(place.path) is None:
            return False
        done = 0
        while done < len(out):
            count = os.preadv(self._fd, [out[done : done + (1 << 30)]], place.offset + done)
            if not count:
                return False
            done += count
        return True

    def fetch(self, places: Sequence[_Place], most: int) -> list[Data | None]:
        """Return what lies at the one place; None if the file is not there; valid until the next is fetched."""
        (place,) = places
        size = self.size(place.path)
        if size is None:
            return [None]
        count = min(size if place.nbytes is None else place.nbytes, most)
        if len(self._buffer) < count:
            self._buffer = bytearray(count + count // 4)
        view = memoryview(self._buffer)[:count]
        return [view if self.read_into(place, view) else view[:0]]


class _RemoteFiles:
    """Files elsewhere, several at a time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.ahead = _MOST_AHEAD

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, or None if it is not there."""
        (head,) = self._storage.heads([path], 1)
        if head.error is None:
            return head.stamp.size
        if isinstance(head.error, FileNotFoundError):
            return None
        raise head.error

    def fetch(self, places: Sequence[_Place], most: int) -> list[Data | None]:
        """Return what lies at each place; None where the file is not there."""
        if all(place.nbytes is not None for place in places):
            return list(self._storage.fetch([(path, offset, nbytes or 0) for path, offset, nbytes in places]))
        found: list[Data | None] = []
        for head in self._storage.heads([place.path for place in places], most):
            if head.error is not None and not isinstance(head.error, FileNotFoundError):
                raise head.error
            found.append(None if head.error is not None else head.data)
        return found


# Reading -----------------------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """What one chunk holds of one axis."""

    number: int
    """Of the chunk, along the axis."""
    within: slice | int
    """Positions in the chunk."""
    target: slice | None
    """Positions in the result; None where the axis is dropped."""


def _spans(axis: range | int, size: int) -> list[_Span]:
    """Return what chunks of ``size`` hold of the positions wanted of an axis."""
    if isinstance(axis, int):
        return [_Span(axis // size, axis % size, None)]
    ascending = axis if axis.step > 0 else axis[::-1]
    step, count = ascending.step, len(ascending)
    if step <= size:
        numbers: Sequence[int] = range(ascending[0] // size, ascending[-1] // size + 1)
    else:
        numbers = sorted({position // size for position in ascending})
    found = []
    for number in numbers:
        a, b = bisect_left(ascending, number * size), bisect_left(ascending, (number + 1) * size)
        if a < b:
            first = ascending[a] - number * size
            within = slice(first, ascending[b - 1] - number * size + 1, step)
            stop = count - 1 - b
            target = slice(a, b) if axis.step > 0 else slice(count - 1 - a, stop if stop >= 0 else None, -1)
            found.append(_Span(number, within, target))
    return found


class _Reading:
    """One call of ``read_into``: which chunks it needs, and where they go."""

    def __init__(
        self,
        shard: Shard,
        array: _Array,
        start: int,
        out: npt.NDArray[np.generic],
        cell: Cell,
        files: _LocalFiles | _RemoteFiles,
    ) -> None:
        self._shard = shard
        self._array = array
        self._out = out
        self._files = files
        self._spans = [
            _spans(axis, size) for axis, size in zip((range(start, start + len(out)), *cell), array.chunks, strict=True)
        ]
        itemsize = shard.dtype.itemsize
        self._nbytes = prod(array.chunks) * itemsize
        self._sizes = _stage_sizes(array.codecs, prod(array.chunks), itemsize)
        self._most = self._nbytes + self._nbytes // 4 + (1 << 16)
        """Bytes that a chunk may take when it is stored: no codec makes it longer than that."""
        plain = array.order == tuple(range(len(array.order))) and shard.dtype == out.dtype
        # Chunks of whole rows, as they are wanted, are decoded straight into place.
        self._straight = plain and array.chunks[1:] == shard.row_shape and is_whole(cell, shard.row_shape)
        self._scratch: Bytes | None = None
        self._indices: dict[str, npt.NDArray[np.uint64] | None] = {}

    def run(self) -> None:
        """Fill all of ``out``."""
        files = self._files
        ahead = max(1, min(files.ahead, (32 << 20) // max(1, self._nbytes)))
        wanted: Iterator[tuple[_Span, ...]] = product(*self._spans)
        while window := list(islice(wanted, ahead)):
            if ahead == 1 and isinstance(files, _LocalFiles) and not self._array.codecs and self._straight:
                self._copy(window[0], files)
                continue
            places = [self._place([span.number for span in spans]) for spans in window]
            there = [place for place in places if place is not None]
            try:
                fetched = iter(files.fetch(there, self._most + 1) if there else [])
            except OSError as exc:
                raise self._error(exc) from exc
            for spans, place in zip(window, places, strict=True):
                self._put(spans, None if place is None else next(fetched))

    def _error(self, exc: OSError) -> OSError:
        if isinstance(exc, ShardReadError):
            return exc
        return ShardReadError(f"{self._shard.path!r} cannot be read: {exc.strerror or exc}")

    def _place(self, numbers: Sequence[int]) -> _Place | None:
        """Return where a chunk lies, or None if it is known not to be there."""
        array = self._array
        if not array.files:
            return _Place(_join(array.folder, array.key(numbers)))
        inner = [size // part for size, part in zip(array.files, array.chunks, strict=True)]
        path = _join(array.folder, array.key([n // count for n, count in zip(numbers, inner, strict=True)]))
        if path not in self._indices:
            try:
                self._indices[path] = self._index(path, inner)
            except OSError as exc:
                raise self._error(exc) from exc
        index = self._indices[path]
        if index is None:
            return None
        offset, nbytes = map(int, index[tuple([n % count for n, count in zip(numbers, inner, strict=True)])])
        return None if offset == nbytes == _ABSENT else _Place(path, offset, nbytes)

    def _index(self, path: str, inner: Sequence[int]) -> npt.NDArray[np.uint64] | None:
        """Return first byte and size of each chunk of a shard file, checked; None if the file is not there."""
        size = self._files.size(path)
        if size is None:
            return None
        array, files = self._array, self._files
        key = (path, *files.stamp()) if isinstance(files, _LocalFiles) else None
        if key is not None and (known := _known_index(key)) is not None:
            return known
        nbytes = 16 * prod(inner) + (_CHECKSUM_NBYTES if array.is_checked else 0)
        if size < nbytes:
            raise self._damaged(path, f"it holds {size:,} bytes, its index alone has {nbytes:,}")
        (data,) = files.fetch([_Place(path, 0 if array.is_index_first else size - nbytes, nbytes)], nbytes)
        assert data is not None
        if len(data) < nbytes:
            raise self._damaged(path, "it ends within its index")
        try:
            body = _checked(_Codec("crc32c", '{"location": "end"}'), memoryview(data)) if array.is_checked else data
        except CodecError as exc:
            raise self._damaged(path, f"its index is wrong: {exc}") from exc
        index = np.frombuffer(bytes(body), "<u8").astype(np.uint64).reshape(*inner, 2)
        offsets, sizes = index[..., 0], index[..., 1]
        absent = (offsets == _ABSENT) & (sizes == _ABSENT)
        if bool((~absent & ((offsets > size) | (sizes > size) | (offsets + sizes > size))).any()):
            raise self._damaged(path, f"its index has chunks beyond its {size:,} bytes")
        if key is not None:
            _keep_index(key, index)
        return index

    def _damaged(self, path: str, what: str) -> ShardReadError:
        return ShardReadError(f"{self._shard.path!r} is damaged: {path!r}: {what}")

    def _target(self, spans: Sequence[_Span]) -> tuple[slice, ...]:
        return tuple([span.target for span in spans if span.target is not None])

    def _copy(self, spans: Sequence[_Span], files: _LocalFiles) -> None:
        """Read rows that are stored as they are wanted, and only those."""
        numbers = [span.number for span in spans]
        place = self._place(numbers)
        size = None if place is None else files.size(place.path)
        if place is None or size is None:
            self._put(spans, None)
            return
        stored = size if place.nbytes is None else place.nbytes
        if stored != self._nbytes:
            raise ShardReadError(
                f"{self._shard.path!r} is damaged: its chunk {numbers}: it holds {stored:,} bytes, expected "
                f"{self._nbytes:,}"
            )
        rows = spans[0].within
        assert isinstance(rows, slice)
        row_nbytes = self._nbytes // self._array.chunks[0]
        out = self._out[self._target(spans)].reshape(-1).view(np.uint8).data
        try:
            is_whole_chunk = files.read_into(_Place(place.path, place.offset + rows.start * row_nbytes), out)
        except OSError as exc:
            raise self._error(exc) from exc
        if not is_whole_chunk:
            raise self._damaged(place.path, "it ended while it was read")

    def _put(self, spans: Sequence[_Span], data: Data | None) -> None:
        """Decode a chunk and put what is wanted of it in place."""
        array = self._array
        index: tuple[Any, ...] = (*self._target(spans), ...)
        target = self._out[index]
        numbers = [span.number for span in spans]
        if data is None:
            if array.fill is None:
                raise ShardReadError(
                    f"{self._shard.path!r} lacks its chunk {numbers}: one that holds nothing but the fill value may be "
                    'left out, and cannot be told from one that was lost; pass missing_chunks="fill" if none was lost'
                )
            target[...] = np.frombuffer(array.fill, self._shard.dtype)[0]
            return
        rows = spans[0].within
        assert isinstance(rows, slice)
        is_whole_chunk = rows.stop - rows.start == array.chunks[0]
        try:
            if len(data) > self._most:
                raise CodecError(f"it takes more than {self._most:,} bytes, for the {self._nbytes:,} that it holds")
            if self._straight and is_whole_chunk:
                _undo(array.codecs, self._sizes, data, target.reshape(-1).view(np.uint8))
                return
            if self._scratch is None:
                self._scratch = np.empty(self._nbytes, np.uint8)
            _undo(array.codecs, self._sizes, data, self._scratch)
        except CodecError as exc:
            raise ShardReadError(f"{self._shard.path!r} is damaged: its chunk {numbers}: {exc}") from exc
        stored = self._scratch.view(self._shard.dtype).reshape([array.chunks[axis] for axis in array.order])
        chunk = stored.transpose(np.argsort(array.order))
        target[...] = chunk[tuple([span.within for span in spans])]


_indices: OrderedDict[tuple[object, ...], npt.NDArray[np.uint64]] = OrderedDict()
"""Indices of shard files that were read last, by path and stamp."""
_MOST_INDEX_NBYTES = 32 << 20
"""Bytes of indices that are kept."""
_index_lock = Lock()


def _known_index(key: tuple[object, ...]) -> npt.NDArray[np.uint64] | None:
    with _index_lock:
        if key in _indices:
            _indices.move_to_end(key)
        return _indices.get(key)


def _keep_index(key: tuple[object, ...], index: npt.NDArray[np.uint64]) -> None:
    with _index_lock:
        _indices[key] = index
        while len(_indices) > 1 and sum(kept.nbytes for kept in _indices.values()) > _MOST_INDEX_NBYTES:
            _indices.popitem(last=False)
