"""Requests on their way: sent concurrently where the file system can do that, each tried again where that may help."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from lazyshards.errors import ShardReadError
from lazyshards.storage.base import Stamp
from lazyshards.storage.direct import (
    Connections,
    Interrupt,
    NotServedError,
    Route,
    connections_of,
    read_direct,
)
from lazyshards.storage.mounts import Mount, stamp_of
from lazyshards.storage.patience import Patience
from lazyshards.storage.ranges import Request
from lazyshards.storage.readers import AsyncReader, Reply, async_reader, read_blocking, unseen_nbytes
from lazyshards.storage.retry import GaveUpError, Retry, again, again_async
from lazyshards.storage.routes import find_routes
from lazyshards.storage.volley import Asked, read_volley

__all__ = ["NOT_READ", "Target", "run_coroutine", "send"]

_DIRECT_NBYTES = 128 << 10
"""Bytes of an answer over HTTP from which threads of our own are worth more than the event loop."""
NOT_READ = ShardReadError("it was not read, because another read failed")
"""Stands in the place of an answer that was not waited for."""


class Target(NamedTuple):
    """A request and where it goes."""

    number: int
    """Place of its answer."""
    mount: Mount
    """File system that is asked."""
    path: str
    """Path as the file system takes it."""
    request: Request
    """What is asked for."""
    listed: Stamp | None
    """Stamp that a listing told, if an answer does not."""


class _StopError(Exception):
    """One read failed for good: the others are not needed any more."""


def send(
    targets: Sequence[Target], answers: list[Reply | BaseException], most: int, retry: Retry, *, heads: bool
) -> None:
    """Send all requests and put the answers, or what was met instead, in their places.

    Parameters
    ----------
    targets : sequence of Target
    answers : list
        What the request of each number gave.
    most : int
        How many are under way together.
    retry : Retry
    heads : bool
        Whether every answer must have data and stamp, and an error ends no other read.
    """
    groups: dict[int, list[Target]] = {}
    for target in targets:
        groups.setdefault(id(target.mount), []).append(target)
    for group in groups.values():
        mount = group[0].mount
        if mount.is_async:
            left = _send_direct(group, answers, most, retry, heads=heads)
            if left:
                run_coroutine(mount.fs.loop, _send_async(left, answers, most, retry, heads=heads))
        else:
            _send_blocking(group, answers, most, retry, heads=heads)


def _send_direct(
    group: Sequence[Target], answers: list[Reply | BaseException], most: int, retry: Retry, *, heads: bool
) -> list[Target]:
    """Send what can be over connections of our own; return what must go by the file system's own client."""
    mount = group[0].mount
    connections = connections_of(mount)
    if connections is None:
        return list(group)
    if connections.kind == "http" and max([each.request.stop - each.request.start for each in group]) < _DIRECT_NBYTES:
        return list(group)
    try:
        routes = find_routes(mount, connections, [target.path for target in group], run_coroutine)
    except Exception:  # noqa: BLE001  # its own client meets the same, and says what it is
        return list(group)
    interrupt, lock = Interrupt(), threading.Lock()
    left = [target for target, route in zip(group, routes, strict=True) if route is None]

    def work(target: Target, route: Route) -> None:
        try:
            answers[target.number] = _ask_direct(connections, target, route, interrupt, retry, heads=heads)
        except GaveUpError as exc:
            with lock:
                if isinstance(exc.cause, NotServedError):
                    left.append(target)
                elif not interrupt.event.is_set():
                    answers[target.number] = exc
                    if not heads:
                        interrupt.end()

    pairs = [(target, route) for target, route in zip(group, routes, strict=True) if route is not None]
    asked = [Asked(route, each.request.start, each.request.stop, _single_out(each.request)) for each, route in pairs]
    replies = read_volley(connections, asked, most, retry)
    for (target, _), reply in zip(pairs, replies, strict=True):
        if reply is not None:
            answers[target.number] = _finished(target, reply, heads=heads)
    pairs = [pair for pair, reply in zip(pairs, replies, strict=True) if reply is None]
    _share(work, pairs, most, interrupt)
    if interrupt.event.is_set():
        return []
    if len(left) == len(group):
        connections.doubt()
    return left


def _ask_direct(
    connections: Connections, target: Target, route: Route, interrupt: Interrupt, retry: Retry, *, heads: bool
) -> Reply:
    request, into = target.request, _single_out(target.request)
    patience = connections.patience(retry)
    read = partial(read_direct, connections, route, request.start, request.stop, into, interrupt, patience)
    return _finished(target, again(read, retry, sleep=interrupt.event.wait), heads=heads)


