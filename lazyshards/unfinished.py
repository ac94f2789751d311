"""What a directory holds while a dataset is written to it that cannot change places with another.

A file says so from the beginning to the end. Of a first dataset nothing can be opened meanwhile. One that replaces
another has a tag in the names of its shards, so that the old one stays what is opened until the manifest names the new
shards, or the file says that they are the dataset: that is one step. Then the old ones are removed, and the file last.
"""

import re
import uuid
from typing import NamedTuple

from lazyshards import manifest
from lazyshards.errors import FormatError, LayoutError, ShardReadError
from lazyshards.storage.base import Entry, Storage

__all__ = ["NAME", "Replacement", "begun", "current", "is_replaced", "parse", "tag_of", "tagged"]

NAME = "_lazyshards.unfinished"
"""Name of the file."""
_HEAD_NBYTES = 256
_HEAD = re.compile(rb'\{"writer": "\w*", "tag": "(\w*)", "old": "(\w*)", "step": "(\w*)"')
_TAG = re.compile(r"^shard_\d+\.(r[0-9a-f]{8})\.")
_TRIES = 5


class Replacement(NamedTuple):
    """What the file says of a dataset that replaces another; all empty for a first one."""

    tag: str = ""
    """Of the new shards."""
    old: str = ""
    """Of the old ones; empty if those have none."""
    step: str = ""
    """``"old"`` or ``"new"``: which are the dataset; ``"closed"`` if none are, for a moment."""


def begun(old: str) -> Replacement:
    """Return what the file says from the beginning on.

    Parameters
    ----------
    old : str
        Tag of the dataset that is to be replaced; empty if it has none.
    """
    return Replacement(f"r{uuid.uuid4().hex[:8]}", old, "old")


def parse(head: bytes) -> Replacement:
    """Return what the beginning of the file says."""
    found = _HEAD.match(head)
    return Replacement(*[text.decode() for text in found.groups()]) if found else Replacement()


def tagged(number: int, suffix: str, tag: str) -> str:
    """Return the name of a shard."""
    return f"shard_{number:05d}.{tag}{suffix}" if tag else f"shard_{number:05d}{suffix}"


def tag_of(name: str) -> str:
    """Return the tag in the name of a shard; empty if there is none."""
    found = _TAG.match(name)
    return found[1] if found else ""


def is_replaced(state: Replacement, folder: str, storage: Storage) -> bool:
    """Return whether the new shards are the dataset.

    Parameters
    ----------
    state : Replacement
    folder : str
        The directory, with the separator.
    storage : Storage
    """
    if state.step == "new" or not state.tag:
        return state.step == "new"
    try:
        layout = manifest.read(folder + manifest.NAME, storage).layout
    except (FormatError, LayoutError, ShardReadError):  # there is none, or it is not whole
        return False
    return bool(len(layout)) and tag_of(layout.path(0)[len(folder) :]) == state.tag


def current(place: str, folder: str, entries: list[Entry], storage: Storage) -> list[Entry]:
    """Return which of the names in a directory are the dataset's: all, unless one is being replaced.

    Parameters
    ----------
    place : str
        The directory, as it is listed.
    folder : str
        The same with the separator.
    entries : list of Entry
        What a listing found.
    storage : Storage

    Raises
    ------
    LayoutError
        If a first dataset is being written there.
    """
    for _ in range(_TRIES):
        if (folder + NAME, False) not in entries:
            return entries
        (head,) = storage.heads([folder + NAME], _HEAD_NBYTES)
        if isinstance(head.error, FileNotFoundError):  # it has ended since
            _, entries = storage.find(place)
            continue
        state = parse(head.data)
        if head.error is not None or not state.tag or state.step == "closed":
            break
        wanted = state.old
        if is_replaced(state, folder, storage):
            wanted = state.tag
            _, entries = storage.find(place)  # the listing before may lack some of the new ones
        return [entry for entry in entries if _is_of(entry.path[len(folder) :].rstrip("/"), wanted)]
    raise LayoutError(
        f"{place!r} is being written, or was when that was cut off: call write_shards() for it again to go on, or "
        f"remove {NAME!r} and what else is there"
    )


def _is_of(name: str, tag: str) -> bool:
    """Return whether a name belongs to the shards with a tag, or to none in particular."""
    return tag_of(name) == tag or (name.startswith("_") and name != NAME) or name == "meta.json"
