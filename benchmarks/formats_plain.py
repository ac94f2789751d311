"""raw, .npz and safetensors: three quarters of the rows into warm memory, beside what people write by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import datasets
from benchmarks.datasets import COLUMNS, ROW_NBYTES, Dataset, Piece
from benchmarks.machine import CoreUse, workers
from benchmarks.measure import in_warm_processes, memory_of_first_load
from benchmarks.peers import Call, Peer
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.options import Options

__all__ = ["FormatCopy", "fill_tiles", "format_copy", "ours", "run", "tables"]

Fill = Callable[["NDArray[np.float32]", Piece], None]
"""Fill the rows given with the rows of a piece."""


@dataclass(frozen=True, slots=True)
class FormatCopy(Dataset):
    """The rows of a dataset in shards of another format."""

    suffix: str
    """Ending of the shards' names."""

    @property
    def shards(self) -> list[Path]:
        """Return the shards in order."""
        return [self.folder / f"shard_{i:05d}{self.suffix}" for i in range(len(self.shard_rows))]

    @property
    def paths(self) -> list[Path]:
        """Return all files: of a store each one."""
        found = []
        for shard in self.shards:
            found += sorted(path for path in shard.rglob("*") if path.is_file()) if shard.is_dir() else [shard]
        return found


def format_copy(
    dataset: Dataset, name: str, suffix: str, write: Callable[[Path, NDArray[np.float32]], None]
) -> FormatCopy:
    """Return the dataset in another format, written shard by shard if it is not there yet."""
    folder = dataset.folder.with_name(f"{dataset.folder.name}-{name}")
    copy = FormatCopy(folder, dataset.shard_rows, suffix)
    if not folder.exists():
        partial_folder = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir()
        for shard, path in zip(copy.shards, dataset.paths, strict=True):
            write(partial_folder / shard.name, np.load(path))
        partial_folder.rename(folder)
    return copy


