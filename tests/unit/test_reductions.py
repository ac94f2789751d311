import re
import threading
import tracemalloc
import warnings
from itertools import pairwise

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.errors import ShardReadError, UnsupportedDtypeError
from lazyshards.reductions.blocks import fold
from lazyshards.testing import RaisingStorage, RecordingStorage, assert_same, with_storage, write_npy_shards

ONE_PASS = {
    "sum": {},
    "mean": {"axis": 0},
    "var": {"axis": 0},
    "std": {},
    "min": {"axis": 1},
    "max": {"axis": 0},
    "argmin": {},
    "argmax": {"axis": 0},
    "all": {},
    "count_nonzero": {},
    "nansum": {},
    "nanmean": {"axis": 0},
    "nanvar": {"axis": (0, 1)},
    "nanstd": {},
    "nanmin": {},
    "nanmax": {"axis": 1},
    "nanargmin": {"axis": 0},
    "nanargmax": {},
    "cov": {},
    "gram": {},
    "stats": {},
    "histogram": {"range": (0, 1)},
}
"""Every reduction that looks at the data once, with arguments."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Have blocks hold 24 elements, so that merging is what is tested."""
    for name in ("blocks.BLOCK_ELEMENTS", "blocks.WIDE_ELEMENTS", "calls.OWN_ELEMENTS"):
        monkeypatch.setattr(f"lazyshards.reductions.{name}", 24)
    for name in ("RUN_NBYTES", "FAR_RUN_NBYTES"):
        monkeypatch.setattr(f"lazyshards.reductions.blocks.{name}", 2 * 24 * 8)


@pytest.fixture
def real(tmp_path):
    """Make a thousand rows of three normal numbers far from zero, in four shards, one of them empty."""
    whole = np.random.default_rng(3).normal(100, 1, (1000, 3))
    write_npy_shards(tmp_path / "real", np.split(whole, [300, 300, 777]))
    return open_shards(tmp_path / "real", engine="numpy"), whole


def recorded(ds):
    """Return the dataset, read through a storage that notes its reads, and the storage."""
    storage = RecordingStorage(ds._layout.storage)
    return with_storage(ds, storage), storage


# What is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_PASS)
def test_each_byte_is_read_once(real, name):
    """A reduction in one pass reads every byte of the rows once, and no other."""
    ds, storage = recorded(real[0])
    getattr(ds, name)(**ONE_PASS[name])
    pieces = sorted(storage.reads)
    assert storage.nbytes == 1000 * 3 * 8
    assert all(
        path != after or offset + nbytes <= start for (path, offset, nbytes), (after, start, _) in pairwise(pieces)
    )


def test_only_what_is_selected_is_read(real):
    """A view's reduction reads the view's rows."""
    ds, storage = recorded(real[0])
    np.testing.assert_allclose(ds[200:310].mean(), real[1][200:310].mean())
    assert storage.nbytes == 110 * 3 * 8


def test_passes(real, monkeypatch):
    """A histogram without a range looks for it first; quantiles read as often as bits and memory say."""
    ds, storage = recorded(real[0])
    ds.histogram()
    assert storage.nbytes == 3 * 1000 * 3 * 8
    storage.reads.clear()
    ds.median()
    assert storage.nbytes == 1000 * 3 * 8
    storage.reads.clear()
    monkeypatch.setattr("lazyshards.reductions.quantiles.HELD_NBYTES", 0)
    assert ds.median() == np.median(real[1])
    assert storage.nbytes == 4 * 1000 * 3 * 8  # 64 bits, 16 at a time, and nothing left to collect
    storage.reads.clear()
    monkeypatch.setattr("lazyshards.reductions.quantiles.HELD_NBYTES", 20_000)
    assert ds.median() == np.median(real[1])
    assert storage.nbytes == 2 * 1000 * 3 * 8 or storage.nbytes == 3 * 1000 * 3 * 8


