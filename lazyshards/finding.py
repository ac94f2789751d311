"""From a path, a glob or a list to the shards that it means: list, choose the format, order, look for holes."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lazyshards import manifest as manifests
from lazyshards import unfinished
from lazyshards.details import options_of
from lazyshards.errors import FormatError, LayoutError, ShardReadError, ShardsNotFoundError
from lazyshards.formats import find_format, format_names, format_of_bytes, format_of_name
from lazyshards.formats.base import Fault, Format, describe_faults
from lazyshards.layout import native_dtype
from lazyshards.manifest import Manifest
from lazyshards.storage import Entry, Storage, open_storage

__all__ = ["Found", "address", "check_holes", "locate", "natural_key"]

_STRAY_SUFFIXES = frozenset(
    (".crc", ".tmp", ".temp", ".part", ".partial", ".swp", ".swo", ".bak", ".lock", ".md5", ".sha256")
)
"""Endings of files that tools leave beside shards."""
_UNFINISHED = re.compile(r"\.(tmp|temp|part)[-._]?\w*$", re.IGNORECASE)
"""Endings such as ``.temp4711``, which writers give to files that are not finished."""
_STRAY_NAMES = frozenset(("Thumbs.db", "desktop.ini", "lost+found", "meta.json"))
"""Files and directories that systems leave anywhere, and the description beside raw shards."""
_MAGIC_NBYTES = 32
"""First bytes read of files whose suffix tells nothing."""


class Found(NamedTuple):
    """Shards that were found, and how they would be read."""

    place: str
    """Where they were looked for, fit for messages."""
    paths: list[str]
    """The shards, in order."""
    reader: Format
    """Their format."""
    storage: Storage
    """Where they are."""
    options: Mapping[str, object]
    """Options of the format."""
    dtype: np.dtype[np.generic] | None
    """What the elements are cast to, if that was asked for."""
    folder: str = ""
    """The directory that was searched, with the separator; empty if it was something else."""
    manifest: str = ""
    """The manifest that was found beside them; empty if there is none."""
    saved: Manifest | None = None
    """The manifest, if it was asked for by its own name: then nothing was looked for."""


def locate(
    path: object,
    *,
    format: str | None = None,
    order: str = "natural",
    holes: str = "raise",
    on_change: str = "raise",
    storage_options: Mapping[str, object] | None = None,
    dtype: object = None,
    options: Mapping[str, object] | None = None,
    storage: Storage | None = None,
) -> Found:
    """Return the shards at ``path``, in order, without looking into them.

    For the arguments see `lazyshards.catalog.scan`; a ``storage`` that is there already is used as it is.

    Raises
    ------
    ShardsNotFoundError, FormatError, LayoutError, ShardReadError
    """
    if order not in ("natural", "name"):
        raise ValueError(f'order={order!r} is not an order: use "natural" or "name"; a list keeps its own order')
    if holes not in ("raise", "ignore"):
        raise ValueError(f'holes={holes!r} is not a policy: use "raise" or "ignore"')
    options = dict(options or {})
    if format is None and "reader" in options:
        format = "function"
    chosen = find_format(format) if format is not None else None
    given = _path_list(path)
    searched = _Searched([])
    saved = None
    if given is not None:
        if not given:
            raise ShardsNotFoundError("the list of shards is empty")
        storage, paths = open_storage(given, storage_options, on_change)
        known = [format_of_name(path) for path in paths]
        place = f"the list of {len(paths):,} paths"
        reader = chosen or _tell_format(paths, known, storage, place)
    else:
        if storage is None:
            storage, (place,) = open_storage([_path_text(path)], storage_options, on_change)
        else:
            place = _path_text(path).rstrip("/") or "/"
        if _name(place) == manifests.NAME and chosen is None:
            saved = manifests.read(place, storage)
            if not options and dtype is None:
                options = options_of(saved.layout.options)
            paths, reader = [], find_format(saved.layout.format)
        else:
            searched, reader = _search(place, storage, chosen)
            paths = searched.paths
            if paths != [place]:  # one file that was asked for by its own name is no sequence
                paths = _arrange(paths, place, order, holes)
    if dtype is not None and getattr(reader, "takes_dtype", False):
        options["dtype"], dtype = dtype, None
    cast = None if dtype is None else native_dtype(dtype)
    return Found(place, paths, reader, storage, options, cast, searched.folder, searched.manifest, saved)


def address(
    path: object, storage_options: Mapping[str, object] | None, on_change: str
) -> tuple[Storage, Sequence[str]]:
    """Return the storage that serves ``path``, and the path, or those of a list, as it takes them; looks for nothing.

    For the arguments see `lazyshards.catalog.scan`.
    """
    given = _path_list(path)
    return open_storage([_path_text(path)] if given is None else given, storage_options, on_change)


def _path_text(path: object) -> str:
    try:
        text = os.fspath(path)  # type: ignore[call-overload]  # what it raises is the answer
    except TypeError:
        raise TypeError(f"{path!r} is not a path: expected a directory, a glob, a file, or a list of files") from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text:
        raise ValueError("the path is empty: expected a directory, a glob, a file, or a list of files")
    return str(text)


def _path_list(path: object) -> list[str] | None:
    """Return the paths of a list, or None for a single path."""
    if isinstance(path, str | bytes | os.PathLike) or not isinstance(path, Iterable):
        return None
    return [_path_text(item) for item in path]


class _Searched(NamedTuple):
    """What one path names."""

    paths: list[str]
    """The shards."""
    folder: str = ""
    """The directory that holds them, with the separator, if it is one."""
    manifest: str = ""
    """A manifest that lies in it."""


def _search(place: str, storage: Storage, chosen: Format | None) -> tuple[_Searched, Format]:
    """Return the shards that one path names, and their format."""
    kind, entries = storage.find(place)
    store = chosen or format_of_name(place)
    if kind == "directory" and store is not None and store.directories and not _holds(entries, store):
        return _Searched([place]), store
    if kind == "missing":
        raise ShardsNotFoundError(f"{place!r} does not exist" + _nearby(place))
    if kind == "file":
        return _Searched([place]), chosen or _tell_format([place], [format_of_name(place)], storage, repr(place))
    if kind == "glob" and not entries:
        raise ShardsNotFoundError(f"nothing matches {place!r}")
    folder = (place if place.endswith("/") else f"{place}/") if kind == "directory" else ""
    if folder:
        entries = unfinished.current(place, folder, entries, storage)
    manifest = folder + manifests.NAME
    if not folder or (manifest, False) not in entries:
        manifest = ""
    entries, known = _sift(entries, place if kind == "glob" else "")
    if chosen is None:
        if entries and not any(known) and all([is_directory for _, is_directory in entries]):
            raise ShardsNotFoundError(_nothing_known([path for path, _ in entries], repr(place)))
        chosen = _tell_format([path for path, _ in entries], known, storage, repr(place))
    suffixed = entries
    if known.count(chosen) < len(entries):
        suffixed = [entry for entry, format in zip(entries, known, strict=True) if format is chosen]
    # Where no suffix tells, every file is taken for a shard, so that a damaged one is not passed over.
    wanted = suffixed or [entry for entry in entries if entry.is_directory == chosen.directories]
    mistaken = sorted([path for path, is_directory in wanted if is_directory != chosen.directories])
    if mistaken:
        is_what, expected = ("a file", "a store") if chosen.directories else ("a directory", "a file")
        faults = [Fault(path, f"is {is_what}, expected {expected} of format {chosen.name}") for path in mistaken]
        raise LayoutError(describe_faults(faults, f"{place!r} holds names like those of shards"))
    if not wanted:
        held = _contents([entry.path for entry in entries])
        raise ShardsNotFoundError(f"{place!r} holds no {chosen.name} shards; it holds {held}")
    return _Searched([path for path, _ in wanted], folder, manifest), chosen


def _holds(entries: Sequence[Entry], format: Format) -> bool:
    return any([format_of_name(entry.path) is format for entry in entries])


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _sift(entries: Sequence[Entry], pattern: str) -> tuple[list[Entry], list[Format | None]]:
    """Return the entries without hidden files, markers and temporary files, and the format that each name tells.

    A ``pattern`` that itself names hidden or marked files asks for them.
    """
    hidden = "" if pattern[pattern.rfind("/") + 1 :][:1] in {".", "_"} else "._"
    kept, rest = _alike(entries, hidden)
    formats: list[Format | None] = [format_of_name(kept[0][0])] * len(kept) if kept else []
    suffixes: dict[str, tuple[bool, Format | None]] = {}
    for entry in rest:
        path = entry[0]
        name = path[path.rfind("/", 0, -1) + 1 :]
        suffix = name[name.rfind(".") :]
        try:
            stray, format = suffixes[suffix]
        except KeyError:
            stray = suffix.lower() in _STRAY_SUFFIXES or _UNFINISHED.search(suffix) is not None
            format = format_of_name(name.rstrip("/"))
            suffixes[suffix] = stray, format
        if not (stray or name[0] in hidden or name[-1] in "~#" or name in _STRAY_NAMES):
            kept.append(entry)
            formats.append(format)
    return kept, formats


def _alike(entries: Sequence[Entry], hidden: str) -> tuple[list[Entry], Sequence[Entry]]:
    """Return the entries that end as one of them does, if that is how shards end, and the others to look at one by one.

    A straight path for what nearly every directory holds: files of one format, and perhaps a few markers.
    """
    path = entries[len(entries) // 2][0] if entries else ""
    folder, suffix = path[: path.rfind("/") + 1], path[path.rfind(".") :]
    if format_of_name(path) is None or "/" in suffix or any([name.endswith(suffix) for name in _STRAY_NAMES]):
        return [], entries
    alike = [entry for entry in entries if entry[0].endswith(suffix)]
    text = "\n" + "\n".join([path for path, _ in alike])
    together = text.count("\n" + folder) == len(alike) and text.count("/") == len(alike) * folder.count("/")
    if not together or any([f"\n{folder}{sign}" in text for sign in hidden]):
        return [], entries
    return alike, () if len(alike) == len(entries) else [entry for entry in entries if not entry[0].endswith(suffix)]


def _nearby(place: str) -> str:
    parent, _, name = place.rstrip("/").rpartition("/")
    return f" (the directory {parent!r} was searched for {name!r})" if parent and "://" not in place else ""


def _contents(paths: Sequence[str]) -> str:
    names = sorted(map(_name, paths))
    if not names:
        return "nothing"
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _tell_format(paths: Sequence[str], known: Sequence[Format | None], storage: Storage, place: str) -> Format:
    """Return the one format of all files: by suffix, and where no suffix tells, by their first bytes.

    Raises
    ------
    FormatError
        If they are of several formats.
    ShardsNotFoundError
        If none of them is of a known format.
    """
    counts = Counter(known)
    if counts[None] == len(paths):
        heads = storage.heads(paths, _MAGIC_NBYTES)
        error = heads[0].error if len(paths) == 1 else None
        if error is not None and not isinstance(error, IsADirectoryError):
            kind = ShardsNotFoundError if isinstance(error, FileNotFoundError) else ShardReadError
            raise kind(f"{paths[0]!r} cannot be read: {error.strerror or error}") from error
        known = [format_of_bytes(head.data) for head in heads]
        counts = Counter(known)
    formats = sorted([format for format in counts if format is not None], key=lambda kind: kind.name)
    if not formats:
        raise ShardsNotFoundError(_nothing_known(paths, place))
    if len(formats) > 1:
        mixture = ", ".join(f"{counts[format]:,} {format.name} ({paths[known.index(format)]!r})" for format in formats)
        raise FormatError(
            f"{place} holds shards of several formats: {mixture}; choose one with format=, for example "
            f"format={formats[0].name!r}"
        )
    return formats[0]


def _nothing_known(paths: Sequence[str], place: str) -> str:
    """Return the message that none of the paths is of a known format, and what might help."""
    names = ", ".join([name for name in format_names() if name != "function"])
    if [place] == list(map(repr, paths)):
        suffix = _name(paths[0]).rpartition(".")[2]
        if suffix in {"zip", "tar"} and "://" not in place:
            return f"{place} is an archive: open what lies in it, for example '{suffix}://*.npy::file://{paths[0]}'"
        text = f"{place} is of no known format ({names}): name one with format= if it has another suffix"
        return f"{text}, or pass reader=, a function of your own that reads it, as for CSV"
    text = f"{place} holds no shards of a known format ({names}); it holds {_contents(paths)}; "
    text += "name the format with format= if it has another suffix, or pass reader=, a function of your own. "
    if place.startswith("the list of"):
        return text + "A list names files: open a directory or a glob by itself, and join several with concat()"
    return text + "Subdirectories are not searched: use a glob such as 'path/**/*.npy'"


_DIGITS = re.compile(r"(\d+)")


def natural_key(path: str) -> tuple[tuple[int | str, ...], str]:
    """Return a sort key by which numbers in a path compare as numbers, so that 2 comes before 10.

    Texts and numbers alternate, so that two keys always compare; names that differ only in leading zeros are told
    apart by the path itself.
    """
    parts = _DIGITS.split(path)
    return tuple([int(part) if i % 2 else part for i, part in enumerate(parts)]), path


def _arrange(paths: list[str], place: str, order: str, holes: str) -> list[str]:
    """Return the paths in order, and see that no number is missing or there twice."""
    ordered = sorted(paths)
    numbered = _single_number(ordered)
    if numbered is None:
        return sorted(ordered, key=natural_key) if order == "natural" else ordered
    numbers, texts = numbered
    if holes == "raise":
        _check_sequence(ordered, numbers, texts, place)
    if order == "name":
        return ordered
    if numbers == sorted(numbers):
        return ordered
    return [path for _, path in sorted(zip(numbers, ordered, strict=True))]


def check_holes(paths: Sequence[str], place: str, order: str) -> None:
    """Raise LayoutError if the names of shards skip a number, or have one twice.

    Parameters
    ----------
    paths : sequence of str
    place : str
        Where they are, for the message.
    order : {"natural", "name"}
    """
    _arrange(list(dict.fromkeys(paths)), place, order, "raise")


def _single_number(paths: list[str]) -> tuple[list[int], tuple[str, str]] | None:
    """Return the one number that tells the paths apart and the texts around it, or None if there is no such one."""
    first, last = paths[0], paths[-1]
    if len(paths) == 1:
        # One shard of many says so in its own name: part-00000-of-00032.
        match = _OF.search(first)
        return ([int(match[1])], (first[: match.start(1)], first[match.end(1) :])) if match else None
    # What the first and last of the sorted paths have in common at the start, all have.
    n = 0
    most = min(len(first), len(last))
    while n < most and first[n] == last[n]:
        n += 1
    while n and first[n - 1].isdigit():
        n -= 1
    prefix = first[:n]
    match = _DIGITS.match(first, n)
    if match is None:
        return None
    suffix = first[match.end() :]
    stop = -len(suffix) or None
    texts = [path[n:stop] for path in paths]
    if not all(map(str.isdecimal, texts)) or not all([path.endswith(suffix) for path in paths]):
        return None
    return list(map(int, texts)), (prefix, suffix)


_OF = re.compile(r"(\d+)-of-(\d+)\D*$")


def _check_sequence(paths: Sequence[str], numbers: Sequence[int], texts: tuple[str, str], place: str) -> None:
    """Raise LayoutError if numbers are missing from a sequence, or are there twice."""
    present = set(numbers)
    if len(present) < len(numbers):
        holders = defaultdict(list)
        for number, path in zip(numbers, paths, strict=True):
            holders[number].append(path)
        faults = [
            Fault(held[1], f"has the number {number} of {held[0]!r}, expected each number once")
            for number, held in sorted(holders.items())
            if len(held) > 1
        ]
        raise LayoutError(describe_faults(faults, f"{place!r} holds shards with the same number"))
    low, high = min(present), max(present)
    total = re.match(r"-of-(\d+)\D*$", texts[1])
    if total is not None:
        count = int(total[1])
        low = 1 if high == count else 0
        high = max(high, count - 1 + low)
    count = high - low + 1 - len(present)
    if not count:
        return
    width = len(_DIGITS.match(paths[0], len(texts[0]))[1])  # type: ignore[index]  # it matched before
    zeros = any(_DIGITS.match(path, len(texts[0]))[1].startswith("0") for path in paths)  # type: ignore[index]
    missing: list[str] = []
    number = low
    while len(missing) < 10 and number <= high:
        if number not in present:
            missing.append(f"{_name(texts[0] + (f'{number:0{width}d}' if zeros else str(number)) + texts[1])}")
        number += 1
    more = f" and {count - 10:,} more" if count > 10 else ""
    raise LayoutError(
        f"{place!r} has a hole in its numbered shards: {', '.join(missing)}{more} missing "
        f"({len(present):,} shards found, numbers {low} to {high} expected); restore them, or pass "
        'holes="ignore", or a list of the files, if that is how it should be'
    )
