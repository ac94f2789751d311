"""Writes HDF5: one dataset a file, contiguous unless it is compressed."""

import io
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, UnsupportedDtypeError

__all__ = ["Hdf5Writer"]

_CHUNK_NBYTES = 1 << 20
"""Bytes of a compressed chunk: HDF5's own chunk cache holds one."""
_COPY_NBYTES = 16 << 20


class Hdf5Writer:
    """One HDF5 file.

    Availability: with h5py.

    Parameters
    ----------
    path : str
    dtype : dtype
    row_shape : tuple of int
    rows : int
        Most rows that will be written.
    dataset : str
        Name of the dataset.
    compression : str, optional
        Filter of h5py, such as ``"gzip"``; none by default, so that rows are read as plain bytes.
    """

    def __init__(
        self,
        path: str,
        dtype: np.dtype[np.generic],
        row_shape: tuple[int, ...],
        rows: int,
        *,
        dataset: str = "data",
        compression: str | None = None,
    ) -> None:
        if dtype.kind in "UmM":
            raise UnsupportedDtypeError(f"HDF5 has no {dtype}: write npy, raw or parquet, or view it as integers")
        self._path = path
        self._name = dataset
        self._compression = compression
        self._rows = 0
        self._sink = _Sink(path)
        self._file = _h5py().File(self._sink, "w")
        try:
            self._data = self._create(self._file, (rows, *row_shape), dtype)
        except (ValueError, TypeError) as exc:
            self.abandon()
            raise UnsupportedDtypeError(f"HDF5 cannot hold {dtype} with {compression=}: {exc}") from exc

    def _create(self, file: Any, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Any:
        if self._compression is None:
            return file.create_dataset(self._name, shape, dtype)
        row_nbytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize)
        chunk = (max(1, min(shape[0], _CHUNK_NBYTES // row_nbytes)), *[max(1, size) for size in shape[1:]])
        return file.create_dataset(
            self._name, shape, dtype, chunks=chunk, maxshape=(None, *shape[1:]), compression=self._compression
        )

    def write(self, rows: npt.NDArray[np.generic]) -> None:
        """Append rows."""
        if rows.size:
            self._data[self._rows : self._rows + len(rows)] = rows
        self._sink.check()
        self._rows += len(rows)

    def close(self) -> None:
        """Finish the shard, without the rows that it was made for and did not get."""
        path = self._path
        if self._rows < self._data.shape[0]:
            if self._compression is not None:
                self._data.resize(self._rows, axis=0)
            else:
                path = self._copy_written()
        self._file.close()
        self._sink.finish()
        if path != self._path:
            os.replace(path, self._path)

    def _copy_written(self) -> str:
        """Copy the rows that are there into a file of their own, as contiguous data does not shrink."""
        path = self._path + ".short"
        shape = (self._rows, *self._data.shape[1:])
        step = max(1, _COPY_NBYTES * max(1, shape[0]) // max(1, int(np.prod(shape)) * self._data.dtype.itemsize))
        with _Sink(path) as sink:
            with _h5py().File(sink, "w") as file:
                data = self._create(file, shape, self._data.dtype)
                for start in range(0, self._rows, step):
                    stop = min(start + step, self._rows)
                    data[start:stop] = self._data[start:stop]
            sink.finish()
        return path

    def abandon(self) -> None:
        """Let go of the file."""
        self._file.close()
        self._sink.close()


class _Sink(io.FileIO):
    """A file for the HDF5 library to write, whose failures are kept: met while it closes, they end the process."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "w+")
        self._failed: OSError | None = None

    def write(self, data: Any) -> int:  # as the base class has it
        """Write all of it; after a failure, nothing more."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view) and self._failed is None:
            try:
                done += super().write(view[done:]) or 0
            except OSError as exc:
                self._failed = exc
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the length; after a failure, not."""
        try:
            return self.tell() if self._failed is not None else super().truncate(size)
        except OSError as exc:
            self._failed = exc
            return self.tell()

    def check(self) -> None:
        """Raise what failed."""
        if self._failed is not None:
            raise self._failed

    def finish(self) -> None:
        """See to it that the bytes are on the disk, and close the file; raise what failed."""
        self.check()
        os.fsync(self.fileno())
        self.close()


def _h5py() -> Any:
    """Return h5py."""
    try:
        import h5py
    except ImportError as exc:
        raise FormatError("writing HDF5 needs h5py: pip install 'lazyshards[hdf5]'") from exc
    return h5py