def test_quantiles_of_few_wide_rows(tmp_path, monkeypatch):
    """Columns of which there are many more than rows have quantiles of their own, where ranks meet and part."""
    monkeypatch.setattr("lazyshards.reductions.quantiles.HELD_NBYTES", 10_000)
    monkeypatch.setattr("lazyshards.reductions.blocks.WIDE_ELEMENTS", 1 << 19)
    whole = np.random.default_rng(5).integers(-3, 3, (6, 5_000)).astype("f4")
    whole[:, ::7] = np.random.default_rng(6).standard_normal((6, 715))
    write_npy_shards(tmp_path / "set", [whole[:1], whole[1:]])
    ds = open_shards(tmp_path / "set", engine="numpy")
    assert_same(ds.median(axis=0), np.median(whole, axis=0))
    parts = [0.0, 0.3, 0.3, 0.9]
    np.testing.assert_allclose(ds.quantile(parts, axis=0), np.quantile(whole, parts, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("held", [2_000, 40_000])
@pytest.mark.parametrize("index", [slice(None), (slice(None), slice(None), 1), (slice(None, None, -2), slice(3, 40))])
def test_quantiles_of_many_columns_are_found_in_stripes(tmp_path, monkeypatch, held, index):
    """Columns that are too many for one table of counts are dealt with in stripes, in their order."""
    monkeypatch.setattr("lazyshards.reductions.quantiles.HELD_NBYTES", held)
    monkeypatch.setattr("lazyshards.reductions.quantiles.TABLE_NBYTES", 128 * 64)
    whole = np.random.default_rng(0).standard_normal((30, 70, 3)).astype("f4")
    whole[4, 5, 1] = np.nan
    write_npy_shards(tmp_path / "set", np.split(whole, [7, 19]))
    ds, expected = open_shards(tmp_path / "set")[index], whole[index]
    parts = [0.2, 0.5, 0.9]
    found = ds.quantile(parts, axis=0)
    np.testing.assert_allclose(found, np.quantile(expected, parts, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ds.median(axis=0, keepdims=True), np.median(expected, axis=0, keepdims=True))


def test_any_and_all_stop_early(tmp_path):
    """What is decided is not read to the end."""
    write_npy_shards(tmp_path / "set", [np.r_[np.zeros(500), 1, np.zeros(200_000)]])
    ds, storage = recorded(open_shards(tmp_path / "set", engine="numpy"))
    assert ds.any()
    assert not ds.all()
    assert storage.nbytes < 100_000


def test_nothing_is_read_for_nothing(real):
    """A view without elements, and an iterator that nobody asks, read nothing."""
    ds = with_storage(real[0], RaisingStorage())
    assert ds[:0].sum() == 0
    assert_same(ds[:0].sum(axis=1), np.zeros(0))
    ds.map_blocks(len)
    ds.block_plan()


def test_blocks_depend_on_rows_only(real, monkeypatch):
    """Blocks have the same rows whatever the processors, the shards and the storage."""
    ds, _ = real
    plans = []
    for readers in (1, 9):
        monkeypatch.setattr("lazyshards.reductions.blocks.reader_count", lambda readers=readers: readers)
        plans += [ds.block_plan(), recorded(ds)[0].block_plan()]
    assert [(plan.block_rows, plan.block_count) for plan in plans] == [(8, 125)] * 4
    assert "125 blocks of up to 8 rows, 192 B, on 9 threads" in repr(plans[-1])


# What is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ONE_PASS, "any", "median"])
def test_engines_alike(write, engine, name):
    """The results are NumPy's, to the bit the same, whatever the engine of the dataset."""
    path, _ = write([40, 0, 13], (3,), "i4")
    expected = getattr(open_shards(path, engine="numpy"), name)(**ONE_PASS.get(name, {}))
    found = getattr(open_shards(path, engine=engine), name)(**ONE_PASS.get(name, {}))
    if name == "stats":
        assert repr(found) == repr(expected)
        return
    found, expected = (each if isinstance(each, tuple) else (each,) for each in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, np.ndarray | np.generic)
        assert_same(one, other)


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_bits_do_not_depend_on_threads(real, monkeypatch, readers):
    """Any number of threads gives the same bits."""
    ds, _ = real
    monkeypatch.setattr("lazyshards.reductions.blocks.reader_count", lambda: 3)
    expected = [ds.sum(), *ds.var(axis=0), *ds.cov().ravel(), *ds.quantile([0.1, 0.9])]
    monkeypatch.setattr("lazyshards.reductions.blocks.reader_count", lambda: readers)
    found = [ds.sum(), *ds.var(axis=0), *ds.cov().ravel(), *ds.quantile([0.1, 0.9])]
    assert_same(np.array(found), np.array(expected))


@pytest.mark.parametrize(
    "index", [7, (7, 1), (slice(None), 2), slice(None, None, -3), [5, 5, 900, 0], np.arange(1000) > 990]
)
def test_every_kind_of_view(real, index):
    """Rows and columns by integers, steps, index arrays and masks are reduced as NumPy reduces them."""
    ds, whole = real[0][index], real[1][index]
    np.testing.assert_allclose(ds.sum(), np.sum(whole))
    np.testing.assert_allclose(ds.std(), np.std(whole), atol=1e-9)
    assert ds.argmax() == np.argmax(whole)
    assert ds.median() == np.median(whole)
    for axis in range(np.ndim(whole)):
        np.testing.assert_allclose(ds.mean(axis=axis, keepdims=True), np.mean(whole, axis=axis, keepdims=True))


def test_casts_and_maps(real):
    """Cast and mapped datasets are reduced after cast and function."""
    ds, whole = real
    assert ds.astype("i2", casting="unsafe").sum() == whole.astype("i2").sum()
    means = ds.map(lambda rows: rows.mean(axis=1), dtype="f8", row_shape=())
    np.testing.assert_allclose(means.max(), whole.mean(axis=1).max())


def test_numpy_functions_stream(real, monkeypatch):
    """NumPy's functions of the same names call the methods, and do not read the dataset into an array."""
    ds, whole = real
    monkeypatch.setattr(type(ds), "__array__", None)
    for name in ("sum", "mean", "var", "std", "min", "max", "argmin", "argmax", "any", "all"):
        np.testing.assert_allclose(getattr(np, name)(ds, axis=0), getattr(np, name)(whole, axis=0))
    np.testing.assert_allclose(np.mean(ds, dtype="f4", keepdims=True), np.mean(whole, dtype="f8", keepdims=True), 1e-6)
    with pytest.raises(TypeError, match="where"):
        np.sum(ds, where=whole > 0)


def test_sums_keep_digits(tmp_path):
    """Small numbers added to a large sum of float32 are not lost, and a large mean takes no digits of the spread."""
    few = np.full(100_000, 0.1, "f4")
    far = (1e8 + np.arange(100_000) % 2).astype("f8")
    write_npy_shards(tmp_path / "few", [few])
    write_npy_shards(tmp_path / "far", [far])
    assert open_shards(tmp_path / "few", engine="numpy").sum() == np.float32(few.astype("f8").sum())
    assert open_shards(tmp_path / "far", engine="numpy").var() == pytest.approx(0.25, rel=1e-12)


def test_infinities_in_stats(tmp_path):
    """An infinity in one block leaves means infinite, other columns alone, and warns of nothing."""
    whole = np.ones((200, 2))
    whole[3, 0], whole[150:, 1] = np.inf, np.nan
    write_npy_shards(tmp_path / "set", [whole])
    stats = open_shards(tmp_path / "set", engine="numpy").stats()
    assert_same(stats.mean, np.array([np.inf, 1.0]))
    assert_same(stats.nan, np.array([0, 50]))
    assert np.isnan(stats.std[0])
    assert stats.std[1] == 0


def test_out(real):
    """A result goes into ``out``, which is returned; what cannot hold it is refused."""
    ds, whole = real
    out = np.zeros(3)
    assert ds.sum(axis=0, out=out) is out
    np.testing.assert_allclose(out, whole.sum(axis=0))
    with pytest.raises(ValueError, match=r"out has shape \(3,\), expected \(\)"):
        ds.sum(out=out)
    with pytest.raises(TypeError, match="out is a list"):
        ds.sum(axis=0, out=[0, 0, 0])
    with pytest.raises(TypeError, match="same_kind"):
        ds.sum(axis=0, out=np.zeros(3, "i8"))


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ds: ds.sum(axis=2), np.exceptions.AxisError, "axis 2 is out of bounds"),
        (lambda ds: ds.sum(axis=(0, 0)), ValueError, "duplicate"),
        (lambda ds: ds.argmin(axis=(0, 1)), TypeError, "integer"),
        (lambda ds: ds[:0].min(), ValueError, "no identity"),
        (lambda ds: ds[:0].argmax(axis=0), ValueError, "empty"),
        (lambda ds: ds.var(dtype="i4"), TypeError, "expected a floating"),
        (lambda ds: ds.quantile(1.5), ValueError, r"\[0, 1\]"),
        (lambda ds: ds.quantile(0.5, axis=1), ValueError, r"map\(\), with numpy.quantile"),
        (lambda ds: ds.median(axis=1), ValueError, r"map\(\), with numpy.median"),
        (lambda ds: ds.astype("c16").median(), UnsupportedDtypeError, "no median of complex128"),
        (lambda ds: ds.histogram("auto"), TypeError, "number or edges"),
        (lambda ds: ds.histogram(range=(2, 1)), ValueError, "max must be larger"),
        (lambda ds: ds.histogram([3, 2]), ValueError, "monotonically"),
        (lambda ds: ds[0].cov(), ValueError, "expected rows"),
        (lambda ds: ds[:, 0].gram(), ValueError, "expected rows of one axis"),
        (lambda ds: ds.gram(dtype="?"), TypeError, "expected numbers"),
        (lambda ds: ds[0].stats(), TypeError, "single row"),
        (lambda ds: ds[0].map_blocks(len), TypeError, "single row"),
        (lambda ds: ds.map_blocks(3), TypeError, "cannot be called"),
        (lambda ds: ds.reduce(len, None), TypeError, "cannot be called"),
    ],
)
def test_refused(real, call, error, message):
    """What NumPy would refuse, or cannot be streamed, is refused before anything is read, and says why."""
    with pytest.raises(error, match=message):
        call(with_storage(real[0], RaisingStorage()))


