"""A manifest as bytes: an Arrow file with a column for each thing that is known of all shards.

Its paths are relative and cannot leave its own directory; nothing in it is ever run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards._version import __version__
from lazyshards.details import DetailDecoder, descr_of, dtype_of, encode_details, names_function
from lazyshards.errors import FormatError, LayoutError, LazyShardsError
from lazyshards.hashing import DIGEST_NBYTES
from lazyshards.holders import (
    decode_store,
    encode_store,
    file_of,
    in_file,
    read_stores,
    store_source,
    without_file,
)
from lazyshards.layout import MOST_AXES, Decoded, Extent, Extents, Layout, Names, Planes, Source
from lazyshards.storage.base import Stamp, Storage

__all__ = ["NAME", "Manifest", "as_stored", "decode", "encode"]

NAME = "_lazyshards.arrow"
"""Name of the file, which a scan of the directory leaves out."""
_VERSION = 1
_KEY = b"lazyshards"
_PACKED, _PLANES, _EXTENTS, _DECODED, _UNKNOWN, _STORE = range(6)
"""How a shard's rows lie: of unknown ones the file must be looked at again."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest holds."""

    path: str
    """Where it lies."""
    layout: Layout
    """As it was saved, without casts."""
    is_complete: bool
    """Whether it says of every shard where its rows lie; else the shards must be inspected again."""
    beside: Mapping[str, Stamp]
    """Stamps of files beside the shards that say how those are read, by name."""
    algorithm: str = ""
    """Of the content hashes; empty if there are none."""
    hashes: npt.NDArray[np.uint8] | None = None
    """(shards, 16): content hash of each shard."""
    inner: npt.NDArray[np.int64] | None = None
    """How many characters at the end of each shard's path say where it lies in its file; None if no one does."""

    def listed(self) -> tuple[list[str], Sequence[int]]:
        """Return the files and stores that a listing shows, and of each the number of its first shard."""
        paths = [self.layout.root + name for name in self.layout.names]
        if self.inner is None:
            return paths, range(len(paths))
        files: dict[str, int] = {}
        for i, (path, count) in enumerate(zip(paths, self.inner.tolist(), strict=True)):
            files.setdefault(path[: len(path) - count], i)
        return list(files), list(files.values())

    def stamped(self) -> dict[str, str]:
        """Return the path of each store, and the name in it of the file whose stamp is its own."""
        sources = self.layout.sources
        if self.layout.format != "zarr" or not isinstance(sources, _Sources):
            return {}
        return {self.layout.path(i): name for i in sources if (name := sources.stamped(i))}

    @property
    def folder(self) -> str:
        """The directory that it lies in, with the separator."""
        return self.path[: -len(NAME)]


