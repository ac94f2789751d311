"""Arrow IPC files (Feather version 2 as well) and streams: their buffers are found by their headers and read in place.

Source: the columnar format's specification, sections "IPC File Format" and "Encapsulated message format". The headers,
which are FlatBuffers, are parsed here and not by pyarrow, which has no way to say where the bytes of a column lie, and
which needs a file that it can map: all bytes come through the storage. pyarrow reads the schema, and decompresses.
"""

import struct
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, ShardReadError
from lazyshards.formats.base import Fault
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
    numpy_type,
    parse_options,
    values_of,
    write_rows,
    write_strip,
)
from lazyshards.layout import Decoded, Extent, Extents, Packed, Shard, Source
from lazyshards.selection import Cell
from lazyshards.storage.base import Part, Stamp, Storage

__all__ = ["ArrowFormat"]

_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_TAIL_NBYTES = 10
"""Bytes at the end of a file: the footer's length, and the magic."""
_HEAD_NBYTES = 4096
"""Bytes of the first read, which the schema seldom exceeds."""
_MOST_HEADER_NBYTES = 64 << 20
"""Bytes of the longest header of a message, and of the longest footer, that is parsed."""
_FILES_AT_A_TIME = 256
"""Files whose headers are held in memory together while they are inspected."""
_BLOCK_NBYTES = 4 << 20
"""Bytes of columns that are read at a time and turned into rows."""
_DECOMPRESSED_NBYTES = 24 << 20
"""Bytes of columns that are decompressed together, with what they were before; one column's is always allowed."""
_SKIP_NBYTES = 256 << 10
"""Bytes of unwanted rows that are decompressed at a time."""
_LISTS_AT_A_TIME = 1 << 17
"""Lists whose lengths are checked at a time."""
_CACHE_NBYTES = 64 << 20
"""Bytes of the headers that are kept parsed."""
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_CODECS = ("lz4", "zstd")
_PLAIN_KINDS = "iufmM"


class _DamagedError(ValueError):
    """What is wrong with a header."""


class _Message(NamedTuple):
    """A message's header, and where its body lies."""

    kind: int
    """Which of the kinds of message."""
    body: int
    """First byte of the body in the file."""
    body_nbytes: int
    """Bytes of the body."""
    rows: int = 0
    """Rows of a batch."""
    nodes: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
    """Length and null count of each array of a batch, depth first."""
    buffers: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
    """First byte in the body and length of each buffer of a batch."""
    codec: str = ""
    """What compressed the buffers, if anything did."""
    dictionary: int = 0
    """Number of the dictionary that a dictionary batch belongs to."""
    delta: bool = False
    """Whether a dictionary batch adds to those before it."""


class _Slot(NamedTuple):
    """Where a column stands in the lists of every batch."""

    kind: Any
    """pyarrow.DataType"""
    node: int
    """Number of its first array."""
    buffer: int
    """Number of its first buffer."""
    dictionary: int
    """Number of its dictionary; -1 if it has none."""


class _Schema(NamedTuple):
    """A schema, which many files have in common."""

    fields: tuple[Field, ...]
    """Its columns."""
    slots: dict[str, _Slot]
    """Where each column that can be read stands."""


class _Index(NamedTuple):
    """All headers of one file."""

    schema: _Schema
    batches: tuple[_Message, ...]
    """Batches that hold rows."""
    dictionaries: tuple[_Message, ...]
    starts: tuple[int, ...]
    """Local row at which each batch starts, and the number of rows."""
    nbytes: int
    """About how much memory it takes."""


class _Detail(NamedTuple):
    """What is needed to read a file again."""

    view: View
    """Which columns, and how; the same object for all files."""


