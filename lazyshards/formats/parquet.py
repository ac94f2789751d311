"""Parquet files: row counts from footers, and only the row groups and columns that are wanted.

All bytes come through the storage, so that stamps are checked, requests are merged and tried again, and a remote file
needs nothing but ranged reads. pyarrow parses footers and decodes pages.
"""

import io
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.parquet_pages import Pages, locate_pages
from lazyshards.formats.tables import (
    Cache,
    Column,
    ColumnError,
    Field,
    Options,
    Scratch,
    Table,
    View,
    agree,
    describe_type,
    parse_options,
    to_numpy,
    write_rows,
)
from lazyshards.layout import Decoded, Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Part, Storage

__all__ = ["ParquetFormat"]

_MAGIC = b"PAR1"
_TAIL_NBYTES = 8
"""Bytes at the end of a file: the footer's length, and the magic."""
_MOST_FOOTER_NBYTES = 256 << 20
"""Bytes of the longest footer that is parsed."""
_FOOTERS_AT_A_TIME = 512
"""Files whose footers are held in memory together while they are inspected."""
_MOST_NULL_CHECKS = 20_000
"""Column chunks of one file whose statistics are asked for nulls when it is opened."""
_WINDOW_NBYTES = 24 << 20
"""Bytes of a row group that are read in one go; of a larger one each column is read piece by piece."""
_PAGE_NBYTES = 17 << 16
"""Bytes of a page, which is decoded whole, as writers usually make them at most."""
_BATCH_NBYTES = 4 << 20
"""Bytes that are decoded at a time."""
_MOST_BATCH_ROWS = 1 << 16
_MOST_WASTED_ROWS = 8192
"""Rows that are decoded and thrown away rather than looking for a page to begin with."""
_CACHE_NBYTES = 64 << 20
"""Bytes of the footers that are kept parsed: parsing one of a thousand row groups takes longer than reading a slice."""


class _Detail(NamedTuple):
    """What is needed to read a file again."""

    view: View
    """Which columns, and how; the same object for all files."""
    footer_nbytes: int
    """Bytes at the end of the file that hold the footer, its length and the magic."""


class _Footer(NamedTuple):
    """A parsed footer."""

    metadata: Any
    """pyarrow.parquet.FileMetaData"""
    starts: tuple[int, ...]
    """Local row at which each row group starts, and the number of rows."""
    nbytes: int
    """Bytes that it has in the file."""
    schema: "_Schema"
    """Its columns."""
    chunks: dict[tuple[int, int], tuple[int, int]]
    """Where the chunks lie that were asked for, by row group and leaf."""
    pages: dict[tuple[int, int], Pages]
    """Where their pages lie, as far as they were asked for."""


class _Schema(NamedTuple):
    """A schema, which many files have in common."""

    arrow: Any
    """pyarrow.Schema"""
    fields: tuple[Field, ...]
    """Its columns."""
    leaves: dict[str, tuple[int, ...]]
    """Numbers of the leaves that hold each column."""
    fixed: frozenset[str]
    """Columns whose lists have one length by their type."""


