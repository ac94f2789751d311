import pickle

import numpy as np
import pytest

from lazyshards import MapError, open_shards, write_shards
from lazyshards.errors import UnsupportedDtypeError
from lazyshards.storage import LocalStorage
from lazyshards.testing import RaisingStorage, RecordingStorage, assert_same, with_storage, write_npy_shards

WHOLE = np.random.default_rng(3).normal(size=(120, 4)).astype("f4")
MEAN, STD = WHOLE.mean(0), WHOLE.std(0)


@pytest.fixture
def ds(tmp_path):
    """Open a hundred and twenty rows in four shards."""
    write_npy_shards(tmp_path / "set", np.split(WHOLE, [50, 50, 90]))
    return open_shards(tmp_path / "set", engine="numpy")


def outliers_kept(x):
    """Square what is no outlier: the same operand three times."""
    return np.where(x > 1, x, x * x)


WORK = {
    "standardise": lambda x: (x - MEAN) / STD,
    "reflected": lambda x: 1 - 2 * x,
    "double operand": lambda x: x * MEAN.astype("f8"),
    "strong scalar": lambda x: x + np.float64(1),
    "weak scalar": lambda x: x + 1.5,
    "kept axis": lambda x: x - MEAN[None],
    "list": lambda x: x - [1, 2, 3, 4],
    "unary": lambda x: abs(-x) + +x,
    "power": lambda x: np.abs(x) ** 2,
    "floor and remainder": lambda x: (x // 0.5) % 3,
    "comparison": lambda x: x > MEAN,
    "logic": lambda x: (x > 0) & ~(x > 1) | (x < -1),
    "itself": lambda x: x * x + x,
    "shared": lambda x: outliers_kept((x - MEAN) / STD),
    "where": lambda x: np.where(x > 0, x, 0.0),
    "clip": lambda x: np.clip(x, -MEAN, None),
    "round": lambda x: np.round(x * 10, 1),
    "ufuncs": lambda x: np.hypot(np.sqrt(np.square(x)), 1),
    "second operand": lambda x: np.arctan2(MEAN, x),
    "wider rows": lambda x: x[:, 1:2] * np.arange(5),
    "fewer columns": lambda x: x[:, ::2] + MEAN[::2],
    "two columns": lambda x: x[:, 0] * x[:, 3] - x[:, 1],
    "cast between": lambda x: ((x * 3).astype("f8") + 1).astype("f4", casting="same_kind") / 7,
    "parts": lambda x: sum(np.modf(x)),
    "isnan": lambda x: np.isnan(np.log(x)),
    "columns after": lambda x: ((x - MEAN) / STD)[:, 1:3] * [2, 3],
    "column after": lambda x: ((x - MEAN) / STD)[:, -1] * 2,
    "rows after": lambda x: ((x - MEAN)[10:90:3] / STD)[::-1],
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", WORK)
def test_work_is_numpys(ds, engine, name):
    """Lazy work has NumPy's shape, dtype and elements, whole and by columns and rows, on every engine."""
    lazy, expected = WORK[name](ds), WORK[name](WHOLE)
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    assert_same(lazy.compute(engine), expected)
    assert_same(lazy.compute(engine, tiles_per_processor=3), expected)
    for index in ((slice(2, 40, 3),), ([5, 1, 1],), (7,), (slice(None, None, -1), -1)[: expected.ndim]):
        assert_same(lazy[index].compute(engine), expected[index])


def test_methods_are_the_functions(ds):
    """clip(), round(), where(), abs() and their NumPy functions are the same work."""
    assert ds.clip(0, 1) == np.clip(ds, 0, 1)
    assert ds.round(2) == np.round(ds, 2)
    assert ds.where(ds > 0, -1) == np.where(ds > 0, ds, -1)
    assert abs(ds) == np.abs(ds)
    assert_same(ds.where(MEAN > 0, -1).compute(), np.where(MEAN > 0, WHOLE, -1))


@pytest.mark.parametrize("dtype", ["i1", "u2", "i8", "f2"])
def test_rounding_before_the_point(tmp_path, dtype):
    """round() takes places before the point of integers too, and of what was made of them, by rows and columns."""
    whole = (np.arange(-60, 60).reshape(30, 4) * 2).astype(dtype)
    write_npy_shards(tmp_path / "set", [whole[:7], whole[7:]])
    ds = open_shards(tmp_path / "set", engine="numpy")
    for places in (-2, -1, 0, 1):
        assert_same(ds.round(places).compute(), np.round(whole, places))
        assert_same((ds * 1).round(places)[::3, 1].compute(), np.round(whole * 1, places)[::3, 1])


def test_a_single_row(ds):
    """One row, and one element, are worked on as NumPy does; operands may have any axes then."""
    table = np.arange(8.0).reshape(2, 4)
    assert_same((ds[3] - MEAN).compute(), WHOLE[3] - MEAN)
    assert_same((ds[3] * table).compute(), WHOLE[3] * table)
    assert_same((ds[3] * table)[1, ::2].compute(), (WHOLE[3] * table)[1, ::2])
    assert_same((ds[3, 2] + 1).compute(), np.asarray(WHOLE[3, 2] + 1))


def test_rows_of_several_axes(tmp_path):
    """Operands broadcast against rows of several axes as they do against arrays, and are cut with them."""
    whole = np.arange(5 * 2 * 3 * 4, dtype="i4").reshape(5, 2, 3, 4)
    write_npy_shards(tmp_path / "set", [whole])
    ds = open_shards(tmp_path / "set", engine="numpy")
    for operand in (np.arange(4), np.arange(3)[:, None], np.arange(6).reshape(2, 3, 1), np.ones((1, 1, 4)), 2):
        lazy, expected = ds * operand + operand, whole * operand + operand
        for index in (..., (slice(None), 1), (1, ..., slice(None, None, -2)), (slice(None), slice(None), [0][0], 2)):
            assert_same(lazy[index].compute(), expected[index])


@pytest.mark.parametrize("dtype", ["U3", "M8[s]", "m8[ms]", "?"])
def test_other_dtypes(tmp_path, dtype):
    """Texts, times and truths are worked on as NumPy does."""
    whole = np.arange(12).reshape(6, 2).astype("m8[ms]" if dtype[0] == "m" else "i8").astype(dtype)
    write_npy_shards(tmp_path / "set", [whole])
    ds = open_shards(tmp_path / "set", engine="numpy")
    if dtype[0] == "U":
        assert_same(np.add(ds, "x").compute(), np.add(whole, "x"))
        assert_same((ds > "3").compute(), whole > "3")
    elif dtype[0] in "Mm":
        assert_same((ds - whole[0]).compute(), whole - whole[0])
        assert_same((ds + np.timedelta64(3, "s")).compute(), whole + np.timedelta64(3, "s"))
    else:
        assert_same((~ds ^ True).compute(), ~whole ^ True)
        with pytest.raises(TypeError, match="subtract"):
            ds - ds


def test_promotion_is_numpys(tmp_path):
    """Scalars of Python bend to the dataset's dtype, those of NumPy do not; what does not fit is NumPy's error."""
    whole = np.arange(6, dtype="u1")
    write_npy_shards(tmp_path / "set", [whole])
    ds = open_shards(tmp_path / "set", engine="numpy")
    for operand in (1, 1.0, 1j, True, np.uint8(1), np.int8(1), np.int64(1), np.float16(1), np.array(1), np.array([1])):
        assert_same((ds + operand).compute(), whole + operand)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(OverflowError):
            ds + 300
    assert_same((ds * 2).compute(), whole * 2)
    assert_same((ds > 300).compute(), whole > 300)


def test_nothing_is_read_early(ds):
    """Work, its shape and dtype, its indices and its plan are had without a read."""
    lazy = with_storage(ds, RaisingStorage())
    for make in WORK.values():
        made = make(lazy)
        made[3:5].plan(), repr(made), made._repr_html_(), made.fingerprint, len(made)


def test_only_wanted_columns_are_read(tmp_path):
    """Columns that are left out after the work are not read, as if they had been left out before."""
    whole = np.arange(4 * 100_000, dtype="f8").reshape(4, 100_000)
    write_npy_shards(tmp_path / "set", [whole])
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(open_shards(tmp_path / "set", engine="numpy"), storage)
    lazy = ((ds - np.arange(100_000)) / 2).astype("f4", casting="same_kind").clip(0, None)[:, 500:510]
    assert_same(lazy.compute(), ((whole - np.arange(100_000)) / 2).astype("f4").clip(0, None)[:, 500:510])
    assert sum(nbytes for _, _, nbytes in storage.reads) == lazy.plan().bytes_read < 4 * 2000


def test_work_is_one_pass(ds):
    """Whatever follows one another is one function of the rows, given as much as is read once."""
    storage = RecordingStorage(LocalStorage())
    made = with_storage(ds, storage)
    for _ in range(20):
        made = (made * 2).astype("f8") - 1
    assert len(made._layout.maps) == 1
    made.compute()
    assert sum(nbytes for _, _, nbytes in storage.reads) == WHOLE.nbytes


def test_very_long_work(ds):
    """Hundreds of functions one after the other are computed and travel."""
    made, expected = ds, WHOLE
    for _ in range(300):
        made, expected = made + 1, expected + np.float32(1)
    assert_same(made.compute(), expected)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301  # our own
    for _ in range(40):
        made = made * made
    assert made[:1].compute().shape == (1, 4)


def test_before_and_after_functions(ds):
    """Work and functions given to map() follow each other in any order."""

    def pairs(rows):
        return rows.reshape(len(rows), 2, 2)

    made = (ds - MEAN).map(pairs, row_shape=(2, 2)) * [[1], [2]]
    expected = (WHOLE - MEAN).reshape(-1, 2, 2) * [[1], [2]]
    assert_same(made.compute(), expected)
    assert_same(made[3:9, 1, ::-1].compute(), expected[3:9, 1, ::-1])


def test_blocks_are_bounded(ds, monkeypatch):
    """Rows are read and worked on in bounded blocks; the plan says how much that takes."""
    monkeypatch.setattr("lazyshards.access.NARROW_NBYTES", 160)
    monkeypatch.setattr("lazyshards.elementwise._SUB_BLOCK_NBYTES", 48)
    storage = RecordingStorage(LocalStorage())
    lazy = WORK["shared"](with_storage(ds, storage))
    assert_same(lazy.compute(), WORK["shared"](WHOLE))
    assert max(nbytes for _, _, nbytes in storage.reads) <= 160
    assert lazy.plan().scratch_nbytes == 2 * 160
    assert lazy.plan().requests == len(storage.reads)


def test_operands_are_ones_own(ds):
    """Changing an array after it was used changes nothing."""
    mean = MEAN.copy()
    lazy = ds - mean
    mean[:] = 100
    assert_same(lazy.compute(), WHOLE - MEAN)


def test_the_fingerprint_knows_every_operand(ds):
    """The same work has the same fingerprint; any other operand, byte, type, order or function has another."""
    almost = MEAN.copy()
    almost[3] = np.nextafter(almost[3], np.float32(9))
    works = [ds, ds - MEAN, ds - almost, MEAN - ds, ds + MEAN, ds - MEAN.astype("f8"), ds - 1, ds - 1.0, ds - True]
    works += [ds - np.float32(1), ds - np.zeros(4, "f4"), ds - np.zeros(1, "f4"), ds * 0.0, ds * -0.0]
    works += [ds.clip(0, 1), ds.clip(1, 0), ds.clip(0, None), ds.clip(None, 0), ds.round(1), ds.round(2), *np.modf(ds)]
    works += [ds.where(ds > 0, 0), ds.where(ds < 0, 0), (ds - 1).astype("f8"), ds.astype("f8") - 1]
    assert len({work.fingerprint for work in works}) == len(works)
    assert (ds - MEAN).fingerprint == (ds - MEAN.copy()).fingerprint
    assert ds - MEAN == pickle.loads(pickle.dumps(ds - MEAN))  # noqa: S301  # our own
    assert ds - MEAN != ds - almost


def test_equality_is_of_datasets(ds):
    """== and != tell whether two datasets are the same; np.equal compares elements."""
    for other in (WHOLE, 3, np.float32(3), None, "text"):
        assert (ds == other) is False
        assert (ds != other) is True
    assert ds == ds[:]
    assert_same(np.equal(ds, WHOLE[3]).compute(), np.equal(WHOLE, WHOLE[3]))
    assert_same(np.not_equal(ds, 3).compute(), WHOLE != 3)


def test_truth_is_of_elements(ds):
    """A dataset of several elements is neither true nor false, so that chained comparisons are refused."""
    with pytest.raises(ValueError, match="neither true nor false"):
        _ = 0 < ds < 1
    assert bool(ds[3, 2] < 100)


def test_one_element_is_a_number(ds):
    """float() and int() read the element of a dataset without axes, and refuse any other before they read."""
    assert float(ds[3, 2]) == float(WHOLE[3, 2])
    assert int(ds[3, 2]) == int(WHOLE[3, 2])
    for several in (ds, ds[3], ds[3:4, 2]):
        with pytest.raises(TypeError, match=r"is not one number: index all of its axes"):
            float(several)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda ds: ds + WHOLE, TypeError, r"axis for the rows.*compute\(\).*map\(\)"),
        (lambda ds: ds[:, 0] + np.arange(120), TypeError, "axis for the rows"),
        (lambda ds: ds[:, 0] + np.arange(3), TypeError, "axis for the rows"),
        (lambda ds: ds[:50] + ds[50:100], TypeError, r"different rows.*map\(\)"),
        (lambda ds: ds + ds[::-1], TypeError, "different rows"),
        (lambda ds: ds - ds[:, 0], ValueError, "shapes"),
        (lambda ds: ds + np.ones(3), ValueError, "do not broadcast"),
        (lambda ds: ds @ MEAN, TypeError, r"@.*compute\(\)"),
        (lambda ds: MEAN @ ds, TypeError, "matmul"),
        (lambda ds: np.add(ds, 1, out=np.empty((120, 4))), TypeError, "out="),
        (lambda ds: np.add(ds, 1, where=MEAN > 0), TypeError, "where="),
        (np.add.reduce, TypeError, "add.reduce"),
        (np.add.accumulate, TypeError, "add.accumulate"),
        (lambda ds: np.matmul(ds, MEAN), TypeError, "matmul"),
        (lambda ds: ds + object(), TypeError, "object"),
        (lambda ds: ds + None, TypeError, "None"),
        (lambda ds: ds + np.ma.masked_array(MEAN, MEAN > 0), TypeError, "masked"),
        (lambda ds: ds + "text", TypeError, "ufunc"),
        (lambda ds: ds.clip(0, 1, out=WHOLE), TypeError, "out="),
        (lambda ds: ds.round(out=WHOLE), TypeError, "out="),
        (lambda ds: ds.round(1.5), TypeError, "float"),
        (lambda ds: np.bitwise_and(ds, 1), TypeError, "bitwise_and"),
    ],
)
def test_what_is_refused(ds, make, error, message):
    """What cannot be lazy is refused at once, with what can be done instead."""
    with pytest.raises(error, match=message):
        make(with_storage(ds, RaisingStorage()))


