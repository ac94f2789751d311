"""Statistics of every column of a view, found in one pass, and their table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.display import panel, table_html, title_text
from lazyshards.engines.ranks import is_first_rank
from lazyshards.errors import UnsupportedDtypeError
from lazyshards.layout import Layout
from lazyshards.progress import progress_bar
from lazyshards.reductions.blocks import View, plan_blocks
from lazyshards.reductions.extremes import Extreme
from lazyshards.reductions.reducers import Unsettled, Values
from lazyshards.reductions.running import reduce_state, settled
from lazyshards.reductions.sums import Moments, State

__all__ = ["ColumnStats", "find_stats"]

_MOST_LINES = 20
"""Columns in a table, the line of the dots included."""
_TITLES = ("count", "nan", "min", "max", "mean", "std")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ColumnStats:
    """Statistics of every column: of each position in a row, over all rows. NaN are counted, and left out of the rest.

    What ``ds.stats()`` returns. Each field is an array of the shape of a row.
    """

    rows: int
    """Rows that were looked at."""
    count: npt.NDArray[np.int64]
    """Elements that are not NaN."""
    nan: npt.NDArray[np.int64]
    """Elements that are NaN."""
    min: npt.NDArray[Any]
    """Least element; NaN if there is none."""
    max: npt.NDArray[Any]
    """Greatest element; NaN if there is none."""
    mean: npt.NDArray[Any]
    """Mean, in float64 or complex128; NaN if there is nothing."""
    std: npt.NDArray[np.float64]
    """Standard deviation, divided by the count as ``numpy.std`` does; NaN if there is nothing."""

    def _lines(self) -> Iterator[tuple[str, ...]]:
        """Yield a line for each column, the middle ones left out if they are many."""
        width = self.count.size
        half = _MOST_LINES // 2
        shown = [*range(width)] if width <= _MOST_LINES else [*range(half), -1, *range(width - half + 1, width)]
        for i in shown:
            if i < 0:
                yield ("…",) * (1 + len(_TITLES))
                continue
            place = ", ".join(map(str, np.unravel_index(i, self.count.shape))) if self.count.ndim else ""
            counts = [f"{int(field.flat[i]):,}" for field in (self.count, self.nan)]
            values = [_number(field.flat[i]) for field in (self.min, self.max, self.mean, self.std)]
            yield (place, *counts, *values)

    def __repr__(self) -> str:
        table = [("column", *_TITLES), *self._lines()]
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        lines = ["  ".join([cell.rjust(width) for cell, width in zip(line, widths, strict=True)]) for line in table]
        return "\n".join([f"<ColumnStats of {self._what()}>", *lines])

    def _what(self) -> str:
        width = self.count.size
        return f"{self.rows:,} row{'s' * (self.rows != 1)}, {width:,} column{'s' * (width != 1)}"

    def _repr_html_(self) -> str:
        facts = [("rows", f"{self.rows:,}"), ("columns", f"{self.count.size:,}")]
        return panel("ColumnStats", facts, table_html(["column", *_TITLES], [*self._lines()]))


def _number(value: Any) -> str:
    if isinstance(value, np.bool_):
        return str(bool(value))
    if isinstance(value, np.integer):
        return f"{int(value):,}"
    return f"{value:.6g}"


class _Found(NamedTuple):
    least: Values
    greatest: Values
    moments: State


@dataclass(frozen=True, slots=True)
class _Statistics(Unsettled[_Found]):
    """Everything in the table, of one look at each block."""

    dtype: np.dtype[np.generic]

    @property
    def _reducers(self) -> tuple[Extreme, Extreme, Moments]:
        extremes = [Extreme((0,), greatest, skip_nan=True) for greatest in (False, True)]
        return extremes[0], extremes[1], Moments((0,), self.dtype, skip_nan=True)

    def partial(self, block: Values, first: int) -> _Found:
        """Return what is known of a block."""
        least, greatest, moments = self._reducers
        return _Found(least.partial(block, first), greatest.partial(block, first), moments.partial(block, first))

    def merge(self, left: _Found, right: _Found) -> _Found:
        """Return what is known of both."""
        least, greatest, moments = self._reducers
        return _Found(
            least.merge(left.least, right.least),
            greatest.merge(left.greatest, right.greatest),
            moments.merge(left.moments, right.moments),
        )

    def finish(self, state: _Found) -> Values:
        """Return the mean."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.true_divide(state.moments.total, state.moments.count))


def find_stats(view: View, progress: bool) -> ColumnStats:
    """Return the statistics of every column."""
    if view.selection.scalar:
        raise TypeError("stats of a single row: index the row axis with a slice, such as ds[5:6]")
    if view.dtype.kind not in "biufc":
        raise UnsupportedDtypeError(f"no statistics of {view.dtype} can be found: expected numbers or booleans")
    if not view.size:
        return _no_stats(view)
    statistics = _Statistics(view.dtype)

    def look(layout: Layout) -> _Found:
        plan = plan_blocks(layout, view.selection)
        # What infinity does to a deviation, the table says: it needs no warning.
        with (
            np.errstate(invalid="ignore"),
            progress_bar(
                len(plan.read.rows),
                f"stats of {title_text(layout, view.selection)}",
                shown=progress and is_first_rank(),
            ) as bar,
        ):
            return reduce_state(plan, statistics, view.engine, bar.update)

    rows, shape = len(view.selection.rows), view.selection.cell_shape
    found = settled(view, look, what=f"the statistics of {rows:,} rows")
    count = np.broadcast_to(np.asarray(found.moments.count, np.int64), (1, *shape)).reshape(shape)
    assert found.moments.squares is not None
    with np.errstate(invalid="ignore", divide="ignore"):
        std = np.sqrt(found.moments.squares.reshape(shape) / count)
    return ColumnStats(
        rows,
        count,
        rows - count,
        found.least.reshape(shape),
        found.greatest.reshape(shape),
        statistics.finish(found).reshape(shape),
        std.reshape(shape),
    )


def _no_stats(view: View) -> ColumnStats:
    shape = view.selection.cell_shape
    none = np.zeros(shape, np.int64)
    real = view.dtype if view.dtype.kind in "fc" else np.dtype(np.float64)
    wide = np.result_type(real, np.float64)
    empty, mean = np.full(shape, np.nan, real), np.full(shape, np.nan, wide)
    return ColumnStats(len(view.selection.rows), none, none, empty, empty, mean, np.full(shape, np.nan, np.float64))
