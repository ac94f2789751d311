"""The metadata of Zarr arrays, versions 2 and 3: parsed and checked, into what is needed to read their chunks.

Source: the Zarr specifications, https://zarr-specs.readthedocs.io.
"""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lazyshards.errors import LazyShardsError
from lazyshards.formats.zarr_codecs import FILTERS, Codec, RefusedError, check_codecs, crc32c, find_codec
from lazyshards.layout import native_dtype

__all__ = ["ZarrArray", "parse_array"]

_MOST_CHUNK_NBYTES = 1 << 32
"""Bytes of the largest chunk that is decoded."""
_PLAIN = {
    "bool": "?",
    **{f"{kind}{bits}": f"{kind[0]}{bits // 8}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)},
    "complex64": "c8",
    "complex128": "c16",
}
del _PLAIN["float8"]
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


@dataclass(frozen=True, slots=True)
class ZarrArray:
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
    codecs: tuple[Codec, ...]
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


def parse_array(
    name: str, folder: str, described: Mapping[str, Any], *, fills: bool
) -> tuple[ZarrArray, np.dtype[np.generic]]:
    """Return the array that metadata describes, and its type as stored.

    Parameters
    ----------
    name : str
        Of the metadata file, which tells the version.
    folder : str
        Where the array is.
    described : mapping
        The metadata.
    fills : bool
        Whether a chunk that is not there holds the fill value.

    Raises
    ------
    RefusedError
        If it cannot be read, or makes no sense.
    """
    try:
        return (_read_2 if name == ".zarray" else _read_3)(folder, described, fills=fills)
    except RefusedError as exc:
        raise RefusedError(f"holds a Zarr array that cannot be read: {exc}") from exc
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error, LazyShardsError) as exc:
        what = f"lacks {exc}" if isinstance(exc, KeyError) else f"makes no sense: {exc}"
        raise RefusedError(f"has Zarr metadata ({name}) that {what}") from exc


def _sizes(values: object, what: str, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int and least <= n < 1 << 62 for n in values):
        raise RefusedError(f"its {what} is {values!r:.80}, expected a list of integers, {least} or more")
    return tuple(values)


