"""Progress bars: rows that are done, of all; a bar in a terminal or a notebook, a line now and then in a log."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol, Self, TextIO, TypeAlias

__all__ = ["Bar", "LogLines", "Progress", "progress_bar"]

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of rows that were done since the last call."""

_LOG_SECONDS = 10.0
"""Seconds between two lines of a log."""


class Bar(Protocol):
    """A bar that is shown."""

    def update(self, n: float | None = 1) -> object:
        """Say that so many rows more are done."""
        ...


class _NoBar:
    """A bar that shows nothing."""

    def update(self, n: float | None = 1) -> None:
        """Do nothing."""


class LogLines:
    """Progress where nobody sees a bar: whole lines, one every ten seconds and one at the end, no control characters.

    Parameters
    ----------
    total : int, optional
        Rows of all; None if that is not known.
    description : str
        What is being done.
    file : text file
    clock : callable
        Returns seconds.
    """

    def __init__(
        self, total: int | None, description: str, file: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._description = description
        self._file = file
        self._clock = clock
        self._done = 0
        self._start = self._last = clock()

    def update(self, n: float | None = 1) -> None:
        """Say that so many rows more are done."""
        self._done += int(n or 0)
        now = self._clock()
        if now - self._last >= _LOG_SECONDS and self._done != self._total:
            self._last = now
            self._write("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._write("" if kind is None else f", stopped by {kind.__name__}")

    def _write(self, end: str) -> None:
        took = self._clock() - self._start
        done = f"{self._done:,} rows"
        if self._total is not None:
            part = 100 * self._done // self._total if self._total else 100
            done = f"{self._done:,} of {self._total:,} rows ({part} %)"
        rate = f", {self._done / took:,.0f} rows/s" if took > 0 and self._done else ""
        self._file.write(f"{self._description}: {done} in {took:.1f} s{rate}{end}\n")
        self._file.flush()


def progress_bar(total: int | None, description: str, *, shown: bool) -> AbstractContextManager[Bar]:
    """Return a bar of rows to enter, or one that shows nothing.

    In a notebook and on a terminal tqdm draws it; where stderr is neither, lines are written to it.

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
        If tqdm is to draw it and is not installed: ``pip install "lazyshards[progress]"``.
    """
    if not shown:
        return nullcontext(_NoBar())
    notebook = _is_notebook()
    if not notebook and not sys.stderr.isatty():
        return LogLines(total, description, sys.stderr)
    try:
        with warnings.catch_warnings():
            # In a notebook without ipywidgets it draws with characters, and says so each time.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError as exc:
        raise ImportError('a progress bar needs tqdm: pip install "lazyshards[progress]"') from exc
    # A notebook puts what is written to stderr on a red ground.
    file = sys.stdout if notebook else None
    bar: AbstractContextManager[Bar] = tqdm(
        total=total, unit="row", unit_scale=True, desc=description, file=file, dynamic_ncols=not notebook
    )
    return bar


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config
