import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import FormatError, MapError, SelectionError, UnsupportedDtypeError
from lazyshards.testing import RaisingStorage, assert_same, index_chains, layouts, with_storage, write_npy_shards

pytestmark = [
    pytest.mark.usefixtures("on_numpy"),
    pytest.mark.filterwarnings(r"ignore:\s*Seeding the random number generator"),
]

WHOLE = np.arange(90, dtype="i2").reshape(30, 3)


@pytest.fixture
def ds(tmp_path):
    """Thirty rows in four shards, the second of them empty, the third in Fortran order."""
    parts = np.split(WHOLE, [8, 8, 20])
    parts[2] = np.asfortranarray(parts[2])
    write_npy_shards(tmp_path / "set", parts)
    return open_shards(tmp_path / "set")


def halves(rows):
    """Return half of each element."""
    return rows / 2


def sums(rows):
    """Return the sum of each row, twice."""
    total = rows.sum(axis=tuple(range(1, rows.ndim)), dtype="f8")
    return np.stack([total, total], axis=1)


def extremes(rows):
    """Return the least and the greatest element of each row, which no order of adding up can change."""
    axes = tuple(range(1, rows.ndim))
    least, greatest = rows.min(axis=axes, initial=0), rows.max(axis=axes, initial=0)
    return np.stack([least, greatest], axis=1).astype("f8")


def test_rows_go_through_the_function(ds, engine):
    """What is computed is what the function makes of the rows, whole or tiled, of its dtype and row shape."""
    mapped = ds.map(sums, dtype="f8", row_shape=(2,))
    assert (mapped.shape, mapped.dtype) == ((30, 2), np.dtype("f8"))
    for index in (slice(None), slice(5, 25), slice(None, None, -4), [29, 3, 3], (slice(None), 1), 7):
        assert_same(mapped[index].compute(engine), sums(WHOLE)[index])
        assert_same(mapped[index].compute(engine, tiles_per_processor=4), sums(WHOLE)[index])


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_anything_before_and_after(tmp_path_factory, data):
    """Indices and casts before, between and after functions are NumPy's."""
    arrays = data.draw(layouts(dtypes=("i1", "u2", "f4", "f8")))
    path = tmp_path_factory.mktemp("set")
    write_npy_shards(path, arrays)
    ds, whole = open_shards(path), np.nan_to_num(np.concatenate(arrays).astype(arrays[0].dtype.newbyteorder("=")))
    ds = ds.map(np.nan_to_num)
    for turn in range(2):
        for index in data.draw(index_chains(whole.shape, most=2)):
            kept, now = ds[index], np.asarray(whole[index])
            if now.ndim:
                ds, whole = kept, now
        if ds._selection.scalar:
            return
        if turn == 0 and data.draw(st.booleans(), label="cast"):
            ds, whole = ds.astype("f8"), whole.astype("f8")
        ds, whole = ds.map(extremes, dtype="f8", row_shape=2), extremes(whole)
        with np.errstate(over="ignore", invalid="ignore"):
            assert_same(ds.compute(), whole)
            assert_same(ds.astype("f4", casting="same_kind").compute(), whole.astype("f4"))


def test_blocks_are_bounded(tmp_path, monkeypatch):
    """The function is given bounded blocks, of its own memory, which it may write to."""
    monkeypatch.setattr("lazyshards.access.WIDE_NBYTES", 240)
    write_npy_shards(tmp_path / "set", [np.arange(300.0).reshape(100, 3)])
    seen = []

    def double(rows):
        seen.append(rows.shape)
        rows *= 2
        return rows

    ds = open_shards(tmp_path / "set").map(double)
    assert_same(ds.compute(tiles_per_processor=1), np.arange(300.0).reshape(100, 3) * 2)
    assert seen == [(10, 3)] * 10
    assert ds.plan().scratch_nbytes == 2 * 240


def test_nothing_is_called_early(ds):
    """Mapping, indexing, planning and showing neither read nor call."""
    lazy = with_storage(ds, RaisingStorage()).map(lambda rows: 1 / 0)[3:9]
    lazy.plan(), repr(lazy), lazy.fingerprint, len(lazy)


def test_it_shows(ds, capsys):
    """The repr and the plan's text show the functions in order, with what goes in and comes out."""
    mapped = ds.map(halves, dtype="f8").map(sums, dtype="f8", row_shape=(2,))
    text = f"{__name__}.halves: int16 (3,) to float64 (3,), then {__name__}.sums: float64 (3,) to float64 (2,)"
    assert text in " ".join(repr(mapped).split())  # long lines are folded
    mapped.explain()
    assert text in " ".join(capsys.readouterr().out.split())
    assert mapped.shards[0].dtype == np.dtype("i2")
    assert mapped.plan().bytes_read == ds.plan().bytes_read


