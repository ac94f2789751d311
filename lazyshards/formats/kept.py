"""What was read and is likely to be asked for again, kept by a process up to a number of bytes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["DECODED", "Kept"]

T = TypeVar("T")


class Kept(Generic[T]):
    """The most recently used of things that can be made again.

    Parameters
    ----------
    most_nbytes : int
        Bytes of all that is kept; what alone is larger is not.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._clear()
        # In a child process the lock may be one that another thread held when the process was forked.
        os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._nbytes = 0

    def get(self, key: Hashable) -> T | None:
        """Return what is kept, or None."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: Hashable, value: T, nbytes: int) -> None:
        """Keep it, unless it alone is too large."""
        if nbytes > self._most_nbytes:
            return
        with self._lock:
            if key in self._items:
                self._nbytes -= self._items.pop(key)[1]
            self._items[key] = value, nbytes
            self._nbytes += nbytes
            while self._nbytes > self._most_nbytes:
                self._nbytes -= self._items.popitem(last=False)[1][1]


DECODED: Kept[npt.NDArray[np.generic]] = Kept(64 << 20)
"""Decoded chunks, of any format, of which a part was asked for: the rest is likely to be asked for next."""
