"""Raw binary files: rows as plain bytes and nothing else, described by options or by a JSON file beside them."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import LazyShardsError
from lazyshards.formats.base import Fault
from lazyshards.formats.faults import unreadable
from lazyshards.formats.options import check_options, is_count, row_shape_option
from lazyshards.layout import Packed, Shard, native_dtype
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Storage

__all__ = ["RawFormat"]

_SIDECAR = "meta.json"
_MOST_SIDECAR_NBYTES = 64 << 10
"""Bytes of the longest sidecar that is parsed."""
_KEYS = {"dtype", "shape", "offset", "rows_per_shard"}


class _Description(NamedTuple):
    """What options or a sidecar say; None where they say nothing."""

    dtype: np.dtype[np.generic] | None = None
    """Type as stored, byte order included."""
    row_shape: tuple[int, ...] | None = None
    """Shape of one row."""
    offset: int | None = None
    """Bytes before the first row of each file."""
    rows_per_shard: int | None = None
    """Rows of each file but the last of a directory, which may hold fewer."""


class RawFormat:
    """Rows as plain bytes, with nothing in the file that describes them.

    Availability: always. Options: ``dtype`` as stored (with its byte order), ``row_shape`` and ``offset`` in bytes; or
    a file ``meta.json`` in the same directory with ``dtype``, ``shape``, and maybe ``offset`` and ``rows_per_shard``.
    """

    name = "raw"
    suffixes = (".bin", ".raw", ".dat")
    magic: tuple[bytes, ...] = ()
    directories = False
    takes_dtype = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file."""
        given = _given(options)
        sidecars = [_sidecar_path(path) for path in paths]
        described = _read_sidecars(list(dict.fromkeys(sidecars)), storage)
        last = dict(zip(sidecars, paths, strict=True))
        known: dict[str, _Description | str] = {}
        found: list[Shard | Fault] = []
        for path, sidecar, head in zip(paths, sidecars, storage.heads(paths, 1), strict=True):
            if head.error is not None:
                found.append(unreadable(path, head.error))
                continue
            if sidecar not in known:
                known[sidecar] = _agreed(given, described[sidecar], sidecar)
            description = known[sidecar]
            if isinstance(description, str):
                found.append(Fault(path, description))
            else:
                found.append(_shard(path, head, description, last[sidecar] == path))
        return found

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Never called: raw files are plain bytes."""
        raise AssertionError(f"{shard.path!r} is read as plain bytes")


def _given(options: Mapping[str, object]) -> _Description:
    """Return what the options say; TypeError or ValueError if they make no sense."""
    check_options(options, "raw", ("dtype", "row_shape", "offset"))
    dtype, row_shape, offset = options.get("dtype"), options.get("row_shape"), options.get("offset")
    if offset is not None and not is_count(offset):
        raise TypeError(f"offset={offset!r} is not a number of bytes: expected an integer, 0 or more")
    return _Description(
        None if dtype is None else _stored_dtype(dtype),
        None if row_shape is None else row_shape_option(row_shape),
        None if offset is None else int(offset),  # type: ignore[call-overload]  # it is an integer, as was seen
    )


def _stored_dtype(dtype: object) -> np.dtype[np.generic]:
    native_dtype(dtype)  # raises for what cannot be stored as plain bytes
    return np.dtype(dtype)  # type: ignore[call-overload, no-any-return]  # what it raises was raised before


def _sidecar_path(path: str) -> str:
    """Return the path of the description that belongs to a file: in the same directory, of the same archive."""
    link, separator, rest = path.partition("::")
    return link[: link.rfind("/") + 1] + _SIDECAR + separator + rest


def _read_sidecars(paths: Sequence[str], storage: Storage) -> dict[str, _Description | str]:
    """Return what each sidecar says, or what is wrong with it; one that is not there says nothing."""
    found: dict[str, _Description | str] = {}
    for path, head in zip(paths, storage.heads(paths, _MOST_SIDECAR_NBYTES + 1), strict=True):
        if isinstance(head.error, FileNotFoundError):
            found[path] = _Description()
        elif head.error is not None:
            found[path] = f"has a description {path!r} that cannot be read: {head.error.strerror or head.error}"
        elif len(head.data) > _MOST_SIDECAR_NBYTES:
            found[path] = f"has a description {path!r} of more than {_MOST_SIDECAR_NBYTES:,} bytes"
        else:
            try:
                found[path] = _parse_sidecar(head.data)
            except (ValueError, TypeError, RecursionError, LazyShardsError) as exc:
                found[path] = f"has a description {path!r} that makes no sense: {exc}"
    return found


def _parse_sidecar(data: bytes) -> _Description:
    described = json.loads(data)
    if not isinstance(described, dict):
        raise TypeError(f"it is a {type(described).__name__}, expected an object with {', '.join(sorted(_KEYS))}")
    unknown = described.keys() - _KEYS
    if unknown:
        raise ValueError(f"it has the unknown key {min(unknown)!r}; known are {', '.join(sorted(_KEYS))}")
    dtype, shape = described.get("dtype"), described.get("shape")
    if isinstance(dtype, list):  # fields, as JSON has no tuples
        dtype = [tuple(tuple(item) if isinstance(item, list) else item for item in field) for field in dtype]
    if shape is not None and not (isinstance(shape, list) and all(is_count(size) for size in shape)):
        raise ValueError(f"its shape is {shape!r}, expected a list of integers: the shape of one row")
    for key in ("offset", "rows_per_shard"):
        if described.get(key) is not None and not is_count(described[key]):
            raise ValueError(f"its {key} is {described[key]!r}, expected an integer, 0 or more")
    return _Description(
        None if dtype is None else _stored_dtype(dtype),
        None if shape is None else tuple(shape),
        described.get("offset"),
        described.get("rows_per_shard"),
    )


def _agreed(given: _Description, described: _Description | str, sidecar: str) -> _Description | str:
    """Return what options and sidecar say together, or how they contradict each other or what neither says."""
    if isinstance(described, str):
        return described
    for option, key in (("dtype", "dtype"), ("row_shape", "shape"), ("offset", "offset")):
        ours, theirs = getattr(given, option), getattr(described, option)
        if ours is not None and theirs is not None and ours != theirs:
            return (
                f"is described twice: {option}={_text(ours)} was given, but {sidecar!r} says {key} {_text(theirs)}; "
                f"leave {option}= out, or correct the description"
            )
    said = {key: value for key, value in given._asdict().items() if value is not None}
    merged = described._replace(**said)
    lacking = [name for name in ("dtype", "row_shape") if getattr(merged, name) is None]
    if lacking:
        return (
            f"does not say what it holds, and neither does {sidecar!r}: give {' and '.join(f'{n}=' for n in lacking)}, "
            'for example dtype="<f4", row_shape=(3,)'
        )
    return merged


def _text(value: object) -> str:
    return value.str if isinstance(value, np.dtype) and value.names is None else str(value)


def _shard(path: str, head: Head, description: _Description, is_last: bool) -> Shard | Fault:
    """Return the shard, its rows derived from the size of the file."""
    dtype, row_shape, offset, expected = description
    assert dtype is not None
    assert row_shape is not None
    size = head.stamp.size
    start = offset or 0
    row_nbytes = prod(row_shape) * dtype.itemsize
    kind = f"rows of shape {row_shape} and dtype {_text(dtype)}"
    if size < start:
        return Fault(path, f"is truncated: it holds {size:,} bytes, expected {start:,} before the first row alone")
    if not row_nbytes:
        return Fault(path, f"cannot hold {kind}: a row takes no bytes, so that their number cannot be told")
    rows, left = divmod(size - start, row_nbytes)
    if left:
        after = f" after an offset of {start:,}" if start else ""
        return Fault(
            path,
            f"is not a whole number of rows: it holds {size - start:,} bytes{after} = {rows:,} x {row_nbytes:,} + "
            f"{left:,}, and {kind} take {row_nbytes:,} bytes each",
        )
    if expected is not None and (rows > expected or (rows < expected and not is_last)):
        return Fault(path, f"holds {rows:,} rows, but its description says rows_per_shard {expected:,}")
    return Shard(path, rows, row_shape, dtype, head.stamp, Packed(start))