class ArrowFormat:
    """Arrow IPC files, Feather version 2, and IPC streams.

    Availability: where pyarrow is installed. A single uncompressed column of numbers, or of lists of fixed size, is
    read as plain bytes.
    """

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")
    magic = (_MAGIC,)
    directories = False
    takes_dtype = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file: headers only."""
        asked = parse_options(options, self.name)
        found: list[Shard | Fault | None] = [None] * len(paths)
        tables: list[Table] = []
        indices: list[tuple[int, Stamp, _Index]] = []
        schemas: dict[bytes, _Schema] = {}
        for first in range(0, len(paths), _FILES_AT_A_TIME):
            some = paths[first : first + _FILES_AT_A_TIME]
            for i, (stamp, index) in enumerate(_read_indices(some, storage, schemas), first):
                if isinstance(index, Fault):
                    found[i] = index
                    continue
                _CACHE.put(paths[i], stamp, index, index.nbytes)
                tables.append(_describe(paths[i], index, asked))
                indices.append((i, stamp, index))
        view, faults = agree(tables, asked)
        for k, (i, stamp, index) in enumerate(indices):
            if k in faults or view is None:
                found[i] = faults.get(k)
                continue
            source = _plain_source(index, view) or Decoded(_Detail(view), index.starts[:-1])
            found[i] = Shard(paths[i], index.starts[-1], view.row_shape, view.dtype, stamp, source)
        return [shard for shard in found if shard is not None]

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        assert isinstance(detail, _Detail)
        columns, rest = detail.view.pick(cell)
        stacked = detail.view.stacked and not isinstance(cell[0], int)
        done, stop = start, start + len(out)
        try:
            index, scratch = _load_index(shard, storage), Scratch()
            number = bisect_right(index.starts, start) - 1
            while done < stop:
                first, until = index.starts[number], min(stop, index.starts[number + 1])
                reader = _BatchReader(shard, storage, detail.view, index, index.batches[number], scratch)
                reader.read(
                    done - first, until - first, columns, rest, out[done - start : until - start], stacked=stacked
                )
                done = until
                number += 1
        except ShardReadError:
            raise
        except (ColumnError, _DamagedError) as exc:
            raise ShardReadError(f"{shard.path!r}: {exc}") from exc
        except (_arrow().lib.ArrowException, OSError, KeyError, IndexError) as exc:
            raise ShardReadError(f"{shard.path!r} cannot be decoded: {_first_line(exc)}") from exc


_CACHE: Cache[_Index] = Cache(_CACHE_NBYTES)


def _arrow() -> Any:
    """Return pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise FormatError("reading Arrow files needs pyarrow: pip install 'lazyshards[arrow]'") from exc
    return pa


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


# Headers ----------------------------------------------------------------------------------------------------------


class _Flat:
    """The bytes of a FlatBuffer. Whatever leads out of them is an error."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def number(self, format: str, at: int) -> int:
        """Return one number."""
        if at < 0:
            raise _DamagedError("a header that points outside of itself")
        try:
            return int(struct.unpack_from(format, self._data, at)[0])
        except struct.error:
            raise _DamagedError("a header that points outside of itself") from None

    def root(self) -> int:
        """Return where the root table begins."""
        return self.follow(0)

    def follow(self, at: int) -> int:
        """Return where an offset leads."""
        return at + self.number("<I", at)

    def field(self, table: int, slot: int) -> int:
        """Return where a field of a table begins; 0 if it is left out."""
        entries = table - self.number("<i", table)
        if 4 + 2 * slot >= self.number("<H", entries):
            return 0
        offset = self.number("<H", entries + 4 + 2 * slot)
        return table + offset if offset else 0

    def value(self, table: int, slot: int, format: str, default: int = 0) -> int:
        """Return a number that is a field of a table."""
        at = self.field(table, slot)
        return self.number(format, at) if at else default

    def structs(self, table: int, slot: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        """Return a vector of structs that is a field of a table."""
        at = self.field(table, slot)
        if not at:
            return np.empty(0, dtype)
        at = self.follow(at)
        count = self.number("<I", at)
        if at + 4 + count * dtype.itemsize > len(self._data):
            raise _DamagedError("a header that points outside of itself")
        return np.frombuffer(self._data, dtype, count, at + 4)

    def tables(self, table: int, slot: int) -> list[int]:
        """Return where the tables of a vector that is a field of a table begin."""
        at = self.field(table, slot)
        if not at:
            return []
        at = self.follow(at)
        count = self.number("<I", at)
        if at + 4 + 4 * count > len(self._data):
            raise _DamagedError("a header that points outside of itself")
        return [self.follow(at + 4 + 4 * i) for i in range(count)]


_PAIR = np.dtype([("a", "<i8"), ("b", "<i8")])
_BLOCK = np.dtype([("offset", "<i8"), ("header", "<i4"), ("pad", "<i4"), ("body", "<i8")])


def _header_span(data: bytes, at: int = 0) -> tuple[int, int]:
    """Return where the header that begins at ``at`` has its FlatBuffer, and how long that is; 0 at a stream's end."""
    if len(data) < at + 4:
        raise _DamagedError("a header that is cut")
    if data[at : at + 4] == _CONTINUATION:
        if len(data) < at + 8:
            raise _DamagedError("a header that is cut")
        at += 4
    size = int.from_bytes(data[at : at + 4], "little", signed=True)  # before version 0.15, all that there was
    if not 0 <= size <= _MOST_HEADER_NBYTES:
        raise _DamagedError(f"a header of {size:,} bytes, expected at most {_MOST_HEADER_NBYTES:,}")
    return at + 4, size


