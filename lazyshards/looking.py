"""Which rows are looked at: the first few, or a few drawn at random."""

import operator

import numpy as np
import numpy.typing as npt

from lazyshards.samplers import KeyedPermutation, derive_keys

__all__ = ["checked_count", "sampled_rows"]


def checked_count(count: object, what: str) -> int:
    """Return a number of rows as an int.

    Parameters
    ----------
    count : object
        What was given.
    what : str
        The call that it was given to, for the error.

    Raises
    ------
    TypeError, ValueError
        If it is not an integer, 0 or more.
    """
    try:
        number = operator.index(count)  # type: ignore[arg-type]  # what it raises is the answer
    except TypeError:
        raise TypeError(f"{what} takes a number of rows, not {count!r:.80}") from None
    if number < 0:
        raise ValueError(f"{what} takes a number of rows, 0 or more, not {number}")
    return number


def sampled_rows(count: int, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return ``count`` different rows of ``size``, ascending, in time and memory of ``count``.

    A function of the three numbers, the same on every machine.

    Parameters
    ----------
    count, size, seed : int

    Raises
    ------
    ValueError
        If there are not so many rows.

    Examples
    --------
    >>> rows = sampled_rows(4, 10**12, seed=0)
    >>> len(set(rows.tolist())), bool((np.diff(rows) > 0).all())
    (4, True)
    """
    if count > size:
        raise ValueError(f"sample({count:,}) of {size:,} rows: no row is taken twice, so at most {size:,} can be")
    permutation = KeyedPermutation(size, derive_keys("sample", operator.index(seed)))
    return np.sort(permutation(np.arange(count, dtype=np.int64)))
