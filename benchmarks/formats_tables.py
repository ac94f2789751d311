"""Parquet and Arrow IPC: whole loads, ranges and slices, beside the recipes that people write with pyarrow."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import datasets
from benchmarks.datasets import COLUMNS, ROW_NBYTES
from benchmarks.formats_plain import FormatCopy, fill_tiles, format_copy
from benchmarks.machine import CoreUse, workers
from benchmarks.measure import in_warm_processes, memory_of_first_load
from benchmarks.peers import Call, Peer
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.datasets import Piece
    from benchmarks.options import Options

__all__ = ["run"]

_GROUP_ROWS = 1 << 16
"""Rows of a row group or batch, as many files have them; pyarrow's own default is 16 times as many."""
_OURS = "lazyshards"
_PANDAS = "seed: read_table, slice, pandas"
_STACK = "read_table, slice, np.stack"
_GROUPS = "by hand: the row groups that overlap"
_MAPPED = "by hand: memory map, the batches that overlap"


@dataclass(frozen=True, slots=True)
class _Request:
    """How many rows are read, and what was promised: times as fast as the seed."""

    name: str
    rows: Callable[[int], int]
    """Rows wanted of so many."""
    calls: int
    """Calls of a turn, each at another place."""
    bounds: tuple[float | None, float | None]
    """Parquet, Arrow columns; None where nothing was promised."""


_REQUESTS = (
    _Request("100 rows", lambda rows: min(100, rows), 15, (12, None)),
    _Request("4,000 rows", lambda rows: min(4_000, rows), 15, (14, None)),
    _Request("29 % of the rows", lambda rows: rows * 29 // 100, 1, (1.6, 2)),
    _Request("all rows", lambda rows: rows, 1, (1, None)),
)


# Files ------------------------------------------------------------------------------------------------------------


def _columns(rows: NDArray[np.float32]) -> object:
    import pyarrow as pa

    return pa.table({f"c{k:02d}": rows[:, k] for k in range(COLUMNS)})


def _vectors(rows: NDArray[np.float32]) -> object:
    import pyarrow as pa

    return pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), COLUMNS)})


def _write_parquet(path: Path, rows: NDArray[np.float32], **options: object) -> None:
    import pyarrow.parquet as pq

    pq.write_table(_columns(rows), path, **options)


def _write_arrow(path: Path, rows: NDArray[np.float32], *, codec: str | None, vectors: bool) -> None:
    import pyarrow as pa

    table = _vectors(rows) if vectors else _columns(rows)
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_GROUP_ROWS)


# Peers ------------------------------------------------------------------------------------------------------------


def _ours(dataset: FormatCopy) -> Call:
    """Open once, then compute into warm memory."""
    import lazyshards

    warm = np.full((dataset.rows, COLUMNS), 0, np.float32)
    shards = lazyshards.open_shards(dataset.folder, engine="numpy")
    return lambda rows: shards[rows.start : rows.stop].compute(out=warm[: len(rows)])


def _read_whole(path: Path) -> object:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def _pandas(dataset: FormatCopy) -> Call:
    """The recipe: read the whole file, slice it, and let pandas make an array."""
    importlib.import_module("pandas")  # without it the peer is absent

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        frame = _read_whole(dataset.shards[piece.shard]).slice(piece.start, piece.stop - piece.start).to_pandas()
        out[...] = np.stack(frame["v"].to_numpy()) if "v" in frame.columns else frame.to_numpy()

    return fill_tiles(dataset, 1, fill)


def _stack(dataset: FormatCopy) -> Call:
    """The same without pandas."""

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        table = _read_whole(dataset.shards[piece.shard]).slice(piece.start, piece.stop - piece.start)
        if table.num_columns == 1:
            out[...] = table.column(0).combine_chunks().flatten().to_numpy().reshape(-1, COLUMNS)
        else:
            np.stack([column.to_numpy() for column in table.columns], axis=1, out=out)

    return fill_tiles(dataset, 1, fill)


def _groups(dataset: FormatCopy) -> Call:
    """Know the footers, and decode the row groups that overlap, one at a time on each of as many threads as cores."""
    import pyarrow.parquet as pq

    files = [pq.ParquetFile(path) for path in dataset.shards]
    ends = [
        np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]).tolist()
        for file in files
    ]

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        file = pq.ParquetFile(dataset.shards[piece.shard], metadata=files[piece.shard].metadata)
        first = 0
        for group, end in enumerate(ends[piece.shard]):
            a, b = max(piece.start, first), min(piece.stop, end)
            if a < b:
                table = file.read_row_group(group, use_threads=False).slice(a - first, b - a)
                values = [column.to_numpy() for column in table.columns]
                np.stack(values, axis=1, out=out[a - piece.start : b - piece.start])
            first = end

    return _by_size(dataset, fill)


