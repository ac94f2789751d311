"""NumPy's .npy files, versions 1 to 3: a small header, then the array's bytes.

Source: the format is described in ``numpy.lib.format``. The header is parsed here and not by NumPy because NumPy has
no public reader of version 3, refuses headers above 10,000 bytes, and takes five times as long for each file.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.formats.options import check_options
from lazyshards.layout import Packed, Planes, Shard, Source
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
    """What a header says, as every shard with the same header shares it."""

    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    source: Source
    nbytes: int
    """Bytes of the header and the array."""


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
        check_options(options, "npy", ())
        heads = storage.heads(paths, _HEAD_NBYTES)
        known: dict[bytes, _Header | None] = {}
        found: list[Shard | Fault | None] = []
        others: list[int] = []
        longer: list[tuple[int, int]] = []
        new_shard = tuple.__new__  # a third of the time of Shard(...), and one is made for each file
        for i, (path, (data, stamp, _)) in enumerate(zip(paths, heads, strict=True)):
            try:
                header = known[data]
            except KeyError:
                header = known[data] = _parse_plain(data)
            if header is None or stamp[0] < header[4]:
                others.append(i)
                found.append(None)
                continue
            rows, row_shape, dtype, source, nbytes = header
            found.append(new_shard(Shard, (path, rows, row_shape, dtype, stamp, source)))
            if stamp[0] > nbytes:
                longer.append((i, nbytes))
        parsed = _parse_others([paths[i] for i in others], [heads[i] for i in others], storage)
        for i, header_or_fault in zip(others, parsed, strict=True):
            if isinstance(header_or_fault, Fault):
                found[i] = header_or_fault
                continue
            rows, row_shape, dtype, source, nbytes = header_or_fault
            found[i] = Shard(paths[i], rows, row_shape, dtype, heads[i].stamp, source)
            if heads[i].stamp.size > nbytes:
                longer.append((i, nbytes))
        for i, fault in _second_arrays(paths, longer, storage):
            found[i] = fault
        return [shard for shard in found if shard is not None]

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
    axes = tuple([int(n) for n in shape.split(b",") if n.strip()])
    try:
        dtype = np.dtype(descr.decode())
    except TypeError:  # the general parser says what is wrong
        return None
    header = _describe("", dtype, fortran == b"True", axes, 10 + size)
    return None if isinstance(header, Fault) else header


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
        header = _parse_header(paths[i], whole, size)
        held = heads[i].stamp.size
        if isinstance(header, _Header) and held < header.nbytes:
            header = Fault(
                paths[i],
                f"is truncated: it holds {held:,} bytes, its header promises {header.nbytes:,} "
                f"({header.rows:,} rows of shape {header.row_shape} and dtype {header.dtype} after its {size:,} bytes)",
            )
        parsed[i] = header
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
            raise TypeError(f"its fortran_order is {fortran!r}")
        dtype = np.lib.format.descr_to_dtype(described["descr"])
    except (ValueError, TypeError, SyntaxError, KeyError, IndexError, RecursionError, MemoryError) as exc:
        return Fault(path, f"has a damaged .npy header: {exc}")
    return _describe(path, dtype, fortran, shape, size)


def _describe(
    path: str, dtype: np.dtype[np.generic], fortran: bool, shape: tuple[int, ...], start: int
) -> _Header | Fault:
    """Return the header of an array that can be a shard; its data begins at byte ``start``."""
    if dtype.hasobject:
        return Fault(
            path, f"holds Python objects ({dtype}), which are pickled code and never loaded; expected a plain dtype"
        )
    if dtype.subdtype is not None:
        return Fault(path, f"has elements that are arrays ({dtype}), expected those axes in its shape")
    if not shape:
        return Fault(path, "holds a 0-d array (a single value), expected an array with a row axis")
    if not dtype.itemsize or prod([max(size, 1) for size in shape]) * dtype.itemsize >= 1 << 63:
        return Fault(path, f"has shape {shape} and dtype {dtype}, expected what an array of NumPy can have")
    rows, row_shape = shape[0], shape[1:]
    source = Planes(start, rows * dtype.itemsize) if fortran and row_shape else Packed(start)
    return _Header(rows, row_shape, dtype, source, start + prod(shape) * dtype.itemsize)


def _second_arrays(
    paths: Sequence[str], longer: Sequence[tuple[int, int]], storage: Storage
) -> Iterator[tuple[int, Fault]]:
    """Yield a fault for each file in which a second array follows the first: only the first would be read.

    ``longer`` are the numbers of the files that go on after their array, and the byte at which they do.
    """
    tails = storage.fetch([(paths[i], end, len(_MAGIC)) for i, end in longer])
    for (i, end), tail in zip(longer, tails, strict=True):
        if tail == _MAGIC:
            yield i, Fault(paths[i], f"holds a second array after byte {end:,}, expected one array in each .npy file")
