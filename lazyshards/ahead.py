"""Batches that are being read ahead: begun in order, small ones several at a time, and handed out in order."""

from collections import deque
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.errors import LazyShardsError
from lazyshards.samplers import Order, Shuffle
from lazyshards.selection import Rows

__all__ = ["Batch", "Pending", "ReadAhead", "Source", "most_together"]

_MOST_TOGETHER = 64
"""Batches that are read together at most."""
_GROWTH = 4
"""How many times as many batches are read together as the time before: the first one is waited for, so it is alone."""

Batch: TypeAlias = Any
"""An array of the engine's type, or a dict of them."""


class Pending(Protocol):
    """A batch that is being read."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for any more."""
        ...

    def result(self) -> Batch:
        """Wait for the batch, or raise what went wrong with it."""
        ...

    def cancel(self) -> None:
        """Give the batch up; returns when nothing is being read for it any more."""
        ...


class Source(Protocol):
    """What batches are taken from: rows counted from 0, in the order of the view."""

    @property
    def size(self) -> int:
        """Number of rows."""
        ...

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of a batch."""
        ...

    @property
    def together_nbytes(self) -> int:
        """Bytes of small batches that are read together; who keeps one of them keeps as many bytes alive."""
        ...

    @property
    def fingerprint(self) -> str:
        """What the rows are; an order and a saved state belong to it."""
        ...

    @property
    def title(self) -> str:
        """What is read by which engine, in few words, for a progress bar."""
        ...

    @property
    def description(self) -> str:
        """What the rows are, for a person whose saved state is refused."""
        ...

    def edges(self) -> npt.NDArray[np.int64]:
        """Return the rows at which a run of rows of one shard begins, and the number of rows at the end."""
        ...

    def order(self, shuffle: Shuffle, epoch: int) -> Order:
        """Return the order of an epoch, the same in every process."""
        ...

    def draw_seed(self) -> int:
        """Return a random seed, the same on every rank."""
        ...

    def reading(self, scattered: int = 0) -> AbstractContextManager[None]:
        """Return what must be entered while batches are read ahead: so many rows in no order, if any."""
        ...

    def warmed_nbytes(self, scattered: int) -> int:
        """Return the bytes of files that are read front to back while so many rows, in no order, are read ahead."""
        ...

    def begin(self, rows: Rows) -> Pending:
        """Begin to read rows."""
        ...

    def cost(self, rows: Rows) -> tuple[int, int, int]:
        """Return the shards that rows touch, and the requests and bytes that reading them takes."""
        ...


def most_together(batch_size: int, source: Source) -> int:
    """Return how many batches are read together at most: one, unless they are small.

    Parameters
    ----------
    batch_size : int
        Rows of a batch.
    source : Source
    """
    return max(1, min(_MOST_TOGETHER, source.together_nbytes // max(1, batch_size * source.row_nbytes)))


class ReadAhead:
    """The batches of an epoch from a position on, read ahead.

    Parameters
    ----------
    source : Source
    order : Order
        Of the epoch.
    start, stop : int
        Positions in the order at which the first batch begins and the last one ends.
    batch_size : int
        Rows of a full batch.
    prefetch : int
        Batches that are begun beside the next one before it is asked for; if none, each is read when it is.
    """

    def __init__(self, source: Source, order: Order, start: int, stop: int, batch_size: int, prefetch: int) -> None:
        self._source = source
        self._order = order
        self._asked = start
        self._stop = stop
        self._batch_size = batch_size
        self._depth = 1 + prefetch
        self._most = most_together(batch_size, source) if prefetch else 1
        self._together = 1
        self._is_first = True
        self._ahead: deque[tuple[int, int, _Group]] = deque()

    def take(self) -> tuple[int, Batch]:
        """Return the position at which the next batch ends, and the batch; nothing of it is kept.

        As many are being read while the user works as while he waits: or work as long as reading would not hide it.
        """
        self._begin(1 if self._is_first else self._depth)
        start, stop, group = self._ahead.popleft()
        # Read on this thread: then so would be those after it, and nobody works yet.
        is_at_once = self._is_first and group.is_done
        batch = group.take(start, stop)
        self._is_first = False
        if not is_at_once and self._depth > 1:
            with suppress(LazyShardsError):  # it belongs to a later batch, and is raised when that is asked for
                self._begin(self._depth)
        return stop, batch

    def close(self) -> None:
        """Give up all that is being read; returns when nothing is any more."""
        for _, _, group in self._ahead:
            group.cancel()
        self._ahead.clear()

    def _begin(self, count: int) -> None:
        """Begin to read until there are so many batches ahead."""
        while self._asked < self._stop and len(self._ahead) < count:
            start, stop = self._asked, min(self._asked + self._together * self._batch_size, self._stop)
            cuts = [*range(start, stop, self._batch_size), stop]
            try:
                group = _Group(self._source, self._order, start, stop, len(cuts) - 1)
            except LazyShardsError:
                if self._together > 1:
                    self._together = self._most = 1
                    continue
                if not self._ahead:
                    raise
                return  # it belongs to a later batch, and may be over by then: memory that is full now, say
            self._ahead.extend((a, b, group) for a, b in pairwise(cuts))
            self._asked = stop
            self._together = min(self._most, _GROWTH * self._together)


class _Group:
    """Batches that are read together, each of which is handed out once.

    Parameters
    ----------
    source : Source
    order : Order
    start, stop : int
        Positions in the order.
    count : int
        Number of batches.
    """

    __slots__ = ("_left", "_order", "_pending", "_read", "_source", "_start", "_stop")

    def __init__(self, source: Source, order: Order, start: int, stop: int, count: int) -> None:
        self._source = source
        self._order = order
        self._start = start
        self._stop = stop
        self._left = count
        self._read: Batch = None
        self._pending: Pending | None = source.begin(order.rows(start, stop))

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._pending is None or self._pending.is_done

    def take(self, start: int, stop: int) -> Batch:
        """Return the batch at positions [start, stop), or raise its error, not that of another one of the group."""
        if (start, stop) == (self._start, self._stop):
            return self._result()
        self._left -= 1
        try:
            whole = self._result() if self._read is None and self._pending is not None else self._read
        except LazyShardsError:
            whole = None
        if whole is None:
            return self._source.begin(self._order.rows(start, stop)).result()
        self._read = whole if self._left else None
        return _rows_of(whole, slice(start - self._start, stop - self._start))

    def _result(self) -> Batch:
        pending = self._pending
        assert pending is not None
        try:
            read = pending.result()
        except LazyShardsError:
            self._pending = None
            raise
        self._pending = None
        return read

    def cancel(self) -> None:
        """Give up what is being read."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None


def _rows_of(arrays: Batch, rows: slice) -> Batch:
    """Return rows of an array, or of each array of a dict."""
    if isinstance(arrays, dict):
        return {name: _rows_of(array, rows) for name, array in arrays.items()}
    return arrays[rows]
