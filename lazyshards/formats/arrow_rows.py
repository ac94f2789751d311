"""Rows of an Arrow file: the buffers of the wanted columns are read, decompressed and turned into rows."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.formats.arrow_headers import DamagedError, Message
from lazyshards.formats.arrow_schema import Index, Slot, load_pyarrow
from lazyshards.formats.columns import Column, ColumnError, Scratch, View, to_numpy, values_of, write_rows, write_strip
from lazyshards.formats.kept import Kept
from lazyshards.formats.stamps import check_stamps
from lazyshards.layout import Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Part, Storage

__all__ = ["BatchReader"]

_BLOCK_NBYTES = 4 << 20
"""Bytes of columns that are read at a time and turned into rows."""
_DECOMPRESSED_NBYTES = 24 << 20
"""Bytes of columns that are decompressed together, with what they were before; one column's is always allowed."""
_SKIP_NBYTES = 256 << 10
"""Bytes of unwanted rows that are decompressed at a time."""
_LISTS_AT_A_TIME = 1 << 17
"""Lists whose lengths are checked at a time."""


_decompressed: Kept[Any] = Kept(64 << 20)  # of pyarrow.RecordBatch, which has no types
"""Columns of compressed batches of which a part was asked for."""


class _Want(NamedTuple):
    """Bytes of a buffer that are wanted, and where they go."""

    buffer: int
    """Number of the buffer in the batch."""
    start: int
    """First byte, counted in the buffer as it was before it was compressed."""
    out: memoryview
    """Where they go."""