def test_fingerprint_knows_the_function(ds):
    """The fingerprint changes with the function's name and what it is given, and is the same for the same."""
    assert ds.map(halves, dtype="f8").fingerprint == ds.map(halves, dtype="f8").fingerprint
    assert len({ds.fingerprint, ds.map(halves, dtype="f8").fingerprint, ds.map(np.sqrt, dtype="f8").fingerprint}) == 3
    assert (
        ds[:, ::-1].map(sums, dtype="f8", row_shape=2).fingerprint != ds.map(sums, dtype="f8", row_shape=2).fingerprint
    )


def test_errors_name_shard_and_rows(ds, engine):
    """An exception of the function becomes a MapError that names it, the rows and their shards."""

    def picky(rows):
        if (rows == 66).any():
            raise ValueError("66 is not allowed")
        return rows

    mapped = ds.map(picky)
    assert_same(mapped[:22].compute(engine), WHOLE[:22])
    with pytest.raises(MapError, match=r"picky.* ValueError .*row 1 of .*shard_0003.* to row 9 of .*66 is not allowed"):
        mapped[21:].compute(engine)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows[:-1], r"shape \(29, 3\) for 30 rows, .*expected int16 of shape \(30, 3\)"),
        (lambda rows: rows.astype("f4"), "returned float32"),
        (lambda rows: rows[:, 0], r"shape \(30,\)"),
        (lambda rows: None, "returned object"),
    ],
)
def test_wrong_results(ds, function, message):
    """What is not of the promised shape and dtype is refused, with both."""
    with pytest.raises(MapError, match=message):
        ds.map(function).compute(tiles_per_processor=None)


def test_masked_results(ds):
    """A masked array in which something is masked is refused, since what lies under the mask is no result."""
    mapped = ds.map(lambda rows: np.ma.masked_where(rows > 0, rows))
    with pytest.raises(MapError, match="masked"):
        mapped.compute()
    assert_same(ds.map(np.ma.array).compute(), ds.compute())


def test_big_endian_results(ds):
    """The byte order of what the function returns does not matter."""
    assert_same(ds.map(lambda rows: rows.astype(">i2"))[2:5].compute(), WHOLE[2:5])


def test_wrong_arguments(ds):
    """What is no function, shape or dtype, and a single row, are refused at once."""
    for arguments, error in (
        ((3,), TypeError),
        ((halves, "f8", (-1,)), TypeError),
        ((halves, "f8", "ab"), TypeError),
        ((halves, object), UnsupportedDtypeError),
    ):
        names = dict(zip(("dtype", "row_shape"), arguments[1:], strict=False))
        with pytest.raises(error):
            ds.map(arguments[0], **names)
    with pytest.raises(TypeError, match="single row"):
        ds[3].map(halves)
    with pytest.raises(SelectionError):
        ds.map(sums, dtype="f8", row_shape=2)[:, 2]


def test_no_rows_and_no_elements(ds):
    """Without rows, or with rows of no elements, nothing is called."""
    assert ds[:0].map(lambda rows: 1 / 0).compute().shape == (0, 3)
    assert ds.map(lambda rows: 1 / 0, row_shape=(0,)).compute().shape == (30, 0)


def test_it_travels(ds, child):
    """A dataset with a function of a module is pickled; a lambda is found in its own process only, and says so."""
    assert_same(pickle.loads(pickle.dumps(ds.map(halves, dtype="f8")))[3].compute(), WHOLE[3] / 2)  # noqa: S301  # our own
    mapped = ds.map(lambda rows: rows + 1)
    data = pickle.dumps(mapped)
    assert_same(pickle.loads(data)[3].compute(), WHOLE[3] + 1)  # noqa: S301  # our own
    del mapped
    with pytest.raises(FormatError, match="not known in this process"):
        pickle.loads(data)  # noqa: S301  # our own


def test_batches_are_mapped(ds, engine):
    """Batches hold what the function makes of the rows."""
    found = [np.asarray(batch) for batch in ds.map(halves, dtype="f8").batches(7, shuffle=True, engine=engine)]
    rows = np.concatenate(found)
    assert_same(rows[np.argsort(rows[:, 0])], WHOLE / 2)
