"""Datasets as dask arrays."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

try:
    import dask.array
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"to_dask() needs dask ({exc}): pip install 'dask[array]'", name=exc.name) from exc

__all__ = ["to_dask"]


class _Sliced(Protocol):
    """A ShardedDataset."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def __getitem__(self, index: object) -> "_Sliced": ...
    def to_numpy(self) -> npt.NDArray[np.generic]: ...


class _Lazy:
    """What dask slices: each slice is read when a task asks for it."""

    def __init__(self, rows: _Sliced) -> None:
        self._rows = rows
        self.shape = rows.shape
        self.dtype = rows.dtype
        self.ndim = len(rows.shape)

    def __getitem__(self, index: object) -> npt.NDArray[np.generic]:
        return self._rows[index].to_numpy()


def to_dask(rows: _Sliced, block_rows: int) -> Any:
    """Return a dask array whose blocks are rows of a dataset, each read by one task.

    Parameters
    ----------
    rows : ShardedDataset
    block_rows : int
        Rows of each block but the last.
    """
    chunks = (block_rows, *rows.shape[1:])
    return dask.array.from_array(  # type: ignore[no-untyped-call]  # dask has no types
        _Lazy(rows),
        chunks=chunks,
        name=f"lazyshards-{rows.fingerprint}-{block_rows}",
        fancy=False,
        asarray=False,
        meta=np.empty((0,) * len(rows.shape), rows.dtype),
    )
