"""How several ranks write one dataset: rank 0 writes, and all of them take the blocks of what is spread over them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from lazyshards.engines import wanted_engine
from lazyshards.engines.ranks import Ask, once

__all__ = ["is_array", "is_dataset", "write_once"]

T = TypeVar("T")

_SPREAD = "cupynumeric"
"""Whose arrays are spread over the ranks: looking at one is something that all of them do."""
_READ_ANYWHERE = {"h5py", "numpy", "zarr"}
"""Whose arrays each process reads for itself."""


def is_array(source: object) -> bool:
    """Return whether a source has a known number of rows, and is sliced."""
    return hasattr(source, "shape") and hasattr(source, "dtype") and hasattr(source, "__getitem__")


def is_dataset(source: object) -> bool:
    """Return whether a source is a lazy dataset, which every process reads for itself."""
    return hasattr(type(source), "shards") and hasattr(type(source), "fingerprint")


def write_once(write: Callable[[Any], T], source: object, *, what: str) -> T:
    """Return what ``write`` returns, called on rank 0 alone if several ranks share the work, or raise what it raised.

    Parameters
    ----------
    write : callable
        Writes the source that it is given, from the first row to the last.
    source : array, ShardedDataset, or iterable of arrays
    what : str
        What is done, for errors.
    """
    engine = _engine_of(source)
    is_iterable = isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping)
    if _origin(source) in _READ_ANYWHERE or is_dataset(source) or not (is_array(source) or is_iterable):
        return once(lambda _: write(source), engine, what=what)
    taken: Any = source if is_array(source) else iter(source)  # type: ignore[call-overload]  # it is iterable

    def work(ask: Ask) -> T:
        return write(_Spread(taken, ask) if is_array(source) else _each(taken, ask))

    def answer(rows: tuple[int, int] | None) -> None:
        _to_host(next(taken, None) if rows is None else taken[slice(*rows)])

    return once(work, engine, what=what, answer=answer)


def _origin(source: object) -> str:
    return type(source).__module__.partition(".")[0]


def _engine_of(source: Any) -> str:
    """Return the engine whose ranks share the writing of a source."""
    if _origin(source) == _SPREAD:
        return "legate"
    return wanted_engine(source._engine if is_dataset(source) else None)  # noqa: SLF001  # as it reads


class _Spread:
    """An array that all ranks slice at the same time.

    Parameters
    ----------
    source : array
    ask : callable
        Tells the others which rows, from the first to before the last.
    """

    def __init__(self, source: Any, ask: Ask) -> None:
        self._source = source
        self._ask = ask
        self.shape = source.shape
        self.dtype = source.dtype

    def __getitem__(self, rows: slice) -> Any:
        self._ask((rows.start, rows.stop))
        return _to_host(self._source[rows])


def _each(arrays: Iterator[Any], ask: Ask) -> Iterator[Any]:
    """Yield arrays that all ranks take at the same time."""
    while True:
        ask(None)
        try:
            array = next(arrays)
        except StopIteration:
            return
        yield _to_host(array)


def _to_host(array: Any) -> Any:
    """Return an array of Legate's as NumPy's, and anything else as it is."""
    return np.asarray(array) if _origin(array) == _SPREAD else array
