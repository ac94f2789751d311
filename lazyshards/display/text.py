"""A dataset and a plan as plain text."""

from lazyshards.display.plans import Held, Plan, plan_facts
from lazyshards.display.shards import HEADER, aligned, entries, folder_of, name_of, touched
from lazyshards.display.words import cell_texts, count_text, folded, is_all, one_line, plural, rows_text, size_text
from lazyshards.layout import Layout
from lazyshards.selection import Selection

__all__ = ["dataset_text", "nbytes_of", "plan_text", "selected_text", "title_text"]


def selected_text(layout: Layout, selection: Selection) -> str:
    """Return what is selected of what, in words."""
    texts = [rows_text(selection, layout.rows)]
    if selection.scalar or not is_all(selection.rows, layout.rows):
        numbers, known = touched(layout, selection.rows)
        few = f"{len(numbers):,} of {plural(len(layout), 'shard')}"
        texts[0] += f" (in {few})" if known else f" (in at most {few})"
    return "; ".join(texts + cell_texts(selection.cell, layout.row_shape))


def title_text(layout: Layout, selection: Selection) -> str:
    """Return the name of a dataset and of what is selected of its rows, in few words.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    """
    folder = folder_of(layout)
    path, folder = (layout.path(0), folder) if len(layout) == 1 else (folder.rstrip("/").rpartition("/")[2], "")
    name = name_of(path, folder)
    rows = selection.rows
    if is_all(rows, layout.rows):
        part = ""
    elif isinstance(rows, range) and rows.step == 1:
        part = f"[{rows.start:,}:{rows.stop:,}]"
    elif isinstance(rows, range) and rows.step > 1 and rows.start < rows.step and rows[-1] + rows.step >= layout.rows:
        part = f"[{rows.start or ''}::{rows.step}]"
    else:
        part = f"[{count_text(len(rows), 'row')}]"
    return (name or layout.format) + part


def nbytes_of(layout: Layout, selection: Selection) -> int:
    """Return the bytes of what is selected."""
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
    kept = layout.format == "memory"  # one array, which is no file and lies in no folder
    shards = "in memory" if kept else plural(len(layout), f"{layout.format} shard")
    what = f"{selection.shape} {layout.dtype}, {size_text(nbytes_of(layout, selection))}, {shards}"
    lines = [f"<ShardedDataset {what}, engine {one_line(engine)}>", f"  {selected_text(layout, selection)}"]
    if kept:
        return "\n".join(lines)
    if folder := folder_of(layout):
        lines.append(f"  in {folder}")
    shown = entries(layout, selection)
    if shown:
        lines += aligned([HEADER[: max(map(len, shown))], *shown])
    return "\n".join([line.rstrip() for line in lines])


def plan_text(plan: Plan, engine: str, capacity: Held, shards: int | None = None) -> str:
    """Return a plan for a person: one aligned line for each of its numbers, and one for each stage of reading.

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
    parts = f"result {size_text(nbytes)}, scratch {size_text(peak - nbytes)}"
    limit = "" if capacity.result_nbytes is None else f", of {size_text(capacity.result_nbytes)} free"
    facts = [("engine", f"{engine}, {plural(capacity.workers, 'processor')}"), *plan_facts(plan, shards)]
    if tiles > 1 and capacity.workers > 1:
        busiest, most = [int(each.max()) for each in plan.loads(capacity.workers)]
        skew = f"{size_text(busiest)} in {plural(most, 'request')}, {plan.skew(capacity.workers):.2f} times the mean"
        facts.append(("busiest", skew))
    facts.append(("peak memory", f"{size_text(peak)}  ({parts}{limit})"))
    facts += [("stages" if i == 0 else "", f"{name:9}{text}") for i, (name, text) in enumerate(plan.stages)]
    return "\n".join([f"{label:16}{folded(text, 16)}" for label, text in facts])
