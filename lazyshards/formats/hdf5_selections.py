"""Selections of HDF5 dataspaces, by which virtual datasets say what of their sources goes where."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lazyshards.formats.hdf5_library import RefusedError, h5py
from lazyshards.layout import Shard

__all__ = ["check_reach", "count_covered", "find_run", "is_bounded"]

_MOST_BLOCKS = 1 << 16
"""Boxes of one selection that are looked at."""


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


def count_covered(spaces: Sequence[Any], shape: Sequence[int]) -> int:  # of h5py, which has no types
    """Return how many elements of an array are in any of some selections."""
    library = h5py()
    union = library.h5s.create_simple(tuple(shape))
    union.select_none()
    for space in spaces:
        kind = space.get_select_type()
        if kind == library.h5s.SEL_ALL:
            return prod(shape)
        if kind == library.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
            start, stride, count, block = space.get_regular_hyperslab()
            union.select_hyperslab(start, count, stride, block, op=library.h5s.SELECT_OR)
        elif kind != library.h5s.SEL_NONE:
            is_points = kind == library.h5s.SEL_POINTS
            if (space.get_select_elem_npoints() if is_points else space.get_select_hyper_nblocks()) > _MOST_BLOCKS:
                raise RefusedError(f"has a virtual dataset with more than {_MOST_BLOCKS:,} boxes in one mapping")
            boxes = np.repeat(space.get_select_elem_pointlist()[:, None], 2, axis=1) if is_points else None
            for low, high in space.get_select_hyper_blocklist() if boxes is None else boxes:
                size = tuple((high - low + 1).tolist())
                union.select_hyperslab(tuple(low.tolist()), size, op=library.h5s.SELECT_OR)
    return int(union.get_select_npoints())


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
