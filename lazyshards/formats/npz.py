"""NumPy's .npz archives: .npy arrays in a zip file, of which one is the shard.

A member that is stored as it is (``np.savez``) is read as plain bytes at its place in the archive. One that is
deflated (``np.savez_compressed``) is inflated from its beginning in bounded pieces, since deflate knows no other way.

The archive's directory is read by Python's ``zipfile``, and the header of a member by the npy format.
"""

import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.codecs import inflater
from lazyshards.formats.faults import list_names, unreadable
from lazyshards.formats.npy import NpyFormat
from lazyshards.formats.options import check_options, name_option
from lazyshards.formats.stamps import check_stamps
from lazyshards.layout import Decoded, Packed, Planes, Shard
from lazyshards.selection import Cell, cell_index, is_whole
from lazyshards.storage.base import Head, Part, Stamp, Storage

if TYPE_CHECKING:
    from zipfile import ZipInfo

__all__ = ["NpzFormat"]

_TAIL_NBYTES = 4096
"""Bytes of the first read at the end of an archive: it holds the directory of a few dozen members."""
_MOST_TAIL_NBYTES = 16 << 20
"""Bytes of the longest directory that is parsed."""
_LOCAL_NBYTES = 30
"""Bytes of a member's own header, without its name and its extra fields."""
_SLACK_NBYTES = 512
"""Bytes that deflate may need more than it gives, at the beginning of a member: its tables."""
_PIECE_NBYTES = 1 << 20
"""Bytes inflated at a time."""
_MOST_RATIO = 1032
"""How many times as long as what was deflated deflate can make it at most."""
_STORED, _DEFLATED = 0, 8
"""Methods of compression that are read, by their numbers in zip files."""
_METHODS = {12: "bzip2", 14: "lzma", 93: "zstd"}
"""Others; for messages."""
_RAW_WINDOW = -15
"""What zlib takes for the window of a stream without a framing of its own."""


class _Member(NamedTuple):
    """Where an array lies in an archive."""

    name: str
    """Its name, without ``.npy``."""
    offset: int
    """First byte after its own header."""
    stored_nbytes: int
    """Bytes in the archive."""
    nbytes: int
    """Bytes once inflated."""
    is_deflated: bool
    crc: int
    """Checksum of what is inflated."""


class _Deflated(NamedTuple):
    """What is needed to read a deflated member again."""

    member: _Member
    start: int
    """First byte of the array's data, once inflated."""
    fortran: bool
    """Whether the array is stored by columns."""


class NpzFormat:
    """One named array of each .npz archive.

    Availability: always. Options: ``member``, its name as NumPy has it (``arr_0``); found alone if every archive holds
    only one. Stored members are read as plain bytes; deflated ones are inflated from their beginning.
    """

    name = "npz"
    suffixes = (".npz",)
    magic: tuple[bytes, ...] = ()  # those of any zip file
    directories = False

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every archive."""
        check_options(options, self.name, ("member",))
        wanted = name_option(options, "member")
        heads = storage.heads(paths, 4)
        found: list[Any] = _directories(paths, heads, storage)
        found = [
            item if isinstance(item, Fault) else _choose(path, item, wanted)
            for path, item in zip(paths, found, strict=True)
        ]
        found = _locate(paths, heads, found, storage)
        members = {path: item for path, item in zip(paths, found, strict=True) if isinstance(item, _Member)}
        stamps = {path: head.stamp for path, head in zip(paths, heads, strict=True)}
        arrays = NpyFormat().inspect(list(members), cast("Storage", _Members(storage, members, stamps)), {})
        described = {
            path: _shard(members[path], stamps[path], array) for path, array in zip(members, arrays, strict=True)
        }
        return [described.get(path, item) for path, item in zip(paths, found, strict=True)]

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Inflate a deflated member from its beginning, or from where a read before this ended, to the rows wanted."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        assert isinstance(detail, _Deflated)
        if detail.fortran:
            _read_columns(shard, detail, start, out, cell, storage)
        else:
            _read_rows(shard, detail, start, out, cell, storage)


# The directory of an archive ---------------------------------------------------------------------------------------


class _Unread(Exception):  # noqa: N818  # no error: more must be read
    """Bytes were asked for that were not read yet; the argument is the first of them."""


class _Tail(io.RawIOBase):
    """A file of which only the end was read, for ``zipfile``."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._start = size - len(data)
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError("a place before the file's beginning")
        self._at = at
        return at

    def read(self, nbytes: int | None = -1) -> bytes:
        if self._at < self._start:
            raise _Unread(self._at)
        at = self._at - self._start
        found = self._data[at:] if nbytes is None or nbytes < 0 else self._data[at : at + nbytes]
        self._at += len(found)
        return found


