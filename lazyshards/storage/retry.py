"""Which failures pass, how long to wait for that, and when to give up."""

import asyncio
import contextlib
import errno
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from lazyshards.storage.patience import Patience

__all__ = ["PASSING_STATUS", "GaveUpError", "Retry", "again", "again_async", "is_missing", "is_transient", "status_of"]

_T = TypeVar("_T")

_RANDOM = random.Random()  # noqa: S311  # jitter; its own generator, because the user's draws must not depend on it
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
"""Answers of a server that may be others the next time."""
_PASSING_ERRNO = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,  # how s3fs tells "SlowDown"
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EMFILE,  # connections that others have open are closed, or idle, after a while
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.EPIPE,
        errno.ETIMEDOUT,
        getattr(errno, "EREMOTEIO", errno.ETIMEDOUT),  # how s3fs tells "InternalError"
    }
)
_PASSING_NAMES = frozenset(
    {
        # aiohttp
        "ClientConnectionError",
        "ClientConnectorError",
        "ClientOSError",
        "ClientPayloadError",
        "ServerConnectionError",
        "ServerDisconnectedError",
        "ServerTimeoutError",
        # botocore, urllib3, requests, http.client, fsspec
        "ConnectionClosedError",
        "ConnectTimeoutError",
        "EndpointConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProtocolError",
        "ReadTimeoutError",
        "ResponseParserError",
        "ResponseStreamingError",
        "RemoteDisconnected",
    }
)
"""Names of error classes and not the classes: the libraries that they belong to may not be there."""
_PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long a failed request is tried again: exponential backoff with jitter, within a deadline."""

    tries: int = 8
    """Times that a request is sent at most."""
    first_seconds: float = 0.1
    """Longest first pause; each pause may be twice as long as the one before."""
    most_seconds: float = 5.0
    """Longest pause."""
    deadline_seconds: float = 60.0
    """Time after which nothing is sent again, and a read that is under way is ended unless its bytes come."""

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each further try, half to all of the longest pause, at random."""
        longest = self.first_seconds
        for _ in range(self.tries - 1):
            yield longest * _RANDOM.uniform(0.5, 1.0)
            longest = min(2 * longest, self.most_seconds)


def status_of(exc: BaseException) -> int | None:
    """Return the HTTP status that an error, or the error that it came from, tells of."""
    seen: BaseException | None = exc
    for _ in range(4):
        if seen is None:
            return None
        status = getattr(seen, "status", None)
        response = getattr(seen, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        elif response is not None and status is None:  # requests
            status = getattr(response, "status_code", None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
        seen = seen.__cause__
    return None


def is_missing(exc: BaseException) -> bool:
    """Return whether an error says that there is no such file.

    fsspec's HTTP file system raises FileNotFoundError for whatever goes wrong; the cause tells.
    """
    if not isinstance(exc, FileNotFoundError):
        return False
    status = status_of(exc)
    if status is not None:
        return status in {404, 410}
    return exc.__cause__ is None or not is_transient(exc.__cause__)


def is_transient(exc: BaseException) -> bool:
    """Return whether the same request may succeed if it is sent again."""
    status = status_of(exc)
    if status is not None:
        return status in PASSING_STATUS
    if isinstance(exc, FileNotFoundError) and exc.__cause__ is not None:
        return is_transient(exc.__cause__)
    if isinstance(exc, _PERMANENT):
        return False
    if isinstance(exc, ConnectionError | TimeoutError | socket.gaierror):  # the last: no name server answered, say
        return True
    if any(kind.__name__ in _PASSING_NAMES for kind in type(exc).__mro__):
        return True
    return isinstance(exc, OSError) and exc.errno in _PASSING_ERRNO


class GaveUpError(Exception):
    """What was met in the end, and what had been tried."""

    def __init__(self, cause: Exception, tries: int, seconds: float) -> None:
        super().__init__(cause, tries, seconds)
        self.cause = cause
        self.tries = tries
        self.seconds = seconds


class _Attempts:
    """Counts the tries of one call."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._pauses = retry.pauses()
        self._start = time.monotonic()
        self._tries = 0

    def pause_after(self, exc: Exception) -> float:
        """Return the seconds to wait before the next try, or raise GaveUpError."""
        self._tries += 1
        pause = next(self._pauses, None) if is_transient(exc) else None
        spent = time.monotonic() - self._start
        if pause is None or spent + pause > self._retry.deadline_seconds:
            raise GaveUpError(exc, self._tries, spent) from exc
        return pause


def again(
    call: Callable[[], _T],
    retry: Retry,
    lock: AbstractContextManager[object] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> _T:
    """Make a call, again while it fails in a way that may pass; the lock is held while it runs, not between.

    Raises
    ------
    GaveUpError
    """
    attempts = _Attempts(retry)
    while True:
        try:
            with lock or contextlib.nullcontext():
                return call()
        except Exception as exc:  # noqa: BLE001  # a file system raises anything
            pause = attempts.pause_after(exc)
        sleep(pause)


async def again_async(call: Callable[[], Awaitable[_T]], retry: Retry, patience: Patience | None = None) -> _T:
    """Await a call, again while it fails in a way that may pass, and as long as there is patience.

    Raises
    ------
    GaveUpError
    """
    attempts = _Attempts(retry)
    while True:
        try:
            return await (call() if patience is None else _awaited(call, patience))
        except Exception as exc:  # noqa: BLE001  # a file system raises anything
            pause = attempts.pause_after(exc)
        await asyncio.sleep(pause)


async def _awaited(call: Callable[[], Awaitable[_T]], patience: Patience) -> _T:
    try:
        async with asyncio.timeout(patience.left()) as patience.limit:
            return await call()
    except TimeoutError as exc:
        if patience.limit is not None and patience.limit.expired():
            raise patience.error() from exc
        raise