class _Sources(Mapping[int, Source]):
    """Sources of the shards that are not one packed run, each made when it is asked for."""

    def __init__(
        self,
        numbers: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int8],
        texts: Names,
        shared: Sequence[str],
        places: "_Places",
    ) -> None:
        self._numbers = numbers
        """Numbers of those shards, ascending."""
        self._kinds = kinds
        self._texts = texts
        self._shared = shared
        self._decoder = DetailDecoder(shared)
        self._places = places

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    def __contains__(self, shard: object) -> bool:
        return isinstance(shard, int) and self._find(shard) is not None

    def __getitem__(self, shard: int) -> Source:
        at = self._find(shard)
        if at is None:
            raise KeyError(shard)
        places = self._places
        path, count = places.root + places.names[shard], 0 if places.inner is None else int(places.inner[shard])
        try:
            if self._kinds[at] == _STORE:
                return store_source(path, decode_store(self._texts[at], self._shared), places.options)
            source = _source(int(self._kinds[at]), self._texts[at], self._decoder)
        except ValueError as exc:
            raise LayoutError(f"the manifest is damaged at shard {shard:,}: {exc}; write it again") from exc
        return in_file(source, path[:-count]) if count else source

    def stamped(self, shard: int) -> str:
        """Return the name, within a store, of the file whose stamp is its own; empty of what is no store."""
        at = self._find(shard)
        if at is None or self._kinds[at] != _STORE:
            return ""
        return decode_store(self._texts[at], self._shared).stamped

    def _find(self, shard: int) -> int | None:
        at = int(self._numbers.searchsorted(shard))
        return at if at < len(self._numbers) and self._numbers[at] == shard else None


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the shards of a manifest lie, which what is saved of them does not repeat."""

    root: str
    names: Names
    inner: npt.NDArray[np.int64] | None
    options: str


def _source(kind: int, text: str, decoder: DetailDecoder) -> Source:
    if kind == _DECODED:
        return decoder.decode(text)
    numbers = json.loads(text)
    if kind == _PLANES:
        start, stride = numbers
        return Planes(_count(start), _count(stride))
    if kind == _EXTENTS:
        return Extents(tuple([Extent(_count(first), _count(rows), "", _count(at)) for first, rows, at in numbers]))
    raise ValueError(f"{kind} is no kind of source")


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no offset")
    return number


# To bytes --------------------------------------------------------------------------------------------------------


def encode(
    layout: Layout,
    folder: str,
    *,
    beside: Mapping[str, Stamp] | None = None,
    algorithm: str = "",
    hashes: npt.NDArray[np.uint8] | None = None,
) -> bytes:
    """Return the bytes of the manifest of a layout; casts are left out, as they are chosen anew at each opening.

    Parameters
    ----------
    layout : Layout
    folder : str
        Directory of the manifest, with the separator, which every path must begin with.
    beside : mapping from str to Stamp, optional
        Files beside the shards that say how those are read.
    algorithm : str
        Of the hashes.
    hashes : ndarray of uint8, (shards, 16), optional
        Content hashes.

    Raises
    ------
    LayoutError
        If a path does not begin with ``folder``, or the layout cannot be saved.
    """
    pa = _arrow()
    layout = as_stored(layout)
    if not layout.root.startswith(folder):
        raise LayoutError(f"the shards lie in {layout.root!r}, expected them in {folder!r}, where the manifest goes")
    if names_function(layout.options):
        raise LayoutError("a dataset that is read by a function has no manifest: a file cannot hold the function")
    names = Names.of(layout.names)
    prefix = layout.root[len(folder) :]
    _check_names(names, prefix)
    columns = {
        "path": pa.Array.from_buffers(
            pa.large_binary(), len(names), [None, pa.py_buffer(names.offsets), pa.py_buffer(names.data)], null_count=0
        ),
        "rows": pa.array(np.diff(layout.ends, prepend=0)),
        "size": pa.array(layout.stamps[:, 0]),
        "mtime_ns": pa.array(layout.stamps[:, 1]),
        "inode": pa.array(layout.stamps[:, 2]),
        "offset": pa.array(layout.offsets),
    }
    if layout.etags is not None:
        columns["etag"] = pa.array(list(layout.etags), pa.large_string())
    dtypes = [layout.dtype, *sorted(set(layout.dtypes.values()), key=str)]
    if layout.dtypes:
        numbers = np.zeros(len(layout), np.int32)
        for shard, dtype in layout.dtypes.items():
            numbers[shard] = dtypes.index(dtype, 1)
        columns["dtype"] = pa.array(numbers)
    shared: list[str] = []
    if layout.sources:
        kinds, texts, shared, inner = _encode_sources(layout)
        columns["kind"] = pa.array(kinds)
        if inner.any():
            columns["inner"] = pa.array(inner)
        columns["detail"] = pa.array(texts, pa.large_binary())
    if hashes is not None:
        columns["hash"] = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(DIGEST_NBYTES), len(layout), [None, pa.py_buffer(np.ascontiguousarray(hashes))]
        )
    described = {
        "version": _VERSION,
        "writer": __version__,
        "format": layout.format,
        "row_shape": layout.row_shape,
        "dtypes": [descr_of(dtype) for dtype in dtypes],
        "prefix": prefix,
        "options": layout.options,
        "fingerprint": layout.fingerprint,
        "beside": dict(beside or {}),
        "hash": algorithm if hashes is not None else "",
        "shared": shared,
    }
    table = pa.table(columns, metadata={_KEY: json.dumps(described).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def as_stored(layout: Layout) -> Layout:
    """Return the layout of what the files hold, without maps and casts."""
    while layout.maps:
        layout = layout.below
    if layout.identity:
        raise LayoutError("several datasets that were joined have no manifest of their own: save that of each")
    return replace(layout, dtype=layout.stored or layout.dtype, stored=None, steps=(), manifest="")


def _encode_sources(
    layout: Layout,
) -> tuple[npt.NDArray[np.int8], list[bytes], list[str], npt.NDArray[np.int64]]:
    """Return kind and text of each shard's source, what several texts refer to, and the lengths of inner paths."""
    kinds = np.zeros(len(layout), np.int8)
    inner = np.zeros(len(layout), np.int64)
    texts = [b""] * len(layout)
    if layout.format == "zarr":
        known: dict[str, int] = {}
        for shard, store in enumerate(read_stores(layout.shards, layout.storage)):
            kinds[shard] = _UNKNOWN if store is None else _STORE
            texts[shard] = b"" if store is None else encode_store(store, known).encode()
        return kinds, texts, list(known), inner
    decoded: dict[int, Decoded] = {}
    for shard in layout.sources:
        path, source = layout.path(shard), layout.sources[shard]
        if layout.format == "hdf5":
            inner[shard] = len(path) - len(file_of(path, source))
            source = without_file(path, source)
        if isinstance(source, Planes):
            kinds[shard], texts[shard] = _PLANES, json.dumps(source).encode()
        elif isinstance(source, Extents) and not any([extent.path for extent in source.extents]):
            runs = [(extent.first, extent.rows, extent.offset) for extent in source.extents]
            kinds[shard], texts[shard] = _EXTENTS, json.dumps(runs).encode()
        elif isinstance(source, Decoded):
            decoded[shard] = source
        else:
            kinds[shard] = _UNKNOWN
    found, shared = encode_details(list(decoded.values()))
    for shard, text in zip(decoded, found, strict=True):
        kinds[shard], texts[shard] = (_UNKNOWN, b"") if text is None else (_DECODED, text.encode())
    return kinds, texts, shared, inner


