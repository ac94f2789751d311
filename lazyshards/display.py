"""Text and HTML of a dataset, a layout and a plan: bounded in size and time, whatever the number of shards."""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from lazyshards.layout import Decoded, Extents, Layout, Packed, Planes, Shard
from lazyshards.plan import Capacity, ReadPlan
from lazyshards.selection import Cell, Rows, Selection

__all__ = [
    "dataset_html",
    "dataset_text",
    "hide_secrets",
    "plan_text",
    "printable",
    "shards_text",
    "size_text",
]

_MOST_LINES = 8
"""Lines of a table of shards, the one of the dots included."""
_MOST_INDICES = 100_000
"""Rows of an index array up to which the shards that they touch are counted; more would make a repr slow."""
_MOST_WIDTH = 48
"""Characters of a name in a table."""
_BAR_SHARDS = 120
"""Rectangles that stand for shards in a bar."""
_BAR_BINS = 240
"""Places at which a bar can say that rows are wanted."""
_BAR_WIDTH = 1_000
"""Units of a bar's width; the browser scales it."""


# Words -----------------------------------------------------------------------------------------------------------


def size_text(nbytes: int) -> str:
    """Return a number of bytes for a person.

    Parameters
    ----------
    nbytes : int

    Examples
    --------
    >>> size_text(999), size_text(128_000), size_text(5 << 30)
    ('999 B', '125.0 KiB', '5.0 GiB')
    """
    if nbytes < 1024:
        return f"{nbytes:,} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} EiB"


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]*")


def hide_secrets(text: str) -> str:
    """Return the text with the user, password and query of every URL in it replaced by ``***``.

    Parameters
    ----------
    text : str
        A path, a URL or a message; what is no URL is returned as it is.

    Examples
    --------
    >>> hide_secrets("'s3://key:secret@bucket/a.npy' and 'https://host/a.npy?signature=abc'")
    "'s3://***@bucket/a.npy' and 'https://host/a.npy?***'"
    """
    return _URL.sub(lambda match: _hide(match[0]), text) if "://" in text else text


def _hide(url: str) -> str:
    scheme, _, rest = url.partition("://")
    rest, query, _ = rest.partition("?")
    place, slash, path = rest.partition("/")
    # A password that was not escaped may hold a slash: then what stands before it is no host and port.
    if "@" not in place and "@" in path and not re.fullmatch(r"[^:]*(:\d*)?|\[.*\](:\d*)?", place):
        place, slash, path = rest.rpartition("@")[0] + "@", "", rest.rpartition("@")[2]
    if "@" in place:
        place = "***@" + place.rpartition("@")[2]
    return f"{scheme}://{place}{slash}{path}{'?***' if query else ''}"