def test_no_numbers(tmp_path):
    """Text has no sum, no table and no matrix; NumPy's own error, or ours, says so."""
    write_npy_shards(tmp_path / "set", [np.array([["a"], ["b"]])])
    ds = open_shards(tmp_path / "set", engine="numpy")
    for name in ("sum", "mean", "var", "stats", "cov", "gram", "median"):
        with pytest.raises(TypeError):
            getattr(ds, name)()


def test_times(tmp_path):
    """Dates have a least and a greatest, and durations a sum, as in NumPy."""
    days = np.arange("2024-01-01", "2024-04-01", dtype="M8[D]")
    write_npy_shards(tmp_path / "days", [days])
    write_npy_shards(tmp_path / "spans", [days - days[0]])
    ds, spans = (open_shards(tmp_path / name, engine="numpy") for name in ("days", "spans"))
    assert (ds.min(), ds.max(), ds.argmax()) == (days[0], days[-1], 90)
    assert spans.sum() == (days - days[0]).sum()
    with pytest.raises(TypeError):
        ds.sum()


@pytest.mark.parametrize(
    ("name", "text"),
    [("nanmin", "All-NaN slice"), ("nanmean", "Mean of empty slice"), ("nanvar", "Degrees of freedom")],
)
def test_nothing_but_nan(tmp_path, name, text):
    """Where nothing but NaN is left, the result is NaN, with NumPy's warning."""
    write_npy_shards(tmp_path / "set", [np.full(100, np.nan)])
    ds = open_shards(tmp_path / "set", engine="numpy")
    with pytest.warns(RuntimeWarning, match=text):
        assert np.isnan(getattr(ds, name)())
    with pytest.raises(ValueError, match="All-NaN"):
        ds.nanargmax()


