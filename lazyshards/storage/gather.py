"""Bytes of local files, copied out of memory maps by a small C library: many rows in one call, or one run of them.

Where the library was not built, there are no such reads, and the positional ones serve.
"""

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lazyshards.native import find_library
from lazyshards.storage.base import Part

__all__ = ["copy_into", "gather_into", "mapped_at"]

_MOST_MAPS = 16_384
"""Maps that are kept; Linux allows a process 65,530 by default."""
_MOST_NBYTES = 1 << 44
"""Bytes of address space of the maps that are kept: an eighth of what a process has."""
_MOST_TABLES = 8
"""Sets of files whose maps are found together at once."""


class _Map:
    """A file's bytes in the address space, as long as this lives."""

    __slots__ = ("__weakref__", "copy", "mark", "nbytes", "path", "stamp", "start", "tells")

    def __init__(self, library: ctypes.CDLL, path: str, stamp: bytes, start: int, nbytes: int) -> None:
        self.path = ctypes.create_string_buffer(os.fsencode(path))
        self.stamp = stamp
        self.mark = tuple(np.frombuffer(stamp, np.int64).tolist())
        self.copy = library.lazyshards_copy
        self.tells = os.access(path, os.W_OK)
        """Whether the kernel says which of its pages are in the page cache: to those who may write it, at least."""
        self.start = start
        self.nbytes = nbytes
        if nbytes:  # an empty file has no map, and no row that is looked for in it
            weakref.finalize(self, library.lazyshards_unmap, start, nbytes).atexit = False


class _Table:
    """The maps of some files, as C takes them."""

    __slots__ = ("maps", "names", "starts")

    def __init__(self, maps: Sequence[_Map]) -> None:
        self.maps = maps  # held, so that they stay
        self.starts = np.array([each.start for each in maps], np.uintp)
        self.names = np.array([ctypes.addressof(each.path) for each in maps], np.uintp)


_lock = threading.Lock()
_maps: "OrderedDict[str, _Map]" = OrderedDict()
_tables: "OrderedDict[tuple[str, str, bytes], _Table]" = OrderedDict()
_mapped_nbytes = 0
_read_once: set[str] = set()
"""Files that were read by position before: at the next time they are mapped."""


def _forget_lock() -> None:
    """After a fork another thread may have held it; the maps are still there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _find(library: ctypes.CDLL, path: str, stamp: npt.NDArray[np.int64]) -> _Map | None:
    """Return a map of the file that has this stamp, or None if there is no such file, or it cannot be mapped."""
    global _mapped_nbytes
    key = stamp.tobytes()
    known = _maps.get(path)
    if known is not None and known.stamp == key:
        _maps.move_to_end(path)
        return known
    nbytes = int(stamp[0])
    start = library.lazyshards_map(os.fsencode(path), stamp.ctypes.data) if nbytes else 0
    if nbytes and not start:
        return None
    if known is not None:
        _mapped_nbytes -= _maps.pop(path).nbytes
    made = _maps[path] = _Map(library, path, key, start, nbytes)
    _mapped_nbytes += nbytes
    while len(_maps) > _MOST_MAPS or (_mapped_nbytes > _MOST_NBYTES and len(_maps) > 1):
        # A gather under way holds its maps itself.
        _mapped_nbytes -= _maps.popitem(last=False)[1].nbytes
    return made


def mapped_at(path: str, stamp: npt.NDArray[np.int64]) -> int | None:
    """Return the address at which a file is mapped, as long as it is not forgotten; None if it cannot be.

    Parameters
    ----------
    path : str
    stamp : ndarray of int64, (3,)
        Of the file that was opened.
    """
    library = find_library()
    if library is None:
        return None
    with _lock:
        known = _find(library, path, stamp)
    return known.start if known is not None and known.nbytes else None


def copy_into(part: Part) -> bool:
    """Fill a part's ``out`` from the page cache, and return whether that was possible; if not, read it by position.

    It is for the files that are read again: mapping one costs as much as a few reads, and so do the page faults of the
    first copy out of a map. It is not possible where the bytes are not in the page cache, the file is not the one that
    was opened, changed meanwhile, or cannot be mapped.
    """
    path, stamp, offset, out = part
    known, mark = _maps.get(path), stamp[:3]
    if known is None or known.mark != mark:
        if path not in _read_once:
            if len(_read_once) >= _MOST_MAPS:
                _read_once.clear()
            _read_once.add(path)
            return False
        library = find_library()
        if library is None:
            return False
        with _lock:
            known = _find(library, path, np.array(mark, np.int64))
        if known is None:
            return False
    if not known.tells or not len(out) or offset + len(out) > known.nbytes:
        return False
    to = ctypes.c_char.from_buffer(out)
    done: int = known.copy(known.start, known.path, known.stamp, offset, len(out), ctypes.byref(to))
    return done == 0


def _table(library: ctypes.CDLL, root: str, names: Sequence[str], stamps: npt.NDArray[np.int64]) -> _Table | None:
    """Return the maps of files, or None if one is not what it was, or cannot be mapped."""
    key = (root, names[0], stamps.tobytes())
    with _lock:
        known = _tables.get(key)
        if known is not None:
            _tables.move_to_end(key)
            return known
        maps = []
        for name, stamp in zip(names, stamps, strict=True):
            found = _find(library, root + name, stamp)
            if found is None:
                return None
            maps.append(found)
        table = _tables[key] = _Table(maps)
        while len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
        return table


def gather_into(
    out: npt.NDArray[np.generic],
    rows: npt.NDArray[np.int64],
    root: str,
    names: Sequence[str],
    stamps: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
) -> bool:
    """Fill ``out`` with rows of files, and return whether that was possible; if not, what it holds is undefined.

    It is not where a file is not the one that was opened, changed meanwhile, or cannot be mapped: read it by position,
    which says what is wrong.

    Parameters
    ----------
    out : ndarray, (n, ...)
        C-contiguous.
    rows : ndarray of int64, (n,)
        Numbers of the rows, counted over all files.
    root : str
        What the paths of the files begin with.
    names : sequence of str
        The rest of each path.
    stamps : ndarray of int64, (files, 3)
        Size in bytes, mtime in ns and inode that each has; a row that does not lie within that size is not copied.
    ends : ndarray of int64, (files,)
        Rows up to and with each file.
    offsets : ndarray of int64, (files,)
        First byte of the rows in each file.
    """
    library = find_library()
    stamps, ends, offsets, rows = [np.ascontiguousarray(each) for each in (stamps, ends, offsets, rows)]
    table = None if library is None else _table(library, root, names, stamps)
    if library is None or table is None:
        return False
    places, touched = np.empty(len(rows), np.uintp), np.empty(len(ends), np.uint8)
    done = library.lazyshards_gather(
        table.starts.ctypes.data,
        table.names.ctypes.data,
        stamps.ctypes.data,
        ends.ctypes.data,
        offsets.ctypes.data,
        len(ends),
        rows.ctypes.data,
        len(rows),
        out.nbytes // len(rows),
        out.ctypes.data,
        places.ctypes.data,
        touched.ctypes.data,
    )
    return bool(done == 0)
