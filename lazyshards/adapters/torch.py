"""Datasets and batches as PyTorch's Dataset and IterableDataset."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"to_torch() needs PyTorch ({exc}): pip install torch", name=exc.name) from exc

from lazyshards.errors import UnsupportedDtypeError

__all__ = ["TorchBatches", "TorchRows", "to_tensors"]

Tensors: TypeAlias = Any
"""A torch.Tensor, or a dict of them."""


class _Rows(Protocol):
    """A ShardedDataset or a Bundle."""

    @property
    def dtype(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


class _Batches(Protocol):
    """What ``batches`` returns."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, int | str]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def to_tensors(arrays: Any) -> Tensors:
    """Return an array, or each of a dict of arrays, as a tensor; the memory of NumPy arrays is shared.

    Raises
    ------
    UnsupportedDtypeError
        If torch has no such dtype.
    """
    if isinstance(arrays, dict):
        return {name: to_tensors(array) for name, array in arrays.items()}
    array = np.asarray(arrays)
    try:
        return torch.from_numpy(array)
    except TypeError as exc:
        raise UnsupportedDtypeError(f"torch has no tensors of {array.dtype}: use astype() before to_torch()") from exc


class _Fetched(list[Any]):
    """Rows one by one, for any collate function, which remember the batch that they are of."""

    tensors: Tensors


class TorchRows(Dataset[Any]):  # type: ignore[misc]  # torch may be absent where types are checked
    """The rows of a dataset as a map-style torch Dataset; a DataLoader fetches all rows of a batch in one read.

    Parameters
    ----------
    rows : ShardedDataset or Bundle
        Read by the NumPy engine, so that worker processes can read it.
    """

    def __init__(self, rows: _Rows) -> None:
        dtypes = rows.dtype if isinstance(rows.dtype, dict) else {"": rows.dtype}
        for dtype in dtypes.values():
            to_tensors(np.empty(0, dtype))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensors:
        """Return one row."""
        number = range(len(self))[index]
        found = self._read(slice(number, number + 1))
        return {name: tensor[0] for name, tensor in found.items()} if isinstance(found, dict) else found[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensors]:
        """Return rows, read together."""
        tensors = self._read(np.asarray(indices, np.int64))
        if isinstance(tensors, dict):
            columns = zip(*tensors.values(), strict=True)
            fetched = _Fetched([dict(zip(tensors, column, strict=True)) for column in columns])
        else:
            fetched = _Fetched(tensors.unbind(0))
        fetched.tensors = tensors
        return fetched

    def _read(self, index: slice | npt.NDArray[np.int64]) -> Tensors:
        return to_tensors(self._rows[index].compute(engine="numpy"))

    @staticmethod
    def collate(fetched: list[Tensors]) -> Tensors:
        """Return the batch that rows are of, without copying it together again: the DataLoader's ``collate_fn``."""
        return fetched.tensors if isinstance(fetched, _Fetched) else torch.utils.data.default_collate(fetched)


class TorchBatches(IterableDataset[Any]):  # type: ignore[misc]  # torch may be absent where types are checked
    """Batches as a torch IterableDataset, for a DataLoader with ``batch_size=None``; it keeps the position.

    Parameters
    ----------
    batches : Batches
    """

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensors]:
        """Yield the batches from the position on, as tensors."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                f"the DataLoader has {worker.num_workers} workers, and each would read every batch: use num_workers=0, "
                "since batches are read ahead by threads, or to_torch() of the dataset and a sampler"
            )
        return map(to_tensors, self._batches)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the batch handed out last."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self._batches.load_state_dict(state)
