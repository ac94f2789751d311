"""Which shards a selection touches, and bounded tables of them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from lazyshards.display.words import hide_secrets, is_all, printable, size_text
from lazyshards.layout import Decoded, Extents, Layout, Packed, Planes, Shard
from lazyshards.selection import Rows, Selection

__all__ = [
    "HEADER",
    "aligned",
    "entries",
    "folder_of",
    "name_of",
    "shards_text",
    "touched",
    "wanted_rows",
]

_MOST_LINES = 8
"""Lines of a table of shards, the one of the dots included."""
_MOST_INDICES = 100_000
"""Rows of an index array up to which the shards that they touch are counted; more would make a repr slow."""
_MOST_WIDTH = 48
"""Characters of a name."""


def touched(layout: Layout, rows: Rows) -> tuple[Sequence[int] | npt.NDArray[np.int64], bool]:
    """Return the numbers of the shards that the rows touch, and whether that is known rather than a bound.

    Empty shards are touched by nothing.
    """
    ends = layout.ends
    if not len(rows):
        return range(0), True
    if isinstance(rows, range):
        low, high, step = min(rows[0], rows[-1]), max(rows[0], rows[-1]), abs(rows.step)
    else:
        low, high, step = int(rows.min()), int(rows.max()), 1
    first, last = (int(i) for i in ends.searchsorted((low, high), "right"))
    if isinstance(rows, range):
        until = np.minimum(-(-(ends[first : last + 1] - low) // step), len(rows))
        return first + np.flatnonzero(np.diff(until, prepend=0)), True
    if len(rows) > _MOST_INDICES:
        return range(first, last + 1), False
    mask = np.zeros(len(layout), np.bool_)
    mask[ends.searchsorted(rows, "right")] = True
    return np.flatnonzero(mask), True


def wanted_rows(rows: Rows, start: int, stop: int) -> int:
    """Return how many of ``rows`` lie in [start, stop)."""
    if not isinstance(rows, range):
        return int(np.count_nonzero((rows >= start) & (rows < stop)))
    if not rows or start >= stop:
        return 0
    low, step = min(rows[0], rows[-1]), abs(rows.step)
    until = [min(len(rows), max(0, -(-(edge - low) // step))) for edge in (start, stop)]
    return until[1] - until[0]


def folder_of(layout: Layout) -> str:
    """Return the place that all shards share, fit to be shown."""
    root = layout.root.partition("?")[0] if "://" in layout.root else layout.root
    return printable(hide_secrets(root[: root.rfind("/") + 1]))


def name_of(path: str, folder: str) -> str:
    """Return the path of a shard within its folder, fit to be shown."""
    name = printable(hide_secrets(path)).removeprefix(folder)
    if len(name) > _MOST_WIDTH:
        half = (_MOST_WIDTH - 1) // 2
        name = f"{name[:half]}…{name[-half:]}"
    return name


def entries(layout: Layout, selection: Selection) -> list[list[str]]:
    """Return the cells of a bounded table of the shards touched, without its header; dots stand for those left out."""
    part = not is_all(selection.rows, layout.rows)
    numbers = touched(layout, selection.rows)[0] if part else range(len(layout))
    count = len(numbers)
    ahead = _MOST_LINES // 2
    behind = _MOST_LINES - ahead - 1
    few = count <= _MOST_LINES
    shown: list[int | None] = [*range(count)] if few else [*range(ahead), None, *range(count - behind, count)]
    folder = folder_of(layout)
    lines = []
    for i in shown:
        if i is None:
            lines.append([f"… {count - _MOST_LINES + 1:,} more …"])
            continue
        number = int(numbers[i])
        start, stop = layout.start_stop(number)
        name = name_of(layout.path(number), folder)
        line = _entry(name, start, stop, int(layout.stamps[number, 0]))
        lines.append([*line, f"{wanted_rows(selection.rows, start, stop):,}"] if part else line)
    return lines


HEADER = ["shard", "rows", "global rows", "file size", "wanted"]


def _entry(name: str, start: int, stop: int, nbytes: int) -> list[str]:
    return [name, f"{stop - start:,}", f"{start:,} to {stop:,}" if stop > start else "none", size_text(nbytes)]


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, the first column to the left and numbers to the right."""
    whole = [line for line in lines if len(line) > 1]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)] if whole else []
    for line in lines:
        first = line[0] if len(line) == 1 else line[0].ljust(widths[0])
        yield "  " + "  ".join([first, *[cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=False)]])


_STORED = {Packed: "rows", Extents: "rows", Planes: "columns", Decoded: "encoded"}


def shards_text(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield the lines of a table of all shards, header first; lazily, so that any number can be printed.

    Parameters
    ----------
    shards : sequence of Shard
        All shards of a dataset, in order.
    """
    form = "{:>13}  {:>29}  {:>10}  {:16}  {}"
    yield form.format("rows", "global rows", "file size", "stored as", "shard")
    stops = accumulate((shard.rows for shard in shards), initial=0)
    for shard, (start, stop) in zip(shards, pairwise(stops), strict=True):
        stored = f"{shard.dtype.str} by {_STORED[type(shard.source)]}"
        name, *numbers = _entry(printable(hide_secrets(shard.path)), start, stop, shard.stamp.size)
        yield form.format(*numbers, stored, name)
