"""Zarr stores, versions 2 and 3: a directory of metadata and chunks, one store a shard.

The metadata is parsed and chunks are read and decoded here, each straight into place where it can go there, with
numcodecs' and zlib's decoders: that needs no event loop, opens a store in a tenth of zarr-python's time, tells a lost
chunk from an empty one, and never inflates more than a chunk holds. What is not known here is refused by its name.

Source: the Zarr specifications, https://zarr-specs.readthedocs.io, and numcodecs' own documents of its codecs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.formats.faults import list_names, unreadable
from lazyshards.formats.options import check_options, name_option
from lazyshards.formats.stamps import check_stamps
from lazyshards.formats.zarr_chunks import read_chunks
from lazyshards.formats.zarr_codecs import RefusedError
from lazyshards.formats.zarr_files import join
from lazyshards.formats.zarr_metadata import ZarrArray, parse_array
from lazyshards.layout import Decoded, Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Storage

__all__ = ["ZarrFormat", "source_of_metadata"]

_HEAD_NBYTES = 64 << 10
"""Bytes of the first read of a metadata file: more than any without large attributes."""
_MOST_METADATA_NBYTES = 16 << 20
"""Bytes of the longest metadata that is parsed."""
_MOST_EDGES = 4096
"""Chunk borders that are told to the planner at most."""


class ZarrFormat:
    """Zarr stores in directories, one array of each.

    Availability: with numcodecs, which ``lazyshards[zarr]`` brings. Options: ``array``, its path within the store,
    found alone if there is only one; ``missing_chunks``, ``"raise"`` or ``"fill"``: what a chunk that is not there is.
    """

    name = "zarr"
    suffixes = (".zarr",)
    magic: tuple[bytes, ...] = ()
    directories = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every store."""
        check_options(options, self.name, ("array", "missing_chunks"))
        name, missing = name_option(options, "array"), options.get("missing_chunks", "raise")
        if missing not in ("raise", "fill"):
            raise ValueError(f'missing_chunks={missing!r} is not a policy: use "raise" or "fill"')
        folders = [join(path, name.strip("/")) if name else path for path in paths]
        found: list[Shard | Fault] = []
        for path, folder, head in zip(paths, folders, _metadata(folders, storage), strict=True):
            try:
                found.append(_describe(path, folder, head, storage, fills=missing == "fill"))
            except RefusedError as exc:
                found.append(Fault(path, str(exc)))
            except OSError as exc:
                found.append(unreadable(path, exc))
        return found

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` chunk by chunk."""
        assert isinstance(shard.source, Decoded)
        array = shard.source.detail
        assert isinstance(array, ZarrArray)
        try:
            read_chunks(shard, array, start, out, cell, storage)
        finally:
            # If the store was written anew meanwhile, that is the error to tell.
            check_stamps([(join(array.folder, array.metadata), shard.stamp)], storage)


class _Metadata(NamedTuple):
    """The metadata file of a node, with its name."""

    name: str
    head: Head


def _metadata(folders: Sequence[str], storage: Storage) -> list[_Metadata]:
    """Return the metadata of every folder: of version 3 if there is some, else of version 2, of an array or a group."""
    found: list[_Metadata | None] = [None] * len(folders)
    left = list(range(len(folders)))
    for name in ("zarr.json", ".zarray", ".zgroup"):
        heads = storage.heads([join(folders[i], name) for i in left], _HEAD_NBYTES)
        again = []
        for i, head in zip(left, heads, strict=True):
            if isinstance(head.error, FileNotFoundError | NotADirectoryError):
                again.append(i)
                found[i] = found[i] or _Metadata(name, head)
            else:
                found[i] = _Metadata(name, head)
        left = again
    return [item for item in found if item is not None]


def _describe(path: str, folder: str, found: _Metadata, storage: Storage, *, fills: bool) -> Shard | Fault:
    """Return the shard that the metadata describes; of a group, that of its only array."""
    name, head = found
    if head.error is not None:
        return _absent(path, folder, head.error, storage)
    described = _parse(join(folder, name), head, storage)
    if name == ".zgroup" or (name == "zarr.json" and described.get("node_type") == "group"):
        names = _arrays(folder, described, storage)
        if len(names) != 1:
            inner = "" if folder == path else f" in {folder!r}"
            raise RefusedError(
                f"is a group of {len(names):,} arrays{inner} ({list_names(names)}): "
                f"say which with array=, such as array={join(folder, names[0])[len(path) :].strip('/')!r}"
                if names
                else f"is a group without arrays{inner}: "
                "if there are some in groups below it, say which with array='group/name'"
            )
        (found,) = _metadata([join(folder, names[0])], storage)
        return _describe(path, join(folder, names[0]), found, storage, fills=fills)
    array, dtype = parse_array(name, folder, described, fills=fills)
    return Shard(path, array.shape[0], array.shape[1:], dtype, head.stamp, _source(array))


def _source(array: ZarrArray) -> Decoded:
    rows, step = array.shape[0], array.chunks[0]
    return Decoded(array, tuple(range(0, rows, step)) if rows <= _MOST_EDGES * step else ())


def source_of_metadata(name: str, folder: str, text: str, options: Mapping[str, object]) -> Decoded:
    """Return the source of rows that the text of an array's metadata describes, as inspecting the store would.

    Parameters
    ----------
    name : str
        Of the metadata file.
    folder : str
        The array's own directory.
    text : str
        What the file holds.
    options : mapping
        Of the format.

    Raises
    ------
    ValueError
        If it describes no array that can be read.
    """
    try:
        array, _ = parse_array(name, folder, json.loads(text), fills=options.get("missing_chunks") == "fill")
    except (RefusedError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc
    return _source(array)


def _absent(path: str, folder: str, error: OSError, storage: Storage) -> Fault:
    """Return the fault of a store whose metadata is not there."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return unreadable(path, error)
    kind, _ = storage.find(path)
    if kind == "missing":
        return unreadable(path, error)
    inner = "" if folder == path else f" at array={folder[len(path) :].strip('/')!r}"
    return Fault(path, f"holds no Zarr array{inner}: neither zarr.json nor .zarray is there")


def _parse(path: str, head: Head, storage: Storage) -> dict[str, Any]:
    data, size = head.data, head.stamp.size
    if size > _MOST_METADATA_NBYTES:
        raise RefusedError(f"has metadata {path!r} of {size:,} bytes, expected at most {_MOST_METADATA_NBYTES:,}")
    if size > len(data):
        (data,) = storage.fetch([(path, 0, size)])
    try:
        described = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise RefusedError(f"has damaged metadata {path!r}: {exc}") from exc
    if not isinstance(described, dict):
        raise RefusedError(f"has damaged metadata {path!r}: it is no JSON object")
    return described


def _arrays(folder: str, described: Mapping[str, Any], storage: Storage) -> list[str]:
    """Return the names of the arrays of a group."""
    consolidated = described.get("consolidated_metadata")
    if isinstance(consolidated, dict) and isinstance(consolidated.get("metadata"), dict):
        nodes = consolidated["metadata"].items()
        return sorted(name for name, node in nodes if isinstance(node, dict) and node.get("node_type") == "array")
    _, entries = storage.find(folder)
    names = sorted(
        entry.path.partition("::")[0].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.is_directory
    )
    found = []
    for name, (kind, head) in zip(names, _metadata([join(folder, name) for name in names], storage), strict=True):
        if head.error is None and (kind == ".zarray" or (kind == "zarr.json" and b'"array"' in head.data)):
            found.append(name)
    return found
