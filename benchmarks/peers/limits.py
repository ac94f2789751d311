"""What the machine can do at best: the reads or copies that a request needs, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks import kernels
from benchmarks.datasets import COLUMNS, HEADER_NBYTES, ROW_NBYTES, Dataset, Piece
from benchmarks.machine import workers
from benchmarks.peers import Call, Opened, Peer, opened_fault

__all__ = ["GATHER", "MAPS_KEPT", "MAPS_NEW", "MEMCPY", "OPEN", "PREAD_HUGE", "PREAD_WARM"]

_HUGE_PAGE = 1 << 21
_MAX_READ = 0x7FFFF000
"""Bytes that Linux reads in one call at most."""

Fill = Callable[[NDArray[np.float32], Piece], None]
"""Fill the rows given with the rows of a piece."""


def _fill_tiles(dataset: Dataset, rows: range, out: NDArray[np.float32], fill: Fill) -> None:
    """Fill ``out`` with one contiguous tile of ``rows`` a core, each in its own thread."""
    tile_rows = -(-len(rows) // workers())

    def fill_tile(start: int) -> None:
        tile = out[start : start + tile_rows]
        for piece in dataset.pieces(rows[start : start + tile_rows]):
            fill(tile[piece.target : piece.target + piece.stop - piece.start], piece)

    with ThreadPoolExecutor(workers()) as pool:
        list(pool.map(fill_tile, range(0, len(rows), tile_rows)))


@cache
def _warm_memory(rows: int) -> NDArray[np.float32]:
    """Return memory for ``rows`` whose pages have been touched; the limits of one process share it."""
    out = _huge_memory(rows)
    out[...] = 0
    return out


def _huge_memory(rows: int) -> NDArray[np.float32]:
    """Return fresh memory for ``rows`` that begins on a huge page and is advised as such."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Python's default is shared memory, which gets no huge pages
    memory = mmap.mmap(-1, rows * ROW_NBYTES + _HUGE_PAGE, private)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    skip = -raw.ctypes.data % _HUGE_PAGE
    return raw[skip : skip + rows * ROW_NBYTES].view(np.float32).reshape(rows, COLUMNS)


def _read(dataset: Dataset) -> Fill:
    """Return a fill that opens the shard and reads by position."""
    paths = dataset.paths

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        fd = os.open(paths[piece.shard], os.O_RDONLY)
        try:
            view, offset = out.data.cast("B"), HEADER_NBYTES + piece.start * ROW_NBYTES
            while view:
                got = os.preadv(fd, [view[:_MAX_READ]], offset)
                if not got:
                    raise OSError(f"{paths[piece.shard]}: ends at byte {offset}")
                view, offset = view[got:], offset + got
        finally:
            os.close(fd)

    return fill


def _pread_warm(dataset: Dataset) -> Call:
    _warm_memory(dataset.rows)

    def call(rows: range) -> NDArray[np.float32]:
        out = _warm_memory(dataset.rows)[: len(rows)]
        _fill_tiles(dataset, rows, out, _read(dataset))
        return out

    return call


def _pread_huge(dataset: Dataset) -> Call:
    def call(rows: range) -> NDArray[np.float32]:
        out = _huge_memory(len(rows))
        _fill_tiles(dataset, rows, out, _read(dataset))
        return out

    return call


def _maps_new(dataset: Dataset) -> Call:
    """Copy out of maps made in each call, into warm memory."""
    _warm_memory(dataset.rows)
    paths = dataset.paths

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        out[...] = np.asarray(np.load(paths[piece.shard], mmap_mode="r"))[piece.start : piece.stop]

    def call(rows: range) -> NDArray[np.float32]:
        out = _warm_memory(dataset.rows)[: len(rows)]
        _fill_tiles(dataset, rows, out, fill)
        return out

    return call


def _memcpy(dataset: Dataset) -> Call:
    """Copy from maps whose pages the first, untimed call has mapped, into warm memory: memory speed alone."""
    _warm_memory(dataset.rows)
    maps = [np.asarray(np.load(path, mmap_mode="r")) for path in dataset.paths]

    def fill(out: NDArray[np.float32], piece: Piece) -> None:
        out[...] = maps[piece.shard][piece.start : piece.stop]

    def call(rows: range) -> NDArray[np.float32]:
        out = _warm_memory(dataset.rows)[: len(rows)]
        _fill_tiles(dataset, rows, out, fill)
        return out

    return call


def _gather(dataset: Dataset) -> Call:
    """Read in C from files that stay open into a fresh array."""
    gather = kernels.load().gather
    fds = np.array([os.open(path, os.O_RDONLY) for path in dataset.paths], np.int32)
    ends = np.array(dataset.ends, np.int64)

    def call(rows: range) -> NDArray[np.float32]:
        out = np.empty((len(rows), COLUMNS), np.float32)
        where = (fds.ctypes.data, ends.ctypes.data, len(fds), rows.start, rows.stop, ROW_NBYTES, HEADER_NBYTES)
        if gather(*where, out.ctypes.data) != len(rows):
            raise OSError("the C gather failed")
        return out

    return call


def _maps_kept(dataset: Dataset) -> Call:
    """Copy from maps that stay, held as plain arrays (np.memmap costs more to slice), into a fresh array."""
    maps = [np.asarray(np.load(path, mmap_mode="r")) for path in dataset.paths]

    def call(rows: range) -> NDArray[np.float32]:
        out = np.empty((len(rows), COLUMNS), np.float32)
        for piece in dataset.pieces(rows):
            out[piece.target : piece.target + piece.stop - piece.start] = maps[piece.shard][piece.start : piece.stop]
        return out

    return call


def _open(dataset: Dataset) -> Call:
    """Open, read 128 bytes and close each shard in C; the names are known before, nothing is parsed."""
    read_headers = kernels.load().read_headers
    names = ctypes.create_string_buffer(b"".join(os.fsencode(path) + b"\0" for path in dataset.paths))
    shards = len(dataset.shard_rows)

    def call(_: range) -> Opened:
        files = read_headers(names, shards, HEADER_NBYTES)
        return Opened(dataset.rows if files == shards else -1, None)

    return call


MEMCPY = Peer("limit: memcpy, warm memory", _memcpy, home="limits")
MAPS_NEW = Peer("limit: copy from new maps, warm memory", _maps_new, home="limits")
PREAD_WARM = Peer("limit: preadv, warm memory", _pread_warm, home="limits")
PREAD_HUGE = Peer("limit: preadv, fresh huge pages", _pread_huge)
MAPS_KEPT = Peer("limit: copy from kept maps, fresh array", _maps_kept)
GATHER = Peer("limit: C pread, fresh array", _gather)
OPEN = Peer("limit: C open, read 128 bytes, close", _open, opened_fault)
