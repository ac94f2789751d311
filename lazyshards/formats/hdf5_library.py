"""The HDF5 library: imported here alone, opened with care, and its errors put into words that name the file."""

import errno
import io
import os
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, LazyShardsError
from lazyshards.formats.codecs import Filter
from lazyshards.storage.base import Storage

__all__ = [
    "SIGNATURE",
    "ChunkTable",
    "H5File",
    "RefusedError",
    "as_text",
    "encode",
    "h5py",
    "has_filter",
    "list_chunks",
    "open_file",
    "pipeline",
    "read_block",
]

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_PAGE_NBYTES = 64 << 10
"""Bytes of the pages in which the metadata of a file that is not on this machine is fetched."""
_MOST_PAGES = 64
"""Pages of one file that are kept while it is open."""


class RefusedError(Exception):
    """What is wrong with a file or dataset, in words that follow its name."""


def h5py() -> Any:  # a module without types
    """Return h5py, imported when it is first needed.

    Raises
    ------
    FormatError
        If it is not installed or cannot be imported; the message says what helps.
    """
    after_legate = "legate.core" in sys.modules and "h5py" not in sys.modules
    try:
        if after_legate:
            with warnings.catch_warnings(action="error"):  # h5py warns of two versions of HDF5, and fails just after
                import h5py as module
        else:
            import h5py as module
    except ModuleNotFoundError as exc:
        if exc.name != "h5py":
            raise
        raise FormatError("the hdf5 format needs h5py: pip install 'lazyshards[hdf5]'") from exc
    except Exception as exc:
        if not after_legate:
            raise FormatError(f"the hdf5 format needs h5py, which is installed but cannot be imported: {exc}") from exc
        raise FormatError(
            "the hdf5 format needs h5py, which cannot be imported any more, because Legate was imported first and "
            "brought another HDF5 library with it: put `import h5py` before Legate's first import, or let lazyshards "
            f"start Legate, which sees to the order ({str(exc).splitlines()[0]})"
        ) from exc
    return module


def encode(name: str) -> bytes:
    """Return a name as it is in a file."""
    return name.encode("utf-8", "surrogateescape")


def as_text(name: bytes) -> str:
    """Return a name of a file as text."""
    return name.decode("utf-8", "surrogateescape")


class H5File(NamedTuple):
    """An open file."""

    id: Any
    """What h5py's low-level interface calls it."""
    path: str
    """Where it is."""

    def dataset(self, name: str) -> Any:  # of h5py, which has no types
        """Return the low-level identifier of a dataset that was found before."""
        return h5py().h5d.open(self.id, encode(name))


@contextmanager
def open_file(path: str, storage: Storage, size: int, head: bytes = b"") -> Iterator[H5File]:
    """Open a file for reading, and close it.

    Whatever the HDF5 library raises inside becomes a RefusedError.

    Parameters
    ----------
    path : str
    storage : Storage
    size : int
        Bytes of the file.
    head : bytes
        First bytes of the file, if they are known; so many fewer are fetched.
    """
    library = h5py()
    # Not even the locks are chosen here: a file that the user has open in this process must be opened in the same way.
    access = library.h5p.create(library.h5p.FILE_ACCESS)
    pages: _Pages | None = None
    local = storage.local_path(path)
    if local is None:
        pages = _Pages(path, storage, size, head)
        access.set_fileobj_driver(library.h5fd.fileobj_driver, pages)
        name = repr(pages).encode()
    else:
        name = os.fsencode(local)
    file = None
    try:
        if local is not None and _is_special(local):
            raise RefusedError("is a pipe or a device, expected a file")
        file = _open(library, name, access)
        if file.get_intent() & library.h5f.ACC_RDWR:
            raise RefusedError(
                "is open for writing in this process, so that its rows may not be in the file yet; close it first"
            )
        yield H5File(file, path)
    except (RefusedError, LazyShardsError):
        raise
    # Damage is met as any of these, and none of them comes from code of ours.
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as exc:
        if pages is not None and pages.failed is not None:
            raise pages.failed from exc
        raise RefusedError(_explain(exc, head)) from exc
    finally:
        if file is not None:
            library.File(file).close()  # with everything that was opened in it, wherever that is still referred to