def _directories(paths: Sequence[str], heads: Sequence[Head], storage: Storage) -> list["list[ZipInfo] | Fault"]:
    """Return the directory of every archive; its end is read, and more of it only where that does not do."""
    from zipfile import BadZipFile, ZipFile  # here, as it takes longer to import than most of the package

    found: dict[int, list[ZipInfo] | Fault] = {}
    starts: dict[int, int] = {}
    for i, (path, head) in enumerate(zip(paths, heads, strict=True)):
        if head.error is not None:
            found[i] = unreadable(path, head.error)
        elif head.data[:2] != b"PK":
            what = f"begins with {head.data!r}" if head.data else "is empty"
            found[i] = Fault(path, f"{what}, expected a .npz archive (a zip file, {b'PK'!r})")
        else:
            starts[i] = max(0, head.stamp.size - _TAIL_NBYTES)
    while starts:
        ranges = [(paths[i], start, heads[i].stamp.size - start) for i, start in starts.items()]
        again: dict[int, int] = {}
        for (i, start), data in zip(starts.items(), storage.fetch(ranges), strict=True):
            size = heads[i].stamp.size
            try:
                with ZipFile(_Tail(data, size)) as archive:
                    found[i] = archive.infolist()
            except _Unread as exc:
                first = min(int(exc.args[0]), start - 1)
                if size - first > _MOST_TAIL_NBYTES:
                    found[i] = Fault(
                        paths[i],
                        f"has a directory of {size - first:,} bytes at its end, expected at most {_MOST_TAIL_NBYTES:,}",
                    )
                else:
                    again[i] = max(0, first)
            except (BadZipFile, NotImplementedError, OSError, ValueError, EOFError, IndexError) as exc:
                found[i] = Fault(paths[i], f"is truncated or damaged: it is no whole .npz archive ({exc})")
        starts = again
    return [found[i] for i in range(len(paths))]


def _choose(path: str, infos: "Sequence[ZipInfo]", wanted: str | None) -> "ZipInfo | Fault":
    """Return the member that is the shard."""
    arrays: dict[str, ZipInfo] = {}
    for info in infos:
        if info.filename.endswith(".npy"):
            name = info.filename.removesuffix(".npy")
            if name in arrays:
                return Fault(path, f"holds the array {name!r} twice")
            arrays[name] = info
    names = list_names(list(arrays))
    if wanted is None:
        if len(arrays) != 1:
            what = f"holds {len(arrays):,} arrays ({names}): say which with member=" if arrays else "holds no array"
            return Fault(path, what)
        return next(iter(arrays.values()))
    found = arrays.get(wanted) or arrays.get(wanted.removesuffix(".npy"))
    return found or Fault(path, f"holds no array {wanted!r}, it holds {names or 'none'}")


def _locate(paths: Sequence[str], heads: Sequence[Head], found: Sequence[Any], storage: Storage) -> list[Any]:
    """Return where the data of each member begins: its own header, which tells, may be longer than in the directory."""
    located = list(found)
    wanted = [i for i, info in enumerate(found) if not isinstance(info, Fault)]
    data = storage.fetch([(paths[i], found[i].header_offset, _LOCAL_NBYTES) for i in wanted])
    for i, local in zip(wanted, data, strict=True):
        located[i] = _member(paths[i], found[i], local, heads[i].stamp.size)
    return located


