"""Files of this machine: positional reads straight into the destination."""

import errno
import glob
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from lazyshards.errors import ShardReadError
from lazyshards.native import find_library
from lazyshards.storage.base import Entry, Head, OnChange, Part, Stamp
from lazyshards.storage.changes import report_change
from lazyshards.storage.gather import copy_into

__all__ = ["LocalStorage"]

_MOST_NBYTES = 0x7FFFF000
"""Bytes that one read call of Linux returns at most."""
_PROBE = 32
"""Heads read one after the other before it is decided whether threads would help."""
_SLOW_SECONDS = 60e-6
"""Seconds a head above which reading waits on a device, so that threads help; in the page cache it takes about 4 us."""
_INODE_BITS = 0x7FFF_FFFF_FFFF_FFFF
"""A layout holds inodes as int64, and some file systems use all 64 bits."""
_OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""How files are opened: a named pipe that took a shard's name must not hang what reads it."""
_HEAD_THREADS = 16
"""Threads that read heads from a device; more gained nothing in the measurements of docs/explanation/decisions.md."""


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """Files of this machine.

    Parameters
    ----------
    on_change : {"raise", "warn", "ignore"}
        What to do about a file that changed since it was opened.
    """

    on_change: OnChange = "raise"
    gap_nbytes: int = 16 << 10
    window_nbytes: int = 512 << 10

    def find(self, path: str) -> tuple[str, list[Entry]]:
        """Return what ``path`` is, and the entries found there."""
        try:
            if os.path.isdir(path):
                return "directory", _listed(path)
            if os.path.lexists(path):
                return "file", [Entry(path, False)]
            if glob.has_magic(path):
                return "glob", [Entry(found, os.path.isdir(found)) for found in _glob(path)]
        except OSError as exc:
            raise ShardReadError(f"{path!r} cannot be listed: {exc.strerror or exc}") from exc
        except ValueError as exc:  # a null byte in the name
            raise ShardReadError(f"{path!r} is not a path: {exc}") from exc
        return "missing", []

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        """Return the first bytes and the stamp of every file, errors in place.

        In the page cache threads only fight over the interpreter lock, on a cold disk they are worth four times:
        the first few reads decide. Stamps alone, of no bytes, are asked of the directories and open no file.
        """
        start = time.perf_counter()
        heads = _heads(paths[:_PROBE], nbytes)
        rest = paths[_PROBE:]
        if not rest:
            return heads
        if time.perf_counter() - start < _PROBE * _SLOW_SECONDS:
            return heads + _heads(rest, nbytes)
        count = max(1, len(rest) // (8 * _HEAD_THREADS))
        pieces = [rest[i : i + count] for i in range(0, len(rest), count)]
        with ThreadPoolExecutor(_HEAD_THREADS) as pool:
            for piece in pool.map(_heads, pieces, [nbytes] * len(pieces)):
                heads += piece
        return heads

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each ``(path, offset, nbytes)``; shorter only where the file ends."""
        found = []
        for path, offset, nbytes in ranges:
            try:
                fd = os.open(path, _OPENED)
                try:
                    found.append(_pread(fd, offset, nbytes))
                finally:
                    os.close(fd)
            except OSError as exc:
                raise ShardReadError(f"{path!r} cannot be read: {exc.strerror or exc}") from exc
        return found

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Fill every part's ``out``, or raise ShardReadError naming the file.

        The stamp is compared after the bytes were read, so that a change during the read is seen as well.
        """
        i, count = 0, len(parts)
        while i < count:
            path, stamp = parts[i].path, parts[i].stamp
            j = i + 1
            while j < count and parts[j].path == path:
                j += 1
            if j - i == 1 and self.on_change == "raise" and copy_into(parts[i]):
                i = j
                continue
            try:
                fd = os.open(path, _OPENED)
                try:
                    short = _fill(fd, parts[i:j])
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
            except OSError as exc:
                gone = "; it was there when the dataset was opened" if isinstance(exc, FileNotFoundError) else ""
                raise ShardReadError(f"{path!r} cannot be read: {exc.strerror or exc}{gone}") from exc
            except OverflowError as exc:  # as whoever wrote a manifest may say
                raise ShardReadError(f"{path!r} cannot be read at byte 2**63 or beyond, where no file goes") from exc
            now = _stamp(status)
            if now != stamp:
                report_change(path, stamp, now, self.on_change)
            if short:
                raise ShardReadError(
                    f"{path!r} is truncated: it holds {now.size:,} bytes, {stamp.size:,} when it was opened; "
                    "restore the file, then open the dataset again"
                )
            i = j

    @property
    def gathers(self) -> bool:
        """Whether single rows are copied out of memory maps: then reading what lies between them gains nothing."""
        return self.on_change == "raise" and find_library() is not None

    def open(self, path: str) -> BinaryIO:
        """Return the file, open for reading."""
        try:
            return open(path, "rb", opener=lambda name, _: os.open(name, _OPENED))
        except OSError as exc:
            raise ShardReadError(f"{path!r} cannot be opened: {exc.strerror or exc}") from exc

    def local_path(self, path: str) -> str | None:
        """Return the path itself."""
        return path


def _listed(path: str) -> list[Entry]:
    """Return the entries of a directory."""
    new = tuple.__new__
    with os.scandir(path) as found:
        entries = list(found)
    try:
        return [new(Entry, (entry.path, entry.is_dir())) for entry in entries]
    except OSError:
        return [Entry(entry.path, _is_directory(entry)) for entry in entries]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of symbolic links
        return False


def _glob(pattern: str) -> Iterable[str]:
    """Expand a pattern whose leading directories are taken literally as far as they exist."""
    parts = pattern.split(os.sep)
    literal = 0
    while literal < len(parts) - 1 and os.path.isdir(os.sep.join(parts[: literal + 1]) or os.sep):
        literal += 1
    root = os.sep.join(parts[:literal])
    rest = os.sep.join(parts[literal:])
    base = root + os.sep if literal else ""
    return [base + found for found in glob.iglob(rest, root_dir=base or None, recursive=True)]


def _heads(paths: Sequence[str], nbytes: int) -> list[Head]:
    """Read heads one after the other, with as little around the system calls as can be: one is made for every shard."""
    heads: list[Head] = []
    if not nbytes:
        for path in paths:
            try:
                heads.append(Head(b"", _stamp(os.stat(path))))
            except (OSError, ValueError) as exc:  # it is that file's own
                heads.append(_failed(exc))
        return heads
    open_, fstat, pread, close, new = os.open, os.fstat, os.pread, os.close, tuple.__new__
    for path in paths:
        try:
            fd = open_(path, _OPENED)
            try:
                status = fstat(fd)
                data = pread(fd, nbytes, 0)
            finally:
                close(fd)
        except (OSError, ValueError) as exc:
            heads.append(_failed(exc))
        else:
            inode = status.st_ino & _INODE_BITS
            heads.append(new(Head, (data, new(Stamp, (status.st_size, status.st_mtime_ns, inode, "")), None)))
    return heads


def _failed(error: OSError | ValueError) -> Head:
    """Return the head of a file that cannot be read; one whose name is no path at all is not there either."""
    if isinstance(error, ValueError):  # a null byte, or characters that no file name has
        error = OSError(errno.EINVAL, f"its name is not a path: {error}")
    return Head(b"", Stamp(0), error)


def _stamp(status: os.stat_result) -> Stamp:
    return tuple.__new__(Stamp, (status.st_size, status.st_mtime_ns, status.st_ino & _INODE_BITS, ""))


def _pread(fd: int, offset: int, nbytes: int) -> bytes:
    data = os.pread(fd, nbytes, offset)
    while len(data) < nbytes:
        more = os.pread(fd, nbytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _fill(fd: int, parts: Sequence[Part]) -> bool:
    """Read every part; return True if the file ended first."""
    for _, _, offset, out in parts:
        count = os.preadv(fd, (out if len(out) <= _MOST_NBYTES else out[:_MOST_NBYTES],), offset)
        while count < len(out):
            more = os.preadv(fd, (out[count : count + _MOST_NBYTES],), offset + count)
            if not more:
                return True
            count += more
    return False