def test_other_functions_of_numpy_compute(ds):
    """Functions of NumPy that are no work on elements take the computed array, as of any lazy array."""
    assert_same(np.concatenate([ds, ds]), np.concatenate([WHOLE, WHOLE]))
    assert_same(np.transpose(ds), WHOLE.T)
    assert [part.tolist() for part in np.where(ds > 0)] == [part.tolist() for part in np.where(WHOLE > 0)]


def test_what_fails_when_it_is_computed(tmp_path):
    """An error that only the elements give names the function, the rows and the shard."""
    write_npy_shards(tmp_path / "set", [np.arange(5)])
    ds = open_shards(tmp_path / "set", engine="numpy")
    powers = np.power(2, ds - 2)
    with pytest.raises(MapError, match=r"power.*ValueError.*row 0 of .*shard_0000"):
        powers.compute()
    with pytest.raises(UnsupportedDtypeError):
        (ds + 1).astype("i1")


def test_no_warnings_from_elements(ds):
    """What is no number becomes NaN or infinite without a warning, whatever the thread."""
    found = (1 / np.where(ds > 0, ds, 0)).compute(tiles_per_processor=4)
    assert np.isinf(found).sum() == (WHOLE <= 0).sum()


def test_it_shows(ds, capsys):
    """The repr and the plan's text show the work, as far as a line has room."""
    text = "divide(subtract(rows, float32 array of shape (4,)), 2.0)"
    assert text in repr((ds - MEAN) / 2.0)
    assert f"{text}: float32 (4,) to float32 (4,)" in repr((ds - MEAN) / 2.0)
    ((ds - MEAN) / 2.0).explain()
    assert text in capsys.readouterr().out
    assert "..." in repr((((((ds + 1) + 1) + 1) + 1) + 1) + 1)
    assert "rows[range(0, 4)" not in repr(ds + 1)