@pytest.mark.filterwarnings("ignore:Degrees of freedom:RuntimeWarning")
@pytest.mark.parametrize("name", ["var", "nanvar", "std", "nanstd"])
@pytest.mark.parametrize("dtype", ["i4", "f8", "?"])
def test_more_freedom_than_elements(tmp_path, name, dtype):
    """Where ddof leaves nothing to divide by, infinity or NaN is NumPy's."""
    whole = (np.arange(60).reshape(30, 2) % 7).astype(dtype)
    write_npy_shards(tmp_path / "set", [whole])
    ds = open_shards(tmp_path / "set", engine="numpy")
    for axis in (None, 0, 1):
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = getattr(np, name)(whole, axis=axis, ddof=1000)
            assert_same(np.asarray(getattr(ds, name)(axis=axis, ddof=1000)), np.asarray(expected))


def test_errstate_reaches_the_threads(tmp_path):
    """What the caller has NumPy do about overflow is done on the threads, too."""
    write_npy_shards(tmp_path / "set", [np.full(400, 1e308)])
    ds = open_shards(tmp_path / "set", engine="numpy")
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ds.sum() == np.inf
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        ds.sum()


def test_a_truncated_shard_raises(real, tmp_path):
    """A shard that cannot be read is an error that names it, whichever thread met it, and leaves no thread behind."""
    path = sorted((tmp_path / "real").iterdir())[2]
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ShardReadError, match=path.name):
        real[0].sum()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lazyshards-reduce")]


