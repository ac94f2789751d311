import itertools
import shutil
import tempfile
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.testing import index_chains, write_npy_shards

pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Seeding the random number generator")

REAL = ("?", "i1", "i4", "i8", "u1", "u2", "u8", "f2", "f4", "f8")
ALL = (*REAL, "c8", "c16")
EXACT = ("min", "max", "argmin", "argmax", "any", "all", "count_nonzero", "nanmin", "nanmax", "nanargmin", "nanargmax")
PLACES = ("argmin", "argmax", "nanargmin", "nanargmax")

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


@st.composite
def arrays(draw, dtypes=ALL, most_rows=40, most_axes=3, specials=True):
    """Draw an array: of any numbers, or far from zero, with NaN and infinities or without, now and then empty."""
    shape = (draw(st.integers(0, most_rows)), *draw(st.lists(st.integers(0, 4), max_size=most_axes - 1)))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    if dtype.kind == "b":
        return generator.random(shape) < draw(st.sampled_from((0.0, 0.1, 0.9, 1.0)))
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        low, high = draw(st.sampled_from(((0, 3), (0, 100), (int(bounds.min), int(bounds.max)))))
        return generator.integers(low, high, shape, dtype, endpoint=True)
    center, width = draw(st.sampled_from(((0.0, 1.0), (1000.0, 1.0), (-3.0, 100.0), (0.0, 0.0))))
    values = generator.normal(center, width, shape)
    if dtype.kind == "c":
        values = values + 1j * generator.normal(-center, width, shape)
    values = values.astype(dtype)
    if draw(st.booleans()):
        values = np.round(values)  # ties
    if specials and draw(st.booleans()):
        share = draw(st.sampled_from((0.05, 0.5, 1.0)))
        mask = generator.random(shape) < share
        values[mask] = draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    return values


def axes_of(ndim, *, one=False):
    """Draw what NumPy takes for ``axis``."""
    single = st.none() | st.integers(-ndim, ndim - 1) if ndim else st.none()
    if one or not ndim:
        return single
    several = st.lists(st.integers(0, ndim - 1), unique=True, max_size=ndim).map(tuple)
    return single | several


@pytest.fixture
def opened(root):
    """Give a function that writes an array as shards, and opens an index chain of it, with what NumPy has of it."""

    def make(data, array):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(array)), max_size=3), label="cuts"))
        directory = f"{root}/{next(numbers)}"
        write_npy_shards(directory, np.split(array, cuts))
        ds = open_shards(directory, engine="numpy")
        for index in data.draw(index_chains(array.shape, most=2), label="indices"):
            ds, array = ds[index], np.asarray(array[index])
        return ds, array

    return make


def quietly(call):
    """Return the result of a call, or the type of what it raised; what NumPy warns of is not looked at."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return np.asarray(call())
        except (ValueError, TypeError, IndexError) as exc:
            return type(exc)


def small_blocks(patch, data):
    """Have blocks hold a few elements, so that many are merged, and read on some number of threads."""
    elements = data.draw(st.sampled_from((5, 20, 100, 1 << 20)), label="elements of a block")
    readers = data.draw(st.integers(1, 4), label="readers")
    patch.setattr("lazyshards.reductions.blocks.BLOCK_ELEMENTS", elements)
    patch.setattr("lazyshards.reductions.blocks.WIDE_ELEMENTS", elements)
    patch.setattr("lazyshards.reductions.blocks.RUN_NBYTES", data.draw(st.sampled_from((1, 500, 1 << 20))))
    patch.setattr("lazyshards.reductions.blocks.reader_count", lambda: readers)


def assert_alike(found, expected):
    """Check that two results are equal in type, shape and value, or two errors of one type."""
    if isinstance(expected, type):
        assert isinstance(found, type)
        assert issubclass(found, expected)
        return
    assert not isinstance(found, type), found
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def assert_near(found, numpy_own, precise, bound):
    """Check dtype and shape against NumPy's, and values against NumPy's in float64, within a bound and one rounding."""
    if isinstance(numpy_own, type):
        assert_alike(found, numpy_own)
        return
    assert not isinstance(found, type), found
    assert (found.dtype, found.shape) == (numpy_own.dtype, numpy_own.shape)
    if found.dtype.kind not in "fc":
        np.testing.assert_array_equal(found, numpy_own)
        return
    with np.errstate(all="ignore"):
        precise = precise.astype(found.dtype)
        finite = np.isfinite(precise)
        np.testing.assert_array_equal(found[~finite], precise[~finite])
        rounding = 4 * np.finfo(found.dtype).eps * np.abs(precise[finite]) + np.finfo(found.dtype).smallest_subnormal
        apart = np.abs(found[finite].astype("c16") - precise[finite])
        assert np.all(apart <= rounding + np.broadcast_to(bound, precise.shape)[finite])


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@examples(40)
def test_exact_reductions(opened, name, data):
    """What rounds nothing is NumPy's to the bit, of any dtype, shape, view and axes, however blocks fall."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        ds, array = opened(data, data.draw(arrays()))
        axis = data.draw(axes_of(array.ndim, one=name in PLACES), label="axis")
        keepdims = data.draw(st.booleans(), label="keepdims")
        expected = quietly(lambda: getattr(np, name)(array, axis=axis, keepdims=keepdims))
        found = quietly(lambda: getattr(ds, name)(axis=axis, keepdims=keepdims))
        assert_alike(found, expected)


