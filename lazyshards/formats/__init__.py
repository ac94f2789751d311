"""The formats that are known, found by name, by suffix or by their first bytes."""

from collections.abc import Iterable

from lazyshards.errors import FormatError
from lazyshards.formats.base import Fault, Format
from lazyshards.formats.npy import NpyFormat

__all__ = ["Fault", "Format", "find_format", "format_names", "format_of_bytes", "format_of_name"]

_FORMATS: dict[str, Format] = {format.name: format for format in (NpyFormat(),)}
_BY_SUFFIX: dict[str, Format] = {suffix: format for format in _FORMATS.values() for suffix in format.suffixes}


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, sorted."""
    return tuple(sorted(_FORMATS))


def find_format(name: str) -> Format:
    """Return the format of that name.

    Raises
    ------
    FormatError
        If there is none; the message lists those there are.
    """
    try:
        return _FORMATS[name]
    except (KeyError, TypeError):
        raise FormatError(f"no format is called {name!r}: the formats are {', '.join(format_names())}") from None


def format_of_name(path: str) -> Format | None:
    """Return the format that the path's suffix belongs to, or None."""
    return _BY_SUFFIX.get(path[path.rfind(".") :].lower())


def format_of_bytes(head: bytes) -> Format | None:
    """Return the format whose files begin with these bytes, or None."""
    return next((format for format in _formats_with_magic() if head.startswith(format.magic)), None)


def _formats_with_magic() -> Iterable[Format]:
    return [format for format in _FORMATS.values() if format.magic]
