"""HDF5: a named dataset in each file, or many datasets of one file, told apart by how their bytes are stored.

Contiguous data is plain bytes, which the core reads. Chunks are decoded by ``hdf5_chunks``, outside the library. What
lies in other files (virtual datasets, external links and storage) is described as a shard of that file, joined to the
one that refers to it. All else is left to the library itself.

Source: the layouts and the fill value's meaning are described in the HDF5 file format specification and user guide.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.access import accesses
from lazyshards.errors import LazyShardsError, ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.faults import unreadable
from lazyshards.formats.grid import ascending
from lazyshards.formats.hdf5_chunks import Chunks, read_chunks
from lazyshards.formats.hdf5_describe import Describer, Joined, Piece, Whole
from lazyshards.formats.hdf5_library import SIGNATURE, H5File, RefusedError, h5py, open_file, read_block
from lazyshards.formats.hdf5_names import array_names, describe_names, matching_names
from lazyshards.formats.options import check_options
from lazyshards.formats.stamps import check_stamps
from lazyshards.layout import Decoded, Extent, Extents, Layout, Packed, Segment, Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Part, Stamp, Storage

__all__ = ["Hdf5Format"]

_REMOTE_HEAD_NBYTES = 16 << 10
"""Bytes of the first read where a read is a request: the metadata of a simple file is within them."""
_BLOCK_NBYTES = 4 << 20
"""Bytes of a block in which the library reads what it cannot put straight into its place."""

Array: TypeAlias = npt.NDArray[np.generic]


class _Options(NamedTuple):
    """The keyword arguments of ``open_shards`` that are this format's."""

    names: tuple[str, ...] | None
    """Names or patterns of the datasets; None for the only one."""
    is_one: bool
    """Whether a file is one shard, rather than each of its datasets that is named."""
    allow_external: bool
    fills: bool
    """Whether what was never written is taken for HDF5's default value."""

    @classmethod
    def of(cls, options: Mapping[str, object]) -> "_Options":
        check_options(options, "hdf5", ("dataset", "allow_external", "unwritten"))
        dataset = options.get("dataset")
        allow, unwritten = options.get("allow_external", False), options.get("unwritten", "raise")
        if not isinstance(allow, bool):
            raise TypeError(f"allow_external={allow!r}: expected True or False")
        if unwritten not in ("raise", "fill"):
            raise ValueError(f'unwritten={unwritten!r} is not a policy: use "raise" or "fill"')
        if dataset is None:
            return cls(None, True, allow, unwritten == "fill")
        names = (dataset,) if isinstance(dataset, str) else tuple(dataset) if isinstance(dataset, list | tuple) else ()
        if not names or not all([isinstance(name, str) and name.strip("/") for name in names]):
            raise TypeError(f"dataset={dataset!r}: expected the name of a dataset, a pattern, or a list of names")
        is_one = isinstance(dataset, str) and not any([sign in dataset for sign in "*?["])
        return cls(names, is_one, allow, unwritten == "fill")


