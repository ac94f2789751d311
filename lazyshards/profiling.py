"""Where the time of one compute went: seconds and bytes of each stage, and what plain reads would have taken."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards import display
from lazyshards.layout import Layout
from lazyshards.recording import Recorder

__all__ = ["Limit", "Profile", "Stage", "device_nbytes", "make_profile"]

_WALL = ("plan", "allocate")
"""Stages of the thread that computes, before the leaves run."""
_WORK = ("read", "decode", "convert", "map", "place", "other")
"""Stages of a leaf, in the order in which bytes go through them."""
_TRIES = 3
"""Times that the limit is measured: the best one counts."""
_BUFFER_NBYTES = 4 << 20
"""Bytes of a plain read at most."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a compute."""

    name: str
    """What was done."""
    seconds: float
    """How long it took; of work in leaves, on all processors together."""
    nbytes: int
    """Bytes that went through it; 0 where that means nothing."""
    count: int
    """How often: of reads, the requests."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What reading the same bytes takes by nothing but positional reads."""

    seconds: float
    """Time of it, into one buffer a thread, over and over, the best of three: memory that is fresh costs more."""
    nbytes: int
    """Bytes."""
    threads: int
    """Threads that read."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Profile:
    """Where the time of one compute went. Made by :meth:`lazyshards.ShardedDataset.profile`."""

    engine: str
    """Name of the engine."""
    workers: int
    """Processors that ran leaves, of all ranks."""
    tiles: int
    """Number of tiles."""
    shape: tuple[int, ...]
    """Shape of the result."""
    dtype: np.dtype[np.generic]
    """Type of its elements."""
    nbytes: int
    """Bytes of the result."""
    seconds: float
    """Time of the compute, by the clock; starting the engine is not counted."""
    stages: tuple[Stage, ...]
    """plan, allocate, fill, engine: they add up to ``seconds``. fill is from the first leaf's start to the last's end,
    engine what is left: launching, waiting, handing over."""
    work: tuple[Stage, ...]
    """What the leaves did: read, decode, convert, map, place, other; seconds of all processors together."""
    device_nbytes: int
    """Bytes that the operating system fetched from devices for this process meanwhile; 0 where it does not say."""
    limit: Limit | None
    """What plain reads of the same bytes take, if that was asked for and can be told."""
    note: str
    """What the numbers leave out; empty if nothing."""
    array: Any
    """The result."""

    @property
    def bytes_read(self) -> int:
        """Bytes that the storage delivered; what a library read from files itself is not seen."""
        return sum([each.nbytes for each in self.work if each.name == "read"])

    @property
    def requests(self) -> int:
        """Reads that the storage was asked for."""
        return sum([each.count for each in self.work if each.name == "read"])

    @property
    def bandwidth(self) -> float:
        """Bytes of the result a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def limit_reached(self) -> float | None:
        """Time of the plain reads over that of the compute: 1 if nothing else took time; None without a limit."""
        return self.limit.seconds / self.seconds if self.limit and self.seconds else None

    def __repr__(self) -> str:
        title, facts = self._facts()
        lines = [f"<Profile of {title}>"]
        for header, rows in self._tables():
            widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
            for row in (header, *rows):
                first, *rest = row
                cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
                lines.append("  " + "  ".join([first.ljust(max(16, widths[0])), *cells]).rstrip())
        lines += [f"  {name:16}  {display.folded(text, 20)}" for name, text in facts]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title, facts = self._facts()
        tables = [display.table_html(header, rows) for header, rows in self._tables()]
        return display.panel("Profile", [("computed", title), *facts], *tables)

    def _facts(self) -> tuple[str, list[tuple[str, str]]]:
        """Return what was computed in what time, and what else there is to say."""
        rate = display.rate_text(self.nbytes, self.seconds)
        title = f"{self.shape} {self.dtype}, {display.size_text(self.nbytes)}, on {self.engine}"
        title += f" in {display.seconds_text(self.seconds)}" + (f", {rate}" if rate else "")
        facts = [("tiles", f"{self.tiles:,} on {display.plural(self.workers, 'processor')}")]
        if self.device_nbytes:
            facts.append(("from devices", f"{display.size_text(self.device_nbytes)}: the rest was in memory already"))
        if self.limit is not None:
            limit = self.limit
            text = (
                f"{display.seconds_text(limit.seconds)} for plain reads of the same {display.size_text(limit.nbytes)} "
            )
            text += f"right after, on {display.plural(limit.threads, 'thread')}, into memory used before: "
            text += f"{display.rate_text(limit.nbytes, limit.seconds)}, of which {self.limit_reached:.2f} was reached"
            facts.append(("limit", text))
        if self.note:
            facts.append(("note", self.note))
        return title, facts

    def _tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        yield (
            ["by the clock", "time", "share", "bytes", "rate"],
            [_line(each, self.seconds, count=False) for each in self.stages],
        )
        if self.work:
            total = sum([each.seconds for each in self.work])
            yield (
                ["of all leaves", "time", "share", "bytes", "rate", "times"],
                [_line(each, total, count=True) for each in self.work],
            )


