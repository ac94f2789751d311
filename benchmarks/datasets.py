"""Write the shards that the benchmarks read, once, and say what each row must hold."""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["COLUMNS", "HEADER_NBYTES", "ROW_NBYTES", "Dataset", "Piece", "hdf5_copy", "many_shards", "uneven_shards"]

COLUMNS = 64
"""float32 values in a row."""

ROW_NBYTES = 4 * COLUMNS
"""Bytes in a row."""

HEADER_NBYTES = 128
"""Bytes before the first row of each npy shard; checked when a shard is written."""

_PERIOD = 65_521
"""Rows after which the values repeat: a prime, so that no tile, block or shard border falls in step with it."""

_BLOCK_ROWS = 1 << 16
"""Rows written at a time, so that writing needs little memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one shard that one request needs."""

    shard: int
    """Number of the shard."""
    start: int
    """First local row."""
    stop: int
    """Local row after the last."""
    target: int
    """Where the first of these rows lands in the result, counted in rows."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """npy shards of float32 rows on the local disk."""

    folder: Path
    """Directory that holds nothing but the shards."""
    shard_rows: tuple[int, ...]
    """Rows of each shard, in order."""

    @property
    def paths(self) -> list[Path]:
        """Return the shards in order."""
        return [self.folder / f"shard_{i:05d}.npy" for i in range(len(self.shard_rows))]

    @property
    def ends(self) -> list[int]:
        """Return the global row after the last of each shard."""
        return list(accumulate(self.shard_rows))

    @property
    def rows(self) -> int:
        """Return the number of rows of all shards."""
        return sum(self.shard_rows)

    def pieces(self, rows: range) -> Iterator[Piece]:
        """Yield the piece of each shard that the global, contiguous ``rows`` overlap."""
        ends = self.ends
        at = rows.start
        while at < rows.stop:
            shard = bisect_right(ends, at)
            first = ends[shard] - self.shard_rows[shard]
            stop = min(rows.stop, ends[shard])
            yield Piece(shard, at - first, stop - first, at - rows.start)
            at = stop

    def fault(self, array: NDArray[np.float32], rows: range) -> str:
        """Return what is wrong with ``array`` as the values of ``rows``, or an empty string."""
        if array.shape != (len(rows), COLUMNS) or array.dtype != np.float32:
            return f"found {array.shape} {array.dtype}, expected {(len(rows), COLUMNS)} float32"
        at = 0
        while at < len(rows):
            phase = (rows.start + at) % _PERIOD
            n = min(_PERIOD - phase, len(rows) - at)
            if not np.array_equal(array[at : at + n], _pattern()[phase : phase + n]):
                return f"wrong values between rows {rows.start + at} and {rows.start + at + n}"
            at += n
        return ""


def uneven_shards(cache_dir: Path, nbytes: int, shards: int = 16) -> Dataset:
    """Return a dataset of about ``nbytes`` in ``shards`` shards of uneven size, written if it is not there yet."""
    total = nbytes // ROW_NBYTES
    weights = np.random.default_rng(2).uniform(0.4, 1.6, shards)
    ends = np.rint(np.cumsum(weights) / weights.sum() * total).astype(int)
    return _written(cache_dir / f"uneven-{shards}-{total}", tuple(np.diff(ends, prepend=0).tolist()))


def many_shards(cache_dir: Path, shards: int) -> Dataset:
    """Return a dataset of ``shards`` small shards of 8 to 23 rows, written if it is not there yet."""
    return _written(cache_dir / f"many-{shards}", tuple(8 + i * 7 % 16 for i in range(shards)))


def hdf5_copy(dataset: Dataset) -> Path:
    """Return one HDF5 file with the same rows in the contiguous dataset ``data``, written if it is not there yet."""
    import h5py

    path = dataset.folder.with_suffix(".h5")
    if not path.exists():
        _check_disk(path.parent, dataset.rows * ROW_NBYTES)
        partial = path.with_suffix(".partial")
        with h5py.File(partial, "w") as file:
            data = file.create_dataset("data", (dataset.rows, COLUMNS), "f4")
            for start, block in _blocks(range(dataset.rows)):
                data[start : start + len(block)] = block
        partial.rename(path)
    return path


@cache
def _pattern() -> NDArray[np.float32]:
    """Return the values of rows 0 to _PERIOD; each later row equals the one _PERIOD before it."""
    return np.random.default_rng(1).random((_PERIOD, COLUMNS), dtype=np.float32)


def _blocks(rows: range) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the values of ``rows`` in blocks, each with its first row."""
    for start in range(rows.start, rows.stop, _BLOCK_ROWS):
        numbers = np.arange(start, min(start + _BLOCK_ROWS, rows.stop))
        yield start, _pattern()[numbers % _PERIOD]


def _written(folder: Path, shard_rows: tuple[int, ...]) -> Dataset:
    """Return the dataset in ``folder``; write it, with a marker beside it when complete, unless it is there."""
    dataset = Dataset(folder, shard_rows)
    marker = folder.with_suffix(".json")
    wanted = {**asdict(dataset), "folder": folder.name, "period": _PERIOD}
    if marker.exists() and json.loads(marker.read_text()) == json.loads(json.dumps(wanted)):
        return dataset
    if folder.exists():
        shutil.rmtree(folder)
    _check_disk(folder.parent, dataset.rows * ROW_NBYTES)
    folder.mkdir()
    first = 0
    for path, rows in zip(dataset.paths, shard_rows, strict=True):
        _write_shard(path, range(first, first + rows))
        first += rows
    marker.write_text(json.dumps(wanted))
    return dataset


def _write_shard(path: Path, rows: range) -> None:
    """Write ``rows`` as one npy shard."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(rows), COLUMNS)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        if file.tell() != HEADER_NBYTES:
            raise RuntimeError(f"{path}: header of {file.tell()} bytes, expected {HEADER_NBYTES}")
        for _, block in _blocks(rows):
            file.write(block.data)


def _check_disk(folder: Path, nbytes: int) -> None:
    """Refuse to write where the disk has too little room."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.2 * nbytes:
        raise OSError(f"{folder}: {free >> 20} MiB free, {nbytes >> 20} MiB to write; give another --dir or --quick")