def _parse_message(data: bytes, body: int) -> _Message:
    """Parse the FlatBuffer of a message whose body begins at byte ``body`` of the file."""
    flat = _Flat(data)
    message = flat.root()
    kind, body_nbytes = flat.value(message, 1, "<B"), flat.value(message, 3, "<q")
    if body_nbytes < 0:
        raise _DamagedError(f"a message of {body_nbytes:,} bytes")
    if kind not in (_DICTIONARY, _BATCH):
        return _Message(kind, body, body_nbytes)
    number, delta = 0, False
    batch = flat.follow(flat.field(message, 2))
    if kind == _DICTIONARY:
        number, delta = flat.value(batch, 0, "<q"), bool(flat.value(batch, 2, "<B"))
        batch = flat.follow(flat.field(batch, 1))
    rows = flat.value(batch, 0, "<q")
    nodes = flat.structs(batch, 1, _PAIR).view("<i8").reshape(-1, 2)
    buffers = flat.structs(batch, 2, _PAIR).view("<i8").reshape(-1, 2)
    codec = ""
    compression = flat.field(batch, 3)
    if compression:
        compression = flat.follow(compression)
        which, method = flat.value(compression, 0, "<b"), flat.value(compression, 1, "<b")
        if which not in (0, 1) or method:
            raise _DamagedError(f"buffers compressed by an unknown codec ({which}, {method})")
        codec = _CODECS[which]
    if rows < 0 or (nodes < 0).any() or (buffers < 0).any() or (buffers > body_nbytes - buffers[:, ::-1]).any():
        raise _DamagedError("a batch whose buffers do not fit its body")
    return _Message(kind, body, body_nbytes, rows, nodes, buffers, codec, number, delta)


def _parse_schema(data: bytes, known: dict[bytes, _Schema]) -> _Schema:
    """Parse a message that holds a schema, the bytes before its FlatBuffer included."""
    if data in known:
        return known[data]
    pa = _arrow()
    start, size = _header_span(data)
    flat = _Flat(data[start : start + size])
    message = flat.root()
    if flat.value(message, 1, "<B") != _SCHEMA:
        raise _DamagedError("no schema where one is expected")
    table = flat.follow(flat.field(message, 2))
    if flat.value(table, 0, "<h"):
        raise _DamagedError("numbers in big-endian byte order, expected little-endian")
    try:
        arrow = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.lib.ArrowException, OSError) as exc:
        raise _DamagedError(f"a schema that cannot be read: {_first_line(exc)}") from exc
    fields: list[Field] = []
    slots: dict[str, _Slot] = {}
    node = buffer = 0
    lost = False
    for field, described in zip(arrow, flat.tables(table, 1), strict=True):
        leaf, axes = describe_type(field.type)
        problem = ""
        span = None if lost else _span(field.type)
        if span is None:
            lost = True
            problem = f"is {field.type}, or stands behind a column of such a type, whose buffers cannot be told apart"
        else:
            slots[field.name] = _Slot(field.type, node, buffer, _dictionary_number(flat, described))
            node, buffer = node + span[0], buffer + span[1]
        if axes.count(-1) > 1 or (-1 in axes and len(axes) > 1):
            problem = problem or f"is {field.type}, lists within lists, expected lists of numbers"
        fields.append(Field(field.name, str(field.type), leaf, tuple(axes), 0, problem))
    known[data] = schema = _Schema(tuple(fields), slots)
    return schema


def _dictionary_number(flat: _Flat, field: int) -> int:
    """Return the number of the dictionary that a column, or what its lists hold, is encoded by; -1 if none is."""
    while True:
        encoding = flat.field(field, 4)
        if encoding:
            return flat.value(flat.follow(encoding), 0, "<q")
        children = flat.tables(field, 5)
        if len(children) != 1:
            return -1
        field = children[0]


def _span(kind: Any) -> tuple[int, int] | None:
    """Return how many arrays and buffers a column of this type has in a batch, or None if that is not known."""
    kind = getattr(kind, "storage_type", kind)
    text = str(kind)
    if text.startswith(("dense_union", "sparse_union", "run_end_encoded")) or "_view" in text:
        return None
    if text.startswith("dictionary<"):
        return 1, 2
    if text == "null":
        return 1, 0
    children = [] if not kind.num_fields else [_span(kind.field(i).type) for i in range(kind.num_fields)]
    own = 2
    if text.startswith(("fixed_size_list<", "struct<")):
        own = 1
    elif text in ("string", "binary", "large_string", "large_binary"):
        own = 3
    nodes, buffers = 1, own
    for child in children:
        if child is None:
            return None
        nodes, buffers = nodes + child[0], buffers + child[1]
    return nodes, buffers


# From files to indices --------------------------------------------------------------------------------------------

_Steps: TypeAlias = Generator[list[tuple[int, int]], list[bytes], None]
"""Yields what must be read, first byte and length, and is sent what was read."""


