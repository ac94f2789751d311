"""NumPy's .npy files, versions 1 to 3: a small header, then the array's bytes.

Source: the format is described in ``numpy.lib.format``. The header is parsed here and not by NumPy because NumPy has
no public reader of version 3, refuses headers above 10,000 bytes, and takes five times as long for each file.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.layout import Extent, Extents, Planes, Shard, Source
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Storage

__all__ = ["NpyFormat"]

_MAGIC = b"\x93NUMPY"
_HEAD_NBYTES = 128
"""Bytes of the first read: NumPy pads the header of a plain array to this."""
_MOST_HEADER_NBYTES = 128 << 10
"""Bytes of the longest header that is parsed: it holds a few thousand fields."""
_PLAIN = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z]\d+)', 'fortran_order': (False|True), 'shape': \(((?:\d+, ?)*\d*)\), \} *\n"
)
"""The header as NumPy writes it for a plain dtype; anything else goes to the general parser."""


class _Header(NamedTuple):
    dtype: np.dtype[np.generic]
    fortran: bool
    shape: tuple[int, ...]
    nbytes: int
    """Bytes before the data."""


class NpyFormat:
    """NumPy's .npy files.

    Availability: always. Read as plain bytes, C or Fortran order, either byte order; object arrays are refused,
    because reading one would run code from the file.
    """

    name = "npy"
    suffixes = (".npy",)
    magic = (_MAGIC,)
    directories = False

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file."""
        if options:
            raise TypeError(f"the npy format takes no option {next(iter(options))!r}")
        heads = storage.heads(paths, _HEAD_NBYTES)
        plain: dict[bytes, _Header | None] = {}
        found: list[Shard | Fault] = []
        rest: list[int] = []
        for i, head in enumerate(heads):
            data = head.data
            try:
                header = plain[data]
            except KeyError:
                header = plain[data] = _parse_plain(data)
            if header is None:
                rest.append(i)
                found.append(Fault(paths[i], "is not inspected yet"))
            else:
                found.append(_shard(paths[i], head, header))
        for i, parsed in zip(
            rest, _parse_others([paths[i] for i in rest], [heads[i] for i in rest], storage), strict=True
        ):
            found[i] = parsed if isinstance(parsed, Fault) else _shard(paths[i], heads[i], parsed)
        return _refuse_second_arrays(found, storage)

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Never called: every .npy file is plain bytes."""
        raise AssertionError(f"{shard.path!r} is read as plain bytes")


def _parse_plain(data: bytes) -> _Header | None:
    """Parse the head of a file that NumPy wrote for a plain dtype, or return None."""
    if data[:8] != b"\x93NUMPY\x01\x00":
        return None
    size = data[8] | data[9] << 8 if len(data) >= 10 else 0
    match = _PLAIN.fullmatch(data, 10, 10 + size)
    if match is None or 10 + size > len(data):
        return None
    descr, fortran, shape = match.groups()
    try:
        dtype = np.dtype(descr.decode())
    except TypeError:  # the general parser says what is wrong
        return None
    return _Header(
        dtype,
        fortran == b"True",
        tuple([int(n) for n in shape.split(b",") if n.strip()]),
        10 + size,
    )


def _parse_others(paths: Sequence[str], heads: Sequence[Head], storage: Storage) -> list[_Header | Fault]:
    """Parse headers of any version, length and dtype, fetching what the first read did not reach."""
    parsed: list[_Header | Fault | None] = []
    longer: list[tuple[int, int]] = []
    for i, (path, (data, stamp, error)) in enumerate(zip(paths, heads, strict=True)):
        if error is not None:
            parsed.append(Fault(path, f"cannot be read: {error.strerror or error}", error))
        elif not data.startswith(_MAGIC):
            what = f"begins with {data[:8]!r}" if data else "is empty"
            parsed.append(Fault(path, f"{what}, expected a .npy header ({_MAGIC!r})"))
        elif len(data) < 12 or data[6] not in (1, 2, 3):
            version = f"has version {data[6]}.{data[7]}" if len(data) >= 12 else "ends"
            parsed.append(Fault(path, f"{version} within {len(data)} bytes, expected a .npy header of version 1 to 3"))
        else:
            size = _header_nbytes(data)
            if size > _MOST_HEADER_NBYTES:
                parsed.append(Fault(path, f"has a header of {size:,} bytes, expected at most {_MOST_HEADER_NBYTES:,}"))
            elif size > stamp.size:
                parsed.append(
                    Fault(path, f"is truncated: it holds {stamp.size:,} bytes, its header alone has {size:,}")
                )
            else:
                parsed.append(None)
                longer.append((i, size))
    texts = storage.fetch([(paths[i], 0, size) for i, size in longer if size > len(heads[i].data)])
    fetched = iter(texts)
    for i, size in longer:
        data = heads[i].data
        whole = next(fetched) if size > len(data) else data[:size]
        parsed[i] = _parse_header(paths[i], whole, size)
    return [header for header in parsed if header is not None]


def _header_nbytes(data: bytes) -> int:
    """Return the bytes before the array's data."""
    if data[6] == 1:
        return 10 + int.from_bytes(data[8:10], "little")
    return 12 + int.from_bytes(data[8:12], "little")


