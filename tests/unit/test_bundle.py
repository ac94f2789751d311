import numpy as np
import pytest

import lazyshards
from lazyshards import open_shards, zip_shards
from lazyshards.errors import LayoutError, SelectionError, StateError
from lazyshards.testing import RaisingStorage, assert_same, with_storage, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")

X = np.arange(60).reshape(30, 2)
Y = np.arange(30) * 10


@pytest.fixture
def parts(tmp_path):
    """Images and labels of thirty rows, cut into shards at other places."""
    write_npy_shards(tmp_path / "x", np.split(X, [7, 7, 20]))
    write_npy_shards(tmp_path / "y", np.split(Y, [11]))
    return open_shards(tmp_path / "x"), open_shards(tmp_path / "y")


def test_rows_stay_aligned(parts):
    """Any index of rows picks the same rows of every dataset, lazily."""
    x, y = parts
    both = zip_shards(x=x, y=y)
    mask = np.arange(30) % 4 == 1
    for index in (slice(None), slice(5, 25, 3), slice(None, None, -1), mask, [3, 1, 28]):
        found = both[index].compute()
        assert list(found) == ["x", "y"]
        assert_same(found["x"], X[index])
        assert_same(found["y"], Y[index])
    assert len(both[5:25][::2]) == 10


def test_what_it_is(parts):
    """Its length, shapes, dtypes, bytes and members are those of the datasets."""
    x, y = parts
    both = zip_shards(x=x, y=y)
    assert (len(both), both.nbytes, list(both.keys())) == (30, x.nbytes + y.nbytes, ["x", "y"])
    assert both.shape == {"x": (30, 2), "y": (30,)}
    assert both.dtype == {"x": x.dtype, "y": y.dtype}
    assert both["x"] is x
    assert {**both} == {"x": x, "y": y}
    assert "x: int64 (30, 2)" in repr(both)
    assert both == zip_shards(x=x, y=y) != both[:3]
    assert hash(both) == hash(zip_shards(x=x, y=y))


def test_slicing_reads_nothing(parts):
    """Zipping, slicing and making batches read no data."""
    both = zip_shards(**{name: with_storage(part, RaisingStorage()) for name, part in zip("xy", parts, strict=True)})
    both[3:9].batches(4).state_dict()


def test_lengths_must_agree(parts):
    """Datasets of different lengths are refused, with each one's."""
    x, y = parts
    with pytest.raises(LayoutError, match="x has 30, y has 29"):
        zip_shards(x=x, y=y[1:])
    with pytest.raises(LayoutError, match="no dataset"):
        zip_shards()
    with pytest.raises(LayoutError, match="y has no row axis"):
        zip_shards(x=x, y=y[3])
    with pytest.raises(TypeError, match=r"(?s)y=.* is not a dataset"):
        zip_shards(x=x, y=Y)


def test_only_rows_are_shared(parts):
    """An index of columns, or one that drops the rows, is refused; a wrong name says which there are."""
    both = zip_shards(x=parts[0], y=parts[1])
    for index in ((slice(3), 0), None, ..., 3, np.int64(3)):
        with pytest.raises(SelectionError):
            both[index]
    with pytest.raises(KeyError, match="there are x, y"):
        both["z"]
    with pytest.raises(TypeError):
        iter(both)


@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
def test_batches_stay_aligned(tmp_path, parts, engine, shuffle):
    """Batches are dicts of the engine's arrays, each row with its own label, all of them once; they are resumed."""
    x, y = parts
    both = zip_shards(x=x, y=y)
    it = both.batches(8, engine=engine, shuffle=shuffle, seed=1, block_rows=4)
    found = []
    for count, batch in enumerate(it):
        assert type(batch["x"]) is type(x[:2].compute(engine))
        assert_same(batch["y"], np.asarray(batch["x"])[:, 0] * 5)
        found += np.asarray(batch["y"]).tolist()
        if count == 1:
            state = it.state_dict()
    assert sorted(found) == Y.tolist()
    other = both.batches(5, shuffle=shuffle, block_rows=4)
    other.load_state_dict(state)
    assert [row for batch in other for row in batch["y"].tolist()] == found[16:]


def test_state_of_another_bundle_is_refused(parts):
    """Names and members are part of what a state belongs to."""
    x, y = parts
    state = zip_shards(x=x, y=y).batches(4).state_dict()
    with pytest.raises(StateError):
        zip_shards(x=x, z=y).batches(4).load_state_dict(state)


def test_transform_sees_the_dict(parts):
    """The transform is called with the dict."""
    sums = zip_shards(x=parts[0], y=parts[1]).batches(10, transform=lambda batch: int(batch["y"].sum()))
    assert sum(sums) == Y.sum()


def test_hdf5_by_names(tmp_path):
    """``dataset={...}`` opens one dataset of the files for each name, as a bundle."""
    h5py = pytest.importorskip("h5py")
    for i, rows in enumerate(np.split(np.arange(30), [13])):
        with h5py.File(tmp_path / f"s{i}.h5", "w") as file:
            file["images"], file["labels"] = X[rows], Y[rows]
    both = open_shards(tmp_path, dataset={"x": "images", "y": "labels"})
    assert isinstance(both, lazyshards.Bundle)
    found = both[10:20].compute()
    assert_same(found["x"], X[10:20])
    assert_same(found["y"], Y[10:20])


def test_parquet_by_names(tmp_path):
    """``columns={...}`` opens columns of the tables for each name, as a bundle."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for i, rows in enumerate(np.split(np.arange(30), [13])):
        pq.write_table(pa.table({"a": X[rows, 0], "b": X[rows, 1], "label": Y[rows]}), tmp_path / f"s{i}.parquet")
    both = open_shards(tmp_path, columns={"x": ["a", "b"], "y": "label"})
    found = both[10:20].compute()
    assert_same(found["x"], X[10:20])
    assert_same(found["y"], Y[10:20])
