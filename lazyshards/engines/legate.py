"""The Legate engine: one manual launch a compute, tiles of one cuPyNumeric array filled by the leaf.

Everything that Legate punishes with an abort, a hang or garbage is kept away from it here: the leaf lets no exception
escape but writes it into a status store, which is also what compute() waits for; a result that does not fit is
refused before it is launched, since running out of memory aborts the process; only the thread that owns Legate may
launch; the cyclic collector is off while leaves run, because Legate's own guard is racy. The facts are in
docs/explanation/legate.md.
"""

import base64
import contextlib
import functools
import gc
import os
import pickle
import platform
import random
import re
import sys
import threading
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from lazyshards import errors
from lazyshards.engines import bringup, hugepages, ranks
from lazyshards.engines.collector import collect_if_due, collector_off
from lazyshards.engines.dtypes import why_not_legate
from lazyshards.engines.ledger import Ledger, find_pool
from lazyshards.engines.threads import PendingArray, ThreadEngine, fill_together
from lazyshards.errors import EngineError, ShardChangedWarning
from lazyshards.layout import Layout
from lazyshards.leaf import fill
from lazyshards.plan import SMALL_NBYTES, Capacity, ReadPlan
from lazyshards.progress import Progress
from lazyshards.recording import Recorder, carried, recording, stage
from lazyshards.selection import Cell, Rows
from lazyshards.storage.changes import warnings_kept

_started = bringup.start()

# Only now: Legate does not even load on every machine before it was made to.
import cupynumeric  # noqa: E402
import legate.core.types as legate_types  # noqa: E402
from legate.core import (  # noqa: E402
    Field,
    LogicalArray,
    TaskContext,
    TaskTarget,
    VariantCode,
    get_legate_runtime,
    is_running_in_task,
)
from legate.core.data_interface import as_logical_array  # noqa: E402
from legate.core.task import InputStore, OutputStore, task  # noqa: E402

__all__ = ["LegateEngine"]

_VARIANTS = (VariantCode.CPU, VariantCode.OMP, VariantCode.GPU)
_STATUS_NBYTES = 2048
"""Bytes of one tile's row in the status store: a code, then the class and text of an error."""
_LEAST_STATUS_NBYTES = 256
"""The same where there are so many tiles that every rank would read more than..."""
_TABLE_NBYTES = 4 << 20
"""...this many bytes of them."""
_ROWS_NBYTES = 1 << 20
"""Bytes of an index array that travels with the plan to several ranks; handing out a larger one pays."""
_OK, _FAILED = 1, 2
_ADDRESS = slice(1, 9)
"""Bytes of a status row that tell, on success, where the tile lies in memory."""
_WARNING = 9
"""First byte of a status row that tells, on success, of shards that changed; null if none did."""
_USABLE = 0.9
"""Fraction of the largest free piece of the pool that a result may take; the rest is for the user's temporaries."""
_USABLE_BLIND = 0.6
"""The same where it is not known which pieces are free: on GPUs, with several ranks."""
_SURE = 0.5
"""Fraction of what is free, as far as it is known, up to which a result fits without a look at the user's arrays."""
_REGION = re.compile(r"region: \(\d+, \([^)]*\), (\d+)\), field: (\d+)")
"""Where the text of a store says in which memory it lies: a tree of regions, whatever part of it, and a field."""
_PLAIN_NBYTES = 64 << 10
"""Bytes of a plan up to which it is not compressed: below, compressing takes longer than it saves."""
_LOOKED_AT = 8
"""Adopted arrays that are looked at whenever one more is adopted."""
_TILES_AT_ONCE = 3
"""Tiles that huge pages must be free for: two that are filled at the same time, and some to spare."""
_threads = ThreadEngine()
_followed: dict[str, SimpleQueue[int]] = {}
"""Launches that somebody watches, by their plan: the leaves put the rows of each tile that is done, or has failed."""
_recorders: dict[str, Recorder] = {}
"""What records the leaves of launches, where somebody asked for it, by their plan."""


