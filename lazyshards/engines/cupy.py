"""The CuPy engine: one array on the current GPU, staged through pinned memory."""

import contextlib
from typing import Any

import numpy as np

from lazyshards.engines import staging
from lazyshards.engines.base import overlaps
from lazyshards.engines.dtypes import why_not_cupy
from lazyshards.errors import EngineError
from lazyshards.plan import Capacity, ReadPlan
from lazyshards.progress import Progress
from lazyshards.recording import carried, stage

__all__ = ["CupyEngine"]


class CupyEngine:
    """One array on the current GPU, filled by blocks through pinned memory.

    Availability: with ``lazyshards[cupy]`` and a GPU. Taken only when it is asked for.
    """

    name = "cupy"
    together_nbytes = 1 << 20

    def __init__(self) -> None:
        staging.device_count()

    def why_not(self, dtype: np.dtype[np.generic], ndim: int) -> str | None:
        """Return why CuPy cannot hold such an array, or None if it can."""
        return why_not_cupy(dtype, ndim)

    def capacity(self, nbytes: int = 0, *, ahead: bool = False) -> Capacity:
        """Return one worker, and the free memory of the current GPU."""
        return Capacity(workers=1, result_nbytes=staging.free_nbytes())

    def execute(self, plan: ReadPlan, *, out: Any = None, progress: Progress | None = None) -> Any:
        """Run the plan's tiles one after the other and return the cupy.ndarray."""
        if out is None:
            with stage("allocate", plan.nbytes):
                out = staging.empty(plan.shape, plan.dtype)
        elif not staging.is_device_array(out) or out.shape != plan.shape or out.dtype != plan.dtype:
            raise EngineError(
                f"out must be a cupy.ndarray of shape {plan.shape} and dtype {plan.dtype}, found {type(out).__name__} "
                f"of shape {getattr(out, 'shape', None)} and dtype {getattr(out, 'dtype', None)}"
            )
        elif overlaps((*out.shape, out.dtype.itemsize), (*out.strides, 1)):
            raise EngineError(f"out has strides {out.strides}, so that elements overlap; expected memory for each")
        for tile in plan.tiles:
            carried(staging.fill_device)(out[tile], plan.rows[tile], plan.layout, plan.cell)
            if progress is not None:
                progress(tile.stop - tile.start)
        return out

    def begin(self, plan: ReadPlan, *, may_block: bool = False) -> "_Later":
        """Return a result that is read when it is waited for: one GPU, one stream."""
        return _Later(self, plan)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return nothing that matters."""
        return contextlib.nullcontext()


class _Later:
    """A result that is read when it is asked for."""

    def __init__(self, engine: CupyEngine, plan: ReadPlan) -> None:
        self._engine = engine
        self._plan = plan

    @property
    def is_done(self) -> bool:
        """Whether it was read: never before it is asked for."""
        return False

    def result(self) -> Any:
        """Read it."""
        return self._engine.execute(self._plan)

    def cancel(self) -> None:
        """Do nothing: nothing was begun."""
