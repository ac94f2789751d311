"""Footers of Parquet files: read by their ranges, those of many files together, parsed by pyarrow, and kept."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from lazyshards.errors import FormatError, ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.parquet_pages import PageHeader, Pages
from lazyshards.formats.parquet_thrift import Chunk, CutError, MalformedError, count_values
from lazyshards.formats.tables import Cache, Field, Options, Table, describe_type
from lazyshards.layout import Shard
from lazyshards.storage.base import Head, Part, Storage

__all__ = [
    "CACHE",
    "MAGIC",
    "Footer",
    "Schema",
    "describe",
    "first_line",
    "load_footer",
    "load_pyarrow",
    "read_footers",
]

MAGIC = b"PAR1"
_TAIL_NBYTES = 8
"""Bytes at the end of a file: the footer's length, and the magic."""
_MOST_FOOTER_NBYTES = 256 << 20
"""Bytes of the longest footer that is parsed."""
_FOOTERS_AT_A_TIME = 512
"""Files whose footers are held in memory together while they are inspected."""
_MOST_NULL_CHECKS = 3_000
"""Column chunks of one file whose statistics are asked for nulls when it is opened."""
_CACHE_NBYTES = 64 << 20
"""Bytes of the footers that are kept parsed: parsing one of a thousand row groups takes longer than reading a slice."""


class Footer(NamedTuple):
    """A parsed footer."""

    metadata: Any
    """pyarrow.parquet.FileMetaData"""
    starts: tuple[int, ...]
    """Local row at which each row group starts, and the number of rows."""
    nbytes: int
    """Bytes that it has in the file."""
    schema: "Schema"
    """Its columns."""
    chunks: dict[tuple[int, int], tuple[int, int]]
    """Where the chunks lie that were asked for, by row group and leaf."""
    counts: list[list[Chunk]]
    """What is counted in each leaf of each row group; empty if that was not looked at."""
    vetted: set[tuple[int, int]]
    """Which row groups and leaves pyarrow was seen to take: asked about damaged ones, it ends the process."""
    pages: dict[tuple[int, int], Pages]
    """Where their pages lie, as far as they were asked for."""
    headers: dict[int, PageHeader]
    """Headers of pages of which a few rows were decoded, by first byte."""
    plain: dict[int, int]
    """First byte of the values of pages that hold them as they are, by first byte of the page, as far as known."""
    refused: set[tuple[int, ...]]
    """Row groups and their leaves whose pages were seen to be such that the library must decode them."""
    large: set[tuple[int, ...]]
    """Row groups and their leaves that were seen to have larger pages than writers usually make."""
    leaves: dict[tuple[int, str], object]
    """How the columns of row groups are decoded that were asked for a few rows, by row group and name."""


class Schema(NamedTuple):
    """A schema, which many files have in common."""

    arrow: Any
    """pyarrow.Schema"""
    fields: tuple[Field, ...]
    """Its columns."""
    leaves: dict[str, tuple[int, ...]]
    """Numbers of the leaves that hold each column."""
    fixed: frozenset[str]
    """Columns whose lists have one length by their type."""


