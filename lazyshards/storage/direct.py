"""Ranged reads over connections of our own, by the threads that wait for them, straight to where the bytes go.

Less lies between the socket and the destination than in any library: no event loop, and no copy. What is not plain is
left to the file system's own client: other answers than a range, and options that these connections do not know.
"""

import contextlib
import errno
import math
import os
import ssl
import threading
import time
import urllib.request
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from lazyshards.storage.handles import open_together
from lazyshards.storage.mounts import Mount
from lazyshards.storage.patience import Patience, patient
from lazyshards.storage.readers import BadReplyError, Reply, ShortReplyError, http_stamp, parse_content_range
from lazyshards.storage.redirects import is_guard
from lazyshards.storage.retry import PASSING_STATUS, Retry
from lazyshards.storage.signing import Signer

__all__ = [
    "Connections",
    "Interrupt",
    "NotServedError",
    "Route",
    "connections_of",
    "read_direct",
    "read_page",
    "receive",
    "send_request",
]

_SILENCE_SECONDS = 30.0
"""Time without a byte after which an answer is given up."""
_CONNECT_SECONDS = 10.0
_MOST_IDLE = 64
"""Open connections that are kept for the next read."""
_MOST_HOPS = 4
_MOST_PAGE_NBYTES = 64 << 20
_MOST_REFUSALS = 8
"""Calls in a row that may find no plain answer: missing files among them, which say nothing of the server."""
_CLIENT_OPTIONS = frozenset(
    {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "endpoint_url",
        "region_name",
        "use_ssl",
    }
)
"""Options of an S3 client that a signed URL has in it."""
_CONFIG_OPTIONS = frozenset(
    {
        "connect_timeout",
        "max_pool_connections",
        "read_timeout",
        "region_name",
        "retries",
        "s3",
        "signature_version",
        "tcp_keepalive",
        "user_agent",
        "user_agent_extra",
    }
)


class NotServedError(Exception):
    """The answer is none that a plain range has; the file system's own client knows what to do."""


