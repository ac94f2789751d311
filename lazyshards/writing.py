"""Write any array, dataset or stream of arrays as shards: in bounded memory, all or nothing, resumed if cut off.

On this machine everything is written into a directory beside the wanted one, which takes its place in one step when it
is complete; elsewhere, shard by shard, behind a file that says that it is not.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards.details import descr_of
from lazyshards.errors import LayoutError
from lazyshards.hashing import new_hasher
from lazyshards.layout import native_dtype
from lazyshards.progress import progress_bar
from lazyshards.writers import suffix_of, writer_of
from lazyshards.writers.local_work import local_work, remove
from lazyshards.writers.shared import is_array, is_dataset, write_once
from lazyshards.writers.work import bytes_of, full_disk_told

__all__ = ["write_sealed", "write_shards"]

_SHARD_NBYTES = 256 << 20
"""Bytes of a shard where nothing is said."""
_BLOCK_NBYTES = 16 << 20
"""Bytes of rows that are held at a time."""


def write_shards(
    source: object,
    path: str | os.PathLike[str],
    *,
    format: str = "npy",
    rows_per_shard: int | None = None,
    nbytes_per_shard: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
    storage_options: Mapping[str, object] | None = None,
    **options: object,
) -> list[str]:
    """Write rows as shards of equal length into a directory, in bounded memory, and return their paths.

    The directory appears when all is written, or not at all: whatever happens meanwhile, what is at ``path`` is what
    was there before or the whole of what was asked for. A manifest is written with the shards where pyarrow is
    installed. What an interrupted call had finished is used by the next one for the same directory, after a comparison
    of its content with the source's: shards of the same rows are not written again. (A dataset whose files did not
    change need not be read for that. An iterator starts anew.)

    On several ranks of Legate all must call it, and rank 0 writes: see :doc:`/how_to/run_on_many_ranks`.

    Parameters
    ----------
    source : array, ShardedDataset, or iterable of arrays
        Anything with a shape and a dtype that is sliced into arrays: of NumPy, cuPyNumeric, CuPy, h5py, Zarr, a
        dataset. Or arrays of any length, one after the other, whose rows have one shape and dtype.
    path : str or path
        A directory, or the URL of one, such as ``s3://bucket/set``. There each shard is written on this machine first,
        in the directory for temporary files, and uploaded; until the last one is there nobody can open the directory.
    format : {"npy", "raw", "hdf5", "parquet", "arrow", "zarr"}
    rows_per_shard : int, optional
        Rows of each shard; the last may hold fewer.
    nbytes_per_shard : int, optional
        The same in bytes of memory; 256 MiB by default.
    overwrite : bool
        Whether a dataset that is at ``path`` is replaced, as a whole: until all is written it is the old one. A
        directory that holds other things than shards never is.
    progress : bool
        Show a progress bar; needs tqdm.
    storage_options : mapping, optional
        Options for fsspec, for a URL.
    **options
        Of the format. ``hdf5``: ``dataset="data"``, ``compression=None``. ``parquet``: ``compression="zstd"``.
        ``arrow``: ``compression=None``.

    Returns
    -------
    list of str
        Paths of the shards, in order.

    Raises
    ------
    FileExistsError
        If something is at ``path``, or another process is writing there.
    FormatError
        If the format cannot be written here.
    UnsupportedDtypeError
        If it has no such dtype.
    LayoutError
        If the arrays of an iterator do not agree.

    Examples
    --------
    >>> import numpy as np, lazyshards
    >>> paths = lazyshards.write_shards(np.arange(10).reshape(5, 2), "five", rows_per_shard=2)
    >>> [os.path.basename(path) for path in paths]
    ['shard_00000.npy', 'shard_00001.npy', 'shard_00002.npy']
    >>> lazyshards.open_shards("five", engine="numpy")[1:4].compute().tolist()
    [[2, 3], [4, 5], [6, 7]]
    """
    write = partial(
        _write,
        path=path,
        format=format,
        rows_per_shard=rows_per_shard,
        nbytes_per_shard=nbytes_per_shard,
        overwrite=overwrite,
        progress=progress,
        storage_options=storage_options,
        options=options,
    )
    return write_once(write, source, what=f"writing {path!r:.200}")


def write_sealed(
    source: object,
    path: str,
    seal: Callable[[str], None],
    *,
    format: str,
    overwrite: bool,
    progress: bool,
    options: Mapping[str, object],
) -> list[str]:
    """Write shards on this machine as :func:`write_shards` does, with a file more, which appears with them.

    Parameters
    ----------
    source, path, format, overwrite, progress
        See :func:`write_shards`.
    seal : callable
        Called with the directory that holds all shards, just before that gets its name.
    options : mapping
        The other options of :func:`write_shards`.
    """
    names = ("rows_per_shard", "nbytes_per_shard", "storage_options")
    own: dict[str, Any] = {name: options.get(name) for name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    write = partial(_write, path=path, format=format, overwrite=overwrite, progress=progress, options=rest, seal=seal)
    return write_once(partial(write, **own), source, what=f"writing {path!r:.200}")


def _write(
    source: object,
    *,
    path: str | os.PathLike[str],
    format: str,
    rows_per_shard: int | None,
    nbytes_per_shard: int | None,
    overwrite: bool,
    progress: bool,
    storage_options: Mapping[str, object] | None,
    options: Mapping[str, object],
    seal: Callable[[str], None] | None = None,
) -> list[str]:
    place = _place(path)
    make, suffix = writer_of(format), suffix_of(format)
    stream = _stream(source)
    row_nbytes = max(1, prod(stream.row_shape) * stream.dtype.itemsize)
    per_shard = _rows_per_shard(rows_per_shard, nbytes_per_shard, row_nbytes)
    for name in ("rows", "nbytes", "dtype", "row_shape"):
        if name in options:
            raise TypeError(f"{name}= is not an option: the sizes are rows_per_shard= and nbytes_per_shard=")
    wanted = {
        "format": format,
        "dtype": descr_of(stream.dtype),
        "row_shape": list(stream.row_shape),
        "rows": stream.rows,
        "rows_per_shard": per_shard,
        "options": {name: repr(value) for name, value in sorted(options.items())},
    }
    if "://" not in place:
        if storage_options:
            raise ValueError(f"storage_options are for URLs, but {place!r} is a path of this machine")
        opened = local_work(place, wanted, stream.mark, overwrite=overwrite, seal=seal)
    else:
        from lazyshards.writers.remote_work import remote_work

        opened = remote_work(place, storage_options, wanted, stream.mark, overwrite=overwrite)
    with opened as work, progress_bar(stream.rows, "writing", shown=progress) as bar:
        names: list[str] = []
        number = 0
        while True:
            name = work.name(number, suffix)
            start = number * per_shard
            expected = per_shard if stream.rows is None else min(per_shard, stream.rows - start)
            if stream.rows is not None and number and expected <= 0:
                break
            step = max(1, _BLOCK_NBYTES // row_nbytes)
            blocks = partial(stream.blocks, range(start, start + expected, step))
            if not work.holds(number, name, None if stream.rows is None else blocks):
                target = os.path.join(work.folder, name)
                with full_disk_told(target):
                    count, digest = _write_shard(make, target, blocks(), stream, expected, options, work.algorithm)
                if not count and number:  # an iterator that ended with the shard before
                    break
                with full_disk_told(work.folder):
                    work.add(number, name, count, digest)
            names.append(name)
            bar.update(work.shards[number].rows)
            number += 1
            if work.shards[number - 1].rows < per_shard:
                break
        written = sum([shard.rows for shard in work.shards[: len(names)]])
        if stream.rows not in {None, written}:
            raise LayoutError(f"the source gave {written:,} rows, expected {stream.rows:,} as its shape says")
        with full_disk_told(work.folder):
            return work.finish(names, format, written)


# What is written -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stream:
    """Rows from the first to the last."""

    source: Any
    """What is sliced; or an iterator of arrays."""
    rows: int | None
    """How many there are; None if only the end tells."""
    row_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    mark: str
    """What tells that the rows are those of an earlier call; empty if nothing does."""

    def blocks(self, rows: range) -> Iterator[npt.NDArray[np.generic]]:
        """Yield the rows of a range, or as far as there are any, as many at a time as its step."""
        if self.rows is None:
            yield from self.source.take(rows.stop - rows.start, rows.step)
            return
        for first in rows:
            yield self._array(self.source[first : min(first + rows.step, rows.stop)])

    def _array(self, block: Any) -> npt.NDArray[np.generic]:
        block = block.get() if hasattr(block, "get") and hasattr(block, "device") else block  # CuPy's way to the host
        return np.ascontiguousarray(np.asarray(block), self.dtype)


class _Arrays:
    """Arrays of an iterator, cut and joined to the lengths that are asked for."""

    def __init__(self, arrays: Iterator[Any], first: npt.NDArray[np.generic]) -> None:
        self._arrays = arrays
        self._rest = first
        self._row_shape, self._dtype = first.shape[1:], first.dtype
        self._number = 0

    def take(self, rows: int, step: int) -> Iterator[npt.NDArray[np.generic]]:
        """Yield the next rows, at most ``step`` at a time."""
        while rows:
            while not len(self._rest):
                try:
                    array = next(self._arrays)
                except StopIteration:
                    return
                self._number += 1
                self._rest = _as_rows(array, self._number)
                if self._rest.shape[1:] != self._row_shape or self._rest.dtype != self._dtype:
                    raise LayoutError(
                        f"array {self._number:,} of the iterator has rows of shape {self._rest.shape[1:]} and dtype "
                        f"{self._rest.dtype}, expected {self._row_shape} and {self._dtype} as the first"
                    )
            block, self._rest = np.split(self._rest, [min(rows, step)])
            rows -= len(block)
            yield np.ascontiguousarray(block)


def _as_rows(array: Any, number: int) -> npt.NDArray[np.generic]:
    if isinstance(array, list | tuple):
        raise TypeError(
            f"item {number:,} of what is to be written is a {type(array).__name__}, expected an array of rows: "
            "turn a list of lists into an array first, with np.asarray"
        )
    array = array.get() if hasattr(array, "get") and hasattr(array, "device") else array
    found: npt.NDArray[np.generic] = np.asarray(array)
    if not found.ndim:
        raise LayoutError(f"array {number:,} of the iterator is the single value {found!r}, expected an array of rows")
    return found


def _stream(source: Any) -> _Stream:
    """Return the rows that a source holds."""
    if is_array(source):
        shape = tuple(map(int, source.shape))
        if not shape:
            raise ValueError("the source has no row axis: expected an array of one axis at least")
        dtype = np.dtype(source.dtype)
        native_dtype(dtype)
        return _Stream(source, shape[0], shape[1:], dtype, _mark(source))
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        raise TypeError(f"{type(source).__name__} is neither an array, a dataset nor an iterable of arrays")
    arrays = iter(source)
    try:
        first = _as_rows(next(arrays), 0)
    except StopIteration:
        raise ValueError("the iterator has no array, so that nothing tells the shape and dtype of a row") from None
    native_dtype(first.dtype)
    return _Stream(_Arrays(arrays, first), None, first.shape[1:], first.dtype, "")


def _mark(source: Any) -> str:
    """Return a digest of what a dataset selects and of the files that it reads."""
    if not is_dataset(source):
        return ""
    hasher = new_hasher("blake2b")
    hasher.update(source.fingerprint.encode())
    for shard in source.shards:
        hasher.update(repr((shard.path, tuple(shard.stamp))).encode("utf-8", "surrogateescape"))
    return hasher.digest().hex()


def _rows_per_shard(rows: int | None, nbytes: int | None, row_nbytes: int) -> int:
    if rows is not None and nbytes is not None:
        raise ValueError(f"rows_per_shard={rows} and nbytes_per_shard={nbytes} are given, expected one of them")
    if rows is None:
        rows = max(1, (_SHARD_NBYTES if nbytes is None else nbytes) // row_nbytes)
    if rows < 1 or (nbytes is not None and nbytes < 1):
        what = f"rows_per_shard={rows}" if nbytes is None else f"nbytes_per_shard={nbytes}"
        raise ValueError(f"{what}: expected 1 or more")
    return int(rows)


def _write_shard(
    make: Any,
    target: str,
    blocks: Iterator[npt.NDArray[np.generic]],
    stream: _Stream,
    rows: int,
    options: Mapping[str, object],
    algorithm: str,
) -> tuple[int, str]:
    """Write one shard under another name, then give it its own; return its rows and the digest of their bytes."""
    name = os.path.basename(target)
    partial = os.path.join(os.path.dirname(target), f".{name}.tmp{os.path.splitext(name)[1]}")
    remove(partial)
    writer = make(partial, stream.dtype, stream.row_shape, rows, **options)
    hasher = new_hasher(algorithm)
    count = 0
    try:
        for block in blocks:
            writer.write(block)
            hasher.update(bytes_of(block))
            count += len(block)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    remove(target)
    os.replace(partial, target)
    return count, hasher.digest().hex()


def _place(path: str | os.PathLike[str]) -> str:
    """Return the directory to write, absolute if it is one of this machine."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{type(path).__name__} is not a path: the source comes first, then the directory to write")
    text = os.fspath(path).removeprefix("file://")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
