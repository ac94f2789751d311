"""How the bytes of a file are asked for over connections of our own: by its URL, signed where that is needed."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from lazyshards.storage.direct import Connections, Route
from lazyshards.storage.mounts import Mount
from lazyshards.storage.readers import host_of
from lazyshards.storage.signing import USED_SECONDS, Signer, sign_first

__all__ = ["find_routes", "find_signer"]

_MOST_ROUTES = 100_000


def find_routes(
    mount: Mount, connections: Connections, paths: Sequence[str], run: Callable[[Any, Any], Any]
) -> list[Route | None]:
    """Return the route of each path, None for one that must be read by the file system's own client.

    Parameters
    ----------
    mount : Mount
    connections : Connections
    paths : sequence of str
        As the file system takes them.
    run : callable
        Runs a coroutine on an event loop.
    """
    if connections.kind == "http":
        return [_http_route(mount, path) for path in paths]
    now = time.monotonic()
    with connections.lock:
        known = [connections.routes.get(path) for path in paths]
    missing = [
        path for path, route in zip(paths, known, strict=True) if route is None or now - route.made > USED_SECONDS
    ]
    if not missing:
        return known
    made = {path: Route(url, {}, now) for path, url in _signed(mount, connections, missing, run).items()}
    with connections.lock:
        connections.routes.update(made)
        while len(connections.routes) > _MOST_ROUTES:
            connections.routes.popitem(last=False)
    return [made.get(path, route) for path, route in zip(paths, known, strict=True)]


def _http_route(mount: Mount, path: str) -> Route | None:
    if host_of(path) in mount.without_ranges:
        return None
    fs = mount.fs
    url = str(fs.encode_url(path))
    headers = {**fs.client_kwargs.get("headers", {}), **fs.kwargs.get("headers", {})}
    return None if "@" in urlsplit(url).netloc else Route(url, headers, time.monotonic())


def _signed(
    mount: Mount, connections: Connections, paths: Sequence[str], run: Callable[[Any, Any], Any]
) -> dict[str, str]:
    """Return a signed URL of each path."""
    found: dict[str, str] = {}
    left = []
    for path in dict.fromkeys(paths):
        bucket, key, version = mount.fs.split_path(path)
        signer = None if version else connections.signers.get(bucket)
        url = signer.sign(key) if signer is not None and signer.is_fresh() else None
        if url is None:
            left.append(path)
        else:
            found[path] = url
    return {**found, **run(mount.fs.loop, _sign_each(mount.fs, connections, left))} if left else found


async def _sign_each(fs: Any, connections: Connections, paths: Sequence[str]) -> dict[str, str]:
    """Return a signed URL of each path, the first of a bucket's by botocore."""
    found: dict[str, str] = {}
    for path in paths:
        bucket, key, version = fs.split_path(path)
        signer = None if version else connections.signers.get(bucket)
        url = signer.sign(key) if signer is not None and signer.is_fresh() else None
        if url is None:
            url, signer = await sign_first(fs, bucket, key, version)
            if signer is not None:
                connections.signers[bucket] = signer
        found[path] = url
    return found


def find_signer(mount: Mount, connections: Connections, bucket: str, run: Callable[[Any, Any], Any]) -> Signer | None:
    """Return what signs URLs of a bucket as botocore does; None if nothing is known to."""
    signer = connections.signers.get(bucket)
    if signer is None or not signer.is_fresh():
        try:
            _, signer = run(mount.fs.loop, sign_first(mount.fs, bucket, "a", None))
        except Exception:  # noqa: BLE001  # its own client meets the same, and says what it is
            return None
        if signer is not None:
            connections.signers[bucket] = signer
    return signer
