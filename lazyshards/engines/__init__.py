"""The engines, and which of them a dataset takes."""

import os
import secrets
import threading
import warnings

import numpy as np

from lazyshards.engines import bringup, ranks
from lazyshards.engines.base import Array, Engine, PendingResult
from lazyshards.engines.threads import ThreadEngine
from lazyshards.errors import EngineFallbackWarning, UnsupportedDtypeError

__all__ = [
    "Array",
    "Engine",
    "PendingResult",
    "auto_engine",
    "check_engine_name",
    "choose_engine",
    "draw_seed",
    "engine_names",
    "find_engine",
    "running_engine",
    "set_engine",
    "wanted_engine",
]

_NAMES = ("auto", "cupy", "legate", "numpy")
_engines: dict[str, Engine] = {"numpy": ThreadEngine()}
_lock = threading.Lock()
_preferred: str | None = None
_auto: tuple[str, str] | None = None


def engine_names() -> tuple[str, ...]:
    """Return what ``engine=`` takes."""
    return _NAMES


def check_engine_name(name: str | None, what: str = "engine") -> str | None:
    """Return the name of an engine, or None, if it is one; else raise ValueError, which says what held the name."""
    if name is not None and name not in _NAMES:
        raise ValueError(f"{what}={name!r} is not an engine: use one of {', '.join(map(repr, _NAMES))}")
    return name


def _engine_of_environment() -> str | None:
    return check_engine_name(os.environ.get("LAZYSHARDS_ENGINE") or None, "LAZYSHARDS_ENGINE")


def set_engine(name: str | None) -> None:
    """Set the engine of every dataset that was not opened, and every call that was not made, with one of its own.

    Parameters
    ----------
    name : {"auto", "numpy", "legate", "cupy"}, optional
        None returns to the environment variable ``LAZYSHARDS_ENGINE``, or ``"auto"``.

    Raises
    ------
    EngineUnavailableError
        If that engine cannot run here.
    ValueError
        If there is no such engine.

    Examples
    --------
    >>> import lazyshards
    >>> lazyshards.set_engine("numpy")
    >>> lazyshards.set_engine(None)
    """
    global _preferred
    name = check_engine_name(name)
    if name not in (None, "auto"):
        find_engine(name)
    _preferred = name


def find_engine(name: str) -> Engine:
    """Return the engine of that name, brought up.

    Raises
    ------
    EngineUnavailableError
        If it cannot run here; the message says what would install it.
    """
    try:
        return _engines[name]
    except KeyError:
        pass
    engine: Engine
    if name == "legate":
        from lazyshards.engines.legate import LegateEngine

        engine = LegateEngine()
    else:
        from lazyshards.engines.cupy import CupyEngine

        engine = CupyEngine()
    with _lock:
        return _engines.setdefault(name, engine)


def running_engine(name: str) -> Engine | None:
    """Return the engine of that name if it was brought up already; starts nothing."""
    return _engines.get(name)


def auto_engine() -> tuple[str, str]:
    """Return what ``auto`` takes in this process, and why; decided once, without starting Legate."""
    global _auto
    if _auto is not None:
        return _auto
    missing = bringup.why_unavailable()
    decided = (
        ("legate", "cuPyNumeric is installed and Legate can be started") if missing is None else ("numpy", missing)
    )
    if threading.current_thread() is threading.main_thread():
        # On another thread Legate cannot be started; that is no answer for the process.
        _auto = decided
    return decided


def wanted_engine(name: str | None) -> str:
    """Return the engine that a dataset of a usual dtype would take; starts nothing, and checks nothing.

    Parameters
    ----------
    name : str or None
        What was asked for, as for `choose_engine`.
    """
    name = name or _preferred or _engine_of_environment() or "auto"
    return auto_engine()[0] if name == "auto" else name


def choose_engine(name: str | None, dtype: np.dtype[np.generic], ndim: int, *, warn: bool = False) -> str:
    """Return the engine that an array takes: the one asked for, else the process's.

    Parameters
    ----------
    name : str or None
        What was asked for; None takes ``set_engine``, then ``LAZYSHARDS_ENGINE``, then ``"auto"``.
    dtype : dtype
        Of the array.
    ndim : int
        Number of its axes.
    warn : bool
        Whether to warn if ``auto`` takes NumPy only because Legate cannot serve this array or this thread.

    Raises
    ------
    UnsupportedDtypeError
        If the engine asked for cannot hold such an array; the message names one that can.
    """
    if name is None:
        name = _preferred or _engine_of_environment()
    if name is None or name == "auto":
        name = auto_engine()[0]
        if name == "numpy":
            return name
        reason = _why_not_legate(dtype, ndim)
        if reason is None:
            return name
        if warn and ranks.is_first_rank():
            warnings.warn(
                f'the result is a NumPy array, not a cuPyNumeric one: {reason}; say engine="numpy" to have it so',
                EngineFallbackWarning,
                stacklevel=3,
            )
        return "numpy"
    if name != "numpy":
        check_engine_name(name)
        reason = find_engine(name).why_not(dtype, ndim)
        if reason is not None:
            raise UnsupportedDtypeError(f'{reason}; use engine="numpy"')
    return name


def _why_not_legate(dtype: np.dtype[np.generic], ndim: int) -> str | None:
    from lazyshards.engines.dtypes import why_not_legate

    if threading.current_thread() is not threading.main_thread():
        return "Legate serves the main thread only, and this is another one"
    return why_not_legate(dtype, ndim)


def draw_seed(engine: str) -> int:
    """Return a random seed of 62 bits: if the engine is Legate, one and the same on every rank, which all must call it.

    Parameters
    ----------
    engine : str
        What will read in an order of that seed.
    """
    return ranks.agree(secrets.randbits(62), engine)