class ParquetFormat:
    """Parquet files, read by pyarrow.

    Availability: where pyarrow is installed.
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    magic = (_MAGIC,)
    directories = False
    takes_dtype = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file: footers only."""
        asked = parse_options(options, self.name)
        heads = storage.heads(paths, len(_MAGIC))
        found: list[Shard | Fault | None] = [None] * len(paths)
        tables: list[Table] = []
        numbers: list[int] = []
        footers: list[tuple[int, tuple[int, ...]]] = []
        for i, footer in _read_footers(paths, heads, storage, []):
            if isinstance(footer, Fault):
                found[i] = footer
                continue
            _CACHE.put(paths[i], heads[i].stamp, footer, footer.nbytes)
            tables.append(_describe(paths[i], footer, asked))
            numbers.append(i)
            footers.append((footer.nbytes, footer.starts))
        view, faults = agree(tables, asked)
        for k, i in enumerate(numbers):
            fault = faults.get(k)
            if fault is not None or view is None:
                found[i] = fault
                continue
            nbytes, starts = footers[k]
            source = Decoded(_Detail(view, nbytes), tuple(dict.fromkeys([at for at in starts if at < starts[-1]])))
            found[i] = Shard(paths[i], tables[k].rows, view.row_shape, view.dtype, heads[i].stamp, source)
        return [shard for shard in found if shard is not None]

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        assert isinstance(detail, _Detail)
        columns, rest = detail.view.pick(cell)
        stacked = detail.view.stacked and not isinstance(cell[0], int)
        stop = start + len(out)
        done = start
        try:
            footer = _load_footer(shard, detail, storage)
            request = _Request(shard, footer, detail.view, columns, rest, stacked, storage, Scratch())
            group = bisect_right(footer.starts, start) - 1
            while done < stop:
                until = min(stop, footer.starts[group + 1])
                if until > done:
                    _read_group(request, group, done, until, out[done - start : until - start])
                    done = until
                group += 1
        except ShardReadError:
            raise
        except ColumnError as exc:
            raise ShardReadError(f"{shard.path!r}: {exc}") from exc
        except (_arrow().lib.ArrowException, OSError, KeyError) as exc:
            raise ShardReadError(f"{shard.path!r} cannot be decoded: {_first_line(exc)}") from exc


