"""What a URL is: one file, a directory, a glob, or nothing; always asked anew."""

import contextlib
import glob
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fsspec.utils import glob_translate

from lazyshards.storage.mounts import Address, Mount, parse_name

__all__ = ["find_entries"]

_Info: TypeAlias = Mapping[str, Any]
_Ask: TypeAlias = Callable[..., Any]


def find_entries(mount: Mount, name: str, address: Address, ask: _Ask) -> tuple[str, list[tuple[str, _Info]]]:
    """Return what a path is, and the names found there with what the file system says of each.

    Parameters
    ----------
    mount : Mount
        The file system that holds it.
    name : str
        The path as named in messages.
    address : Address
        Where it is, secrets included.
    ask : callable
        Calls a method of the file system, tries again where that may help, and translates errors.
    """
    is_http = address.scheme in {"http", "https"}
    inner = mount.strip(address.link)
    names = _Names(name, inner.rstrip("/"))
    if address.scheme in {"s3", "s3a"} and "." not in inner.rpartition("/")[2] and hasattr(mount.fs, "_lsdir"):
        # What has no suffix is most likely a directory: then one listing tells that and what it holds.
        with contextlib.suppress(FileNotFoundError):
            if infos := ask("lsdir", inner, refresh=True):
                return "directory", _entries(infos, inner, names, is_http=False)
    info = _info(ask, inner, is_http=is_http)
    if info is not None and info.get("type") != "directory":
        return "file", [(name, info)]
    if info is not None:
        return "directory", _listed(ask, inner, names, is_http=is_http)
    has_magic = re.search(r"[*\[]", inner) if is_http else glob.has_magic(inner)
    if not has_magic:
        return "missing", []
    return "glob", _matches(ask, inner, names, is_http=is_http)


class _Names:
    """Turns what a file system calls a file into the URL that the package calls it."""

    def __init__(self, name: str, inner: str) -> None:
        address = parse_name(name)
        link = address.link if address.link.endswith("://") else address.link.rstrip("/")
        same = 0
        while same < min(len(link), len(inner)) and link[-1 - same] == inner[-1 - same]:
            same += 1
        self._outer = address.within + link[: len(link) - same]
        self._inner = inner[: len(inner) - same]
        if not same and not link.endswith("/"):
            self._outer += "/"
            self._inner = self._inner + "/" if self._inner else ""

    def of(self, found: str) -> str:
        return self._outer + found.removeprefix(self._inner).rstrip("/")


def _info(ask: _Ask, inner: str, *, is_http: bool) -> _Info | None:
    """Return what the file system says of a path, or None if nothing is there."""
    if is_http and inner.endswith("/"):
        return {"type": "directory"}
    try:
        info: _Info = ask("info", inner)
    except FileNotFoundError:
        return None
    if is_http:
        # A web server knows no directories; those that list some send on from "set" to "set/", a page of links.
        page = info.get("mimetype") == "text/html" and "." not in inner.rsplit("/", 1)[-1]
        if page or str(info.get("url", "")).partition("?")[0].endswith("/"):
            return {"type": "directory"}
    return info


def _listed(ask: _Ask, inner: str, names: _Names, *, is_http: bool) -> list[tuple[str, _Info]]:
    """Return the entries of a directory; not itself, which object stores may hold as an empty object."""
    try:
        infos: list[_Info] = ask("ls", inner, detail=True)
    except FileNotFoundError:
        if not is_http:
            raise
        return []
    return _entries(infos, inner, names, is_http=is_http)


def _entries(infos: Sequence[_Info], inner: str, names: _Names, *, is_http: bool) -> list[tuple[str, _Info]]:
    here = inner.rstrip("/")
    entries = []
    for info in infos:
        found = str(info["name"])
        bare = found.rstrip("/")
        if bare.strip("/") == here.strip("/"):
            continue
        if is_http and ("?" in bare[len(here) :] or "/" in bare[len(here) + 1 :]):
            continue  # links that sort the page, or lead elsewhere
        entries.append((names.of(found), {**info, "type": "directory"} if found.endswith("/") else info))
    return entries


def _matches(ask: _Ask, pattern: str, names: _Names, *, is_http: bool) -> list[tuple[str, _Info]]:
    """Return what matches a pattern, whose leading directories are taken literally as far as they exist."""
    magic = re.compile(r"[*\[]" if is_http else r"[*?\[]")
    parts = pattern.split("/")
    literal = 0
    while literal < len(parts) - 1:
        if magic.search(parts[literal]) and _info(ask, "/".join(parts[: literal + 1]), is_http=is_http) is None:
            break
        literal += 1
    root, rest = "/".join(parts[:literal]), parts[literal:]
    depth = None if any("**" in part for part in rest) else len(rest)
    try:
        if depth == 1:
            found = {str(info["name"]): info for info in ask("ls", root + "/" if is_http else root, detail=True)}
        else:
            found = ask("find", root, maxdepth=depth, withdirs=True, detail=True)
    except FileNotFoundError:
        return []
    escaped = glob.escape(root) + "/" if literal else ""
    matching = re.compile(glob_translate(escaped + "/".join(rest)))
    here = root.strip("/")
    return [
        (names.of(path), {**info, "type": "directory"} if path.endswith("/") else info)
        for path, info in found.items()
        if path.strip("/") != here and matching.match(path.rstrip("/"))
    ]
