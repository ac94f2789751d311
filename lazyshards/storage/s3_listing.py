"""One directory of a bucket, listed over connections of our own: a request for each thousand names, and little else."""

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from lazyshards.storage.direct import Interrupt, NotServedError, connections_of, read_page
from lazyshards.storage.mounts import Mount
from lazyshards.storage.retry import GaveUpError, Retry, again
from lazyshards.storage.routes import find_signer

__all__ = ["list_directory"]

_MOST_PAGES = 100_000


def list_directory(
    mount: Mount, path: str, retry: Retry, run: Callable[[Any, Any], Any]
) -> list[dict[str, Any]] | None:
    """Return what s3fs would say of the names in a directory of a bucket; None if s3fs is to be asked.

    Parameters
    ----------
    mount : Mount
    path : str
        As the file system takes it.
    retry : Retry
        How failed requests are tried again.
    run : callable
        Runs a coroutine on an event loop.

    Raises
    ------
    GaveUpError
    """
    connections = connections_of(mount)
    if connections is None or connections.kind != "s3" or mount.fs.version_aware:
        return None
    bucket, key, _ = mount.fs.split_path(path)
    signer = find_signer(mount, connections, bucket, run) if bucket else None
    if signer is None:
        return None
    prefix = f"{key.strip('/')}/" if key else ""
    asked = {"delimiter": "/", "encoding-type": "url", "list-type": "2", "prefix": prefix}
    found: list[dict[str, Any]] = []
    for _ in range(_MOST_PAGES):
        read = partial(read_page, connections, signer.sign_listing(asked), Interrupt(), connections.patience(retry))
        try:
            token = _parse(again(read, retry), bucket, found)
        except GaveUpError as exc:
            if isinstance(exc.cause, NotServedError):
                return None
            raise
        except (ET.ParseError, KeyError, ValueError):
            return None
        if not token:
            return found
        asked["continuation-token"] = token
    return None


def _parse(page: bytes, bucket: str, found: list[dict[str, Any]]) -> str:
    """Add what a page names to what was found, and return what asks for the next one; empty if it is the last."""
    root = ET.fromstring(page)  # noqa: S314  # expat refuses what grows without bound; botocore parses so, too
    start = root.tag[: root.tag.find("}") + 1]
    if root.tag != f"{start}ListBucketResult" or root.findtext(f"{start}EncodingType") not in {None, "", "url"}:
        raise ValueError("no listing")
    decoded = unquote_plus if root.findtext(f"{start}EncodingType") == "url" else str
    folders = [
        decoded(item.text or "").removesuffix("/") for item in root.iterfind(f"{start}CommonPrefixes/{start}Prefix")
    ]
    found += [{"name": f"{bucket}/{folder}", "type": "directory", "size": 0} for folder in folders]
    for item in root.iterfind(f"{start}Contents"):
        values = {part.tag: part.text or "" for part in item}
        found.append(
            {
                "name": f"{bucket}/{decoded(values[f'{start}Key'])}",
                "type": "file",
                "size": int(values[f"{start}Size"]),
                "ETag": values.get(f"{start}ETag", ""),
                "LastModified": values.get(f"{start}LastModified", ""),
            }
        )
    if root.findtext(f"{start}IsTruncated", "").lower() != "true":
        return ""
    token = root.findtext(f"{start}NextContinuationToken", "")
    if not token:
        raise ValueError("a listing that goes on, and does not say where")
    return token
