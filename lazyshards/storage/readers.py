"""One ranged read of a remote file, in the way that suits its file system."""

import re
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from fsspec.caching import BaseCache
from fsspec.spec import AbstractBufferedFile

from lazyshards.storage.base import Stamp
from lazyshards.storage.mounts import Mount, stamp_of
from lazyshards.storage.patience import Patience

__all__ = [
    "MOST_WHOLE_NBYTES",
    "AsyncReader",
    "BadReplyError",
    "Reply",
    "ShortReplyError",
    "async_reader",
    "host_of",
    "http_stamp",
    "parse_content_range",
    "read_blocking",
    "unseen_nbytes",
]

MOST_WHOLE_NBYTES = 256 << 20
"""Bytes of the longest file that is read whole because its server serves no ranges."""


def host_of(url: str) -> str:
    """Return the host, and port, of a URL."""
    return url.partition("://")[2].partition("/")[0]


class Reply(NamedTuple):
    """What a ranged read gave."""

    data: memoryview
    """The bytes; fewer than asked for only where the file ends. Empty if they went straight to where they belong."""
    nbytes: int
    """How many came."""
    stamp: Stamp | None
    """Stamp of the file that they came from, if the answer told."""


class ShortReplyError(ConnectionError):
    """Fewer bytes came than the server has: a passing fault."""


class BadReplyError(OSError):
    """An answer that cannot be used, and would be no better the next time."""


AsyncReader: TypeAlias = Callable[[Mount, str, int, int, "memoryview | None", Patience], Awaitable[Reply]]
"""Read bytes [start, stop) of a path, into the buffer if there is one; what comes is noted."""


def async_reader(mount: Mount) -> AsyncReader:
    """Return the way to read that suits an asynchronous file system.

    S3 and HTTP are asked in person, because their answers tell the size and the entity tag of the very object that the
    bytes are from, which fsspec's common call keeps to itself: no further request is needed to see a change.
    """
    protocol = mount.fs.protocol
    protocols = {protocol} if isinstance(protocol, str) else set(protocol)
    if "s3" in protocols and hasattr(mount.fs, "_call_s3") and hasattr(mount.fs, "split_path"):
        return _read_s3
    if "http" in protocols and hasattr(mount.fs, "set_session") and hasattr(mount.fs, "encode_url"):
        return _read_http
    return _read_async


def unseen_nbytes(reader: AsyncReader, nbytes: int) -> int:
    """Return how many bytes of an answer come without being noted."""
    return nbytes if reader is _read_async else 0


async def _read_s3(
    mount: Mount, path: str, start: int, stop: int, into: memoryview | None, patience: Patience
) -> Reply:
    fs = mount.fs
    bucket, key, version = fs.split_path(path)
    named = {"VersionId": version} if version else {}
    try:
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **named)  # noqa: SLF001  # fsspec's own interface
    except OSError as exc:
        if not _is_past_end(exc):
            raise
        stamp = stamp_of(await fs._info(path, refresh=True))  # noqa: SLF001  # fsspec's own interface
        return Reply(memoryview(b""), 0, stamp)
    body = answer["Body"]
    try:
        size = int(str(answer.get("ContentRange", "")).rpartition("/")[2] or -1)
        stamp = stamp_of({"size": size, "ETag": answer.get("ETag"), "LastModified": answer.get("LastModified")})
        expected = max(0, min(stop, size) - start)
        if size < 0:
            raise BadReplyError("the server answered a ranged request with the whole file")
        return await _receive(getattr(body, "content", body), start, expected, into, stamp, patience)
    finally:
        body.close()


def _is_past_end(exc: BaseException) -> bool:
    response = getattr(exc.__cause__, "response", None) or {}
    return bool(response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416)


async def _receive(
    content: Any, start: int, expected: int, into: memoryview | None, stamp: Stamp, patience: Patience
) -> Reply:
    """Read a body of a known length."""
    if into is not None and expected == len(into) and hasattr(content, "readany"):
        done = 0
        while chunk := await content.readany():
            patience.note(len(chunk))
            if done + len(chunk) > expected:
                raise BadReplyError(f"more than {expected:,} bytes came from byte {start:,} on")
            into[done : done + len(chunk)] = chunk
            done += len(chunk)
        if done < expected:
            raise ShortReplyError(f"{done:,} of {expected:,} bytes came from byte {start:,} on")
        return Reply(memoryview(b""), done, stamp)
    data = bytearray()
    while chunk := await (content.readany() if hasattr(content, "readany") else content.read()):
        patience.note(len(chunk))
        data += chunk
    if len(data) < expected:
        raise ShortReplyError(f"{len(data):,} of {expected:,} bytes came from byte {start:,} on")
    if len(data) > expected:
        raise BadReplyError(f"{len(data):,} bytes came where {expected:,} were asked for, from byte {start:,} on")
    return Reply(memoryview(data), len(data), stamp)


