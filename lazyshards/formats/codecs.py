"""The filters of HDF5 that are undone here, outside the HDF5 library and with the interpreter lock released.

Every decoder knows how many bytes must come out before it starts, writes no more, and raises CodecError on anything
else: what it is given may be damaged, or made to do damage.

Source: the filters and their framing are described in the HDF5 file format specification (shuffle, deflate,
fletcher32) and in the registered filter plugins' own documents (blosc, lz4, zstd).
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["FILTER_NAMES", "Bytes", "CodecError", "Filter", "can_decode", "decode", "inflater", "lacking"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

FILTER_NAMES = {
    1: "deflate",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    307: "bzip2",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}
"""Registered filters by id; for messages."""
_DEFLATE, _SHUFFLE, _FLETCHER32, _BLOSC, _LZ4, _ZSTD = 1, 2, 3, 32001, 32004, 32015
_CHECKSUM_NBYTES = 4
_SNAPPY = 3
"""The one inner codec of blosc that not every build has."""
_STAGE_NBYTES = 1 << 16
"""Bytes of a piece in which the checksum is summed: it stays in the nearest cache."""
_WEIGHTS = np.arange(_STAGE_NBYTES // 2, 0, -1, dtype=np.uint32)
"""How often each word of a piece counts in the second sum of the checksum."""


class CodecError(Exception):
    """Bytes that a filter cannot have written, and what is wrong with them."""


class Filter(NamedTuple):
    """One step of the pipeline that a dataset's chunks went through when they were written."""

    id: int
    """Registered number of the filter."""
    values: tuple[int, ...] = ()
    """Its parameters, as the dataset keeps them."""
    name: str = ""
    """Its name, as the dataset keeps it."""

    def __str__(self) -> str:
        return f"filter {self.id} ({FILTER_NAMES.get(self.id) or self.name or 'unknown'})"


def can_decode(filters: Sequence[Filter]) -> bool:
    """Return whether chunks that went through these filters can be decoded here, whichever of them were skipped.

    Parameters
    ----------
    filters : sequence of Filter
        In the order in which they were applied.
    """
    if not all([_is_decodable(step) for step in filters]):
        return False
    # After one compressor the size of what goes into a second is not known, and nothing is inflated without it.
    return sum([step.id not in (_SHUFFLE, _FLETCHER32) for step in filters]) <= 1


def _is_decodable(step: Filter) -> bool:
    if step.id in (_DEFLATE, _FLETCHER32):
        return True
    if step.id == _SHUFFLE:
        return bool(step.values) and step.values[0] > 0
    if step.id == _BLOSC:
        inner = step.values[6] if len(step.values) > 6 else 0
        return inner != _SNAPPY and _codec("blosc") is not None
    if step.id in (_LZ4, _ZSTD):
        return _codec(FILTER_NAMES[step.id]) is not None
    return False


def lacking(filters: Sequence[Filter], mask: int) -> Filter | None:
    """Return the first filter that a chunk with this mask went through and that cannot be undone here, or None."""
    return next((step for i, step in enumerate(filters) if not mask >> i & 1 and not _is_decodable(step)), None)


def decode(filters: Sequence[Filter], mask: int, raw: memoryview, out: Bytes) -> None:
    """Fill ``out`` with what went into the filters, all of it, or raise.

    Parameters
    ----------
    filters : sequence of Filter
        In the order in which they were applied.
    mask : int
        Bit ``i`` is set if filter ``i`` was skipped for this chunk.
    raw : memoryview
        The chunk as it is stored.
    out : ndarray of uint8, 1-D, contiguous
        As long as the chunk was before it was written.

    Raises
    ------
    CodecError
        If the bytes cannot have come from these filters, or a checksum is wrong.
    """
    steps: list[tuple[Filter, int]] = []  # each with the bytes that went into it
    nbytes = len(out)
    for i, step in enumerate(filters):
        if not mask >> i & 1:
            steps.append((step, nbytes))
            nbytes += _CHECKSUM_NBYTES if step.id == _FLETCHER32 else 0
    data: memoryview = raw
    for i in range(len(steps) - 1, -1, -1):
        step, nbytes = steps[i]
        decoder = _DECODERS.get(step.id)
        if decoder is None:
            raise CodecError(f"it went through {step}, for which no decoder is here")
        data = decoder(data, nbytes, step.values, None if i else out)
    if len(data) != len(out):
        raise CodecError(f"it holds {len(data):,} bytes, expected {len(out):,}")
    found = np.frombuffer(data, np.uint8)
    if not len(out) or found.ctypes.data != out.ctypes.data:
        out[...] = found


