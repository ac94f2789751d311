"""What the headers of an Arrow file mean: its columns, and which buffers of each batch hold them."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, ShardReadError
from lazyshards.formats.arrow_headers import (
    BATCH,
    DICTIONARY,
    MAGIC,
    SCHEMA,
    DamagedError,
    FlatBuffer,
    Message,
    Scan,
    header_span,
    scan_headers,
)
from lazyshards.formats.base import Fault
from lazyshards.formats.columns import numpy_type
from lazyshards.formats.tables import Cache, Field, describe_type
from lazyshards.layout import Shard
from lazyshards.storage.base import Storage

__all__ = [
    "CACHE",
    "Index",
    "Schema",
    "Slot",
    "describe_field",
    "first_line",
    "is_regular",
    "load_index",
    "load_pyarrow",
    "make_index",
]

_CACHE_NBYTES = 64 << 20
"""Bytes of the headers that are kept parsed."""
_PLAIN_KINDS = "iufmM"


class Slot(NamedTuple):
    """Where a column stands in the lists of every batch, and what it holds."""

    number: int
    """Number of the column."""
    node: int
    """Number of its first array."""
    buffer: int
    """Number of its first buffer."""
    buffers: int
    """How many buffers it has."""
    depth: int
    """How many arrays of lists stand around its elements."""
    offsets: str
    """NumPy's name of the type of the offsets that tell how long its lists are; empty if their type does."""
    leaf: Any
    """pyarrow.DataType of its elements."""
    dictionary: int
    """Number of the dictionary of its elements; -1 if there is none."""
    dtype: np.dtype[np.generic] | None
    """Type of its elements if they lie as NumPy has them, and no list has offsets; else None, which equals float64."""

    @property
    def data(self) -> int:
        """Number of the buffer that holds its elements; the one before tells which are missing."""
        return self.buffer + self.depth + 1 + bool(self.offsets)


class Schema(NamedTuple):
    """A schema, which many files have in common."""

    fields: tuple[Field, ...]
    """Its columns."""
    slots: dict[str, Slot]
    """Where each column that can be read stands."""
    lengths: npt.NDArray[np.int64] | None
    """Elements that each array of a batch has for each row, -1 where it does not matter; None if only headers tell."""
    message: bytes
    """The message that holds it."""
    has_dictionaries: bool
    """Whether batches can be read only after dictionaries."""


class Index(NamedTuple):
    """All headers of one file."""

    schema: Schema
    batches: tuple[Message, ...]
    """Batches that hold rows."""
    dictionaries: tuple[Message, ...]
    starts: tuple[int, ...]
    """Local row at which each batch starts, and the number of rows."""
    nodes: npt.NDArray[np.int64] | None
    """Length and null count of each array of each batch that holds rows; None if their numbers differ."""
    nbytes: int
    """About how much memory it takes."""


CACHE: Cache[Index] = Cache(_CACHE_NBYTES)
"""Headers of the files that were read last."""


def load_pyarrow() -> Any:
    """Return pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise FormatError("reading Arrow files needs pyarrow: pip install 'lazyshards[arrow]'") from exc
    return pa


def first_line(exc: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def _parse_schema(data: bytes, known: dict[bytes, Schema]) -> Schema:
    """Parse a message that holds a schema, the bytes before its FlatBuffer included."""
    if data in known:
        return known[data]
    pa = load_pyarrow()
    start, size = header_span(data)
    flat = FlatBuffer(data[start : start + size])
    message = flat.root()
    if flat.value(message, 1, "<B") != SCHEMA:
        raise DamagedError("no schema where one is expected")
    table = flat.follow(flat.field(message, 2))
    if flat.value(table, 0, "<h"):
        raise DamagedError("numbers in big-endian byte order, expected little-endian")
    try:
        arrow = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.lib.ArrowException, OSError) as exc:
        raise DamagedError(f"a schema that cannot be read: {first_line(exc)}") from exc
    try:
        schema = _describe_schema(arrow, flat, flat.tables(table, 1), data)
    except ValueError as exc:  # names that are no text
        raise DamagedError(f"a schema that cannot be read: {first_line(exc)}") from exc
    known[data] = schema
    return schema


def _describe_schema(arrow: Any, flat: FlatBuffer, tables: Sequence[int], message: bytes) -> Schema:
    """Return the columns of a schema, and where each stands; ``tables`` are its columns in the FlatBuffer."""
    coded = any([_has_dictionary(field.type) for field in arrow])
    fields: list[Field] = []
    slots: dict[str, Slot] = {}
    node = buffer = 0
    lost = False
    for field, described in zip(arrow, tables, strict=True):
        leaf, axes = describe_type(field.type)
        problem = ""
        span = None if lost else _span(field.type)
        if span is None:
            lost = True
            problem = f"is {field.type}, or stands behind a column of such a type, whose buffers cannot be told apart"
        else:
            number = _dictionary_number(flat, described)
            slots[field.name] = _describe_slot(field.type, len(fields), (node, buffer, span[1]), number)
            node, buffer = node + span[0], buffer + span[1]
        if axes.count(-1) > 1 or (-1 in axes and len(axes) > 1):
            problem = problem or f"is {field.type}, lists within lists, expected lists of numbers"
        fields.append(Field(field.name, str(field.type), leaf, tuple(axes), 0, problem))
    if any([field.axes and -1 in field.axes for field in fields]):
        return Schema(tuple(fields), slots, None, message, coded)
    lengths = np.full(node, -1, np.int64)
    for field in fields:
        if not field.problem:
            slot, shape = slots[field.name], field.axes or ()
            depth = slot.depth
            # Arrow's tensors have several axes, and one array of lists.
            each = [prod(shape[:i]) for i in range(depth)] + [prod(shape)]
            lengths[slot.node : slot.node + depth + 1] = each
    return Schema(tuple(fields), slots, lengths, message, coded)


def _describe_slot(kind: Any, number: int, place: tuple[int, int, int], dictionary: int) -> Slot:
    """Return where a column stands, of which the first array, the first buffer and the number of buffers are known."""
    node, buffer, buffers = place
    depth, offsets = 0, ""
    kind = getattr(kind, "storage_type", kind)
    while str(kind).startswith(("fixed_size_list<", "list<", "large_list<")):
        if not str(kind).startswith("fixed"):
            offsets = "<i8" if str(kind).startswith("large") else "<i4"
        kind, depth = kind.value_type, depth + 1
        kind = getattr(kind, "storage_type", kind)
    dtype = numpy_type(str(kind))
    if dtype is not None and (dtype.kind not in _PLAIN_KINDS or str(kind).startswith("date32") or offsets):
        dtype = None
    return Slot(number, node, buffer, buffers, depth, offsets, kind, dictionary, dtype)


def _has_dictionary(kind: Any) -> bool:
    kind = getattr(kind, "storage_type", kind)
    if str(kind).startswith("dictionary<"):
        return True
    return any([_has_dictionary(kind.field(i).type) for i in range(kind.num_fields)])


def _dictionary_number(flat: FlatBuffer, field: int) -> int:
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


def _schema_of_footer(footer: bytes) -> bytes:
    """Return the schema that a file's footer holds, as a message."""
    pa = load_pyarrow()
    try:
        with pa.ipc.open_file(pa.BufferReader(MAGIC + b"\0\0" + footer)) as file:
            arrow = file.schema
    except (pa.lib.ArrowException, OSError) as exc:
        raise DamagedError(f"a schema that cannot be read: {first_line(exc)}") from exc
    if any([_has_dictionary(field.type) for field in arrow]):  # they would be numbered anew
        raise DamagedError("no schema where one is expected, and dictionaries, whose numbers it must tell")
    return bytes(arrow.serialize())