# From bytes ------------------------------------------------------------------------------------------------------


def decode(data: bytes, path: str, storage: Storage) -> Manifest:
    """Return what the bytes of a manifest say, if all of it can be so.

    Parameters
    ----------
    data : bytes
    path : str
        Where they come from, which the shards' paths begin with.
    storage : Storage
        Where the shards are.

    Raises
    ------
    LayoutError
        If the file is damaged, was made by a version that this one does not understand, or names files elsewhere.
    """
    pa = _arrow()
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all().combine_chunks()
        table.validate(full=True)
        return _decode_table(table, path, storage)
    except LayoutError:
        raise
    except (pa.ArrowException, LazyShardsError, *_WRONG) as exc:
        first = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise LayoutError(f"{path!r} is damaged: {first}; write it again with `lazyshards index`") from exc


_WRONG = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What values of a wrong kind lead to."""


def _decode_table(table: Any, path: str, storage: Storage) -> Manifest:
    described = json.loads(table.schema.metadata[_KEY])
    if described["version"] != _VERSION:
        raise LayoutError(
            f"{path!r} has version {described['version']!r}, expected {_VERSION}: it was written by lazyshards "
            f"{described.get('writer')}; write it again with `lazyshards index`"
        )
    names = _names(table["path"], len(table))
    prefix = str(described["prefix"])
    _check_names(names, prefix)
    rows, size, mtime, inode, offset = (
        _numbers(table[name]) for name in ("rows", "size", "mtime_ns", "inode", "offset")
    )
    if len(rows) and (int(rows.min()) < 0 or float(rows.sum(dtype=np.float64)) >= 2.0**63):
        raise ValueError("numbers of rows that cannot be")
    dtypes = [dtype_of(descr) for descr in described["dtypes"]]
    row_shape = tuple(map(_count, described["row_shape"]))
    row_size = prod(row_shape)
    if len(row_shape) >= MOST_AXES or row_size * max(dtype.itemsize for dtype in dtypes) >= 1 << 63:
        raise ValueError("rows that no array can have")
    numbers = _numbers(table["dtype"]) if "dtype" in table.column_names else np.zeros(len(table), np.int64)
    row_nbytes = row_size * np.array([dtype.itemsize for dtype in dtypes], np.int64)[numbers]
    kinds = _numbers(table["kind"]).astype(np.int8) if "kind" in table.column_names else np.zeros(len(table), np.int8)
    packed = kinds == _PACKED
    # Divided, since a product may wrap around.
    beyond = packed & (size >= 0) & ((offset > size) | (rows > (size - offset) // np.maximum(1, row_nbytes)))
    beyond &= (row_nbytes > 0) | (offset > size)
    if int(offset[packed].min(initial=0)) < 0 or beyond.any():
        raise ValueError("rows that lie beyond the end of their file")
    others = np.flatnonzero(~packed)
    sources: Mapping[int, Source] = {}
    inner = _numbers(table["inner"]) if "inner" in table.column_names else None
    if inner is not None:
        _check_inner(inner, names, prefix)
    root = path[: -len(NAME)] + prefix
    if len(others):
        texts = _names(table["detail"].take(_arrow().array(others)), len(others))
        places = _Places(root, names, inner, str(described["options"]))
        sources = _Sources(others, kinds[others], texts, list(map(str, described["shared"])), places)
    odd = {i: dtypes[numbers[i]] for i in np.flatnonzero(numbers).tolist()}
    layout = Layout(
        format=str(described["format"]),
        storage=storage,
        row_shape=row_shape,
        dtype=dtypes[0],
        root=root,
        names=names,
        ends=np.cumsum(rows),
        stamps=np.stack([size, mtime, inode], 1),
        offsets=np.where(packed, offset, -1),
        sources=sources,
        dtypes=odd,
        etags=tuple(table["etag"].to_pylist()) if "etag" in table.column_names else None,
        options=str(described["options"]),
    )
    if layout.fingerprint != described["fingerprint"]:
        raise ValueError("its fingerprint is not that of what it holds")
    # What a format needs is the business of its own version.
    is_complete = not (kinds == _UNKNOWN).any() and (
        described["writer"] == __version__ or not np.isin(kinds, (_DECODED, _STORE)).any()
    )
    hashes = None
    if described["hash"]:
        (chunk,) = table["hash"].chunks or [_arrow().array([], _arrow().binary(DIGEST_NBYTES))]
        buffer = chunk.buffers()[1]
        hashes = np.frombuffer(buffer or b"", np.uint8)[: len(table) * DIGEST_NBYTES].reshape(-1, DIGEST_NBYTES)
    beside = {str(name): Stamp(*stamp) for name, stamp in described["beside"].items()}
    return Manifest(path, layout, is_complete, beside, str(described["hash"]), hashes, inner)


def _check_inner(inner: npt.NDArray[np.int64], names: Names, prefix: str) -> None:
    """Raise ValueError unless each path that has a place in a file has the file's own name before it."""
    for i in np.flatnonzero(inner).tolist():
        whole, count = prefix + names[i], int(inner[i])
        if not (0 < count < len(whole) and whole[-count:].startswith("::/")):
            raise ValueError(f"{whole!r} does not name a file and a place in it")


