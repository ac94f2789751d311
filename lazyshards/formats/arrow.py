"""Arrow IPC files (Feather version 2 as well) and streams: their buffers are found by their headers and read in place.

All bytes come through the storage, and no file is mapped: one that shrinks is an error, and never ends the process.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.arrow_headers import MAGIC, DamagedError, scan_headers
from lazyshards.formats.arrow_rows import BatchReader
from lazyshards.formats.arrow_schema import (
    CACHE,
    Index,
    Schema,
    describe_field,
    first_line,
    is_regular,
    load_index,
    load_pyarrow,
    make_index,
)
from lazyshards.formats.base import Fault
from lazyshards.formats.columns import ColumnError, Scratch, View
from lazyshards.formats.tables import Options, Table, agree, parse_options
from lazyshards.layout import Decoded, Extent, Extents, Packed, Shard, Source
from lazyshards.selection import Cell
from lazyshards.storage.base import Stamp, Storage

__all__ = ["ArrowFormat"]

_FILES_AT_A_TIME = 256
"""Files whose headers are held in memory together while they are inspected."""


class _Detail(NamedTuple):
    """What is needed to read a file again."""

    view: View
    """Which columns, and how; the same object for all files."""


class ArrowFormat:
    """Arrow IPC files, Feather version 2, and IPC streams.

    Availability: where pyarrow is installed. A single uncompressed column of numbers, or of lists of fixed size, is
    read as plain bytes.
    """

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")
    magic = (MAGIC,)
    directories = False
    takes_dtype = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file: headers only."""
        asked = parse_options(options, self.name)
        load_pyarrow()
        found: list[Shard | Fault | None] = [None] * len(paths)
        tables: list[Table] = []
        indices: list[tuple[int, Stamp, Index]] = []
        schemas: dict[bytes, Schema] = {}
        for first in range(0, len(paths), _FILES_AT_A_TIME):
            some = paths[first : first + _FILES_AT_A_TIME]
            for i, (stamp, scan) in enumerate(scan_headers(some, storage), first):
                try:
                    index = scan if isinstance(scan, Fault) else make_index(scan, schemas)
                except DamagedError as exc:
                    index = Fault(paths[i], f"has {exc}")
                if isinstance(index, Fault):
                    found[i] = index
                    continue
                CACHE.put(paths[i], stamp, index, index.nbytes)
                tables.append(_describe(paths[i], index, asked))
                indices.append((i, stamp, index))
        view, faults = agree(tables, asked)
        for k, (i, stamp, index) in enumerate(indices):
            if k in faults or view is None:
                found[i] = faults.get(k)
                continue
            source = _plain_source(index, view) or Decoded(_Detail(view), index.starts[:-1])
            found[i] = Shard(paths[i], index.starts[-1], view.row_shape, view.dtype, stamp, source)
        return [shard for shard in found if shard is not None]

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        assert isinstance(detail, _Detail)
        columns, rest = detail.view.pick(cell)
        stacked = detail.view.stacked and not isinstance(cell[0], int)
        done, stop = start, start + len(out)
        try:
            index, scratch = load_index(shard, storage), Scratch()
            number = bisect_right(index.starts, start) - 1
            while done < stop:
                first, until = index.starts[number], min(stop, index.starts[number + 1])
                reader = BatchReader(shard, storage, detail.view, index, index.batches[number], scratch)
                reader.read(
                    done - first, until - first, columns, rest, out[done - start : until - start], stacked=stacked
                )
                done = until
                number += 1
        except ShardReadError:
            raise
        except (ColumnError, DamagedError) as exc:
            raise ShardReadError(f"{shard.path!r}: {exc}") from exc
        except (load_pyarrow().lib.ArrowException, OSError, KeyError, IndexError) as exc:
            raise ShardReadError(f"{shard.path!r} cannot be decoded: {first_line(exc)}") from exc


def _describe(path: str, index: Index, options: Options) -> Table:
    """Return the columns of a file, as its headers describe them."""
    if is_regular(index):
        return Table(path, index.starts[-1], index.schema.fields)
    fields = []
    wanted = None if options.columns is None else set(options.columns)
    for field in index.schema.fields:
        if field.problem or (wanted is not None and field.name not in wanted):
            fields.append(field)
        else:
            fields.append(describe_field(field, index))
    return Table(path, index.starts[-1], tuple(fields))


def _plain_source(index: Index, view: View) -> Source | None:
    """Return where the rows lie as plain bytes, or None if they do not."""
    if len(view.columns) > 1:
        return None
    column = view.columns[0]
    slot = index.schema.slots[column.name]
    if slot.dtype is None or slot.dtype != view.dtype:
        return None
    row_nbytes = view.dtype.itemsize * prod(column.axes)
    extents = []
    for first, batch in zip(index.starts, index.batches, strict=False):
        if batch.codec or batch.nodes[slot.node : slot.node + slot.depth + 1, 1].any():
            return None
        if slot.data >= len(batch.buffers) or batch.buffers[slot.data, 1] < batch.rows * row_nbytes:
            return None  # what is wrong is said when it is read
        extents.append(Extent(first, batch.rows, "", batch.body + int(batch.buffers[slot.data, 0])))
    return Packed(extents[0].offset) if len(extents) == 1 else Extents(tuple(extents))
