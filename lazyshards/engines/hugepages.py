"""Huge pages below a result: the page faults of fresh memory are most of a first load's time, if there are any free.

Where memory is full of cached files, which is where data was read before, the kernel has to move pages about to make
huge ones, and a load that asks for them takes twice as long and more. So they are asked for where they lie ready.
"""

import ctypes
import mmap
import os
from pathlib import Path

__all__ = ["HUGE_NBYTES", "advise", "are_free"]

HUGE_NBYTES = 2 << 20
"""Bytes of a huge page on x86-64 and 64-bit Arm."""
_LEAST_NBYTES = 4 * HUGE_NBYTES
"""Bytes below which the advice gains nothing."""

_libc = ctypes.CDLL(None)


def are_free(nbytes: int, text: str | None = None) -> bool:
    """Return whether so many bytes lie ready in huge pages; without an answer from the kernel, that they do.

    Parameters
    ----------
    nbytes : int
    text : str, optional
        What the kernel says, for tests: by default ``/proc/buddyinfo``.

    Examples
    --------
    >>> are_free(8 << 20, "Node 0, zone Normal 9 0 0 0 0 0 0 0 0 2 1")
    True
    >>> are_free(9 << 20, "Node 0, zone Normal 9 0 0 0 0 0 0 0 0 2 1")
    False
    """
    if text is None:
        try:
            text = Path("/proc/buddyinfo").read_text(encoding="ascii")
        except OSError:
            return True
    page = os.sysconf("SC_PAGE_SIZE")
    free = 0
    for line in text.splitlines():
        counts = line.partition("zone")[2].split()[1:]
        free += sum(int(count) * (page << order) for order, count in enumerate(counts) if page << order >= HUGE_NBYTES)
    return free >= nbytes


def advise(address: int, nbytes: int, wanted: int) -> None:
    """Ask for huge pages below a piece of memory that is not touched yet, if as many as are ``wanted`` in all are free.

    Parameters
    ----------
    address, nbytes : int
    wanted : int
        Bytes that are filled at the same time, this piece among them.
    """
    if nbytes < _LEAST_NBYTES or not are_free(wanted):
        return
    start = address // HUGE_NBYTES * HUGE_NBYTES
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), advice)
