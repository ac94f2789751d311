"""Many short answers at once, by one thread: all requests are sent over connections that are open, then all are read.

Answers this short wait in the sockets until they are read, so that threads would gain nothing and cost their start.
Whatever is not a plain answer is left to them, as is what would need connections that are not open.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

from lazyshards.storage.direct import Connections, NotServedError, Route, receive, send_request
from lazyshards.storage.readers import Reply
from lazyshards.storage.retry import Retry

__all__ = ["Asked", "read_volley"]

_MOST_NBYTES = 16 << 10
"""Bytes of an answer that surely waits in a socket."""
_LEAST = 3
_QUICK_SECONDS = 0.003
"""Time until an answer begins below which a second round costs less than threads."""


class Asked(NamedTuple):
    """One request."""

    route: Route
    start: int
    stop: int
    into: memoryview | None
    """Where the bytes go; None for a buffer of their own."""


class _Sent(NamedTuple):
    number: int
    connection: HTTPConnection


def read_volley(connections: Connections, asked: Sequence[Asked], most: int, retry: Retry) -> list[Reply | None]:
    """Return the answers, None for each request that is to be sent in the other way.

    Parameters
    ----------
    connections : Connections
    asked : sequence of Asked
    most : int
        How many are under way together.
    retry : Retry
        Whose deadline each has.
    """
    replies: list[Reply | None] = [None] * len(asked)
    if len(asked) < _LEAST or max([each.stop - each.start for each in asked]) > _MOST_NBYTES:
        return replies
    place = urlsplit(asked[0].route.url)[:2]
    queue = deque([i for i, each in enumerate(asked) if urlsplit(each.route.url)[:2] == place])
    wanted = min(most, len(queue))
    is_quick = connections.waited_seconds < _QUICK_SECONDS
    idle = connections.take_open(*place, wanted, at_least=-(-wanted // 8) if is_quick else wanted)
    waiting: deque[_Sent] = deque()
    is_late = False

    def send(connection: HTTPConnection) -> None:
        if not queue:
            connections.give(*place, connection)
            return
        number = queue.popleft()
        with _closed_if_wrong(connection):
            send_request(
                connection, asked[number].route, asked[number].start, asked[number].stop, connections.patience(retry)
            )
            waiting.append(_Sent(number, connection))

    try:
        while idle:
            send(idle.pop())
        while waiting:
            number, connection = waiting.popleft()
            _, start, stop, into = asked[number]
            if is_late:
                connection.close()
                continue
            with _closed_if_wrong(connection):
                is_late = True  # unless something comes, the others need not be waited for
                answer = connection.getresponse()
                is_late = False
                reply = replies[number] = receive(answer, start, stop, into)
                if reply is None or answer.will_close:
                    connection.close()
                else:
                    send(connection)
    except BaseException:
        for connection in [*idle, *[sent.connection for sent in waiting]]:
            connection.close()
        raise
    return replies


@contextlib.contextmanager
def _closed_if_wrong(connection: HTTPConnection) -> Iterator[None]:
    """Close a connection whose answer is to be had in the other way."""
    try:
        yield
    except (NotServedError, OSError, HTTPException):
        connection.close()
    except BaseException:
        connection.close()
        raise