class _Scan:
    """The headers of one file as they are found, one read after another: the reads of many files go together."""

    def __init__(self, path: str, size: int, head: bytes, step_nbytes: int) -> None:
        self.path = path
        self.size = size
        self.step_nbytes = step_nbytes
        self.schema = b""
        self.messages: list[_Message] = []
        self.nbytes = 0
        self.fault: Fault | None = None
        self._steps = self._file(head) if head.startswith(_MAGIC) else self._stream(head)

    def advance(self, answers: list[bytes] | None) -> list[tuple[int, int]]:
        """Return what must be read next, given what was read last; nothing if all is known."""
        try:
            return next(self._steps) if answers is None else self._steps.send(answers)
        except StopIteration:
            return []
        except _DamagedError as exc:
            self.fault = Fault(self.path, f"has {exc}")
            return []

    def _file(self, head: bytes) -> _Steps:
        """Read a file: from its footer to the header of each batch."""
        start, size = _header_span(head, 8)
        need = start + size
        tail_nbytes = min(self.size, self.step_nbytes)
        reads = [(self.size - tail_nbytes, tail_nbytes)]
        if need > len(head):
            reads.append((0, need))
        tail, *longer = yield reads
        self.schema = (longer[0] if longer else head)[8:need]
        if tail[-6:] != _MAGIC:
            raise _DamagedError(
                f"{tail[-6:]!r} at its end, expected {_MAGIC!r}: it is cut, or its writer never closed it"
            )
        size = int.from_bytes(tail[-10:-6], "little", signed=True)
        if not 0 < size <= min(_MOST_HEADER_NBYTES, self.size - _TAIL_NBYTES):
            raise _DamagedError(f"a footer of {size:,} bytes, in a file of {self.size:,}")
        if size + _TAIL_NBYTES > len(tail):
            (tail,) = yield [(self.size - size - _TAIL_NBYTES, size + _TAIL_NBYTES)]
        flat = _Flat(tail[-size - _TAIL_NBYTES : -_TAIL_NBYTES])
        table = flat.root()
        blocks = np.concatenate([flat.structs(table, 2, _BLOCK), flat.structs(table, 3, _BLOCK)])
        end = self.size - size - _TAIL_NBYTES
        for block in blocks:
            if not 0 < block["header"] <= _MOST_HEADER_NBYTES or not 8 <= block["offset"] <= end - block["header"]:
                raise _DamagedError("a footer that points outside of the file")
        headers = yield [(int(block["offset"]), int(block["header"])) for block in blocks]
        for block, data in zip(blocks.tolist(), headers, strict=True):
            start, size = _header_span(data)
            self._add(data[start : start + size], block[0] + block[1], end)

    def _stream(self, head: bytes) -> _Steps:
        """Read a stream: from each message to the next."""
        at, data, begin = 0, head, 0
        while True:
            if len(data) < at - begin + 8 and begin + len(data) < self.size:
                (data,), begin = (yield [(at, self.step_nbytes)]), at
            if at - begin + 4 > len(data):
                raise _DamagedError("no end-of-stream mark: it is cut, or its writer never closed it")
            start, size = _header_span(data, at - begin)
            if not size:
                if begin + start < self.size:
                    raise _DamagedError(f"bytes behind the end-of-stream mark, from byte {begin + start:,} on")
                return
            if begin + start + size > self.size:
                raise _DamagedError("a header that is cut: the file is truncated")
            if start + size > len(data):
                (data,), begin = (yield [(at, start + size - (at - begin))]), at
                start, size = _header_span(data)
            body = begin + start + size
            if not self.schema:
                self.schema = data[at - begin : start + size]
                at = body
            else:
                at = body + self._add(data[start : start + size], body, self.size)

    def _add(self, data: bytes, body: int, end: int) -> int:
        """Note a message; return the bytes of its body."""
        message = _parse_message(data, body)
        if body + message.body_nbytes > end:
            raise _DamagedError(
                f"a message of {message.body_nbytes:,} bytes at byte {body:,}, and ends before: it is truncated"
            )
        self.messages.append(message)
        self.nbytes += 300 + message.nodes.nbytes + message.buffers.nbytes
        return message.body_nbytes

    def index(self, schemas: dict[bytes, _Schema]) -> _Index:
        """Return what was found."""
        schema = _parse_schema(self.schema, schemas)
        batches = [message for message in self.messages if message.kind == _BATCH and message.rows]
        dictionaries = [message for message in self.messages if message.kind == _DICTIONARY]
        strange = [message for message in self.messages if message.kind not in (_BATCH, _DICTIONARY)]
        if strange:
            raise _DamagedError(f"a message of kind {strange[0].kind}, expected batches of rows")
        seen = set()
        for message in dictionaries:
            if message.dictionary in seen and not message.delta:
                raise _DamagedError("a dictionary that replaces one before it, expected one for all rows")
            seen.add(message.dictionary)
        starts = (0, *accumulate([batch.rows for batch in batches]))
        if starts[-1] >= 1 << 62:
            raise _DamagedError(f"{starts[-1]:,} rows")
        return _Index(schema, tuple(batches), tuple(dictionaries), starts, self.nbytes + 200 * len(schema.fields))