async def _read_http(
    mount: Mount, url: str, start: int, stop: int, into: memoryview | None, patience: Patience
) -> Reply:
    fs = mount.fs
    host = host_of(url)
    session = await fs.set_session()
    options = dict(fs.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    if "timeout" not in options and "timeout" not in getattr(fs, "client_kwargs", {}):
        options["timeout"] = _http_timeout()
    headers["Range"] = f"bytes={start}-{stop - 1}"  # even of a host that ignored one: it may not always do so
    async with session.get(fs.encode_url(url), headers=headers, **options) as answer:
        etag, modified = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
        if answer.status == 416:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if not total.isdecimal():
                raise BadReplyError("the server refused the range (416) and did not tell the size of the file")
            return Reply(memoryview(b""), 0, http_stamp(int(total), etag, modified))
        if answer.status in {404, 410}:
            raise FileNotFoundError(f"the server answered {answer.status} {answer.reason}")
        if answer.status in {401, 403}:
            raise PermissionError(f"the server answered {answer.status} {answer.reason}")
        answer.raise_for_status()
        if answer.headers.get("Content-Encoding", "identity") not in {"", "identity"}:
            raise BadReplyError(
                f"the server sent the file as {answer.headers['Content-Encoding']}, which was not asked for"
            )
        if answer.status == 206:
            mount.without_ranges.discard(host)
            told = answer.headers.get("Content-Range", "")
            first, last, size = parse_content_range(told)
            if first != start or not start <= last < stop:
                raise BadReplyError(f"the server answered {told[:99]!r} where {start}-{stop - 1} were asked for")
            if last + 1 < min(stop, size):
                raise ShortReplyError(f"the server answered {told[:99]!r} where {start}-{stop - 1} were asked for")
            stamp = http_stamp(size, etag, modified)
            return await _receive(answer.content, start, last + 1 - start, into, stamp, patience)
        if answer.status != 200:
            raise BadReplyError(f"the server answered {answer.status} {answer.reason}")
        mount.without_ranges.add(host)
        return await _from_whole(answer, start, stop, etag, modified, patience)


async def _from_whole(answer: Any, start: int, stop: int, etag: str, modified: str, patience: Patience) -> Reply:
    """Take a range from an answer that holds the whole file."""
    length = answer.headers.get("Content-Length", "")
    if length.isdecimal():
        size = int(length)
        until = min(stop, size)
        if until > MOST_WHOLE_NBYTES:
            raise BadReplyError(
                f"the server serves no ranges, and the file of {size:,} bytes is too long to be read whole for each "
                'request; read it through a local cache: put "simplecache::" before its URL'
            )
        data = bytearray()
        # Up to the end of the range: what follows is left in the connection, which is closed.
        while len(data) < until and (chunk := await answer.content.readany()):
            patience.note(len(chunk))
            data += chunk
        if len(data) < until:
            raise ShortReplyError(f"{len(data):,} of {until:,} bytes came")
        if until < size:
            answer.close()
    else:
        data = bytearray()
        while chunk := await answer.content.readany():
            patience.note(len(chunk))
            data += chunk
            if len(data) > MOST_WHOLE_NBYTES:
                raise BadReplyError("the server serves no ranges and does not tell the file's size")
        size = len(data)
    wanted = memoryview(data)[start:stop]
    return Reply(wanted, len(wanted), http_stamp(size, etag, modified))


_CONTENT_RANGE = re.compile(r"bytes[ =]*(\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII | re.IGNORECASE)


def parse_content_range(text: str) -> tuple[int, int, int]:
    """Return the first and the last byte of an answer and the size of the file; -1 of what is not told."""
    found = _CONTENT_RANGE.fullmatch(text.strip())
    if found is None:
        return -1, -1, -1
    first, last, size = found.groups()
    return int(first), int(last), -1 if size == "*" else int(size)


def http_stamp(size: int, etag: str, modified: str) -> Stamp:
    """Return the stamp that the headers of an answer tell: by the entity tag, else by the time."""
    if etag:
        return Stamp(size, 0, 0, etag)
    try:
        return Stamp(size, int(parsedate_to_datetime(modified).timestamp()) * 10**9)
    except ValueError:
        return Stamp(size)


def _http_timeout() -> object:
    """Return limits on silence, and none on the time that a long body takes."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=30)


async def _read_async(
    mount: Mount, path: str, start: int, stop: int, into: memoryview | None, patience: Patience
) -> Reply:
    """Read by fsspec's common call, which tells nothing of the file that the bytes are from."""
    fs = mount.fs
    data = await fs._cat_file(path, start=start, end=stop)  # noqa: SLF001  # fsspec's own interface
    if len(data) > stop - start:
        raise BadReplyError(f"{len(data):,} bytes came where {stop - start:,} were asked for, from byte {start:,} on")
    if len(data) == stop - start:
        return Reply(memoryview(data), len(data), None)
    stamp = stamp_of(await fs._info(path), mount.inside)  # noqa: SLF001  # fsspec's own interface
    _check_end(len(data), start, stop, stamp.size)
    return Reply(memoryview(data), len(data), stamp)


def _check_end(count: int, start: int, stop: int, size: int) -> None:
    """Raise ShortReplyError unless the file ends where the bytes did."""
    if size >= 0 and start + count < min(stop, size):
        raise ShortReplyError(f"{count:,} of {stop - start:,} bytes came from byte {start:,} on")


def read_blocking(mount: Mount, path: str, start: int, stop: int, into: memoryview | None) -> Reply:
    """Read through a file object, the one thing that every fsspec file system has."""
    out = memoryview(bytearray(stop - start)) if into is None else into
    file: BinaryIO
    with mount.fs.open(path, "rb") as file:
        if isinstance(file, AbstractBufferedFile):
            # Its own cache would read 5 MiB ahead for each range.
            file.cache = BaseCache(file.blocksize, file._fetch_range, file.size)  # noqa: SLF001  # fsspec's own interface
        file.seek(start)
        count = _read_full(file, out)
    if count == len(out):
        return Reply(out if into is None else memoryview(b""), count, None)
    stamp = stamp_of(mount.fs.info(path), mount.inside)
    _check_end(count, start, stop, stamp.size)
    return Reply(out[:count], count, stamp)


def _read_full(file: BinaryIO, out: memoryview) -> int:
    """Read until the buffer is full or the file ends."""
    readinto = getattr(file, "readinto", None)
    count = 0
    while count < len(out):
        if readinto is not None:
            more = readinto(out[count:])
        else:
            data = file.read(len(out) - count)
            more = len(data)
            out[count : count + more] = data
        if not more:
            break
        count += more
    return count
