"""From the bytes that are wanted to the requests that are sent: neighbours merged, long ones split."""

from collections.abc import Iterable
from typing import NamedTuple

from lazyshards.storage.base import Part, Stamp

__all__ = ["Piece", "Request", "coalesce"]


class Piece(NamedTuple):
    """Where some bytes of a request go."""

    start: int
    """First byte, counted from the start of the request."""
    out: memoryview
    """Where they go."""


class Request(NamedTuple):
    """One ranged read of a file."""

    path: str
    """Path of the file."""
    stamp: Stamp
    """Stamp that the file had when it was opened."""
    start: int
    """First byte."""
    stop: int
    """End, not included."""
    pieces: tuple[Piece, ...]
    """Where the bytes go, ascending; they may leave gaps, and may overlap."""

    def scatter(self, data: bytes | memoryview) -> None:
        """Copy the bytes of the request, or as many as came, to where they go."""
        view = memoryview(data)
        for start, out in self.pieces:
            came = view[start : start + len(out)]
            out[: len(came)] = came


def coalesce(parts: Iterable[Part], gap_nbytes: int, most_nbytes: int) -> list[Request]:
    """Return requests that cover exactly the parts, and gaps of at most ``gap_nbytes`` between them.

    Parameters
    ----------
    parts : iterable of Part
        In any order; they may touch, overlap, and be empty.
    gap_nbytes : int
        Unwanted bytes between two wanted ranges that are cheaper to read than to skip.
    most_nbytes : int
        Bytes of the longest request. A longer range is split, so that its pieces come concurrently.
    """
    files: dict[tuple[str, Stamp], list[tuple[int, memoryview]]] = {}
    for path, stamp, offset, out in parts:
        if len(out):
            files.setdefault((path, stamp), []).append((offset, out))
    requests = []
    for (path, stamp), wanted in files.items():
        wanted.sort(key=_offset)
        start = stop = 0
        pieces: list[Piece] = []
        for offset, out in wanted:
            done = 0
            while done < len(out):
                at = offset + done
                room = start + most_nbytes - at if pieces and start <= at <= stop + gap_nbytes else 0
                if room <= 0:
                    if pieces:
                        requests.append(Request(path, stamp, start, stop, tuple(pieces)))
                    pieces, start, stop, room = [], at, at, most_nbytes
                piece = out[done : done + room]
                pieces.append(Piece(at - start, piece))
                done += len(piece)
                stop = max(stop, offset + done)
        requests.append(Request(path, stamp, start, stop, tuple(pieces)))
    return requests


def _offset(wanted: tuple[int, memoryview]) -> int:
    return wanted[0]