def _mapped(dataset: FormatCopy) -> Call:
    """Keep the files mapped, and copy out of the batches that overlap."""
    import pyarrow as pa

    files = [pa.ipc.open_file(pa.memory_map(str(path))) for path in dataset.shards]

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        file = files[piece.shard]
        for number in range(piece.start // _GROUP_ROWS, -(-piece.stop // _GROUP_ROWS)):
            first = number * _GROUP_ROWS
            a, b = max(piece.start, first), min(piece.stop, first + _GROUP_ROWS)
            batch = file.get_batch(number).slice(a - first, b - a)
            part = out[a - piece.start : b - piece.start]
            if batch.num_columns == 1:
                part[...] = batch.column(0).flatten().to_numpy().reshape(-1, COLUMNS)
            else:
                np.stack([column.to_numpy() for column in batch.columns], axis=1, out=part)

    return _by_size(dataset, fill)


def _by_size(dataset: FormatCopy, fill: Callable[[NDArray[np.float32], Piece], None]) -> Call:
    """Use one thread for small requests, and one for each core for others."""
    one, many = fill_tiles(dataset, 1, fill), fill_tiles(dataset, workers(), fill)
    return lambda rows: (one if len(rows) * ROW_NBYTES <= 1 << 20 else many)(rows)


# Tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of file."""

    name: str
    suffix: str
    write: Callable[[Path, NDArray[np.float32]], None]
    by_hand: tuple[str, Callable[[FormatCopy], Call]]
    bounds: tuple[float | None, ...]
    """Of each request: how many times as fast as the seed we promise."""


_PARQUET = tuple(request.bounds[0] for request in _REQUESTS)
_ARROW = tuple(request.bounds[1] for request in _REQUESTS)
_FIXED = (None, None, 28, None)
_DEFAULT: dict[str, object] = {}
_GROUPED: dict[str, object] = {"row_group_size": _GROUP_ROWS}
_PLAIN: dict[str, object] = {**_GROUPED, "use_dictionary": False, "compression": "none"}
_KINDS = (
    _Kind("parquet", ".parquet", partial(_write_parquet, **_GROUPED), (_GROUPS, _groups), _PARQUET),
    _Kind("parquet-plain", ".parquet", partial(_write_parquet, **_PLAIN), (_GROUPS, _groups), _PARQUET),
    _Kind("parquet-giant", ".parquet", partial(_write_parquet, **_DEFAULT), (_GROUPS, _groups), _PARQUET),
    _Kind("arrow-fixed", ".arrow", partial(_write_arrow, codec=None, vectors=True), (_MAPPED, _mapped), _FIXED),
    _Kind("arrow", ".arrow", partial(_write_arrow, codec=None, vectors=False), (_MAPPED, _mapped), _ARROW),
    _Kind("arrow-lz4", ".arrow", partial(_write_arrow, codec="lz4", vectors=False), (_MAPPED, _mapped), _ARROW),
    _Kind("arrow-zstd", ".arrow", partial(_write_arrow, codec="zstd", vectors=False), (_MAPPED, _mapped), _ARROW),
)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes // 4, 2)
    for kind in _KINDS:
        copy = format_copy(dataset, kind.name, kind.suffix, kind.write)
        peers = (
            Peer(_OURS, _ours),
            Peer(_PANDAS, _pandas),
            Peer(_STACK, _stack),
            Peer(kind.by_hand[0], kind.by_hand[1]),
        )
        for request, bound in zip(_REQUESTS, kind.bounds, strict=True):
            yield _table(kind, request, bound, copy, peers, options)
        memories, absent = memory_of_first_load(peers, copy, range(copy.rows), range(100))
        yield Table(
            f"{kind.name}: anonymous memory at the peak of a whole load into memory that is there, beside the result",
            "MiB",
            {name: [memory.anonymous_nbytes / 2**20] for name, memory in memories.items()},
            absent,
            targets=(Target(_OURS, "at most", 0.3 * copy.rows * ROW_NBYTES / 2**20),),
        )


def _table(
    kind: _Kind, request: _Request, bound: float | None, copy: FormatCopy, peers: tuple[Peer, ...], options: Options
) -> Table:
    count = request.rows(copy.rows)
    turns = options.turns(7)
    free = copy.rows - count
    starts = [(i + 1) * 611_953 % (free + 1) for i in range(turns * request.calls)]
    requests = [range(start, start + count) for start in starts]
    use = CoreUse()
    measured = in_warm_processes(
        peers, copy, [tuple(requests[i * request.calls : (i + 1) * request.calls]) for i in range(turns)]
    )
    return Table(
        f"{kind.name}: {request.name} of {copy.rows:,} of {ROW_NBYTES} bytes in {len(copy.shards)} files, hot",
        "ms",
        measured.figures(lambda timing: 1e3 * timing.call),
        measured.absent,
        _PANDAS if _PANDAS in measured.timings else _STACK,
        (Target(_OURS, "at least", bound, (_PANDAS,)),) if bound is not None else (),
        (*measured.notes, use.note()),
    )