def _check_shapes(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    if not shape:
        raise RefusedError("it has no axes (a single value), expected a row axis")
    if len(chunks) != len(shape):
        raise RefusedError(f"its chunks of shape {chunks} have other axes than the array of shape {shape}")
    if prod(chunks) * dtype.itemsize > _MOST_CHUNK_NBYTES:
        raise RefusedError(
            f"its chunks have {prod(chunks) * dtype.itemsize:,} bytes each, expected at most {_MOST_CHUNK_NBYTES:,}"
        )


# Version 2 ---------------------------------------------------------------------------------------------------------


def _read_2(folder: str, described: Mapping[str, Any], *, fills: bool) -> tuple[ZarrArray, np.dtype[np.generic]]:
    if described["zarr_format"] != 2:
        raise RefusedError(f"it is of version {described['zarr_format']!r}, expected 2")
    shape, chunks = _sizes(described["shape"], "shape", 0), _sizes(described["chunks"], "chunks", 1)
    dtype = _dtype_2(described["dtype"])
    _check_shapes(shape, chunks, dtype)
    separator = described.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise RefusedError(f"its dimension_separator is {separator!r}")
    if described["order"] not in ("C", "F"):
        raise RefusedError(f"its order is {described['order']!r}")
    axes = tuple(range(len(shape)))
    steps = [*(described.get("filters") or ()), *([described["compressor"]] if described["compressor"] else [])]
    codecs = tuple([find_codec(step["id"], {key: step[key] for key in step if key != "id"}, dtype) for step in steps])
    check_codecs(codecs, prod(chunks), dtype)
    fill = _fill_2(described.get("fill_value"), dtype) if fills else None
    order = axes if described["order"] == "C" else axes[::-1]
    return ZarrArray(folder, ".zarray", shape, chunks, (), "", separator, order, codecs, fill), dtype


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
        raise RefusedError('its fill_value is null, so that missing_chunks="fill" has nothing to fill with')
    if dtype.kind in "SV" and isinstance(value, str):
        return base64.b64decode(value).ljust(dtype.itemsize, b"\0")[: dtype.itemsize]
    if dtype.kind == "c" and isinstance(value, list):
        value = complex(*map(float, value))
    if dtype.kind in "mM":
        return np.array(value if value != "NaT" else np.iinfo("i8").min, "i8").astype(dtype.str[0] + "i8").tobytes()
    return np.array(value, dtype).tobytes()


# Version 3 ---------------------------------------------------------------------------------------------------------


def _read_3(folder: str, described: Mapping[str, Any], *, fills: bool) -> tuple[ZarrArray, np.dtype[np.generic]]:
    if described["zarr_format"] != 3 or described["node_type"] != "array":
        raise RefusedError(f"it is a {described['node_type']!r:.40} of version {described['zarr_format']!r:.40}")
    for name in described.keys() - _KNOWN:
        item = described[name]
        if not (isinstance(item, dict) and item.get("must_understand") is False):
            raise RefusedError(f"it has {name!r}, which must be understood and is not")
    if described.get("storage_transformers"):
        raise RefusedError("it has storage_transformers")
    shape = _sizes(described["shape"], "shape", 0)
    dtype = _dtype_3(described["data_type"])
    grid, config = _named(described["chunk_grid"])
    if grid != "regular":
        raise RefusedError(f"its chunk grid is {grid!r}, expected 'regular'")
    chunks = _sizes(config["chunk_shape"], "chunk_shape", 1)
    files: tuple[int, ...] = ()
    encoding, config = _named(described["chunk_key_encoding"])
    if encoding not in ("default", "v2"):
        raise RefusedError(f"its chunk_key_encoding is {encoding!r}, expected 'default' or 'v2'")
    separator = config.get("separator", "/" if encoding == "default" else ".")
    if separator not in (".", "/"):
        raise RefusedError(f"its separator is {separator!r}")
    prefix = f"c{separator}" if encoding == "default" else ""
    codecs: Any = described["codecs"]
    is_checked = is_index_first = False
    if [_named(codec)[0] for codec in codecs] == ["sharding_indexed"]:
        _, config = _named(codecs[0])
        files, chunks, codecs = chunks, _sizes(config["chunk_shape"], "chunk_shape", 1), config["codecs"]
        if len(chunks) != len(files) or any(size % part for size, part in zip(files, chunks, strict=True)):
            raise RefusedError(f"its shards of shape {files} are no multiple of its chunks of shape {chunks}")
        is_checked = _is_index_checked(config.get("index_codecs", _INDEX_CODECS))
        location = config.get("index_location", "end")
        if location not in ("start", "end"):
            raise RefusedError(f"its index_location is {location!r}")
        is_index_first = location == "start"
    _check_shapes(shape, chunks, dtype)
    order, steps, endian = _pipeline(codecs, len(shape), dtype)
    dtype = dtype.newbyteorder(">" if endian == ">" else "<")
    check_codecs(steps, prod(chunks), dtype)
    fill = _fill_3(described["fill_value"], dtype) if fills else None
    array = ZarrArray(
        folder, "zarr.json", shape, chunks, files, prefix, separator, order, steps, fill, is_checked, is_index_first
    )
    return array, dtype


def _named(item: Any) -> tuple[str, Mapping[str, Any]]:
    """Return name and configuration of a part of the metadata, which may be a name alone."""
    if isinstance(item, str):
        return item, {}
    config = item.get("configuration") or {}
    if not isinstance(item["name"], str) or not isinstance(config, dict):
        raise RefusedError(f"it has the extension {item!r:.80}")
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
    raise RefusedError(f"its data_type is {name!r}, expected one of {', '.join(_PLAIN)}")


def _is_index_checked(codecs: Any) -> bool:
    names = [_named(codec)[0] for codec in codecs]
    endian = _named(codecs[0])[1].get("endian", "little") if names else ""
    if names not in (["bytes"], ["bytes", "crc32c"]) or endian != "little":
        raise RefusedError(f"the index of its shards is encoded by {', '.join(names)}, expected bytes and crc32c")
    if len(names) == 2 and crc32c() is None:
        raise RefusedError("the index of its shards has checksums, which need google-crc32c: pip install google-crc32c")
    return len(names) == 2


def _pipeline(codecs: Any, ndim: int, dtype: np.dtype[np.generic]) -> tuple[tuple[int, ...], tuple[Codec, ...], str]:
    """Return the order in which axes are stored, the codecs of bytes, and the byte order."""
    order = list(range(ndim))
    before: list[Codec] = []
    after: list[Codec] = []
    endian = ""
    for codec in codecs:
        name, config = _named(codec)
        if name == "transpose" and not endian and not before:
            permutation = config["order"]
            if not isinstance(permutation, list) or sorted(permutation) != list(range(ndim)):
                raise RefusedError(f"its axes are transposed by {permutation!r:.80}")
            order = [order[axis] for axis in permutation]
        elif name == "bytes" and not endian:
            endian = {"little": "<", "big": ">"}[config.get("endian", "little")]
        else:
            found = find_codec(name.removeprefix("numcodecs."), config, dtype)
            if (found.name in FILTERS) == bool(endian):
                raise RefusedError(f"its codec {name!r} stands where it cannot be")
            (after if endian else before).append(found)
    if not endian:
        raise RefusedError(f"its codecs do not make bytes: {[_named(codec)[0] for codec in codecs]}")
    if before and endian == ">":
        raise RefusedError(f"its codec {before[0].name!r} comes before big-endian bytes")
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
