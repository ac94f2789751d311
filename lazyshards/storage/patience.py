"""How long an answer is waited for: so long without a byte, and so long at less than a trickle."""

import asyncio
import io
import math
import socket
import time
from http.client import HTTPConnection, HTTPResponse
from typing import Any, cast

__all__ = ["Patience", "patient"]

_LEAST_RATE = 4 << 10
"""Bytes a second that an answer brings at least, so that it is let go on after the deadline."""
_UNSEEN_RATE = 32 << 10
"""The same where only the end of it is seen."""


class Patience:
    """The time that one request has, with all its tries.

    Parameters
    ----------
    deadline_seconds : float
        Time from now until the answer is there; it begins anew whenever so many bytes came that the rest is worth it.
    silence_seconds : float
        Longest time without a byte.
    unseen_nbytes : int
        Bytes that come without being seen: they add to the deadline.
    """

    def __init__(self, deadline_seconds: float, silence_seconds: float = math.inf, unseen_nbytes: int = 0) -> None:
        self._deadline = deadline_seconds + unseen_nbytes / _UNSEEN_RATE
        self._silence = silence_seconds
        self._end = time.monotonic() + self._deadline
        self._came = 0
        self.limit: asyncio.Timeout | None = None
        """Ends what waits for it on an event loop."""

    def left(self) -> float:
        """Return the seconds that the next step may take.

        Raises
        ------
        TimeoutError
            If there are none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error()
        return min(self._silence, left)

    def error(self) -> TimeoutError:
        """Return what there is to say when the time is over."""
        came = f"only {self._came:,} bytes" if self._came else "no whole answer"
        return TimeoutError(f"{came} came in {self._deadline:.3g} seconds")

    def note(self, nbytes: int) -> None:
        """Note that bytes came."""
        self._came += nbytes
        if self._came >= _LEAST_RATE * self._deadline:
            self._came = 0
            self._end = time.monotonic() + self._deadline
            if self.limit is not None:
                self.limit.reschedule(asyncio.get_running_loop().time() + self._deadline)


class _Patient(io.RawIOBase):
    """The bytes of a connection, each waited for as long as there is time."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, patience: Patience) -> None:
        self._raw = raw
        self._sock = sock
        self._patience = patience

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int | None:
        seconds = self._patience.left()
        self._sock.settimeout(seconds)
        try:
            count = cast("int | None", self._raw.readinto(out))
        except TimeoutError as exc:
            self._patience.left()
            raise TimeoutError(f"no byte came in {seconds:.3g} seconds") from exc
        self._patience.note(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(HTTPResponse):
    """An answer that is read with patience, head and body."""

    def __init__(self, sock: socket.socket, *args: Any, patience: Patience, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Patient(self.fp.detach(), sock, patience))


def patient(connection: HTTPConnection, patience: Patience) -> None:
    """Let the next answer that comes over a connection be read with patience."""

    def answer(sock: socket.socket, *args: Any, **kwargs: Any) -> _Answer:
        return _Answer(sock, *args, patience=patience, **kwargs)

    connection.response_class = answer  # type: ignore[assignment]  # it is called, and nothing else
