import itertools
import pickle
import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.testing import assert_same, index_chains, layouts, write_npy_shards

# Legate warns about whoever seeds a generator, and hypothesis seeds them all before each example.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Seeding the random number generator")

NUMBERS = ("i1", "u1", "i2", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "?")
UNARY = (np.negative, np.absolute, np.sqrt, np.exp, np.sign, np.square, np.invert, np.isfinite, np.conjugate, np.rint)
BINARY = (
    *(np.add, np.subtract, np.multiply, np.divide, np.floor_divide, np.remainder, np.power, np.maximum, np.fmin),
    *(np.less, np.greater_equal, np.equal, np.not_equal, np.logical_and, np.bitwise_or, np.hypot, np.copysign),
)
SCALARS = (
    0,
    1,
    3,
    -2,
    200,
    2.5,
    -0.0,
    True,
    1j,
    np.float32(1.5),
    np.float64(2),
    np.int8(3),
    np.uint64(7),
    np.array(2.5),
)

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


def operands(data, row_shape, *, most_axes):
    """Draw a scalar, or an array that broadcasts against a row."""
    if data.draw(st.booleans(), label="scalar"):
        return data.draw(st.sampled_from(SCALARS), label="operand")
    shape = row_shape[len(row_shape) - data.draw(st.integers(0, len(row_shape)), label="axes") :]
    shape = tuple(data.draw(st.sampled_from([size, 1]), label="size") for size in shape)
    # A row axis of length 1 and sizes that make rows longer, as NumPy has them.
    shape = tuple(
        data.draw(st.sampled_from([2, 3]), label="longer") if n == 1 and data.draw(st.booleans()) else n for n in shape
    )
    if len(shape) == most_axes - 1 and data.draw(st.booleans(), label="kept axis"):
        shape = (1, *shape)
    dtype = data.draw(st.sampled_from(NUMBERS), label="operand dtype")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    return rng.integers(0, 100, shape).astype(dtype)


def one_step(data, ds, whole):
    """Draw one piece of work and do it lazily and by NumPy; None if NumPy refuses it."""
    kind = data.draw(st.sampled_from(["unary", "binary", "binary", "operator", "where", "clip", "round", "cast"]))
    try:
        if kind == "unary":
            function = data.draw(st.sampled_from(UNARY))
            return function(ds), function(whole)
        if kind == "cast":
            dtype = "c16" if whole.dtype.kind == "c" else data.draw(st.sampled_from(("f8", "f4")))
            return ds.astype(dtype, casting="unsafe"), whole.astype(dtype)
        if kind == "round":
            return np.round(ds, 1), np.round(whole, 1)
        other = operands(data, ds.shape[1:], most_axes=ds.ndim)
        if kind == "clip":
            return np.clip(ds, None, other), np.clip(whole, None, other)
        if kind == "where":
            return np.where(ds > 1, ds, other), np.where(whole > 1, whole, other)
        if kind == "operator":
            return (other - ds) * 2 / (ds + 1), (other - whole) * 2 / (whole + 1)
        function = data.draw(st.sampled_from(BINARY))
        swapped = data.draw(st.booleans(), label="swapped")
        return (
            (function(other, ds), function(other, whole)) if swapped else (function(ds, other), function(whole, other))
        )
    except (TypeError, OverflowError, ValueError) as exc:
        return exc


def check(root, engine, data, dtypes=NUMBERS):
    """Draw a layout and a chain of work, indices and casts, and compare what is computed with NumPy's."""
    arrays = data.draw(layouts(dtypes=dtypes, most_axes=3))
    directory = f"{root}/{next(numbers)}"
    write_npy_shards(directory, arrays)
    ds, whole = open_shards(directory, engine=engine), np.concatenate(arrays)
    whole = whole.astype(whole.dtype.newbyteorder("="))
    with np.errstate(all="ignore"):
        for _ in range(data.draw(st.integers(1, 5), label="steps")):
            for index in data.draw(index_chains(whole.shape, most=1)):
                kept, now = ds[index], np.asarray(whole[index])
                if not kept._selection.scalar:
                    ds, whole = kept, now
            found = one_step(data, ds, whole)
            if isinstance(found, Exception):
                continue
            ds, whole = found
            assert (ds.shape, ds.dtype) == (whole.shape, whole.dtype)
        for index in data.draw(index_chains(whole.shape, most=2)):
            ds, whole = ds[index], np.asarray(whole[index])
        tiles = data.draw(st.integers(1, 5), label="tiles_per_processor")
        assert_same(ds.compute(tiles_per_processor=tiles), whole)
        assert_same(pickle.loads(pickle.dumps(ds)).compute("numpy"), whole)  # noqa: S301  # our own


@given(data=st.data())
@examples(150)
def test_any_work_on_numpy(root, data):
    """Any work between any indices and casts has NumPy's shape, dtype and elements, and travels."""
    check(root, "numpy", data)


@given(data=st.data())
@examples(40)
def test_any_work_on_each_engine(root, engine, data):
    """Any work between any indices and casts is NumPy's on every engine."""
    check(root, engine, data, dtypes=("i1", "u2", "i8", "f4", "f8"))
