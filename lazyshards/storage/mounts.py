"""Live file systems: made when first needed, by the process that uses them, and a bounded number kept."""

import datetime as dt
import email.utils
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import fsspec
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.chained import ChainedFileSystem

from lazyshards.storage.base import Stamp
from lazyshards.storage.redirects import guarded

__all__ = ["Address", "Mount", "find_mount", "is_name", "parse_name", "parse_url", "stamp_of"]

_MOST_MOUNTS = 16
"""File systems kept by a process; each holds connections, or an open archive."""
_CONCURRENT = frozenset({"file", "local", "sftp", "ssh", "hdfs", "arrow_hdfs", "webhdfs", "github", "dbfs"})
"""Protocols of blocking file systems that several threads may use at a time. Archives and caches mix up what they
read, ftp has one connection, and of a file system that we do not know we cannot tell."""
_S3_CONFIG = {
    "max_pool_connections": 64,
    "signature_version": "s3v4",  # signed URLs of the version before are refused by newer buckets
    "retries": {"total_max_attempts": 1},  # tried again here, where there is a deadline: not by three at once
}
_ETAGS = ("ETag", "etag", "e_tag", "generation", "version", "VersionId", "md5Hash", "Content-MD5", "Digest", "checksum")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")


class Address(NamedTuple):
    """A URL, chained or not, taken apart at the link that holds the path.

    Its name has the links in the order in which they are gone through, archive first, so that what every other name
    ends with ends it as well: the file's own name.

    Examples
    --------
    >>> address = parse_url("simplecache::zip://set/a.npy::s3://bucket/b.zip")
    >>> address
    Address(prefix='simplecache::', link='zip://set/a.npy', suffix='::s3://bucket/b.zip')
    >>> address.name
    's3://bucket/b.zip::simplecache::zip://set/a.npy'
    >>> parse_name(address.name) == address
    True
    """

    prefix: str
    """Caches before it, such as ``simplecache::``."""
    link: str
    """The link with the path, such as ``zip://set/shard_1.npy`` or ``s3://bucket/set``."""
    suffix: str
    """What that one lies in, such as ``::file:///data/archive.zip``."""

    @property
    def scheme(self) -> str:
        """Protocol of the link."""
        return self.link.partition("://")[0]

    @property
    def url(self) -> str:
        """The URL as fsspec writes it."""
        return "".join(self)

    @property
    def within(self) -> str:
        """What the name has before the link."""
        outer = _groups(self.suffix[2:]) if self.suffix else []
        return "".join(f"{group}::" for group in reversed(outer)) + self.prefix

    @property
    def name(self) -> str:
        """The URL as the rest of the package names it."""
        return self.within + self.link


def parse_url(url: str) -> Address:
    """Take a URL apart that is written as fsspec writes it."""
    return _address(_groups(url)) if "::" in url else Address("", url, "")


def parse_name(name: str) -> Address:
    """Take a name apart that an address gave."""
    return _address(_groups(name)[::-1]) if "::" in name else Address("", name, "")


def is_name(path: str) -> bool:
    """Return whether a path is a name rather than a URL: only in a name can an archive be the last link."""
    scheme, separator, _ = path.rpartition("::")[2].partition("://")
    return "::" in path and bool(separator) and issubclass(_class_of(scheme), AbstractArchiveFileSystem)


def _address(groups: list[str]) -> Address:
    prefix, separator, link = groups[0].rpartition("::")
    return Address(prefix + separator, link, "".join(f"::{group}" for group in groups[1:]))


def _groups(url: str) -> list[str]:
    """Return the links of a chain, caches together with what they cache."""
    groups, caches = [], ""
    protocols = {*fsspec.available_protocols(), *fsspec.registry}
    for link in url.split("::"):
        if "://" in link or link not in protocols:
            groups.append(caches + link)
        elif issubclass(_class_of(link), ChainedFileSystem):
            caches += f"{link}::"
            continue
        else:
            groups.append(f"{caches}{link}://")
        caches = ""
    return groups


def _class_of(protocol: str) -> type:
    return cast("type", fsspec.get_filesystem_class(protocol))


@dataclass(eq=False)
class Mount:
    """One live file system."""

    fs: Any
    """The fsspec file system."""
    lock: "threading.Lock | None"
    """What to hold while it reads; None if threads may read at a time, or if it is asynchronous."""
    inside: str = ""
    """The archive that it lies in, as it was when it was opened: size, time and tag; empty if in none."""
    without_ranges: set[str] = field(default_factory=set)
    """Hosts seen to answer a ranged request with the whole file."""
    direct: Any = None
    """Connections of our own to its server, once there are any."""

    @property
    def is_async(self) -> bool:
        """Whether it has coroutines of its own."""
        return bool(getattr(self.fs, "async_impl", False))

    def strip(self, link: str) -> str:
        """Return a link as the file system's own methods take it."""
        return str(self.fs._strip_protocol(link))  # noqa: SLF001  # fsspec's own interface


