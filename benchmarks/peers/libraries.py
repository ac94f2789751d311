"""The libraries that people reach for."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from benchmarks.datasets import Dataset, hdf5_copy
from benchmarks.peers import Call, Opened, Peer, opened_fault

__all__ = ["DASK_OPEN", "DASK_SLICE", "HDF5_SLICE"]


def _dask_array(dataset: Dataset) -> Any:
    dask_array = importlib.import_module("dask.array")  # dask is not typed
    maps = [np.load(path, mmap_mode="r") for path in sorted(dataset.folder.iterdir())]
    return dask_array.concatenate([dask_array.from_array(mapped, chunks=mapped.shape) for mapped in maps])


def _dask_slice(dataset: Dataset) -> Call:
    array = _dask_array(dataset)
    return lambda rows: array[rows.start : rows.stop].compute()


def _dask_open(dataset: Dataset) -> Call:
    importlib.import_module("dask.array")  # so that the import is not timed

    def call(_: range) -> Opened:
        array = _dask_array(dataset)
        return Opened(array.shape[0], array)

    return call


def _hdf5_slice(dataset: Dataset) -> Call:
    import h5py

    data = h5py.File(hdf5_copy(dataset))["data"]
    return lambda rows: data[rows.start : rows.stop]


DASK_SLICE = Peer("dask from_array(memmap)", _dask_slice)
DASK_OPEN = Peer("dask from_array(memmap)", _dask_open, opened_fault)
HDF5_SLICE = Peer("h5py, one contiguous file", _hdf5_slice)
