import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from lazyshards import formats, leaf, open_shards
from lazyshards.errors import ShardChangedError, ShardReadError
from lazyshards.formats.npy import NpyFormat
from lazyshards.layout import Decoded, Extent, Extents, Shard
from lazyshards.leaf import fill
from lazyshards.selection import cell_index
from lazyshards.storage import LocalStorage
from lazyshards.testing import (
    FormatConformance,
    RaisingStorage,
    RecordingStorage,
    assert_same,
    example_array,
    with_storage,
    write_npy_shards,
)

pytestmark = pytest.mark.usefixtures("on_numpy")

WHOLE = (range(3),)
COUNTS = (4, 0, 5, 3)


@pytest.fixture(params=["plain", "swapped", "fortran", "extents"])
def layout(request, tmp_path):
    """Give the layout of twelve rows of three, in each of the ways that they can lie on disk."""
    arrays = np.split(example_array((12, 3), "f4"), np.cumsum(COUNTS)[:-1])
    if request.param == "swapped":
        arrays = [array.astype(">f4") for array in arrays]
    elif request.param == "fortran":
        arrays = [np.asfortranarray(array) for array in arrays]
    layout = open_shards(write_npy_shards(tmp_path / "set", arrays))._layout
    return in_two_runs(layout) if request.param == "extents" else layout


def in_two_runs(layout):
    """Move the rows of each file so that its last two come first, and say so in the layout."""
    sources, sizes = {}, layout.row_nbytes
    for i, shard in enumerate(layout.shards):
        path, first = Path(shard.path), max(0, shard.rows - 2)
        data = path.read_bytes()
        head, rows = data[:128], data[128:]
        path.write_bytes(head + rows[first * sizes :] + rows[: first * sizes])
        os.utime(path, ns=(shard.stamp.mtime_ns, shard.stamp.mtime_ns))
        runs = (Extent(0, first, "", 128 + (shard.rows - first) * sizes), Extent(first, shard.rows - first, "", 128))
        sources[i] = Extents(tuple(run for run in runs if run.rows))
    return replace(layout, sources=sources, offsets=np.full(len(layout), -1))


WANTED = example_array((12, 3), "f4")


@pytest.mark.parametrize("rows", [range(12), range(11, -1, -1), range(1, 12, 3), np.array([11, 0, 5, 5, 4])], ids=str)
@pytest.mark.parametrize("place", ["strided", "backwards", "transposed", "inner"])
def test_any_destination(layout, rows, place):
    """A buffer of any strides is filled, and nothing beside it is touched."""
    count = len(rows)
    around = np.full((2 * count + 2, 9), -7, "f4")
    out = {
        "strided": around[1 : 2 * count + 1 : 2, 1:7:2],
        "backwards": around[count:0:-1, 5:2:-1],
        "transposed": np.full((9, count + 2), -7, "f4").T[1:-1, 1:4],
        "inner": around[1 : count + 1, :3],
    }[place]
    outer = out.base
    fill(out, rows, layout, WHOLE)
    assert_same(out, WANTED[np.array(rows)])
    out[...] = -7
    assert (outer == -7).all()


@pytest.mark.parametrize("cell", [(0,), (range(2, -1, -1),), (range(1, 3),), (range(0, 3, 2),)], ids=str)
def test_any_cell(layout, cell):
    """The cell picks, reverses and drops the axes of a row."""
    wanted = WANTED[(slice(None), *cell_index(cell))]
    out = np.empty(wanted.shape, "f4")
    fill(out, range(12), layout, cell)
    assert_same(out, wanted)


def test_every_pair_of_rows(layout):
    """Any two rows in any order are filled, each in its place."""
    for a in range(12):
        for b in range(12):
            out = np.empty((2, 3), "f4")
            fill(out, np.array([a, b]), layout, WHOLE)
            assert_same(out, WANTED[[a, b]])


def test_far_rows_of_single_elements(tmp_path):
    """Rows of one element that lie too far apart to be read together land in the buffer, forwards and backwards."""
    whole = example_array((50_000,), "i8")
    ds = open_shards(write_npy_shards(tmp_path, np.split(whole, [20_000])))
    for index in (slice(None, None, 9000), slice(None, None, -9000), [49_000, 3, 25_000, 3]):
        assert_same(ds[index].compute(), whole[index])


@pytest.mark.parametrize("index", [77, slice(5, 6), slice(None, None, -70_000), slice(None, None, 50_000)], ids=str)
def test_elements_of_giant_rows(tmp_path, index):
    """Single elements of rows larger than a block land in the buffer."""
    whole = example_array((4, 200_000), "i8")
    ds = open_shards(write_npy_shards(tmp_path, np.split(whole, [1])))
    for rows in (slice(None), slice(None, None, -1), [3, 0, 2], 2):
        assert_same(ds[rows, index].compute(), whole[rows, index])


