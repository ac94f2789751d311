"""Servers on loopback for the tests of remote storage: HTTP with faults on demand, and S3 that counts."""

import contextlib
import email.utils
import io
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Seen(NamedTuple):
    """One request that a server got."""

    method: str
    path: str
    range: str
    """Value of the Range header; empty if there was none."""
    authorization: str = ""
    """Value of that header."""
    is_signed_url: bool = False
    """Whether the signature is in the URL."""
    secrets: str = ""
    """Values of the headers X-Key and Cookie."""


@dataclass
class RangeServer:
    """An HTTP/1.1 server of byte strings, which serves ranges and fails as it is told.

    ``fault(seen, number)`` is asked before each answer, and returns None, an HTTP status, or one of ``"reset"`` (the
    connection breaks after half the body), ``"short"`` (half the body, and then the end), ``"close"`` (no answer at
    all), ``"slow"`` (the first byte comes late), ``"drip"`` (a byte now and then),
    ``"coded"`` (as many other bytes, said to be compressed for the way), ``"less"`` (the range but for ten bytes),
    ``"junk"`` (what is no answer at all)
    and ``"whole"`` (the range is ignored).
    """

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    """Whether ranges are served."""
    lengths: bool = True
    """Whether the length of a body is told."""
    tags: bool = True
    """Whether entity tags are sent."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Path -> path that a client is sent on to."""
    fault: Callable[[Seen, int], object] = lambda seen, number: None
    modified: float = 1_700_000_000.0
    seen: list[Seen] = field(default_factory=list)
    sent_nbytes: int = 0
    most_at_a_time: int = 0

    def __enter__(self):
        self._lock = threading.Lock()
        self._now = 0
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = _Quiet(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self):
        """Start counting anew."""
        with self._lock:
            self.seen.clear()
            self.sent_nbytes = 0
            self.most_at_a_time = 0

    def hang_up(self):
        """Close all connections that clients have left open."""
        for connection in list(self._server.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def gets(self):
        """The GET requests seen."""
        return [seen for seen in self.seen if seen.method == "GET"]

    @contextlib.contextmanager
    def answering(self, seen):
        """Count a request while it is answered; give its fault."""
        with self._lock:
            number = len(self.seen)
            self.seen.append(seen)
            self._now += 1
            self.most_at_a_time = max(self.most_at_a_time, self._now)
        try:
            yield self.fault(seen, number)
        finally:
            with self._lock:
                self._now -= 1


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *given):
        self.open = set()
        super().__init__(*given)

    def process_request(self, request, client_address):
        """Note a connection, and answer what comes over it."""
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        """Forget a connection, and close it."""
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """Say nothing of connections that a client, or a fault, has broken."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: RangeServer

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def log_message(self, format, *args):  # the name it has in the base class
        pass

    def _answer(self, *, body):
        owner = self.owner
        path = self.path.partition("?")[0]
        secrets = self.headers.get("X-Key", "") + self.headers.get("Cookie", "")
        login = self.headers.get("Authorization", "")
        seen = Seen(self.command, self.path, self.headers.get("Range", ""), login, secrets=secrets)
        with contextlib.suppress(ConnectionError), owner.answering(seen) as fault:
            if fault == "close":
                self._break()
            elif isinstance(fault, int):
                self._plain(fault, b"no luck")
            elif path in owner.redirects:
                self._plain(302, b"", Location=owner.redirects[path])
            elif path.endswith("/"):
                self._page(path, body=body)
            elif path not in owner.files and any(name.startswith(f"{path}/") for name in owner.files):
                self._plain(301, b"", Location=f"{path}/")
            elif path not in owner.files:
                self._plain(404, b"")
            else:
                self._file(owner.files[path], fault, body=body)

    def _plain(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _page(self, path, *, body):
        names = sorted({name[len(path) :].partition("/")[0] for name in self.owner.files if name.startswith(path)})
        if not names:
            self._plain(404, b"")
            return
        text = '<a href="?C=N;O=D">Name</a><a href="../">up</a>' + "".join(f'<a href="{n}">{n}</a>' for n in names)
        page = f"<html><body>{text}</body></html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if body:
            self.wfile.write(page)

    def _file(self, data, fault, *, body):
        owner = self.owner
        asked = self.headers.get("Range") if owner.ranges and fault != "whole" else None
        start, stop = 0, len(data)
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(data))
        if start >= len(data) and asked:
            self._plain(416, b"", **{"Content-Range": f"bytes */{len(data)}"})
            return
        if fault == "junk":
            self.wfile.write(b"no answer at all\r\n\r\n")
            self.close_connection = True
            return
        stop -= 10 * (fault == "less")
        chunk = memoryview(data)[start:stop]
        if fault == "slow":
            threading.Event().wait(0.3)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        if owner.tags:
            self.send_header("ETag", f'"{hash(data):x}"')  # Python remembers the hash of a byte string
        self.send_header("Last-Modified", email.utils.formatdate(owner.modified, usegmt=True))
        if fault == "coded":
            chunk = memoryview(bytes(chunk)[::-1])
            self.send_header("Transfer-Encoding", "gzip, chunked")
            self.close_connection = True
        elif owner.lengths:
            self.send_header("Content-Length", str(len(chunk)))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        if not body:
            return
        if fault in {"reset", "short"}:
            chunk = chunk[: len(chunk) // 2]
        if fault == "drip":
            for i in range(len(chunk)):
                self.wfile.write(chunk[i : i + 1])
                threading.Event().wait(0.05)
        with owner._lock:
            owner.sent_nbytes += len(chunk)
        self.wfile.write(chunk)
        if fault in {"reset", "short"}:
            self._break(reset=fault == "reset")

    def _break(self, *, reset=False):
        """Close the connection: with a reset, or as if all were well."""
        self.close_connection = True
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_WR)


class S3Server:
    """moto's S3 on loopback, behind a counter that can fail requests.

    ``fault(seen, number)`` returns None, an HTTP status, or ``"short"``. ``late(seen, number)`` is called when a
    request has had its effect, before it is answered.
    """

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_request(self, *args):
                pass

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=Quiet)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.seen = []
        self.fault = self.late = lambda seen, number: None
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.options = {
            "key": "AKIDPLANTED",
            "secret": "planted-secret",
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
        }

    def __enter__(self):
        import boto3

        self._thread.start()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="AKIDPLANTED",
            aws_secret_access_key="planted-secret",
        )
        return self

    def __exit__(self, *_):
        self.client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, bucket, files):
        """Make a bucket with these objects."""
        with contextlib.suppress(self.client.exceptions.BucketAlreadyOwnedByYou):
            self.client.create_bucket(Bucket=bucket)
        for key, data in files.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def forget(self):
        """Start counting anew."""
        with self._lock:
            self.seen.clear()

    def _serve(self, environ, start_response):
        signed = "X-Amz-Signature" in environ.get("QUERY_STRING", "")
        seen = Seen(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE", ""), is_signed_url=signed
        )
        with self._lock:
            number = len(self.seen)
            self.seen.append(seen)
        fault = self.fault(seen, number)
        if isinstance(fault, int):
            code = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}.get(fault, "Other")
            body = f"<Error><Code>{code}</Code><Message>told to fail</Message></Error>".encode()
            start_response(f"{fault} {code}", [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
            return [body]
        answer = self._app(environ, start_response)
        self.late(seen, number)
        if fault == "short":
            body = b"".join(answer)
            return io.BytesIO(body[: len(body) // 2])
        return answer
