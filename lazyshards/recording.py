"""Collecting what the stages of one compute take, on whatever threads they run.

A recorder is set for the thread that computes, and carried to each thread that runs a leaf for it. Where none is set,
a stage costs a look at a context variable, and nothing is kept.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lazyshards.layout import Layout
from lazyshards.storage import Part, Storage

__all__ = ["Recorder", "carried", "fetch", "gathering", "measured", "recording", "stage"]

P = ParamSpec("P")
T = TypeVar("T")


class Recorder:
    """Collects what one compute does, from any number of threads.

    Parameters
    ----------
    keeps_ranges : bool
        Whether to remember which bytes of which files were read.
    """

    def __init__(self, *, keeps_ranges: bool = False) -> None:
        self._lock = threading.Lock()
        self._nested = threading.local()
        self.found: dict[str, tuple[float, int, int]] = {}
        """Seconds, bytes and times of each stage."""
        self.span: tuple[float, float] | None = None
        """When the first leaf began and the last ended; None if none ran here."""
        self.ranges: list[tuple[Storage, str, int, int]] | None = [] if keeps_ranges else None
        """Storage, path, offset and bytes of each read, if they are kept."""
        self.gathers: list[tuple[Layout, npt.NDArray[np.int64]]] = []
        """Rows that were copied out of memory maps, if ranges are kept."""
        self.is_blind = False
        """Whether a library read files itself."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Have this thread's stages recorded."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def leaf(self) -> Iterator[None]:
        """Record what a leaf does on this thread."""
        start = time.perf_counter()
        try:
            with self.recording(), self.stage("other", 0):
                yield
        finally:
            stop = time.perf_counter()
            with self._lock:
                first, last = self.span or (start, stop)
                self.span = min(first, start), max(last, stop)

    @contextmanager
    def stage(self, name: str, nbytes: int, count: int = 1) -> Iterator[None]:
        """Record one stage; what is recorded within it is not counted as its own."""
        nested = self._nested
        outer, nested.seconds = getattr(nested, "seconds", 0.0), 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            own, nested.seconds = took - nested.seconds, outer + took
            with self._lock:
                seconds, before, times = self.found.get(name, (0.0, 0, 0))
                self.found[name] = seconds + own, before + nbytes, times + count

    def keep_rows(self, layout: Layout, rows: npt.NDArray[np.int64]) -> None:
        """Remember which rows are read."""
        if self.ranges is not None:
            with self._lock:
                self.gathers.append((layout, rows))

    def keep(self, storage: Storage, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Remember what is read: path, offset and bytes of each."""
        if self.ranges is not None:
            with self._lock:
                self.ranges += [(storage, *each) for each in ranges]


_current: ContextVar[Recorder | None] = ContextVar("lazyshards_recorder", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


def recording() -> Recorder | None:
    """Return what records this thread's stages, if somebody asked for it."""
    return _current.get()


def stage(name: str, nbytes: int = 0) -> AbstractContextManager[None]:
    """Return what is entered for a stage, to have it recorded if somebody asked for it.

    Parameters
    ----------
    name : str
    nbytes : int
        Bytes that go through it.
    """
    recorder = _current.get()
    return _NOTHING if recorder is None else recorder.stage(name, nbytes)


def carried(leaf: Callable[P, T]) -> Callable[P, T]:
    """Return the leaf as it is; if this thread is recorded, so that it is recorded on whatever thread it runs."""
    recorder = _current.get()
    return leaf if recorder is None else partial(_recorded, recorder, leaf)


def _recorded(recorder: Recorder, leaf: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with recorder.leaf():
        return leaf(*args, **kwargs)


def fetch(storage: Storage, parts: Sequence[Part]) -> None:
    """Have the storage fill every part."""
    if _current.get() is None:
        storage.fetch_into(parts)
    else:
        measured(storage).fetch_into(parts)


def gathering(layout: Layout, rows: npt.NDArray[np.int64]) -> AbstractContextManager[None]:
    """Return what is entered while rows are copied out of memory maps."""
    recorder = _current.get()
    if recorder is None:
        return _NOTHING
    once = len(np.unique(rows))
    recorder.keep_rows(layout, rows)
    return recorder.stage("read", once * layout.row_nbytes, once)


def measured(storage: Storage) -> Storage:
    """Return the storage as it is; if this thread is recorded, so that its reads are."""
    recorder = _current.get()
    return storage if recorder is None else cast("Storage", _MeasuredStorage(storage, recorder))


class _MeasuredStorage:
    """A storage whose reads are recorded, for as long as one leaf uses it."""

    def __init__(self, storage: Storage, recorder: Recorder) -> None:
        self._storage = storage
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        if name in ("open", "local_path"):
            self._recorder.is_blind = True
        return getattr(self._storage, name)

    def __eq__(self, other: object) -> bool:
        return self._storage == (other._storage if isinstance(other, _MeasuredStorage) else other)

    def __hash__(self) -> int:
        return hash(self._storage)

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        recorder = self._recorder
        recorder.keep(self._storage, ranges)
        with recorder.stage("read", sum([nbytes for _, _, nbytes in ranges]), len(ranges)):
            return self._storage.fetch(ranges)

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Fill every part."""
        recorder = self._recorder
        sizes = [len(part.out) for part in parts]
        recorder.keep(self._storage, [(part.path, part.offset, size) for part, size in zip(parts, sizes, strict=True)])
        with recorder.stage("read", sum(sizes), len(parts)):
            self._storage.fetch_into(parts)