def _read_indices(
    paths: Sequence[str], storage: Storage, schemas: dict[bytes, _Schema]
) -> Iterator[tuple[Stamp, _Index | Fault]]:
    """Yield stamp and headers of each file, or what is wrong; read for all files together."""
    _arrow()
    heads = storage.heads(paths, _HEAD_NBYTES)
    scans: list[_Scan | Fault] = []
    for path, (data, stamp, error) in zip(paths, heads, strict=True):
        if error is not None:
            scans.append(Fault(path, f"cannot be read: {error.strerror or error}", error))
        elif data.startswith(b"FEA1"):
            scans.append(Fault(path, "is Feather version 1, expected version 2 (write it again with a later pyarrow)"))
        elif (
            (data.startswith(_MAGIC) and stamp.size >= 8 + _TAIL_NBYTES)
            or data.startswith(_CONTINUATION)
            or _is_old_stream(data)
        ):
            scans.append(_Scan(path, stamp.size, data, storage.gap_nbytes))
        else:
            what = f"begins with {data[:8]!r}" if data else "is empty"
            scans.append(Fault(path, f"{what}, expected an Arrow file ({_MAGIC!r}) or stream ({_CONTINUATION!r})"))
    answers: dict[int, list[bytes] | None] = {i: None for i, scan in enumerate(scans) if isinstance(scan, _Scan)}
    while answers:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for i, answer in answers.items():
            scan = scans[i]
            assert isinstance(scan, _Scan)
            reads = scan.advance(answer)
            if reads:
                wanted[i] = reads
        found = iter(storage.fetch([(paths[i], *read) for i, reads in wanted.items() for read in reads]))
        answers = {i: [next(found) for _ in reads] for i, reads in wanted.items()}
    for scan, head in zip(scans, heads, strict=True):
        if isinstance(scan, Fault):
            yield head.stamp, scan
            continue
        try:
            yield head.stamp, scan.fault or scan.index(schemas)
        except _DamagedError as exc:
            yield head.stamp, Fault(scan.path, f"has {exc}")


def _is_old_stream(data: bytes) -> bool:
    """Return whether a file begins like a stream of before version 0.15: with the length of a schema's FlatBuffer."""
    size = int.from_bytes(data[:4], "little")
    if not 16 <= size <= _HEAD_NBYTES or len(data) < 4 + size or size % 4:
        return False
    flat = _Flat(data[4 : 4 + size])
    try:
        return flat.value(flat.root(), 1, "<B") == _SCHEMA
    except _DamagedError:
        return False


def _load_index(shard: Shard, storage: Storage) -> _Index:
    """Return the headers of a shard, from memory or from the file."""
    index = _CACHE.get(shard.path, shard.stamp)
    if index is not None:
        return index
    ((_, found),) = _read_indices([shard.path], storage, {})
    if isinstance(found, Fault):
        raise ShardReadError(str(found))
    if found.starts[-1] != shard.rows:
        raise ShardReadError(f"{shard.path!r} holds {found.starts[-1]:,} rows, {shard.rows:,} when it was opened")
    _CACHE.put(shard.path, shard.stamp, found, found.nbytes)
    return found


# From indices to shards -------------------------------------------------------------------------------------------


def _describe(path: str, index: _Index, options: Options) -> Table:
    """Return the columns of a file, as its headers describe them."""
    fields = []
    wanted = None if options.columns is None else set(options.columns)
    for field in index.schema.fields:
        if field.problem or (wanted is not None and field.name not in wanted):
            fields.append(field)
        else:
            fields.append(_describe_field(field, index))
    return Table(path, index.starts[-1], tuple(fields))


def _describe_field(field: Field, index: _Index) -> Field:
    """Return a column with its nulls and the lengths of its lists."""
    slot = index.schema.slots[field.name]
    depth = len(field.axes or ())
    if -1 not in (field.axes or ()):
        depth = _depth(slot.kind)
    lengths: set[int] = set()
    nulls = 0
    for batch in index.batches:
        nodes = batch.nodes[slot.node : slot.node + depth + 1]
        if len(nodes) <= depth:
            return field._replace(problem="has no buffers in one of the batches: the file is damaged")
        if nodes[0, 0] != batch.rows:
            return field._replace(problem=f"has {nodes[0, 0]:,} rows in a batch of {batch.rows:,}: the file is damaged")
        if nodes[:-1, 1].any():
            return field._replace(problem=f"holds {nodes[:-1, 1].sum():,} nulls in place of lists, expected lists")
        if field.axes == (-1,):
            length, left = divmod(int(nodes[1, 0]), batch.rows)
            if left or (lengths and length not in lengths):
                return field._replace(axes=None)
            lengths.add(length)
        elif nodes[-1, 0] != batch.rows * prod(field.axes or ()):
            return field._replace(problem=f"has {nodes[-1, 0]:,} elements in {batch.rows:,} rows: the file is damaged")
        nulls += int(nodes[-1, 1])
    axes = (lengths.pop(),) if lengths else field.axes
    return field._replace(axes=axes, nulls=nulls)