@cache
def inflater() -> Any:  # a module: the fastest that is installed
    """Return isal's zlib if it is installed, which inflates about twice as fast, else Python's; both are used alike."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


@cache
def _libdeflate() -> Any:  # a module without types
    """Return the binding of libdeflate, which inflates what is in memory as a whole faster yet, or None."""
    try:
        import deflate
    except ImportError:
        return None
    return deflate


def _undo_deflate(data: memoryview, nbytes: int, values: tuple[int, ...], out: Bytes | None) -> memoryview:
    fast = _libdeflate()
    if fast is not None:
        # It says no more than that something is wrong; what that is, the stream tells.
        with suppress(fast.DeflateError):
            whole: bytearray = fast.zlib_decompress(data, nbytes)
            if len(whole) == nbytes:
                return memoryview(whole)
    inflate = inflater()
    try:
        stream = inflate.decompressobj()
        # One byte more than there can be: so the end of the stream, and its checksum, are reached.
        found = stream.decompress(data, nbytes + 1)
    except inflate.error as exc:
        raise CodecError(f"deflate: {exc}") from exc
    if len(found) > nbytes:
        raise CodecError(f"deflate: more than the expected {nbytes:,} bytes come out")
    if not stream.eof:
        raise CodecError("deflate: the stream ends early")
    return memoryview(found)


def _undo_shuffle(data: memoryview, nbytes: int, values: tuple[int, ...], out: Bytes | None) -> memoryview:
    """Put the bytes of each element, which were sorted by their place in it, together again."""
    if len(data) != nbytes:
        raise CodecError(f"shuffle: {len(data):,} bytes come in, expected {nbytes:,}")
    width = values[0]
    found = np.empty(nbytes, np.uint8) if out is None else out
    source = np.frombuffer(data, np.uint8)
    count = nbytes // width
    whole = count * width
    planes, elements = source[:whole].reshape(width, count), found[:whole].reshape(count, width)
    if width <= 8:
        # One strided copy for each place: three times as fast as NumPy's own transposition, whose inner loop would
        # be as short as an element.
        for i in range(width):
            elements[:, i] = planes[i]
    else:
        elements.T[...] = planes
    found[whole:] = source[whole:]
    return found.data


def _undo_fletcher32(data: memoryview, nbytes: int, values: tuple[int, ...], out: Bytes | None) -> memoryview:
    """Check and drop the checksum at the end."""
    count = len(data) - _CHECKSUM_NBYTES
    if count < 0:
        raise CodecError("fletcher32: the chunk is shorter than its checksum")
    stored = int.from_bytes(data[count:], "little")
    found = _fletcher32(np.frombuffer(data[:count], np.uint8))
    # HDF5 1.6.2 and older swapped the bytes of both halves on little-endian machines; the library takes both.
    if stored not in (found, _swap_halves(found)):
        raise CodecError(f"fletcher32: the checksum is {stored:#010x}, its bytes have {found:#010x}")
    return data[:count]


def _fletcher32(data: Bytes) -> int:
    """Return the checksum over big-endian words of two bytes, an odd byte at the end being the upper half of one.

    Summed are little-endian words: modulo 65,535 to swap the bytes of each is to multiply by 256, which is to swap
    the bytes of the sums.
    """
    first = second = 0
    for start in range(0, len(data), _STAGE_NBYTES):
        piece = data[start : start + _STAGE_NBYTES]
        if len(piece) % 2:
            piece = np.append(piece, np.uint8(0))
        words = piece.view("<u2").astype(np.uint32)
        count = len(words)
        # With the sums so far, each word counts once for itself and once for every word that follows it. The
        # products fit 32 bits, because a piece has 2**15 words of 16 bits.
        second += count * first + int((words * _WEIGHTS[-count:]).sum(dtype=np.uint64))
        first += int(words.sum(dtype=np.uint64))
    return _swap_halves(_fold(second) << 16 | _fold(first))


def _swap_halves(checksum: int) -> int:
    """Swap the bytes in each half of a checksum."""
    return (checksum & 0x00FF00FF) << 8 | checksum >> 8 & 0x00FF00FF


def _fold(total: int) -> int:
    """Return a sum modulo 65,535 as repeated folding leaves it: nothing but 0 becomes 0."""
    return total % 0xFFFF or (0xFFFF if total else 0)


def _undo_blosc(data: memoryview, nbytes: int, values: tuple[int, ...], out: Bytes | None) -> memoryview:
    blosc = _need("blosc")
    if len(data) < 16:
        raise CodecError("blosc: the chunk is shorter than a header")
    inflated, stored = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
    # The library trusts both numbers.
    if stored != len(data) or inflated != nbytes:
        raise CodecError(
            f"blosc: the header promises {inflated:,} bytes from {stored:,}, expected {nbytes:,} from {len(data):,}"
        )
    return _run(blosc.decompress, "blosc", data, np.empty(nbytes, np.uint8) if out is None else out)


def _undo_zstd(data: memoryview, nbytes: int, values: tuple[int, ...], out: Bytes | None) -> memoryview:
    zstd = _need("zstd")
    inflated = _zstd_nbytes(data)
    if inflated != nbytes:
        raise CodecError(f"zstd: the header promises {inflated} bytes, expected {nbytes:,}")
    return _run(zstd.decompress, "zstd", data, np.empty(nbytes, np.uint8) if out is None else out)


def _zstd_nbytes(data: memoryview) -> int | None:
    """Return the bytes that a frame says it holds, or None if it does not say, or is no frame."""
    if len(data) < 5 or bytes(data[:4]) != b"\x28\xb5\x2f\xfd":
        return None
    flags = data[4]
    single = flags >> 5 & 1
    width = (1 if single else 0, 2, 4, 8)[flags >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3]
    if not width or len(data) < start + width:
        return None
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)


def _undo_lz4(data: memoryview, nbytes: int, values: tuple[int, ...], out: Bytes | None) -> memoryview:
    """Decode blocks, each with its size before it; one as long as what it holds was not compressed."""
    lz4 = _need("lz4")
    found = np.empty(nbytes, np.uint8) if out is None else out
    inflated, block_nbytes = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:12], "big")
    if inflated != nbytes or (nbytes and not block_nbytes):
        raise CodecError(f"lz4: the header promises {inflated:,} bytes, expected {nbytes:,}")
    at, done = 12, 0
    while done < nbytes:
        count = min(block_nbytes, nbytes - done)
        stored = int.from_bytes(data[at : at + 4], "big")
        block = data[at + 4 : at + 4 + stored]
        if len(data) < at + 4 + stored or not stored:
            raise CodecError("lz4: the chunk ends early")
        part = found[done : done + count]
        if stored == count:
            part[...] = np.frombuffer(block, np.uint8)
        else:
            _run(lz4.decompress, "lz4", count.to_bytes(4, "little") + block, part)
        at += 4 + stored
        done += count
    return found.data


def _run(function: Callable[..., object], name: str, data: object, out: Bytes) -> memoryview:
    try:
        function(data, out)
    except (RuntimeError, ValueError) as exc:
        raise CodecError(f"{name}: {exc}") from exc
    return out.data


@cache
def _codec(name: str) -> ModuleType | None:
    try:
        return import_module(f"numcodecs.{name}")
    except ImportError:
        return None


def _need(name: str) -> Any:  # a module without types
    """Return a codec; a layout made where it is installed may be read where it is not."""
    module = _codec(name)
    if module is None:
        raise CodecError(f"{name}: numcodecs is not installed for {sys.executable}: pip install numcodecs")
    return module


_DECODERS: dict[int, Callable[[memoryview, int, tuple[int, ...], Bytes | None], memoryview]] = {
    _DEFLATE: _undo_deflate,
    _SHUFFLE: _undo_shuffle,
    _FLETCHER32: _undo_fletcher32,
    _BLOSC: _undo_blosc,
    _LZ4: _undo_lz4,
    _ZSTD: _undo_zstd,
}