def _numbers(column: Any) -> npt.NDArray[np.int64]:
    """Return a column as an array, without a copy where it is one already."""
    if column.null_count:
        raise ValueError("a value is missing")
    found: npt.NDArray[np.int64] = column.to_numpy().astype(np.int64, copy=False)
    return found


def _names(column: Any, count: int) -> Names:
    """Return a column of bytes as names, without a copy."""
    if column.null_count or str(column.type) != "large_binary":
        raise ValueError(f"a column of {column.type}, expected large_binary without nulls")
    if not count:
        return Names(b"", np.zeros(1, np.int64))
    (array,) = column.chunks
    _, offsets, data = array.buffers()
    found = np.frombuffer(offsets, np.int64)[array.offset : array.offset + count + 1]
    return Names(memoryview(data) if data is not None else b"", found)


_ELSEWHERE = tuple(b"\0/|\0../|/../|/..\0|\0..\0|\0./|/./|/.\0|\0.\0|//|/\0|\0\0|://".split(b"|"))
"""What no relative path may hold, each path between null bytes."""


def _check_names(names: Names, prefix: str) -> None:
    """Raise LayoutError for a path that could mean another place than one below the manifest's directory."""
    if prefix:
        text = prefix if prefix.endswith("/") else f"{prefix}//"
        _check_paths(b"\0" + text[:-1].encode("utf-8", "surrogateescape") + b"\0")
    lengths = np.diff(names.offsets)
    data = bytes(names.data)
    if len(lengths) and int(lengths.min()) < 1:
        raise LayoutError("the manifest names an empty path, expected one below its own directory")
    if b"\0" in data:
        raise LayoutError("the manifest names a path with a null byte")
    if not {names[i] for i in np.flatnonzero(lengths < 3).tolist()}.isdisjoint({".", ".."}):
        raise LayoutError("the manifest names '..', expected a path below its own directory")
    if b"/" in data:  # else each is the name of a file and nothing more
        _check_paths(b"\0" + names.joined() + b"\0")


def _check_paths(whole: bytes) -> None:
    for bad in _ELSEWHERE:
        at = whole.find(bad)
        if at >= 0:
            start = whole.rfind(b"\0", 0, at + 1) + 1
            found = whole[start : whole.find(b"\0", start)].decode("utf-8", "replace")
            raise LayoutError(f"the manifest names {found!r}, expected a path below its own directory")


def _arrow() -> Any:
    """Return pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as exc:
        raise FormatError("manifests need pyarrow: pip install 'lazyshards[arrow]'") from exc
    return pa