def test_refresh_begins_again(tmp_path):
    """With on_change="refresh", what is reduced is what the files hold now."""
    write_npy_shards(tmp_path / "set", [np.zeros(100)])
    ds = open_shards(tmp_path / "set", engine="numpy", on_change="refresh")
    np.save(next((tmp_path / "set").iterdir()), np.ones(100))
    assert ds.sum() == 100
    assert sum(ds.map_blocks(np.sum)) == 100


# Memory ---------------------------------------------------------------------------------------------------------


def enlarge(patch):
    """Have blocks be so large that what Python itself takes is little beside them, and runs of four."""
    patch.setattr("lazyshards.reductions.blocks.BLOCK_ELEMENTS", 1 << 14)
    patch.setattr("lazyshards.reductions.blocks.RUN_NBYTES", 1 << 19)


@pytest.mark.parametrize("name", [*ONE_PASS, "any"])
@pytest.mark.parametrize("dtype", ["u1", "f4", "c16"])
def test_memory_is_bounded(tmp_path, monkeypatch, name, dtype):
    """No reduction takes more memory than its plan says, whatever the size of the data."""
    if name == "histogram" and dtype == "c16":
        dtype = "i8"  # NumPy has no histograms of complex numbers
    enlarge(monkeypatch)
    write_npy_shards(tmp_path / "set", [np.ones((1 << 18, 8), dtype)])
    ds = open_shards(tmp_path / "set", engine="numpy")
    plan, arguments = ds.block_plan(), ONE_PASS.get(name, {})
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            result = getattr(ds, name)(**arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    own = 2 * result.nbytes if isinstance(result, np.ndarray) else 0
    assert peak <= plan.peak_nbytes + own + (200 << 10)  # what Python itself takes


def test_memory_of_quantiles_is_bounded(tmp_path, monkeypatch):
    """Quantiles hold what they collect, a few times, and blocks."""
    enlarge(monkeypatch)
    monkeypatch.setattr("lazyshards.reductions.quantiles.HELD_NBYTES", 256 << 10)
    monkeypatch.setattr("lazyshards.reductions.quantiles.TABLE_NBYTES", 256 << 10)
    whole = np.random.default_rng(0).random((200_000, 4))
    write_npy_shards(tmp_path / "set", [whole])
    expected = np.quantile(whole, [0.01, 0.5], axis=0)
    del whole
    ds = open_shards(tmp_path / "set", engine="numpy")
    tracemalloc.start()
    try:
        found = ds.quantile([0.01, 0.5], axis=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_same(found, expected)
    assert peak < 2 * ds.block_plan().peak_nbytes + 8 * (256 << 10)


# One's own ------------------------------------------------------------------------------------------------------


def test_map_blocks(real):
    """Blocks come in order, on this thread, in memory of their own."""
    ds, whole = real
    here = threading.get_ident()
    blocks = list(ds.map_blocks(lambda block: (threading.get_ident(), block)))
    assert {thread for thread, _ in blocks} == {here}
    assert_same(np.concatenate([block for _, block in blocks]), whole)
    assert [len(block) for _, block in blocks] == [8] * 125


def test_map_blocks_reads_ahead_within_bounds(tmp_path):
    """No more is read than asked for and a few blocks ahead, and leaving the iterator ends the reading."""
    write_npy_shards(tmp_path / "set", [np.zeros(100_000)])
    ds, storage = recorded(open_shards(tmp_path / "set", engine="numpy"))
    it = ds.map_blocks(len)
    assert next(it) == 24
    it.close()
    assert storage.nbytes <= 8 * 48 * (ds.block_plan().readers + 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lazyshards-reduce")]


def test_reduce(real):
    """A function's results are combined in order, in pairs of neighbours; blocks are its own to keep and change."""
    ds, whole = real
    first = ds.reduce(lambda block: block[:1], lambda left, right: left)
    assert_same(first, whole[:1])
    rows = ds.reduce(lambda block: [block], lambda left, right: left + right)
    assert_same(np.concatenate(rows), whole)
    assert ds[:0].reduce(len, lambda left, right: left + right) == 0


def test_functions_that_fail_say_where(real):
    """What a function of the user's raises comes out as it is, with the rows."""
    with pytest.raises(ZeroDivisionError) as caught:
        real[0].reduce(lambda block: 1 / 0, max)
    assert caught.value.__notes__ == ["in rows 0 to 16 of the 1,000 that are reduced"]


def test_fold_is_a_tree():
    """Neighbours are merged pairwise, and pairs with pairs."""
    assert fold("abcdefghijk", lambda left, right: f"({left}{right})") == "((((ab)(cd))((ef)(gh)))((ij)k))"


# What is shown --------------------------------------------------------------------------------------------------


def test_stats_show_a_table(tmp_path):
    """The table has one line for each column, the middle ones left out, as text and as HTML."""
    write_npy_shards(tmp_path / "set", [np.array([[0.5, -1.0], [1.5, np.nan]], "f4")])
    stats = open_shards(tmp_path / "set", engine="numpy").stats()
    assert repr(stats).splitlines() == [
        "<ColumnStats of 2 rows, 2 columns>",
        "column  count  nan  min  max  mean  std",
        "     0      2    0  0.5  1.5     1  0.5",
        "     1      1    1   -1   -1    -1    0",
    ]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)<", stats._repr_html_())
    assert cells[:4] == ["rows", "2", "columns", "2"]
    assert cells[-7:] == ["1", "1", "1", "-1", "-1", "-1", "0"]
    write_npy_shards(tmp_path / "wide", [np.zeros((2, 10, 10), "i8")])
    lines = repr(open_shards(tmp_path / "wide", engine="numpy").stats()).splitlines()
    assert len(lines) == 22
    assert lines[-1].split() == ["9,", "9", "2", "0", "0", "0", "0", "0"]


def test_stats_of_nothing(real):
    """Without rows everything is NaN, and nothing is counted."""
    stats = real[0][:0].stats()
    assert (stats.rows, stats.count.tolist()) == (0, [0, 0, 0])
    assert np.isnan([stats.min, stats.max, stats.mean, stats.std]).all()


@pytest.mark.parametrize("name", ["sum", "min", "stats", "histogram", "median", "gram", "cov"])
def test_progress(real, capsys, name):
    """A bar says what is done."""
    getattr(real[0], name)(progress=True)
    assert name in capsys.readouterr().err
