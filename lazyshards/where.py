"""Rows chosen by their values: read once, in bounded memory, to know which they are."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards.engines.collector import collector_off
from lazyshards.engines.ranks import together
from lazyshards.errors import FormatError
from lazyshards.formats import find_format
from lazyshards.layout import Layout
from lazyshards.progress import Progress

__all__ = ["filtered_rows", "true_rows"]

_WINDOW_ROWS = 1 << 24
"""Rows whose answers are held at a time, a byte each."""
_THREADS = 16
"""Files that are filtered at a time."""


def true_rows(
    count: int, read: Callable[[slice], Any], engine: str, progress: Progress | None
) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows for which something is true, ascending.

    Parameters
    ----------
    count : int
        Rows.
    read : callable
        Returns what is true of the rows of a slice, an array of bool.
    engine : str
        Whose ranks shall find the same.
    progress : callable or None
        Called with the rows of each slice that was read.
    """

    def work() -> npt.NDArray[np.int64]:
        found = [np.empty(0, np.int64)]
        for start in range(0, count, _WINDOW_ROWS):
            window = slice(start, min(start + _WINDOW_ROWS, count))
            found.append(np.flatnonzero(read(window)) + start)
            if progress is not None:
                progress(window.stop - window.start)
        return np.concatenate(found)

    return together(work, _facts, engine, what="looking for rows")


def filtered_rows(layout: Layout, filters: object, engine: str) -> npt.NDArray[np.int64]:
    """Return the rows of a layout for which filters of its format hold, ascending.

    Parameters
    ----------
    layout : Layout
        As it was opened.
    filters : object
        As the format understands them.
    engine : str
        Whose ranks shall find the same.

    Raises
    ------
    FormatError
        If the format has none.
    """
    find = getattr(find_format(layout.format), "find_rows", None)
    if find is None:
        raise FormatError(
            f"filters= is for formats whose files tell what they hold, such as parquet, not for {layout.format}: use "
            "where_rows() on the dataset"
        )
    return together(partial(_filter, layout, partial(find, filters=filters)), _facts, engine, what="filtering rows")


def _filter(layout: Layout, find: Callable[..., npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    def found(pool: ThreadPoolExecutor) -> Iterator[npt.NDArray[np.int64]]:
        shards = layout.shards
        locals_ = pool.map(lambda number: find(shards[number], storage=layout.storage), range(len(layout)))
        for number, rows in enumerate(locals_):
            yield rows + layout.start_stop(number)[0]

    with collector_off(), ThreadPoolExecutor(min(_THREADS, max(1, len(layout)))) as pool:
        return np.concatenate([np.empty(0, np.int64), *found(pool)])


def _facts(rows: npt.NDArray[np.int64]) -> dict[str, object]:
    return {"rows found": len(rows), "which rows": blake2b(rows.tobytes(), digest_size=16).hexdigest()}
