"""Files that a function of the user's reads: ``open_shards(paths, reader=read, rows=..., dtype=..., row_shape=...)``.

The function travels to the tasks that read by its name: see lazyshards.functions.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from lazyshards.errors import LazyShardsError, ShardReadError
from lazyshards.formats.base import Fault
from lazyshards.formats.faults import unreadable
from lazyshards.formats.options import is_count, row_shape_option
from lazyshards.formats.stamps import check_stamps
from lazyshards.functions import NamedFunction, keep_function
from lazyshards.layout import Decoded, Shard, native_dtype
from lazyshards.selection import Cell, cell_index
from lazyshards.storage.base import Storage

__all__ = ["FunctionFormat"]

_BLOCK_NBYTES = 32 << 20
"""Bytes of the rows that a function is asked for together at most; one row is always allowed."""
_OPTIONS = ("reader", "rows", "dtype", "row_shape")


class FunctionFormat:
    """Files that a function reads.

    Availability: always. Options, all of them needed: ``reader``, which takes a path, a start and a stop and returns
    the rows between as an array; ``rows``, a list of the rows of each file, or a function that takes a path and
    returns them; ``dtype`` and ``row_shape`` of what ``reader`` returns.
    """

    name = "function"
    suffixes: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()
    directories = False
    takes_dtype = True

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every file."""
        for option in options:
            if option not in _OPTIONS:
                raise TypeError(f"reader= takes no option {option!r} beside it: it takes rows, dtype and row_shape")
        lacking = [f"{option}=" for option in _OPTIONS if options.get(option) is None]
        if lacking:
            raise TypeError(f"a dataset read by a function needs {', '.join(lacking)}")
        function = options["reader"]
        if not callable(function):
            raise TypeError(f"reader={function!r} is not a function of a path, a start and a stop")
        shape = row_shape_option(options["row_shape"])
        counts = _count_rows(paths, storage, options["rows"])
        dtype = native_dtype(options["dtype"])
        source = Decoded(keep_function(function))
        found: list[Shard | Fault] = []
        for path, head, count in zip(paths, storage.heads(paths, 1), counts, strict=True):
            if head.error is not None:
                found.append(unreadable(path, head.error))
            elif isinstance(count, Fault):
                found.append(count)
            else:
                found.append(Shard(path, count, shape, dtype, head.stamp, source))
        return found

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Fill ``out`` with what the function returns, checked, in bounded blocks."""
        assert isinstance(shard.source, Decoded)
        reader = shard.source.detail
        assert isinstance(reader, NamedFunction)
        index = (slice(None), *cell_index(cell))
        step = max(1, _BLOCK_NBYTES // max(1, prod(shard.row_shape) * shard.dtype.itemsize))
        for done in range(0, len(out), step):
            count = min(step, len(out) - done)
            out[done : done + count] = _call(reader, shard, start + done, start + done + count, storage)[index]
        check_stamps([(shard.path, shard.stamp)], storage)


def _count_rows(paths: Sequence[str], storage: Storage, rows: object) -> list[int | Fault]:
    """Return the rows of every file, from a list or by asking a function."""
    if not callable(rows):
        counts = list(rows) if isinstance(rows, Sequence | np.ndarray) else rows
        if not isinstance(counts, list) or not all(is_count(count) for count in counts):
            raise TypeError(f"rows={rows!r:.80} is neither a list of the rows of each file nor a function of a path")
        if len(counts) != len(paths):
            raise ValueError(f"rows= says how many rows {len(counts):,} files hold, but there are {len(paths):,} files")
        return [int(count) for count in counts]
    found: list[int | Fault] = []
    for path in paths:
        try:
            count = rows(storage.local_path(path) or path)
        except Exception as exc:  # noqa: BLE001  # whatever a user's function raises is a fault of that file
            found.append(Fault(path, f"has rows that rows= cannot count: {type(exc).__name__}: {exc}"))
        else:
            wrong = Fault(path, f"has {count!r:.80} rows, as rows= counts them; expected an integer, 0 or more")
            found.append(int(count) if is_count(count) else wrong)
    return found


def _call(reader: NamedFunction, shard: Shard, start: int, stop: int, storage: Storage) -> npt.NDArray[np.generic]:
    """Return the rows that the function gives, if they are what was promised."""
    what = f"{shard.path!r} cannot be read by {reader}: for rows {start:,} to {stop:,} it"
    try:
        found = reader.function(storage.local_path(shard.path) or shard.path, start, stop)
        array: npt.NDArray[np.generic] = np.asarray(found)
    except LazyShardsError:
        raise
    except Exception as exc:
        raise ShardReadError(f"{what} raised {type(exc).__name__}: {exc}") from exc
    expected = (stop - start, *shard.row_shape)
    if array.shape != expected or array.dtype.newbyteorder("=") != shard.dtype:
        raise ShardReadError(
            f"{what} returned {array.dtype} of shape {array.shape}, expected {shard.dtype} of shape {expected}"
        )
    if isinstance(found, np.ma.MaskedArray) and np.ma.is_masked(found):
        raise ShardReadError(f"{what} returned a masked array, expected every element")
    return array
