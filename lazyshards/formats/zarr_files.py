"""The files of a Zarr store: of this machine one after the other, of others several at a time."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from lazyshards.formats.zarr_codecs import Data
from lazyshards.storage.base import Storage

__all__ = ["LocalFiles", "Place", "RemoteFiles", "join"]

_MOST_AHEAD = 64
"""Chunks fetched together at most."""
_MOST_READ_NBYTES = 1 << 30
"""Bytes of one read: some systems refuse 2 GiB and more."""


def join(folder: str, name: str) -> str:
    """Return the path of something in a directory, which may lie in an archive (``zip://a.zarr::file.zip``)."""
    link, separator, rest = folder.partition("::")
    return f"{link.rstrip('/')}/{name}{separator}{rest}"


class Place(NamedTuple):
    """Where a chunk lies."""

    path: str
    """The file."""
    offset: int = 0
    """First byte."""
    nbytes: int | None = None
    """Bytes; None for all of the file."""


class LocalFiles:
    """Files of this machine, one after the other, by positional reads into one buffer."""

    ahead = 1

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._path = ""
        self._fd = -1
        self._size = 0
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, ""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, or None if it is not there."""
        if path != self._path:
            self._close()
            try:
                self._fd = os.open(self._storage.local_path(path) or path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            self._path = path
            self._size = os.fstat(self._fd).st_size
        return self._size

    def stamp(self) -> tuple[int, ...]:
        """Return what tells the file whose size was asked for from what it was before."""
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ino

    def read_into(self, path: str, offset: int, out: memoryview) -> bool:
        """Fill ``out`` from a file whose size was asked for; return False if the file ends first."""
        assert path == self._path
        done = 0
        while done < len(out):
            count = os.preadv(self._fd, [out[done : done + _MOST_READ_NBYTES]], offset + done)
            if not count:
                return False
            done += count
        return True

    def fetch(self, place: Place, size: int, most: int) -> memoryview:
        """Return what lies at a place in a file of ``size`` bytes, at most ``most``; nothing if the file ends first.

        It is valid until the next is fetched.
        """
        count = min(size if place.nbytes is None else place.nbytes, most)
        if len(self._buffer) < count:
            self._buffer = bytearray(count + count // 4)
        view = memoryview(self._buffer)[:count]
        return view if self.read_into(place.path, place.offset, view) else view[:0]


class RemoteFiles:
    """Files elsewhere, several at a time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.ahead = _MOST_AHEAD

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, or None if it is not there."""
        (head,) = self._storage.heads([path], 1)
        if head.error is None:
            return head.stamp.size
        if isinstance(head.error, FileNotFoundError):
            return None
        raise head.error

    def fetch(self, places: Sequence[Place], most: int) -> list[Data | None]:
        """Return what lies at each place; None where the file is not there."""
        if all(place.nbytes is not None for place in places):
            return list(self._storage.fetch([(path, offset, nbytes or 0) for path, offset, nbytes in places]))
        found: list[Data | None] = []
        for head in self._storage.heads([place.path for place in places], most):
            if head.error is not None and not isinstance(head.error, FileNotFoundError):
                raise head.error
            found.append(None if head.error is not None else head.data)
        return found