class _Buffers:
    """The buffers of one batch: where they lie, or, if they are compressed, how far each was read."""

    def __init__(self, shard: Shard, storage: Storage, batch: Message, scratch: Scratch) -> None:
        self._shard = shard
        self._storage = storage
        self._batch = batch
        self._scratch = scratch
        self._streams: dict[int, _Stream] = {}

    def open(self, numbers: Sequence[int]) -> None:
        """Fetch compressed buffers together; of others each piece is fetched when it is asked for."""
        self._streams = {}
        if not self._batch.codec:
            return
        spans = [self._span(number) for number in numbers]
        room = self._scratch.room("compressed", sum([nbytes for _, nbytes in spans])).data
        parts, at = [], 0
        for offset, nbytes in spans:
            parts.append(self._part(offset, room[at : at + nbytes]))
            at += nbytes
        self._storage.fetch_into(parts)
        for number, part in zip(numbers, parts, strict=True):
            self._streams[number] = _Stream(part.out, self._batch.codec)

    def fill(self, wanted: Sequence[_Want]) -> None:
        """Read pieces; of a compressed buffer that was opened, in ascending order."""
        if self._batch.codec:
            for number, start, out in wanted:
                self._streams[number].fill(start, out)
            return
        parts = []
        for number, start, out in wanted:
            offset, nbytes = self._span(number)
            if start + len(out) > nbytes:
                raise DamagedError("a batch with a buffer too short for its rows")
            parts.append(self._part(offset + start, out))
        self._storage.fetch_into(parts)

    def fetch(self, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Read whole buffers as they are stored, together."""
        self._storage.fetch_into([self._part(self._span(number)[0], out) for number, out in wanted])

    def nbytes(self, number: int) -> int:
        """Return the bytes that a buffer has in the file."""
        return self._span(number)[1]

    def _span(self, number: int) -> tuple[int, int]:
        """Return the first byte of a buffer in the file, and its length."""
        if number >= len(self._batch.buffers):
            raise DamagedError("a batch that lacks buffers")
        offset, nbytes = self._batch.buffers[number].tolist()
        return self._batch.body + offset, nbytes

    def _part(self, offset: int, out: memoryview) -> Part:
        return Part(self._shard.path, self._shard.stamp, offset, out)


class _Stream:
    """A compressed buffer, decompressed from its start on and no further than it is read.

    Not in one call: that one takes no note of LZ4 data that ends early, and what it returns then was never written.
    """

    def __init__(self, data: memoryview, codec: str) -> None:
        pa = load_pyarrow()
        self._at = 0
        if not len(data):
            self._left = 0
            return
        if len(data) < 8:
            raise DamagedError("a compressed buffer that is cut")
        self._left = int.from_bytes(data[:8], "little", signed=True)
        file = pa.BufferReader(pa.py_buffer(data[8:]))
        if self._left == -1:  # left as it was
            self._left = len(data) - 8
            self._file = file
        else:
            self._file = pa.CompressedInputStream(file, codec)

    def fill(self, start: int, out: memoryview) -> None:
        """Read the bytes from ``start`` on, which is not before what was read last."""
        if not len(out):
            return
        if start + len(out) > self._at + self._left:
            raise DamagedError("a batch with a buffer too short for its rows")
        while self._at < start:
            self._advance(memoryview(bytearray(min(_SKIP_NBYTES, start - self._at))))
        self._advance(out)

    def _advance(self, out: memoryview) -> None:
        done = 0
        while done < len(out):
            count = self._file.readinto(out[done:])
            if not count:
                raise DamagedError("a compressed buffer that ends before its length")
            done += count
        self._at += done
        self._left -= done


class BatchReader:
    """One batch of a file: the buffers of the columns that are wanted, and nothing else of it."""

    def __init__(
        self, shard: Shard, storage: Storage, view: View, index: Index, batch: Message, scratch: Scratch
    ) -> None:
        self._scratch = scratch
        self._shard = shard
        self._storage = storage
        self._view = view
        self._index = index
        self._batch = batch
        self._buffers = _Buffers(shard, storage, batch, scratch)

    def read(
        self,
        start: int,
        stop: int,
        columns: Sequence[Column],
        rest: Cell,
        out: npt.NDArray[np.generic],
        *,
        stacked: bool,
    ) -> None:
        """Fill ``out`` with rows [start, stop) of the batch."""
        batch_nbytes = self._view.dtype.itemsize * prod(columns[0].axes) * self._batch.rows
        if self._batch.codec and batch_nbytes <= _DECOMPRESSED_NBYTES and not self._index.schema.has_dictionaries:
            count = max(1, _DECOMPRESSED_NBYTES // max(1, batch_nbytes))
            for k in range(0, len(columns), count):
                some = columns[k : k + count]
                values = self._decode_whole({column.name: column for column in some}, start, stop)
                part = out[:, k : k + count] if stacked else out
                write_rows(part, [values[column.name] for column in some], rest, self._scratch, stacked=stacked)
            return
        for column in columns:
            self._check_lists(column, start, stop)
        plain = stacked and not rest and all([self._is_plain(column) for column in columns])
        row_nbytes = max(1, self._view.dtype.itemsize * prod(columns[0].axes))
        for first, last in self._groups(columns, (stop - start) * row_nbytes):
            some = columns[first:last]
            unique = {column.name: column for column in some}
            self._buffers.open([number for name in unique for number in self._numbers(name)])
            most = _DECOMPRESSED_NBYTES if self._batch.codec else _BLOCK_NBYTES
            count = max(64, most // (row_nbytes * len(some)) // 8 * 8)
            at = start
            while at < stop:
                until = min(stop, at // 8 * 8 + count)  # of a column's nulls, eight share a byte
                part = out[at - start : until - start]
                if stacked:
                    part = part[:, first:last]
                if plain and len(unique) == len(some):
                    self._read_plain(at, until, some, part)
                else:
                    values = self._values(unique, at, until)
                    write_rows(part, [values[column.name] for column in some], rest, self._scratch, stacked=stacked)
                at = until

    def _groups(self, columns: Sequence[Column], column_nbytes: int) -> list[tuple[int, int]]:
        """Return ranges of columns that are read together: bounded in memory, and not too few at a time."""
        if not self._batch.codec:
            count = max(64, _BLOCK_NBYTES // max(1, column_nbytes))
            return [(k, min(len(columns), k + count)) for k in range(0, len(columns), count)]
        # Each is best decompressed in one go. What is held of it is what it was compressed to, and what comes of it.
        groups = []
        first, held = 0, 0
        for k, column in enumerate(columns):
            nbytes = column_nbytes + sum([self._buffers.nbytes(number) for number in self._numbers(column.name)])
            if k > first and held + nbytes > _DECOMPRESSED_NBYTES:
                groups.append((first, k))
                first, held = k, 0
            held += nbytes
        return [*groups, (first, len(columns))]

    def _slot(self, name: str) -> Slot:
        return self._index.schema.slots[name]

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers of the buffers that hold a column's elements: where values are missing, and values."""
        slot = self._slot(name)
        return [slot.data - 1, slot.data] if self._batch.nodes[slot.node + slot.depth, 1] else [slot.data]

    def _is_plain(self, column: Column) -> bool:
        slot = self._slot(column.name)
        same = slot.dtype is not None and slot.dtype == self._view.dtype  # None equals float64
        return same and not column.axes and not self._batch.nodes[slot.node, 1]

    def _read_plain(self, start: int, stop: int, columns: Sequence[Column], out: npt.NDArray[np.generic]) -> None:
        """Read columns that need no decoding, and turn them into rows."""
        strip = self._scratch.strip(len(columns), stop - start, out.dtype)
        self._buffers.fill(
            [
                _Want(self._numbers(column.name)[-1], start * out.itemsize, strip[k].view(np.uint8).data)
                for k, column in enumerate(columns)
            ]
        )
        write_strip(out, strip)

    def _check_lists(self, column: Column, start: int, stop: int) -> None:
        """Raise ColumnError unless all lists of a column have its length."""
        slot = self._slot(column.name)
        if not slot.offsets:
            return
        dtype = np.dtype(slot.offsets)
        self._buffers.open([slot.buffer + 1])
        for at in range(start, stop, _LISTS_AT_A_TIME):
            until = min(stop, at + _LISTS_AT_A_TIME)
            first = at + (at > start)
            offsets = np.empty(until + 1 - first, dtype)
            self._buffers.fill([_Want(slot.buffer + 1, first * dtype.itemsize, offsets.view(np.uint8).data)])
            if not np.array_equal(offsets, np.arange(first, until + 1, dtype=np.int64) * column.axes[0]):
                raise ColumnError(
                    f"column {column.name!r} holds lists of other lengths than {column.axes[0]}, expected one length"
                )

    def _decode_whole(self, columns: Mapping[str, Column], start: int, stop: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return rows [start, stop) of some columns."""
        found = self._record_batch(columns, is_all=stop - start == self._batch.rows).slice(start, stop - start)
        return {name: to_numpy(found.column(name), column, self._view) for name, column in columns.items()}

    def _record_batch(self, names: Iterable[str], *, is_all: bool) -> Any:  # of pyarrow, which has no types
        """Return some columns of the batch; pyarrow decompresses them: it is shown a stream of these.

        Unless all rows of it are wanted it is kept, as the rest is likely to be asked for next: by the tile or the
        slice beside this one.
        """
        slots = [self._slot(name) for name in names]
        shard, fields = self._shard, sorted([slot.number for slot in slots])
        key = shard.path, shard.stamp, self._batch.body, tuple(fields)
        known = None if is_all else _decompressed.get(key)
        if known is not None:
            check_stamps([(shard.path, shard.stamp)], self._storage)
            return known
        pa = load_pyarrow()
        schema, batch = self._index.schema, self._batch
        numbers = [number for slot in slots for number in range(slot.buffer, slot.buffer + slot.buffers)]
        moved = np.zeros_like(batch.buffers)
        body_nbytes = 0
        for number in numbers:
            nbytes = self._buffers.nbytes(number)
            moved[number] = body_nbytes, nbytes
            body_nbytes += -(-nbytes // 8) * 8
        head = schema.message.ljust(-(-len(schema.message) // 8) * 8, b"\0") + batch.moved(moved, body_nbytes)
        stream_nbytes = len(head) + body_nbytes
        # What is kept may refer to it: buffers that compressing would have made longer are stored as they were.
        room = self._scratch.room("stream", stream_nbytes) if is_all else np.empty(stream_nbytes, np.uint8)
        room[: len(head)] = np.frombuffer(head, np.uint8)
        body = room[len(head) :].data
        self._buffers.fetch([(number, body[at : at + n]) for number in numbers for at, n in (moved[number].tolist(),)])
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        with pa.ipc.open_stream(pa.py_buffer(room), options=options) as stream:
            found = next(iter(stream), None)
        if found is None:
            raise DamagedError("a batch that is no batch")
        found.validate(full=any([slot.offsets for slot in slots]))
        if found.num_rows != batch.rows:
            raise DamagedError(f"a batch of {found.num_rows:,} rows, expected {batch.rows:,}")
        if not is_all:
            _decompressed.put(key, found, found.nbytes + stream_nbytes)
        return found

    def _values(self, columns: Mapping[str, Column], start: int, stop: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return rows [start, stop) of some columns."""
        wanted: dict[str, list[_Want]] = {}
        for name, column in columns.items():
            each = prod(column.axes)
            wanted[name] = self._wants(name, start * each, stop * each)
        self._buffers.fill([want for wants in wanted.values() for want in wants])
        return {
            name: self._decode(name, start, stop, columns[name].axes, [want.out for want in wants])
            for name, wants in wanted.items()
        }

    def _wants(self, name: str, start: int, stop: int) -> list[_Want]:
        """Return what is read of a column's buffers for elements [start, stop)."""
        slot = self._slot(name)
        leaf = slot.leaf
        width = (leaf.index_type if slot.dictionary >= 0 else leaf).bit_width
        *validity, data = self._numbers(name)
        wants = [_Want(number, start // 8, _room(-(-stop // 8) - start // 8)) for number in validity]
        if validity:
            start -= start % 8  # its bits begin within a byte, and so its elements begin with that byte
        first = start * width // 8
        return [*wants, _Want(data, first, _room(-(-stop * width // 8) - first))]

    def _decode(
        self, name: str, start: int, stop: int, axes: tuple[int, ...], found: Sequence[memoryview]
    ) -> npt.NDArray[np.generic]:
        """Return rows [start, stop) of a column, given what was read of its buffers."""
        pa = load_pyarrow()
        slot = self._slot(name)
        leaf = slot.leaf
        stored = leaf.index_type if slot.dictionary >= 0 else leaf
        each = prod(axes)
        array = pa.Array.from_buffers(
            stored,
            (stop - start) * each,
            [*[None] * (2 - len(found)), *map(pa.py_buffer, found)],
            offset=start * each % 8 if len(found) > 1 or str(stored) == "bool" else 0,
        )
        if slot.dictionary >= 0:
            values = _load_dictionary(self._shard, self._storage, self._index, slot.dictionary, leaf.value_type)
            array = pa.DictionaryArray.from_arrays(array, values).dictionary_decode()
        return values_of(array, name, self._view).reshape(stop - start, *axes)


def _room(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def _load_dictionary(shard: Shard, storage: Storage, index: Index, number: int, kind: Any) -> Any:
    """Return the values that a column's indices point at, as a pyarrow.Array.

    Parameters
    ----------
    shard : Shard
    storage : Storage
    index : Index
    number : int
        Number of the dictionary.
    kind : pyarrow.DataType
        Type of the values.
    """
    pa = load_pyarrow()
    arrays = []
    for message in index.dictionaries:
        if message.dictionary != number:
            continue
        if not len(message.nodes) or message.nodes[0, 0] != message.rows:
            raise DamagedError("a dictionary without values")
        rooms = [_room(-(-message.rows // 8))] if message.nodes[0, 1] else []
        rooms.append(_room(-(-message.rows * kind.bit_width // 8)))
        buffers = _Buffers(shard, storage, message, Scratch())
        numbers = range(2 - len(rooms), 2)
        buffers.open(numbers)
        buffers.fill([_Want(number, 0, room) for number, room in zip(numbers, rooms, strict=True)])
        arrays.append(
            pa.Array.from_buffers(kind, message.rows, [*[None] * (2 - len(rooms)), *map(pa.py_buffer, rooms)])
        )
    if not arrays:
        raise DamagedError(f"no dictionary {number}")
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