class LegateEngine:
    """Tiles of one distributed cuPyNumeric array, filled by a Legate task.

    Availability: Linux, with ``lazyshards[legate]``; with or without a GPU or an NVIDIA driver.
    """

    name = "legate"
    together_nbytes = 4 << 20  # a new array costs ten times a view of one

    def __init__(self) -> None:
        nbytes, count = _started.sysmem_nbytes, _started.node_count
        if _on_gpu():
            nbytes, count = _started.fbmem_nbytes, _worker_count()
        self._unchecked = 0
        self._adopted: deque[tuple[weakref.ref[Any], int]] = deque()
        if _started.node_count > 1:
            # The pools are taken for equal, so that what does not fit is refused on every rank or on none.
            nbytes = min(map(int, ranks.gather(str(nbytes or 0))))
        self._ledger = Ledger(nbytes * count) if nbytes else None

    def why_not(self, dtype: np.dtype[np.generic], ndim: int) -> str | None:
        """Return why cuPyNumeric cannot hold such an array, or None if it can."""
        return why_not_legate(dtype, ndim)

    def capacity(self, nbytes: int = 0, *, ahead: bool = False) -> Capacity:
        """Return the processors, and what is left of their memory after the arrays that are still alive.

        Those of the user are looked for only if ``nbytes`` may not fit, and those in reference cycles are collected
        only if it would not fit otherwise.
        """
        _check_caller()
        ledger = self._ledger
        if ledger is None:
            return Capacity(_worker_count())
        free = _free_nbytes(ledger)
        if nbytes > _SURE * free:
            self._forget_gone(ledger, len(self._adopted))
            ledger.see(_arrays_alive())
            free = _free_nbytes(ledger)
        if nbytes > free:
            # Then what fits depends on what can be reached, and not on when each rank's collector ran last.
            gc.collect()
            ledger.see(_arrays_alive())
            free = _free_nbytes(ledger)
        by_threads = ahead and _shares_instance()
        return Capacity(_worker_count(), result_nbytes=free, takes_next=by_threads, ships=not by_threads)

    def execute(self, plan: ReadPlan, *, out: Any = None, progress: Progress | None = None) -> Any:
        """Run the plan in one launch, wait for its tiles, and return the cuPyNumeric array."""
        _check_caller()
        if out is not None:
            _check_out(out, plan)
        if _started.node_count > 1:
            ranks.check_same("what is computed", ranks.plan_facts(plan))
        if not plan.tile_count:
            return cupynumeric.empty(plan.shape, plan.dtype) if out is None else out
        if out is None and _is_read_here(plan):
            buffer = ranks.together(lambda: _read_here(plan), lambda _: {}, "legate", what="reading a result")
            if progress is not None:
                progress(len(plan.rows))
            if why_not_legate(plan.dtype, buffer.ndim) is not None:
                buffer = buffer[0]  # one row, whose own axes are as many as Legate holds
            return cupynumeric.asarray(buffer)
        if progress is None or _started.node_count > 1:  # other ranks' tiles cannot be followed from here
            with collector_off(), _leaves_recorded(plan):
                result = self._launch(plan, out).result()
            if progress is not None:
                progress(len(plan.rows))
            return result
        text = _encode(plan)
        done = _followed[text] = SimpleQueue()
        try:
            with collector_off(), _leaves_recorded(plan):
                launched = self._launch(plan, out)
                for _ in range(plan.tile_count):
                    progress(done.get())
                return launched.result()
        finally:
            del _followed[text]

    def begin(self, plan: ReadPlan, *, may_block: bool = False) -> "_Launched | _Handed":
        """Begin to read the plan: on threads where all memory is this process's, else in a launch."""
        _check_caller()
        if self._unchecked and _started.node_count > 1:
            # Only the first of an iteration: all others follow from the same order, seed and batch size.
            self._unchecked -= 1
            ranks.check_same("the first of the batches that follow", ranks.plan_facts(plan))
        if _shares_instance() or not plan.tile_count:
            return _Handed(self, plan, _threads.begin(plan, may_block=may_block))
        return self._launch(plan, None, ahead=True)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return what must be entered while leaves run: the cyclic collector may not drop Legate's arrays on theirs."""
        self._unchecked += 1
        with _threads.reading():
            yield

    def _launch(self, plan: ReadPlan, out: Any, *, ahead: bool = False) -> "_Launched":
        result = out
        if out is None:
            with stage("allocate", plan.nbytes):
                if ahead:
                    # Keeps launches from running far ahead of the freeing, and waits for none of those under way.
                    get_legate_runtime().issue_mapping_fence()
                elif plan.nbytes > SMALL_NBYTES:
                    # What was dropped gives its memory back only once Legate has dealt with it.
                    get_legate_runtime().issue_execution_fence(block=True)
                result = cupynumeric.empty(plan.shape, plan.dtype)
        store = as_logical_array(result).data
        number = self._take(result, plan.nbytes, _memory_of(store)) if out is None else None
        return _Launched(self, result, number, _launch(plan, store))

    def _take(self, result: Any, nbytes: int, key: Hashable = None) -> int | None:
        """Note that a result is alive, until it is dropped."""
        if self._ledger is None:
            return None
        number = self._ledger.add(nbytes, key)
        weakref.finalize(result, self._ledger.drop, number).atexit = False
        return number

    def adopt(self, array: np.ndarray[Any, np.dtype[np.generic]]) -> Any:
        """Return a NumPy array that nobody else holds as a cuPyNumeric one."""
        result = _attach(array)
        ledger = self._ledger
        if ledger is not None:
            self._forget_gone(ledger, _LOOKED_AT)
            number = ledger.add(array.nbytes, _memory_of(as_logical_array(result).data))
            # Legate holds the memory for as long as any view of the result does, and lets go of it in time.
            self._adopted.append((weakref.ref(array if array.base is None else array.base), number))
        return result

    def _forget_gone(self, ledger: Ledger, most: int) -> None:
        """Free what adopted arrays took that are gone, of the ``most`` that were looked at longest ago.

        No callback tells of it: Python forgets an interrupt that meets one.
        """
        for _ in range(min(most, len(self._adopted))):
            holder, number = self._adopted.popleft()
            if holder() is None:
                ledger.free(number)
            else:
                self._adopted.append((holder, number))

    def place(self, number: int, address: int) -> None:
        """Note where a result lies in the pool."""
        ledger = self._ledger
        assert ledger is not None
        if not ledger.is_placed:
            ledger.place_pool(find_pool(address, ledger.nbytes))
        ledger.place(number, address)


