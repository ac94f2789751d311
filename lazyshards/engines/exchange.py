"""Collectives: every rank gets the few bytes that each rank gave, or all of them, or all that rank 0 gave.

Legate itself carries them, in a launch of one point for each rank, or of one on rank 0, so that no other way between
the ranks is needed and nothing can overtake what was launched before.
"""

import functools
import sys
from typing import Any

import numpy as np

from lazyshards.engines import bringup
from lazyshards.engines.collector import collector_off

_started = bringup.start()

# Only now: Legate does not even load on every machine before it was made to.
import legate.core.types as legate_types  # noqa: E402
from legate.core import TaskContext, VariantCode, get_legate_runtime  # noqa: E402
from legate.core.task import OutputStore, task  # noqa: E402

__all__ = ["broadcast", "exchange", "exchange_all"]

_HEAD_NBYTES = 8
"""Bytes of a row before the message: the rank, from 1, and the length of the message, four bytes each."""
_SHORT_NBYTES = 4 << 10
"""Bytes of a broadcast that travel with its length, in one launch..."""
_PIECE_NBYTES = 512 << 10
"""...and of each launch after that: Legate refuses arguments of a mebibyte."""


@task(variants=(VariantCode.CPU, VariantCode.OMP, VariantCode.GPU))
def _tell(ctx: TaskContext, out: OutputStore, message: bytes) -> None:
    """Write down what this rank was given; scalar arguments are each rank's own."""
    row = np.frombuffer(message, np.uint8)[None]
    if ctx.get_variant_kind() == VariantCode.GPU:
        from lazyshards.engines.staging import to_device

        to_device(row, out)
    else:
        np.asarray(out)[...] = row


@functools.cache
def _board(count: int, width: int) -> tuple[Any, Any]:
    """Return where messages are written, and its partition, a row for each: made anew it takes twice as long."""
    store = get_legate_runtime().create_store(legate_types.uint8, (count, width))
    return store, store.partition_by_tiling((1, width))


# At the end of the process the boards must be gone before Legate is.
get_legate_runtime().add_shutdown_callback(_board.cache_clear)


def exchange(message: bytes, width: int) -> list[bytes]:
    """Return what every rank gave, by rank. Every rank must call it, in the same place of the program.

    Parameters
    ----------
    message : bytes
        What this rank gives; what goes beyond ``width`` bytes is cut off.
    width : int
        The same on every rank.
    """
    told = _carry(message[:width], _started.node_count, width)
    assert len(told) == _started.node_count, f"the points ran on ranks {sorted(told)} of {_started.node_count} only"
    return [told[rank] for rank in range(_started.node_count)]


def exchange_all(message: bytes) -> list[bytes]:
    """Return all that every rank gave, by rank. Every rank must call it, in the same place of the program.

    Parameters
    ----------
    message : bytes
        What this rank gives, of any length.
    """
    length_nbytes = 8
    length = len(message).to_bytes(length_nbytes, "little")
    first = exchange(length + message[:_SHORT_NBYTES], length_nbytes + _SHORT_NBYTES)
    lengths = [int.from_bytes(told[:length_nbytes], "little") for told in first]
    pieces = [[told[length_nbytes:]] for told in first]
    for start in range(_SHORT_NBYTES, max(lengths), _PIECE_NBYTES):
        for told, piece in zip(pieces, exchange(message[start : start + _PIECE_NBYTES], _PIECE_NBYTES), strict=True):
            told.append(piece)
    return [b"".join(told) for told in pieces]


def broadcast(message: bytes) -> bytes:
    """Return what rank 0 gave. Every rank must call it, in the same place of the program.

    Parameters
    ----------
    message : bytes
        Of any length; that of other ranks is not looked at.
    """
    length_nbytes = 8
    length = len(message).to_bytes(length_nbytes, "little")
    first = _from_first(length + message[:_SHORT_NBYTES], length_nbytes + _SHORT_NBYTES)
    total = int.from_bytes(first[:length_nbytes], "little")
    starts = range(_SHORT_NBYTES, total, _PIECE_NBYTES)
    rest = [_from_first(message[start : start + _PIECE_NBYTES], _PIECE_NBYTES) for start in starts]
    return b"".join([first[length_nbytes:], *rest])


def _from_first(message: bytes, width: int) -> bytes:
    told = _carry(message[:width], 1, width)
    assert list(told) == [0], f"the one point ran on rank {list(told)}, expected rank 0"
    return told[0]


def _carry(message: bytes, count: int, width: int) -> dict[int, bytes]:
    """Launch so many points, and return what the ranks gave on which they ran, by rank."""
    head = (_started.node_id + 1).to_bytes(4, sys.byteorder) + len(message).to_bytes(4, sys.byteorder)
    store, rows = _board(count, _HEAD_NBYTES + width)
    launch: Any = get_legate_runtime().create_manual_task(_tell.library, _tell.task_id, (count,))
    launch.add_output(rows)
    launch.add_scalar_arg(
        (head + message).ljust(_HEAD_NBYTES + width, b"\0"), legate_types.binary_type(len(head) + width)
    )
    with collector_off():
        launch.execute()
        table = np.array(store.get_physical_store())
    told = {}
    for row in table:
        number, length = row[:_HEAD_NBYTES].view(np.uint32).tolist()
        told[number - 1] = bytes(row[_HEAD_NBYTES : _HEAD_NBYTES + length])
    return told
