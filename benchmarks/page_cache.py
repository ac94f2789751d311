"""Put files into the page cache, take them out of it, and see which of their pages are there."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["drop", "resident_nbytes", "warm"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def warm(paths: Iterable[Path]) -> None:
    """Read all of each file, so that it is in the page cache."""
    buffer = bytearray(1 << 22)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget the pages of each file; pages that some process has mapped stay."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_nbytes(paths: Iterable[Path]) -> int:
    """Return how many bytes of the files are in the page cache, in whole pages."""
    return sum(map(_resident_pages, paths)) * mmap.PAGESIZE


def _resident_pages(path: Path) -> int:
    nbytes = path.stat().st_size
    if not nbytes:
        return 0
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    mapped = np.memmap(path, mode="r")
    if _LIBC.mincore(mapped.ctypes.data, nbytes, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return int(np.count_nonzero(pages & 1))