def _depth(kind: Any) -> int:
    """Return how many arrays of lists stand around the elements of a column."""
    depth = 0
    kind = getattr(kind, "storage_type", kind)
    while str(kind).startswith(("fixed_size_list<", "list<", "large_list<")):
        kind, depth = kind.value_type, depth + 1
        kind = getattr(kind, "storage_type", kind)
    return depth


def _leaf(kind: Any) -> Any:
    """Return the type of the elements of a column."""
    kind = getattr(kind, "storage_type", kind)
    while str(kind).startswith(("fixed_size_list<", "list<", "large_list<")):
        kind = kind.value_type
        kind = getattr(kind, "storage_type", kind)
    return kind


def _has_offsets(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<"))


def _plain_dtype(slot: _Slot) -> np.dtype[np.generic] | None:
    """Return the type of a column's elements if their bytes are those of NumPy's, and no list has offsets."""
    leaf = str(_leaf(slot.kind))
    dtype = numpy_type(leaf)
    if dtype is None or dtype.kind not in _PLAIN_KINDS or leaf.startswith("date32") or slot.dictionary >= 0:
        return None
    return None if _has_offsets(slot.kind) else dtype


def _data_buffer(slot: _Slot) -> int:
    """Return the number of the buffer that holds the elements of a column without offsets."""
    return slot.buffer + _depth(slot.kind) + 1


def _plain_source(index: _Index, view: View) -> Source | None:
    """Return where the rows lie as plain bytes, or None if they do not."""
    if len(view.columns) > 1:
        return None
    column = view.columns[0]
    slot = index.schema.slots[column.name]
    dtype = _plain_dtype(slot)
    if dtype is None or dtype != view.dtype:
        return None
    row_nbytes = view.dtype.itemsize * prod(column.axes)
    depth, number = _depth(slot.kind), _data_buffer(slot)
    extents = []
    for first, batch in zip(index.starts, index.batches, strict=False):
        if batch.codec or batch.nodes[slot.node : slot.node + depth + 1, 1].any():
            return None
        if number >= len(batch.buffers) or batch.buffers[number, 1] < batch.rows * row_nbytes:
            return None  # what is wrong is said when it is read
        extents.append(Extent(first, batch.rows, "", batch.body + int(batch.buffers[number, 0])))
    return Packed(extents[0].offset) if len(extents) == 1 else Extents(tuple(extents))


# Rows -------------------------------------------------------------------------------------------------------------


class _Want(NamedTuple):
    """Bytes of a buffer that are wanted, and where they go."""

    buffer: int
    """Number of the buffer in the batch."""
    start: int
    """First byte, counted in the buffer as it was before it was compressed."""
    out: memoryview
    """Where they go."""


class _Buffers:
    """The buffers of one batch: where they lie, or, if they are compressed, how far each was read."""

    def __init__(self, shard: Shard, storage: Storage, batch: _Message, scratch: Scratch) -> None:
        self._shard = shard
        self._storage = storage
        self._batch = batch
        self._scratch = scratch
        self._streams: dict[int, _Stream] = {}

    def open(self, numbers: Sequence[int]) -> None:
        """Fetch compressed buffers together; of others each piece is fetched when it is asked for."""
        self._streams = {}
        if not self._batch.codec:
            return
        spans = [self._span(number) for number in numbers]
        room = self._scratch.room("compressed", sum([nbytes for _, nbytes in spans])).data
        parts, at = [], 0
        for offset, nbytes in spans:
            parts.append(self._part(offset, room[at : at + nbytes]))
            at += nbytes
        self._storage.fetch_into(parts)
        for number, part in zip(numbers, parts, strict=True):
            self._streams[number] = _Stream(part.out, self._batch.codec)

    def fill(self, wanted: Sequence[_Want]) -> None:
        """Read pieces; of a compressed buffer that was opened, in ascending order."""
        if self._batch.codec:
            for number, start, out in wanted:
                self._streams[number].fill(start, out)
            return
        parts = []
        for number, start, out in wanted:
            offset, nbytes = self._span(number)
            if start + len(out) > nbytes:
                raise _DamagedError("a batch with a buffer too short for its rows")
            parts.append(self._part(offset + start, out))
        self._storage.fetch_into(parts)

    def nbytes(self, number: int) -> int:
        """Return the bytes that a buffer has in the file."""
        return self._span(number)[1]

    def _span(self, number: int) -> tuple[int, int]:
        """Return the first byte of a buffer in the file, and its length."""
        if number >= len(self._batch.buffers):
            raise _DamagedError("a batch that lacks buffers")
        offset, nbytes = self._batch.buffers[number].tolist()
        return self._batch.body + offset, nbytes

    def _part(self, offset: int, out: memoryview) -> Part:
        return Part(self._shard.path, self._shard.stamp, offset, out)


class _Stream:
    """A compressed buffer, decompressed from its start on and no further than it is read.

    Not in one call: that one takes no note of LZ4 data that ends early, and what it returns then was never written.
    """

    def __init__(self, data: memoryview, codec: str) -> None:
        pa = _arrow()
        self._at = 0
        if not len(data):
            self._left = 0
            return
        if len(data) < 8:
            raise _DamagedError("a compressed buffer that is cut")
        self._left = int.from_bytes(data[:8], "little", signed=True)
        file = pa.BufferReader(pa.py_buffer(data[8:]))
        if self._left == -1:  # left as it was
            self._left = len(data) - 8
            self._file = file
        else:
            self._file = pa.CompressedInputStream(file, codec)

    def fill(self, start: int, out: memoryview) -> None:
        """Read the bytes from ``start`` on, which is not before what was read last."""
        if not len(out):
            return
        if start + len(out) > self._at + self._left:
            raise _DamagedError("a batch with a buffer too short for its rows")
        while self._at < start:
            self._advance(memoryview(bytearray(min(_SKIP_NBYTES, start - self._at))))
        self._advance(out)

    def _advance(self, out: memoryview) -> None:
        done = 0
        while done < len(out):
            count = self._file.readinto(out[done:])
            if not count:
                raise _DamagedError("a compressed buffer that ends before its length")
            done += count
        self._at += done
        self._left -= done


class _BatchReader:
    """One batch of a file: the buffers of the columns that are wanted, and nothing else of it."""

    def __init__(
        self, shard: Shard, storage: Storage, view: View, index: _Index, batch: _Message, scratch: Scratch
    ) -> None:
        self._scratch = scratch
        self._shard = shard
        self._storage = storage
        self._view = view
        self._index = index
        self._batch = batch
        self._buffers = _Buffers(shard, storage, batch, scratch)

    def read(
        self,
        start: int,
        stop: int,
        columns: Sequence[Column],
        rest: Cell,
        out: npt.NDArray[np.generic],
        *,
        stacked: bool,
    ) -> None:
        """Fill ``out`` with rows [start, stop) of the batch."""
        for column in columns:
            self._check_lists(column, start, stop)
        plain = stacked and not rest and all([self._is_plain(column) for column in columns])
        row_nbytes = max(1, self._view.dtype.itemsize * prod(columns[0].axes))
        for first, last in self._groups(columns, (stop - start) * row_nbytes):
            some = columns[first:last]
            unique = {column.name: column for column in some}
            self._buffers.open([number for name in unique for number in self._numbers(name)])
            most = _DECOMPRESSED_NBYTES if self._batch.codec else _BLOCK_NBYTES
            count = max(64, most // (row_nbytes * len(some)) // 8 * 8)
            at = start
            while at < stop:
                until = min(stop, at // 8 * 8 + count)  # of a column's nulls, eight share a byte
                part = out[at - start : until - start]
                if stacked:
                    part = part[:, first:last]
                if plain and len(unique) == len(some):
                    self._read_plain(at, until, some, part)
                else:
                    values = self._values(unique, at, until)
                    write_rows(part, [values[column.name] for column in some], rest, self._scratch, stacked=stacked)
                at = until

    def _groups(self, columns: Sequence[Column], column_nbytes: int) -> list[tuple[int, int]]:
        """Return ranges of columns that are read together: bounded in memory, and not too few at a time."""
        if not self._batch.codec:
            count = max(64, _BLOCK_NBYTES // max(1, column_nbytes))
            return [(k, min(len(columns), k + count)) for k in range(0, len(columns), count)]
        # Each is best decompressed in one go. What is held of it is what it was compressed to, and what comes of it.
        groups = []
        first, held = 0, 0
        for k, column in enumerate(columns):
            nbytes = column_nbytes + sum([self._buffers.nbytes(number) for number in self._numbers(column.name)])
            if k > first and held + nbytes > _DECOMPRESSED_NBYTES:
                groups.append((first, k))
                first, held = k, 0
            held += nbytes
        return [*groups, (first, len(columns))]

    def _slot(self, name: str) -> _Slot:
        return self._index.schema.slots[name]

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers of the buffers that hold a column's elements: where values are missing, and values."""
        slot = self._slot(name)
        depth = _depth(slot.kind)
        data = slot.buffer + depth + 1 + _has_offsets(slot.kind)
        return [data - 1, data] if self._batch.nodes[slot.node + depth, 1] else [data]

    def _is_plain(self, column: Column) -> bool:
        slot = self._slot(column.name)
        dtype = _plain_dtype(slot)  # None equals float64
        same = dtype is not None and dtype == self._view.dtype
        return same and not column.axes and not self._batch.nodes[slot.node, 1]

    def _read_plain(self, start: int, stop: int, columns: Sequence[Column], out: npt.NDArray[np.generic]) -> None:
        """Read columns that need no decoding, and turn them into rows."""
        strip = self._scratch.strip(len(columns), stop - start, out.dtype)
        self._buffers.fill(
            [
                _Want(self._numbers(column.name)[-1], start * out.itemsize, strip[k].view(np.uint8).data)
                for k, column in enumerate(columns)
            ]
        )
        write_strip(out, strip)

    def _check_lists(self, column: Column, start: int, stop: int) -> None:
        """Raise ColumnError unless all lists of a column have its length."""
        slot = self._slot(column.name)
        if not _has_offsets(slot.kind):
            return
        dtype = np.dtype("<i8" if str(slot.kind).startswith("large") else "<i4")
        self._buffers.open([slot.buffer + 1])
        for at in range(start, stop, _LISTS_AT_A_TIME):
            until = min(stop, at + _LISTS_AT_A_TIME)
            first = at + (at > start)
            offsets = np.empty(until + 1 - first, dtype)
            self._buffers.fill([_Want(slot.buffer + 1, first * dtype.itemsize, offsets.view(np.uint8).data)])
            if not np.array_equal(offsets, np.arange(first, until + 1, dtype=np.int64) * column.axes[0]):
                raise ColumnError(
                    f"column {column.name!r} holds lists of other lengths than {column.axes[0]}, expected one length"
                )

    def _values(self, columns: Mapping[str, Column], start: int, stop: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return rows [start, stop) of some columns."""
        wanted: dict[str, list[_Want]] = {}
        for name, column in columns.items():
            each = prod(column.axes)
            wanted[name] = self._wants(name, start * each, stop * each)
        self._buffers.fill([want for wants in wanted.values() for want in wants])
        return {
            name: self._decode(name, start, stop, columns[name].axes, [want.out for want in wants])
            for name, wants in wanted.items()
        }

    def _wants(self, name: str, start: int, stop: int) -> list[_Want]:
        """Return what is read of a column's buffers for elements [start, stop)."""
        slot = self._slot(name)
        leaf = _leaf(slot.kind)
        width = (leaf.index_type if slot.dictionary >= 0 else leaf).bit_width
        *validity, data = self._numbers(name)
        wants = [_Want(number, start // 8, _room(-(-stop // 8) - start // 8)) for number in validity]
        if validity:
            start -= start % 8  # its bits begin within a byte, and so its elements begin with that byte
        first = start * width // 8
        return [*wants, _Want(data, first, _room(-(-stop * width // 8) - first))]

    def _decode(
        self, name: str, start: int, stop: int, axes: tuple[int, ...], found: Sequence[memoryview]
    ) -> npt.NDArray[np.generic]:
        """Return rows [start, stop) of a column, given what was read of its buffers."""
        pa = _arrow()
        slot = self._slot(name)
        leaf = _leaf(slot.kind)
        stored = leaf.index_type if slot.dictionary >= 0 else leaf
        each = prod(axes)
        array = pa.Array.from_buffers(
            stored,
            (stop - start) * each,
            [*[None] * (2 - len(found)), *map(pa.py_buffer, found)],
            offset=start * each % 8 if len(found) > 1 or str(stored) == "bool" else 0,
        )
        if slot.dictionary >= 0:
            values = _load_dictionary(self._shard, self._storage, self._index, slot.dictionary, leaf.value_type)
            array = pa.DictionaryArray.from_arrays(array, values).dictionary_decode()
        return values_of(array, name, self._view).reshape(stop - start, *axes)


def _room(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def _load_dictionary(shard: Shard, storage: Storage, index: _Index, number: int, kind: Any) -> Any:
    """Return the values that a column's indices point at, as a pyarrow.Array.

    Parameters
    ----------
    shard : Shard
    storage : Storage
    index : _Index
    number : int
        Number of the dictionary.
    kind : pyarrow.DataType
        Type of the values.
    """
    pa = _arrow()
    arrays = []
    for message in index.dictionaries:
        if message.dictionary != number:
            continue
        if not len(message.nodes) or message.nodes[0, 0] != message.rows:
            raise _DamagedError("a dictionary without values")
        rooms = [_room(-(-message.rows // 8))] if message.nodes[0, 1] else []
        rooms.append(_room(-(-message.rows * kind.bit_width // 8)))
        buffers = _Buffers(shard, storage, message, Scratch())
        numbers = range(2 - len(rooms), 2)
        buffers.open(numbers)
        buffers.fill([_Want(number, 0, room) for number, room in zip(numbers, rooms, strict=True)])
        arrays.append(
            pa.Array.from_buffers(kind, message.rows, [*[None] * (2 - len(rooms)), *map(pa.py_buffer, rooms)])
        )
    if not arrays:
        raise _DamagedError(f"no dictionary {number}")
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