def _arrow() -> Any:
    """Return pyarrow, with its Parquet reader loaded."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as exc:
        raise FormatError("reading Parquet needs pyarrow: pip install 'lazyshards[parquet]'") from exc
    return pa


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


# Footers ----------------------------------------------------------------------------------------------------------


_CACHE: Cache[_Footer] = Cache(_CACHE_NBYTES)


def _read_footers(
    paths: Sequence[str], heads: Sequence[Head], storage: Storage, schemas: list[_Schema]
) -> Iterator[tuple[int, _Footer | Fault]]:
    """Yield the footer of each file, or what is wrong, in order; read for many files together."""
    for first in range(0, len(paths), _FOOTERS_AT_A_TIME):
        numbers = range(first, min(len(paths), first + _FOOTERS_AT_A_TIME))
        found: dict[int, _Footer | Fault] = {}
        sizes: dict[int, int] = {}
        for i in numbers:
            data, stamp, error = heads[i]
            if error is not None:
                found[i] = Fault(paths[i], f"cannot be read: {error.strerror or error}", error)
            elif data != _MAGIC:
                what = f"begins with {data!r}" if data else "is empty"
                hint = ", an encrypted file" if data == b"PARE" else ""
                found[i] = Fault(paths[i], f"{what}{hint}, expected a Parquet file ({_MAGIC!r})")
            elif stamp.size < len(_MAGIC) + _TAIL_NBYTES:
                found[i] = Fault(paths[i], f"is truncated: it holds {stamp.size:,} bytes, less than any Parquet file")
            else:
                sizes[i] = min(stamp.size, storage.gap_nbytes)
        tails = dict(zip(sizes, _tails(paths, heads, sizes, storage), strict=True))
        longer: dict[int, int] = {}
        for i, tail in tails.items():
            size = _footer_nbytes(paths[i], tail, heads[i].stamp.size)
            if isinstance(size, Fault):
                found[i] = size
            elif size > len(tail):
                longer[i] = size
            else:
                tails[i] = tail[-size:]
        tails.update(zip(longer, _tails(paths, heads, longer, storage), strict=True))
        for i in numbers:
            yield i, found[i] if i in found else _parse(paths[i], tails.pop(i), schemas)


def _tails(paths: Sequence[str], heads: Sequence[Head], sizes: Mapping[int, int], storage: Storage) -> list[bytes]:
    """Return the last bytes of some of the files, as many of each as ``sizes`` says."""
    return storage.fetch([(paths[i], heads[i].stamp.size - nbytes, nbytes) for i, nbytes in sizes.items()])


def _footer_nbytes(path: str, tail: bytes, size: int) -> int | Fault:
    """Return the bytes of the footer, its length and the magic, as the end of the file says."""
    if tail[-4:] != _MAGIC:
        return Fault(
            path, f"ends with {tail[-4:]!r}, expected {_MAGIC!r}: it is truncated, or its writer was never closed"
        )
    nbytes = int.from_bytes(tail[-8:-4], "little") + _TAIL_NBYTES
    if nbytes > size - len(_MAGIC):
        return Fault(path, f"has a damaged footer: of {nbytes:,} bytes, in a file of {size:,}")
    if nbytes > _MOST_FOOTER_NBYTES:
        return Fault(path, f"has a footer of {nbytes:,} bytes, expected at most {_MOST_FOOTER_NBYTES:,}")
    return nbytes


def _parse(path: str, data: bytes, schemas: list[_Schema]) -> _Footer | Fault:
    """Parse a footer; ``schemas`` are those of the files before, to which a new one is added."""
    pa = _arrow()
    try:
        metadata = pa.parquet.read_metadata(pa.BufferReader(data))
        arrow = metadata.schema.to_arrow_schema()
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except (pa.lib.ArrowException, OSError) as exc:
        return Fault(path, f"has a damaged footer: {_first_line(exc)}")
    if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
        return Fault(path, f"has a damaged footer: {metadata.num_rows:,} rows in row groups of {sum(counts):,}")
    schema = next((known for known in schemas if known.arrow.equals(arrow)), None)
    if schema is None:
        schema = _flatten(arrow)
        schemas.append(schema)
    return _Footer(metadata, (0, *accumulate(counts)), len(data), schema, {}, {})


def _load_footer(shard: Shard, detail: _Detail, storage: Storage) -> _Footer:
    """Return the footer of a shard, from memory or from the file."""
    footer = _CACHE.get(shard.path, shard.stamp)
    if footer is not None:
        return footer
    data = bytearray(detail.footer_nbytes)
    storage.fetch_into([Part(shard.path, shard.stamp, shard.stamp.size - len(data), memoryview(data))])
    parsed = _parse(shard.path, bytes(data), [])
    if isinstance(parsed, Fault):
        raise ShardReadError(str(parsed))
    if parsed.starts[-1] != shard.rows:
        raise ShardReadError(f"{shard.path!r} holds {parsed.starts[-1]:,} rows, {shard.rows:,} when it was opened")
    _CACHE.put(shard.path, shard.stamp, parsed, parsed.nbytes)
    return parsed


def _describe(path: str, footer: _Footer, options: Options) -> Table:
    """Return the columns of a file, as its footer describes them."""
    metadata, schema = footer.metadata, footer.schema
    fields = schema.fields
    changed: dict[int, Field] = {}
    groups = [i for i in range(metadata.num_row_groups) if footer.starts[i + 1] > footer.starts[i]]
    wanted = None if options.columns is None else set(options.columns)
    ask_nulls = len(groups) * len(fields) <= _MOST_NULL_CHECKS
    for k, field in enumerate(fields):
        if (wanted is not None and field.name not in wanted) or field.problem:
            continue
        leaf = schema.leaves[field.name][0]
        axes, nulls = field.axes, 0
        if axes and -1 in axes:
            axes = _list_axes(metadata, groups, footer.starts, leaf, axes)
        if ask_nulls and metadata.schema.column(leaf).max_definition_level:
            nulls = _count_nulls(metadata, groups, leaf)
        if nulls or axes != field.axes:
            changed[k] = field._replace(axes=axes, nulls=nulls)
    if changed:
        fields = tuple([changed.get(k, field) for k, field in enumerate(fields)])
    return Table(path, footer.starts[-1], fields)


def _flatten(schema: Any) -> _Schema:
    """Return the columns of a schema, and by name the numbers of the leaves that hold each."""
    fields: list[Field] = []
    leaves: dict[str, tuple[int, ...]] = {}
    at = 0
    for field in schema:
        leaf, axes = describe_type(field.type)
        count = _count_leaves(field.type)
        problem = ""
        if axes.count(-1) > 1 or (-1 in axes and len(axes) > 1):
            problem = f"is {field.type}, lists within lists, expected lists of numbers"
        fields.append(Field(field.name, str(field.type), leaf, tuple(axes), 0, problem))
        leaves[field.name] = tuple(range(at, at + count))
        at += count
    fixed = frozenset([field.name for field in fields if field.axes and -1 not in field.axes])
    return _Schema(schema, tuple(fields), leaves, fixed)


def _count_leaves(kind: Any) -> int:
    """Return how many columns of a file hold a column of this type."""
    kind = getattr(kind, "storage_type", kind)
    if str(kind).startswith("dictionary<") or not kind.num_fields:
        return 1
    return sum([_count_leaves(kind.field(i).type) for i in range(kind.num_fields)])


def _list_axes(
    metadata: Any,
    groups: Sequence[int],
    starts: Sequence[int],
    leaf: int,
    axes: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the one length that lists of a column can have, or None if they differ.

    The footer says how many elements each row group has. Whether each list has its share is seen when it is read.
    """
    lengths = set()
    for i in groups:
        rows, values = starts[i + 1] - starts[i], metadata.row_group(i).column(leaf).num_values
        if values % rows:
            return None
        lengths.add(values // rows)
    if len(lengths) > 1:
        return None
    return tuple([lengths.pop() if n == -1 and lengths else n for n in axes])


def _count_nulls(metadata: Any, groups: Sequence[int], leaf: int) -> int:
    """Return how many nulls the statistics of a column tell of; 0 where there are none."""
    count = 0
    for i in groups:
        chunk = metadata.row_group(i).column(leaf)
        statistics = chunk.statistics if chunk.is_stats_set else None
        if statistics is not None and statistics.has_null_count:
            count += statistics.null_count
    return count


# Rows -------------------------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    """What is read of a file."""

    shard: Shard
    footer: _Footer
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
    places: list[int] | None
    """Which of the columns of the request; None for all."""
    runs: list[_Run]
    """What is read."""
    exact: bool
    """Whether nothing else is."""


class _Window(io.RawIOBase):
    """A file as pyarrow is shown it: runs of bytes, fetched together before if they are few, else when asked for.

    Where pages are skipped, those that are wanted are shown in the place of the first.
    """

    def __init__(self, shard: Shard, storage: Storage, runs: Sequence[_Run], scratch: Scratch, *, exact: bool) -> None:
        super().__init__()
        self._shard = shard
        self._storage = storage
        self._exact = exact
        self._at = 0
        self._runs = sorted(runs)
        self._shown = [run.shown for run in self._runs]
        self.is_held = sum([run.nbytes for run in runs]) <= _WINDOW_NBYTES
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

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._shard.stamp.size)[whence]
        return self._at

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


