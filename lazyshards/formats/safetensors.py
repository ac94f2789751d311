"""Safetensors files: a JSON header, then the bytes of named tensors, of which one is the shard.

Source: the format is described at https://huggingface.co/docs/safetensors. The header is parsed here, so that no
library is needed and every number in it is checked before it is used.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.formats.faults import list_names, unreadable
from lazyshards.formats.options import check_options, name_option
from lazyshards.layout import Packed, Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Storage

__all__ = ["SafetensorsFormat"]

_HEAD_NBYTES = 4096
"""Bytes of the first read: it holds the header of a few dozen tensors."""
_MOST_HEADER_NBYTES = 16 << 20
"""Bytes of the longest header that is parsed: it holds more than 100,000 tensors."""
_PREFIX_NBYTES = 8
"""Bytes before the header, which tell its length."""
_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}
"""Types of tensors that NumPy has."""
_BITS = {"BF16": 16, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
"""Bits of an element of the other types, which NumPy lacks."""
_BITS |= {name: 8 * np.dtype(text).itemsize for name, text in _DTYPES.items()}


class _Tensor(NamedTuple):
    """What the header says of one tensor."""

    dtype: str
    """Name of its type."""
    shape: tuple[int, ...]
    """Its shape."""
    start: int
    """First byte, after the header."""
    stop: int
    """Byte after the last, after the header."""


class SafetensorsFormat:
    """One named tensor of each safetensors file.

    Availability: always. Read as plain bytes. Options: ``tensor``, its name; found alone if every file holds only one.
    Types that NumPy lacks (bfloat16, the 8-bit floats and smaller) are refused.
    """

    name = "safetensors"
    suffixes = (".safetensors",)
    magic: tuple[bytes, ...] = ()
    directories = False

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file."""
        check_options(options, self.name, ("tensor",))
        wanted = name_option(options, "tensor")
        heads = storage.heads(paths, _HEAD_NBYTES)
        texts = [_header(path, head) for path, head in zip(paths, heads, strict=True)]
        longer = [i for i, text in enumerate(texts) if isinstance(text, int)]
        fetched = storage.fetch([(paths[i], _PREFIX_NBYTES, texts[i]) for i in longer])  # type: ignore[misc]  # integers
        for i, data in zip(longer, fetched, strict=True):
            texts[i] = data
        known: dict[bytes, dict[str, _Tensor] | str] = {}
        found: list[Shard | Fault] = []
        for path, head, text in zip(paths, heads, texts, strict=True):
            if isinstance(text, Fault):
                found.append(text)
                continue
            assert isinstance(text, bytes)
            if text not in known:
                known[text] = _parse(text)
            found.append(_shard(path, head, known[text], _PREFIX_NBYTES + len(text), wanted))
        return found

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Never called: tensors are plain bytes."""
        raise AssertionError(f"{shard.path!r} is read as plain bytes")


def _header(path: str, head: Head) -> bytes | int | Fault:
    """Return the text of the header, its length if more must be read for it, or what is wrong."""
    data, stamp, error = head
    if error is not None:
        return unreadable(path, error)
    if len(data) < _PREFIX_NBYTES:
        return Fault(path, f"holds {len(data)} bytes, expected a safetensors header after the first {_PREFIX_NBYTES}")
    size = int.from_bytes(data[:_PREFIX_NBYTES], "little")
    if size > _MOST_HEADER_NBYTES:
        return Fault(
            path,
            f"has a header of {size:,} bytes, expected at most {_MOST_HEADER_NBYTES:,}; is it a safetensors file?",
        )
    if _PREFIX_NBYTES + size > stamp.size:
        return Fault(
            path, f"is truncated: it holds {stamp.size:,} bytes, its header alone has {size:,} after the first 8"
        )
    return size if _PREFIX_NBYTES + size > len(data) else data[_PREFIX_NBYTES : _PREFIX_NBYTES + size]


def _parse(text: bytes) -> dict[str, _Tensor] | str:
    """Return the tensors that a header tells of, or what is wrong with it."""
    try:
        described = json.loads(text.decode("utf-8"), object_pairs_hook=_once_each)
        if not isinstance(described, dict):
            raise TypeError("it is no JSON object")
        tensors = {name: _tensor(name, entry) for name, entry in described.items() if name != "__metadata__"}
    except (ValueError, TypeError, RecursionError) as exc:
        return f"has a damaged safetensors header: {exc}"
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start != at:
            return f"has a damaged safetensors header: tensor {name!r} begins at byte {tensor.start:,}, expected {at:,}"
        at = tensor.stop
    return tensors


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it names something twice")
    return found


def _tensor(name: str, entry: object) -> _Tensor:
    """Return what an entry says, checked: a size that is right for the shape and type."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name!r} lacks one of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not numbers or not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *offsets)) or len(shape) > 64:
        raise ValueError(f"tensor {name!r} has shape {shape!r:.80} and data_offsets {offsets!r:.80}")
    start, stop = offsets
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is not None and 8 * (stop - start) != prod(shape) * bits:
        raise ValueError(
            f"tensor {name!r} has {stop - start:,} bytes, expected {prod(shape) * bits // 8:,} for shape "
            f"{tuple(shape)} and type {dtype}"
        )
    return _Tensor(str(dtype), tuple(shape), start, stop)


def _shard(path: str, head: Head, tensors: dict[str, _Tensor] | str, begin: int, wanted: str | None) -> Shard | Fault:
    """Return the shard that is the wanted tensor of a file; ``begin`` is the first byte after the header."""
    if isinstance(tensors, str):
        return Fault(path, tensors)
    end = begin + max([tensor.stop for tensor in tensors.values()], default=0)
    size = head.stamp.size
    if size != end:
        what = "is truncated: it" if size < end else "goes on after its tensors: it"
        return Fault(path, f"{what} holds {size:,} bytes, its header promises {end:,}")
    names = list_names(sorted(tensors))
    if wanted is None and len(tensors) != 1:
        what = f"holds {len(tensors):,} tensors ({names}): say which with tensor=" if tensors else "holds no tensor"
        return Fault(path, what)
    name = next(iter(tensors)) if wanted is None else wanted
    if name not in tensors:
        return Fault(path, f"holds no tensor {name!r}, it holds {names or 'none'}")
    dtype, shape, start, _ = tensors[name]
    if dtype not in _DTYPES:
        return Fault(
            path,
            f"holds tensor {name!r} of type {dtype}, which NumPy lacks, expected one of {', '.join(_DTYPES)}; "
            "convert it, to F32 for example, when it is saved",
        )
    if not shape:
        return Fault(path, f"holds tensor {name!r} of no axes (a single value), expected one with a row axis")
    return Shard(path, shape[0], shape[1:], np.dtype(_DTYPES[dtype]), head.stamp, Packed(begin + start))
