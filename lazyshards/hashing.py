"""Content hashes: xxh3 where the package xxhash is installed, else BLAKE2b, which is part of Python."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

from lazyshards.errors import LazyShardsError
from lazyshards.storage.base import Part, Stamp, Storage

__all__ = ["DIGEST_NBYTES", "Hasher", "best_algorithm", "feed_file", "hash_file", "new_hasher"]

DIGEST_NBYTES = 16
"""Bytes of every digest."""
_BLOCK_NBYTES = 4 << 20
"""Bytes of a file that are held at a time."""


class Hasher(Protocol):
    """What takes bytes and gives their digest."""

    def update(self, data: memoryview | bytes, /) -> object:
        """Take more bytes."""
        ...

    def digest(self) -> bytes:
        """Return the digest of all bytes taken."""
        ...


def best_algorithm() -> str:
    """Return the name of the fastest algorithm that is here: ``"xxh3"`` or ``"blake2b"``."""
    return "blake2b" if _xxh3() is None else "xxh3"


def new_hasher(algorithm: str) -> Hasher:
    """Return a hasher of that name, of 128 bits.

    Raises
    ------
    LazyShardsError
        If it is not known, or its library is not here.
    """
    if algorithm == "blake2b":
        return blake2b(digest_size=DIGEST_NBYTES)
    make = _xxh3() if algorithm == "xxh3" else None
    if make is None:
        what = "needs xxhash: pip install xxhash" if algorithm == "xxh3" else "is not known, expected xxh3 or blake2b"
        raise LazyShardsError(f"the content hash {algorithm!r} {what}")
    return make()


def _xxh3() -> Callable[[], Hasher] | None:
    try:
        from xxhash import xxh3_128
    except ImportError:
        return None
    made: Callable[[], Hasher] = xxh3_128
    return made


def hash_file(path: str, stamp: Stamp, storage: Storage, algorithm: str) -> bytes:
    """Return the digest of all bytes of a file, held a few megabytes at a time.

    Parameters
    ----------
    path : str
    stamp : Stamp
        What the file must be; its size says how much is read.
    storage : Storage
    algorithm : str
        See `new_hasher`.

    Raises
    ------
    ShardReadError
        If it cannot be read, or is not the file that the stamp belongs to.
    """
    hasher = new_hasher(algorithm)
    feed_file(hasher, path, stamp, storage)
    return hasher.digest()


def feed_file(hasher: Hasher, path: str, stamp: Stamp, storage: Storage) -> None:
    """Give a hasher all bytes of a file; for the arguments and errors see `hash_file`."""
    block = memoryview(bytearray(min(_BLOCK_NBYTES, max(1, stamp.size))))
    for start in range(0, stamp.size, len(block)):
        part = block[: min(len(block), stamp.size - start)]
        storage.fetch_into([Part(path, stamp, start, part)])
        hasher.update(part)
