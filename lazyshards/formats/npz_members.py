"""Where the arrays of .npz archives lie: by the directory at the end, and by the header of each member itself."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazyshards.formats.base import Fault
from lazyshards.formats.faults import list_names, unreadable
from lazyshards.storage.base import Head, Storage

if TYPE_CHECKING:
    from zipfile import ZipInfo

__all__ = ["Member", "choose_member", "locate_members", "read_directories"]

_TAIL_NBYTES = 4096
"""Bytes of the first read at the end of an archive: it holds the directory of a few dozen members."""
_MOST_TAIL_NBYTES = 16 << 20
"""Bytes of the longest directory that is parsed."""
_LOCAL_NBYTES = 30
"""Bytes of a member's own header, without its name and its extra fields."""
_MOST_RATIO = 1032
"""How many times as long as what was deflated deflate can make it at most."""
_STORED, _DEFLATED = 0, 8
"""Methods of compression that are read, by their numbers in zip files."""
_METHODS = {12: "bzip2", 14: "lzma", 93: "zstd"}
"""Others; for messages."""


class Member(NamedTuple):
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


def read_directories(paths: Sequence[str], heads: Sequence[Head], storage: Storage) -> list["list[ZipInfo] | Fault"]:
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


def choose_member(path: str, infos: "Sequence[ZipInfo]", wanted: str | None) -> "ZipInfo | Fault":
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


def locate_members(
    paths: Sequence[str], heads: Sequence[Head], chosen: "Sequence[ZipInfo | Fault]", storage: Storage
) -> list[Member | Fault]:
    """Return where the data of each member begins: its own header, which tells, may be longer than in the directory."""
    infos = [info for info in chosen if not isinstance(info, Fault)]
    there = [i for i, info in enumerate(chosen) if not isinstance(info, Fault)]
    data = storage.fetch([(paths[i], info.header_offset, _LOCAL_NBYTES) for i, info in zip(there, infos, strict=True)])
    located = {
        i: _member(paths[i], info, local, heads[i].stamp.size)
        for i, info, local in zip(there, infos, data, strict=True)
    }
    return [info if isinstance(info, Fault) else located[i] for i, info in enumerate(chosen)]


def _member(path: str, info: "ZipInfo", local: bytes, size: int) -> Member | Fault:
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
    return Member(name, offset, info.compress_size, info.file_size, is_deflated, info.CRC)