def printable(text: str) -> str:
    """Return the text with everything that could not be printed, or would move the cursor, as an escape.

    Parameters
    ----------
    text : str
        A path; names of files may hold line feeds, and bytes that are no text.
    """
    if text.isprintable():
        return text
    return "".join(
        [c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text]
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _span(positions: range, size: int) -> str:
    """Return which of ``size`` positions a range keeps; the second number is the first that is not kept."""
    if not positions:
        return f"none of {size:,}"
    low, high = min(positions[0], positions[-1]), max(positions[0], positions[-1])
    text = f"{low:,} to {high + 1:,} of {size:,}"
    step = abs(positions.step)
    if len(positions) > 1 and step > 1:
        suffix = "th" if step % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
        text += f", every {step:,}{suffix}"
    if len(positions) > 1 and positions.step < 0:
        text += ", backwards"
    return text


def _rows_text(selection: Selection, total: int) -> str:
    """Return what is selected of the rows."""
    rows = selection.rows
    if selection.scalar:
        return f"row {int(rows[0]):,} of {total:,}, its axis dropped"
    if _is_all(rows, total):
        return f"all {_plural(total, 'row')}"
    if not len(rows):
        return f"no rows of {total:,}"
    if isinstance(rows, range):
        return f"rows {_span(rows, total)}"
    return f"{_plural(len(rows), 'row')} by index, between {int(rows.min()):,} and {int(rows.max()):,} of {total:,}"


def _cell_texts(cell: Cell, row_shape: tuple[int, ...]) -> list[str]:
    """Return what is selected of each axis of a row that is not kept whole; axes are numbered as in the shards."""
    texts = []
    for axis, (kept, size) in enumerate(zip(cell, row_shape, strict=True), 1):
        if isinstance(kept, int):
            texts.append(f"axis {axis} at {kept:,} of {size:,}, dropped")
        elif kept != range(size):
            texts.append(f"axis {axis}: {_span(kept, size)}")
    return texts


# Which shards ----------------------------------------------------------------------------------------------------


def _touched(layout: Layout, rows: Rows) -> tuple[Sequence[int] | npt.NDArray[np.int64], bool]:
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


def _is_all(rows: Rows, total: int) -> bool:
    return isinstance(rows, range) and rows == range(total)


def _wanted_rows(rows: Rows, start: int, stop: int) -> int:
    """Return how many of ``rows`` lie in [start, stop)."""
    if not isinstance(rows, range):
        return int(np.count_nonzero((rows >= start) & (rows < stop)))
    if not rows or start >= stop:
        return 0
    low, step = min(rows[0], rows[-1]), abs(rows.step)
    until = [min(len(rows), max(0, -(-(edge - low) // step))) for edge in (start, stop)]
    return until[1] - until[0]


def _folder(layout: Layout) -> str:
    """Return the place that all shards share, fit to be shown."""
    root = layout.root.partition("?")[0] if "://" in layout.root else layout.root
    return printable(hide_secrets(root[: root.rfind("/") + 1]))


def _name(path: str, folder: str) -> str:
    """Return the path of a shard within its folder, fit to be shown."""
    name = printable(hide_secrets(path)).removeprefix(folder)
    if len(name) > _MOST_WIDTH:
        half = (_MOST_WIDTH - 1) // 2
        name = f"{name[:half]}…{name[-half:]}"
    return name


def _entries(layout: Layout, selection: Selection) -> list[list[str]]:
    """Return the cells of a bounded table of the shards touched, without its header; dots stand for those left out."""
    part = not _is_all(selection.rows, layout.rows)
    numbers = _touched(layout, selection.rows)[0] if part else range(len(layout))
    count = len(numbers)
    ahead = _MOST_LINES // 2
    behind = _MOST_LINES - ahead - 1
    few = count <= _MOST_LINES
    shown: list[int | None] = [*range(count)] if few else [*range(ahead), None, *range(count - behind, count)]
    folder = _folder(layout)
    lines = []
    for i in shown:
        if i is None:
            lines.append([f"… {count - _MOST_LINES + 1:,} more …"])
            continue
        number = int(numbers[i])
        start, stop = layout.start_stop(number)
        name = _name(layout.path(number), folder)
        line = _entry(name, start, stop, int(layout.stamps[number, 0]))
        lines.append([*line, f"{_wanted_rows(selection.rows, start, stop):,}"] if part else line)
    return lines


_HEADER = ["shard", "rows", "global rows", "file size", "wanted"]


def _entry(name: str, start: int, stop: int, nbytes: int) -> list[str]:
    return [name, f"{stop - start:,}", f"{start:,} to {stop:,}" if stop > start else "none", size_text(nbytes)]


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
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


# Text ------------------------------------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    return " ".join(hide_secrets(text).split())


def _selected(layout: Layout, selection: Selection) -> str:
    """Return what is selected of what, in words."""
    texts = [_rows_text(selection, layout.rows)]
    if selection.scalar or not _is_all(selection.rows, layout.rows):
        numbers, known = _touched(layout, selection.rows)
        few = f"{len(numbers):,} of {_plural(len(layout), 'shard')}"
        texts[0] += f" (in {few})" if known else f" (in at most {few})"
    return "; ".join(texts + _cell_texts(selection.cell, layout.row_shape))


def _nbytes(layout: Layout, selection: Selection) -> int:
    count = layout.dtype.itemsize
    for size in selection.shape:
        count *= size
    return count


def dataset_text(layout: Layout, selection: Selection, engine: str) -> str:
    """Return one line for a dataset, what is selected, and a bounded table of the shards that this touches.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    engine : str
        Name of the engine, with what is wrong with it if something is.
    """
    shards = _plural(len(layout), f"{layout.format} shard")
    what = f"{selection.shape} {layout.dtype}, {size_text(_nbytes(layout, selection))}, {shards}"
    lines = [f"<ShardedDataset {what}, engine {_one_line(engine)}>", f"  {_selected(layout, selection)}"]
    if folder := _folder(layout):
        lines.append(f"  in {folder}")
    entries = _entries(layout, selection)
    if entries:
        lines += _aligned([_HEADER[: max(map(len, entries))], *entries])
    return "\n".join([line.rstrip() for line in lines])


def plan_text(plan: ReadPlan, engine: str, capacity: Capacity, shards: int | None = None) -> str:
    """Return a plan for a person: one aligned line for each of its numbers.

    Parameters
    ----------
    plan : ReadPlan
    engine : str
        Name of the engine that will run it.
    capacity : Capacity
        What that engine holds.
    shards : int, optional
        Number of shards that the dataset has.
    """
    tiles, nbytes = plan.tile_count, plan.nbytes
    peak = plan.peak_nbytes(capacity.workers)
    scratch = peak - nbytes
    parts = f"result {size_text(nbytes)}, scratch {size_text(scratch)}"
    limit = "" if capacity.result_nbytes is None else f", of {size_text(capacity.result_nbytes)} free"
    ratio = f", {plan.bytes_read / nbytes:.2f} times the bytes wanted" if nbytes else ""
    facts = [
        ("engine", f"{engine}, {_plural(capacity.workers, 'processor')}"),
        ("result", f"{plan.shape} {plan.dtype}"),
        ("shards touched", f"{plan.shards:,}" + ("" if shards is None else f" of {shards:,}")),
        ("tiles", f"{tiles:,}"),
        ("rows a tile", f"{min(plan.tile_rows, len(plan.rows)):,}" if tiles else "0"),
        ("bytes wanted", f"{nbytes:,}  ({size_text(nbytes)})"),
        ("bytes read", f"{plan.bytes_read:,}  ({size_text(plan.bytes_read)}{ratio})"),
        ("requests", f"{plan.requests:,}"),
        ("peak memory", f"{size_text(peak)}  ({parts}{limit})"),
    ]
    if tiles > 1 and capacity.workers > 1:
        busiest, most = [int(each.max()) for each in plan.loads(capacity.workers)]
        skew = f"{size_text(busiest)} in {_plural(most, 'request')}, {plan.skew(capacity.workers):.2f} times the mean"
        facts.insert(-1, ("busiest", skew))
    return "\n".join([f"{label:16}{text}" for label, text in facts])


# HTML ------------------------------------------------------------------------------------------------------------
#
# Inline styles only, and no colour of our own but one that reads on light and on dark: notebooks have themes.

_MARK = "#e8833a"
_TABLE = "border-collapse:collapse;margin:0;font-size:inherit;color:inherit"
_LINE = "background:transparent"
_CELL = "background:transparent;vertical-align:top;font-weight:normal;padding:1px 0;"
_KEY = f"{_CELL}text-align:left;padding-right:12px;white-space:nowrap;opacity:.7"
_VALUE = f"{_CELL}text-align:left"
_NUMBER = f"{_CELL}text-align:right;padding-left:14px;white-space:nowrap"


def dataset_html(layout: Layout, selection: Selection, engine: str) -> str:
    """Return a dataset for a notebook: facts, a bar of the shards to scale, and a bounded table of shards.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    engine : str
        Name of the engine, with what is wrong with it if something is.
    """
    facts = [
        ("shape", str(selection.shape)),
        ("dtype", layout.dtype_text),
        ("size", size_text(_nbytes(layout, selection))),
        ("selected", _selected(layout, selection)),
        ("shards", f"{len(layout):,} {layout.format}" + (f" in {folder}" if (folder := _folder(layout)) else "")),
        ("engine", _one_line(engine)),
    ]
    rows = "".join(
        [
            f'<tr style="{_LINE}"><th style="{_KEY}">{key}</th><td style="{_VALUE}">{escape(value)}</td></tr>'
            for key, value in facts
        ]
    )
    return (
        '<div style="color:inherit;max-width:720px">'
        '<div style="font-weight:bold;margin-bottom:2px">ShardedDataset</div>'
        f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>'
        f"{_bar(layout, selection)}{_table_html(_entries(layout, selection))}</div>"
    )


def _table_html(entries: Sequence[Sequence[str]]) -> str:
    if not entries:
        return ""
    width = max(map(len, entries))
    lines = []
    for tag, line in [("th", _HEADER[:width]), *[("td", line) for line in entries]]:
        if len(line) == 1:
            cells = f'<td colspan="{width}" style="{_VALUE};opacity:.7">{escape(line[0])}</td>'
        else:
            cells = "".join(
                [f'<{tag} style="{_NUMBER if i else _KEY}">{escape(cell)}</{tag}>' for i, cell in enumerate(line)]
            )
        lines.append(f'<tr style="{_LINE}">{cells}</tr>')
    return (
        '<details style="margin-top:4px"><summary style="cursor:pointer;opacity:.7">shards</summary>'
        f'<table style="{_TABLE}"><tbody>{"".join(lines)}</tbody></table></details>'
    )


def _bar(layout: Layout, selection: Selection) -> str:
    """Return a drawing of the shards, as wide as they have rows, with the rows that are wanted marked below."""
    total = layout.rows
    if not total:
        return ""
    scale = _BAR_WIDTH / total
    pieces = []
    for first, last in _groups(len(layout)):
        start, stop = layout.start_stop(first)[0], layout.start_stop(last)[1]
        if stop > start:
            name = _name(layout.path(first), _folder(layout)) if first == last else f"shards {first:,} to {last:,}"
            title = escape(f"{name}: {_plural(stop - start, 'row')}, {start:,} to {stop:,}")
            shape = _rect(start * scale, stop * scale - 1.5, top=0, height=18)
            pieces.append(f'{shape} fill="currentColor" fill-opacity=".28"><title>{title}</title></rect>')
    for low, high in _marks(selection.rows, total):
        pieces.append(f'{_rect(low * scale, high * scale, top=20, height=6)} fill="{_MARK}"/>')
    label = escape(f"{_plural(len(layout), 'shard')}, {_rows_text(selection, total)}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_BAR_WIDTH} 26" preserveAspectRatio="none" '
        f'style="display:block;width:100%;height:26px;margin-top:6px">{"".join(pieces)}</svg>'
    )


def _rect(left: float, right: float, *, top: int, height: int) -> str:
    """Return the start of a rectangle's tag; it is never too narrow to be seen."""
    x = min(left, _BAR_WIDTH - 1)
    return f'<rect x="{x:.2f}" y="{top}" width="{max(1.0, right - left):.2f}" height="{height}"'


def _groups(count: int) -> Iterable[tuple[int, int]]:
    """Yield the first and last number of the shards that one rectangle stands for."""
    pieces = min(count, _BAR_SHARDS)
    edges = [i * count // pieces for i in range(pieces + 1)]
    return ((a, b - 1) for a, b in pairwise(edges))


def _marks(rows: Rows, total: int) -> list[tuple[float, float]]:
    """Return where rows are wanted, as few intervals of global rows."""
    if not len(rows):
        return []
    if isinstance(rows, range):
        low, high, step = min(rows[0], rows[-1]), max(rows[0], rows[-1]), abs(rows.step)
        if step * _BAR_BINS < 2 * total:
            return [(low, high + 1)]
        ordered: npt.NDArray[np.int64] = np.arange(low, high + 1, step, dtype=np.int64)
    else:
        # So many rows of an index array that a part of them says where they lie.
        ordered = rows[:: -(-len(rows) // _MOST_INDICES)]
    bins = min(total, _BAR_BINS)
    full = np.zeros(bins + 2, np.int8)
    full[1 + (ordered * (bins / total)).astype(np.int64).clip(0, bins - 1)] = 1
    edges = np.flatnonzero(np.diff(full)).tolist()
    return [(a * total / bins, b * total / bins) for a, b in zip(edges[::2], edges[1::2], strict=True)]
