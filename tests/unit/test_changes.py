import threading
import warnings

import pytest

from lazyshards.errors import ShardChangedError, ShardChangedWarning
from lazyshards.storage.base import Stamp
from lazyshards.storage.changes import report_change, warnings_kept

OLD, NEW = Stamp(5, 1, 1), Stamp(7, 1, 1)


def test_warns():
    """A change is warned of where nobody keeps warnings."""
    with pytest.warns(ShardChangedWarning, match="held 5 bytes and now holds 7"):
        report_change("a.npy", OLD, NEW, "warn")


def test_kept_of_every_thread():
    """What is kept is not warned of, on whichever thread it is met, and is there at the end."""
    with warnings.catch_warnings(), warnings_kept() as kept:
        warnings.simplefilter("error")
        report_change("a.npy", OLD, NEW, "warn")
        other = threading.Thread(target=report_change, args=("b.npy", OLD, NEW, "warn"))
        other.start()
        other.join()
    assert [text.partition(" ")[0] for text in kept] == ["'a.npy'", "'b.npy'"]


def test_kept_once():
    """Of two that keep at a time, one gets each warning; afterwards warnings are shown again."""
    with warnings_kept() as outer:
        with warnings_kept() as inner:
            report_change("a.npy", OLD, NEW, "warn")
        report_change("b.npy", OLD, NEW, "warn")
    assert len(inner) == len(outer) == 1
    with pytest.warns(ShardChangedWarning):
        report_change("c.npy", OLD, NEW, "warn")


def test_errors_are_not_kept():
    """An error is raised also where warnings are kept, and what was kept is not lost with it."""
    with warnings_kept() as kept:
        report_change("a.npy", OLD, NEW, "warn")
        with pytest.raises(ShardChangedError):
            report_change("b.npy", OLD, NEW, "raise")
    assert len(kept) == 1
