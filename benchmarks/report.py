"""Tables, ratios and targets, and how they are printed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Table", "Target", "markdown", "ratios"]

Figures = dict[str, list[float]]
"""By peer; the same place in each list is the same turn."""


@dataclass(frozen=True, slots=True)
class Target:
    """A promise about one peer, as a bound on a ratio of times or on the figure itself."""

    peer: str
    """Whom it binds."""
    kind: Literal["at most", "at least"]
    """``at most``: its time is at most ``bound`` times the other's; ``at least``: it is ``bound`` times as fast."""
    bound: float
    """The threshold."""
    against: tuple[str, ...] = ()
    """The other; of several, the best in each turn; of none, the bound is on the figure itself, in the table's unit."""

    def describe(self, unit: str) -> str:
        """Return the target in words."""
        if not self.against:
            return f"{self.peer}: {self.kind} {self.bound:g} {unit}"
        others = "the better of " * (len(self.against) > 1) + " and ".join(self.against)
        times = "times" if self.kind == "at most" else "times as fast as"
        return f"{self.peer}: {self.kind} {self.bound:g} {times} {others}"

    def measured(self, figures: Figures) -> float | None:
        """Return the median over the turns, or None where someone is absent."""
        if self.peer not in figures or any(other not in figures for other in self.against):
            return None
        own = figures[self.peer]
        if not self.against:
            return statistics.median(own)
        best = [min(turn) for turn in zip(*(figures[other] for other in self.against), strict=True)]
        return statistics.median(ratios(own, best) if self.kind == "at most" else ratios(best, own))

    def is_met(self, value: float) -> bool:
        """Return whether a measured value keeps the promise."""
        return value <= self.bound if self.kind == "at most" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Table:
    """What one benchmark found."""

    title: str
    """What was measured, on what."""
    unit: str
    """Unit of the figures."""
    figures: Figures
    """The figure of each peer in each turn."""
    absent: dict[str, str] = field(default_factory=dict)
    """By peer without figures, why."""
    baseline: str = ""
    """The peer that the ratio column divides by, turn by turn; none if empty."""
    targets: tuple[Target, ...] = ()
    """What was promised."""
    notes: tuple[str, ...] = ()
    """What a reader must know to trust it."""

    def verdicts(self) -> list[dict[str, str | float | None]]:
        """Return each target with its measured value and whether it is met."""
        found: list[dict[str, str | float | None]] = []
        for target in self.targets:
            value = target.measured(self.figures)
            verdict = "not measured" if value is None else "met" if target.is_met(value) else "missed"
            found.append({"target": target.describe(self.unit), "measured": value, "verdict": verdict})
        return found


def ratios(own: list[float], other: list[float]) -> list[float]:
    """Return the ratio of each pair of one turn."""
    return [a / b for a, b in zip(own, other, strict=True)]


def markdown(table: Table) -> str:
    """Return a table, its targets and its notes as Markdown."""
    based = table.baseline in table.figures
    columns = ["peer", f"median {table.unit}", "min", "max"] + [f"times {table.baseline}"] * based
    rows = []
    for name, values in table.figures.items():
        numbers = [statistics.median(values), min(values), max(values)]
        if based:
            numbers.append(statistics.median(ratios(values, table.figures[table.baseline])))
        rows.append([name, *map(_number, numbers)])
    lines = [f"### {table.title}", "", *_grid(columns, rows)]
    if table.targets:
        verdicts = [
            [
                str(row["target"]),
                "" if row["measured"] is None else _number(float(row["measured"])),
                str(row["verdict"]),
            ]
            for row in table.verdicts()
        ]
        lines += ["", *_grid(["target", "measured", "verdict"], verdicts)]
    lines += [f"\nNot measured: {name}: {reason}" for name, reason in table.absent.items()]
    lines += [f"\n{note}" for note in table.notes]
    return "\n".join(lines)


def _number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    if value == 0:
        return "0"
    digits = 0
    while digits < 6 and abs(value) * 10**digits < 100:
        digits += 1
    return f"{value:.{digits}f}"


def _grid(columns: list[str], rows: list[list[str]]) -> list[str]:
    cells = [columns, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
