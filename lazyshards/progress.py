"""Progress bars: rows that are done, of all; drawn by tqdm, in a terminal or a notebook."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

__all__ = ["Bar", "Progress", "progress_bar"]

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of rows that were done since the last call."""


class Bar(Protocol):
    """A bar that is shown."""

    def update(self, n: float | None = 1) -> object:
        """Say that so many rows more are done."""
        ...


class _NoBar:
    """A bar that shows nothing."""

    def update(self, n: float | None = 1) -> None:
        """Do nothing."""


def progress_bar(total: int | None, description: str, *, shown: bool) -> AbstractContextManager[Bar]:
    """Return a bar of rows to enter, or one that shows nothing.

    Parameters
    ----------
    total : int, optional
        Rows of all; None if that is not known.
    description : str
        What is being done.
    shown : bool

    Raises
    ------
    ImportError
        If it is to be shown and tqdm is not installed: ``pip install "lazyshards[progress]"``.
    """
    if not shown:
        return nullcontext(_NoBar())
    from tqdm.auto import tqdm

    bar: AbstractContextManager[Bar] = tqdm(total=total, unit="row", unit_scale=True, desc=description)
    return bar
