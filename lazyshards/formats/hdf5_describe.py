"""What is known of an HDF5 dataset after its metadata was read, and where its bytes are: in this file or in others."""

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from lazyshards.formats.codecs import Filter, can_decode
from lazyshards.formats.hdf5_chunks import Chunks
from lazyshards.formats.hdf5_library import H5File, RefusedError, h5py, has_filter, list_chunks, open_file, pipeline
from lazyshards.formats.hdf5_names import Elsewhere, find_dataset
from lazyshards.formats.hdf5_selections import check_reach, count_covered, find_run, is_bounded
from lazyshards.layout import Decoded, Packed, Shard
from lazyshards.storage.base import Stamp, Storage

__all__ = ["Describer", "Joined", "Piece", "Whole"]

_MOST_EDGES = 4096
"""Edges that a shard lists; of more, evenly spaced ones are listed."""
_MOST_DEPTH = 16
"""Datasets that may refer to one another in a row."""
_SHUFFLE = 2


class Whole(NamedTuple):
    """A dataset that the library must read."""

    path: str
    """The file; empty for the shard's own."""
    name: str
    """Name of the dataset in it."""
    sources: tuple[tuple[str, Stamp], ...] = ()
    """Other files that the library will open, and what they were."""


class Piece(NamedTuple):
    """Consecutive rows that come from one dataset."""

    first: int
    """Local row at which they begin."""
    start: int
    """Local row of the source at which they begin."""
    rows: int
    """How many."""
    shard: Shard
    """The source: plain bytes, or decoded by this format."""


