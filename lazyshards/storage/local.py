"""Files of this machine: positional reads straight into the destination."""

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from lazyshards.errors import ShardReadError
from lazyshards.native import find_library
from lazyshards.storage.base import Entry, Head, OnChange, Part
from lazyshards.storage.changes import report_change
from lazyshards.storage.gather import copy_into
from lazyshards.storage.heads import OPENED, read_heads, stamp_of_status

__all__ = ["LocalStorage"]

_MOST_NBYTES = 0x7FFFF000
"""Bytes that one read call of Linux returns at most."""


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
        """Return the first bytes and the stamp of every file, errors in place."""
        return read_heads(paths, nbytes)

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each ``(path, offset, nbytes)``; shorter only where the file ends."""
        found = []
        for path, offset, nbytes in ranges:
            try:
                fd = os.open(path, OPENED)
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
                fd = os.open(path, OPENED)
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
            now = stamp_of_status(status)
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
            return open(path, "rb", opener=lambda name, _: os.open(name, OPENED))
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
