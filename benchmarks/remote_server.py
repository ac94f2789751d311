"""Servers on loopback, each in a process of its own: files over HTTP and as objects of S3, and moto's S3.

``python -m benchmarks.remote_server FOLDER`` serves the files below a folder, as fast as the kernel copies them: what a
client takes is then the client's own. Each request waits as long before its answer as ``?latency`` last said.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from types import TracebackType
    from wsgiref.types import StartResponse, WSGIEnvironment

__all__ = ["KEY", "REGION", "SECRET", "Server"]

KEY, SECRET, REGION = "AKIDBENCHMARK", "benchmark-secret", "us-east-1"
_LATENCY = "/-/latency/"
"""Path whose last part sets the milliseconds that each request waits."""


@dataclass(slots=True)
class _Settings:
    latency: float = 0.0
    """Seconds."""


# ---------------------------------------------------------------------------------------------- in its own process


def _serve_files(folder: Path) -> None:
    """Serve the files below a folder until the process ends; print the port first."""
    settings = _Settings()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer_all, args=(connection, folder, settings), daemon=True).start()


def _answer_all(connection: socket.socket, folder: Path, settings: _Settings) -> None:
    """Answer the requests of one connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waiting = b""
    try:
        while True:
            while b"\r\n\r\n" not in waiting:
                more = connection.recv(65536)
                if not more:
                    return
                waiting += more
            head, _, waiting = waiting.partition(b"\r\n\r\n")
            _answer(connection, head.decode("latin-1"), folder, settings)
    except ConnectionError:
        pass
    finally:
        connection.close()


def _answer(connection: socket.socket, head: str, folder: Path, settings: _Settings) -> None:
    method, target, _ = head.split(" ", 2)
    url = urlsplit(target)
    path = unquote(url.path)
    if path.startswith(_LATENCY):
        settings.latency = float(path.removeprefix(_LATENCY)) / 1e3
        _send(connection, "200 OK", b"")
        return
    time.sleep(settings.latency)
    query = parse_qs(url.query, keep_blank_values=True)
    place = folder / path.strip("/")
    if "list-type" in query:
        _send(connection, "200 OK", _list_objects(place, query.get("prefix", [""])[0]), "application/xml")
    elif place.is_dir() and path.endswith("/"):
        links = "".join(f'<a href="{name}">{name}</a>\n' for name in sorted(os.listdir(place)))
        _send(connection, "200 OK", f"<html><body>{links}</body></html>".encode(), "text/html")
    elif not place.is_file():
        body = b"<Error><Code>NoSuchKey</Code></Error>" if method == "GET" else b""
        _send(connection, "404 Not Found", body, "application/xml")
    else:
        _send_file(connection, place, head, body=method == "GET")


def _send_file(connection: socket.socket, place: Path, head: str, *, body: bool) -> None:
    with place.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        asked = re.search(r"(?im)^range: *bytes=(\d+)-(\d*)", head)
        start, stop = (0, size) if asked is None else (int(asked[1]), min(size, int(asked[2] or size - 1) + 1))
        status = "200 OK" if asked is None else "206 Partial Content"
        lines = [f"Content-Length: {stop - start}", f'ETag: "{size:032x}"', "Accept-Ranges: bytes"]
        lines += ["Last-Modified: Tue, 02 Jan 2024 00:00:00 GMT", "Content-Type: application/octet-stream"]
        lines += [f"Content-Range: bytes {start}-{stop - 1}/{size}"] * (asked is not None)
        connection.sendall("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())
        while body and start < stop:
            start += os.sendfile(connection.fileno(), file.fileno(), start, stop - start)


def _send(connection: socket.socket, status: str, body: bytes, kind: str = "text/plain") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def _list_objects(bucket: Path, prefix: str) -> bytes:
    """Return the answer to ListObjectsV2 of one directory."""
    folder = bucket / prefix if prefix.endswith("/") else (bucket / prefix).parent
    found = sorted(path for path in folder.glob("*") if path.is_file())
    keys = [(str(path.relative_to(bucket)), path.stat().st_size) for path in found]
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-02T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{size:032x}&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for key, size in keys
        if key.startswith(prefix)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket.name)}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
    ).encode()


def _serve_moto(folder: Path) -> None:
    """Serve moto's S3, holding the files below a folder in a bucket of each directory's name."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    settings = _Settings()
    application = DomainDispatcherApplication(create_backend_app)

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: object) -> None:
            """Say nothing."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> object:
        path = environ["PATH_INFO"]
        if path.startswith(_LATENCY):
            settings.latency = float(path.removeprefix(_LATENCY)) / 1e3
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        time.sleep(settings.latency)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": REGION}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.server_port}", **names)
    for bucket in folder.iterdir():
        client.create_bucket(Bucket=bucket.name)
        for path in sorted(bucket.rglob("*")):
            if path.is_file():
                client.put_object(Bucket=bucket.name, Key=str(path.relative_to(bucket)), Body=path.read_bytes())
    print(server.server_port, flush=True)
    threading.Event().wait()


# ---------------------------------------------------------------------------------------------- who uses it


class Server:
    """A server process that serves the files below a folder, the first directory of each path being the bucket.

    Parameters
    ----------
    folder : Path
    moto : bool
        Whether moto serves them, with what it takes to check and to copy; else this module's own, by sendfile.
    """

    def __init__(self, folder: Path, *, moto: bool = False) -> None:
        command = [sys.executable, "-m", "benchmarks.remote_server", str(folder), *["--moto"] * moto]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline()
        if not port:
            self._process.wait()
            raise RuntimeError("the server did not start")
        self.port = int(port)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def delay(self, milliseconds: float) -> None:
        """Let each request wait before it is answered."""
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", f"{_LATENCY}{milliseconds}")
        connection.getresponse().read()
        connection.close()


if __name__ == "__main__":
    (_serve_moto if "--moto" in sys.argv else _serve_files)(Path(sys.argv[1]))
