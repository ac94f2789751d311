"""What batches are taken from: rows of a view, begun to be read by an engine."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from lazyshards import catalog, display
from lazyshards.engines import Engine, PendingResult, draw_seed
from lazyshards.engines.ranks import is_shared, layout_facts, together
from lazyshards.layout import Layout
from lazyshards.plan import ReadPlan, compile_plan
from lazyshards.samplers import Order, Shuffle
from lazyshards.selection import Rows, Selection
from lazyshards.storage import LocalStorage
from lazyshards.warming import Warming, is_cold, plan_warming

__all__ = ["ViewSource"]

_QUICK_SECONDS = 1e-3
"""Seconds in which a batch is read at once: to hand it to another thread and back takes about as long."""
_PATIENCE = 16
"""Batches after which it is tried again whether reading at once is quick."""
_THIS_THREAD = 1
"""What Linux calls RUSAGE_THREAD."""


class ViewSource:
    """Rows of a view of a layout, counted from 0 in the order of the view, to be read by an engine.

    Parameters
    ----------
    layout : Layout
    selection : Selection
        The view; its row axis is there.
    fingerprint : str
        Of the view.
    engine : Engine
    """

    def __init__(self, layout: Layout, selection: Selection, fingerprint: str, engine: Engine) -> None:
        self._layout = layout
        self._selection = selection
        self._engine = engine
        self.fingerprint = fingerprint
        self.size = len(selection.rows)
        self.together_nbytes = engine.together_nbytes
        self._is_quick = True
        self._slow_turns = 0
        self.row_nbytes = prod(selection.cell_shape) * layout.dtype.itemsize

    @property
    def title(self) -> str:
        """What is read by which engine, in few words."""
        return f"{display.title_text(self._layout, self._selection)} on {self._engine.name}"

    @property
    def description(self) -> str:
        """Return what the rows are, for a person."""
        layout = self._layout
        return (
            f"{self.size:,} rows of shape {self._selection.cell_shape} and {layout.dtype} from {len(layout):,} shards"
        )

    def order(self, shuffle: Shuffle, epoch: int) -> Order:
        """Return the order of an epoch."""
        return shuffle.order(self.size, self.edges, self.fingerprint, epoch)

    def draw_seed(self) -> int:
        """Return a random seed, the same on every rank."""
        return draw_seed(self._engine.name)

    def edges(self) -> npt.NDArray[np.int64]:
        """Return the rows of the view at which a run of rows of one shard begins, and the number of rows."""
        rows = self._selection.rows
        if isinstance(rows, range):
            ascending = rows if rows.step > 0 else rows[::-1]
            # How many of the rows come before each shard's end.
            cuts = np.clip(-((ascending.start - self._layout.ends) // ascending.step), 0, len(rows))
            edges = np.concatenate([[0], cuts[np.diff(cuts, prepend=0) > 0]])
            return edges if rows.step > 0 else len(rows) - edges[::-1]
        holder = self._layout.ends.searchsorted(rows, "right")
        return np.concatenate([[0], np.flatnonzero(np.diff(holder)) + 1, [len(rows)]])

    @contextlib.contextmanager
    def reading(self, scattered: int = 0) -> Iterator[None]:
        """Return what must be entered while batches are read ahead: so many rows in no order, if any."""
        cold = scattered > 0 and is_cold(self._layout)
        warming = self._plan_warming(scattered) if cold else Warming()
        if scattered:
            self._is_quick = not cold
        with self._engine.reading(), warming.under_way():
            yield

    def warmed_nbytes(self, scattered: int) -> int:
        """Return the bytes of files that are read front to back while so many rows, in no order, are read ahead."""
        return self._plan_warming(scattered).nbytes

    def _plan_warming(self, scattered: int) -> Warming:
        if not scattered or self._engine.name == "cupy" or is_shared(self._engine.name):
            return Warming()
        return plan_warming(self._layout.narrow(self._selection.rows)[0], scattered)

    def begin(self, rows: Rows) -> PendingResult:
        """Begin to read rows of the view."""
        plan = self._plan(rows)
        if self._layout.storage.on_change == "refresh":
            layout = together(
                lambda: catalog.refreshed(plan.layout),
                layout_facts,
                self._engine.name,
                what="looking at the shards again",
            )
            plan = replace(plan, layout=layout)
        if not self._is_quick:
            # What was on a device may be in memory by now: see every so often. What comes from elsewhere is not.
            self._slow_turns += 1
            is_due = self._slow_turns % _PATIENCE == 0 and isinstance(self._layout.storage, LocalStorage)
            self._is_quick = is_due and not (plan.tile_count > 1 and is_cold(self._layout))
            return self._engine.begin(plan)
        began, waits = time.perf_counter(), _waits()
        pending = self._engine.begin(plan, may_block=True)
        if plan.tile_count > 1:
            return pending  # threads read it in any case
        self._is_quick = time.perf_counter() - began < _QUICK_SECONDS or _waits() == waits
        return pending

    def cost(self, rows: Rows) -> tuple[int, int, int]:
        """Return the shards that rows touch, and the requests and bytes that reading them takes."""
        plan = self._plan(rows)
        return plan.shards, plan.requests, plan.bytes_read

    def _plan(self, rows: Rows) -> ReadPlan:
        selection, wanted = self._selection, self._selection.rows
        if isinstance(rows, range):
            taken = wanted[rows.start : rows.stop]
        else:
            taken = wanted.start + wanted.step * rows if isinstance(wanted, range) else wanted[rows]
        part = Selection(taken, selection.cell)
        return compile_plan(self._layout, part, self._engine.capacity(len(rows) * self.row_nbytes, ahead=True))


def _waits() -> int:
    """Return how often this thread waited so far, for a device say; being made to wait by other work does not count."""
    try:
        import resource

        return resource.getrusage(_THIS_THREAD).ru_nvcsw
    except (ImportError, ValueError):  # not on every system
        return time.monotonic_ns()
