"""Anything that fsspec knows, by ranged reads: merged, split, concurrent, and tried again where that may help."""

import asyncio
import contextlib
import errno
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

from lazyshards.errors import ShardReadError
from lazyshards.storage.base import Entry, Head, OnChange, Part, Stamp
from lazyshards.storage.changes import report_change
from lazyshards.storage.handles import open_together
from lazyshards.storage.listing import find_entries
from lazyshards.storage.mounts import Mount, find_mount, parse_name, stamp_of
from lazyshards.storage.patience import Patience
from lazyshards.storage.ranges import Request, coalesce
from lazyshards.storage.readers import MOST_WHOLE_NBYTES, Reply, host_of
from lazyshards.storage.retry import GaveUpError, Retry, again, again_async, is_missing, status_of
from lazyshards.storage.s3_listing import list_directory
from lazyshards.storage.secrets import Vault, mask, secrets_of
from lazyshards.storage.transfers import NOT_READ, Target, run_coroutine, send

__all__ = ["FsspecStorage"]

_T = TypeVar("_T")
_HEADS_AT_A_TIME = 64
"""Small reads under way together: what they cost is the way there and back."""


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """Files of any file system that fsspec knows.

    It holds names and numbers only: live file systems are made by the process that needs them, and kept there.

    Parameters
    ----------
    options : mapping
        For fsspec, as ``fsspec.open`` takes them.
    on_change : {"raise", "warn", "ignore"}
        What to do about a file that changed since it was opened.
    """

    options: Mapping[str, object] = field(default_factory=dict, repr=False)
    on_change: OnChange = "raise"
    gap_nbytes: int = 64 << 10
    window_nbytes: int = 32 << 20
    request_nbytes: int = 8 << 20
    """Bytes of the longest request."""
    concurrency: int = 16
    """Requests under way together, for each call."""
    retry: Retry = field(default_factory=Retry)
    """How failed requests are tried again."""
    vault: Vault = field(default_factory=Vault, repr=False)
    """The secrets that were in URLs."""
    _listed: dict[str, Stamp] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Stamps that the last listing told, until they are asked for: they save a request for each file."""

    _key: str = field(default="", init=False, repr=False, compare=False)
    """What equal options have in common."""

    def __post_init__(self) -> None:
        key = repr(sorted((name, repr(value)) for name, value in self.options.items()))
        object.__setattr__(self, "_key", key)

    def __reduce__(self) -> tuple[Callable[..., "FsspecStorage"], tuple[object, ...]]:
        fields = (self.options, self.on_change, self.gap_nbytes, self.window_nbytes, self.request_nbytes)
        return FsspecStorage, (*fields, self.concurrency, self.retry, self.vault)

    def __hash__(self) -> int:
        return hash((self.on_change, self.gap_nbytes, self.window_nbytes))

    def find(self, path: str) -> tuple[str, list[Entry]]:
        """Return what ``path`` is, and the entries found there."""
        mount, _ = self._locate(path, fresh=True)

        def ask(method: str, *args: Any, **kwargs: object) -> Any:
            if method in {"ls", "lsdir"} and mount.is_async:
                listed = lambda: list_directory(mount, args[0], self.retry, run_coroutine)  # noqa: E731
                if found := self._translated(path, "listed", listed):
                    return found
            return self._ask(mount, path, "listed", method, *args, **kwargs)

        kind, found = find_entries(mount, path, parse_name(self.vault.reveal(path)), ask)
        self._listed.clear()
        for name, info in found:
            stamp = stamp_of(info, mount.inside)
            if info.get("type") == "file" and stamp.size >= 0:
                self._listed[name] = stamp
        return kind, [Entry(name, info.get("type") == "directory") for name, info in found]

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        """Return the first bytes and the stamp of every file, errors in place; of no bytes, as the listing told it."""
        if not nbytes and all([path in self._listed for path in paths]):
            return [Head(b"", self._listed.pop(path)) for path in paths]
        # Of no bytes there is no range to ask for: of one, the answer tells the stamp as well.
        requests = [Request(path, _NO_STAMP, 0, max(1, nbytes), ()) for path in paths]
        heads = []
        for answer in self._send(requests, open_together(_HEADS_AT_A_TIME), heads=True):
            if isinstance(answer, Reply):
                heads.append(Head(bytes(answer.data[:nbytes]), answer.stamp or _NO_STAMP))
            else:
                heads.append(Head(b"", _NO_STAMP, self._short_error(answer)))
        return heads

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each ``(path, offset, nbytes)``; shorter only where the file ends."""
        buffers = [bytearray(nbytes) for _, _, nbytes in ranges]
        parts = [
            Part(path, _NO_STAMP, offset, memoryview(out))
            for (path, offset, _), out in zip(ranges, buffers, strict=True)
        ]
        ends: dict[str, int] = {}
        requests = self._plan(parts)
        for request, reply in zip(requests, self._read(requests), strict=True):
            if reply.nbytes < request.stop - request.start:
                end = request.start + reply.nbytes
                ends[request.path] = min(end, ends.get(request.path, end))
        return [
            bytes(memoryview(out)[: max(0, ends.get(path, offset + nbytes) - offset)])
            for (path, offset, nbytes), out in zip(ranges, buffers, strict=True)
        ]

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Fill every part's ``out``, or raise ShardReadError naming the file.

        Where the answers tell of which object the bytes are, each is checked; elsewhere each file is asked once, after
        it was read.
        """
        requests = self._plan(parts)
        replies = self._read(requests)
        stamps = {request.path: request.stamp for request in requests}
        ended: dict[str, int] = {}
        seen: dict[str, Stamp] = {}
        for request, reply in zip(requests, replies, strict=True):
            if reply.stamp is not None and seen.get(request.path, stamps[request.path]) == stamps[request.path]:
                seen[request.path] = reply.stamp
            if reply.nbytes < request.stop - request.start:
                ended[request.path] = request.start + reply.nbytes
        if self.on_change != "ignore":
            unknown = [path for path in stamps if path not in seen]
            seen.update(zip(unknown, self._stamps(unknown), strict=True))
        for path, now in seen.items():
            if not _is_same(now, stamps[path]):
                report_change(path, stamps[path], now, self.on_change)
        for path, end in ended.items():
            raise ShardReadError(
                f"{path!r} is truncated: it ends at byte {end:,}, and held {stamps[path].size:,} bytes when it was "
                "opened; restore the file, then open the dataset again"
            )

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file, at once where the file system is an object store."""
        mount, inner = self._locate(path)
        self._listed.pop(path, None)
        self._ask(mount, path, "written", "pipe_file", inner, data)

    def put_file(self, path: str, local: str) -> None:
        """Write a whole file from one of this machine, a few megabytes at a time."""
        mount, inner = self._locate(path)
        self._listed.pop(path, None)
        self._ask(mount, path, "written", "put_file", local, inner)

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all in it, if it is there."""
        mount, inner = self._locate(path)
        with contextlib.suppress(FileNotFoundError):
            self._ask(mount, path, "removed", "rm", inner, recursive=True)

    def open(self, path: str) -> BinaryIO:
        """Return the file, open for reading."""
        mount, inner = self._locate(path)
        if inner.startswith(("http://", "https://")):
            self.fetch([(path, 0, 1)])  # tells whether the server serves ranges
            if host_of(inner) in mount.without_ranges:
                (whole,) = self.fetch([(path, 0, MOST_WHOLE_NBYTES + 1)])  # of a longer one it raises
                if host_of(inner) in mount.without_ranges:
                    return io.BytesIO(whole)
        return cast("BinaryIO", self._ask_blocking(mount, path, "opened", lambda: mount.fs.open(inner, "rb")))

    def local_path(self, path: str) -> str | None:
        """Return None: the files are elsewhere."""
        return None

    def _locate(self, path: str, *, fresh: bool = False) -> tuple[Mount, str]:
        """Return the live file system of a path, and the path as that one takes it."""
        problem: BaseException
        try:
            address = parse_name(self.vault.reveal(path))
            mount = find_mount(address, self.options, self._key, fresh=fresh)
            return mount, mount.strip(address.link)
        except ImportError as exc:
            problem = ImportError(self._clean(f"{path!r} cannot be opened: {exc}"))
        except ValueError as exc:
            problem = ValueError(self._clean(f"{path!r} cannot be opened: {exc}"))
        except Exception as exc:  # noqa: BLE001  # a file system raises anything
            problem, cause = self._error(path, exc, "opened")
            problem.__cause__ = cause
        raise problem

    def _plan(self, parts: Sequence[Part]) -> list[Request]:
        """Return the requests that bring the parts."""
        if not parts:
            return []
        mount, inner = self._locate(parts[0].path)
        if host_of(inner) in mount.without_ranges:
            return coalesce(parts, 1 << 62, 1 << 62)  # one answer is the whole file, whatever is asked
        return coalesce(parts, self.gap_nbytes, self.request_nbytes)

    def _read(self, requests: Sequence[Request]) -> list[Reply]:
        """Send all requests; return the answers in their order, or raise the first error, naming the file."""
        replies = []
        failed: tuple[str, BaseException] | None = None
        answers = self._send(requests, open_together(self.concurrency), heads=False)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Reply):
                replies.append(answer)
            elif failed is None or failed[1] is NOT_READ:
                failed = (request.path, answer)
        if failed is None:
            return replies
        error, cause = self._error(*failed, "read")
        raise error from cause

    def _send(self, requests: Sequence[Request], most: int, *, heads: bool) -> list[Reply | BaseException]:
        """Send all requests; return the answers, or what was met instead, in their order."""
        targets: list[Target] = []
        answers: list[Reply | BaseException] = [NOT_READ] * len(requests)
        for i, request in enumerate(requests):
            try:
                mount, inner = self._locate(request.path)
            except OSError as exc:
                answers[i] = exc
                if not heads:
                    return answers
            else:
                targets.append(
                    Target(i, mount, inner, request, self._listed.pop(request.path, None) if heads else None)
                )
        send(targets, answers, most, self.retry, heads=heads)
        return answers

    def _stamps(self, paths: Sequence[str]) -> list[Stamp]:
        """Return the stamps that files have now, each asked once."""
        archives: set[str] = set()
        groups: dict[int, tuple[Mount, list[tuple[str, str]]]] = {}
        for path in paths:
            archive = parse_name(path).suffix
            mount, inner = self._locate(path, fresh=archive not in archives)
            archives.add(archive)
            groups.setdefault(id(mount), (mount, []))[1].append((path, inner))
        stamps: dict[str, Stamp] = {}
        for mount, group in groups.values():
            mount.fs.invalidate_cache()
            for path, inner in group if not mount.is_async else ():
                stamps[path] = stamp_of(self._ask(mount, path, "read", "info", inner), mount.inside)
            for start in range(0, len(group), self.concurrency) if mount.is_async else ():
                some = group[start : start + self.concurrency]
                for (path, _), found in zip(some, run_coroutine(mount.fs.loop, self._infos(mount, some)), strict=True):
                    if isinstance(found, BaseException):
                        error, cause = self._error(path, found, "read")
                        raise error from cause
                    stamps[path] = stamp_of(found, mount.inside)
        return [stamps[path] for path in paths]

    async def _infos(self, mount: Mount, group: Sequence[tuple[str, str]]) -> list[Any]:
        seconds = self.retry.deadline_seconds
        calls = [again_async(partial(mount.fs._info, inner), self.retry, Patience(seconds)) for _, inner in group]  # noqa: SLF001  # fsspec's own interface
        return await asyncio.gather(*calls, return_exceptions=True)

    def _ask(self, mount: Mount, path: str, what: str, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method of the file system; FileNotFoundError passes, other errors become ours."""
        mount.fs.invalidate_cache()
        if not mount.is_async:
            return self._ask_blocking(mount, path, what, lambda: getattr(mount.fs, method)(*args, **kwargs))
        call = getattr(mount.fs, "_" + method)
        return self._translated(
            path, what, lambda: run_coroutine(mount.fs.loop, again_async(partial(call, *args, **kwargs), self.retry))
        )

    def _ask_blocking(self, mount: Mount, path: str, what: str, call: Callable[[], _T]) -> _T:
        return self._translated(path, what, lambda: again(call, self.retry, mount.lock))

    def _translated(self, path: str, what: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as exc:  # noqa: BLE001  # a file system raises anything
            error, cause = self._error(path, exc, what)
        raise error from cause

    def _error(self, path: str, exc: BaseException, what: str) -> tuple[OSError, BaseException | None]:
        """Return our error for one of a file system, and its cause if that holds no secret."""
        if isinstance(exc, ShardReadError):
            return exc, exc.__cause__
        missing, text = self._reason(exc)
        if missing:
            return _MissingError(f"{path!r} cannot be {what}: {text}"), None
        if isinstance(exc, GaveUpError):
            exc = exc.cause
        return ShardReadError(f"{path!r} cannot be {what}: {text}"), exc if self._is_clean(exc) else None

    def _short_error(self, exc: BaseException) -> OSError:
        """Return an error whose ``strerror`` is the reason alone, for messages that name the file themselves."""
        if isinstance(exc, ShardReadError):
            return exc
        missing, text = self._reason(exc)
        return FileNotFoundError(errno.ENOENT, text) if missing else OSError(errno.EIO, text)

    def _reason(self, exc: BaseException) -> tuple[bool, str]:
        """Return whether an error says that the file is missing, and what it says."""
        tried = ""
        if isinstance(exc, GaveUpError):
            if exc.tries > 1:
                tried = f" (tried {exc.tries} times in {exc.seconds:.1f} s)"
            exc = exc.cause
        if is_missing(exc):
            return True, "it is not there"
        text = getattr(exc, "strerror", None) or str(exc)
        if isinstance(exc, FileNotFoundError):  # from fsspec's HTTP file system, whatever the reason was
            text = f"the server answered {status_of(exc)}" if status_of(exc) else str(exc.__cause__)
        if isinstance(exc, PermissionError):
            text = f"permission denied: {text}"
        elif not isinstance(exc, OSError) or not text:
            text = f"{type(exc).__name__}: {text}"
        return False, self._clean(text) + tried

    def _clean(self, text: str) -> str:
        """Return a text without the secrets of the URLs and options."""
        return mask(text, self.vault.secrets() + secrets_of(self.options))

    def _is_clean(self, exc: BaseException | None) -> bool:
        """Return whether an error, and all that it came from, can be shown."""
        for _ in range(8):
            if exc is None:
                return True
            text = f"{exc} {exc!r}"
            if self._clean(text) != text:
                return False
            exc = exc.__cause__ or exc.__context__
        return False


class _MissingError(ShardReadError, FileNotFoundError):
    """A file that is not there."""


_NO_STAMP = Stamp(0)


def _is_same(now: Stamp, then: Stamp) -> bool:
    """Return whether two stamps can be of one file: an answer need not tell all that another told."""
    return now == then or (now.size < 0 and now.etag == then.etag and now.mtime_ns == then.mtime_ns)