def test_nothing_to_fill(layout):
    """A buffer that holds nothing reads nothing."""
    layout = replace(layout, storage=RaisingStorage())
    fill(np.empty((0, 3), "f4"), range(0), layout, WHOLE)
    fill(np.empty((5, 0), "f4"), range(5), layout, (range(0),))


def test_only_touched_shards_are_read(layout):
    """Rows of one shard are read from its file alone."""
    storage = RecordingStorage(LocalStorage())
    fill(np.empty((2, 3), "f4"), range(5, 7), replace(layout, storage=storage), WHOLE)
    assert storage.paths == {layout.path(2)}


class Batches(RecordingStorage):
    """A storage that notes the size of each batch of reads."""

    def fetch_into(self, parts):
        self.reads.append(len(parts))
        self.inner.fetch_into(parts)


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_reads_are_handed_over_in_bounded_batches(tmp_path, monkeypatch, most):
    """However many reads a tile needs, a batch of them is bounded, and the result does not depend on the bound."""
    whole = example_array((40, 5000), "f4")
    ds = open_shards(write_npy_shards(tmp_path, np.split(whole, 4)))
    monkeypatch.setattr(leaf, "_MOST_PARTS", most)
    storage = Batches(LocalStorage())
    order = np.random.default_rng(0).permutation(40)
    assert_same(with_storage(ds, storage)[order].compute(), whole[order])
    assert max(storage.reads) <= most


def test_failure_names_the_shard(layout):
    """A shard that is gone is an error that names it."""
    path = layout.path(2)
    Path(path).unlink()
    with pytest.raises(ShardReadError, match=Path(path).name):
        fill(np.empty((12, 3), "f4"), range(12), layout, WHOLE)


def test_shrunk_shards_fail_in_every_layout(layout):
    """A shard that lost its last bytes is an error, never zeros, whichever way its rows lie."""
    path = layout.path(3)
    os.truncate(path, Path(path).stat().st_size - 1)
    with pytest.raises(ShardChangedError, match=Path(path).name):
        fill(np.empty((1, 3), "f4"), range(11, 12), layout, WHOLE)


# Decoding ---------------------------------------------------------------------------------------------------------


class DecodedFormat(NpyFormat):
    """Files of npy bytes under another suffix, decoded by a library, so that the core may not read them itself."""

    name = "decoded"
    suffixes = (".dec",)
    magic = ()
    calls: ClassVar[list[tuple[int, tuple[int, ...]]]] = []

    def inspect(self, paths, storage, options):
        """Return shards whose rows only this format can read."""
        found = super().inspect(paths, storage, options)
        return [
            item._replace(dtype=item.dtype.newbyteorder("="), source=Decoded((item.dtype.str, item.source)))
            if isinstance(item, Shard)
            else item
            for item in found
        ]

    def read_into(self, shard, start, out, cell, storage):
        """Decode rows, after checking that the caller kept its part of the contract."""
        assert out.flags.c_contiguous
        assert out.dtype.isnative
        assert 0 <= start < start + len(out) <= shard.rows
        type(self).calls.append((start, out.shape))
        stored, source = shard.source.detail
        row_nbytes = int(np.prod(shard.row_shape)) * np.dtype(stored).itemsize
        buffer = np.empty((len(out), *shard.row_shape), stored)
        part = (shard.path, shard.stamp, source.offset + start * row_nbytes)
        storage.fetch_into([leaf.Part(*part, leaf._bytes_of(buffer))])
        out[...] = buffer[(slice(None), *cell_index(cell))]


@pytest.fixture(autouse=True)
def _decoded_format(monkeypatch):
    decoded = DecodedFormat()
    monkeypatch.setitem(formats._FORMATS, "decoded", decoded)
    monkeypatch.setitem(formats._BY_SUFFIX, ".dec", decoded)
    DecodedFormat.calls.clear()


class TestDecodedShards(FormatConformance):
    """Shards that a format decodes are read as those that the core reads."""

    format = "decoded"

    def write(self, path, array):
        """Write npy bytes under the other suffix."""
        with path.open("wb") as file:
            np.save(file, array)

    def test_a_slice_is_decoded_in_one_call(self, shards):
        """A slice of one shard is one call, straight into the result."""
        ds, whole = shards([6, 7])
        assert_same(ds[1:5].compute(), whole[1:5])
        assert DecodedFormat.calls == [(1, (4, 3))]
