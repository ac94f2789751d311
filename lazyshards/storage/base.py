"""What a storage is: where bytes come from, and the mark by which a file is known again."""

from collections.abc import Sequence
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias

__all__ = ["Entry", "Head", "OnChange", "Part", "Stamp", "Storage", "check_on_change"]

OnChange: TypeAlias = str
"""What to do about a shard that changed since it was opened: ``"raise"``, ``"warn"``, ``"refresh"`` or ``"ignore"``.

A storage raises for ``"refresh"`` as for ``"raise"``: it is the dataset that then describes the shard anew.
"""


def check_on_change(on_change: object) -> str:
    """Return ``on_change`` if it is a policy, else raise ValueError."""
    if on_change not in ("raise", "warn", "refresh", "ignore"):
        raise ValueError(f'on_change={on_change!r} is not a policy: use "raise", "warn", "refresh" or "ignore"')
    return str(on_change)


class Stamp(NamedTuple):
    """How a file is known again: it changed if any of these differs."""

    size: int
    """Bytes."""
    mtime_ns: int = 0
    """Time of the last change, nanoseconds since 1970; 0 where the storage has none."""
    inode: int = 0
    """Inode number; 0 where the storage has none."""
    etag: str = ""
    """Entity tag or version of an object store; empty where there is none."""


class Entry(NamedTuple):
    """One name that a listing found."""

    path: str
    """Path or URL, as the other methods of the storage take it."""
    is_directory: bool
    """Whether it is a directory rather than a file."""


class Head(NamedTuple):
    """The first bytes of a file and its stamp, or the error met instead."""

    data: bytes
    """At most as many bytes as were asked for; fewer if the file is shorter."""
    stamp: Stamp
    """Stamp of the file that ``data`` came from."""
    error: OSError | None = None
    """What went wrong; then ``data`` is empty."""


class Part(NamedTuple):
    """One read: ``len(out)`` bytes at ``offset`` of a file, straight into ``out``."""

    path: str
    """Path of the file."""
    stamp: Stamp
    """Stamp that the file had when it was opened."""
    offset: int
    """First byte."""
    out: memoryview
    """Where the bytes go: writable, contiguous, of bytes."""


class Storage(Protocol):
    """Where bytes come from. Thread-safe; picklable, built again from a small spec in any process."""

    @property
    def on_change(self) -> OnChange:
        """What to do about a shard that changed since it was opened."""
        ...

    @property
    def gap_nbytes(self) -> int:
        """Unwanted bytes between two wanted ranges that are cheaper to read than to skip."""
        ...

    @property
    def window_nbytes(self) -> int:
        """Bytes of staged reads that are worth having under way together."""
        ...

    def find(self, path: str) -> tuple[str, list[Entry]]:
        """Return what ``path`` is (``"file"``, ``"directory"``, ``"glob"``, ``"missing"``) and the entries found there.

        Listings are fresh: never cached. A path that exists is literal, even if it holds glob characters. Entries
        come in no particular order; hidden names are included in a directory.
        """
        ...

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        """Return the first ``nbytes`` bytes and the stamp of every file, errors in place, concurrently if that pays.

        Of no bytes, the stamps alone: from the last listing if that told them, and as cheaply as can be if not.
        """
        ...

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each ``(path, offset, nbytes)``; shorter only where the file ends."""
        ...

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Fill every part's ``out``, or raise ShardReadError naming the file.

        A file whose stamp differs is handled as ``on_change`` says, so that old and new rows never mix.
        """
        ...

    def open(self, path: str) -> BinaryIO:
        """Return a seekable binary file, for libraries that insist on one."""
        ...

    def local_path(self, path: str) -> str | None:
        """Return the path of the file on this machine's disk, or None if it is not there."""
        ...
