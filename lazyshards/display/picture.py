"""Pictures to scale, as SVG: which rows lie in which shards, which are selected, and which tile reads them.

Bounded in size whatever the number of shards and tiles. The one colour of their own reads on light and on dark; all
else takes the colour of the text around it.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lazyshards.display.plans import Plan
from lazyshards.display.shards import folder_of, name_of
from lazyshards.display.words import count_text, plural, rows_text, size_text
from lazyshards.layout import Layout
from lazyshards.selection import Rows, Selection

__all__ = ["MARK", "MOST_BINS", "MOST_GROUPS", "WIDTH", "dataset_svg", "plan_svg"]

MARK = "#e8833a"
"""Colour of what is wanted."""
WIDTH = 720
"""Units of a picture's width: pixels, unless there is less room."""
MOST_GROUPS = 120
"""Rectangles that stand for shards, or for tiles, side by side."""
MOST_BINS = 240
"""Places at which a lane can say that rows are wanted."""
_MOST_TILES = 16
"""Lines of a plan's picture."""
_MOST_INDICES = 100_000
"""Rows of an index array that say where all of them lie; of more, evenly spaced ones do."""
_LANE = (112, WIDTH)
"""Where the lanes of a dataset begin and end."""
_GRID = (92, 470)
"""Where the grid of a plan begins and ends."""
_SHARD = 'fill="currentColor" fill-opacity=".25"'
_WANTED = f'fill="{MARK}"'
_TILE = f'fill="{MARK}" fill-opacity=".55"'


def dataset_svg(layout: Layout, selection: Selection, tile_rows: int | None) -> str:
    """Return a picture of the shards, the rows selected, and the tiles; empty if there are no rows.

    Shards and selection are drawn to the scale of all rows; the tiles, below, to that of the result.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    tile_rows : int, optional
        Rows of a tile; None if that is not known yet.
    """
    total, rows = layout.rows, selection.rows
    if not total:
        return ""
    x = _Scale(*_LANE, total)
    shapes = [_label(14, count_text(len(layout), "shard")), *_shard_shapes(layout, x, top=1, height=18)]
    shapes.append(_label(32, count_text(len(rows), "row")))
    shapes += [_rect(x, low, high, top=24, height=9, fill=_WANTED) for low, high in _marks(rows, total, MOST_BINS)]
    height = 36
    if tile_rows is not None and len(rows):
        height = 62
        low, high = (min(rows[0], rows[-1]), max(rows[0], rows[-1])) if isinstance(rows, range) else _ends(rows)
        left, right = _LANE
        corners = f"{x(low):.2f},33 {max(x(high + 1), x(low) + 1):.2f},33 {right},46 {left},46"
        shapes.append(f'<polygon points="{corners}" fill="{MARK}" fill-opacity=".14"/>')
        shapes += _tile_shapes(len(rows), tile_rows, top=46, height=14)
    label = f"{plural(len(layout), 'shard')}, {rows_text(selection, total)}"
    return _svg(height, label, shapes)


def plan_svg(plan: Plan, *, counted: bool = True, color: str = "inherit") -> str:
    """Return a picture of a plan: for each tile the rows it takes of the shards, and the bytes and requests it reads.

    Parameters
    ----------
    plan : ReadPlan
    counted : bool
        Whether to count the reads.
    color : str
        CSS colour of texts and shards.
    """
    layout, rows, count = plan.layout, plan.rows, plan.tile_count
    if not count:
        text = f'<text x="0" y="14" {_TEXT}>nothing is read: the result holds no bytes</text>'
        return _svg(20, "a plan that reads nothing", [text], color)
    groups = list(_groups(count, _MOST_TILES))
    x, line, top = _Scale(*_GRID, layout.rows), 17, 24
    bottom = top + line * len(groups)
    reads = np.array(plan.tile_reads, np.int64) if counted else None
    row_nbytes = plan.nbytes // len(rows)
    shown = []
    for first, last in groups:
        part = rows[first * plan.tile_rows : (last + 1) * plan.tile_rows]
        nbytes = len(part) * row_nbytes if reads is None else int(reads[first : last + 1, 1].sum())
        requests = None if reads is None else int(reads[first : last + 1, 0].sum())
        shown.append((part, nbytes, requests))
    most = max(1, *[nbytes for _, nbytes, _ in shown])
    shapes = [
        _label(15, "tile" if groups[-1] == (count - 1, count - 1) and len(groups) == count else "tiles"),
        _text(_GRID[0], 15, f"{count_text(len(layout), 'shard')}, {count_text(layout.rows, 'row')}"),
        _text(646, 15, "bytes read" if counted else "bytes wanted", "end"),
        *([_text(WIDTH, 15, "requests", "end")] if counted else []),
        *_shard_shapes(layout, x, top=top, height=bottom - top - 3),
    ]
    for i, ((first, last), (part, nbytes, requests)) in enumerate(zip(groups, shown, strict=True)):
        y = top + i * line
        shapes.append(_label(y + 11, f"{first:,}" if first == last else f"{first:,} to {last:,}"))
        fill = _WANTED
        shapes += [
            _rect(x, low, high, top=y + 3, height=line - 9, fill=fill)
            for low, high in _marks(part, layout.rows, MOST_GROUPS)
        ]
        shapes.append(f'<rect x="480" y="{y + 3}" width="{92 * nbytes / most:.2f}" height="{line - 9}" {_TILE}/>')
        shapes.append(_text(646, y + 11, size_text(nbytes), "end"))
        if requests is not None:
            shapes.append(_text(WIDTH, y + 11, f"{requests:,}", "end"))
    summary = f"wanted {size_text(plan.nbytes)}"
    if counted:
        summary += f", read {size_text(plan.bytes_read)} in {plural(plan.requests, 'request')}"
        summary += f": {plan.read_amplification:.2f} bytes for each one wanted"
    shapes.append(_text(_GRID[0], bottom + 13, summary))
    label = f"{plural(count, 'tile')} of {plural(len(layout), 'shard')}; {summary}"
    return _svg(bottom + 20, label, shapes, color)