def _read_group(request: _Request, group: int, start: int, stop: int, out: npt.NDArray[np.generic]) -> None:
    """Fill ``out`` with rows [start, stop) of a file, all of one row group."""
    for part in _plan_passes(request, group, start, stop):
        _decode(request, group, part, start, stop, out)


def _decode(request: _Request, group: int, part: _Pass, start: int, stop: int, out: npt.NDArray[np.generic]) -> None:
    """Fill the columns of a pass."""
    pa = _arrow()
    columns = request.columns if part.places is None else [request.columns[k] for k in part.places]
    names = list(dict.fromkeys([column.name for column in columns]))
    window = _Window(request.shard, request.storage, part.runs, request.scratch, exact=part.exact)
    whole = window.is_held and not part.exact and stop == request.footer.starts[group + 1]
    buffer_nbytes = 0 if whole else 16 << 10 if window.is_held else max(64 << 10, _WINDOW_NBYTES // len(part.runs))
    each = request.view.dtype.itemsize * prod(columns[0].axes)
    batch_rows = min(max(1024, _BATCH_NBYTES // max(1, each * len(names))), _MOST_BATCH_ROWS, stop - part.first)
    at = part.first
    with pa.parquet.ParquetFile(
        pa.PythonFile(window, "r"),
        metadata=request.footer.metadata,
        pre_buffer=False,
        buffer_size=min(buffer_nbytes, 8 << 20),
    ) as file:
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False):
            a, b = max(start, at), min(stop, at + len(batch))
            if a < b:
                rows = out[a - start : b - start]
                values = _batch_values(batch.slice(a - at, b - a), columns, request.view)
                if part.places is None:
                    write_rows(rows, values, request.rest, request.scratch, stacked=request.stacked)
                else:
                    for k, found in zip(part.places, values, strict=True):
                        write_rows(rows[:, k : k + 1], [found], request.rest, request.scratch, stacked=True)
            at += len(batch)
            if at >= stop:
                return
    raise ShardReadError(f"{request.shard.path!r} is damaged: its row group {group} ends before row {stop:,}")


def _batch_values(batch: Any, columns: Sequence[Column], view: View) -> list[npt.NDArray[np.generic]]:
    """Return the values of some columns of a batch."""
    known: dict[str, npt.NDArray[np.generic]] = {}
    for column in columns:
        if column.name not in known:
            known[column.name] = to_numpy(batch.column(column.name), column, view)
    return [known[column.name] for column in columns]


def _plan_passes(request: _Request, group: int, start: int, stop: int) -> list[_Pass]:
    """Return how rows [start, stop) of a row group are decoded: from its first row on, or from later pages."""
    shard, footer = request.shard, request.footer
    first, end = footer.starts[group], footer.starts[group + 1]
    if start - first >= _MOST_WASTED_ROWS:
        passes = _plan_skipping(request, group, start - first, stop - first)
        if passes:
            return passes
    names = dict.fromkeys([column.name for column in request.columns])
    chunks = [_chunk(shard, footer, group, leaf) for name in names for leaf in footer.schema.leaves[name]]
    share = (stop - first) / (end - first)
    runs = []
    for at, until in chunks:
        nbytes = min(until - at, int((until - at) * share) + _PAGE_NBYTES)
        runs.append(_Run(at, ((at, at + nbytes),)))
    return [_Pass(first, None, runs, exact=False)]


def _plan_skipping(request: _Request, group: int, start: int, stop: int) -> list[_Pass]:
    """Return how rows [start, stop) of a row group are decoded by their own pages; nothing if that cannot be."""
    shard, footer = request.shard, request.footer
    columns = {column.name: column for column in request.columns}
    leaves, each = [], []
    for name, column in columns.items():
        (leaf, *others) = footer.schema.leaves[name]
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
    firsts: dict[str, int] = {}
    runs: dict[str, _Run] = {}
    for name, leaf, count, (shown, _), found in zip(columns, leaves, each, chunks, pages, strict=True):
        if found is None:
            return []
        footer.pages[group, leaf] = found
        at, until, before = found.span(start * count, stop * count)
        if before % count:
            return []
        firsts[name] = footer.starts[group] + before // count
        runs[name] = _Run(shown, (found.dictionary, (at, until)))
    passes = []
    for first in sorted(set(firsts.values())):
        places = [k for k, column in enumerate(request.columns) if firsts[column.name] == first]
        names = dict.fromkeys([request.columns[k].name for k in places])
        every = None if len(places) == len(request.columns) else places
        passes.append(_Pass(first, every, [runs[name] for name in names], exact=True))
    return passes


def _values_of_a_row(footer: _Footer, group: int, leaf: int, column: Column) -> int:
    """Return how many values each row has in a column; 0 if only decoding tells."""
    if not footer.metadata.schema.column(leaf).max_repetition_level:
        return 1
    if column.name not in footer.schema.fixed:
        return 0
    # A null in place of a list would be one value.
    chunk = footer.metadata.row_group(group).column(leaf)
    statistics = chunk.statistics if chunk.is_stats_set else None
    known = statistics is not None and statistics.has_null_count and statistics.null_count == 0
    return prod(column.axes) if known else 0


def _chunk(shard: Shard, footer: _Footer, group: int, leaf: int) -> tuple[int, int]:
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
        if not len(_MAGIC) <= start <= stop <= shard.stamp.size:
            raise ShardReadError(
                f"{shard.path!r} is damaged: its footer puts a column at bytes {start:,} to {stop:,}, and it holds "
                f"{shard.stamp.size:,}"
            )
        found = footer.chunks[group, leaf] = (start, stop)
    return found
