"""Whatever h5py writes is read as NumPy holds it: every layout, filter, byte order and index."""

import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.testing import assert_same, example_array, index_chains

try:
    import hdf5plugin
except ImportError:
    hdf5plugin = None

pytestmark = pytest.mark.usefixtures("on_numpy")

_PLUGINS = (
    ()
    if hdf5plugin is None
    else (
        hdf5plugin.Blosc(cname="lz4"),
        hdf5plugin.Blosc(cname="zstd", shuffle=hdf5plugin.Blosc.BITSHUFFLE),
        hdf5plugin.Blosc(cname="blosclz", shuffle=hdf5plugin.Blosc.NOSHUFFLE),
        hdf5plugin.LZ4(),
        hdf5plugin.LZ4(nbytes=64),
        hdf5plugin.Zstd(),
        hdf5plugin.Bitshuffle(),
        hdf5plugin.Blosc2(),
    )
)


@st.composite
def storages(draw, shape):
    """Draw the creation options of a dataset of this shape."""
    kind = draw(st.sampled_from(("contiguous", "chunked", "chunked", "chunked")))
    if kind == "contiguous" or 0 in shape:
        return {}
    chunks = tuple(draw(st.integers(1, length)) for length in shape)
    options = {"chunks": chunks, "shuffle": draw(st.booleans()), "fletcher32": draw(st.booleans())}
    compression = draw(st.sampled_from(("none", "gzip", "lzf", *_PLUGINS)))
    if compression == "none":
        return options
    if isinstance(compression, str):
        return {**options, "compression": compression}
    return {**options, **compression}


@st.composite
def shards(draw):
    """Draw arrays and the creation options of each."""
    row_shape = tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
    dtype = np.dtype(draw(st.sampled_from(("?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "S3"))))
    found = []
    for seed, rows in enumerate(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3))):
        array = example_array((rows, *row_shape), dtype, seed=seed)
        array = array.astype(dtype.newbyteorder(draw(st.sampled_from("<>"))))
        found.append((array, draw(storages(array.shape))))
    return found


def taken(array, chain):
    """Return what is left after the indices, as an array even where NumPy gives a scalar."""
    for index in chain:
        array = array[index] if hasattr(array, "compute") else np.asarray(array[index], array.dtype)
    return array


def write_file(path, array, options, libver="earliest", userblock=0):
    """Write one dataset with these creation options."""
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        file.create_dataset("group/data", data=array, **options)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(), written=shards(), libver=st.sampled_from(("earliest", "latest")), block=st.sampled_from((0, 512))
)
def test_round_trip(data, written, libver, block):
    """Any chain of indices of any shards is what NumPy gives for the arrays that were written."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (array, options) in enumerate(written):
            write_file(Path(folder) / f"shard_{number}.h5", array, options, libver, block)
        ds = open_shards(folder)
        whole = np.concatenate([array.astype(array.dtype.newbyteorder("=")) for array, _ in written])
        assert_same(ds.compute(), whole)
        chain = data.draw(index_chains(whole.shape))
        assert_same(taken(ds, chain).compute(), taken(whole, chain))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    row_shape=st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple),
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    is_chunked=st.booleans(),
    are_frames=st.booleans(),
)
def test_virtual(data, row_shape, counts, is_chunked, are_frames):
    """A virtual dataset of whole rows, or of one file a row, is the concatenation of its sources."""
    counts = [1] * len(counts) if are_frames else counts
    whole = example_array((sum(counts), *row_shape), "i4")
    with tempfile.TemporaryDirectory() as folder:
        layout = h5py.VirtualLayout(whole.shape, "i4")
        for number, end in enumerate(np.cumsum(counts)):
            rows = slice(end - counts[number], end)
            source = whole[end - 1] if are_frames else whole[rows]
            with h5py.File(Path(folder) / f"source_{number}.h5", "w") as file:
                file.create_dataset("x", data=source, chunks=True if is_chunked else None)
            where = int(end - 1) if are_frames else rows
            layout[where] = h5py.VirtualSource(f"source_{number}.h5", "x", source.shape)
        with h5py.File(Path(folder) / "virtual.h5", "w") as file:
            file.create_virtual_dataset("data", layout)
        ds = open_shards(Path(folder) / "virtual.h5")
        assert_same(ds.compute(), whole)
        chain = data.draw(index_chains(whole.shape))
        assert_same(taken(ds, chain).compute(), taken(whole, chain))