class _Registry:
    """The mounts of this process, those used last kept."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.mounts: OrderedDict[object, Mount] = OrderedDict()
        self.pid = os.getpid()


_registry = _Registry()
_of_parents: list[_Registry] = []
"""Registries of the processes that this one was forked from: kept, because closing their connections here would
end them there."""


def _after_fork() -> None:
    global _registry  # one for each process
    _of_parents.append(_registry)
    _registry = _Registry()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def find_mount(address: Address, options: Mapping[str, object], key: object, *, fresh: bool = False) -> Mount:
    """Return the live file system that serves an address, made now if there is none.

    Parameters
    ----------
    address : Address
        Secrets included.
    options : mapping
        For fsspec.
    key : hashable
        What else tells file systems apart: equal options have equal keys.
    fresh : bool
        Whether an archive that changed since it was opened is opened again.
    """
    cls = fsspec.get_filesystem_class(address.scheme)
    own = tuple(sorted((k, repr(v)) for k, v in cls._get_kwargs_from_urls(address.link).items() if k != "fo"))
    full = (address.prefix, address.scheme, own, address.suffix, key)
    kept = _registry
    with kept.lock:
        mount = kept.mounts.get(full)
        if mount is not None and fresh and mount.inside and mount.inside != _archive_mark(address, options, key):
            mount = None
        if mount is None:
            mount = kept.mounts[full] = _make(address, options, key)
        kept.mounts.move_to_end(full)
        while len(kept.mounts) > _MOST_MOUNTS:
            kept.mounts.popitem(last=False)
    return mount


def _make(address: Address, options: Mapping[str, object], key: object) -> Mount:
    url = address.url
    # Every link of the chain gets its options by protocol; those that name none belong to the first, as in fsspec.
    given = {name: dict(value) if isinstance(value, dict) else value for name, value in options.items()}
    for part in url.split("::"):
        protocol = part.partition("://")[0]
        known = given.setdefault(protocol, {})
        if isinstance(known, dict):
            known["skip_instance_cache"] = True
            if protocol in {"s3", "s3a"}:
                # Options without a protocol are those of the first link, and come before those with one.
                place = given if url.startswith(f"{protocol}://") and "config_kwargs" in given else known
                place["config_kwargs"] = {**_S3_CONFIG, **cast("dict[str, object]", place.get("config_kwargs", {}))}
            if protocol in {"http", "https"}:
                is_first = url.startswith(f"{protocol}://")
                client = guarded({**known, **given} if is_first else known)
                if client is not None:
                    (given if is_first and "client_kwargs" in given else known)["client_kwargs"] = client
    mark = _archive_mark(address, options, key) if address.suffix else ""
    fs, _ = url_to_fs(url, **given)
    _keep_no_listings(fs)
    if address.scheme in {"s3", "s3a"} and hasattr(fs, "retries"):
        fs.retries = 1
    if getattr(fs, "async_impl", False):
        return Mount(fs, None, mark)
    concurrent = not address.prefix and not isinstance(fs, AbstractArchiveFileSystem) and address.scheme in _CONCURRENT
    return Mount(fs, None if concurrent else threading.Lock(), mark)


def _keep_no_listings(fs: Any) -> None:  # fsspec has no types
    """Switch off the listing caches of a file system and of what it wraps."""
    for _ in range(4):
        cache = getattr(fs, "dircache", None)
        if cache is not None and hasattr(cache, "use_listings_cache"):
            cache.use_listings_cache = False
        fs = vars(fs).get("fs")
        if fs is None:
            return


def _archive_mark(address: Address, options: Mapping[str, object], key: object) -> str:
    """Return what tells an archive from a later one at the same place."""
    inner = parse_url(address.suffix[2:])
    if "://" not in inner.link:
        inner = inner._replace(link="file://" + inner.link)
    mount = find_mount(inner, _options_of(inner, options), key)
    info = mount.fs.info(mount.strip(inner.link))
    stamp = stamp_of(info)
    return f"{stamp.size}-{stamp.mtime_ns}-{info.get('ino', 0)}-{stamp.etag}"


def _options_of(address: Address, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options of an inner link, as the outer link of a chain of its own."""
    protocols = {part.partition("://")[0] for part in address.url.split("::")}
    return {name: value for name, value in options.items() if name in protocols and isinstance(value, dict)}


def stamp_of(info: Mapping[str, Any], inside: str = "") -> Stamp:
    """Return the stamp that a file system's information about a file amounts to.

    Where there is an entity tag or version the time is left out: it says less, and in fewer digits in a listing than
    elsewhere.
    """
    size = info.get("size")
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), "")
    if not etag and "CRC" in info:
        etag = f"{info['CRC']:08x}"
    mtime_ns = 0 if etag else next((_nanoseconds(info[name]) for name in _TIMES if info.get(name)), 0)
    if inside:
        etag = f"{etag}@{inside}"
    return Stamp(-1 if size is None else int(size), mtime_ns, 0, etag)


def _nanoseconds(time: object) -> int:
    """Return a time in whatever form as nanoseconds since 1970, exact to a microsecond."""
    if isinstance(time, str):
        time = _parsed(time)
    if isinstance(time, dt.datetime):
        time = time.timestamp()
    return round(time * 1e6) * 1000 if isinstance(time, int | float) else 0


def _parsed(text: str) -> dt.datetime | None:
    for parse in (dt.datetime.fromisoformat, email.utils.parsedate_to_datetime):
        try:
            return parse(text)
        except ValueError:
            continue
    return None
