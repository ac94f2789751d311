"""Selections of HDF5 dataspaces, by which virtual datasets say what of their sources goes where."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lazyshards.formats.hdf5_library import RefusedError, h5py
from lazyshards.layout import Shard

__all__ = ["check_reach", "find_run", "is_bounded"]


def is_bounded(space: Any) -> bool:  # of h5py, which has no types
    """Return whether a selection has an end."""
    try:
        space.get_select_npoints()
    except (RuntimeError, ValueError):  # of an unlimited selection the library does not tell
        return False
    return True


def check_reach(target: Any, origin: Any, source: Shard) -> None:
    """Raise RefusedError if a source has not what is mapped of it: the library would make up the rest."""
    shape = (source.rows, *source.row_shape)
    if _is_all(origin):
        count = int(target.get_select_npoints())
        if prod(shape) != count:
            raise RefusedError(f"refers to {source.path!r}, which has shape {shape}, expected {count:,} elements")
        return
    last = tuple(map(int, origin.get_select_bounds()[1]))
    if len(last) != len(shape) or any([n >= length for n, length in zip(last, shape, strict=True)]):
        raise RefusedError(f"refers to {source.path!r}, which has shape {shape}, expected an element {last}")


def find_run(space: Any, shape: Sequence[int]) -> tuple[int, int] | None:  # of h5py, which has no types
    """Return the first element and the number of elements of a selection, in C order, if it is one run of them."""
    if _is_all(space):
        return 0, prod(shape)
    low, high = (tuple(map(int, bound)) for bound in space.get_select_bounds())
    box = [b - a + 1 for a, b in zip(low, high, strict=True)]
    count = int(space.get_select_npoints())
    if prod(box) != count:
        return None
    wide = next((i for i, length in enumerate(box) if length > 1), len(box))
    if tuple(box[wide + 1 :]) != tuple(shape[wide + 1 :]):
        return None
    return int(np.ravel_multi_index(low, tuple(shape))), count


def _is_all(space: Any) -> bool:  # of h5py, which has no types
    return bool(space.get_select_type() == h5py().h5s.SEL_ALL)