_TEXT = 'font-size="11" font-family="sans-serif" fill="currentColor"'


def _svg(height: int, label: str, shapes: Sequence[str], color: str = "inherit") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" width="{WIDTH}" '
        f'height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'style="display:block;max-width:100%;height:auto;margin:6px 0 2px;color:{color}">{"".join(shapes)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {_TEXT}>{escape(text)}</text>'


def _label(y: float, text: str) -> str:
    """Return the name of a lane or a line, to the left of it."""
    return f'<text x="0" y="{y}" {_TEXT}>{escape(text)}</text>'


class _Scale:
    """Where on a lane a row lies."""

    def __init__(self, left: float, right: float, total: int) -> None:
        self.left, self.right = left, right
        self._each = (right - left) / total

    def __call__(self, row: float) -> float:
        return self.left + row * self._each


def _rect(x: _Scale, low: float, high: float, *, top: float, height: float, fill: str, gap: float = 0) -> str:
    """Return a rectangle over rows [low, high), with a gap before the next; it is never too narrow to be seen."""
    left = min(x(low), x.right - 1)
    width = max(1.0, x(high) - left - gap)
    return f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" {fill}/>'


def _titled(rect: str, title: str) -> str:
    return f"{rect[:-2]}><title>{escape(title)}</title></rect>"


def _groups(count: int, most: int) -> Iterable[tuple[int, int]]:
    """Yield the first and last number of what one rectangle stands for."""
    pieces = min(count, most)
    edges = [i * count // pieces for i in range(pieces + 1)]
    return ((a, b - 1) for a, b in pairwise(edges))


def _shard_shapes(layout: Layout, x: _Scale, *, top: float, height: float) -> Iterator[str]:
    """Yield a rectangle for each shard that has rows, as wide as they are many; of many shards, for each group."""
    folder = folder_of(layout)
    few = len(layout) <= MOST_GROUPS
    for first, last in _groups(len(layout), MOST_GROUPS):
        start, stop = layout.start_stop(first)[0], layout.start_stop(last)[1]
        if stop > start:
            name = name_of(layout.path(first), folder) if first == last else f"shards {first:,} to {last:,}"
            rect = _rect(x, start, stop, top=top, height=height, fill=_SHARD, gap=few)
            yield _titled(rect, f"{name}: {plural(stop - start, 'row')}, {start:,} to {stop:,}")


def _tile_shapes(rows: int, tile_rows: int, *, top: float, height: float) -> Iterator[str]:
    """Yield a rectangle for each tile of the result, or for each group of them."""
    count = -(-rows // tile_rows)
    yield _label(top + 11, count_text(count, "tile"))
    x = _Scale(*_LANE, rows)
    for first, last in _groups(count, MOST_GROUPS):
        start, stop = first * tile_rows, min(rows, (last + 1) * tile_rows)
        name = f"tile {first:,}" if first == last else f"tiles {first:,} to {last:,}"
        rect = _rect(x, start, stop, top=top, height=height, fill=_TILE, gap=count <= MOST_GROUPS)
        yield _titled(rect, f"{name}: rows {start:,} to {stop:,} of the result")


def _ends(rows: npt.NDArray[np.int64]) -> tuple[int, int]:
    return int(rows.min()), int(rows.max())


def _marks(rows: Rows, total: int, most: int) -> list[tuple[float, float]]:
    """Return where rows are wanted, as few intervals of global rows."""
    if not len(rows):
        return []
    if isinstance(rows, range):
        low, high, step = min(rows[0], rows[-1]), max(rows[0], rows[-1]), abs(rows.step)
        if step * most < 2 * total:
            return [(low, high + 1)]
        ordered: npt.NDArray[np.int64] = np.arange(low, high + 1, step, dtype=np.int64)
    else:
        ordered = rows[:: -(-len(rows) // _MOST_INDICES)]
    bins = min(total, most)
    full = np.zeros(bins + 2, np.int8)
    full[1 + (ordered * (bins / total)).astype(np.int64).clip(0, bins - 1)] = 1
    edges = np.flatnonzero(np.diff(full)).tolist()
    return [(a * total / bins, b * total / bins) for a, b in zip(edges[::2], edges[1::2], strict=True)]