def _attach(array: np.ndarray[Any, np.dtype[np.generic]]) -> Any:
    """Return an array as a cuPyNumeric one in the same memory; ``asarray`` would copy one that does not own it."""
    if array.size < 2:
        return cupynumeric.asarray(array)
    store = get_legate_runtime().create_store_from_buffer(_legate_type(array.dtype), array.shape, array, False)
    return cupynumeric.asarray(_Attached(store))


@functools.cache
def _legate_type(dtype: np.dtype[np.generic]) -> Any:
    """Return what Legate calls a dtype."""
    return as_logical_array(cupynumeric.empty((1, 1), dtype)).type


class _Attached:
    """A store as cuPyNumeric takes it.

    Parameters
    ----------
    store : LogicalStore
    """

    def __init__(self, store: Any) -> None:
        array = LogicalArray.from_store(store)
        self.__legate_data_interface__ = {"version": 1, "data": {Field("rows", array.type): array}}


class _StatusTable:
    """Where each tile of a launch says how it went, a row each.

    Parameters
    ----------
    count : int
        Number of tiles.
    """

    def __init__(self, count: int) -> None:
        self.width = max(_LEAST_STATUS_NBYTES, min(_STATUS_NBYTES, _TABLE_NBYTES // count))
        self._store = get_legate_runtime().create_store(legate_types.uint8, (count, self.width))
        self.rows = self._store.partition_by_tiling((1, self.width))

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Wait for the tiles of this launch alone, the interpreter lock free meanwhile, and return what they said."""
        return np.array(self._store.get_physical_store())


_tables: dict[int, list[_StatusTable]] = {}
"""Tables that no launch is using, by number of tiles: with several ranks, making one takes longer than a small read."""

# At the end of the process they must be gone before Legate is.
get_legate_runtime().add_shutdown_callback(_tables.clear)


def _seed_as_before() -> None:
    """Undo that seeding warns: Legate does not go on in a forked child, such as a DataLoader's worker, which seeds."""
    if getattr(random.seed, "__module__", "") == "legate.core":
        random.seed = random.random.__self__.seed  # type: ignore[attr-defined]  # a method of the module's instance
    if getattr(np.random.seed, "__module__", "") == "legate.core":
        np.random.seed = np.random.mtrand.seed


os.register_at_fork(after_in_child=_seed_as_before)


class _Launched:
    """A result that leaves are filling."""

    def __init__(self, engine: LegateEngine, array: Any, number: int | None, status: _StatusTable) -> None:
        self._engine = engine
        self._array = array
        self._number = number
        self._status = status

    @property
    def is_done(self) -> bool:
        """Whether it is known that all tiles are filled: not before it is asked for."""
        return False

    def result(self) -> Any:
        """Wait for all tiles and return the array, or raise the first tile's error."""
        collect_if_due()
        table = self._read()
        _raise_failure(table)
        if self._number is not None and _shares_instance():
            self._engine.place(self._number, int(table[0, _ADDRESS].copy().view(np.uint64)[0]))
        return self._array

    def cancel(self) -> None:
        """Wait until nobody writes into the array any more."""
        self._read()

    def _read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        table = self._status.read()
        _tables.setdefault(len(table), []).append(self._status)
        return table


class _Handed:
    """A result that threads read into memory of ours, handed to cuPyNumeric when it is asked for."""

    def __init__(self, engine: LegateEngine, plan: ReadPlan, pending: PendingArray) -> None:
        self._engine = engine
        self._plan = plan
        self._pending = pending

    @property
    def is_done(self) -> bool:
        """Whether all tiles are filled, or failed."""
        return self._pending.is_done

    def result(self) -> Any:
        """Wait for all tiles and return the array, or raise the first tile's error."""
        _check_caller()
        return self._engine.adopt(self._pending.result())

    def cancel(self) -> None:
        """Give the array up."""
        self._pending.cancel()


def _check_caller() -> None:
    """Raise EngineError where a call into Legate would kill the process."""
    if os.getpid() != _started.pid:
        raise EngineError(
            "Legate was started by the parent of this process and cannot be used in a forked child: use "
            'engine="numpy" here, or start the child with the "spawn" method'
        )
    if threading.get_ident() != _started.owner:
        raise EngineError(
            "Legate serves only the thread that started it, the main one, and compute() was called on another, or "
            'inside a Legate task: compute there, or use engine="numpy" here'
        )
    if is_running_in_task():
        raise EngineError("compute() was called inside a Legate task, which cannot launch tasks itself")


def _on_gpu() -> bool:
    return bool(get_legate_runtime().get_machine().preferred_target == TaskTarget.GPU)


def _free_nbytes(ledger: Ledger) -> int:
    """Return the bytes that the next result may take."""
    usable = _USABLE if ledger.is_placed or not ledger.live_nbytes else _USABLE_BLIND
    return int(usable * ledger.largest_gap())


def _memory_of(store: Any) -> Hashable:
    """Return what all stores in the same memory have in common, or None: Legate tells of it in their text only."""
    match = _REGION.search(str(store))
    return match.groups() if match else None


def _arrays_alive() -> dict[Hashable, int]:
    """Return, of the memory in which arrays of cuPyNumeric lie, the bytes of the largest array in each piece."""
    found: dict[Hashable, int] = {}
    for each in gc.get_objects():
        if type(each) is not cupynumeric.ndarray:
            continue
        base = getattr(each._thunk, "base", None)  # noqa: SLF001  # an array that NumPy holds has none
        key = None if base is None else _memory_of(base)
        if key is not None:
            found[key] = max(found.get(key, 0), each.nbytes)
    return found


def _worker_count() -> int:
    """Return the number of processors that run leaves, on all ranks."""
    machine = get_legate_runtime().get_machine()
    return max(1, machine.count(machine.preferred_target))


def _check_out(out: object, plan: ReadPlan) -> None:
    if not isinstance(out, cupynumeric.ndarray):
        text = f"out is a {type(out).__name__}, expected a cupynumeric.ndarray for the legate engine"
        numpy = isinstance(out, np.ndarray)
        raise EngineError(f'{text}; engine="numpy" fills arrays of NumPy' if numpy else text)
    if not out.flags.writeable:
        raise EngineError("out is read-only, or repeats its elements: expected an array that can be filled")
    if out.shape != plan.shape or out.dtype != plan.dtype:
        raise EngineError(
            f"out has shape {out.shape} and dtype {out.dtype}, expected shape {plan.shape} and dtype {plan.dtype}"
        )


def _shares_instance() -> bool:
    """Return whether all tiles can share one piece of memory, so that np.asarray of the result copies nothing."""
    return bool(_started.node_count == 1 and not _started.processors.get("gpu"))


def _is_read_here(plan: ReadPlan) -> bool:
    """Return whether the driver reads the plan itself: a launch would take longer, or cannot hold so many axes."""
    if why_not_legate(plan.dtype, len(plan.shape)) is not None:
        return True
    return plan.tile_count == 1 and plan.nbytes <= SMALL_NBYTES and _started.node_count == 1


def _read_here(plan: ReadPlan) -> np.ndarray[Any, np.dtype[np.generic]]:
    buffer = np.empty(plan.shape, plan.dtype)
    with warnings_kept() as changes:
        carried(fill)(buffer, plan.rows, plan.layout, plan.cell)
    _warn(changes)
    return buffer


def _launch(plan: ReadPlan, store: Any) -> _StatusTable:
    """Launch one leaf a tile and return the table in which each will say how it went."""
    runtime = get_legate_runtime()
    count, tile_rows = plan.tile_count, plan.tile_rows
    if count > 1 and _shares_instance():
        once = runtime.create_manual_task(_touch.library, _touch.task_id, (1,))
        once.add_output(store.partition_by_tiling(plan.shape))
        once.execute()
    free = _tables.get(count)
    status = free.pop() if free else _StatusTable(count)
    gathers = _gathers(plan)
    leaf = _gather if gathers else _fill
    launch = runtime.create_manual_task(leaf.library, leaf.task_id, (count,))
    if gathers:
        rows = as_logical_array(cupynumeric.array(plan.rows)).data
        launch.add_input(rows.partition_by_tiling((tile_rows,)))
    launch.add_output(store.partition_by_tiling((tile_rows, *plan.cell_shape)))
    launch.add_output(status.rows)
    launch.add_scalar_arg(_encode(plan), legate_types.string_type)
    launch.add_scalar_arg(status.width, legate_types.int64)
    launch.execute()
    return status


@contextlib.contextmanager
def _leaves_recorded(plan: ReadPlan) -> Iterator[None]:
    """Have the leaves of this process record what they do, if this thread is recorded."""
    recorder = recording()
    if recorder is None:
        yield
        return
    text = _encode(plan)
    _recorders[text] = recorder
    try:
        yield
    finally:
        del _recorders[text]


def _gathers(plan: ReadPlan) -> bool:
    """Return whether the rows are an array that travels as a store, each tile's to its leaf, and not in the plan."""
    return isinstance(plan.rows, np.ndarray) and (_started.node_count == 1 or plan.rows.nbytes > _ROWS_NBYTES)


def _raise_failure(table: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Raise the first tile's error, if any tile failed; the table is the same on every rank, and so is the error."""
    failed = np.flatnonzero(table[:, 0] != _OK)
    if not len(failed):
        changed = table[table[:, _WARNING] != 0, _WARNING:]
        _warn([line for row in changed for line in bytes(row).rstrip(b"\0").decode("utf-8", "replace").split("\n")])
        return
    name, _, text = bytes(table[failed[0], 1:]).rstrip(b"\0").decode("utf-8", "replace").partition("\n")
    if len(failed) > 1:
        text += f" ({len(failed)} of {len(table)} tiles failed)"
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        raise kind(text)
    raise EngineError(f"a leaf task failed with {name}: {text}")


def _encode(plan: ReadPlan) -> str:
    """Return what the leaves need of the plan, as text that travels with the launch."""
    rows = None if _gathers(plan) else plan.rows
    needed = (plan.layout, rows, plan.cell, plan.tile_rows, plan.piece_rows)
    data = pickle.dumps(needed, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) <= _PLAIN_NBYTES:
        return "=" + base64.b64encode(data).decode()
    return "z" + base64.b64encode(zlib.compress(data, 1)).decode()


@functools.lru_cache(maxsize=4)
def _decode(text: str) -> tuple[Layout, Rows | None, Cell, int, int | None]:
    """Return what `_encode` was given; decoded once for all tiles of a launch that run in this process."""
    data = base64.b64decode(text[1:])
    decoded: tuple[Layout, Rows | None, Cell, int, int | None]
    decoded = pickle.loads(zlib.decompress(data) if text[0] == "z" else data)  # noqa: S301  # our own text
    return decoded


@task(variants=_VARIANTS)
def _touch(ctx: TaskContext, out: OutputStore) -> None:
    """Do nothing, on the whole result, so that the tiles which follow share its one instance."""


@task(variants=_VARIANTS)
def _fill(ctx: TaskContext, out: OutputStore, status: OutputStore, plan: str, width: int) -> None:
    _run_leaf(ctx, out, status, plan, width, None)


@task(variants=_VARIANTS)
def _gather(ctx: TaskContext, rows: InputStore, out: OutputStore, status: OutputStore, plan: str, width: int) -> None:
    _run_leaf(ctx, out, status, plan, width, rows)


def _run_leaf(
    ctx: TaskContext, out: OutputStore, status: OutputStore, text: str, width: int, wanted: InputStore | None
) -> None:
    """Fill one tile and write how it went; nothing may escape, since that would abort the process."""
    on_gpu = ctx.get_variant_kind() == VariantCode.GPU
    message = b""
    changes: list[str] = []
    address = count = 0
    try:
        layout, rows, cell, tile_rows, piece_rows = _decode(text)
        if wanted is not None:
            tile: Rows = np.array(_to_host(wanted, on_gpu), np.int64)
        else:
            assert rows is not None
            start = ctx.task_index[0] * tile_rows
            tile = rows[start : start + tile_rows]
        count = len(tile)
        recorder = _recorders.get(text)
        with warnings_kept() as changes, recorder.leaf() if recorder else contextlib.nullcontext():
            if on_gpu:
                from lazyshards.engines.staging import fill_device

                fill_device(out, tile, layout, cell, getattr(ctx, "task_stream", None))
            else:
                view = np.asarray(out)
                address = view.ctypes.data
                hugepages.advise(address, view.nbytes, view.nbytes * _TILES_AT_ONCE)
                if piece_rows is not None or ctx.get_variant_kind() == VariantCode.OMP:
                    fill_together(view, tile, layout, cell, piece_rows)
                else:
                    fill(view, tile, layout, cell)
    except BaseException as exc:  # noqa: BLE001  # KeyboardInterrupt and SystemExit abort or vanish as well
        message = _describe(exc, width)
    _write_status(status, width, message or _success(address, changes), on_gpu, failed=bool(message))
    followed = _followed.get(text)
    if followed is not None:
        followed.put(count)


def _warn(changes: Sequence[str]) -> None:
    """Warn of shards that changed and were read all the same: one rank for all, each shard once."""
    if ranks.is_first_rank():
        for text in dict.fromkeys(changes):
            warnings.warn(text, ShardChangedWarning, stacklevel=2)


def _describe(exc: BaseException, width: int) -> bytes:
    """Return the class and text of an exception and, of several ranks, which met it, as a status row can hold it."""
    place = f" (met by rank {_started.node_id} on {platform.node()[:64]})" if _started.node_count > 1 else ""
    most = width - 1 - len(place.encode())
    try:
        return f"{type(exc).__name__}\n{exc}".encode("utf-8", "replace")[:most] + place.encode()
    except BaseException:  # noqa: BLE001  # an exception that cannot be printed
        return type(exc).__name__.encode()[:most] + f"\n{place}".encode()


def _success(address: int, changes: Sequence[str]) -> bytes:
    """Return where a tile lies in memory, and what is to be warned of."""
    return address.to_bytes(8, sys.byteorder) + "\n".join(dict.fromkeys(changes)).encode("utf-8", "replace")


def _write_status(status: OutputStore, width: int, message: bytes, on_gpu: bool, *, failed: bool) -> None:
    row = np.zeros((1, width), np.uint8)
    row[0, 0] = _FAILED if failed else _OK
    text = message[: width - 1]
    row[0, 1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
    if on_gpu:
        from lazyshards.engines.staging import to_device

        to_device(row, status)
    else:
        np.asarray(status)[...] = row


def _to_host(store: InputStore, on_gpu: bool) -> Any:
    if not on_gpu:
        return np.asarray(store)
    from lazyshards.engines.staging import to_host

    return to_host(store)
