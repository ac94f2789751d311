"""Writes Parquet and Arrow files: one column of numbers, or of lists of fixed size, one in the other for each axis."""

import contextlib
import os
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError, UnsupportedDtypeError

__all__ = ["ArrowWriter", "ParquetWriter"]

_COLUMN = "data"


class _TableWriter:
    """What both have in common: a file, a schema, and rows as a column."""

    def __init__(
        self, path: str, dtype: np.dtype[np.generic], row_shape: tuple[int, ...], compression: str | None
    ) -> None:
        pa = _arrow()
        name = type(self).__name__.removesuffix("Writer")
        kind = None
        if dtype.kind in "biufmM":
            with contextlib.suppress(pa.ArrowException, NotImplementedError):
                kind = pa.from_numpy_dtype(dtype.newbyteorder("="))
        if kind is None or 0 in row_shape:
            raise UnsupportedDtypeError(
                f"{name} has no column of {dtype} rows of shape {row_shape}: write npy, raw or hdf5"
            )
        for size in reversed(row_shape):
            kind = pa.list_(pa.field("item", kind, nullable=False), size)
        self._row_shape = row_shape
        self._dtype = dtype.newbyteorder("=")
        self._schema = pa.schema([pa.field(_COLUMN, kind, nullable=False)])
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  # closed when the shard is
        try:
            self._writer = self._open(pa, compression)
        except (pa.ArrowException, TypeError, ValueError, OSError) as exc:
            self._file.close()
            raise FormatError(f"{name} has no {compression=}: {exc}") from exc

    def _open(self, pa: Any, compression: str | None) -> Any:
        raise NotImplementedError

    def write(self, rows: npt.NDArray[np.generic]) -> None:
        """Append rows, as one row group or batch."""
        pa = _arrow()
        if not len(rows):
            return
        array = pa.array(np.ascontiguousarray(rows.reshape(-1), self._dtype))
        if array.null_count:
            raise UnsupportedDtypeError(
                f"rows of {self._dtype} hold {array.null_count:,} NaT, which a table has as missing: write npy or raw"
            )
        kinds = [self._schema.field(_COLUMN).type]
        for _ in self._row_shape:
            kinds.append(kinds[-1].value_type)
        for kind in reversed(kinds[:-1]):
            array = pa.FixedSizeListArray.from_arrays(array, type=kind)
        self._writer.write_table(pa.Table.from_arrays([array], schema=self._schema))

    def close(self) -> None:
        """Finish the shard."""
        self._writer.close()
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Let go of the file."""
        # The library's writer ends its file when it is closed, or else whenever it is collected: either may fail.
        with contextlib.suppress(_arrow().ArrowException, OSError, ValueError):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()


class ParquetWriter(_TableWriter):
    """One Parquet file.

    Availability: with pyarrow.

    Parameters
    ----------
    path : str
    dtype : dtype
    row_shape : tuple of int
    rows : int
        Most rows that will be written.
    compression : str
        Codec of Parquet; ``"none"`` for none.
    """

    def __init__(
        self,
        path: str,
        dtype: np.dtype[np.generic],
        row_shape: tuple[int, ...],
        rows: int,
        *,
        compression: str = "zstd",
    ) -> None:
        super().__init__(path, dtype, row_shape, compression)

    def _open(self, pa: Any, compression: str | None) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetWriter(self._file, self._schema, compression=compression, use_dictionary=False)


class ArrowWriter(_TableWriter):
    """One Arrow IPC file.

    Availability: with pyarrow.

    Parameters
    ----------
    path : str
    dtype : dtype
    row_shape : tuple of int
    rows : int
        Most rows that will be written.
    compression : str, optional
        ``"lz4"`` or ``"zstd"``; none by default, so that rows are read as plain bytes.
    """

    def __init__(
        self,
        path: str,
        dtype: np.dtype[np.generic],
        row_shape: tuple[int, ...],
        rows: int,
        *,
        compression: str | None = None,
    ) -> None:
        super().__init__(path, dtype, row_shape, compression)

    def _open(self, pa: Any, compression: str | None) -> Any:
        return pa.ipc.new_file(self._file, self._schema, options=pa.ipc.IpcWriteOptions(compression=compression))


def _arrow() -> Any:
    """Return pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as exc:
        raise FormatError("writing Parquet and Arrow files needs pyarrow: pip install 'lazyshards[arrow]'") from exc
    return pa
