"""Local files read into memory front to back, beside a shuffled epoch, where that is cheaper than row by row."""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from lazyshards.engines.bringup import free_nbytes
from lazyshards.layout import Layout
from lazyshards.native import find_library
from lazyshards.storage import LocalStorage
from lazyshards.storage.gather import mapped_at

__all__ = ["Warming", "is_cold", "plan_warming"]

_PROBES = 16
"""Places of the files that are looked at."""
_COLD = 0.25
"""Share of them that is not in memory, from which reading ahead is worth it."""
_FITS = 0.5
"""Share of the free memory that the files may take."""
_PAGE_NBYTES = 4 << 10
"""What reading a row of a few bytes takes from a device, at least."""
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_READ_NBYTES = 4 << 20
"""Bytes of one read: long enough for any device, short enough to be given up at once."""


@dataclass(frozen=True, slots=True)
class Warming:
    """Files that will be read front to back, so that the rows of a shuffled epoch are found in memory."""

    paths: tuple[str, ...] = ()
    """The files; none if it is not worth it."""
    nbytes: int = 0
    """Bytes of all of them."""

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Read the files on a thread of its own, until all are read or this is left."""
        if not self.paths:
            yield
            return
        leave = threading.Event()
        thread = threading.Thread(target=self._read, args=(leave,), name="lazyshards-warming", daemon=True)
        thread.start()
        try:
            yield
        finally:
            leave.set()
            thread.join()

    def _read(self, leave: threading.Event) -> None:
        scratch = np.empty(_READ_NBYTES, np.uint8).data
        _hush(1)
        try:
            for path in self.paths:
                if leave.is_set() or not _read_through(path, scratch, leave):
                    return
        finally:
            _hush(-1)


def _hush(change: int) -> None:
    """Keep gathers from asking for all their rows at once: a deep queue of single rows starves who reads in order."""
    library = find_library()
    if library is not None:
        library.lazyshards_hush(change)


# A child that was forked meanwhile has not got the thread.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _hush(0))


def plan_warming(layout: Layout, rows: int) -> Warming:
    """Return what is to be read front to back before ``rows`` of a layout are read one by one.

    Nothing, unless the rows lie as plain bytes in local files that are mostly not in memory, all of them fit there, and
    reading each row with the pages that it lies in would take as many bytes from the device.

    Parameters
    ----------
    layout : Layout
        Of the shards that hold the rows.
    rows : int
        How many rows will be read, in no order.
    """
    nbytes = int(layout.stamps[:, 0].sum())
    if rows * (layout.row_nbytes + _PAGE_NBYTES) < nbytes or nbytes > _FITS * free_nbytes() or not is_cold(layout):
        return Warming()
    return Warming(tuple([layout.path(i) for i in range(len(layout))]), nbytes)


def is_cold(layout: Layout) -> bool:
    """Return whether plain bytes in local files are mostly not in memory, by a look at a few places.

    Parameters
    ----------
    layout : Layout
    """
    if type(layout.storage) is not LocalStorage or layout.sources or not layout.rows or not layout.row_nbytes:
        return False
    count = min(_PROBES, layout.rows)
    rows = [i * (layout.rows - 1) // max(1, count - 1) for i in range(count)]
    return sum(_would_wait(layout, row) for row in rows) >= _COLD * count


def _would_wait(layout: Layout, row: int) -> bool:
    """Return whether reading a row would wait for a device."""
    shard = layout.shard_of(row)
    offset = layout.offset(shard) + (row - layout.start_stop(shard)[0]) * layout.row_nbytes
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    resident = ctypes.c_ubyte()
    # The map through which the row will be copied, most likely; it says no more than others do of what is in memory.
    mapped = mapped_at(layout.path(shard), layout.stamps[shard])
    if mapped is not None:
        failed = _libc().mincore(mapped + start, 1, ctypes.byref(resident))
        return not failed and not resident.value & 1
    try:
        with open(layout.path(shard), "rb", buffering=0, opener=_open) as file:
            # Private, so that ctypes may ask where it lies: that is given for what can be written only.
            page = mmap.mmap(file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=_READ_WRITE, offset=start)
    except (OSError, ValueError):  # a file that is gone, or ended before: whoever reads the row will say so
        return False
    failed = _libc().mincore(ctypes.byref(ctypes.c_char.from_buffer(page)), 1, ctypes.byref(resident))
    return not failed and not resident.value & 1


@cache
def _libc() -> ctypes.CDLL:
    """Return the library of the system's calls; a read that may not wait would tell as well, but begins to read."""
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc


def _read_through(path: str, scratch: memoryview, leave: threading.Event) -> bool:
    """Read a file into memory; return False if that is to end, or cannot be: whoever needs the file will say why."""
    try:
        with open(path, "rb", buffering=0, opener=_open) as file:
            while file.readinto(scratch):
                if leave.is_set():
                    return False
    except OSError:
        return False
    return True


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe that took a shard's name must not hang what reads it