def _member(path: str, info: "ZipInfo", local: bytes, size: int) -> _Member | Fault:
    """Return the member whose own header begins with ``local``, checked against the directory and the file's size."""
    name = info.filename.removesuffix(".npy")
    if len(local) < _LOCAL_NBYTES or local[:4] != b"PK\x03\x04":
        return Fault(path, f"is damaged: no member begins at byte {info.header_offset:,}, where {name!r} should be")
    flags, method = (int.from_bytes(local[at : at + 2], "little") for at in (6, 8))
    if flags & 1 or info.flag_bits & 1:
        return Fault(path, f"holds the array {name!r} encrypted, which is not read")
    if method != info.compress_type or method not in (_STORED, _DEFLATED):
        what = _METHODS.get(info.compress_type, f"method {info.compress_type}")
        return Fault(path, f"holds the array {name!r} compressed by {what}, expected stored or deflated")
    offset = info.header_offset + _LOCAL_NBYTES + int.from_bytes(local[26:28], "little")
    offset += int.from_bytes(local[28:30], "little")
    if offset + info.compress_size > size:
        return Fault(
            path,
            f"is truncated: it holds {size:,} bytes, its array {name!r} ends at byte {offset + info.compress_size:,}",
        )
    is_deflated = method == _DEFLATED
    if info.file_size != info.compress_size if not is_deflated else info.file_size > _MOST_RATIO * info.compress_size:
        return Fault(
            path,
            f"is damaged: its array {name!r} cannot be {info.file_size:,} bytes in the {info.compress_size:,} it takes",
        )
    return _Member(name, offset, info.compress_size, info.file_size, is_deflated, info.CRC)


# The array in a member ---------------------------------------------------------------------------------------------


class _Members:
    """The members of archives as if each were a file of its own, for the npy format to inspect."""

    def __init__(self, storage: Storage, members: Mapping[str, _Member], stamps: Mapping[str, Stamp]) -> None:
        self._storage = storage
        self._members = members
        self._stamps = stamps

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        found = self.fetch([(path, 0, min(nbytes, self._members[path].nbytes)) for path in paths])
        return [Head(data, Stamp(self._members[path].nbytes)) for path, data in zip(paths, found, strict=True)]

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        found = []
        inner = []
        for path, offset, nbytes in ranges:
            member = self._members[path]
            if member.is_deflated:
                stored = min(member.stored_nbytes, offset + nbytes + _SLACK_NBYTES)
                inner.append((path, member.offset, stored))
            else:
                inner.append((path, member.offset + offset, min(nbytes, member.nbytes - offset)))
        for (path, offset, nbytes), data in zip(ranges, self._storage.fetch(inner), strict=True):
            found.append(_inflated(data, offset, nbytes) if self._members[path].is_deflated else data)
        return found


def _inflated(data: bytes, offset: int, nbytes: int) -> bytes:
    """Return bytes of what was deflated; none of them if it is damaged, which the npy format then tells."""
    module = inflater()
    try:
        return bytes(module.decompressobj(_RAW_WINDOW).decompress(data, offset + nbytes)[offset:])
    except module.error:
        return b""


def _shard(member: _Member, stamp: Stamp, array: Shard | Fault) -> Shard | Fault:
    """Return the shard that a member is, given what it would be as a file of its own."""
    if isinstance(array, Fault):
        return Fault(array.path, f"holds an array {member.name!r} that {array.found}")
    source = array.source
    assert isinstance(source, Packed | Planes)
    start = source.offset if isinstance(source, Packed) else source.start
    nbytes = prod(array.row_shape) * array.rows * array.dtype.itemsize
    if member.is_deflated:
        if start + nbytes != member.nbytes:
            return Fault(
                array.path,
                f"holds an array {member.name!r} of {start + nbytes:,} bytes in {member.nbytes:,} that are deflated",
            )
        detail = _Deflated(member, start, isinstance(source, Planes))
        return array._replace(stamp=stamp, source=Decoded(detail, (0,)))
    if isinstance(source, Packed):
        return array._replace(stamp=stamp, source=Packed(member.offset + source.offset))
    return array._replace(stamp=stamp, source=Planes(member.offset + source.start, source.stride))


# Deflated members --------------------------------------------------------------------------------------------------


class _Stream:
    """A deflated member that is being inflated, from its beginning to its end."""

    def __init__(self, shard: Shard, member: _Member, storage: Storage) -> None:
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


_streams: OrderedDict[tuple[str, Stamp, _Member], list[_Stream]] = OrderedDict()
"""Streams that reads left where they ended, so that reading on does not begin at the beginning."""
_MOST_STREAMS = 8
"""Streams that are kept: each has a window of 32 KiB and at most one piece of the archive."""
_lock = Lock()


def _forget() -> None:
    global _lock  # in a child process the lock may be one that another thread held when the process was forked
    _lock = Lock()
    _streams.clear()


os.register_at_fork(after_in_child=_forget)


def _take_stream(shard: Shard, member: _Member, storage: Storage, at: int) -> _Stream:
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
    shard: Shard, detail: _Deflated, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage
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
    shard: Shard, detail: _Deflated, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage
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