def _finished(target: Target, reply: Reply, *, heads: bool) -> Reply:
    """Return the answer to a request whose bytes came over connections of our own."""
    if not heads:
        return _settled(target.request, reply)
    if target.listed is not None and reply.stamp is not None and reply.stamp.size < 0:
        return reply._replace(stamp=target.listed)
    return reply


def _share(
    work: Callable[[Target, Route], None], pairs: Sequence[tuple[Target, Route]], most: int, interrupt: Interrupt
) -> None:
    """Do work on all pairs in a few threads, of which the calling one is one; an interrupt ends all of it."""
    queue, lock = iter(pairs), threading.Lock()

    def loop() -> None:
        while not interrupt.event.is_set():
            with lock:
                pair = next(queue, None)
            if pair is None:
                return
            work(*pair)

    threads = [
        threading.Thread(target=loop, name="lazyshards-read", daemon=True) for _ in range(min(most, len(pairs)) - 1)
    ]
    try:
        for thread in threads:
            thread.start()
        loop()
        for thread in threads:
            thread.join()
    except BaseException:
        interrupt.end()
        for thread in threads:
            if thread.ident is not None:
                thread.join(1)  # one that is still connecting sends nothing any more
        raise


async def _send_async(
    group: Sequence[Target], answers: list[Reply | BaseException], most: int, retry: Retry, *, heads: bool
) -> None:
    read = async_reader(group[0].mount)
    queue = iter(group)
    tasks = [
        asyncio.ensure_future(_work(read, queue, answers, retry, heads=heads)) for _ in range(min(most, len(group)))
    ]
    try:
        await asyncio.gather(*tasks)
    except _StopError:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _work(
    read: AsyncReader, queue: Iterator[Target], answers: list[Reply | BaseException], retry: Retry, *, heads: bool
) -> None:
    """Send requests from the queue until it is empty."""
    for target in queue:
        try:
            answers[target.number] = await _ask(read, target, retry, heads=heads)
        except Exception as exc:  # noqa: BLE001  # a file system raises anything
            answers[target.number] = exc
            if not heads:
                raise _StopError from None


async def _ask(read: AsyncReader, target: Target, retry: Retry, *, heads: bool) -> Reply:
    _, mount, path, request, listed = target
    into = _single_out(request)
    patience = Patience(retry.deadline_seconds, unseen_nbytes=unseen_nbytes(read, request.stop - request.start))
    reply = await again_async(partial(read, mount, path, request.start, request.stop, into, patience), retry, patience)
    if not heads:
        return _settled(request, reply)
    stamp = reply.stamp or listed
    if stamp is None or stamp.size < 0:
        info = partial(mount.fs._info, path)  # noqa: SLF001  # fsspec's own interface
        stamp = stamp_of(await again_async(info, retry, Patience(retry.deadline_seconds)), mount.inside)
    return reply._replace(stamp=stamp)


def _send_blocking(
    group: Sequence[Target], answers: list[Reply | BaseException], most: int, retry: Retry, *, heads: bool
) -> None:
    stop = threading.Event()

    def work(target: Target) -> None:
        if stop.is_set():
            return
        try:
            answers[target.number] = _ask_blocking(target, retry, heads=heads)
        except Exception as exc:  # noqa: BLE001  # a file system raises anything
            answers[target.number] = exc
            if not heads:
                stop.set()

    if group[0].mount.lock is not None or len(group) == 1:
        for target in group:
            work(target)
        return
    pool = ThreadPoolExecutor(min(most, len(group)), "lazyshards-read")
    try:
        list(pool.map(work, group))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _ask_blocking(target: Target, retry: Retry, *, heads: bool) -> Reply:
    _, mount, path, request, listed = target
    into = _single_out(request)
    reply = again(partial(read_blocking, mount, path, request.start, request.stop, into), retry, mount.lock)
    if not heads:
        return _settled(request, reply)
    stamp = reply.stamp or listed
    if stamp is None or stamp.size < 0:
        stamp = stamp_of(again(partial(mount.fs.info, path), retry, mount.lock), mount.inside)
    return reply._replace(stamp=stamp)


def _settled(request: Request, reply: Reply) -> Reply:
    """Return an answer without its bytes, which are put where they belong."""
    if reply.data:
        request.scatter(reply.data)
    return Reply(memoryview(b""), reply.nbytes, reply.stamp)


def _single_out(request: Request) -> memoryview | None:
    """Return where all bytes of a request go, if that is one place."""
    if len(request.pieces) == 1 and len(request.pieces[0].out) == request.stop - request.start:
        return request.pieces[0].out
    return None


def run_coroutine(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    """Run a coroutine on the loop's own thread; an interrupt ends it, and nothing of it goes on."""
    ended = threading.Event()

    async def whole() -> Any:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(whole(), loop)
    try:
        return future.result()
    except BaseException:
        if not future.done() or future.cancelled():
            future.cancel()
            ended.wait(5)
        raise