def wide(array):
    """Return the array in the type in which it is added up."""
    return array.astype("c16" if array.dtype.kind == "c" else "f8") if array.dtype.kind != "b" else array.astype("f8")


@pytest.mark.parametrize("name", ["sum", "mean", "nansum", "nanmean"])
@given(data=st.data())
@examples(80)
def test_sums(opened, name, data):
    """Sums and means are NumPy's in float64, within the rounding of its own summation; integers are NumPy's exactly."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        ds, array = opened(data, data.draw(arrays()))
        axis = data.draw(axes_of(array.ndim), label="axis")
        options = {"axis": axis, "keepdims": data.draw(st.booleans(), label="keepdims")}
        dtypes = {"f": ("f2", "f4", "f8"), "c": ("c8", "c16")}.get(array.dtype.kind, ("f4", "f8", "i4", "i8"))
        dtype = data.draw(st.none() | st.sampled_from(dtypes), label="dtype")
        own = quietly(lambda: getattr(np, name)(array, **options, dtype=dtype))
        precise = quietly(lambda: getattr(np, name)(wide(array), **options))
        with np.errstate(all="ignore"):
            size = np.nansum(np.abs(wide(array)), **options)
        bound = array.size * np.finfo("f8").eps * np.where(np.isfinite(size), size, 0)
        assert_near(quietly(lambda: getattr(ds, name)(**options, dtype=dtype)), own, precise, bound)


@pytest.mark.parametrize("name", ["var", "std", "nanvar", "nanstd"])
@given(data=st.data())
@examples(80)
def test_variances(opened, name, data):
    """Variances are NumPy's in float64, within rounding, with any ddof, far from zero, and where too little is left."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        ds, array = opened(data, data.draw(arrays()))
        axis = data.draw(axes_of(array.ndim), label="axis")
        ddof = data.draw(st.sampled_from((0, 1, 2, 0.5)), label="ddof")
        options = {"axis": axis, "keepdims": data.draw(st.booleans(), label="keepdims"), "ddof": ddof}
        own = quietly(lambda: getattr(np, name)(array, **options))
        # Of integers NumPy looks for no NaN, and divides by nothing in the way of var.
        alike = name if array.dtype.kind in "fc" else name.removeprefix("nan")
        precise = quietly(lambda: getattr(np, alike)(wide(array), **options))
        found = quietly(lambda: getattr(ds, name)(**options))
        finite = wide(array)[np.isfinite(wide(array))]
        most = np.abs(finite).max() if finite.size else 0.0
        eps = np.finfo("f8").eps
        # A mean of rounded sums is off by a part of eps, and what that does to squares is its square.
        bound = 100 * array.size * (array.size * eps * most) ** 2
        if name.endswith("std"):
            bound = np.sqrt(bound)
        bound = bound + 8 * array.size * eps * (np.abs(precise) if not isinstance(precise, type) else 0)
        assert_near(found, own, precise, np.where(np.isfinite(bound), bound, 0))


@given(data=st.data())
@examples(80)
def test_quantiles(opened, data):
    """Quantiles and medians are NumPy's of the same elements, in one pass or in many that look at few bits each."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        patch.setattr(
            "lazyshards.reductions.quantiles.HELD_NBYTES", data.draw(st.sampled_from((0, 100, 1000, 1 << 20)))
        )
        patch.setattr("lazyshards.reductions.quantiles.LEAST_BITS", 1)
        patch.setattr("lazyshards.reductions.quantiles.MOST_BITS", data.draw(st.sampled_from((3, 8, 16))))
        patch.setattr("lazyshards.reductions.quantiles.TABLE_NBYTES", data.draw(st.sampled_from((1000, 1 << 20))))
        ds, array = opened(data, data.draw(arrays(REAL)))
        axis = data.draw(st.sampled_from((None, 0)) if array.ndim and not ds._selection.scalar else st.none())
        keepdims = data.draw(st.booleans(), label="keepdims")
        part = st.floats(0, 1) | st.sampled_from((0.0, 0.25, 0.5, 1.0))
        q = data.draw(part | st.lists(part, max_size=4), label="q")
        own = quietly(lambda: np.quantile(array, q, axis=axis, keepdims=keepdims))
        if not array.size and (array.dtype == bool or isinstance(own, type)):
            with pytest.raises((TypeError, IndexError)):
                ds.quantile(q, axis=axis)
            return
        if not array.size:
            assert_alike(quietly(lambda: ds.quantile(q, axis=axis, keepdims=keepdims)), own)
            return
        exact = array.astype("f8")
        precise = quietly(lambda: np.quantile(exact, q, axis=axis, keepdims=keepdims))
        found = quietly(lambda: ds.quantile(q, axis=axis, keepdims=keepdims))
        finite = np.abs(exact[np.isfinite(exact)])
        bound = 8 * np.finfo("f8").eps * (finite.max() if finite.size else 0.0)
        if not isinstance(own, type):
            # The difference of the two elements between which it lies is rounded to their type, also where they cancel.
            for side in ("lower", "higher"):
                near = np.abs(quietly(lambda side=side: np.quantile(exact, q, axis, keepdims=keepdims, method=side)))
                bound = bound + np.finfo(own.dtype).eps * np.where(np.isfinite(near), near, 0)
        assert_near(found, own, precise, bound)
        assert_alike(
            quietly(lambda: ds.median(axis=axis, keepdims=keepdims)),
            quietly(lambda: np.median(array, axis=axis, keepdims=keepdims)),
        )


@given(data=st.data())
@examples(60)
def test_histograms(opened, data):
    """Histograms are NumPy's, counts and edges, by number of bins, by range and by edges."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        ds, array = opened(data, data.draw(arrays(REAL)))
        numbers = array.astype("u1") if array.dtype == bool else array
        bins = data.draw(st.integers(1, 9) | st.just([-2.0, 0.0, 0.5, 3.0, 1000.0]), label="bins")
        limits = data.draw(st.sampled_from((None, (0, 1), (-5.0, 999.5))), label="range")
        for part in (0, 1):
            assert_alike(
                quietly(lambda part=part: ds.histogram(bins, limits)[part]),
                quietly(lambda part=part: np.histogram(numbers, bins, limits)[part]),
            )


