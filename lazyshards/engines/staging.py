"""Filling memory of a GPU: blocks read into two pinned buffers in turn, one copied to the device as the other fills.

The one module that imports CuPy.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lazyshards.engines.threads import fill_together
from lazyshards.errors import EngineUnavailableError
from lazyshards.layout import Layout
from lazyshards.recording import stage as recorded
from lazyshards.selection import Cell, Rows

__all__ = [
    "Sent",
    "device_count",
    "empty",
    "fill_device",
    "free_nbytes",
    "is_device_array",
    "stage",
    "to_device",
    "to_host",
]

_BUFFER_NBYTES = 32 << 20
"""Bytes of each of the two pinned buffers: large enough that a copy's start-up does not count."""


class Sent(Protocol):
    """A copy to the device that was begun."""

    def synchronize(self) -> None:
        """Wait until the buffer may be written again."""
        ...


def stage(
    rows: Rows,
    row_shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    buffers: Sequence[npt.NDArray[np.uint8]],
    read: Callable[[npt.NDArray[np.generic], Rows], None],
    send: Callable[[npt.NDArray[np.generic], slice], Sent],
) -> None:
    """Read rows block by block into the buffers in turn, and send each block on its way.

    Parameters
    ----------
    rows : range or ndarray of int64
        What is wanted, in order.
    row_shape : tuple of int
        Shape of one row of the result.
    dtype : dtype
    buffers : sequence of ndarray of uint8
        Host memory, each of at least one row.
    read : callable
        ``read(block, rows)`` fills a block, C-contiguous, with rows.
    send : callable
        ``send(block, place)`` begins to copy a block to rows ``place`` of the result. A buffer is written again only
        after what was sent from it is done.
    """
    row_nbytes = max(1, prod(row_shape) * dtype.itemsize)
    count = max(1, len(buffers[0]) // row_nbytes)
    pending: list[Sent | None] = [None] * len(buffers)
    try:
        for turn, start in enumerate(range(0, len(rows), count)):
            which = turn % len(buffers)
            sent = pending[which]
            if sent is not None:
                with recorded("place"):
                    sent.synchronize()
            piece = rows[start : start + count]
            block = buffers[which][: len(piece) * row_nbytes].view(dtype).reshape(len(piece), *row_shape)
            read(block, piece)
            with recorded("place", block.nbytes):
                pending[which] = send(block, slice(start, start + len(piece)))
    finally:
        with recorded("place"):
            for sent in pending:
                if sent is not None:
                    sent.synchronize()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as exc:
        raise EngineUnavailableError(f'CuPy cannot be imported ({exc}): pip install "lazyshards[cupy]"') from exc
    return cupy


def device_count() -> int:
    """Return the number of GPUs that CuPy sees.

    Raises
    ------
    EngineUnavailableError
        If CuPy is not installed, or sees none.
    """
    cupy = _cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as exc:  # CuPy's own classes, which need a driver to be imported
        raise EngineUnavailableError(f"CuPy finds no GPU: {exc}") from exc
    if not count:
        raise EngineUnavailableError("CuPy finds no GPU")
    return count


def free_nbytes() -> int:
    """Return the bytes of the current GPU's memory that are free, those that CuPy keeps for reuse included."""
    cupy = _cupy()
    return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())


def empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Any:
    """Return an uninitialised array on the current GPU."""
    return _cupy().empty(shape, dtype)


def is_device_array(array: object) -> bool:
    """Return whether ``array`` is a CuPy array."""
    return isinstance(array, _cupy().ndarray)


def fill_device(out: Any, rows: Rows, layout: Layout, cell: Cell, stream: int | None = None) -> None:
    """Fill memory of a GPU with rows of a layout, every element, or raise.

    Parameters
    ----------
    out : cupy.ndarray, or what exports DLPack
        Destination, C-contiguous.
    rows : range or ndarray of int64
    layout : Layout
    cell : tuple
    stream : int, optional
        Handle of the CUDA stream that the copies belong to; CuPy's current one by default.
    """
    cupy = _cupy()
    device = out if isinstance(out, cupy.ndarray) else cupy.from_dlpack(out)
    row_shape = tuple(device.shape[1:])
    row_nbytes = max(1, prod(row_shape) * device.dtype.itemsize)
    nbytes = min(max(_BUFFER_NBYTES, row_nbytes), max(1, len(rows)) * row_nbytes)
    buffers = [np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes) for _ in range(2)]
    with cupy.cuda.ExternalStream(stream) if stream is not None else cupy.cuda.get_current_stream() as current:

        def send(block: npt.NDArray[np.generic], place: slice) -> Sent:
            device[place].set(block, stream=current)
            event: Sent = current.record()
            return event

        def read(block: npt.NDArray[np.generic], piece: Rows) -> None:
            fill_together(block, piece, layout, cell)

        stage(rows, row_shape, device.dtype, buffers, read, send)


def to_device(array: npt.NDArray[np.generic], out: Any) -> None:
    """Copy a NumPy array into memory of a GPU, and wait for it."""
    cupy = _cupy()
    cupy.from_dlpack(out)[...] = cupy.asarray(array)
    cupy.cuda.get_current_stream().synchronize()


def to_host(array: Any) -> npt.NDArray[np.generic]:
    """Return a copy of GPU memory as a NumPy array."""
    result: npt.NDArray[np.generic] = _cupy().from_dlpack(array).get()
    return result