def _is_special(path: str) -> bool:
    """Return whether it is there and no regular file: the library would wait for somebody to write into a pipe."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False  # the library says what is wrong


def _open(library: Any, name: bytes, access: Any) -> Any:
    try:
        return library.h5f.open(name, library.h5f.ACC_RDONLY, fapl=access)
    except OSError as exc:
        if "close degree" not in str(exc):
            raise
    # The file is open in this process already, by an older h5py's high-level interface.
    access.set_fclose_degree(library.h5f.CLOSE_STRONG)
    return library.h5f.open(name, library.h5f.ACC_RDONLY, fapl=access)


class _Pages(io.RawIOBase):
    """A file elsewhere, as the library needs one: read by ranges through the storage, in pages that are kept."""

    def __init__(self, path: str, storage: Storage, size: int, head: bytes) -> None:
        self._path = path
        self._storage = storage
        self._size = size
        self._head = head
        self._at = 0
        self._pages: dict[int, bytes] = {}
        self.failed: LazyShardsError | None = None
        """What was met while reading, which the library does not pass on."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:  # as the base class has it
        """Read until the buffer is full or the file ends."""
        out = memoryview(buffer).cast("B")
        start, stop = self._at, min(self._at + len(out), self._size)
        try:
            data = self._read(start, max(start, stop))
        except LazyShardsError as exc:
            self.failed = exc
            raise
        out[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, start: int, stop: int) -> bytes:
        if stop <= len(self._head):
            return self._head[start:stop]
        first, last = start // _PAGE_NBYTES, -(-stop // _PAGE_NBYTES)
        if last - first > _MOST_PAGES // 2:
            return self._storage.fetch([(self._path, start, stop - start)])[0]
        wanted = [number for number in range(first, last) if number not in self._pages]
        if wanted:
            if len(self._pages) + len(wanted) > _MOST_PAGES:
                self._pages = {number: page for number, page in self._pages.items() if first <= number < last}
            ranges = [(self._path, number * _PAGE_NBYTES, _PAGE_NBYTES) for number in wanted]
            self._pages.update(zip(wanted, self._storage.fetch(ranges), strict=True))
        data = b"".join([self._pages[number] for number in range(first, last)])
        return data[start - first * _PAGE_NBYTES : stop - first * _PAGE_NBYTES]


def _says(exc: BaseException) -> str:
    """Return what an error of the library says, on one line and without its own introduction."""
    text = " ".join(str(exc.args[0] if isinstance(exc, KeyError) and exc.args else exc).split())
    start = text.find("(")
    return text[start + 1 : -1] if text.endswith(")") and start > 0 and "nable to" in text[:start] else text


def _explain(exc: BaseException, head: bytes) -> str:
    """Return what is wrong with a file, after what the library said when it was opened or asked."""
    text = _says(exc)
    if getattr(exc, "errno", None) in {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES} and "lock" in text:
        return (
            "is locked by another process, which has it open for writing; open the dataset again when that one has "
            "closed it (where a file system keeps locks that it should not: HDF5_USE_FILE_LOCKING=FALSE)"
        )
    if "already open for" in text:
        return (
            "is open for writing in another process (SWMR), or its writer ended without closing it; open the dataset "
            "again when it is closed, or clear the mark with `h5clear -s` if nobody writes to it any more"
        )
    if "signature not found" in text:
        what = f"begins with {head[:8]!r}" if head else "is empty"
        return f"{what}, expected an HDF5 file ({SIGNATURE!r})"
    if "truncated file" in text:
        return f"is truncated: {text}"
    return f"cannot be read by the HDF5 library: {text}"


