"""The chunks of a Zarr array: fetched, decoded and put in place, each straight into the result if it can go there."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from math import prod

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.codecs import Bytes, CodecError
from lazyshards.formats.grid import Wanted, ascending, spans, wanted
from lazyshards.formats.kept import DECODED, Kept
from lazyshards.formats.zarr_codecs import CHECKSUM_NBYTES, Codec, Data, drop_checksum, stage_nbytes, undo
from lazyshards.formats.zarr_files import LocalFiles, Place, RemoteFiles, join
from lazyshards.formats.zarr_metadata import ZarrArray
from lazyshards.layout import Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Storage

__all__ = ["read_chunks"]

_ABSENT = 0xFFFF_FFFF_FFFF_FFFF
"""What the index of a shard file has in place of the offset and the size of a chunk that it lacks."""
_AHEAD_NBYTES = 32 << 20
"""Bytes of chunks fetched together, once decoded."""

_indices: Kept[npt.NDArray[np.uint64]] = Kept(64 << 20)
"""Indices of shard files, by path and stamp."""


def read_chunks(
    shard: Shard, array: ZarrArray, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage
) -> None:
    """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell.

    Parameters
    ----------
    shard : Shard
    array : ZarrArray
        What the shard is.
    start : int
    out : ndarray
    cell : tuple
    storage : Storage
    """
    view, axes = ascending(out, start, cell)
    if not view.size:
        return
    parts = [spans(*axis) for axis in zip(axes, array.chunks, array.shape, strict=True)]
    is_local = storage.local_path(join(array.folder, array.metadata)) is not None
    with LocalFiles(storage) if is_local else RemoteFiles(storage) as files:
        _Reader(shard, array, files).read(wanted(view, parts))


class _Reader:
    """Reads, decodes and places the chunks of one request."""

    def __init__(self, shard: Shard, array: ZarrArray, files: LocalFiles | RemoteFiles) -> None:
        self._shard = shard
        self._array = array
        self._files = files
        itemsize = shard.dtype.itemsize
        self._nbytes = prod(array.chunks) * itemsize
        self._sizes = stage_nbytes(array.codecs, prod(array.chunks), itemsize)
        self._most = self._nbytes + self._nbytes // 4 + (1 << 16)
        """Bytes that a chunk may take when it is stored: no codec makes it longer than that."""
        self._is_ordered = array.order == tuple(range(len(array.order)))
        """Whether the elements of a chunk are stored in C order."""
        self._scratch: Bytes | None = None
        self._indices: dict[str, npt.NDArray[np.uint64] | None] = {}

    def read(self, wants: Iterable[Wanted]) -> None:
        """Read all of them, as many together as the files take."""
        left = iter(wants)
        ahead = max(1, min(self._files.ahead, _AHEAD_NBYTES // max(1, self._nbytes)))
        try:
            while window := list(islice(left, ahead)):
                if isinstance(self._files, LocalFiles):
                    self._read_local(window[0], self._files)
                else:
                    self._read_remote(window, self._files)
        except ShardReadError:
            raise
        except OSError as exc:
            raise ShardReadError(f"{self._shard.path!r} cannot be read: {exc.strerror or exc}") from exc

    def _read_remote(self, wants: Sequence[Wanted], files: RemoteFiles) -> None:
        places = [self._find(want.place) for want in wants]
        there = [place for place in places if place is not None]
        fetched = iter(files.fetch(there, self._most + 1) if there else [])
        for want, place in zip(wants, places, strict=True):
            data = None if place is None else next(fetched)
            if data is None:
                self._fill(want)
            else:
                self._put(want, data, None)

    def _read_local(self, want: Wanted, files: LocalFiles) -> None:
        place = self._find(want.place)
        size = None if place is None else files.size(place.path)
        if place is None or size is None:
            self._fill(want)
            return
        if not self._array.codecs and self._is_run(want):
            self._copy(want, place, size, files)
            return
        key = None
        if self._array.codecs and not want.is_all:
            key = "zarr", self._shard.stamp, place, files.stamp()
            kept = DECODED.get(key)
            if kept is not None:
                want.target[...] = kept[want.source]
                return
        data = files.fetch(place, size, self._most + 1)
        self._put(want, data, key)

    # Where a chunk lies -----------------------------------------------------------------------------------------

    def _find(self, numbers: Sequence[int]) -> Place | None:
        """Return where a chunk lies, or None if it is known not to be there."""
        array = self._array
        if not array.files:
            return Place(join(array.folder, array.key(numbers)))
        inner = [size // part for size, part in zip(array.files, array.chunks, strict=True)]
        path = join(array.folder, array.key([n // count for n, count in zip(numbers, inner, strict=True)]))
        if path not in self._indices:
            self._indices[path] = self._index(path, inner)
        index = self._indices[path]
        if index is None:
            return None
        offset, nbytes = map(int, index[tuple([n % count for n, count in zip(numbers, inner, strict=True)])])
        return None if offset == nbytes == _ABSENT else Place(path, offset, nbytes)

    def _index(self, path: str, inner: Sequence[int]) -> npt.NDArray[np.uint64] | None:
        """Return first byte and size of each chunk of a shard file, checked; None if the file is not there."""
        size = self._files.size(path)
        if size is None:
            return None
        array, files = self._array, self._files
        # The array's own stamp too: after other metadata the same bytes may be another index.
        key = (path, self._shard.stamp, *files.stamp()) if isinstance(files, LocalFiles) else None
        if key is not None and (known := _indices.get(key)) is not None:
            return known
        nbytes = 16 * prod(inner) + (CHECKSUM_NBYTES if array.is_checked else 0)
        if size < nbytes:
            raise self._damaged(path, f"it holds {size:,} bytes, its index alone has {nbytes:,}")
        place = Place(path, 0 if array.is_index_first else size - nbytes, nbytes)
        if isinstance(files, LocalFiles):
            data: Data | None = files.fetch(place, size, nbytes)
        else:
            (data,) = files.fetch([place], nbytes)
        if data is None or len(data) < nbytes:
            raise self._damaged(path, "it ends within its index")
        try:
            body = drop_checksum(Codec("crc32c", '{"location": "end"}'), memoryview(data)) if array.is_checked else data
        except CodecError as exc:
            raise self._damaged(path, f"its index is wrong: {exc}") from exc
        index = np.frombuffer(bytes(body), "<u8").astype(np.uint64).reshape(*inner, 2)
        offsets, sizes = index[..., 0], index[..., 1]
        absent = (offsets == _ABSENT) & (sizes == _ABSENT)
        if bool((~absent & ((offsets > size) | (sizes > size) | (offsets + sizes > size))).any()):
            raise self._damaged(path, f"its index has chunks beyond its {size:,} bytes")
        if key is not None:
            _indices.put(key, index, index.nbytes)
        return index

    def _damaged(self, path: str, what: str) -> ShardReadError:
        return ShardReadError(f"{self._shard.path!r} is damaged: {path!r}: {what}")

    # What is done with it ---------------------------------------------------------------------------------------

    def _is_run(self, want: Wanted) -> bool:
        """Return whether what is wanted of a chunk without codecs is one run of its bytes, as the target has them."""
        rows, *rest = want.source
        is_whole_rows = all(
            [part == slice(0, size, 1) for part, size in zip(rest, self._array.chunks[1:], strict=True)]
        )
        is_same = self._is_ordered and want.target.dtype == self._shard.dtype and want.target.flags.c_contiguous
        return is_whole_rows and is_same and rows.step == 1

    def _copy(self, want: Wanted, place: Place, size: int, files: LocalFiles) -> None:
        """Read rows that are stored as they are wanted, and only those."""
        stored = size if place.nbytes is None else place.nbytes
        if stored != self._nbytes:
            raise self._wrong(want, f"it holds {stored:,} bytes, expected {self._nbytes:,}")
        start = place.offset + want.source[0].start * (self._nbytes // self._array.chunks[0])
        if not files.read_into(place.path, start, _bytes_of(want.target).data):
            raise self._damaged(place.path, "it ended while it was read")

    def _fill(self, want: Wanted) -> None:
        """Put the fill value where a chunk is not there."""
        if self._array.fill is None:
            raise ShardReadError(
                f"{self._shard.path!r} lacks its chunk {list(want.place)}: one that holds nothing but the fill value "
                'may be left out, and cannot be told from one that was lost; pass missing_chunks="fill" if none was '
                "lost"
            )
        want.target[...] = np.frombuffer(self._array.fill, self._shard.dtype)[0]

    def _put(self, want: Wanted, data: Data, key: Hashable | None) -> None:
        """Decode a chunk and put what is wanted of it in place; with a key, keep all of it."""
        array = self._array
        if len(data) > self._most:
            raise self._wrong(want, f"it takes more than {self._most:,} bytes, for the {self._nbytes:,} that it holds")
        if self._is_ordered and want.is_straight(self._shard.dtype):
            self._undo(want, data, _bytes_of(want.target))
            return
        if key is not None:
            decoded = np.empty(self._nbytes, np.uint8)
        else:
            if self._scratch is None:
                self._scratch = np.empty(self._nbytes, np.uint8)
            decoded = self._scratch
        self._undo(want, data, decoded)
        stored = decoded.view(self._shard.dtype).reshape([array.chunks[axis] for axis in array.order])
        chunk = stored.transpose(np.argsort(array.order))
        want.target[...] = chunk[want.source]
        if key is not None:
            # The rest of it is likely to be asked for next: by the tile or the batch beside this one.
            DECODED.put(key, chunk, self._nbytes)

    def _undo(self, want: Wanted, data: Data, out: Bytes) -> None:
        try:
            undo(self._array.codecs, self._sizes, data, out)
        except CodecError as exc:
            raise self._wrong(want, str(exc)) from exc

    def _wrong(self, want: Wanted, what: str) -> ShardReadError:
        return ShardReadError(f"{self._shard.path!r} is damaged: its chunk {list(want.place)}: {what}")


def _bytes_of(array: npt.NDArray[np.generic]) -> Bytes:
    """Return the bytes of a C-contiguous array, writable."""
    return array.reshape(-1).view(np.uint8)
