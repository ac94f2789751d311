"""Rows of a Parquet file: pyarrow is shown the pages of the wanted rows and columns, and what it decodes is placed."""

import io
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.columns import Column, Scratch, View, to_numpy, write_rows
from lazyshards.formats.parquet_bands import Place, read_columns
from lazyshards.formats.parquet_footers import MAGIC, Footer, load_pyarrow
from lazyshards.formats.parquet_pages import locate_pages
from lazyshards.formats.parquet_values import Leaf, find_leaf
from lazyshards.layout import Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Part, Storage

__all__ = ["Request", "ShardFile", "read_group"]

_WINDOW_NBYTES = 8 << 20
"""Bytes of a row group that are held, or as many as the storage fetches together: of a larger one, so many columns at a
time; of a larger column, a piece."""
_PAGE_NBYTES = 17 << 16
"""Bytes of a page, which is decoded whole, as writers usually make them at most."""
_PAGES_NBYTES = 48 << 20
"""Bytes that the pages of columns that are decoded together may take once decompressed, if they are as usual."""
_BATCH_NBYTES = 4 << 20
"""Bytes that are decoded at a time."""
_MOST_BATCH_ROWS = 1 << 16
_MOST_WASTED_ROWS = 8192
"""Rows that are decoded and thrown away rather than looking for a page to begin with."""


class Request(NamedTuple):
    """What is read of a file."""

    shard: Shard
    footer: Footer
    view: View
    columns: list[Column]
    """Columns, in the order in which they are written."""
    rest: Cell
    """The cell of each column's own axes."""
    stacked: bool
    """Whether the result has an axis of columns."""
    storage: Storage
    scratch: Scratch


class _Run(NamedTuple):
    """Bytes that pyarrow is shown in one piece, and where they lie."""

    shown: int
    """First byte, where pyarrow looks for it."""
    parts: tuple[tuple[int, int], ...]
    """First byte in the file, and the byte after the last, of each part."""

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return sum([stop - start for start, stop in self.parts])


class _Pass(NamedTuple):
    """Columns that are decoded together, since their pages begin with the same row."""

    first: int
    """Row that is decoded first, counted in the file."""
    places: list[int]
    """Which of the columns of the request."""
    runs: list[_Run]
    """What is read."""
    exact: bool
    """Whether nothing else is."""


