"""The words that all formats have for the same faults: files that cannot be read, and names that are not there."""

from collections.abc import Sequence

from lazyshards.formats.base import Fault

__all__ = ["list_names", "unreadable"]

_MOST_NAMES = 10


def unreadable(path: str, error: OSError) -> Fault:
    """Return the fault of a file that the storage could not read.

    Examples
    --------
    >>> str(unreadable("a.npy", FileNotFoundError(2, "No such file or directory")))
    "'a.npy': cannot be read: No such file or directory"
    """
    return Fault(path, f"cannot be read: {error.strerror or error}", error)


def list_names(names: Sequence[str]) -> str:
    """Return names for a message, the first ten spelled out.

    Examples
    --------
    >>> list_names(["a", "b"])
    "'a', 'b'"
    """
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    return shown + (f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else "")
