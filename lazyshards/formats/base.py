"""What a format is: how one kind of file is described and read."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lazyshards.layout import Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Storage

__all__ = ["Fault", "Format", "describe_faults"]


class Fault(NamedTuple):
    """What is wrong with one shard."""

    path: str
    """Path of the file."""
    found: str
    """What was found, and what was expected."""
    error: OSError | None = None
    """The error of the operating system, if that was what was found."""

    def __str__(self) -> str:
        return f"{self.path!r}: {self.found}"


def describe_faults(faults: Sequence[Fault], summary: str) -> str:
    """Return one message for all faults, the first ten spelled out."""
    lines = [f"{summary}:", *[f"  {fault}" for fault in faults[:10]]]
    if len(faults) > 10:
        lines.append(f"  ... and {len(faults) - 10:,} more")
    return "\n".join(lines)


class Format(Protocol):
    """How one on-disk format is described and read. Stateless; one instance serves all threads.

    A format whose files do not say their dtype, or say several, may have an attribute ``takes_dtype = True``: then the
    ``dtype`` of ``open_shards`` is among its options as well.
    """

    @property
    def name(self) -> str:
        """The name by which it is asked for."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Endings of the file names, lower case, with the dot."""
        ...

    @property
    def magic(self) -> tuple[bytes, ...]:
        """What its files begin with; empty if they cannot be told by their bytes."""
        ...

    @property
    def directories(self) -> bool:
        """Whether a shard is a directory (a store) rather than a file."""
        ...

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file; headers only, all of them in few concurrent reads.

        Parameters
        ----------
        paths : sequence of str
        storage : Storage
        options : mapping
            The format's own keyword arguments of ``open_shards``; an unknown one is a TypeError.
        """
        ...

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell; every element, or raise.

        Called for shards whose source is ``Decoded`` only. ``out`` is C-contiguous and in native byte order. Scratch
        memory is bounded, no thread is started, and ``out`` is not kept.
        """
        ...
