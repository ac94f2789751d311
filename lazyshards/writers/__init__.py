"""How one shard is written: a writer for each format that can be."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lazyshards.errors import FormatError
from lazyshards.writers.hdf5 import Hdf5Writer
from lazyshards.writers.plain import NpyWriter, RawWriter
from lazyshards.writers.tables import ArrowWriter, ParquetWriter
from lazyshards.writers.zarr import ZarrWriter

__all__ = ["Writer", "suffix_of", "writable_formats", "writer_of"]


class Writer(Protocol):
    """One shard that is being written."""

    def write(self, rows: npt.NDArray[np.generic]) -> None:
        """Append rows, C-contiguous and of the dtype and row shape that the writer was made for."""
        ...

    def close(self) -> None:
        """Finish the shard; when this returns, all of it is on the disk."""
        ...

    def abandon(self) -> None:
        """Let go of what is open; the shard is not finished and will be removed."""
        ...


Make = Callable[..., Writer]
"""Takes path, dtype, row shape, the most rows that will be written, and the format's own options."""

_WRITERS: Mapping[str, tuple[Make, str]] = {
    "arrow": (ArrowWriter, ".arrow"),
    "hdf5": (Hdf5Writer, ".h5"),
    "npy": (NpyWriter, ".npy"),
    "parquet": (ParquetWriter, ".parquet"),
    "raw": (RawWriter, ".bin"),
    "zarr": (ZarrWriter, ".zarr"),
}


def writable_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return tuple(sorted(_WRITERS))


def writer_of(format: str) -> Make:
    """Return what makes a writer of a format.

    Raises
    ------
    FormatError
        If it cannot be written.
    """
    return _entry(format)[0]


def suffix_of(format: str) -> str:
    """Return the ending of the names of a format's shards."""
    return _entry(format)[1]


def _entry(format: str) -> tuple[Make, str]:
    if format not in _WRITERS:
        raise FormatError(f"shards of format {format!r} cannot be written: expected {', '.join(writable_formats())}")
    return _WRITERS[format]