class Joined(NamedTuple):
    """Rows that are those of datasets in other files."""

    path: str
    """The file that refers to the others; empty for the shard's own."""
    pieces: tuple[Piece, ...]
    """In row order, without holes; none of them is joined from others."""
    between: tuple[tuple[str, Stamp], ...] = ()
    """Files that refer to those of the pieces and are referred to themselves, and what they were."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Rows at which blocks of the pieces begin."""
        found: list[int] = []
        for piece in self.pieces:
            found.append(piece.first)
            source = piece.shard.source
            if isinstance(source, Decoded):
                inside = [edge - piece.start for edge in source.edges]
                found += [piece.first + edge for edge in inside if 0 < edge < piece.rows]
        return tuple(found[:: -(-len(found) // _MOST_EDGES)])


class _Array(NamedTuple):
    """A dataset that can be one, and what is common to all layouts."""

    id: Any
    """What h5py's low-level interface calls it."""
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    """As stored."""
    is_plain: bool
    """Whether the bytes in the file are those that NumPy would have, byte order aside."""
    plist: Any
    """Its creation properties."""

    def shard(self, path: str, stamp: Stamp, source: Packed | Decoded) -> Shard:
        return Shard(path, self.shape[0], self.shape[1:], self.dtype, stamp, source)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Describer:
    """Describes datasets, following what they refer to as far as that is allowed.

    Parameters
    ----------
    storage : Storage
    root : str
        Directory that all shards are in.
    allow_external : bool
        Whether files outside it may be read.
    fills : bool
        Whether what was never written is taken for HDF5's default value.
    """

    storage: Storage
    root: str
    allow_external: bool
    fills: bool
    _depth: list[tuple[str, str]] = field(default_factory=list)
    """File and name of the datasets that led here."""
    _known: dict[tuple[str, str], Shard] = field(default_factory=dict)
    """What others refer to, by file and name: many may refer to one."""
    _met: dict[str, Stamp] = field(default_factory=dict)
    """Files that others refer to."""
    _raw: set[str] = field(default_factory=set)
    """Those of them that are external storage."""

    def describe(self, file: H5File, stamp: Stamp, name: str) -> Shard:
        """Return the dataset as a shard of the file that it is in, which an external link may have led to.

        Raises
        ------
        RefusedError
            If it is none that can be a shard.
        """
        found = find_dataset(file, name)
        if isinstance(found, Elsewhere):
            path = self._resolve(file.path, found.file, f"the external link {name!r}")
            return self._describe_at(path, found.name)
        array = _read_array(*found)
        if not array.nbytes:
            return array.shard(file.path, stamp, Packed(0))  # there is nothing to read
        library = h5py()
        layout = array.plist.get_layout()
        if layout == library.h5d.VIRTUAL:
            return array.shard(file.path, stamp, self._describe_virtual(file, array))
        if layout == library.h5d.CHUNKED:
            return array.shard(file.path, stamp, self._describe_chunks(file, array))
        if layout == library.h5d.CONTIGUOUS:
            if array.plist.get_external_count():
                return array.shard(file.path, stamp, self._describe_external(file, array))
            # Not by its offset, which is no sign of it in a file with a userblock.
            if array.id.get_space_status() == library.h5d.SPACE_STATUS_NOT_ALLOCATED:
                self._need_fill_value(array)
            elif array.is_plain:
                offset = int(array.id.get_offset())
                if offset + array.nbytes > stamp.size:
                    raise RefusedError(
                        f"is truncated: it holds {stamp.size:,} bytes, and the dataset {array.name!r} ends at byte "
                        f"{offset + array.nbytes:,}"
                    )
                return array.shard(file.path, stamp, Packed(offset))
        return array.shard(file.path, stamp, Decoded(Whole("", array.name)))

    def _describe_at(self, path: str, name: str) -> Shard:
        """Describe a dataset of another file."""
        return self._describe_once(path, name, lambda: self._open_at(path, name))

    def _describe_once(self, path: str, name: str, describe: Callable[[], Shard]) -> Shard:
        """Describe what is referred to, unless it leads back to itself, or is known."""
        key = path, name
        if key not in self._known:
            if len(self._depth) >= _MOST_DEPTH:
                raise RefusedError(f"refers to datasets that refer to one another without end, the last in {path!r}")
            self._depth.append(key)
            try:
                self._known[key] = describe()
            finally:
                self._depth.pop()
        return self._known[key]

    def _open_at(self, path: str, name: str) -> Shard:
        (head,) = self.storage.heads([path], 8)
        if head.error is not None:
            raise RefusedError(f"refers to {path!r}, which cannot be read: {head.error.strerror or head.error}")
        self._met[path] = head.stamp
        try:
            with open_file(path, self.storage, head.stamp.size, head.data) as other:
                return self.describe(other, head.stamp, name)
        except RefusedError as exc:
            raise RefusedError(f"refers to {path!r}, which {exc}") from exc

    def _resolve(self, path: str, other: str, what: str) -> str:
        """Return the file that another one is called in ``path``, if it may be read."""
        local = self.storage.local_path(path)
        folder = path[: path.rfind("/") + 1]
        if local is None:
            if "://" in other or other.startswith("/") or ".." in other.split("/"):
                raise RefusedError(f"refers to {other!r} ({what}), which is not followed on this storage")
            return folder + other
        found = os.path.join(os.path.dirname(local), other)
        if not self.allow_external:
            real, root = os.path.realpath(found), os.path.realpath(self.root)
            if os.path.commonpath([real, root]) != root:
                raise RefusedError(
                    f"refers to {found!r} ({what}), outside the dataset's directory {self.root!r}; if the files can be "
                    "trusted, pass allow_external=True"
                )
        return found

    # Fill values ------------------------------------------------------------------------------------------------

    def _fill_value(self, array: _Array) -> bytes | None:
        """Return the element that stands for what was never written, or None if none may.

        A value that the writer chose was meant to be read. HDF5's own default, zero, stands for rows that a job did
        not get to as well, so it is taken only if the user says so.
        """
        library = h5py()
        defined = array.plist.fill_value_defined()
        if defined == library.h5d.FILL_VALUE_UNDEFINED or array.plist.get_fill_time() == library.h5d.FILL_TIME_NEVER:
            return None
        if defined == library.h5d.FILL_VALUE_DEFAULT and not self.fills:
            return None
        value = np.zeros((), array.dtype)
        array.plist.get_fill_value(value)
        return value.tobytes()

    def _need_fill_value(self, array: _Array) -> None:
        if self._fill_value(array) is None:
            raise RefusedError(
                f"has the dataset {array.name!r} of which not all was written, and which declares no fill value, so "
                'that rows may be missing; if zeros are meant, pass unwritten="fill"'
            )

    # Layouts ----------------------------------------------------------------------------------------------------

    def _describe_chunks(self, file: H5File, array: _Array) -> Decoded:
        chunk = tuple(map(int, array.plist.get_chunk()))
        filters = pipeline(array.plist)
        fill = self._fill_value(array)
        chunks = Chunks("", array.name, array.shape, chunk, filters, fill)
        is_local = self.storage.local_path(file.path) is not None
        # Elsewhere it would cost further requests for each file; reading finds it out in any case.
        if fill is None and is_local and array.id.get_space_status() != h5py().h5d.SPACE_STATUS_ALLOCATED:
            self._need_fill_value(array)
        edges = tuple(range(0, array.shape[0], chunk[0] * -(-chunks.grid[0] // _MOST_EDGES)))
        is_numbered = prod(chunks.grid) < 1 << 62 and hasattr(array.id, "chunk_iter")  # HDF5 1.12.3 and later
        if array.is_plain and is_numbered and can_decode(filters) and not _is_ambiguous(chunks):
            return Decoded(chunks, edges)
        _need_filters(file, chunks)
        return Decoded(Whole("", array.name), edges)

    def _describe_external(self, file: H5File, array: _Array) -> Decoded:
        """Describe contiguous data that lies in raw files of its own."""
        row_nbytes = array.nbytes // array.shape[0]
        pieces: list[Piece] = []
        done = 0
        for i in range(array.plist.get_external_count()):
            name, offset, size = array.plist.get_external(i)
            path = self._resolve(file.path, os.fsdecode(name), f"external storage of {array.name!r}")
            count = min(int(size), array.nbytes - done)
            if not count:
                break
            if count % row_nbytes:
                raise RefusedError(f"has the dataset {array.name!r} cut within a row over external files")
            (head,) = self.storage.heads([path], 1)
            if head.error is not None or head.stamp.size < offset + count:
                what = str(head.error) if head.error else f"holds {head.stamp.size:,} bytes"
                raise RefusedError(f"refers to {path!r}, which {what}, expected {offset + count:,} bytes")
            rows = count // row_nbytes
            self._raw.add(path)
            part = array._replace(shape=(rows, *array.shape[1:])).shard(path, head.stamp, Packed(int(offset)))
            pieces.append(Piece(done // row_nbytes, 0, rows, part))
            done += count
        if done < array.nbytes or not array.is_plain:
            raise RefusedError(f"has the dataset {array.name!r} in external files that do not hold all of it")
        joined = Joined("", tuple(pieces))
        return Decoded(joined, joined.edges)

    def _describe_virtual(self, file: H5File, array: _Array) -> Decoded:
        """Describe a virtual dataset: joined from whole rows of its sources, or for the library to put together."""
        pieces: list[Piece] | None = []
        sources: dict[str, Stamp] = {}
        targets = []
        for i in range(array.plist.get_virtual_count()):
            target, origin = array.plist.get_virtual_vspace(i), array.plist.get_virtual_srcspace(i)
            # A percent sign is written as two; with a letter it numbers files or datasets.
            written = array.plist.get_virtual_filename(i), array.plist.get_virtual_dsetname(i)
            if "%b" in "".join(written).replace("%%", "") or not is_bounded(target) or not is_bounded(origin):
                raise RefusedError(f"has the virtual dataset {array.name!r} of unlimited size, expected a fixed one")
            source = self._describe_source(file, array, *[name.replace("%%", "%") for name in written])
            sources.update(_files_of(source))
            targets.append(target)
            if not target.get_select_npoints():
                continue
            check_reach(target, origin, source)
            _check_types(source, array)
            piece = _piece(
                find_run(target, array.shape), find_run(origin, (source.rows, *source.row_shape)), array, source
            )
            pieces = None if pieces is None or piece is None else [*pieces, piece]
        if pieces is not None:
            pieces.sort(key=_first)
            ends = [0, *[piece.first + piece.rows for piece in pieces]]
            if [piece.first for piece in pieces] == ends[:-1] and ends[-1] == array.shape[0]:
                joined = _join(pieces)
                return Decoded(joined, joined.edges)
        covered = count_covered(targets, array.shape)
        if covered < prod(array.shape):
            if covered < sum([target.get_select_npoints() for target in targets]):
                # By their number the library would take them for all, and return whatever was in memory.
                raise RefusedError(
                    f"has the virtual dataset {array.name!r} in which elements are mapped more than once, and others "
                    "not at all"
                )
            self._need_fill_value(array)
        if self.storage.local_path(file.path) is None:
            raise RefusedError(
                f"has the virtual dataset {array.name!r} that is not made of whole rows of its sources, which can be "
                "read on this machine only"
            )
        # The library opens the sources itself, and must find those that were found here.
        if self._raw.intersection(sources):
            raise RefusedError(
                f"has the virtual dataset {array.name!r} that is not made of whole rows of its sources, and these have "
                "their values in external files, which the HDF5 library looks for in the working directory"
            )
        if os.environ.get("HDF5_VDS_PREFIX"):
            raise RefusedError(
                f"has the virtual dataset {array.name!r} that the HDF5 library must read, which HDF5_VDS_PREFIX "
                "sends elsewhere for its sources; unset it"
            )
        sources.update(self._met)
        sources.pop(file.path, None)
        return Decoded(Whole("", array.name, tuple(sources.items())))

    def _describe_source(self, file: H5File, array: _Array, name: str, dataset: str) -> Shard:
        if name in ("", "."):
            (head,) = self.storage.heads([file.path], 8)
            if dataset.strip("/") == array.name:
                raise RefusedError(f"has the virtual dataset {array.name!r} that is its own source")
            return self._describe_once(file.path, dataset, lambda: self.describe(file, head.stamp, dataset))
        return self._describe_at(self._resolve(file.path, name, f"a source of {array.name!r}"), dataset)


def _read_array(dataset: Any, name: str) -> _Array:  # of h5py, which has no types
    """Read what is common to all layouts.

    Raises
    ------
    RefusedError
        If the dataset is no array of elements of a fixed size.
    """
    library = h5py()
    space = dataset.get_space()
    if space.get_simple_extent_type() != library.h5s.SIMPLE or not dataset.shape:
        raise RefusedError(f"has a single value, or none, as the dataset {name!r}, expected an array with a row axis")
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError) as exc:
        raise RefusedError(f"has the dataset {name!r} of a type that NumPy does not have: {exc}") from exc
    if dtype.hasobject:
        raise RefusedError(
            f"has the dataset {name!r} of variable-length elements or references, expected elements of a fixed size"
        )
    is_plain = bool(dataset.get_type().equal(library.h5t.py_create(dtype, logical=True)))
    shape = tuple(map(int, dataset.shape))
    plist = dataset.get_create_plist()
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        if plist.get_layout() != library.h5d.CONTIGUOUS or not is_plain:
            raise RefusedError(f"has the dataset {name!r} whose elements are arrays, which is read only if contiguous")
        shape += inner
    if dtype.names is None:
        dtype = np.dtype(dtype.str)  # without h5py's notes on it
    return _Array(dataset, name, shape, dtype, is_plain, plist)


def _is_ambiguous(chunks: Chunks) -> bool:
    """Return whether it cannot be told from a chunk's size if it was left unfiltered for reaching beyond the edge."""
    at_edge = any([length % size for length, size in zip(chunks.shape, chunks.chunk, strict=True)])
    return at_edge and bool(chunks.filters) and all([step.id == _SHUFFLE for step in chunks.filters])


def _need_filters(file: H5File, chunks: Chunks) -> None:
    """Raise RefusedError if a filter is missing and any chunk went through it."""
    missing: list[tuple[int, Filter]] = [(i, f) for i, f in enumerate(chunks.filters) if not has_filter(f.id)]
    if not missing:
        return
    table = list_chunks(file, chunks.name, chunks.grid, chunks.chunk)
    for i, step in missing:
        if not bool((table.masks >> np.uint32(i) & 1).all()):
            raise RefusedError(
                f"has the dataset {chunks.name!r}, which needs {step}, and no plugin for it is installed; most are in "
                "hdf5plugin: pip install hdf5plugin"
            )


def _files_of(shard: Shard) -> dict[str, Stamp]:
    """Return every file that reading a shard opens, and what it was."""
    found = {shard.path: shard.stamp}
    detail = shard.source.detail if isinstance(shard.source, Decoded) else None
    if isinstance(detail, Whole):
        found.update(detail.sources)
    elif isinstance(detail, Joined):
        found.update(detail.between)
        for piece in detail.pieces:
            found.update(_files_of(piece.shard))
    return found


def _first(piece: Piece) -> int:
    return piece.first


def _join(pieces: Sequence[Piece]) -> Joined:
    """Return pieces joined; those that are joined from others themselves are replaced by these."""
    flat: list[Piece] = []
    between: dict[str, Stamp] = {}
    for piece in pieces:
        detail = piece.shard.source.detail if isinstance(piece.shard.source, Decoded) else None
        if not isinstance(detail, Joined):
            flat.append(piece)
            continue
        between |= {piece.shard.path: piece.shard.stamp} | dict(detail.between)
        stop = piece.start + piece.rows
        at = bisect_right(detail.pieces, piece.start, key=_first) - 1
        while at < len(detail.pieces) and detail.pieces[at].first < stop:
            inner = detail.pieces[at]
            a, b = max(inner.first, piece.start), min(inner.first + inner.rows, stop)
            flat.append(Piece(piece.first + a - piece.start, inner.start + a - inner.first, b - a, inner.shard))
            at += 1
    return Joined("", tuple(flat), tuple(between.items()))


def _check_types(source: Shard, array: _Array) -> None:
    """Raise RefusedError if values of a source may become others: the library would cut numbers off without a word."""
    stored, wanted = source.dtype, array.dtype
    if stored.names is None and wanted.names is None and not np.can_cast(stored, wanted, "same_kind"):
        raise RefusedError(
            f"has the virtual dataset {array.name!r} of {wanted} with a source of {stored}, in {source.path!r}: "
            "expected a type whose values it can hold"
        )


def _piece(
    target: tuple[int, int] | None, origin: tuple[int, int] | None, array: _Array, source: Shard
) -> Piece | None:
    """Return a piece of whole rows, or None if the mapping is no such thing."""
    width = prod(array.shape[1:])
    if target is None or origin is None or target[1] != origin[1] or target[0] % width or target[1] % width:
        return None
    if not array.is_plain:
        return None
    if source.dtype.newbyteorder("=") != array.dtype.newbyteorder("="):
        return None
    first, rows = target[0] // width, target[1] // width
    if isinstance(source.source, Packed):
        at = source.source.offset + origin[0] * source.dtype.itemsize
        return Piece(first, 0, rows, source._replace(rows=rows, row_shape=array.shape[1:], source=Packed(at)))
    if source.row_shape != array.shape[1:] or origin[0] % width:
        return None
    return Piece(first, origin[0] // width, rows, source)