class ShardFile(io.RawIOBase):
    """A file whose bytes are fetched as they are asked for, and whose stamp is compared each time."""

    def __init__(self, shard: Shard, storage: Storage) -> None:
        super().__init__()
        self._shard = shard
        self._storage = storage
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte, and return which it is."""
        self._at = offset + (0, self._at, self._shard.stamp.size)[whence]
        return self._at

    def read(self, nbytes: int | None = -1) -> Any:
        """Return the next bytes."""
        left = max(0, self._shard.stamp.size - self._at)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        buffer = np.empty(nbytes, np.uint8).data
        if nbytes:
            self._storage.fetch_into([Part(self._shard.path, self._shard.stamp, self._at, buffer)])
        self._at += nbytes
        return buffer


class _Window(ShardFile):
    """A file as pyarrow is shown it: runs of bytes, fetched together before if they are few, else when asked for.

    Where pages are skipped, those that are wanted are shown in the place of the first.
    """

    def __init__(self, shard: Shard, storage: Storage, runs: Sequence[_Run], scratch: Scratch, *, exact: bool) -> None:
        super().__init__(shard, storage)
        self._exact = exact
        self._runs = sorted(runs)
        self._shown = [run.shown for run in self._runs]
        self.is_held = sum([run.nbytes for run in runs]) <= _window_nbytes(storage)
        self._buffers: list[memoryview] = []
        if not self.is_held:
            return
        room = scratch.room("window", sum([run.nbytes for run in runs])).data
        wanted, at = [], 0
        for run in self._runs:
            self._buffers.append(room[at : at + run.nbytes])
            for start, stop in run.parts:
                wanted.append((start, room[at : at + stop - start]))
                at += stop - start
        self._fetch(wanted)

    def read(self, nbytes: int | None = -1) -> Any:
        """Return the next bytes; any buffer, which pyarrow does not copy."""
        left = max(0, self._shard.stamp.size - self._at)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        found = self._piece(nbytes)
        if len(found) < nbytes:
            pieces = [bytes(found)]
            while len(found) and sum(map(len, pieces)) < nbytes:
                found = self._piece(nbytes - sum(map(len, pieces)))
                pieces.append(bytes(found))
            return b"".join(pieces)
        return found

    def _piece(self, nbytes: int) -> memoryview:
        """Return the next bytes as far as they lie in one piece."""
        start = self._at
        i = bisect_right(self._shown, start) - 1
        within = start - self._shown[i] if i >= 0 else 0
        if i >= 0 and within < self._runs[i].nbytes:
            if self.is_held:
                found = self._buffers[i][within : within + nbytes]
                self._at += len(found)
                return found
            offset = start
            for first, stop in self._runs[i].parts:
                if within < stop - first:
                    offset, nbytes = first + within, min(nbytes, stop - first - within)
                    break
                within -= stop - first
        elif self._exact:
            return memoryview(b"")
        else:
            offset = start
            if i + 1 < len(self._shown):
                nbytes = min(nbytes, self._shown[i + 1] - start)
        self._at += nbytes
        buffer = _room(nbytes)
        self._fetch([(offset, buffer)])
        return buffer

    def _fetch(self, wanted: Sequence[tuple[int, memoryview]]) -> None:
        self._storage.fetch_into(
            [Part(self._shard.path, self._shard.stamp, offset, buffer) for offset, buffer in wanted]
        )


def _room(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def read_group(request: Request, group: int, start: int, stop: int, out: npt.NDArray[np.generic]) -> None:
    """Fill ``out`` with rows [start, stop) of a file, all of one row group."""
    _vet(request, group)
    if _read_columns(request, group, start, stop, out):
        return
    for part in _plan_passes(request, group, start, stop):
        _decode(request, group, part, start, stop, out)


def _read_columns(request: Request, group: int, start: int, stop: int, out: npt.NDArray[np.generic]) -> bool:
    """Fill ``out`` without the library, if its pages are such that this is possible, and return whether it was."""
    footer, shard = request.footer, request.shard
    first = footer.starts[group]
    leaves: list[Leaf] = []
    for column in request.columns:
        if column.axes:
            return False
        if (group, column.name) not in footer.leaves:
            described = next(field.leaf for field in footer.schema.fields if field.name == column.name)
            footer.leaves[group, column.name] = find_leaf(footer, group, column.name, described)
        leaf = footer.leaves[group, column.name]
        if not isinstance(leaf, Leaf):
            return False
        leaves.append(leaf)
    chunks = [_chunk(shard, footer, group, leaf.number) for leaf in leaves]
    place = Place(shard, request.storage, footer, group, start - first, stop - first)
    return read_columns(place, leaves, chunks, out if request.stacked else out[:, np.newaxis], request.scratch)


class _NothingError(Exception):
    """Nothing is read."""


class _Nothing(_Window):
    """A file that cannot be read."""

    def read(self, nbytes: int | None = -1) -> Any:
        """Refuse."""
        raise _NothingError


def _vet(request: Request, group: int) -> None:
    """Have pyarrow prepare to read a row group, up to the first byte: what is wrong with its footer is an error here.

    Where it is asked for what the footer says of a column, it ends the process if that is wrong.
    """
    pa = load_pyarrow()
    footer = request.footer
    places = {(group, leaf) for column in request.columns for leaf in footer.schema.leaves[column.name]}
    if places <= footer.vetted:
        return
    names = [column.name for column in request.columns]
    source = pa.PythonFile(_Nothing(request.shard, request.storage, (), request.scratch, exact=True), "r")
    with (
        pa.parquet.ParquetFile(source, metadata=footer.metadata, pre_buffer=False, buffer_size=1 << 14) as file,
        suppress(_NothingError),
    ):
        next(file.iter_batches(1, row_groups=[group], columns=names, use_threads=False), None)
    footer.vetted.update(places)


def _decode(request: Request, group: int, part: _Pass, start: int, stop: int, out: npt.NDArray[np.generic]) -> None:
    """Fill the columns of a pass."""
    pa = load_pyarrow()
    columns = [request.columns[k] for k in part.places]
    low, high = part.places[0], part.places[-1] + 1
    together = high - low == len(columns)
    names = [column.name for column in columns]
    window = _Window(request.shard, request.storage, part.runs, request.scratch, exact=part.exact)
    whole = window.is_held and not part.exact and stop == request.footer.starts[group + 1]
    buffer_nbytes = (
        0 if whole else 16 << 10 if window.is_held else max(64 << 10, _window_nbytes(request.storage) // len(part.runs))
    )
    each = request.view.dtype.itemsize * prod(columns[0].axes)
    batch_rows = min(max(1024, _BATCH_NBYTES // max(1, each * len(names))), _MOST_BATCH_ROWS, stop - part.first)
    at = part.first
    with pa.parquet.ParquetFile(
        pa.PythonFile(window, "r"),
        metadata=request.footer.metadata,
        pre_buffer=False,
        page_checksum_verification=True,  # of pages that have one
        buffer_size=min(buffer_nbytes, 8 << 20),
    ) as file:
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False):
            a, b = max(start, at), min(stop, at + len(batch))
            if a < b:
                rows = out[a - start : b - start]
                found = batch.slice(a - at, b - a)
                values = [to_numpy(found.column(column.name), column, request.view) for column in columns]
                if not request.stacked:
                    write_rows(rows, values, request.rest, request.scratch, stacked=False)
                elif together:
                    write_rows(rows[:, low:high], values, request.rest, request.scratch, stacked=True)
                else:
                    for k, array in zip(part.places, values, strict=True):
                        write_rows(rows[:, k : k + 1], [array], request.rest, request.scratch, stacked=True)
            at += len(batch)
            if at >= stop:
                return
    raise ShardReadError(f"{request.shard.path!r} is damaged: its row group {group} ends before row {stop:,}")


def _plan_passes(request: Request, group: int, start: int, stop: int) -> list[_Pass]:
    """Return how rows [start, stop) of a row group are decoded: from its first row on, or from later pages."""
    shard, footer = request.shard, request.footer
    first, end = footer.starts[group], footer.starts[group + 1]
    if start - first >= _MOST_WASTED_ROWS:
        passes = _plan_skipping(request, group, start - first, stop - first)
        if passes:
            return passes
    share = (stop - first) / (end - first)
    runs: list[list[_Run]] = []
    for column in request.columns:
        runs.append([])
        for leaf in footer.schema.leaves[column.name]:
            at, until = _chunk(shard, footer, group, leaf)
            nbytes = min(until - at, int((until - at) * share) + _PAGE_NBYTES)
            runs[-1].append(_Run(at, ((at, at + nbytes),)))
    return _passes(request, group, first, range(len(runs)), runs, exact=False)


def _window_nbytes(storage: Storage) -> int:
    return max(storage.window_nbytes, _WINDOW_NBYTES)


def _passes(
    request: Request, group: int, first: int, places: Sequence[int], runs: Sequence[Sequence[_Run]], *, exact: bool
) -> list[_Pass]:
    """Return the passes that decode some columns, as many at a time as can be held; ``runs`` are of all columns."""
    footer, most_nbytes = request.footer, _window_nbytes(request.storage)
    described = footer.metadata.row_group(group)
    passes: list[_Pass] = []
    held = inflated = 0
    for k in places:
        nbytes = sum([run.nbytes for run in runs[k]])
        leaves = footer.schema.leaves[request.columns[k].name]
        page_nbytes = sum([min(_PAGE_NBYTES, described.column(leaf).total_uncompressed_size) for leaf in leaves])
        if not passes or held + nbytes > most_nbytes or inflated + page_nbytes > _PAGES_NBYTES:
            passes.append(_Pass(first, [], [], exact))
            held = inflated = 0
        passes[-1].places.append(k)
        passes[-1].runs.extend(runs[k])
        held += nbytes
        inflated += page_nbytes
    return passes


def _plan_skipping(request: Request, group: int, start: int, stop: int) -> list[_Pass]:
    """Return how rows [start, stop) of a row group are decoded by their own pages; nothing if that cannot be."""
    shard, footer = request.shard, request.footer
    leaves, each = [], []
    for column in request.columns:
        (leaf, *others) = footer.schema.leaves[column.name]
        count = _values_of_a_row(footer, group, leaf, column)
        if others or not count:
            return []
        leaves.append(leaf)
        each.append(count)
    chunks = [_chunk(shard, footer, group, leaf) for leaf in leaves]
    pages = locate_pages(
        shard.path,
        request.storage,
        chunks,
        [stop * count for count in each],
        [footer.pages.get((group, leaf)) for leaf in leaves],
    )
    firsts: list[int] = []
    runs: list[list[_Run]] = []
    for leaf, count, (shown, _), found in zip(leaves, each, chunks, pages, strict=True):
        if found is None:
            return []
        footer.pages[group, leaf] = found
        at, until, before = found.span(start * count, stop * count)
        if before % count:
            return []
        firsts.append(footer.starts[group] + before // count)
        runs.append([_Run(shown, (found.dictionary, (at, until)))])
    passes: list[_Pass] = []
    for first in sorted(set(firsts)):
        places = [k for k, other in enumerate(firsts) if other == first]
        passes += _passes(request, group, first, places, runs, exact=True)
    return passes


def _values_of_a_row(footer: Footer, group: int, leaf: int, column: Column) -> int:
    """Return how many values each row has in a column; 0 if only decoding tells."""
    if not footer.metadata.schema.column(leaf).max_repetition_level:
        return 1
    if column.name not in footer.schema.fixed:
        return 0
    # A null in place of a list would be one value.
    return prod(column.axes) if footer.counts and footer.counts[group][leaf].nulls == 0 else 0


def _chunk(shard: Shard, footer: Footer, group: int, leaf: int) -> tuple[int, int]:
    """Return the first byte of a column chunk, and the byte after its last."""
    found = footer.chunks.get((group, leaf))
    if found is None:
        chunk = footer.metadata.row_group(group).column(leaf)
        if chunk.file_path:
            raise ShardReadError(f"{shard.path!r} keeps its rows in another file, {chunk.file_path!r}; open that one")
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
            start = min(start, chunk.dictionary_page_offset)
        stop = start + chunk.total_compressed_size
        if not len(MAGIC) <= start <= stop <= shard.stamp.size:
            raise ShardReadError(
                f"{shard.path!r} is damaged: its footer puts a column at bytes {start:,} to {stop:,}, and it holds "
                f"{shard.stamp.size:,}"
            )
        found = footer.chunks[group, leaf] = (start, stop)
    return found
