"""What is known of a dataset while it grows: which shards are finished, so that an interrupted call is gone on with."""

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.hashing import best_algorithm, new_hasher

__all__ = ["Blocks", "Work", "Written", "bytes_of", "full_disk_told"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Blocks = Callable[[], Iterable[npt.NDArray[np.generic]]]
"""Gives the rows of a shard, some at a time."""


def bytes_of(block: npt.NDArray[np.generic]) -> memoryview | bytes:
    """Return the bytes of rows that lie one after the other."""
    return block.reshape(-1).view(np.uint8).data if block.size else b""


@contextlib.contextmanager
def full_disk_told(path: str) -> Iterator[None]:
    """Turn the error of a full disk into one that names what was written and says what to do."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FULL:
            raise
        text = (
            f"{os.strerror(exc.errno or 0)} while this was written: make room, and make the same call again, which "
            "keeps the shards that were finished; or write elsewhere"
        )
        raise OSError(exc.errno, text, path) from exc


class Written(NamedTuple):
    """A shard that is finished."""

    rows: int
    digest: str
    """Of its rows, as plain bytes."""
    stamp: tuple[object, ...]
    """How its file is known again; empty while it is on its way to where it belongs."""


class Work:
    """A dataset that grows, wherever that is.

    Parameters
    ----------
    wanted : mapping
        What the shards are to be like: one that was begun in another way is begun anew.
    mark : str
        What tells that the source's rows are those of an earlier call; empty if nothing does.
    """

    folder: str
    """Directory of this machine in which shards are written."""

    def __init__(self, wanted: Mapping[str, object], mark: str) -> None:
        self.algorithm = best_algorithm()
        self.shards: list[Written] = []
        self.writer = uuid.uuid4().hex
        """Who writes: no other call has it."""
        self._wanted = wanted
        self._mark = mark
        self._is_same = False

    def name(self, number: int, suffix: str) -> str:
        """Return the name of a shard."""
        return f"shard_{number:05d}{suffix}"

    def stamp(self, name: str) -> tuple[object, ...]:
        """Return how a finished shard is known again, or what none can have if there is no such one."""
        raise NotImplementedError

    def save_state(self, state: bytes) -> None:
        """Save which shards are finished, at once or not at all."""
        raise NotImplementedError

    def finish(self, names: list[str], format: str, rows: int) -> list[str]:
        """Make the dataset appear, of these shards and no others, and return their paths."""
        raise NotImplementedError

    def take_over(self, state: bytes) -> None:
        """Take over what an earlier call for the same rows and shards had finished, if that is what the state says."""
        try:
            found = json.loads(state)
            if found["wanted"] == json.loads(json.dumps(self._wanted)) and found["algorithm"] == self.algorithm:
                self.shards = [Written(rows, digest, tuple(stamp)) for rows, digest, stamp in found["shards"]]
                self._is_same = bool(self._mark) and found["mark"] == self._mark
        except (ValueError, KeyError, TypeError):
            self.shards = []

    def holds(self, number: int, name: str, blocks: Blocks | None) -> bool:
        """Return whether a shard is there already and holds these rows; None of those that can be had only once."""
        if blocks is None or number >= len(self.shards) or self.shards[number].stamp != self.stamp(name):
            del self.shards[number:]
            return False
        if self._is_same:
            return True
        hasher = new_hasher(self.algorithm)
        for block in blocks():
            hasher.update(bytes_of(block))
        if hasher.digest().hex() == self.shards[number].digest:
            return True
        del self.shards[number:]
        return False

    def add(self, number: int, name: str, rows: int, digest: str) -> None:
        """Note that a shard is finished."""
        self.shards[number:] = [Written(rows, digest, self.stamp(name))]
        self.save_state(self.state())

    def state(self, **more: str) -> bytes:
        """Return what `take_over` takes, and what else there is to say of it."""
        found = {
            "writer": self.writer,  # first, so that the beginning tells
            **more,
            "wanted": self._wanted,
            "mark": self._mark,
            "algorithm": self.algorithm,
            "shards": [list(shard) for shard in self.shards if shard.stamp],
        }
        return json.dumps(found).encode()