def load_pyarrow() -> Any:
    """Return pyarrow, with its Parquet reader loaded."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as exc:
        raise FormatError("reading Parquet needs pyarrow: pip install 'lazyshards[parquet]'") from exc
    return pa


def first_line(exc: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


CACHE: Cache[Footer] = Cache(_CACHE_NBYTES)


def read_footers(
    paths: Sequence[str], heads: Sequence[Head], storage: Storage, schemas: list[Schema]
) -> Iterator[tuple[int, Footer | Fault]]:
    """Yield the footer of each file, or what is wrong, in order; read for many files together."""
    for first in range(0, len(paths), _FOOTERS_AT_A_TIME):
        numbers = range(first, min(len(paths), first + _FOOTERS_AT_A_TIME))
        found: dict[int, Footer | Fault] = {}
        sizes: dict[int, int] = {}
        for i in numbers:
            data, stamp, error = heads[i]
            if error is not None:
                found[i] = Fault(paths[i], f"cannot be read: {error.strerror or error}", error)
            elif data != MAGIC:
                what = f"begins with {data!r}" if data else "is empty"
                hint = ", an encrypted file" if data == b"PARE" else ""
                found[i] = Fault(paths[i], f"{what}{hint}, expected a Parquet file ({MAGIC!r})")
            elif stamp.size < len(MAGIC) + _TAIL_NBYTES:
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
    if tail[-4:] != MAGIC:
        return Fault(
            path, f"ends with {tail[-4:]!r}, expected {MAGIC!r}: it is truncated, or its writer was never closed"
        )
    nbytes = int.from_bytes(tail[-8:-4], "little") + _TAIL_NBYTES
    if nbytes > size - len(MAGIC):
        return Fault(path, f"has a damaged footer: of {nbytes:,} bytes, in a file of {size:,}")
    if nbytes > _MOST_FOOTER_NBYTES:
        return Fault(path, f"has a footer of {nbytes:,} bytes, expected at most {_MOST_FOOTER_NBYTES:,}")
    return nbytes


def _parse(path: str, data: bytes, schemas: list[Schema]) -> Footer | Fault:
    """Parse a footer; ``schemas`` are those of the files before, to which a new one is added."""
    pa = load_pyarrow()
    try:
        metadata = pa.parquet.read_metadata(pa.BufferReader(data))
        arrow = metadata.schema.to_arrow_schema()
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        schema = next((known for known in schemas if known.arrow.equals(arrow)), None)
        if schema is None:
            schema = _flatten(arrow)
            schemas.append(schema)
    except (pa.lib.ArrowException, OSError, UnicodeDecodeError) as exc:
        return Fault(path, f"has a damaged footer: {first_line(exc)}")
    if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
        return Fault(path, f"has a damaged footer: {metadata.num_rows:,} rows in row groups of {sum(counts):,}")
    chunks = _count_values(metadata, schema, data)
    if isinstance(chunks, str):
        return Fault(path, f"has a damaged footer: {chunks}")
    return Footer(
        metadata, (0, *accumulate(counts)), len(data), schema, {}, chunks, set(), {}, {}, {}, set(), set(), {}
    )


def load_footer(shard: Shard, footer_nbytes: int, storage: Storage) -> Footer:
    """Return the footer of a shard, from memory or from the file."""
    footer = CACHE.get(shard.path, shard.stamp)
    if footer is not None:
        return footer
    data = bytearray(footer_nbytes)
    storage.fetch_into([Part(shard.path, shard.stamp, shard.stamp.size - len(data), memoryview(data))])
    parsed = _parse(shard.path, bytes(data), [])
    if isinstance(parsed, Fault):
        raise ShardReadError(str(parsed))
    if parsed.starts[-1] != shard.rows:
        raise ShardReadError(f"{shard.path!r} holds {parsed.starts[-1]:,} rows, {shard.rows:,} when it was opened")
    CACHE.put(shard.path, shard.stamp, parsed, parsed.nbytes)
    return parsed


def describe(path: str, footer: Footer, options: Options) -> Table:
    """Return the columns of a file, as its footer describes them."""
    metadata, schema = footer.metadata, footer.schema
    fields = schema.fields
    changed: dict[int, Field] = {}
    groups = [i for i in range(metadata.num_row_groups) if footer.starts[i + 1] > footer.starts[i]]
    wanted = None if options.columns is None else set(options.columns)
    for k, field in enumerate(fields):
        if (wanted is not None and field.name not in wanted) or field.problem:
            continue
        leaf = schema.leaves[field.name][0]
        axes, nulls = field.axes, 0
        if axes and -1 in axes:
            axes = _list_axes(footer, groups, leaf, axes)
        if footer.counts:
            nulls = sum([footer.counts[i][leaf].nulls or 0 for i in groups])
        if nulls or axes != field.axes:
            changed[k] = field._replace(axes=axes, nulls=nulls)
    if changed:
        fields = tuple([changed.get(k, field) for k, field in enumerate(fields)])
    return Table(path, footer.starts[-1], fields)


def _flatten(schema: Any) -> Schema:
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
    return Schema(schema, tuple(fields), leaves, fixed)


def _count_leaves(kind: Any) -> int:
    """Return how many columns of a file hold a column of this type."""
    kind = getattr(kind, "storage_type", kind)
    if str(kind).startswith("dictionary<") or not kind.num_fields:
        return 1
    return sum([_count_leaves(kind.field(i).type) for i in range(kind.num_fields)])


def _list_axes(footer: Footer, groups: Sequence[int], leaf: int, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the one length that lists of a column can have, or None if they differ.

    The footer says how many elements each row group has. Whether each list has its share is seen when it is read.
    """
    lengths = set()
    for i in groups:
        length, left = divmod(footer.counts[i][leaf].values or 0, footer.starts[i + 1] - footer.starts[i])
        lengths.add(-1 if left else length)
    if len(lengths) > 1 or -1 in lengths:
        return None
    return tuple([lengths.pop() if n == -1 and lengths else n for n in axes])


def _count_values(metadata: Any, schema: Schema, data: bytes) -> list[list[Chunk]] | str:
    """Return what is counted in each column of each row group, nothing if it is not needed, or what is wrong.

    pyarrow tells it too, but ends the process where it is damaged.
    """
    has_lists = any([field.axes and -1 in field.axes for field in schema.fields])
    if metadata.num_row_groups * metadata.num_columns > _MOST_NULL_CHECKS and not has_lists:
        return []
    try:
        counts = count_values(data)
    except (CutError, MalformedError) as exc:
        return str(exc)
    if len(counts) != metadata.num_row_groups or any([len(some) != metadata.num_columns for some in counts]):
        return "its row groups have more or less columns than its schema"
    return counts