def make_index(scan: Scan, schemas: dict[bytes, Schema]) -> Index:
    """Return the headers of a file, its schema parsed; ``schemas`` are those known, a new one is added."""
    schema = _parse_schema(scan.schema or _schema_of_footer(scan.footer), schemas)
    batches = [message for message in scan.messages if message.kind == BATCH and message.rows]
    dictionaries = [message for message in scan.messages if message.kind == DICTIONARY]
    strange = [message for message in scan.messages if message.kind not in (BATCH, DICTIONARY)]
    if strange:
        raise DamagedError(f"a message of kind {strange[0].kind}, expected batches of rows")
    seen = set()
    for message in dictionaries:
        if message.dictionary in seen and not message.delta:
            raise DamagedError("a dictionary that replaces one before it, expected one for all rows")
        seen.add(message.dictionary)
    starts = (0, *accumulate([batch.rows for batch in batches]))
    if starts[-1] >= 1 << 62:
        raise DamagedError(f"{starts[-1]:,} rows")
    counts = {len(batch.nodes) for batch in batches}
    nodes = np.stack([batch.nodes for batch in batches]) if len(counts) == 1 else None
    return Index(schema, tuple(batches), tuple(dictionaries), starts, nodes, scan.nbytes + 200 * len(schema.fields))


def load_index(shard: Shard, storage: Storage) -> Index:
    """Return the headers of a shard, from memory or from the file."""
    index = CACHE.get(shard.path, shard.stamp)
    if index is not None:
        return index
    ((_, scan),) = scan_headers([shard.path], storage)
    if isinstance(scan, Fault):
        raise ShardReadError(str(scan))
    index = make_index(scan, {})
    if index.starts[-1] != shard.rows:
        raise ShardReadError(f"{shard.path!r} holds {index.starts[-1]:,} rows, {shard.rows:,} when it was opened")
    CACHE.put(shard.path, shard.stamp, index, index.nbytes)
    return index


def is_regular(index: Index) -> bool:
    """Return whether every column of every batch is as long as it must be, and has no null."""
    lengths, nodes = index.schema.lengths, index.nodes
    if lengths is None or nodes is None or nodes.shape[1] != len(lengths):
        return False
    matter = lengths >= 0
    wanted = np.diff(index.starts)[:, None] * lengths[matter]
    return bool((nodes[:, matter, 0] == wanted).all() and not nodes[:, matter, 1].any())


def describe_field(field: Field, index: Index) -> Field:
    """Return a column with its nulls and the lengths of its lists."""
    slot = index.schema.slots[field.name]
    depth = len(field.axes or ())
    if -1 not in (field.axes or ()):
        depth = slot.depth
    if not index.batches:
        return field
    stop = slot.node + depth + 1
    if index.nodes is None or stop > index.nodes.shape[1]:
        return field._replace(problem="has no buffers in one of the batches: the file is damaged")
    nodes = index.nodes[:, slot.node : stop]
    rows = np.diff(index.starts)
    if (nodes[:, 0, 0] != rows).any():
        return field._replace(problem="has more or less rows than its batches: the file is damaged")
    nulls = int(nodes[:, :-1, 1].sum())
    if nulls:
        return field._replace(problem=f"holds {nulls:,} null{'s' * (nulls > 1)} in place of lists, expected lists")
    axes = field.axes or ()
    if axes == (-1,):
        axes = (int(nodes[0, 1, 0] // rows[0]),)
        if (nodes[:, 1, 0] != rows * axes[0]).any():
            return field._replace(axes=None)
    if (nodes[:, -1, 0] != rows * prod(axes)).any():
        return field._replace(problem="has more or less elements than its rows: the file is damaged")
    return field._replace(axes=axes, nulls=int(nodes[:, -1, 1].sum()))
