"""Deflated members of .npz archives: inflated in bounded pieces, from their beginning or from where a read ended."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.codecs import inflater
from lazyshards.formats.npz_members import Member
from lazyshards.formats.stamps import check_stamps
from lazyshards.layout import Shard
from lazyshards.selection import Cell, cell_index, is_whole
from lazyshards.storage.base import Part, Stamp, Storage

__all__ = ["Deflated", "inflate_head", "read_member"]

_PIECE_NBYTES = 1 << 20
"""Bytes inflated at a time."""
_RAW_WINDOW = -15
"""What zlib takes for the window of a stream without a framing of its own."""


class Deflated(NamedTuple):
    """What is needed to read a deflated member again."""

    member: Member
    start: int
    """First byte of the array's data, once inflated."""
    fortran: bool
    """Whether the array is stored by columns."""


def read_member(
    shard: Shard, detail: Deflated, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage
) -> None:
    """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell.

    Parameters
    ----------
    shard : Shard
    detail : Deflated
        What the shard is.
    start : int
    out : ndarray
    cell : tuple
    storage : Storage
    """
    if detail.fortran:
        _read_columns(shard, detail, start, out, cell, storage)
    else:
        _read_rows(shard, detail, start, out, cell, storage)


def inflate_head(data: bytes, offset: int, nbytes: int) -> bytes:
    """Return bytes of what was deflated; none of them if it is damaged, which the npy format then tells."""
    module = inflater()
    try:
        return bytes(module.decompressobj(_RAW_WINDOW).decompress(data, offset + nbytes)[offset:])
    except module.error:
        return b""


class _Stream:
    """A deflated member that is being inflated, from its beginning to its end."""

    def __init__(self, shard: Shard, member: Member, storage: Storage) -> None:
        self.shard = shard
        self.member = member
        self.storage = storage
        self.at = 0
        """Bytes inflated."""
        self._taken = 0
        """Bytes read from the archive."""
        self._crc = 0
        self._module = inflater()
        self._inflate = self._module.decompressobj(_RAW_WINDOW)
        self._pending = b""

    def pieces(self, stop: int) -> Iterator[bytes]:
        """Yield what comes next, in bounded pieces, up to byte ``stop``."""
        while self.at < stop:
            yield self._piece(min(_PIECE_NBYTES, stop - self.at))

    def _piece(self, nbytes: int) -> bytes:
        while True:
            if not self._pending and self._taken < self.member.stored_nbytes:
                self._pending = self._fetch()
            try:
                data: bytes = self._inflate.decompress(self._pending, nbytes)
            except self._module.error as exc:
                raise self._damage(str(exc)) from exc
            self._pending = self._inflate.unconsumed_tail
            if data:
                break
            if self._inflate.eof or (not self._pending and self._taken >= self.member.stored_nbytes):
                raise self._damage(f"it ends after {self.at:,} of {self.member.nbytes:,} bytes")
        self.at += len(data)
        self._crc = self._module.crc32(data, self._crc)
        if self.at == self.member.nbytes and self._crc != self.member.crc:
            raise self._damage(f"its checksum is {self._crc:#010x}, expected {self.member.crc:#010x}")
        return data

    def _fetch(self) -> bytes:
        """Read what comes next in the archive; the storage sees to it that it is still the one that was opened."""
        shard = self.shard
        window = max(_PIECE_NBYTES, self.storage.window_nbytes)
        data = bytearray(min(window, self.member.stored_nbytes - self._taken))
        self.storage.fetch_into([Part(shard.path, shard.stamp, self.member.offset + self._taken, memoryview(data))])
        self._taken += len(data)
        return bytes(data)

    def _damage(self, what: str) -> ShardReadError:
        return ShardReadError(
            f"{self.shard.path!r} is damaged: its array {self.member.name!r} does not inflate: {what}"
        )


_streams: OrderedDict[tuple[str, Stamp, Member], list[_Stream]] = OrderedDict()
"""Streams that reads left where they ended, so that reading on does not begin at the beginning."""
_MOST_STREAMS = 8
"""Streams that are kept: each has a window of 32 KiB and at most one piece of the archive."""
_lock = Lock()


def _forget() -> None:
    global _lock  # in a child process the lock may be one that another thread held when the process was forked
    _lock = Lock()
    _streams.clear()


os.register_at_fork(after_in_child=_forget)


def _take_stream(shard: Shard, member: Member, storage: Storage, at: int) -> _Stream:
    """Return a stream that has not passed byte ``at``: one that was left, or a new one."""
    with _lock:
        left = _streams.get((shard.path, shard.stamp, member), [])
        best = max((stream for stream in left if stream.at <= at), key=lambda stream: stream.at, default=None)
        if best is None:
            return _Stream(shard, member, storage)
        left.remove(best)
    best.storage = storage
    # It may go on with bytes that it has: whether the archive is still the same is asked here.
    check_stamps([(shard.path, shard.stamp)], storage)
    return best


def _leave_stream(stream: _Stream) -> None:
    if stream.at >= stream.member.nbytes:
        return
    key = (stream.shard.path, stream.shard.stamp, stream.member)
    with _lock:
        left = _streams.setdefault(key, [])
        _streams.move_to_end(key)
        left.append(stream)
        del left[:-2]
        while len(_streams) > _MOST_STREAMS:
            _streams.popitem(last=False)


def _read_rows(
    shard: Shard, detail: Deflated, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage
) -> None:
    """Fill ``out`` from a member stored by rows."""
    row_nbytes = prod(shard.row_shape) * shard.dtype.itemsize
    first = detail.start + start * row_nbytes
    stream = _take_stream(shard, detail.member, storage, first)
    for _ in stream.pieces(first):
        pass
    step = max(1, _PIECE_NBYTES // row_nbytes)
    whole = is_whole(cell, shard.row_shape) and shard.dtype == out.dtype
    block = out if whole else np.empty((min(step, len(out)), *shard.row_shape), shard.dtype)
    index = (slice(None), *cell_index(cell))
    for done in range(0, len(out), len(block)):
        count = min(len(block), len(out) - done)
        data = block.reshape(-1).view(np.uint8).data
        at, begin = 0, stream.at
        for piece in stream.pieces(begin + count * row_nbytes):
            data[at : at + len(piece)] = piece
            at += len(piece)
        if not whole:
            out[done : done + count] = block[:count][index]
    _leave_stream(stream)


def _read_columns(
    shard: Shard, detail: Deflated, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage
) -> None:
    """Fill ``out`` from a member stored by columns: all of it is inflated up to the last column wanted."""
    numbers = np.arange(prod(shard.row_shape)).reshape(shard.row_shape, order="F")[cell_index(cell)]
    columns = dict(zip(numbers.ravel().tolist(), np.ndindex(numbers.shape), strict=True))
    itemsize = shard.dtype.itemsize
    stop = start + len(out)
    stream = _take_stream(shard, detail.member, storage, 0)
    for _ in stream.pieces(detail.start):
        pass
    at = 0
    left = b""
    for piece in stream.pieces(detail.start + (max(columns) * shard.rows + stop) * itemsize):
        data = left + piece if left else piece
        values = np.frombuffer(data, shard.dtype, len(data) // itemsize)
        left = data[len(values) * itemsize :]
        taken = 0
        while taken < len(values):
            column, row = divmod(at + taken, shard.rows)
            count = min(len(values) - taken, shard.rows - row)
            low, high = max(start, row), min(stop, row + count)
            if low < high and column in columns:
                place = (slice(low - start, high - start), *columns[column])
                out[place] = values[taken + low - row : taken + high - row]
            taken += count
        at += taken
