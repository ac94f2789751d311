"""Zarr stores: three quarters of the rows into warm memory, beside zarr-python and TensorStore."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import datasets
from benchmarks.datasets import COLUMNS, Piece
from benchmarks.formats_plain import FormatCopy, fill_tiles, format_copy, ours, tables
from benchmarks.machine import workers
from benchmarks.peers import Call, Peer
from benchmarks.report import Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from benchmarks.options import Options
    from benchmarks.report import Table

__all__ = ["run"]

_CHUNK_ROWS = 4096
"""Rows of a chunk: 1 MiB."""


def _write(kind: str, path: Path, rows: NDArray[np.float32]) -> None:
    import zarr

    options: dict[str, Any] = {
        "v3 raw": {"compressors": None},
        "v3 zstd": {"compressors": zarr.codecs.ZstdCodec(level=1)},
        "v3 blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle")},
        "v2 blosc": {"compressors": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}, "zarr_format": 2},
        "v3 gzip": {"compressors": zarr.codecs.GzipCodec(level=1)},
        "v3 sharded zstd": {"compressors": zarr.codecs.ZstdCodec(level=1), "shards": (16 * _CHUNK_ROWS, COLUMNS)},
        "v3 sharded raw": {"compressors": None, "shards": (16 * _CHUNK_ROWS, COLUMNS)},
    }[kind]
    chunks = (_CHUNK_ROWS, COLUMNS)
    zarr.create_array(str(path), shape=rows.shape, dtype=rows.dtype, chunks=chunks, **options)[...] = rows


def _zarr_python(dataset: FormatCopy) -> Call:
    """Slice and assign: what people write."""
    import zarr

    stores: list[Any] = [zarr.open_array(str(path), mode="r") for path in dataset.shards]

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        out[...] = stores[piece.shard][piece.start : piece.stop]

    return fill_tiles(dataset, 1, fill)


def _zarr_python_out(dataset: FormatCopy) -> Call:
    """Decode into the result."""
    import zarr
    from zarr.core.buffer import default_buffer_prototype

    stores: list[Any] = [zarr.open_array(str(path), mode="r") for path in dataset.shards]
    kind = default_buffer_prototype().nd_buffer

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        stores[piece.shard].get_basic_selection(slice(piece.start, piece.stop), out=kind.from_numpy_array(out))

    return fill_tiles(dataset, 1, fill)


def _open_tensorstore(path: Path) -> Any:
    import tensorstore

    driver = "zarr3" if (path / "zarr.json").exists() else "zarr"
    kvstore = {"driver": "file", "path": str(path)}
    return tensorstore.open({"driver": driver, "kvstore": kvstore}, open=True, read=True).result()


def _tensorstore(dataset: FormatCopy) -> Call:
    """Read each piece into an array of its own, and assign."""
    stores = [_open_tensorstore(path) for path in dataset.shards]

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        out[...] = stores[piece.shard][piece.start : piece.stop].read().result()

    return fill_tiles(dataset, 1, fill)


def _tensorstore_into(dataset: FormatCopy) -> Call:
    """Write all pieces into the result together: the fastest way that was found."""
    import tensorstore

    stores = [_open_tensorstore(path) for path in dataset.shards]
    warm = np.full((dataset.rows, COLUMNS), 0, np.float32)

    def call(rows: range) -> NDArray[np.float32]:
        out = warm[: len(rows)]
        futures = []
        for piece in dataset.pieces(rows):
            part = out[piece.target : piece.target + piece.stop - piece.start]
            futures.append(tensorstore.array(part, copy=False).write(stores[piece.shard][piece.start : piece.stop]))
        for future in futures:
            future.result()
        return out

    return call


_KINDS = ("v3 raw", "v3 zstd", "v3 blosc", "v2 blosc", "v3 gzip", "v3 sharded zstd", "v3 sharded raw")


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes // 4, 4)
    two = f"lazyshards, {workers()} tiles"
    peers = (
        Peer("zarr-python", _zarr_python),
        Peer("zarr-python, out=", _zarr_python_out),
        Peer("tensorstore", _tensorstore),
        Peer("tensorstore, into the result", _tensorstore_into),
        Peer("lazyshards, 1 tile", partial(ours, 1, {})),
        Peer(two, partial(ours, workers(), {})),
    )
    targets = (
        Target(two, "at least", 1.5, ("zarr-python",)),
        Target(two, "at most", 1.1, ("tensorstore", "tensorstore, into the result")),
    )
    for kind in _KINDS:
        copy = format_copy(dataset, f"zarr-{kind.replace(' ', '-')}", ".zarr", partial(_write, kind))
        yield from tables(f"Zarr {kind}", peers, copy, targets, options)
