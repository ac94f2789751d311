"""What is shown of a plan: what it must have for that, and its numbers in words."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lazyshards.display.shards import touched
from lazyshards.display.words import size_text
from lazyshards.layout import Layout
from lazyshards.selection import Rows

__all__ = ["Held", "Plan", "is_quickly_counted", "plan_facts"]

_MOST_SHARDS = 20_000
"""Shards, and..."""
_MOST_ROWS = 100_000
"""...single rows, up to which a repr counts the reads of a plan, which walks over them."""


class Held(Protocol):
    """What an engine can hold: a Capacity."""

    @property
    def workers(self) -> int:
        """Processors."""
        ...

    @property
    def result_nbytes(self) -> int | None:
        """Most bytes of a result."""
        ...


class Plan(Protocol):
    """What is shown of a ReadPlan."""

    @property
    def layout(self) -> Layout:
        """The shards touched."""
        ...

    @property
    def rows(self) -> Rows:
        """Rows of that layout, in the order of the result."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the result."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        ...

    @property
    def tile_rows(self) -> int:
        """Rows of each tile but the last."""
        ...

    @property
    def tile_count(self) -> int:
        """Number of tiles."""
        ...

    @property
    def tile_reads(self) -> Sequence[tuple[int, int, int, int]]:
        """Requests, bytes, scratch and bytes of the files of each tile."""
        ...

    @property
    def shards(self) -> int:
        """Number of shards that hold rows of the request."""
        ...

    @property
    def requests(self) -> int:
        """Number of reads."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes read."""
        ...

    @property
    def read_amplification(self) -> float:
        """Bytes read for each byte wanted."""
        ...

    @property
    def stages(self) -> Sequence[tuple[str, str]]:
        """What a leaf does, in order."""
        ...

    def peak_nbytes(self, workers: int) -> int:
        """Return the most bytes in memory."""
        ...

    def loads(self, workers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the bytes and requests of each processor."""
        ...

    def skew(self, workers: int) -> float:
        """Return the busiest over the mean."""
        ...


def is_quickly_counted(plan: Plan) -> bool:
    """Return whether the reads of a plan were counted already, or are counted in a moment."""
    rows = plan.rows
    single = not isinstance(rows, range) or abs(rows.step) != 1
    return "tile_reads" in vars(plan) or (
        len(plan.layout) + plan.tile_count <= _MOST_SHARDS and not (single and len(rows) > _MOST_ROWS)
    )


def plan_facts(plan: Plan, shards: int | None = None, *, counted: bool = True) -> list[tuple[str, str]]:
    """Return the numbers of a plan that do not depend on the engine, each with its name.

    Parameters
    ----------
    plan : ReadPlan
    shards : int, optional
        Number of shards that the dataset has.
    counted : bool
        Whether to count the reads.
    """
    tiles, nbytes = plan.tile_count, plan.nbytes
    if counted:
        found = f"{plan.shards:,}"
    else:
        numbers, known = touched(plan.layout, plan.rows)
        found = f"{'' if known else 'at most '}{len(numbers):,}"
    facts = [
        ("result", f"{plan.shape} {plan.dtype}"),
        ("shards touched", found + ("" if shards is None else f" of {shards:,}")),
        ("tiles", f"{tiles:,}"),
        ("rows a tile", f"{min(plan.tile_rows, len(plan.rows)):,}" if tiles else "0"),
        ("bytes wanted", f"{nbytes:,}  ({size_text(nbytes)})"),
    ]
    if not counted:
        return [*facts, ("bytes read", "not counted for so many reads: plan.bytes_read and plan.requests count them")]
    return [
        *facts,
        ("bytes read", f"{plan.bytes_read:,}  ({size_text(plan.bytes_read)})"),
        ("amplification", f"{plan.read_amplification:.2f} bytes read for each byte wanted, as stored"),
        ("requests", f"{plan.requests:,}"),
    ]
