"""Rows that were read before, kept in the memory of this process: they travel by name, and are found where they lie.

A plan names what it reads and holds none of it, so that it can travel to the tasks that read. So rows in memory are
known by a key in the process that keeps them, as long as a dataset made of them lives; another process does not find
them, and says so.
"""

import io
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import BinaryIO
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, ShardReadError
from lazyshards.storage.base import Entry, Head, OnChange, Part, Stamp

__all__ = ["MemoryStorage", "keep_array"]

_NAME = "rows"


class _Kept:
    """An array that is kept for whoever refers to it."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: npt.NDArray[np.generic]) -> None:
        self.array = array


_kept: "WeakValueDictionary[str, _Kept]" = WeakValueDictionary()
_numbers = count(1)
_lock = Lock()


class MemoryStorage:
    """The bytes of one array of this process. Made by `keep_array`.

    Parameters
    ----------
    key : str
        By which it is found.
    kept : object, optional
        What keeps it; one that was pickled is not what keeps it.
    """

    __slots__ = ("_kept", "key")

    on_change: OnChange = "raise"
    gap_nbytes = 4 << 10
    window_nbytes = 512 << 10

    def __init__(self, key: str, kept: _Kept | None = None) -> None:
        self.key = key
        self._kept = kept

    def __reduce__(self) -> "tuple[object, tuple[str]]":
        return _find, (self.key,)

    def __copy__(self) -> "MemoryStorage":
        return self

    def __deepcopy__(self, memo: object) -> "MemoryStorage":
        """Return this one: what a copy of a dataset has must be kept as well."""
        return self

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, MemoryStorage) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"MemoryStorage({self.key!r})"

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """The array, read-only.

        Raises
        ------
        ShardReadError
            If nothing keeps it any more.
        """
        kept = self._kept or _kept.get(self.key)
        if kept is None:
            raise ShardReadError(f"{self.path!r} is gone: the dataset that kept it in memory was dropped")
        return kept.array

    @property
    def root(self) -> str:
        """What its path begins with."""
        return f"memory of this process/{self.key}/"

    @property
    def path(self) -> str:
        """The name of its rows."""
        return self.root + _NAME

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self.array.reshape(-1).view(np.uint8)

    def find(self, path: str) -> tuple[str, list[Entry]]:
        """Return that it is a file, or that nothing else is here."""
        return ("file", [Entry(path, False)]) if path == self.path else ("missing", [])

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        """Return the first bytes."""
        data = self._bytes()
        return [Head(data[:nbytes].tobytes(), Stamp(len(data))) for _ in paths]

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        data = self._bytes()
        return [data[offset : offset + nbytes].tobytes() for _, offset, nbytes in ranges]

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Fill every part's ``out``."""
        data = self._bytes()
        for part in parts:
            np.copyto(np.frombuffer(part.out, np.uint8), data[part.offset : part.offset + len(part.out)])

    def open(self, path: str) -> BinaryIO:
        """Return the bytes as a file."""
        return io.BytesIO(self._bytes().tobytes())

    def local_path(self, path: str) -> str | None:
        """Return None: no disk holds it."""
        return None


def keep_array(array: npt.NDArray[np.generic], mark: str) -> MemoryStorage:
    """Return the storage of an array, which is kept as long as that lives.

    Parameters
    ----------
    array : ndarray
        C-contiguous; nobody may change it any more.
    mark : str
        What the rows are: where ranks run one program, their keys are the same if they keep the same.
    """
    array.flags.writeable = False
    kept = _Kept(array)
    with _lock:
        key = f"{next(_numbers)}-{mark[:8]}"
        _kept[key] = kept
    return MemoryStorage(key, kept)


def _find(key: str) -> MemoryStorage:
    if key not in _kept:
        raise FormatError(
            "the rows of a dataset that was persisted are in the memory of the process that did it, as long as the "
            "dataset lives, and are not known here: use cache(path) to share them by files"
        )
    return MemoryStorage(key)