def test_it_travels(ds, child, tmp_path):
    """Work is computed in another process, where nothing but the data was given."""
    (tmp_path / "work").write_bytes(pickle.dumps(WORK["shared"](ds)[5:50]))
    child(
        """
        import pickle, sys
        import numpy as np
        np.save(sys.argv[2], pickle.loads(open(sys.argv[1], "rb").read()).compute())
        """,
        tmp_path / "work",
        tmp_path / "found.npy",
    )
    assert_same(np.load(tmp_path / "found.npy"), WORK["shared"](WHOLE)[5:50])


def test_ufuncs_of_others(ds):
    """Ufuncs of SciPy, and ones that were made here, work as NumPy's do."""
    special = pytest.importorskip("scipy.special")
    assert_same(special.expit(ds).compute(), special.expit(WHOLE))
    assert_same(pickle.loads(pickle.dumps(special.expit(ds)))[3:9].compute(), special.expit(WHOLE)[3:9])  # noqa: S301


def test_batches_are_worked_on(ds, engine):
    """Batches hold worked rows, in the order of their own fingerprint."""
    lazy = (ds - MEAN) / STD
    rows = np.concatenate([np.asarray(batch) for batch in lazy.batches(17, shuffle=True, seed=0, engine=engine)])
    expected = (WHOLE - MEAN) / STD
    assert_same(rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)])


