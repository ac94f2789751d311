import itertools
import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.testing import DTYPES, assert_same, index_chains, layouts, write_npy_shards

# Legate warns about whoever seeds a generator, and hypothesis seeds them all before each example.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Seeding the random number generator")

numbers = itertools.count()


@pytest.fixture(scope="module")
def root():
    """One directory for all examples of this file."""
    directory = tempfile.mkdtemp()
    yield directory
    shutil.rmtree(directory)


def examples(count):
    """Return settings for this many examples."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def written(root, arrays, engine):
    """Write shards and return them opened, and what they hold together."""
    directory = f"{root}/{next(numbers)}"
    paths = write_npy_shards(directory, arrays)
    return open_shards(directory, engine=engine), np.concatenate(arrays), paths


def check_chain(root, engine, data, dtypes=DTYPES):
    """Draw a layout and a chain of indices, and compare what is computed in every way with NumPy's."""
    arrays = data.draw(layouts(dtypes=dtypes))
    ds, whole, _ = written(root, arrays, engine)
    shape = whole.shape
    for index in data.draw(index_chains(shape)):
        ds, whole = ds[index], np.asarray(whole[index])
    assert (ds.shape, ds.dtype) == (whole.shape, whole.dtype.newbyteorder("="))
    assert_same(ds.compute(), whole)
    tiles = data.draw(st.integers(1, 12), label="tiles_per_processor")
    assert_same(ds.compute(tiles_per_processor=tiles), whole)
    out = ds.compute()
    out[...] = 0
    assert ds.compute(out=out, tiles_per_processor=data.draw(st.none() | st.integers(1, 5), label="for out")) is out
    assert_same(out, whole)
    assert_same(np.asarray(ds), whole)


@given(data=st.data())
@examples(250)
def test_any_chain_on_numpy(root, data):
    """Any layout under any chain of indices is NumPy's on NumPy: whole, tiled, and into ``out``."""
    check_chain(root, "numpy", data, (*DTYPES, "S3", "U2", "M8[s]"))


@given(data=st.data())
@examples(40)
def test_any_chain_on_each_engine(root, engine, data):
    """Any layout under any chain of indices is NumPy's on every engine: whole, tiled, and into ``out``."""
    check_chain(root, engine, data)


@given(data=st.data())
@examples(60)
def test_engines_run_the_same_plan(root, engine, data):
    """The plan of an engine has NumPy's rows, cell and shards; only the tiles are its own."""
    ds, whole, _ = written(root, data.draw(layouts(most_axes=2)), engine)
    for index in data.draw(index_chains(whole.shape, most=2)):
        ds = ds[index]
    own, numpy = ds.plan(), ds.plan("numpy")
    assert (list(own.rows), own.cell, own.shape, own.nbytes) == (
        list(numpy.rows),
        numpy.cell,
        numpy.shape,
        numpy.nbytes,
    )
    assert own.layout == numpy.layout


@given(data=st.data())
@examples(40)
def test_wide_rows(root, engine, data):
    """Rows of very many bytes, and rows far apart, are NumPy's under any chain of indices."""
    width = data.draw(st.sampled_from([3_000, 20_000, 80_000]))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(["<f8", ">f8"]))
    whole = np.arange(sum(counts) * width, dtype="f8").reshape(-1, width)
    arrays = [part.astype(dtype) for part in np.split(whole, np.cumsum(counts)[:-1])]
    ds, whole, _ = written(root, arrays, engine)
    rows = data.draw(
        st.sampled_from([slice(None), slice(None, None, -1), slice(None, None, 3), [-1, 0, 0] if len(whole) else []])
    )
    columns = data.draw(
        st.sampled_from([slice(None), 7, slice(5, 9), slice(None, None, -1), slice(None, None, width // 3), -1])
    )
    assert_same(ds[rows, columns].compute(), whole[rows, columns])


@given(data=st.data())
@examples(60)
def test_long_columns(root, engine, data):
    """Very many rows of single elements are NumPy's under any slice and gather, near rows and far ones."""
    counts = data.draw(st.lists(st.sampled_from([0, 1, 100, 5_000, 30_000]), min_size=1, max_size=4))
    ds, whole, _ = written(root, np.split(np.arange(sum(counts), dtype="i8"), np.cumsum(counts)[:-1]), engine)
    length = len(whole)
    step = data.draw(st.sampled_from([1, 2, 7, 1_000, 2_500, 9_999]))
    sign = data.draw(st.sampled_from([1, -1]))
    assert_same(ds[:: sign * step].compute(), whole[:: sign * step])
    rows = np.array(data.draw(st.lists(st.integers(0, max(0, length - 1)), max_size=12 if length else 0)), np.int64)
    assert_same(ds[rows].compute(), whole[rows])


@given(data=st.data())
@examples(40)
def test_a_list_in_any_order(root, data):
    """A list of files in any order, with repeats, is NumPy's concatenation in that order."""
    arrays = data.draw(layouts())
    _, _, paths = written(root, arrays, "numpy")
    order = data.draw(st.lists(st.integers(0, len(arrays) - 1), min_size=1, max_size=6))
    ds = open_shards([paths[i] for i in order], engine="numpy")
    assert_same(ds.compute(), np.concatenate([arrays[i] for i in order]))
