"""Write any array, dataset or stream of arrays as shards: in bounded memory, all or nothing, resumed if cut off.

Everything is written into a directory beside the wanted one, which takes its place in one step when it is complete.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards import catalog, manifest
from lazyshards.dataset import ShardedDataset
from lazyshards.details import descr_of
from lazyshards.errors import LayoutError
from lazyshards.formats import find_format, format_names, format_of_name
from lazyshards.hashing import best_algorithm, new_hasher
from lazyshards.layout import native_dtype
from lazyshards.manifest import sync_directory, write_atomically
from lazyshards.progress import progress_bar
from lazyshards.writers import suffix_of, writer_of

__all__ = ["write_shards"]

_SHARD_NBYTES = 256 << 20
"""Bytes of a shard where nothing is said."""
_BLOCK_NBYTES = 16 << 20
"""Bytes of rows that are held at a time."""
_STATE = "state.json"
_DATA = "data"


def write_shards(
    source: object,
    path: str | os.PathLike[str],
    *,
    format: str = "npy",
    rows_per_shard: int | None = None,
    nbytes_per_shard: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
    **options: object,
) -> list[str]:
    """Write rows as shards of equal length into a directory, in bounded memory, and return their paths.

    The directory appears when all is written, or not at all: whatever happens meanwhile, what is at ``path`` is what
    was there before or the whole of what was asked for. A manifest is written with the shards where pyarrow is
    installed. What an interrupted call had finished is used by the next one for the same directory, after a comparison
    of its content with the source's: shards of the same rows are not written again. (A dataset whose files did not
    change need not be read for that. An iterator starts anew.)

    Parameters
    ----------
    source : array, ShardedDataset, or iterable of arrays
        Anything with a shape and a dtype that is sliced into arrays: of NumPy, cuPyNumeric, CuPy, h5py, Zarr, a
        dataset. Or arrays of any length, one after the other, whose rows have one shape and dtype.
    path : str or path
        A directory of this machine.
    format : {"npy", "raw", "hdf5", "parquet", "arrow", "zarr"}
    rows_per_shard : int, optional
        Rows of each shard; the last may hold fewer.
    nbytes_per_shard : int, optional
        The same in bytes of memory; 256 MiB by default.
    overwrite : bool
        Whether a dataset that is at ``path`` is replaced. A directory that holds other things than shards never is.
    progress : bool
        Show a progress bar; needs tqdm.
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
    place = _place(path)
    make, suffix = writer_of(format), suffix_of(format)
    stream = _stream(source)
    row_nbytes = max(1, prod(stream.row_shape) * stream.dtype.itemsize)
    per_shard = _rows_per_shard(rows_per_shard, nbytes_per_shard, row_nbytes)
    _check_place(place, overwrite)
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
    with _workspace(place, wanted, stream.mark) as work, progress_bar(stream.rows, "writing", shown=progress) as bar:
        names: list[str] = []
        number = 0
        while True:
            name = f"shard_{number:05d}{suffix}"
            target = os.path.join(work.data, name)
            start = number * per_shard
            expected = per_shard if stream.rows is None else min(per_shard, stream.rows - start)
            if stream.rows is not None and number and expected <= 0:
                break
            step = max(1, _BLOCK_NBYTES // row_nbytes)
            if not work.holds(number, target, stream, range(start, start + expected, step)):
                blocks = stream.blocks(range(start, start + expected, step))
                count, digest = _write_shard(make, target, blocks, stream, expected, options, work.algorithm)
                if not count and number:  # an iterator that ended with the shard before
                    break
                work.add(number, target, count, digest)
            names.append(name)
            bar.update(work.shards[number].rows)
            number += 1
            if work.shards[number - 1].rows < per_shard:
                break
        work.drop_after(names)
        written = sum([shard.rows for shard in work.shards[: len(names)]])
        if stream.rows not in {None, written}:
            raise LayoutError(f"the source gave {written:,} rows, expected {stream.rows:,} as its shape says")
        _index(work.data, format, written)
        sync_directory(work.data)
        work.forget()
        _put(work.data, place, overwrite)
    return [os.path.join(place, name) for name in names]


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
    if hasattr(source, "shape") and hasattr(source, "dtype") and hasattr(source, "__getitem__"):
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


def _mark(source: object) -> str:
    """Return a digest of what a dataset selects and of the files that it reads."""
    if not isinstance(source, ShardedDataset):
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
    _remove(partial)
    writer = make(partial, stream.dtype, stream.row_shape, rows, **options)
    hasher = new_hasher(algorithm)
    count = 0
    try:
        for block in blocks:
            writer.write(block)
            hasher.update(_bytes_of(block))
            count += len(block)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    _remove(target)
    os.replace(partial, target)
    return count, hasher.digest().hex()


def _bytes_of(block: npt.NDArray[np.generic]) -> memoryview | bytes:
    return block.reshape(-1).view(np.uint8).data if block.size else b""


# Where it is written ---------------------------------------------------------------------------------------------


class _Written(NamedTuple):
    """A shard that is finished."""

    rows: int
    digest: str
    """Of its rows, as plain bytes."""
    stamp: tuple[int, int, int]
    """Size, time in ns and inode of the file."""


class _Work:
    """The directory in which a dataset grows, and what is known of the shards in it."""

    def __init__(self, root: str, wanted: Mapping[str, object], mark: str) -> None:
        self.data = os.path.join(root, _DATA)
        self.algorithm = best_algorithm()
        self.shards: list[_Written] = []
        self._state = os.path.join(root, _STATE)
        self._wanted = wanted
        self._mark = mark
        self._is_same = False
        self._resume()

    def _resume(self) -> None:
        """Take over what an earlier call for the same rows and shards left; remove anything else."""
        try:
            with open(self._state, encoding="utf-8") as file:
                state = json.load(file)
            if state["wanted"] == json.loads(json.dumps(self._wanted)) and state["algorithm"] == self.algorithm:
                self.shards = [_Written(rows, digest, tuple(stamp)) for rows, digest, stamp in state["shards"]]
                self._is_same = bool(self._mark) and state["mark"] == self._mark
        except (OSError, ValueError, KeyError, TypeError):
            self.shards = []
        if not self.shards:
            _remove(self.data)
        os.makedirs(self.data, exist_ok=True)

    def holds(self, number: int, target: str, stream: _Stream, rows: range) -> bool:
        """Return whether a shard is there already and holds these rows."""
        if stream.rows is None or number >= len(self.shards) or self.shards[number].stamp != _stamp(target):
            del self.shards[number:]
            return False
        if self._is_same:
            return True
        hasher = new_hasher(self.algorithm)
        for block in stream.blocks(rows):
            hasher.update(_bytes_of(block))
        if hasher.digest().hex() == self.shards[number].digest:
            return True
        del self.shards[number:]
        return False

    def add(self, number: int, target: str, rows: int, digest: str) -> None:
        """Note that a shard is finished."""
        self.shards[number:] = [_Written(rows, digest, _stamp(target))]
        state = {
            "wanted": self._wanted,
            "mark": self._mark,
            "algorithm": self.algorithm,
            "shards": [list(shard) for shard in self.shards],
        }
        write_atomically(self._state, json.dumps(state).encode())

    def forget(self) -> None:
        """Note that nothing is finished: from now on what is in the directory may be of another dataset."""
        os.unlink(self._state)
        sync_directory(os.path.dirname(self._state))

    def drop_after(self, names: list[str]) -> None:
        """Remove what does not belong to the dataset: shards of an earlier call, and unfinished ones."""
        keep = {*names, "meta.json"}
        for name in os.listdir(self.data):
            if name not in keep:
                _remove(os.path.join(self.data, name))


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return -1, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino


@contextlib.contextmanager
def _workspace(place: str, wanted: Mapping[str, object], mark: str) -> Iterator[_Work]:
    """Open the directory beside the wanted one for this process alone; removed once the dataset is in its place."""
    root = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.lazyshards")
    while True:
        os.makedirs(root, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise FileExistsError(errno.EEXIST, "another process is writing these shards", place) from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(root).st_ino == os.fstat(fd).st_ino:
                break
        os.close(fd)
    try:
        work = _Work(root, wanted, mark)
        yield work
        shutil.rmtree(root)
    finally:
        os.close(fd)


def _place(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{type(path).__name__} is not a path: the source comes first, then the directory to write")
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(f"{text!r} is a URL: shards are written to directories of this machine; copy them from there")
    return os.path.abspath(os.path.expanduser(text))


def _check_place(place: str, overwrite: bool) -> None:
    """Raise unless a dataset may be put at a path."""
    if not os.path.lexists(place):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return
    if not os.path.isdir(place):
        raise FileExistsError(errno.EEXIST, "it is a file; expected a directory, or nothing", place)
    names = os.listdir(place)
    if names and not overwrite:
        raise FileExistsError(errno.EEXIST, "it holds files; pass overwrite=True to replace it", place)
    for name in names:
        known = format_of_name(name)
        is_store = known is not None and known.directories
        if known is None and name not in {manifest.NAME, "meta.json", "_SUCCESS"} and not name.startswith("."):
            raise FileExistsError(errno.EEXIST, f"it holds {name!r}, no shard: it is not replaced", place)
        if os.path.isdir(os.path.join(place, name)) and not is_store:
            raise FileExistsError(errno.EEXIST, f"it holds the directory {name!r}: it is not replaced", place)


def _put(data: str, place: str, overwrite: bool) -> None:
    """Give a complete directory its name, in one step."""
    try:
        os.rename(data, place)  # over nothing, or an empty directory
    except OSError as exc:
        if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST} or not overwrite:
            raise
        _check_place(place, overwrite)
        _exchange(data, place)
    sync_directory(os.path.dirname(place))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange(data: str, place: str) -> None:
    """Let two directories change places, in one step where the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(
        _AT_FDCWD, os.fsencode(data), _AT_FDCWD, os.fsencode(place), ctypes.c_uint(_RENAME_EXCHANGE)
    ):
        return
    old = f"{data}.old"
    _remove(old)
    os.rename(place, old)
    os.rename(data, place)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _index(data: str, format: str, rows: int) -> None:
    """Open what was written, see that all rows are there, and write its manifest."""
    if format not in format_names():
        return
    layout = catalog.scan(data, format=format, manifest="ignore")
    if layout.rows != rows:
        raise LayoutError(f"{layout.rows:,} rows are in the shards that were written, expected {rows:,}")
    if find_spec("pyarrow") is not None and not find_format(format).directories:
        manifest.save(layout, folder=data + "/")
