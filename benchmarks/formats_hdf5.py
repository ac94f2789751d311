"""HDF5 by layout and filter: three quarters of the rows into warm memory, beside ``h5py[lo:hi]`` and our npy path."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import datasets
from benchmarks.formats_plain import FormatCopy, fill_tiles, format_copy, ours, tables
from benchmarks.machine import workers
from benchmarks.peers import Call, Peer
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.datasets import Dataset, Piece
    from benchmarks.options import Options

__all__ = ["run"]

_CHUNK_ROWS = 8192
"""Rows of a chunk: 2 MiB."""
_LIBRARIES = {"gzip": "libdeflate", "blosc": "c-blosc"}
"""What decompresses fastest."""
_STEPS = 1024
"""Values are rounded to so many steps between 0 and 1, as measured values are: random bits would not compress."""


@dataclass(frozen=True, slots=True)
class _Rounded(FormatCopy):
    """A copy whose values are rounded."""

    def fault(self, array: NDArray[np.float32], rows: range) -> str:
        """Return what is wrong with ``array`` as the values of ``rows``, or an empty string."""
        if len(array) != len(rows):
            return f"found {len(array)} rows, expected {len(rows)}"
        for start, block in datasets._blocks(rows):
            at = start - rows.start
            if not np.array_equal(array[at : at + len(block)], _rounded(block)):
                return f"wrong values from row {start} on"
        return ""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way to store, and what was promised for it."""

    name: str
    filters: tuple[str, ...] | None
    """Of ``shuffle``, ``fletcher32`` and one compressor; None for contiguous data."""
    bound: float
    """Times as fast as h5py with one tile for each core, at least."""


_KINDS = (
    _Kind("contiguous", None, 2.3),
    _Kind("chunked", (), 2.0),
    _Kind("gzip", ("gzip",), 5.5),
    _Kind("gzip-shuffle", ("gzip", "shuffle"), 3.0),
    _Kind("gzip-shuffle-fletcher32", ("gzip", "shuffle", "fletcher32"), 3.0),
    _Kind("blosc", ("blosc",), 2.5),
    _Kind("zstd-shuffle", ("zstd", "shuffle"), 1.5),
    _Kind("lz4", ("lz4",), 1.5),
    _Kind("lzf", ("lzf",), 0.9),
)


def _rounded(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.rint(rows * np.float32(_STEPS)) / np.float32(_STEPS)


def _write(kind: _Kind, path: Path, rows: NDArray[np.float32]) -> None:
    import h5py

    options: dict[str, object] = {}
    if kind.filters is not None:
        options["chunks"] = (min(_CHUNK_ROWS, len(rows)), rows.shape[1])
        for name in kind.filters:
            if name in {"shuffle", "fletcher32"}:
                options[name] = True
            elif name in {"gzip", "lzf"}:
                options["compression"] = name
            else:
                import hdf5plugin

                plugins = {"blosc": hdf5plugin.Blosc(cname="lz4"), "zstd": hdf5plugin.Zstd(), "lz4": hdf5plugin.LZ4()}
                options.update(plugins[name])
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=_rounded(rows), **options)


def _seed(tiles: int, copy: FormatCopy) -> Call:
    """Open, read each piece and copy it into place, as a recipe does.

    The files are opened in each call: else the library would keep up to 8 MiB of decoded chunks of each from the call
    before, and small data would never be decoded again.
    """
    import h5py
    import hdf5plugin  # noqa: F401  # its filters

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        with h5py.File(copy.shards[piece.shard]) as file:
            out[...] = file["data"][piece.start : piece.stop]

    return fill_tiles(copy, tiles, fill)


def _decoder(name: str) -> Callable[[bytes, NDArray[np.uint8]], object]:
    """Return the fastest decoder of one compressor that was found."""
    if name == "gzip":
        import deflate

        return lambda data, out: deflate.zlib_decompress(data, len(out))
    from numcodecs import blosc

    return blosc.decompress


