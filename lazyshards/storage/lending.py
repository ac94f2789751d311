"""Bytes of local files as they lie in the page cache, lent for a while: looked at where they are, and not copied.

Where the C library was not built nothing is lent, and the bytes are read.
"""

import ctypes
import os
import threading
import weakref
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from lazyshards.native import find_library
from lazyshards.storage.base import Stamp

__all__ = ["Lender"]

_MOST_MAPS = 256
"""Files whose maps are kept; the library has room for four times as many, since those that are lent stay as well."""


class _Map:
    """A file's bytes in the address space, as long as this lives."""

    __slots__ = ("__weakref__", "at", "mark", "name", "number", "stamp", "view")

    def __init__(self, number: int, name: bytes, mark: tuple[int, ...], start: int) -> None:
        self.number = number
        self.name = name
        self.mark = mark
        self.stamp = np.array(mark, np.int64)
        self.at = self.stamp.ctypes.data
        self.view: npt.NDArray[np.uint8] = np.frombuffer(
            memoryview((ctypes.c_uint8 * mark[0]).from_address(start)), np.uint8
        )
        self.view.flags.writeable = False
        library = find_library()
        assert library is not None
        weakref.finalize(self, library.lazyshards_unmap_lent, number).atexit = False


_lock = threading.Lock()
_maps: "OrderedDict[str, _Map]" = OrderedDict()


def _forget_lock() -> None:
    """After a fork another thread may have held it; the maps are still there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _find(library: ctypes.CDLL, path: str, stamp: Stamp) -> _Map | None:
    """Return a map of the file that has this stamp, or None if there is no such file, or it cannot be mapped."""
    mark = tuple(stamp[:3])
    with _lock:
        known = _maps.get(path)
        if known is not None and known.mark == mark:
            _maps.move_to_end(path)
            return known
        name, start = os.fsencode(path), ctypes.c_void_p()
        number: int = library.lazyshards_map_to_lend(name, np.array(mark, np.int64).ctypes.data, ctypes.byref(start))
        if number < 0 or start.value is None:
            return None
        made = _maps[path] = _Map(number, name, mark, start.value)
        while len(_maps) > _MOST_MAPS:
            _maps.popitem(last=False)
        return made


class Lender:
    """Lends bytes of files until all of them are taken back.

    A file that is changed or cut off meanwhile is noticed then, and ends nothing: what was made of its bytes is to be
    thrown away, and the bytes are to be read, which says what is wrong.
    """

    __slots__ = ("_lent",)

    def __init__(self) -> None:
        self._lent: list[tuple[str, _Map]] = []

    def lend(self, path: str, stamp: Stamp, offset: int, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return bytes of a file, read-only, which nobody may look at once they are taken back.

        Parameters
        ----------
        path : str
        stamp : Stamp
            Of the file that was opened.
        offset, nbytes : int

        Returns
        -------
        ndarray of uint8, (nbytes,)
            None if they are not in the page cache, the file is not the one that was opened, or it cannot be mapped.
        """
        library = find_library()
        found = None if library is None else _find(library, path, stamp)
        if library is None or found is None or library.lazyshards_lend(found.number, offset, nbytes):
            return None
        self._lent.append((path, found))
        return found.view[offset : offset + nbytes]

    def take_back(self) -> bool:
        """Take all back, and return whether what was lent was the files that were opened all the time."""
        library, good = find_library(), True
        assert library is not None or not self._lent
        while self._lent:
            path, known = self._lent.pop()
            if library.lazyshards_take_back(known.number, known.name, known.at):  # type: ignore[union-attr]  # as asserted
                good = False
                with _lock:
                    if _maps.get(path) is known:
                        del _maps[path]
        return good