def test_casts_before(tmp_path):
    """Work on a dataset that was cast when it was opened, of shards of several types and orders of bytes."""
    parts = [np.arange(6, dtype=">i2").reshape(3, 2), np.arange(6, dtype="<f4").reshape(3, 2)]
    write_npy_shards(tmp_path / "set", parts)
    ds = open_shards(tmp_path / "set", dtype="f8", engine="numpy")
    whole = np.concatenate([part.astype("f8") for part in parts])
    assert_same((ds / 7)[::-1, 1].compute(), (whole / 7)[::-1, 1])


@pytest.mark.parametrize("kind", ["columns", "hdf5", "parquet", "zarr"])
@pytest.mark.parametrize("dtype", ["i1", "f4"])
def test_rows_that_are_decoded(tmp_path, kind, dtype):
    """Rows that a format decodes, or that lie by columns, are worked on where they are put, or in blocks."""
    whole = (WHOLE * 20).astype(dtype)
    if kind == "columns":
        for i, part in enumerate(np.split(whole, [50, 90])):
            np.save(tmp_path / f"part_{i}.npy", np.asfortranarray(part))
        ds = open_shards(tmp_path / "part_*.npy", engine="numpy")
    else:
        for name in {"hdf5": ["h5py"], "parquet": ["pyarrow"], "zarr": ["zarr"]}[kind]:
            pytest.importorskip(name)
        options = {"compression": "gzip"} if kind == "hdf5" else {}
        write_shards(whole, tmp_path / "set", format=kind, rows_per_shard=50, **options)
        ds = open_shards(tmp_path / "set", engine="numpy")
    works = [
        lambda x: (x - whole[1]) * whole[2],
        lambda x: x > 3,
        lambda x: x / np.float64(3),
        lambda x: np.where(x > 0, x, -x),
        lambda x: x[:, ::-1] * x[:, :1] + x,
        lambda x: (x + 1).astype("f4", casting="unsafe"),
        lambda x: x[:, 2] + 1,
        lambda x: x[:, 1:2] + whole[:1],
    ]
    with np.errstate(all="ignore"):
        for make in works:
            expected = make(whole)
            for index in (
                slice(None),
                slice(100, 3, -7),
                [5, 1, 1, 119, 60],
                (slice(10, 99), *[1] * (expected.ndim - 1)),
            ):
                assert_same(make(ds)[index].compute(), expected[index])
                assert_same(make(ds)[index].compute(tiles_per_processor=4), expected[index])
