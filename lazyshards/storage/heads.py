"""The first bytes and the stamps of many files of this machine, by a small C library where it was built."""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from lazyshards.native import find_library
from lazyshards.storage.base import Head, Stamp

__all__ = ["OPENED", "read_heads", "stamp_of_status"]

OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""How files are opened: a named pipe that took a shard's name must not hang what reads it."""
_PROBE = 32
"""Heads read one after the other before it is decided whether threads would help."""
_SLOW_SECONDS = 60e-6
"""Seconds a head above which reading waits on a device; in the page cache it takes about 4 us."""
_THREADS = 16
"""Threads that read heads from a device; more gained nothing in the measurements of docs/explanation/decisions.md."""
_PIECE = 256
"""Heads that are worth a thread's start."""
_MOST_NBYTES = 64 << 20
"""Bytes of heads that are read together."""
_INODE_BITS = 0x7FFF_FFFF_FFFF_FFFF
"""A layout holds inodes as int64, and some file systems use all 64 bits."""


def stamp_of_status(status: os.stat_result) -> Stamp:
    """Return the stamp of a file of that status."""
    return tuple.__new__(Stamp, (status.st_size, status.st_mtime_ns, status.st_ino & _INODE_BITS, ""))


def read_heads(paths: Sequence[str], nbytes: int) -> list[Head]:
    """Return the first bytes and the stamp of every file, errors in place; of no bytes, the stamps alone.

    On a device threads are worth as many times as they are, since they wait. In the page cache they only fight over the
    interpreter lock, but for the C library, which lets go of it. The first few reads decide.
    """
    library = find_library()
    read: Callable[[Sequence[str]], list[Head]] = partial(_read_by_python, nbytes=nbytes)
    if library is not None:
        read = partial(_read_by_library, nbytes=nbytes)
    start = time.perf_counter()
    heads = read(paths[:_PROBE])
    rest = paths[_PROBE:]
    if time.perf_counter() - start >= _PROBE * _SLOW_SECONDS:
        threads, count = _THREADS, max(1, len(rest) // (8 * _THREADS))
    else:
        threads = 1 if library is None else len(os.sched_getaffinity(0))
        count = max(_PIECE, -(-len(rest) // threads))
    count = min(count, max(1, _MOST_NBYTES // max(1, nbytes)))
    pieces = [rest[i : i + count] for i in range(0, len(rest), count)]
    if threads == 1 or len(pieces) < 2:
        for piece in pieces:
            heads += read(piece)
        return heads
    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(read, pieces):
            heads += found
    return heads


def _read_by_library(paths: Sequence[str], nbytes: int) -> list[Head]:
    joined = "\0".join([*paths, ""])
    library = find_library()
    try:
        names = os.fsencode(joined)
    except ValueError:  # characters that no file name has: one of them is at fault
        names = b""
    if library is None or names.count(b"\0") != len(paths):
        return _read_by_python(paths, nbytes)
    data = bytearray(len(paths) * nbytes)
    facts = np.empty((len(paths), 5), np.int64)
    into = (ctypes.c_char * len(data)).from_buffer(data) if data else None
    library.lazyshards_heads(names, len(paths), nbytes, into, facts.ctypes.data)
    heads, new, at, content = [], tuple.__new__, 0, bytes(data)
    for got, size, mtime_ns, inode, error in facts.tolist():
        if error:
            heads.append(_failed(OSError(error, os.strerror(error))))
        else:
            heads.append(new(Head, (content[at : at + got], new(Stamp, (size, mtime_ns, inode, "")), None)))
        at += nbytes
    return heads


def _read_by_python(paths: Sequence[str], nbytes: int) -> list[Head]:
    """Read heads one after the other, with as little around the system calls as can be: one is made for every shard."""
    heads: list[Head] = []
    if not nbytes:
        for path in paths:
            try:
                heads.append(Head(b"", stamp_of_status(os.stat(path))))
            except (OSError, ValueError) as exc:  # it is that file's own
                heads.append(_failed(exc))
        return heads
    open_, fstat, pread, close, new = os.open, os.fstat, os.pread, os.close, tuple.__new__
    for path in paths:
        try:
            fd = open_(path, OPENED)
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
