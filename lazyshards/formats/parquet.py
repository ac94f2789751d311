"""Parquet files: row counts from footers, and only the row groups, pages and columns that are wanted.

All bytes come through the storage, so that stamps are checked, requests are merged and tried again, and a remote file
needs nothing but ranged reads. pyarrow parses footers and decodes pages.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.errors import ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.columns import ColumnError, Scratch, View
from lazyshards.formats.parquet_filters import find_rows, parse_filters
from lazyshards.formats.parquet_footers import (
    CACHE,
    MAGIC,
    describe,
    first_line,
    load_footer,
    load_pyarrow,
    read_footers,
)
from lazyshards.formats.parquet_rows import Request, read_group
from lazyshards.formats.tables import Table, agree, parse_options
from lazyshards.layout import Decoded, Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Storage

__all__ = ["ParquetFormat"]


class _Detail(NamedTuple):
    """What is needed to read a file again."""

    view: View
    """Which columns, and how; the same object for all files."""
    footer_nbytes: int
    """Bytes at the end of the file that hold the footer, its length and the magic."""


class ParquetFormat:
    """Parquet files, read by pyarrow.

    Availability: where pyarrow is installed.
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    magic = (MAGIC,)
    directories = False
    takes_dtype = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file: footers only."""
        asked = parse_options(options, self.name)
        heads = storage.heads(paths, len(MAGIC))
        found: list[Shard | Fault | None] = [None] * len(paths)
        tables: list[Table] = []
        numbers: list[int] = []
        footers: list[tuple[int, tuple[int, ...]]] = []
        for i, footer in read_footers(paths, heads, storage, []):
            if isinstance(footer, Fault):
                found[i] = footer
                continue
            CACHE.put(paths[i], heads[i].stamp, footer, footer.nbytes)
            tables.append(describe(paths[i], footer, asked))
            numbers.append(i)
            footers.append((footer.nbytes, footer.starts))
        view, faults = agree(tables, asked)
        for k, i in enumerate(numbers):
            fault = faults.get(k)
            if fault is not None or view is None:
                found[i] = fault
                continue
            nbytes, starts = footers[k]
            source = Decoded(_Detail(view, nbytes), tuple(dict.fromkeys([at for at in starts if at < starts[-1]])))
            found[i] = Shard(paths[i], tables[k].rows, view.row_shape, view.dtype, heads[i].stamp, source)
        return [shard for shard in found if shard is not None]

    def find_rows(self, shard: Shard, filters: object, storage: Storage) -> npt.NDArray[np.int64]:
        """Return the local rows of a shard for which ``filters`` hold, ascending."""
        assert isinstance(shard.source, Decoded)
        assert isinstance(shard.source.detail, _Detail)
        return find_rows(shard, shard.source.detail.footer_nbytes, parse_filters(filters), storage)

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with local rows [start, start + len(out)), restricted to the cell."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        assert isinstance(detail, _Detail)
        columns, rest = detail.view.pick(cell)
        stacked = detail.view.stacked and not isinstance(cell[0], int)
        stop = start + len(out)
        done = start
        try:
            footer = load_footer(shard, detail.footer_nbytes, storage)
            request = Request(shard, footer, detail.view, columns, rest, stacked, storage, Scratch())
            group = bisect_right(footer.starts, start) - 1
            while done < stop:
                until = min(stop, footer.starts[group + 1])
                if until > done:
                    read_group(request, group, done, until, out[done - start : until - start])
                    done = until
                group += 1
        except ShardReadError:
            raise
        except ColumnError as exc:
            raise ShardReadError(f"{shard.path!r}: {exc}") from exc
        except (load_pyarrow().lib.ArrowException, OSError, KeyError, UnicodeDecodeError) as exc:
            raise ShardReadError(f"{shard.path!r} cannot be decoded: {first_line(exc)}") from exc
