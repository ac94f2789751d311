"""A dataset, a plan and a bundle for a notebook: facts, a picture to scale, and a bounded table.

Inline styles only, and no colour of our own but the picture's: notebooks have themes.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lazyshards.display.picture import WIDTH, dataset_svg, plan_svg
from lazyshards.display.plans import Plan, is_quickly_counted, plan_facts
from lazyshards.display.shards import HEADER, entries, folder_of
from lazyshards.display.text import nbytes_of, selected_text
from lazyshards.display.words import hide_secrets, one_line, printable, size_text
from lazyshards.layout import Layout
from lazyshards.selection import Selection

__all__ = ["bundle_html", "dataset_html", "panel", "plan_html", "table_html"]

_TABLE = "border-collapse:collapse;border:0;margin:0;table-layout:auto;font-size:inherit;color:inherit;max-width:100%"
_LINE = "background:transparent;border:0"
_CELL = "background:transparent;border:0;vertical-align:top;font-weight:normal;max-width:none;padding:1px 0;"
_KEY = f"{_CELL}text-align:left;padding-right:12px;white-space:nowrap;opacity:.75"
_VALUE = f"{_CELL}text-align:left;white-space:normal;overflow-wrap:anywhere"
_NUMBER = f"{_CELL}text-align:right;padding-left:14px;white-space:nowrap"


def dataset_html(layout: Layout, selection: Selection, engine: str, tile_rows: int | None = None) -> str:
    """Return a dataset for a notebook: facts, a picture of shards, selection and tiles, a bounded table of shards.

    Parameters
    ----------
    layout : Layout
    selection : Selection
    engine : str
        Name of the engine, with what is wrong with it if something is.
    tile_rows : int, optional
        Rows of a tile; None if that is not known yet.
    """
    facts = [
        ("shape", str(selection.shape)),
        ("dtype", layout.dtype_text),
        ("size", size_text(nbytes_of(layout, selection))),
        ("selected", selected_text(layout, selection)),
    ]
    kept = layout.format == "memory"  # one array, which is no file and lies in no folder
    if not kept:
        where = f" in {folder}" if (folder := folder_of(layout)) else ""
        facts.append(("shards", f"{len(layout):,} {layout.format}{where}"))
    if layout.maps:
        facts.append(("mapped by", layout.maps_text))
    if layout.note:
        facts.append(("kept", hide_secrets(layout.note)))
    if layout.manifest:
        facts.append(("manifest", hide_secrets(layout.manifest)))
    facts.append(("engine", one_line(engine)))
    table = [] if kept else entries(layout, selection)
    folded = _folded("shards", table_html(HEADER[: max(map(len, table))], table)) if table else ""
    return panel("ShardedDataset", facts, dataset_svg(layout, selection, tile_rows), folded)


def plan_html(plan: Plan) -> str:
    """Return a plan for a notebook: its numbers, its stages, and a picture of what each tile reads.

    The reads of very many rows or shards are not counted, since that would take a while.
    """
    counted = is_quickly_counted(plan)
    facts = [*plan_facts(plan, counted=counted), *[(name, text) for name, text in plan.stages]]
    return panel("ReadPlan", facts, plan_svg(plan, counted=counted))


def bundle_html(rows: int, nbytes: int, members: Mapping[str, str]) -> str:
    """Return several datasets for a notebook.

    Parameters
    ----------
    rows : int
        Of each.
    nbytes : int
        Of all.
    members : mapping from str to str
        The HTML of each, by its name.
    """
    facts = [("rows", f"{rows:,}"), ("size", size_text(nbytes)), ("datasets", f"{len(members):,}")]
    folded = [_folded(name, html, shown=True) for name, html in members.items()]
    return panel("Bundle", facts, *folded)


def panel(title: str, facts: Iterable[tuple[str, str]], *more: str) -> str:
    """Return a title, a table of facts, and what comes below, no wider than a notebook's cell.

    Parameters
    ----------
    title : str
    facts : iterable of (str, str)
        Names and texts, not escaped.
    *more : str
        HTML.
    """
    lines = "".join(
        [
            f'<tr style="{_LINE}"><th style="{_KEY}">{escape(key)}</th><td style="{_VALUE}">{escape(value)}</td></tr>'
            for key, value in facts
        ]
    )
    return (
        f'<div style="color:inherit;max-width:{WIDTH}px">'
        f'<div style="font-weight:bold;margin-bottom:2px">{escape(title)}</div>'
        f'<table style="{_TABLE}"><tbody>{lines}</tbody></table>{"".join(more)}</div>'
    )


def table_html(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table: names to the left, numbers to the right; a line of one cell goes over all columns.

    Parameters
    ----------
    header : sequence of str
    lines : sequence of sequences of str
        Not escaped.
    """
    rows = []
    for tag, line in [("th", header), *[("td", line) for line in lines]]:
        if len(line) == 1:
            cells = f'<td colspan="{len(header)}" style="{_VALUE};opacity:.75">{escape(line[0])}</td>'
        else:
            first, *numbers = line
            cells = f'<{tag} style="{_KEY}">{escape(first)}</{tag}>'
            cells += "".join([f'<{tag} style="{_NUMBER}">{escape(cell)}</{tag}>' for cell in numbers])
        rows.append(f'<tr style="{_LINE}">{cells}</tr>')
    table = f'<table style="{_TABLE}"><tbody>{"".join(rows)}</tbody></table>'
    return f'<div style="overflow-x:auto;margin-top:6px">{table}</div>'


def _folded(title: str, html: str, *, shown: bool = False) -> str:
    """Return what is folded away under its title, or can be."""
    return (
        f'<details style="margin-top:4px"{" open" * shown}>'
        f'<summary style="cursor:pointer;opacity:.75">{escape(printable(title))}</summary>{html}</details>'
    )