class Hdf5Format:
    """HDF5 files, one dataset in each or many in one.

    Availability: with h5py. Deflate is decoded faster with isal, blosc, lz4 and zstd with numcodecs; other filters
    need hdf5plugin.
    """

    name = "hdf5"
    suffixes = (".h5", ".hdf5", ".he5")
    magic = (SIGNATURE,)
    directories = False

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file; with a pattern or list of names, for every dataset."""
        chosen = _Options.of(options)
        if not paths:
            return []
        h5py()
        is_local = storage.local_path(paths[0]) is not None
        heads = storage.heads(paths, len(SIGNATURE) if is_local else _REMOTE_HEAD_NBYTES)
        common = _common_folder(paths)
        describer = Describer(storage, common, chosen.allow_external, chosen.fills)
        found: list[Shard | Fault] = []
        only = ""
        for path, head in zip(paths, heads, strict=True):
            if head.error is not None:
                found.append(unreadable(path, head.error))
                continue
            if common == "/":  # nothing in common: each may refer to what is beside it
                describer = replace(describer, root=path[: path.rfind("/") + 1])
            try:
                with open_file(path, storage, head.stamp.size, head.data) as file:
                    if chosen.names is None:
                        name = _only_name(file)
                        only = only or name
                        if name != only:
                            raise RefusedError(
                                f"has {name!r} as its only array, expected {only!r} as in the files before it; name "
                                "it with dataset="
                            )
                        found.append(_placed(describer.describe(file, head.stamp, name), path, path, head.stamp))
                    elif chosen.is_one:
                        found.append(
                            _placed(describer.describe(file, head.stamp, chosen.names[0]), path, path, head.stamp)
                        )
                    else:
                        found += self._describe_many(describer, file, head, chosen.names)
            except RefusedError as exc:
                found.append(_fault(path, exc))
            except LazyShardsError as exc:
                found.append(Fault(path, f"cannot be read: {exc}", exc if isinstance(exc, OSError) else None))
        return found

    def _describe_many(
        self, describer: Describer, file: H5File, head: Head, names: Sequence[str]
    ) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for each dataset of a file that the names mean."""
        found: list[Shard | Fault] = []
        for pattern in names:
            for name in matching_names(file, pattern):
                place = f"{file.path}::/{name}"
                try:
                    found.append(_placed(describer.describe(file, head.stamp, name), place, file.path, head.stamp))
                except RefusedError as exc:
                    found.append(_fault(place, exc))
        return found

    def read_into(self, shard: Shard, start: int, out: Array, cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        if isinstance(detail, Chunks):
            read_chunks(detail, detail.path or shard.path, shard.stamp, shard.dtype, start, out, cell, storage)
            return
        assert isinstance(detail, Whole | Joined)
        path = detail.path or shard.path
        try:
            if isinstance(detail, Whole):
                _read_whole(detail, path, shard.stamp, start, out, cell, storage)
            else:
                self._read_joined(detail, start, out, cell, storage)
                check_stamps([(path, shard.stamp), *detail.between], storage)
        except ShardReadError as exc:
            if path in str(exc):
                raise
            raise type(exc)(f"{shard.path!r} refers to another file: {exc}") from exc

    def _read_joined(self, joined: Joined, start: int, out: Array, cell: Cell, storage: Storage) -> None:
        stop = start + len(out)
        firsts = [piece.first for piece in joined.pieces]
        for piece in joined.pieces[bisect_right(firsts, start) - 1 :]:
            a, b = max(start, piece.first), min(stop, piece.first + piece.rows)
            if a >= stop:
                break
            part = out[a - start : b - start]
            local = a - piece.first + piece.start
            if isinstance(piece.shard.source, Packed):
                _read_packed(piece.shard, local, part, cell, storage)
            else:
                self.read_into(piece.shard, local, part, cell, storage)


def _common_folder(paths: Sequence[str]) -> str:
    """Return the innermost directory that all files are in."""
    low, high = min(paths), max(paths)
    count = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[: low.rfind("/", 0, count) + 1] or "/"


def _fault(path: str, exc: RefusedError) -> Fault:
    cause = exc.__cause__
    return Fault(path, str(exc), cause if isinstance(cause, BlockingIOError) else None)


def _only_name(file: H5File) -> str:
    names = array_names(file)
    if not names:
        raise RefusedError("holds no array")
    if len(names) > 1:
        raise RefusedError(
            f"holds several arrays, and nothing says which is wanted: {describe_names(file, names)}; choose one with "
            f"dataset=, such as dataset={names[0]!r}"
        )
    return names[0]


def _placed(shard: Shard, place: str, path: str, stamp: Stamp) -> Shard:
    """Return a shard as one of the dataset's own: called ``place``, and known by the file at ``path``."""
    source = shard.source
    if shard.path != path:
        edges = source.edges if isinstance(source, Decoded) else ()
        joined = Joined(path, (Piece(0, 0, shard.rows, shard),))
        return shard._replace(path=place, stamp=stamp, source=Decoded(joined, edges))
    if place == path:
        return shard
    if isinstance(source, Packed):
        return shard._replace(path=place, source=Extents((Extent(0, shard.rows, path, source.offset),)))
    assert isinstance(source, Decoded)
    assert isinstance(source.detail, Chunks | Whole | Joined)
    return shard._replace(path=place, source=source._replace(detail=source.detail._replace(path=path)))


def _read_packed(shard: Shard, start: int, out: Array, cell: Cell, storage: Storage) -> None:
    """Read plain bytes of a file that is not the shard's own."""
    layout = Layout.from_shards([shard], "hdf5", storage)
    segment = Segment(0, range(start, start + len(out)), slice(0, len(out)))
    for access in accesses(shard, segment, layout, cell, contiguous=True):
        block = out[(*access.target, ...)] if access.source is None else np.empty(access.shape, shard.dtype)
        part = Part(shard.path, shard.stamp, access.offset, block.reshape(-1).view(np.uint8).data)
        storage.fetch_into([part])
        if access.source is not None:
            out[access.target] = block[access.source]


def _read_whole(whole: Whole, path: str, stamp: Stamp, start: int, out: Array, cell: Cell, storage: Storage) -> None:
    """Have the library read rows."""
    view, axes = ascending(out, start, cell)
    if not view.size:
        return
    # Of a source that is not there the library would say nothing, and make up its values.
    check_stamps(whole.sources, storage)
    try:
        with open_file(path, storage, stamp.size) as file:
            dataset = file.dataset(whole.name)
            if view.flags.c_contiguous:
                read_block(dataset, axes, view)
            else:
                step = max(1, _BLOCK_NBYTES * len(view) // view.nbytes)
                for i in range(0, len(view), step):
                    block = np.empty(view[i : i + step].shape, out.dtype)
                    read_block(dataset, (axes[0][i : i + step], *axes[1:]), block)
                    view[i : i + step] = block
    except RefusedError as exc:
        raise ShardReadError(f"{path!r} {exc} (dataset {whole.name!r})") from exc
    check_stamps([(path, stamp), *whole.sources], storage)