@given(data=st.data())
@examples(60)
def test_matrices(opened, data):
    """Gram and covariance matrices are NumPy's in float64, within rounding; those of integers are exact."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        ds, array = opened(data, data.draw(arrays(most_axes=2, specials=False)))
        if array.ndim != 2 or ds._selection.scalar:
            with pytest.raises(ValueError, match="expected rows of one axis"):
                ds.gram()
        else:
            added = np.sum(array[:0]).dtype
            whole = array.astype(added) if added.kind in "iu" else wide(array)
            bound = array.size * np.finfo("f8").eps * (np.abs(whole.T) @ np.abs(whole)) if added.kind in "fc" else 0
            expected = whole.conj().T @ whole
            with np.errstate(over="ignore"):
                own = expected.astype(added)
            assert_near(quietly(ds.gram), own, expected, bound)
        if array.ndim in (1, 2) and not ds._selection.scalar and array.size:
            ddof = data.draw(st.integers(0, 2), label="ddof")
            expected = quietly(lambda: np.cov(wide(array), rowvar=False, ddof=ddof))
            most = np.abs(wide(array)).max(initial=0)
            spread = np.abs(wide(array) - wide(array).mean(axis=0)).max(initial=0)
            bound = (
                100 * array.size**2 * np.finfo("f8").eps * (spread**2 + most * spread + np.finfo("f8").eps * most**2)
            )
            assert_near(quietly(lambda: ds.cov(ddof=ddof)), expected, expected, bound)


@given(data=st.data())
@examples(50)
def test_stats(opened, data):
    """The table has what the reductions give one by one."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, data)
        ds, array = opened(data, data.draw(arrays()))
        if not array.ndim or ds._selection.scalar or not array.size:
            return
        stats = ds.stats()
        missing = np.isnan(wide(array)).sum(axis=0)
        np.testing.assert_array_equal(stats.nan, missing)
        np.testing.assert_array_equal(stats.count, len(array) - missing)
        for field in ("min", "max", "std"):
            expected = quietly(lambda field=field: getattr(ds, f"nan{field}")(axis=0))
            assert_alike(np.asarray(getattr(stats, field)).astype(expected.dtype), expected)
        repr(stats), stats._repr_html_()


@given(data=st.data())
@examples(80)
def test_bits_do_not_depend_on_threads(opened, data):
    """Results have the same bits whatever the number of threads, and how many blocks are read together."""
    with pytest.MonkeyPatch.context() as patch:
        elements = data.draw(st.sampled_from((1, 5, 30)))
        patch.setattr("lazyshards.reductions.blocks.BLOCK_ELEMENTS", elements)
        patch.setattr("lazyshards.reductions.blocks.WIDE_ELEMENTS", elements)
        ds, _ = opened(data, data.draw(arrays(("f2", "f4", "f8", "c8"))))
        axis = 0 if ds.ndim and data.draw(st.booleans()) else None
        found = []
        for readers, together in ((1, 1), (2, 100), (7, 1000)):
            patch.setattr("lazyshards.reductions.blocks.RUN_NBYTES", together)
            patch.setattr("lazyshards.reductions.blocks.reader_count", lambda readers=readers: readers)
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = [getattr(ds, name)(axis=axis) for name in ("sum", "mean", "var", "nanstd")]
            found.append([(result.dtype, result.tobytes()) for result in results])
        assert found[0] == found[1] == found[2]
