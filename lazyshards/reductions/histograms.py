"""Histograms of all elements of a view: the counts of its blocks, added up."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.display import title_text
from lazyshards.engines.ranks import is_first_rank
from lazyshards.layout import Layout
from lazyshards.progress import progress_bar
from lazyshards.reductions.blocks import Blocks, View, plan_blocks, stream
from lazyshards.reductions.extremes import Extreme
from lazyshards.reductions.running import reduce_blocks, settled

__all__ = ["Bins", "find_histogram"]

Bins: TypeAlias = int | Sequence[float] | npt.NDArray[Any]
"""How many bins, or their edges."""


def find_histogram(
    view: View, bins: Bins, range: tuple[float, float] | None, progress: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return what ``numpy.histogram`` would: the counts, and the edges; two passes where the range must be found."""
    if np.asarray(bins).dtype.kind in "SU":
        raise TypeError(
            f"bins={bins!r}: how many there should be cannot be told before all is read; expected a number or edges"
        )
    # What NumPy refuses, it refuses for one element.
    # Booleans are counted as the numbers 0 and 1.
    dtype = np.dtype(np.uint8) if view.dtype == np.bool_ else view.dtype
    np.histogram(np.zeros(1, dtype), bins, range)
    if not view.size:
        return np.histogram(np.empty(0, dtype), bins, range)

    def count(layout: Layout) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        plan = plan_blocks(layout, view.selection)
        passes = 2 if np.ndim(bins) == 0 and range is None else 1
        with progress_bar(
            passes * len(plan.read.rows),
            f"histogram of {title_text(layout, view.selection)}",
            shown=progress and is_first_rank(),
        ) as bar:
            ends: Any = range
            if passes == 2:
                axes = tuple([axis for axis, _ in enumerate(plan.read.shape)])
                ends = tuple(
                    [
                        reduce_blocks(plan, Extreme(axes, greatest, skip_nan=False), view.engine, bar.update)
                        .astype(dtype)
                        .reshape(())[()]
                        for greatest in (False, True)
                    ]
                )
            edges = np.histogram_bin_edges(np.zeros(1, dtype), bins, ends)
            total = np.zeros(len(edges) - 1, np.int64)

            def counted(blocks: Blocks) -> npt.NDArray[np.int64]:
                return sum([np.histogram(block.view(dtype), bins, ends)[0] for block, _ in blocks], 0 * total)

            for counts in stream(plan, counted, bar.update, lends=True):
                total += counts
        return total, edges

    return settled(view, count, what=f"the histogram of {len(view.selection.rows):,} rows")
