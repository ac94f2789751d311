"""What people write by hand with NumPy and the standard library."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.datasets import COLUMNS, HEADER_NBYTES, Dataset
from benchmarks.peers import Call, Opened, Peer, opened_fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CONCATENATE", "MEMMAP_SLICE", "PREALLOCATED", "REGEX_OPEN", "THREADED_OPEN"]

_HEADER = re.compile(rb"'descr': '([^']+)', 'fortran_order': (True|False), 'shape': \((\d+), (\d+)\)")


def _preallocated(dataset: Dataset) -> Call:
    def call(rows: range) -> NDArray[np.float32]:
        out = np.empty((len(rows), COLUMNS), np.float32)
        for piece in dataset.pieces(rows):
            shard = np.load(dataset.paths[piece.shard])
            out[piece.target : piece.target + piece.stop - piece.start] = shard[piece.start : piece.stop]
        return out

    return call


def _concatenate(dataset: Dataset) -> Call:
    def call(rows: range) -> NDArray[np.float32]:
        whole = np.concatenate([np.load(path) for path in dataset.paths])
        return whole[rows.start : rows.stop]

    return call


def _memmap_slice(dataset: Dataset) -> Call:
    """Keep one map a shard; bisect and copy."""
    maps = [np.load(path, mmap_mode="r") for path in dataset.paths]
    ends = dataset.ends
    starts = [end - rows for end, rows in zip(ends, dataset.shard_rows, strict=True)]

    def call(rows: range) -> NDArray[np.float32]:
        start, stop = rows.start, rows.stop
        out = np.empty((stop - start, COLUMNS), np.float32)
        at, shard = start, bisect_right(ends, start)
        while at < stop:
            last = min(stop, ends[shard])
            out[at - start : last - start] = maps[shard][at - starts[shard] : last - starts[shard]]
            at, shard = last, shard + 1
        return out

    return call


def _shard_rows(path: str) -> int:
    """Return the rows that the first 128 bytes of an npy shard tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        header = os.pread(fd, HEADER_NBYTES, 0)
    finally:
        os.close(fd)
    found = _HEADER.search(header)
    if found is None or found[1] != b"<f4" or found[2] != b"False":
        raise ValueError(f"{path}: unexpected header {header!r}")
    return int(found[3])


def _regex_open(threads: int, dataset: Dataset) -> Call:
    """List the directory, sort, read and parse each header."""

    def call(_: range) -> Opened:
        paths = sorted(entry.path for entry in os.scandir(dataset.folder))
        if threads == 1:
            rows = [_shard_rows(path) for path in paths]
        else:
            share = -(-len(paths) // threads)
            groups = [paths[start : start + share] for start in range(0, len(paths), share)]
            with ThreadPoolExecutor(threads) as pool:
                rows = [n for group in pool.map(lambda group: [*map(_shard_rows, group)], groups) for n in group]
        return Opened(sum(rows), (paths, rows))

    return call


PREALLOCATED = Peer("np.load into preallocated slices", _preallocated)
CONCATENATE = Peer("np.concatenate of np.load", _concatenate)
MEMMAP_SLICE = Peer("np.memmap by hand", _memmap_slice)
REGEX_OPEN = Peer("Python loop, regex parse", partial(_regex_open, 1), opened_fault)
THREADED_OPEN = Peer("Python loop, regex parse, 8 threads", partial(_regex_open, 8), opened_fault)
