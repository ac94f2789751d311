"""Where bytes come from: files of this machine, and anything that fsspec knows."""

import os
from collections.abc import Mapping, Sequence

from lazyshards.storage.base import Entry, Head, OnChange, Part, Stamp, Storage, check_on_change
from lazyshards.storage.local import LocalStorage

__all__ = ["Entry", "Head", "LocalStorage", "OnChange", "Part", "Stamp", "Storage", "open_storage"]


def open_storage(
    paths: Sequence[str], options: Mapping[str, object] | None, on_change: str
) -> tuple[Storage, list[str]]:
    """Return the storage that serves all ``paths``, and the paths as it takes them.

    Parameters
    ----------
    paths : sequence of str
        Paths of this machine, or URLs of one kind.
    options : mapping, optional
        For fsspec.
    on_change : {"raise", "warn", "ignore"}
    """
    on_change = check_on_change(on_change)
    paths = [_without_file_scheme(path) for path in paths]
    is_url = ["://" in path or ("::" in path and not os.path.lexists(path)) for path in paths]
    if not any(is_url):
        if options:
            raise ValueError(f"storage_options are for URLs, but {paths[0]!r} is a path of this machine")
        return LocalStorage(on_change), [_absolute(path) for path in paths]
    from lazyshards.storage.remote import open_remote

    return open_remote(paths, options or {}, on_change)


def _without_file_scheme(path: str) -> str:
    """Return the path in a URL of this machine; other URLs, and chained ones, as they are."""
    scheme, separator, rest = path.partition("://")
    return rest if separator and scheme in {"file", "local"} and "::" not in rest else path


def _absolute(path: str) -> str:
    """Return the path so that it stays right if the working directory changes, or in another process."""
    if path.startswith("~") and not os.path.lexists(path):
        path = os.path.expanduser(path)
    if not path.startswith("/"):
        path = os.path.join(os.getcwd(), path)
    if "/./" in path or path.endswith("/."):  # ".." stays, since what is before it may be a symbolic link
        path = "/".join([part for part in path.split("/") if part != "."])
    return path.rstrip("/") or "/"