class _StatusError(OSError):
    """The server said that it cannot answer now."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


class Route(NamedTuple):
    """How the bytes of a file are asked for."""

    url: str
    """Signature included."""
    headers: Mapping[str, str]
    """Of every request."""
    made: float
    """Time when it was made, by the monotonic clock."""


@dataclass(eq=False)
class Connections:
    """Open connections of one file system, and the routes of its files."""

    kind: str
    """``"s3"`` or ``"http"``."""
    is_trusted: bool = True
    """Whether the server takes what comes over them; else they are not used again."""
    silence_seconds: float = _SILENCE_SECONDS
    """Time without a byte after which an answer is given up."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[tuple[tuple[str, str], HTTPConnection]] = field(default_factory=list)
    """Scheme and authority, and the connection; used last, last."""
    routes: "OrderedDict[str, Route]" = field(default_factory=OrderedDict)
    """Path -> route, for S3."""
    signers: dict[str, Signer] = field(default_factory=dict)
    """Bucket -> what signs URLs of its objects, for S3."""
    context: ssl.SSLContext | None = None
    """Whose certificates are believed; made when first needed."""
    waited_seconds: float = math.inf
    """How long the beginning of an answer was waited for, the last time."""
    refusals: int = 0
    """Calls of which nothing was served, one after the other."""

    def doubt(self) -> None:
        """Note that nothing of a call was served; signatures are made anew, and after a few times all is left off."""
        self.refusals += 1
        self.is_trusted = self.is_trusted and self.refusals < _MOST_REFUSALS
        with self.lock:
            self.routes.clear()
            self.signers.clear()

    def patience(self, retry: Retry) -> Patience:
        """Return how long one request, with all its tries, is waited for from now on."""
        return Patience(retry.deadline_seconds, self.silence_seconds)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self.idle)

    def take(self, scheme: str, authority: str) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        with self.lock:
            for i in range(len(self.idle) - 1, -1, -1):
                if self.idle[i][0] == (scheme, authority):
                    return self.idle.pop(i)[1], True
            if scheme == "https" and self.context is None:
                bundle = [os.environ.get(name) for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")]
                self.context = ssl.create_default_context(
                    cafile=next(filter(None, bundle if self.kind == "s3" else []), None)
                )
        if scheme == "https":
            return HTTPSConnection(authority, timeout=_CONNECT_SECONDS, context=self.context), False
        return HTTPConnection(authority, timeout=_CONNECT_SECONDS), False

    def take_open(self, scheme: str, authority: str, most: int, *, at_least: int) -> list[HTTPConnection]:
        """Return connections that are open already; none if they are too few."""
        with self.lock:
            places = [i for i, (place, _) in enumerate(self.idle) if place == (scheme, authority)][-most:]
            if len(places) < at_least:
                return []
            return [self.idle.pop(i)[1] for i in reversed(places)]

    def give(self, scheme: str, authority: str, connection: HTTPConnection) -> None:
        """Keep a connection for the next read."""
        with self.lock:
            self.idle.append(((scheme, authority), connection))
            old = self.idle.pop(0)[1] if len(self.idle) > open_together(_MOST_IDLE) else None
        if old is not None:
            old.close()


def _close_all(idle: list[tuple[tuple[str, str], HTTPConnection]]) -> None:
    while idle:
        idle.pop()[1].close()


class Interrupt:
    """Ends all reads of one call at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._busy: set[HTTPConnection] = set()
        self._lock = threading.Lock()

    def enter(self, connection: HTTPConnection) -> None:
        """Note that a connection is read from."""
        with self._lock:
            self._busy.add(connection)
        if self.event.is_set():
            raise ConnectionAbortedError("the read was ended")

    def leave(self, connection: HTTPConnection) -> None:
        """Note that it is not any more."""
        with self._lock:
            self._busy.discard(connection)

    def end(self) -> None:
        """End what is under way, whatever it waits for, and what would begin."""
        self.event.set()
        with self._lock:
            for connection in self._busy:
                sock = connection.sock
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(2)


# What goes this way ----------------------------------------------------------------------------------------------


def connections_of(mount: Mount) -> Connections | None:
    """Return the connections of a file system; None if it must be read by its own client."""
    if mount.direct is None:
        kind = _kind_of(mount.fs)
        silence = float(mount.fs.config_kwargs.get("read_timeout", mount.fs.read_timeout)) if kind == "s3" else None
        mount.direct = Connections(kind, is_trusted=bool(kind), silence_seconds=silence or _SILENCE_SECONDS)
    found: Connections = mount.direct
    return found if found.is_trusted else None


def _kind_of(fs: Any) -> str:
    """Return how a file system is read directly; empty if it has options that only its own client knows."""
    module = type(fs).__module__
    if module == "fsspec.implementations.http":
        plain = set(fs.kwargs) <= {"headers"} and set(fs.client_kwargs) <= {"headers", "trace_configs"}
        plain = plain and all([is_guard(each) for each in fs.client_kwargs.get("trace_configs", ())])
        return "http" if plain and getattr(fs.get_client, "__module__", "") == module else ""
    if module == "s3fs.core":
        plain = set(fs.client_kwargs) <= _CLIENT_OPTIONS and set(fs.config_kwargs) <= _CONFIG_OPTIONS
        plain = plain and not fs.s3_additional_kwargs and not fs.req_kw and not fs.kwargs
        return "s3" if plain and not set(urllib.request.getproxies()) - {"no"} else ""
    return ""


# Reading ---------------------------------------------------------------------------------------------------------


def read_direct(
    connections: Connections,
    route: Route,
    start: int,
    stop: int,
    into: memoryview | None,
    interrupt: Interrupt,
    patience: Patience,
) -> Reply:
    """Read bytes [start, stop), into the buffer if there is one.

    Raises
    ------
    NotServedError
        If the answer is no plain range.
    """
    url = route.url
    headers = _ranged(route, start, stop)
    for _ in range(_MOST_HOPS):
        scheme, authority, *_ = urlsplit(url)
        connection, answer = _ask(connections, url, headers, interrupt, patience)
        try:
            reply = receive(answer, start, stop, into)
        except BaseException:
            connection.close()
            raise
        finally:
            interrupt.leave(connection)
        if reply is not None:
            if answer.will_close:
                connection.close()
            else:
                connections.give(scheme, authority, connection)
            connections.refusals = 0
            return reply
        connection.close()
        try:
            elsewhere = urljoin(url, answer.headers.get("Location", ""))
            new_scheme, new_authority, *_ = urlsplit(elsewhere)
        except ValueError:  # no URL at all
            break
        # A password before the host is its own client's business; here it would get into messages.
        if connections.kind != "http" or new_scheme not in {"http", "https"} or "@" in new_authority:
            break
        if (new_scheme, new_authority) != (scheme, authority):
            headers = {name: headers[name] for name in ("Accept-Encoding", "Range")}
        url = elsewhere
    raise NotServedError


def read_page(connections: Connections, url: str, interrupt: Interrupt, patience: Patience) -> bytes:
    """Return the whole body of a plain answer.

    Raises
    ------
    NotServedError
        If there is none.
    """
    scheme, authority, *_ = urlsplit(url)
    connection, answer = _ask(connections, url, {"Accept-Encoding": "identity"}, interrupt, patience)
    try:
        if answer.status in PASSING_STATUS:
            raise _StatusError(answer.status)
        if answer.status != 200 or answer.getheader("Content-Encoding", "identity") not in {"", "identity"}:
            raise NotServedError
        page = answer.read(_MOST_PAGE_NBYTES)
        if not answer.isclosed():
            raise NotServedError
    except BaseException:
        connection.close()
        raise
    finally:
        interrupt.leave(connection)
    if answer.will_close:
        connection.close()
    else:
        connections.give(scheme, authority, connection)
    return page


def _ask(
    connections: Connections, url: str, headers: Mapping[str, str], interrupt: Interrupt, patience: Patience
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send a request and return the connection, which counts as busy, and the answer's head."""
    scheme, authority, *_ = urlsplit(url)
    while True:
        connection, was_used = connections.take(scheme, authority)
        try:
            if not was_used:
                connection.timeout = min(_CONNECT_SECONDS, patience.left())
                connection.connect()
            interrupt.enter(connection)
            _get(connection, url, headers, patience)
            sent = time.monotonic()
            answer = connection.getresponse()
            connections.waited_seconds = time.monotonic() - sent
        except BaseException as exc:
            connection.close()
            interrupt.leave(connection)
            if isinstance(exc, ssl.SSLError):
                connections.is_trusted = False  # its own client may know other certificates
                raise NotServedError from exc
            if isinstance(exc, OSError) and exc.errno in {errno.EMFILE, errno.ENFILE}:
                raise NotServedError from exc  # its own client has connections that are open and idle
            if isinstance(exc, InvalidURL):  # its text holds the URL, which may hold a signature
                raise NotServedError from None
            # A server ends connections that were idle; that says nothing of this request.
            passes = isinstance(exc, OSError | HTTPException) and not isinstance(exc, TimeoutError)
            if not was_used or not passes or interrupt.event.is_set():
                if isinstance(exc, HTTPException) and not isinstance(exc, OSError):
                    raise NotServedError from exc  # no head that http.client takes
                raise
        else:
            return connection, answer


def send_request(connection: HTTPConnection, route: Route, start: int, stop: int, patience: Patience) -> None:
    """Ask for bytes [start, stop) over a connection that is open."""
    _get(connection, route.url, _ranged(route, start, stop), patience)


def _ranged(route: Route, start: int, stop: int) -> dict[str, str]:
    return {**route.headers, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}


def _get(connection: HTTPConnection, url: str, headers: Mapping[str, str], patience: Patience) -> None:
    _, _, path, query, _ = urlsplit(url)
    connection.sock.settimeout(patience.left())
    connection.request("GET", f"{path or '/'}?{query}" if query else path or "/", headers=dict(headers))
    patient(connection, patience)


def receive(answer: HTTPResponse, start: int, stop: int, into: memoryview | None) -> Reply | None:
    """Read the body of an answer; None if it sends elsewhere.

    Raises
    ------
    NotServedError
        If it is no plain range.
    """
    if answer.status in {301, 302, 303, 307, 308}:
        return None
    if answer.status in PASSING_STATUS:
        raise _StatusError(answer.status)
    get = answer.getheader  # of a field that is there twice, both values
    if answer.status != 206 or get("Content-Encoding", "identity") not in {"", "identity"}:
        raise NotServedError
    if get("Transfer-Encoding", "chunked").lower() != "chunked":  # http.client would give it as it came
        raise NotServedError
    first, last, size = parse_content_range(get("Content-Range", ""))
    expected = last + 1 - start
    if first != start or not min(stop, size) - start == expected > 0 or answer.length not in {None, expected}:
        raise NotServedError
    stamp = http_stamp(size, get("ETag", ""), get("Last-Modified", ""))
    out = into if into is not None and len(into) == expected else memoryview(bytearray(expected))
    done = 0
    while done < expected:
        more = answer.readinto(out[done:])
        if not more:
            raise ShortReplyError(f"{done:,} of {expected:,} bytes came from byte {start:,} on")
        done += more
    if not answer.isclosed() and answer.read(1):
        raise BadReplyError(f"more than {expected:,} bytes came from byte {start:,} on")
    return Reply(memoryview(b"") if out is into else out, expected, stamp)
