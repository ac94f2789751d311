"""The formats that are known, found by name, by suffix or by their first bytes.

Besides the package's own there are those that :func:`register_format` was given, and those of installed packages that
have an entry point in the group ``lazyshards.formats``. An entry point is loaded only when its name is asked for, or
when files have a suffix that no format known so far has.
"""

from collections.abc import Iterable
from threading import RLock
from typing import TYPE_CHECKING, Any

from lazyshards.errors import FormatError
from lazyshards.formats.arrow import ArrowFormat
from lazyshards.formats.base import Fault, Format
from lazyshards.formats.function import FunctionFormat
from lazyshards.formats.hdf5 import Hdf5Format
from lazyshards.formats.npy import NpyFormat
from lazyshards.formats.npz import NpzFormat
from lazyshards.formats.parquet import ParquetFormat
from lazyshards.formats.raw import RawFormat
from lazyshards.formats.safetensors import SafetensorsFormat
from lazyshards.formats.zarr import ZarrFormat

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Fault", "Format", "find_format", "format_names", "format_of_bytes", "format_of_name", "register_format"]

_GROUP = "lazyshards.formats"
_MEMBERS = ("name", "suffixes", "magic", "directories", "inspect", "read_into")

_FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        ArrowFormat(),
        FunctionFormat(),
        Hdf5Format(),
        NpyFormat(),
        NpzFormat(),
        ParquetFormat(),
        RawFormat(),
        SafetensorsFormat(),
        ZarrFormat(),
    )
}
_BY_SUFFIX: dict[str, Format] = {suffix: format for format in _FORMATS.values() for suffix in format.suffixes}
_BUILT_IN = frozenset(_FORMATS)

_lock = RLock()
_entry_points: "dict[str, EntryPoint] | None" = None
"""Entry points that were not loaded yet; None until they are first looked for."""
_broken: dict[str, str] = {}
"""By name, why a plug-in could not be loaded."""


def format_names() -> tuple[str, ...]:
    """Return the names of all formats that are loaded, sorted."""
    return tuple(sorted(_FORMATS))


def find_format(name: str) -> Format:
    """Return the format of that name.

    Raises
    ------
    FormatError
        If there is none; the message lists those there are. If it is a plug-in that cannot be loaded; the message says
        why.
    """
    try:
        return _FORMATS[name]
    except (KeyError, TypeError):
        pass
    if isinstance(name, str):
        _load(name)
        if name in _FORMATS:
            return _FORMATS[name]
        if name in _broken:
            raise FormatError(_broken[name])
    names = ", ".join(sorted({*_FORMATS, *_plug_ins()}))
    raise FormatError(f"no format is called {name!r}: the formats are {names}")


def format_of_name(path: str) -> Format | None:
    """Return the format that the path's suffix belongs to, or None."""
    dot = path.rfind(".")
    suffix = path[dot:].lower()
    found = _BY_SUFFIX.get(suffix)
    if found is not None or dot < 0 or "/" in suffix or not _plug_ins():
        return found
    for name in list(_plug_ins()):
        _load(name)
    return _BY_SUFFIX.get(suffix)


def format_of_bytes(head: bytes) -> Format | None:
    """Return the format whose files begin with these bytes, or None."""
    return next((format for format in _formats_with_magic() if head.startswith(format.magic)), None)


def _formats_with_magic() -> Iterable[Format]:
    return [format for format in list(_FORMATS.values()) if format.magic]


def register_format(format: Format) -> None:
    """Make a format of one's own known, by its name and its suffixes, in this process.

    Where tasks run in several processes, each of them must register it: do so where the package that holds the format
    is imported, or declare an entry point in the group ``lazyshards.formats``.

    Parameters
    ----------
    format : Format
        An object with the members of :class:`lazyshards.formats.Format`. One whose name was registered before takes
        the other's place; those of lazyshards stay.

    Raises
    ------
    TypeError
        If it lacks a member, or one is of the wrong type.
    ValueError
        If its name is that of one of lazyshards' own formats, or a suffix belongs to another format.
    """
    _check(format)
    if format.name in _BUILT_IN:
        raise ValueError(f"format {format.name!r} is one of lazyshards' own: choose another name")
    with _lock:
        for suffix in format.suffixes:
            owner = _BY_SUFFIX.get(suffix)
            if owner is not None and owner.name != format.name:
                raise ValueError(
                    f"suffix {suffix!r} belongs to the format {owner.name!r}: leave it out of the suffixes of "
                    f"{format.name!r}, and open such files with format={format.name!r}"
                )
        for suffix in [suffix for suffix, owner in _BY_SUFFIX.items() if owner.name == format.name]:
            del _BY_SUFFIX[suffix]
        _FORMATS[format.name] = format
        _BY_SUFFIX.update(dict.fromkeys(format.suffixes, format))
        _broken.pop(format.name, None)


def _check(format: Any) -> None:
    """Raise TypeError for what cannot be a format."""
    kind = type(format).__name__
    if isinstance(format, type):
        raise TypeError(f"{format.__name__} is a class: register an instance of it, {format.__name__}()")
    lacking = [member for member in _MEMBERS if not hasattr(format, member)]
    if lacking:
        raise TypeError(f"a {kind} is no format: it has no {', no '.join(lacking)}")
    if not isinstance(format.name, str) or not format.name:
        raise TypeError(f"the name of {kind} is {format.name!r}, expected a text")
    for member, types in (("suffixes", str), ("magic", bytes)):
        values = getattr(format, member)
        if not isinstance(values, tuple) or not all(isinstance(value, types) and value for value in values):
            raise TypeError(f"the {member} of {kind} are {values!r}, expected a tuple of {types.__name__}")
    wrong = [suffix for suffix in format.suffixes if not suffix.startswith(".") or suffix != suffix.lower()]
    if wrong or any(suffix.count(".") > 1 for suffix in format.suffixes):
        raise TypeError(
            f"the suffixes of {kind} are {format.suffixes!r}, expected each as '.abc': one dot at the start, lower case"
        )
    if not isinstance(format.directories, bool):
        raise TypeError(f"the directories of {kind} is {format.directories!r}, expected True or False")


def _plug_ins() -> "dict[str, EntryPoint]":
    """Return the plug-ins that are installed and not loaded yet."""
    global _entry_points  # looked for once in a process
    if _entry_points is None:
        from importlib.metadata import entry_points

        with _lock:
            _entry_points = {entry.name: entry for entry in entry_points(group=_GROUP)}
    return _entry_points


def _load(name: str) -> None:
    """Load the plug-in of that name, if there is one; if it cannot be, remember why until it is asked for."""
    with _lock:
        entry = _plug_ins().pop(name, None)
        if entry is None:
            return
        try:
            loaded = entry.load()
            register_format(loaded() if isinstance(loaded, type) else loaded)
            if name not in _FORMATS:
                raise ValueError(f"the format it gives is not called {name!r}")
        except Exception as exc:  # noqa: BLE001  # whatever a plug-in does, other formats are still there
            package = f" of the package {entry.dist.name!r}" if entry.dist is not None else ""
            what = f"the format {name!r}, a plug-in{package} ({entry.value})"
            _broken[name] = f"{what}, cannot be loaded: {type(exc).__name__}: {exc}"