def _limit(name: str, tiles: int, copy: FormatCopy) -> Call:
    """Decompress the chunks that hold the rows, which are in memory already, and nothing else, from so many threads."""
    import h5py
    import hdf5plugin  # noqa: F401  # its filters

    decode = _decoder(name)
    raws: list[list[bytes]] = []
    for path in copy.shards:
        with h5py.File(path) as file:
            data = file["data"].id
            places = [data.get_chunk_info(i).chunk_offset for i in range(data.get_num_chunks())]
            raws.append([data.read_direct_chunk(place)[1] for place in sorted(places)])

    def call(rows: range) -> None:
        wanted = []
        for piece in copy.pieces(rows):
            size = min(_CHUNK_ROWS, copy.shard_rows[piece.shard])
            nbytes = size * datasets.ROW_NBYTES
            wanted += [(raw, nbytes) for raw in raws[piece.shard][piece.start // size : -(-piece.stop // size)]]

        def work(tile: int) -> None:
            out = np.empty(_CHUNK_ROWS * datasets.ROW_NBYTES, np.uint8)
            for raw, nbytes in wanted[tile::tiles]:
                decode(raw, out[:nbytes])

        with ThreadPoolExecutor(tiles) as pool:
            list(pool.map(work, range(tiles)))

    return call


def _ours(tiles: int, copy: Dataset) -> Call:
    return ours(tiles, {}, copy)


def _npy(folder: Path, tiles: int, copy: FormatCopy) -> Call:
    return ours(tiles, {}, replace(copy, folder=folder))


def _accept(result: object, dataset: Dataset, rows: range) -> str:
    """Accept anything: the npy shards hold the values before they were rounded, and the limits keep nothing."""
    return ""


def _peers(kind: _Kind, folder: Path) -> Iterator[Peer]:
    for tiles in (1, workers()):
        text = f"{tiles} tile{'s' * (tiles > 1)}"
        yield Peer(f"h5py[lo:hi], {text}", partial(_seed, tiles))
        yield Peer(f"lazyshards, {text}", partial(_ours, tiles))
        if kind.filters is None:
            yield Peer(f"lazyshards npy, {text}", partial(_npy, folder, tiles), _accept)
        for name in {"gzip", "blosc"}.intersection(kind.filters or ()):
            yield Peer(f"limit: {_LIBRARIES[name]} alone, {text}", partial(_limit, name, tiles), _accept)


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    for kind in _KINDS:
        # What inflates takes ten times as long.
        share = 4 if kind.filters in {None, ()} else 8
        dataset = datasets.uneven_shards(options.cache_dir, options.load_nbytes // share, 4)
        plain = format_copy(dataset, f"hdf5-{kind.name}", ".h5", partial(_write, kind))
        copy = _Rounded(plain.folder, plain.shard_rows, plain.suffix)
        text = f"{workers()} tiles"
        targets = [Target(f"lazyshards, {text}", "at least", kind.bound, (f"h5py[lo:hi], {text}",))]
        if kind.filters is None:
            targets += [
                Target("lazyshards, 1 tile", "at least", kind.bound, ("h5py[lo:hi], 1 tile",)),
                Target(f"lazyshards, {text}", "at most", 1.1, (f"lazyshards npy, {text}",)),
            ]
        for name in {"gzip", "blosc"}.intersection(kind.filters or ()):
            # What else there is to do, putting shuffled bytes together again included, is little beside it.
            limit = f"limit: {_LIBRARIES[name]} alone, {text}"
            targets.append(Target(f"lazyshards, {text}", "at most", 1.25, (limit,)))
        stored = sum(path.stat().st_size for path in copy.paths) / (copy.rows * datasets.ROW_NBYTES)
        title = f"HDF5 {kind.name} (stored in {stored:.0%} of the bytes)"
        yield from tables(title, tuple(_peers(kind, dataset.folder)), copy, tuple(targets), options)
