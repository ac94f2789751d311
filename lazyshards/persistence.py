"""Rows that were computed once and kept: in memory, or as shards of their own."""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards.atomic import write_atomically
from lazyshards.details import descr_of, options_text
from lazyshards.engines.handover import scan_together
from lazyshards.engines.ranks import together
from lazyshards.errors import LayoutError
from lazyshards.layout import Layout
from lazyshards.manifest_bytes import NAME as MANIFEST
from lazyshards.storage.memory import keep_array
from lazyshards.writing import write_sealed

__all__ = ["cached_layout", "kept_layout"]

_MARK = ".lazyshards-cache.json"
"""Name of the file beside cached shards that says what they were made of; a scan leaves hidden names out."""
_NO_SHARDS = {_MARK, MANIFEST}
"""Files beside them that may come and go."""


def kept_layout(array: npt.NDArray[np.generic], fingerprint: str, source: str) -> Layout:
    """Return the layout of rows in the memory of this process.

    Parameters
    ----------
    array : ndarray
        The rows; nobody may change them any more.
    fingerprint : str
        Of what was computed.
    source : str
        What that was, for people.
    """
    storage = keep_array(np.ascontiguousarray(array), fingerprint)
    return Layout(
        format="memory",
        storage=storage,
        row_shape=array.shape[1:],
        dtype=array.dtype,
        root=storage.root,
        names=(storage.path.removeprefix(storage.root),),
        ends=np.array([len(array)], np.int64),
        stamps=np.array([[array.nbytes, 0, 0]], np.int64),
        offsets=np.zeros(1, np.int64),
        identity=fingerprint,
        note=f"persisted: in the memory of this process, {source}",
    )


def cached_layout(
    dataset: Any,
    path: str | os.PathLike[str],
    format: str,
    engine: str,
    source: str,
    *,
    overwrite: bool,
    progress: bool,
    options: Mapping[str, object],
) -> Layout:
    """Return the layout of shards that hold what a dataset computes, written now if they are not there.

    Parameters
    ----------
    dataset : ShardedDataset
    path : str or path
        A directory of this machine.
    format : str
    engine : str
        That of the dataset, whose ranks do it together.
    source : str
        What is cached, for people.
    overwrite : bool
        Whether what was made of another dataset is replaced.
    progress : bool
        Show a progress bar while it is written.
    options : mapping
        Of :func:`lazyshards.write_shards`.
    """
    place = _place(path)
    wanted = _mark_of(dataset, format, options)
    state = together(
        partial(_look, place, wanted), lambda found: {"cache": found}, engine, what=f"looking at {place!r}"
    )
    if state and not overwrite:
        raise FileExistsError(errno.EEXIST, f"{state}; choose another directory, or pass overwrite=True", place)
    if state is not None:
        seal = partial(_write_mark, wanted=wanted)
        write_sealed(dataset, place, seal, format=format, overwrite=overwrite, progress=progress, options=options)
    layout = scan_together(place, engine=engine, manifest="auto", format=format)
    found, expected = (
        (layout.rows, layout.row_shape, layout.dtype),
        (*dataset.shape[:1], dataset.shape[1:], dataset.dtype),
    )
    if found != expected:
        raise LayoutError(
            f"{place!r} holds {found[0]:,} rows of shape {found[1]} and {found[2]}, expected {expected[0]:,} of "
            f"{expected[1]} and {expected[2]} as were cached: remove it if shards were lost; if it is new, {format} "
            'files do not hold such rows, and format="npy" does'
        )
    return replace(layout, note=f"cached: as {format} shards in {place!r}, {source}")


def _place(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is a {type(path).__name__}, expected the directory that the shards are written into")
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(f"{text!r} is a URL: a cache is a directory of this machine")
    return os.path.abspath(os.path.expanduser(text))


def _mark_of(dataset: Any, format: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return what tells that shards hold what a dataset computes: its fingerprint, and the times of its files."""
    digest = blake2b(digest_size=16)
    for shard in dataset.shards:
        size, mtime_ns, _, etag = shard.stamp
        digest.update(repr((size, mtime_ns, etag)).encode())
    return {
        "fingerprint": dataset.fingerprint,
        "files": digest.hexdigest(),
        "dtype": descr_of(dataset.dtype),
        "written": options_text({"format": format, **options}),
    }


def _look(place: str, wanted: Mapping[str, object]) -> str | None:
    """Return None if the cache is there, an empty text if nothing is, else what is there instead."""
    if not os.path.isdir(place):
        return "it is a file" if os.path.lexists(place) else ""
    try:
        with open(os.path.join(place, _MARK), encoding="utf-8") as file:
            found = json.load(file)
        found = dict(found)
    except FileNotFoundError:
        return "it holds files that are not known to be a cache" if os.listdir(place) else ""
    except (OSError, ValueError, TypeError) as exc:
        return f"its {_MARK} cannot be read ({exc})"
    expected = json.loads(json.dumps(wanted))
    for name, what in (
        ("fingerprint", "is a cache of another dataset: its fingerprint is {}, expected {}"),
        ("files", "is a cache of files that changed since"),
        ("dtype", "is a cache of another dtype: {}, expected {}"),
        ("written", "is a cache written in another way: {}, expected {}"),
    ):
        if found.get(name) != expected[name]:
            return "it " + what.format(found.get(name), expected[name])
    if found.get("shards") != _files_of(place):
        return "it is a cache whose own files changed since they were written"
    return None


def _files_of(place: str) -> str:
    """Return what tells that files are those that were written: a digest of their names, sizes and times."""
    digest = blake2b(digest_size=16)
    found = [os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names]
    for path in sorted(found):
        name = os.path.relpath(path, place)
        if name not in _NO_SHARDS:
            status = os.stat(path)
            digest.update(repr((name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def _write_mark(folder: str, wanted: Mapping[str, object]) -> None:
    write_atomically(os.path.join(folder, _MARK), json.dumps({**wanted, "shards": _files_of(folder)}).encode())
