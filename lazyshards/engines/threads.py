"""The NumPy engine: one result in memory, tiles filled by a pool of threads."""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards.engines import bringup
from lazyshards.engines.base import overlaps
from lazyshards.engines.collector import collect_if_due, collector_off
from lazyshards.engines.hugepages import HUGE_NBYTES
from lazyshards.errors import EngineError
from lazyshards.layout import Layout
from lazyshards.leaf import fill
from lazyshards.plan import SMALL_NBYTES, Capacity, ReadPlan
from lazyshards.progress import Progress
from lazyshards.recording import carried, stage
from lazyshards.selection import Cell, Rows
from lazyshards.tiling import align_tile_rows

__all__ = ["PendingArray", "ThreadEngine", "allocate", "cpu_count", "fill_together"]

_LEAST_KEPT_NBYTES, _MOST_KEPT_NBYTES, _MOST_KEPT = 64 << 10, 256 << 20, 16
"""Bytes of the least and the largest batch whose memory is used again, and how many of one size are remembered."""


def cpu_count() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """Return an uninitialised array; a large one in memory advised as huge pages, which halves a first load's time."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < 4 * HUGE_NBYTES:
        return np.empty(shape, dtype)
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError, OverflowError):  # no such advice on this system
        return np.empty(shape, dtype)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % HUGE_NBYTES
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class ThreadEngine:
    """Tiles filled by threads, into one NumPy array.

    Availability: always.
    """

    name = "numpy"
    together_nbytes = 1 << 20

    def why_not(self, dtype: np.dtype[np.generic], ndim: int) -> str | None:
        """Return None: NumPy holds every dtype; the number of axes is NumPy's own to refuse."""
        return None

    def __init__(self) -> None:
        self._capacity = Capacity(workers=cpu_count(), takes_next=True, ships=False)

    def capacity(self, nbytes: int = 0, *, ahead: bool = False) -> Capacity:
        """Return one worker for each processor, and no bound but the operating system's."""
        return self._capacity

    def execute(
        self, plan: ReadPlan, *, out: npt.NDArray[np.generic] | None = None, progress: Progress | None = None
    ) -> npt.NDArray[np.generic]:
        """Run the plan on threads and return the array."""
        if out is None:
            with stage("allocate", plan.nbytes):
                out = filled = allocate(plan.shape, plan.dtype)
        else:
            _check_out(out, plan)
            filled = out.view(np.ndarray)  # a matrix, say, keeps two axes whatever it is reshaped to
        if plan.tile_count <= 1:
            carried(fill)(filled, plan.rows, plan.layout, plan.cell)
            if progress is not None:
                progress(len(plan.rows))
            return out
        with self.reading():
            pending = self._submit(plan, filled, _pool())
            if progress is not None:
                pending.follow(plan, progress)
            pending.result()
        return out

    def begin(self, plan: ReadPlan, *, may_block: bool = False) -> "PendingArray":
        """Begin to read the plan on threads, or read it here if it is one tile and that may be."""
        out = _buffers.take(plan.shape, plan.dtype)
        if not may_block or plan.tile_count > 1:
            return self._submit(plan, out, _pool() if may_block else _deep_pool(), helps=True)
        return PendingArray(out, [_filled(partial(fill, out, plan.rows, plan.layout, plan.cell))])

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return what must be entered while threads read: where Legate runs, they may not collect its arrays."""
        with _buffers, collector_off() if bringup.started() is not None else contextlib.nullcontext():
            yield

    @staticmethod
    def _submit(
        plan: ReadPlan, out: npt.NDArray[np.generic], pool: ThreadPoolExecutor, *, helps: bool = False
    ) -> "PendingArray":
        leaf = carried(fill)
        leaves = [partial(leaf, out[tile], plan.rows[tile], plan.layout, plan.cell) for tile in plan.tiles]
        return PendingArray(out, [pool.submit(each) for each in leaves], leaves if helps else ())


def fill_together(
    out: npt.NDArray[np.generic], rows: Rows, layout: Layout, cell: Cell, piece_rows: int | None = None
) -> None:
    """Fill ``out`` as `lazyshards.leaf.fill` does, on this thread and on those of the pool.

    For leaves that have more processors than the one they run on, or more work than the others. May be called on any
    thread, those of the pool among them: who waits for a piece that no thread has come to fills it himself.

    Parameters
    ----------
    out : ndarray
        As for `fill`.
    rows : range or ndarray of int64
    layout : Layout
    cell : tuple
    piece_rows : int, optional
        Rows of a piece; by default as many as give each processor one, if pieces are not small.
    """
    if piece_rows is None:
        most = max(1, out.nbytes // SMALL_NBYTES)
        piece_rows = align_tile_rows(rows, layout, max(1, -(-len(rows) // min(cpu_count(), most))), max(1, len(rows)))
    if piece_rows >= len(rows):
        fill(out, rows, layout, cell)
        return
    leaf, pool = carried(fill), _pool()
    places = [slice(start, start + piece_rows) for start in range(0, len(rows), piece_rows)]
    leaves = [partial(leaf, out[place], rows[place], layout, cell) for place in places]
    PendingArray(out, [pool.submit(each) for each in leaves], leaves).wait()


def _filled(leaf: Callable[[], None]) -> "Future[None]":
    """Run a leaf on this thread; its error is raised when the result is asked for."""
    done: Future[None] = Future()
    try:
        leaf()
    except Exception as exc:  # noqa: BLE001
        done.set_exception(exc)
    else:
        done.set_result(None)
    return done


class PendingArray:
    """An array that threads are filling.

    Parameters
    ----------
    out : ndarray
        What they fill.
    futures : sequence of Future
        One for each tile.
    leaves : sequence of callable, optional
        What fills each tile, if who waits for the array may fill those that no thread has come to.
    """

    def __init__(
        self,
        out: npt.NDArray[np.generic],
        futures: Sequence[Future[None]],
        leaves: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._out = out
        self._futures = list(futures)
        self._leaves = leaves

    @property
    def is_done(self) -> bool:
        """Whether all tiles are filled, or failed."""
        return all(future.done() for future in self._futures)

    def result(self) -> npt.NDArray[np.generic]:
        """Wait for all tiles and return the array, or raise the first tile's error."""
        collect_if_due()
        self.wait()
        return self._out

    def wait(self) -> None:
        """Wait for all tiles, or raise the first one's error; then nobody writes into the array any more."""
        try:
            for i in reversed(range(len(self._leaves))):
                if self._futures[i].cancel():
                    self._futures[i] = _filled(self._leaves[i])
            for future in self._futures:
                future.result()
        except BaseException:
            self.cancel()
            raise

    def follow(self, plan: ReadPlan, progress: Progress) -> None:
        """Call ``progress`` with the rows of each tile that is done, until all are or one failed."""
        rows = {future: tile.stop - tile.start for future, tile in zip(self._futures, plan.tiles, strict=True)}
        try:
            for future in as_completed(self._futures):
                if future.exception() is not None:
                    return
                progress(rows[future])
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give the array up; returns when nobody writes into it any more."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)


