"""Writes Zarr stores of version 3: one array a store, in chunks of whole rows."""

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, UnsupportedDtypeError

__all__ = ["ZarrWriter"]

_CHUNK_NBYTES = 4 << 20
"""Bytes of a chunk."""


class ZarrWriter:
    """One Zarr store.

    Availability: with zarr-python 3.

    Parameters
    ----------
    path : str
    dtype : dtype
    row_shape : tuple of int
    rows : int
        Most rows that will be written.
    """

    def __init__(self, path: str, dtype: np.dtype[np.generic], row_shape: tuple[int, ...], rows: int) -> None:
        zarr = _zarr()
        if dtype.kind not in "biufc" or 0 in row_shape:
            raise UnsupportedDtypeError(f"Zarr stores of {dtype} rows of shape {row_shape} are not written: write npy")
        self._path = path
        row_nbytes = int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
        self._step = max(1, min(rows, _CHUNK_NBYTES // row_nbytes))
        self._array: Any = zarr.create_array(
            path,
            shape=(rows, *row_shape),
            chunks=(self._step, *row_shape),
            dtype=dtype,
            fill_value=0,
            config={"write_empty_chunks": True},  # one that is left out cannot be told from one that was lost
        )
        # Chunks are written whole: what does not fill one waits for what comes next.
        self._waiting: list[npt.NDArray[np.generic]] = []
        self._count = self._rows = 0

    def write(self, rows: npt.NDArray[np.generic]) -> None:
        """Append rows."""
        self._waiting.append(rows.copy())
        self._count += len(rows)
        if self._count >= self._step:
            self._store(self._count - self._count % self._step)

    def _store(self, count: int) -> None:
        whole = np.concatenate(self._waiting) if self._waiting else None
        if whole is None or not count:
            return
        self._array[self._rows : self._rows + count] = whole[:count]
        self._rows += count
        self._waiting = [whole[count:]]
        self._count -= count

    def close(self) -> None:
        """Finish the shard."""
        self._store(self._count)
        if self._rows < self._array.shape[0]:
            self._array.resize((self._rows, *self._array.shape[1:]))
        for folder, _, names in os.walk(self._path):
            for place in [*[os.path.join(folder, name) for name in names], folder]:
                fd = os.open(place, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def abandon(self) -> None:
        """Let go of what is held."""
        self._waiting = []


def _zarr() -> Any:
    """Return zarr-python, of version 3."""
    try:
        import zarr
    except ImportError as exc:
        raise FormatError("writing Zarr needs zarr: pip install 'lazyshards[zarr]'") from exc
    if not hasattr(zarr, "create_array"):
        raise FormatError(f"writing Zarr needs zarr 3, found {zarr.__version__}: pip install 'zarr>=3'")
    return zarr