def fill_tiles(dataset: Dataset, tiles: int, fill: Fill) -> Call:
    """Return a call that fills warm memory by ``tiles`` threads."""
    warm = np.full((dataset.rows, COLUMNS), 0, np.float32)  # touched, as zeros would not be

    def call(rows: range) -> NDArray[np.float32]:
        out = warm[: len(rows)]
        tile_rows = -(-len(rows) // tiles)

        def fill_tile(start: int) -> None:
            tile = out[start : start + tile_rows]
            for piece in dataset.pieces(rows[start : start + tile_rows]):
                fill(tile[piece.target : piece.target + piece.stop - piece.start], piece)

        if tiles == 1:
            fill_tile(0)
        else:
            with ThreadPoolExecutor(tiles) as pool:
                list(pool.map(fill_tile, range(0, len(rows), tile_rows)))
        return out

    return call


def ours(tiles: int, options: dict[str, object], dataset: Dataset) -> Call:
    """Return a call of lazyshards into warm memory, with the dataset open; one tile is one core."""
    if tiles == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import lazyshards

    warm = np.full((dataset.rows, COLUMNS), 0, np.float32)  # touched, as zeros would not be
    shards = lazyshards.open_shards(dataset.folder, engine="numpy", **options)
    return lambda rows: shards[rows.start : rows.stop].compute(out=warm[: len(rows)])


def tables(
    title: str, peers: tuple[Peer, ...], copy: FormatCopy, targets: tuple[Target, ...], options: Options
) -> Iterator[Table]:
    """Yield the times of the peers, and their memory, with the first as the baseline."""
    use = CoreUse()
    rows = range(copy.rows // 8, copy.rows - copy.rows // 8)
    measured = in_warm_processes(peers, copy, [(rows,)] * options.turns(7))
    yield Table(
        f"{title}: {len(rows) * ROW_NBYTES / 1e6:.0f} MB of {copy.rows * ROW_NBYTES / 1e6:.0f} into warm memory, hot",
        "ms",
        measured.figures(lambda timing: 1e3 * timing.call),
        measured.absent,
        peers[0].name,
        targets,
        (*measured.notes, use.note()),
    )
    memories, absent = memory_of_first_load(peers, copy, rows, range(1000))
    yield Table(
        f"{title}: anonymous memory at the peak, beside the result's own",
        "MiB",
        {name: [memory.anonymous_nbytes / 2**20] for name, memory in memories.items()},
        absent,
    )


# By hand -----------------------------------------------------------------------------------------------------------


def _seed(read: Callable[[Path, int, int], NDArray[np.float32]], tiles: int, dataset: FormatCopy) -> Call:
    """Read each piece as a recipe does, and copy it into place."""
    shards = dataset.shards

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        out[...] = read(shards[piece.shard], piece.start, piece.stop)

    return fill_tiles(dataset, tiles, fill)


def _read_npz(path: Path, start: int, stop: int) -> NDArray[np.float32]:
    with np.load(path) as archive:
        return archive["data"][start:stop]


def _read_safetensors(path: Path, start: int, stop: int) -> NDArray[np.float32]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return file.get_slice("data")[start:stop]


def _read_raw(path: Path, start: int, stop: int) -> NDArray[np.float32]:
    return np.memmap(path, np.float32, "r").reshape(-1, COLUMNS)[start:stop]


def _limit(tiles: int, dataset: FormatCopy) -> Call:
    """Read as many bytes, at the end of each file, which is where nearly all of them are, by position."""
    shards = dataset.shards
    tails = [path.stat().st_size - rows * ROW_NBYTES for path, rows in zip(shards, dataset.shard_rows, strict=True)]

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        fd = os.open(shards[piece.shard], os.O_RDONLY)
        try:
            view, offset = out.data.cast("B"), tails[piece.shard] + piece.start * ROW_NBYTES
            while view:
                got = os.preadv(fd, [view], offset)
                view, offset = view[got:], offset + got
        finally:
            os.close(fd)

    return fill_tiles(dataset, tiles, fill)


def _unchecked(result: object, dataset: Dataset, rows: range) -> str:
    """Accept anything: the limit reads bytes that are not quite the rows'."""
    return ""


def _write_npz(path: Path, rows: NDArray[np.float32]) -> None:
    np.savez(path, data=rows)


def _write_deflated(path: Path, rows: NDArray[np.float32]) -> None:
    np.savez_compressed(path, data=rows)


def _write_safetensors(path: Path, rows: NDArray[np.float32]) -> None:
    header = f'{{"data": {{"dtype": "F32", "shape": {list(rows.shape)}, "data_offsets": [0, {rows.nbytes}]}}}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + rows.tobytes())


def _write_raw(path: Path, rows: NDArray[np.float32]) -> None:
    path.write_bytes(rows.tobytes())


_RAW = {"format": "raw", "dtype": "<f4", "row_shape": (COLUMNS,)}
_KINDS = (
    ("npz", ".npz", _write_npz, _read_npz, {}, 3.5),
    ("safetensors", ".safetensors", _write_safetensors, _read_safetensors, {}, 3.5),
    ("raw", ".bin", _write_raw, _read_raw, _RAW, 0.5),
    ("npz-deflated", ".npz", _write_deflated, _read_npz, {}, 1.0),
)
"""Name, suffix, writer, the recipe's reader, options for us, and how many times as fast as the recipe we promise."""


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes // 4, 4)
    for name, suffix, write, read, ours_options, bound in _KINDS:
        small = datasets.uneven_shards(options.cache_dir, options.load_nbytes // 32, 4)
        copy = format_copy(small if "deflated" in name else dataset, name, suffix, write)
        peers = [
            Peer(f"{who}, {tiles} tile{'s' * (tiles > 1)}", partial(setup, tiles), check)
            if check is not None
            else Peer(f"{who}, {tiles} tile{'s' * (tiles > 1)}", partial(setup, tiles))
            for tiles in (1, workers())
            for who, setup, check in (
                ("seed", partial(_seed, read), None),
                ("lazyshards", _ours_with(ours_options), None),
                ("limit: preadv", _limit, _unchecked),
            )
            if not (who.startswith("limit") and "deflated" in name)
        ]
        targets = tuple(
            Target(f"lazyshards, {text}", "at least", bound, (f"seed, {text}",))
            for text in ("1 tile", f"{workers()} tiles")
        )
        if name != "npz-deflated":
            text = f"{workers()} tiles"
            targets += (Target(f"lazyshards, {text}", "at most", 1.1, (f"limit: preadv, {text}",)),)
        yield from tables(name, tuple(peers), copy, targets, options)


def _ours_with(options: dict[str, object]) -> Callable[[int, Dataset], Call]:
    return partial(_ours, options)


def _ours(options: dict[str, object], tiles: int, dataset: Dataset) -> Call:
    return ours(tiles, options, dataset)
