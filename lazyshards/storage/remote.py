"""From URLs to the storage that serves them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import fsspec

from lazyshards.storage.base import OnChange, Storage
from lazyshards.storage.fsspec_storage import FsspecStorage
from lazyshards.storage.mounts import is_name, parse_name, parse_url
from lazyshards.storage.secrets import Vault

__all__ = ["open_remote"]


def open_remote(paths: Sequence[str], options: Mapping[str, object], on_change: OnChange) -> tuple[Storage, list[str]]:
    """Return the storage that serves all URLs, and the URLs by the names that the storage gives them.

    Parameters
    ----------
    paths : sequence of str
        URLs, chained ones included. A name is the URL itself unless that holds a secret.
    options : mapping
        For fsspec.
    on_change : {"raise", "warn", "ignore"}
    """
    vault = Vault()
    names = []
    for path in paths:
        hidden = vault.hide(path)
        try:
            address = parse_name(hidden) if is_name(hidden) else parse_url(hidden)
        except (ImportError, ValueError) as exc:  # a protocol of the chain that is not there
            raise type(exc)(f"{hidden!r} cannot be opened: {exc}") from None
        if "://" not in address.link:
            raise ValueError(f"{hidden!r} is a path of this machine, given together with URLs: give one kind")
        scheme, _, inner = address.link.partition("://")
        if scheme in {"zip", "tar"} and not address.suffix:
            raise ValueError(
                f"{hidden!r} names no archive: say what lies in it, then the archive, as in "
                f"'{scheme}://*.npy::file://{inner}'"
            )
        names.append(address._replace(suffix=_absolute(address.suffix)).name)
    return FsspecStorage(dict(options), on_change, vault=vault), names


def _absolute(suffix: str) -> str:
    """Return the rest of a chain with its paths of this machine made absolute, so that they stay right elsewhere."""
    links = []
    for link in suffix.split("::"):
        scheme, separator, path = link.partition("://")
        if separator and scheme in {"file", "local"}:
            link = f"{scheme}://{Path(path).absolute()}"  # noqa: PLW2901
        elif link and not separator and link not in fsspec.available_protocols():
            link = f"file://{Path(link).absolute()}"  # noqa: PLW2901
        links.append(link)
    return "::".join(links)