# What is in a dataset -------------------------------------------------------------------------------------------


def pipeline(plist: Any) -> tuple[Filter, ...]:  # of h5py, which has no types
    """Return the filters that a dataset's creation properties list."""
    steps = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple(
        [Filter(int(id), tuple(map(int, values)), name.decode("ascii", "replace")) for id, _, values, name in steps]
    )


def has_filter(number: int) -> bool:
    """Return whether the library can undo a filter, with the plugins that are installed."""
    library = h5py()
    if library.h5z.filter_avail(number):
        return True
    try:
        import hdf5plugin  # noqa: F401  # importing it registers its filters
    except ImportError:
        return False
    return bool(library.h5z.filter_avail(number))


class ChunkTable(NamedTuple):
    """Where the chunks of a dataset are, those that were written."""

    numbers: npt.NDArray[np.int64]
    """Number of each chunk in the grid of chunks, in C order; ascending."""
    offsets: npt.NDArray[np.int64]
    """First byte of each in the file."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each, as stored."""
    masks: npt.NDArray[np.uint32]
    """Bit ``i`` is set where filter ``i`` was skipped."""

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return sum([column.nbytes for column in self])


def list_chunks(
    file: H5File,
    name: str,
    grid: tuple[int, ...],
    chunk: tuple[int, ...],
    wanted: npt.NDArray[np.int64] | None = None,
) -> ChunkTable:
    """Return where chunks are.

    Parameters
    ----------
    file : H5File
    name : str
        The dataset's.
    grid : tuple of int
        Chunks along each axis.
    chunk : tuple of int
        Shape of a chunk.
    wanted : ndarray of int64, optional
        Numbers of the chunks, ascending. Asking for one takes as long as listing dozens. By default all.
    """
    dataset = file.dataset(name)
    found: list[Any] = []
    if wanted is None:
        dataset.chunk_iter(found.append)
    else:
        for number in wanted.tolist():
            place = np.unravel_index(number, grid)
            at = tuple([int(n) * size for n, size in zip(place, chunk, strict=True)])
            info = dataset.get_chunk_info_by_coord(at)
            if info.byte_offset is not None and info.size:
                found.append(info)
    count = len(found)
    places = np.array([info.chunk_offset for info in found], np.int64).reshape(count, len(grid)) // np.array(chunk)
    inside = (places < np.array(grid)).all(axis=1)
    numbers = np.ravel_multi_index(tuple(places[inside].T), grid) if inside.any() else np.empty(0, np.int64)
    order = np.argsort(numbers, kind="stable")
    columns = np.array([(info.byte_offset, info.size, info.filter_mask) for info in found], np.int64).reshape(count, 3)
    columns = columns[inside][order]
    return ChunkTable(
        numbers[order].astype(np.int64),
        columns[:, 0].copy(),
        columns[:, 1].copy(),
        columns[:, 2].astype(np.uint32),
    )


def read_block(dataset: Any, box: Sequence[range], out: npt.NDArray[np.generic]) -> None:  # of h5py
    """Have the library read a box into ``out``, which is C-contiguous and in native byte order.

    Parameters
    ----------
    dataset : h5py.h5d.DatasetID
    box : sequence of range
        Ascending positions on each axis of the dataset.
    out : ndarray
        Of the box's shape.
    """
    library = h5py()
    stored = dataset.get_space()
    stored.select_hyperslab(
        tuple([axis.start for axis in box]),
        tuple([len(axis) for axis in box]),
        tuple([axis.step for axis in box]),
    )
    memory = library.h5s.create_simple(out.shape)
    kind, dtype = dataset.get_type(), dataset.dtype
    # The stored type itself where NumPy has it, so that enumerations and texts are taken as they are.
    is_same = dtype == out.dtype and dtype.isnative and kind.equal(library.h5t.py_create(dtype, logical=True))
    dataset.read(memory, stored, out, kind if is_same else None)
