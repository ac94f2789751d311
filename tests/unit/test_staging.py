"""Blocks on their way to a GPU: what is read, where it goes, and when a buffer may be written again."""

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.engines import find_engine
from lazyshards.engines.dtypes import why_not_cupy, why_not_legate
from lazyshards.engines.staging import stage
from lazyshards.errors import EngineUnavailableError, ShardReadError
from lazyshards.leaf import fill
from lazyshards.selection import select, select_all


class Device:
    """Memory that a copy reaches only when it is waited for, as a GPU's does at the latest."""

    def __init__(self, shape, dtype):
        self.memory = np.full(shape, 0, dtype)
        self.unfinished = []

    def send(self, block, place):
        copy = Copy(self, block, place)
        self.unfinished.append(copy)
        return copy


class Copy:
    def __init__(self, device, block, place):
        self.device, self.block, self.place = device, block, place

    def synchronize(self):
        if self in self.device.unfinished:
            self.device.memory[self.place] = self.block
            self.device.unfinished.remove(self)


def buffers(nbytes):
    """Two buffers of so many bytes."""
    return [np.zeros(nbytes, np.uint8) for _ in range(2)]


@pytest.mark.parametrize("nbytes", [12, 13, 24, 60, 1000])
@pytest.mark.parametrize("index", [slice(None), slice(20, 2, -3), [5, 0, 5, 22], slice(3, 3)])
def test_every_row_arrives(opened, index, nbytes):
    """Whatever the size of the buffers, the device holds the rows, and no copy is left unfinished."""
    ds, whole = opened((10, 0, 13))
    selection = select(select_all(23, (3,)), index)
    device = Device(whole[index].shape, whole.dtype)
    stage(
        selection.rows,
        (3,),
        whole.dtype,
        buffers(nbytes),
        lambda block, rows: fill(block, rows, ds._layout, selection.cell),
        device.send,
    )
    assert np.array_equal(device.memory, whole[index], equal_nan=True)
    assert not device.unfinished


def test_one_block_is_read_while_another_is_sent(opened):
    """With two buffers a copy may be under way while the next block is read, but never two blocks behind."""
    ds, whole = opened((8,))
    device = Device(whole.shape, whole.dtype)
    under_way = []

    def read(block, rows):
        under_way.append(len(device.unfinished))
        fill(block, rows, ds._layout, (range(3),))

    stage(range(8), (3,), whole.dtype, buffers(24), read, device.send)
    assert under_way == [0, 1, 1, 1]


def test_a_failed_read_leaves_no_copy_behind(opened):
    """If a read fails, the error comes out and what was sent before is waited for."""
    ds, whole = opened((4, 4))
    device = Device(whole.shape, whole.dtype)

    def read(block, rows):
        if rows[0] >= 4:
            raise ShardReadError("gone")
        fill(block, rows, ds._layout, (range(3),))

    with pytest.raises(ShardReadError, match="gone"):
        stage(range(8), (3,), whole.dtype, buffers(24), read, device.send)
    assert not device.unfinished
    assert np.array_equal(device.memory[:4], whole[:4], equal_nan=True)


def test_cupy_says_what_is_missing(opened):
    """Where CuPy or a GPU is not there, asking for the engine says so and what installs it."""
    ds, whole = opened((2,))
    try:
        find_engine("cupy")
    except EngineUnavailableError:
        with pytest.raises(EngineUnavailableError, match="CuPy"):
            ds.compute(engine="cupy")
    else:
        assert np.array_equal(ds.compute(engine="cupy").get(), whole, equal_nan=True)


@pytest.mark.parametrize("why_not", [why_not_legate, why_not_cupy])
def test_what_a_gpu_library_holds(why_not):
    """Numbers and booleans are held; dates, text, records and long doubles are not, and the answer names the dtype."""
    for dtype in ("?", "i1", "u8", "f2", "f8", "c16"):
        assert why_not(np.dtype(dtype), 2) is None
    for dtype in ("M8[s]", "S3", "U2", "g"):
        assert str(np.dtype(dtype)) in why_not(np.dtype(dtype), 2)


def test_axes_of_legate():
    """Six axes are held and seven are not."""
    assert why_not_legate(np.dtype("f4"), 6) is None
    assert "7" in why_not_legate(np.dtype("f4"), 7)


def test_numpy_serves_where_cupy_was_asked_and_cannot(opened):
    """An engine that is missing changes nothing about the others."""
    ds, whole = opened((3,))
    assert np.array_equal(open_shards([s.path for s in ds.shards], engine="numpy").to_numpy(), whole, equal_nan=True)
