"""Writes rows as plain bytes: npy, whose header says what they are, and raw, which a file beside it describes."""

import contextlib
import json
import os
from typing import IO

import numpy as np
import numpy.typing as npt

from lazyshards.atomic import write_atomically
from lazyshards.details import descr_of

__all__ = ["NpyWriter", "RawWriter"]

_SIDECAR = "meta.json"


class _PlainWriter:
    def __init__(self, path: str) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  # closed when the shard is
        self._rows = 0

    def write(self, rows: npt.NDArray[np.generic]) -> None:
        """Append rows."""
        self._file.write(rows.reshape(-1).view(np.uint8).data if rows.size else b"")
        self._rows += len(rows)

    def close(self) -> None:
        """Finish the shard."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(OSError):  # what is not yet written may not fit the disk
            self._file.close()


class NpyWriter(_PlainWriter):
    """One .npy file.

    Parameters
    ----------
    path : str
    dtype : dtype
    row_shape : tuple of int
    rows : int
        Most rows that will be written.
    """

    def __init__(self, path: str, dtype: np.dtype[np.generic], row_shape: tuple[int, ...], rows: int) -> None:
        super().__init__(path)
        self._row_shape = row_shape
        self._descr = np.lib.format.dtype_to_descr(dtype)
        # The header of the most rows is as long as any other: numpy leaves room for rows to be appended.
        self._write_header(rows)

    def close(self) -> None:
        """Write the true number of rows into the header and finish the shard."""
        self._file.seek(0)
        self._write_header(self._rows)
        super().close()

    def _write_header(self, rows: int) -> None:
        shape = (rows, *self._row_shape)
        header = {"descr": self._descr, "fortran_order": False, "shape": shape}
        try:
            np.lib.format.write_array_header_1_0(self._file, header)
        except ValueError:  # it does not fit the first version
            np.lib.format.write_array_header_2_0(self._file, header)


class RawWriter(_PlainWriter):
    """One file of rows as plain bytes, and, once in each directory, the ``meta.json`` that describes them.

    Parameters
    ----------
    path : str
    dtype : dtype
    row_shape : tuple of int
    rows : int
        Rows of every shard but the last.
    """

    def __init__(self, path: str, dtype: np.dtype[np.generic], row_shape: tuple[int, ...], rows: int) -> None:
        sidecar = os.path.join(os.path.dirname(path), _SIDECAR)
        if not os.path.exists(sidecar):  # the first shard has as many rows as any
            described = {"dtype": descr_of(dtype), "shape": list(row_shape), "rows_per_shard": rows}
            write_atomically(sidecar, json.dumps(described).encode())
        super().__init__(path)
