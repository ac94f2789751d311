"""What cuPyNumeric and CuPy can hold, known without importing either."""

import numpy as np

__all__ = ["why_not_cupy", "why_not_legate"]

_DTYPES = frozenset(
    map(
        np.dtype,
        ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    )
)
"""dtypes of cuPyNumeric, and of CuPy."""
_MOST_AXES = 6
"""Axes that the wheels of Legate are built for; seen with 26.1 and 26.6."""


def why_not_legate(dtype: np.dtype[np.generic], ndim: int) -> str | None:
    """Return why cuPyNumeric cannot hold such an array, or None if it can."""
    if dtype not in _DTYPES:
        return f"cuPyNumeric has no dtype {dtype}"
    if ndim > _MOST_AXES:
        return f"cuPyNumeric holds at most {_MOST_AXES} axes, this array has {ndim}"
    return None


def why_not_cupy(dtype: np.dtype[np.generic], ndim: int) -> str | None:
    """Return why CuPy cannot hold such an array, or None if it can."""
    return None if dtype in _DTYPES else f"CuPy has no dtype {dtype}"
