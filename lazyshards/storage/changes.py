"""What is said and done about a shard that is not the file that was opened."""

import contextlib
import threading
import warnings
from collections.abc import Iterator

from lazyshards.errors import ShardChangedError, ShardChangedWarning
from lazyshards.storage.base import OnChange, Stamp

__all__ = ["report_change", "warnings_kept"]

_lock = threading.Lock()
_keepers = 0
_kept: list[str] = []


@contextlib.contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """Keep what would be warned of, on whichever thread, in the list that is given; it is filled at the end.

    For what reads where no warning should be shown. Where several do so at a time, one may get what another read.
    """
    global _keepers
    found: list[str] = []
    with _lock:
        _keepers += 1
    try:
        yield found
    finally:
        with _lock:
            _keepers -= 1
            found += _kept
            _kept.clear()


def report_change(path: str, stamp: Stamp, now: Stamp, on_change: OnChange) -> None:
    """Raise ShardChangedError, or warn, as ``on_change`` says; nothing for ``"ignore"``.

    Parameters
    ----------
    path : str
    stamp : Stamp
        What the file was when the dataset was opened.
    now : Stamp
        What it is.
    on_change : {"raise", "warn", "ignore"}
    """
    if on_change == "ignore":
        return
    if now.size != stamp.size:
        what = f"it held {stamp.size:,} bytes and now holds {now.size:,}"
    elif now.inode != stamp.inode:
        what = "another file of the same size took its place"
    else:
        what = "it was written to"
    text = f"{path!r} changed since the dataset was opened: {what}; "
    if on_change == "warn":
        text += "its rows may be old and new ones mixed"
        with _lock:
            if _keepers:
                _kept.append(text)
                return
        warnings.warn(text, ShardChangedWarning, stacklevel=2)
    else:
        raise ShardChangedError(text + 'open the dataset again, or pass on_change="warn" or "ignore"')