class _Buffers:
    """Memory of results that were dropped, kept for the next ones while somebody reads one after the other.

    Fresh memory costs a page fault for every 4 KiB, which is more than copying a small row into it. Which results are
    gone is seen when memory is asked for, and not told by a callback: Python forgets an interrupt that meets one.
    """

    def __init__(self) -> None:
        self._lent: dict[int, deque[tuple[weakref.ref[Any], npt.NDArray[np.generic]]]] = {}
        self._readers = 0
        self._lock = threading.Lock()

    def forget_lock(self) -> None:
        """After a fork another thread may have held it."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                self._lent = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """Return an uninitialised array, in memory that nobody uses any more if there is some."""
        nbytes = prod(shape) * dtype.itemsize
        if not self._readers or not _LEAST_KEPT_NBYTES <= nbytes <= _MOST_KEPT_NBYTES:
            return allocate(shape, dtype)
        with self._lock:
            # The oldest is forgotten when there are many: its memory goes with the result in it.
            lent = self._lent.setdefault(nbytes, deque(maxlen=_MOST_KEPT))
            gone = next((i for i, (owner, _) in enumerate(lent) if owner() is None), None)
            if gone is None:
                memory = allocate((nbytes,), np.dtype(np.uint8))
            else:
                memory = lent[gone][1]
                del lent[gone]
            # What every view of the array refers to, and what can be seen to go.
            owner = (ctypes.c_char * nbytes).from_buffer(memory.data)
            lent.append((weakref.ref(owner), memory))
        array: npt.NDArray[np.generic] = np.frombuffer(memoryview(owner), np.uint8).view(dtype).reshape(shape)
        return array


def _check_out(out: object, plan: ReadPlan) -> None:
    if not isinstance(out, np.ndarray):
        raise EngineError(f"out is a {type(out).__name__}, expected a numpy.ndarray for the numpy engine")
    if isinstance(out, np.ma.MaskedArray):
        raise EngineError("out is a masked array, whose mask would hide what is read; expected a plain one: out.data")
    if out.shape != plan.shape or out.dtype != plan.dtype:
        raise EngineError(
            f"out has shape {out.shape} and dtype {out.dtype}, expected shape {plan.shape} and dtype {plan.dtype}"
        )
    if not out.flags.writeable:
        raise EngineError("out is read-only, expected a writable array")
    if overlaps((*out.shape, out.itemsize), (*out.strides, 1)):
        raise EngineError(f"out has strides {out.strides}, so that elements overlap; expected memory for each")


_buffers = _Buffers()
_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None
_deep_executor: ThreadPoolExecutor | None = None
_DEEP_THREADS = 8
"""Tiles that wait for storage at a time; each asks for all of its rows before it waits for the first."""


def _pool() -> ThreadPoolExecutor:
    """Return the process's pool; leaves never wait for one another, so that any number of computes may share it."""
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(cpu_count(), thread_name_prefix="lazyshards")
        return _executor


def _deep_pool() -> ThreadPoolExecutor:
    """Return the pool of those that wait for storage: more threads than processors, to keep its queue full."""
    global _deep_executor
    with _lock:
        if _deep_executor is None:
            _deep_executor = ThreadPoolExecutor(_DEEP_THREADS, thread_name_prefix="lazyshards-deep")
        return _deep_executor


def _forget_pool() -> None:
    """After a fork the threads are gone: the child makes its own pools."""
    global _executor, _deep_executor, _lock
    _executor = _deep_executor = None
    _lock = threading.Lock()
    _buffers.forget_lock()


os.register_at_fork(after_in_child=_forget_pool)