def _line(each: Stage, total: float, *, count: bool) -> list[str]:
    line = [
        each.name,
        display.seconds_text(each.seconds),
        f"{100 * each.seconds / total:.0f} %" if total else "",
        display.size_text(each.nbytes) if each.nbytes else "",
        "" if each.name == "allocate" else display.rate_text(each.nbytes, each.seconds),
    ]
    return [*line, f"{each.count:,}"] if count else line


def device_nbytes() -> int:
    """Return the bytes that the operating system fetched from devices for this process so far; 0 if it does not say."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512
    except ImportError:  # not on every system
        return 0


def make_profile(recorder: Recorder, *, array: Any, seconds: float, workers: int, note: str, **given: Any) -> Profile:
    """Return what a recorder found; if it kept ranges, they are read again for the limit.

    Parameters
    ----------
    recorder : Recorder
    array : array
        The result.
    seconds : float
        Time of the whole compute.
    workers : int
        Processors that ran leaves.
    note : str
        What the numbers leave out.
    **given
        What else a Profile holds.
    """
    found = {name: Stage(name, *numbers) for name, numbers in recorder.found.items()}
    stages = [found[name] for name in _WALL if name in found]
    if recorder.span is not None:
        first, last = recorder.span
        stages.append(Stage("fill", last - first, array.nbytes, 1))
    stages.append(Stage("engine", max(0.0, seconds - sum([each.seconds for each in stages])), 0, 1))
    notes, limit = [note] if note else [], None
    if recorder.is_blind:
        notes.append("a library read files itself: what it read counts as decoding")
    if recorder.ranges is not None:
        limit = None if recorder.is_blind else _measure_limit(recorder, max(1, min(workers, given["tiles"])))
        if limit is None:
            notes.append("there is no limit to compare with: not all was plain reads of files of this machine")
    return Profile(
        array=array,
        shape=tuple(array.shape),
        dtype=np.dtype(array.dtype),
        nbytes=int(array.nbytes),
        seconds=seconds,
        workers=workers,
        stages=tuple(stages),
        work=tuple([found[name] for name in _WORK if name in found]),
        limit=limit,
        note="; ".join(notes),
        **given,
    )


def _runs(layout: Layout, rows: npt.NDArray[np.int64]) -> list[tuple[str, int, int]]:
    """Return the path, offset and bytes of each run of packed rows."""
    wanted = np.unique(rows)
    shards = layout.ends.searchsorted(wanted, "right")
    first = np.flatnonzero(np.diff(wanted, prepend=-2) + np.diff(shards, prepend=-1) != 1)
    counts = np.diff(first, append=len(wanted))
    size, runs = layout.row_nbytes, []
    for row, shard, count in zip(wanted[first].tolist(), shards[first].tolist(), counts.tolist(), strict=True):
        offset = layout.offset(shard) + (row - layout.start_stop(shard)[0]) * size
        runs.append((layout.path(shard), offset, count * size))
    return runs


def _measure_limit(recorder: Recorder, threads: int) -> Limit | None:
    """Return what plain positional reads of the same bytes take; None if they are not all of this machine's files."""
    local: dict[tuple[int, str], str | None] = {}
    found: list[tuple[str, int, int]] = []
    ranges = list(recorder.ranges or [])
    for layout, rows in recorder.gathers:
        ranges += [(layout.storage, *run) for run in _runs(layout, rows)]
    for storage, path, offset, nbytes in ranges:
        key = id(storage), path
        if key not in local:
            local[key] = storage.local_path(path)
        name = local[key]
        if name is None:
            return None
        found.append((name, offset, nbytes))
    if not found or not hasattr(os, "preadv"):
        return None
    found.sort()
    ends = np.cumsum([nbytes for _, _, nbytes in found])
    total = int(ends[-1])
    shares = [total * i // threads for i in range(1, threads)]
    cuts = [0, *ends.searchsorted(shares, "right").tolist(), len(found)]
    pieces = [found[a:b] for a, b in pairwise(cuts) if b > a]
    # Bytes of a bytearray are touched, so that reading into them costs no page faults.
    buffers = [bytearray(min(_BUFFER_NBYTES, max([nbytes for _, _, nbytes in piece]))) for piece in pieces]
    best = float("inf")
    with ThreadPoolExecutor(len(pieces)) as pool:
        for _ in range(_TRIES):
            start = time.perf_counter()
            list(pool.map(_read_plainly, pieces, buffers))
            best = min(best, time.perf_counter() - start)
    return Limit(best, total, len(pieces))


def _read_plainly(ranges: Sequence[tuple[str, int, int]], into: bytearray) -> None:
    """Read ranges of files, sorted, into one buffer over and over."""
    buffer = memoryview(into)
    opened, fd = "", -1
    try:
        for path, start, nbytes in ranges:
            if path != opened:
                if fd >= 0:
                    os.close(fd)
                opened, fd = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            offset, stop = start, start + nbytes
            while offset < stop:
                count = os.preadv(fd, (buffer[: stop - offset],), offset)
                if not count:
                    break
                offset += count
    finally:
        if fd >= 0:
            os.close(fd)
