"""Keeping Python's cyclic collector off threads where it may not drop a cuPyNumeric array.

Legate kills the process if one of its arrays is dropped on any thread but its owner's, and the collector runs on
whichever thread happens to allocate. While other threads work for us it is therefore off, and the owner's thread
collects in its place.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["collect_if_due", "collector_off"]

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep the collector off until the last of those who ask for it is done; then it is as it was before the first."""
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()


def collect_if_due() -> None:
    """Collect what the collector would have collected by now, on this thread, if it is only off because of us."""
    if not _was_enabled or gc.isenabled():
        return
    for generation in (2, 1, 0):
        threshold = gc.get_threshold()[generation]
        if threshold and gc.get_count()[generation] > threshold:
            gc.collect(generation)
            return
