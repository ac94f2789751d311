"""Which parts of Legate's memory pool our results take, so that one that does not fit is refused, not launched.

Legate has no way to ask for free memory, and running out of it aborts the process. An array needs one free piece, so
sums are not enough: two small results in the wrong places leave no room for a large one.

A result that was dropped may live on in a view, ``result[:, 0]``, which holds all of it. So what was dropped counts as
taken until a look at all arrays there are shows that none of them lies in its memory, which `Ledger.see` is told.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

__all__ = ["Ledger", "find_pool"]


class Ledger:
    """The pieces of one pool that are taken.

    Parameters
    ----------
    nbytes : int
        Size of the pool, bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._start: int | None = None
        self._placed: dict[int, tuple[int, int]] = {}
        self._unplaced: dict[int, int] = {}
        self._unplaced_nbytes = 0  # their sum, kept: it is asked for at every batch
        self._keys: dict[int, Hashable] = {}
        self._dropped: set[int] = set()
        self._foreign_nbytes = 0
        self._next = 0
        # Reentrant: the collector may drop a result while a piece is being noted.
        self._lock = threading.RLock()

    @property
    def live_nbytes(self) -> int:
        """Bytes of all pieces that are taken."""
        with self._lock:
            return sum([nbytes for _, nbytes in self._placed.values()]) + self._unplaced_nbytes + self._foreign_nbytes

    def place_pool(self, start: int | None) -> None:
        """Say at which address the pool begins; None if that is not known."""
        self._start = start

    @property
    def is_placed(self) -> bool:
        """Whether it is known where the pool begins."""
        return self._start is not None

    def add(self, nbytes: int, key: Hashable = None) -> int:
        """Take a piece whose place is not known yet, and return its number.

        Parameters
        ----------
        nbytes : int
        key : hashable, optional
            What arrays that lie in the same memory have in common, for `see`; None if that is not known.
        """
        with self._lock:
            self._next += 1
            self._unplaced[self._next] = nbytes
            self._unplaced_nbytes += nbytes
            if key is not None:
                self._keys[self._next] = key
            return self._next

    def place(self, number: int, address: int) -> None:
        """Say at which address a piece lies; what was dropped and lay there is gone."""
        with self._lock:
            if number in self._unplaced:
                nbytes = self._unplaced.pop(number)
                self._unplaced_nbytes -= nbytes
            elif number in self._placed:
                nbytes = self._placed[number][1]
            else:
                return
            self._placed[number] = (address, nbytes)
            for other in list(self._dropped - {number}):
                start, size = self._placed.get(other, (0, 0))
                if start < address + nbytes and address < start + size:
                    self.free(other)

    def drop(self, number: int) -> None:
        """Say that the result in a piece was dropped; views of it may be alive."""
        with self._lock:
            if number in self._keys:
                self._dropped.add(number)
            else:
                self.free(number)

    def free(self, number: int) -> None:
        """Say that nobody holds a piece any more, nor any view of it."""
        with self._lock:
            self._placed.pop(number, None)
            self._unplaced_nbytes -= self._unplaced.pop(number, 0)
            self._keys.pop(number, None)
            self._dropped.discard(number)

    def see(self, alive: Mapping[Hashable, int]) -> None:
        """Free the pieces of dropped results in whose memory no array lies, and take note of all other arrays.

        Parameters
        ----------
        alive : mapping
            By key, the bytes of the largest array that lies there.
        """
        with self._lock:
            for number in [number for number in list(self._dropped) if self._keys[number] not in alive]:
                self.free(number)
            ours = set(self._keys.values())
            self._foreign_nbytes = sum(nbytes for key, nbytes in alive.items() if key not in ours)

    def largest_gap(self) -> int:
        """Return the bytes of the largest piece that is free.

        Pieces whose place is not known are taken off it, as if each lay just there.
        """
        with self._lock:
            pieces = sorted(self._placed.values())
            unplaced = self._unplaced_nbytes + self._foreign_nbytes
        if self._start is None:
            return max(0, self.nbytes - self.live_nbytes)
        largest, at = 0, self._start
        end = self._start + self.nbytes
        for address, nbytes in pieces:
            if self._start <= address < end:
                largest = max(largest, address - at)
                at = max(at, address + nbytes)
        return max(0, max(largest, end - at) - unplaced)


def find_pool(address: int, nbytes: int) -> int | None:
    """Return where the pool of ``nbytes`` that holds ``address`` begins, or None if it cannot be told.

    The pool is one reservation, which the kernel lists in one piece or in adjoining ones that add up to its size.
    """
    try:
        lines = Path("/proc/self/maps").read_bytes().split(b"\n")  # names of mapped files are bytes of any kind
    except OSError:
        return None
    pieces = [tuple(int(text, 16) for text in line.split(maxsplit=1)[0].split(b"-")) for line in lines if line]
    return _find_run(pieces, address, nbytes)


def _find_run(pieces: Sequence[tuple[int, ...]], address: int, nbytes: int) -> int | None:
    """Return the start of the adjoining pieces that hold ``address`` and have ``nbytes`` together."""
    holder = next((i for i, (low, high) in enumerate(pieces) if low <= address < high), None)
    if holder is None:
        return None
    first = holder
    while True:
        start = pieces[first][0]
        last = first
        while pieces[last][1] - start < nbytes and last + 1 < len(pieces) and pieces[last + 1][0] == pieces[last][1]:
            last += 1
        if last >= holder and pieces[last][1] - start == nbytes:
            return start
        if not first or pieces[first - 1][1] != start:
            return None
        first -= 1