def _parse_header(path: str, data: bytes, size: int) -> _Header | Fault:
    start = 10 if data[6] == 1 else 12
    try:
        if len(data) < size:
            raise ValueError(f"it ends after {len(data)} of {size} bytes")
        described = ast.literal_eval(data[start:size].decode("utf-8" if data[6] == 3 else "latin-1").strip())
        if not isinstance(described, dict) or described.keys() != {"descr", "fortran_order", "shape"}:
            raise ValueError("it is no dict of 'descr', 'fortran_order' and 'shape'")
        shape, fortran = described["shape"], described["fortran_order"]
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"its shape is {shape!r}")
        if not isinstance(fortran, bool):
            raise ValueError(f"its fortran_order is {fortran!r}")
        dtype = np.lib.format.descr_to_dtype(described["descr"])
    except (ValueError, TypeError, SyntaxError, KeyError, IndexError, RecursionError, MemoryError) as exc:
        return Fault(path, f"has a damaged .npy header: {exc}")
    return _Header(dtype, fortran, shape, size)


def _shard(path: str, head: Head, header: _Header) -> Shard | Fault:
    """Return the shard that a header describes, if the file can hold it."""
    dtype, fortran, shape, start = header
    if dtype.hasobject:
        return Fault(
            path, f"holds Python objects ({dtype}), which are pickled code and never loaded; expected a plain dtype"
        )
    if not shape:
        return Fault(path, "holds a 0-d array (a single value), expected an array with a row axis")
    if not dtype.itemsize or prod([max(size, 1) for size in shape]) * dtype.itemsize >= 1 << 63:
        return Fault(path, f"has shape {shape} and dtype {dtype}, expected what an array of NumPy can have")
    rows, row_shape = shape[0], shape[1:]
    row_nbytes = dtype.itemsize
    for size in row_shape:
        row_nbytes *= size
    expected = start + rows * row_nbytes
    if head.stamp.size < expected:
        return Fault(
            path,
            f"is truncated: it holds {head.stamp.size:,} bytes, its header promises {expected:,} "
            f"({rows:,} rows of {row_nbytes:,} bytes after {start:,} bytes of header)",
        )
    source: Source
    if fortran and row_shape:
        source = Planes(start, rows * dtype.itemsize)
    else:
        source = Extents((Extent(0, rows, "", start),))
    return Shard(path, rows, row_shape, dtype, head.stamp, source)


def _refuse_second_arrays(found: list[Shard | Fault], storage: Storage) -> list[Shard | Fault]:
    """Turn files in which a second array follows the first into faults: only the first would be read."""
    longer = []
    for i, shard in enumerate(found):
        if type(shard) is Shard:
            end = _end(shard)
            if shard.stamp.size > end:
                longer.append((i, end))
    if longer:
        tails = storage.fetch([(found[i].path, end, len(_MAGIC)) for i, end in longer])
        for (i, end), tail in zip(longer, tails, strict=True):
            if tail == _MAGIC:
                found[i] = Fault(
                    found[i].path, f"holds a second array after byte {end:,}, expected one array in each .npy file"
                )
    return found


def _end(shard: Shard) -> int:
    """Return the byte after the array's data."""
    source = shard.source
    row_nbytes = shard.dtype.itemsize
    for size in shard.row_shape:
        row_nbytes *= size
    start = source.start if type(source) is Planes else source.extents[0].offset  # type: ignore[union-attr]
    return start + shard.rows * row_nbytes
