import os
import pickle

import fsspec
import numpy as np
import pytest

from lazyshards import concat, open_shards
from lazyshards.errors import LayoutError, ShardReadError
from lazyshards.joined import JoinedStorage
from lazyshards.testing import RaisingStorage, assert_same, npy_bytes, with_storage, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")

WHOLE = np.arange(80.0).reshape(40, 2)


@pytest.fixture
def remote():
    """Give a function that puts arrays on the memory file system and opens them."""
    fs = fsspec.filesystem("memory")
    root = f"/joined-{os.getpid()}"

    def put(arrays):
        for i, array in enumerate(arrays):
            fs.pipe(f"{root}/s{i}.npy", npy_bytes(array))
        return open_shards(f"memory:/{root}/*.npy")

    yield put
    fs.rm(root, recursive=True)


@pytest.fixture
def kinds(tmp_path, remote):
    """Write the forty rows, ten in each of: npy, Fortran order, compressed npz, remote."""
    pieces = np.split(WHOLE, 4)
    write_npy_shards(tmp_path / "a", np.split(pieces[0], [3, 3]))
    write_npy_shards(tmp_path / "b", [np.asfortranarray(pieces[1])])
    (tmp_path / "c").mkdir()
    np.savez_compressed(tmp_path / "c/s.npz", pieces[2])
    return [*[open_shards(tmp_path / name) for name in "abc"], remote([pieces[3][:4], pieces[3][4:]])]


INDICES = (
    slice(None),
    slice(8, 32),
    slice(None, None, -3),
    slice(20, 20),
    [39, 0, 15, 15, 25],
    (slice(None, None, 2), 1),
    np.arange(40) % 7 == 2,
    13,
)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_formats_and_storages_are_mixed(kinds, engine, index):
    """Any index of datasets of several formats and storages, joined, is NumPy's of their concatenation."""
    joined = concat(kinds)
    assert joined.shape == (40, 2)
    assert_same(joined[index].compute(engine), WHOLE[index])
    assert_same(joined[index].compute(engine, tiles_per_processor=3), WHOLE[index])


def test_slices_are_joined(kinds):
    """Slices, reversed and picked rows of datasets are joined as they are."""
    a, b, c, d = kinds
    joined = concat([d[::-1], a[:0], b[3:7], c[[9, 0, 4]], a])
    expected = np.concatenate([WHOLE[30:][::-1], WHOLE[13:17], WHOLE[20:30][[9, 0, 4]], WHOLE[:10]])
    assert_same(joined.compute(), expected)
    assert_same(joined[5:-5].compute(), expected[5:-5])
    assert_same(concat([joined, joined]).compute(), np.concatenate([expected, expected]))


def test_columns_are_joined(kinds):
    """Datasets of which the same columns were taken are joined."""
    assert_same(concat([part[:, 1] for part in kinds])[::3].compute(), WHOLE[::3, 1])


def test_casts_are_joined(tmp_path):
    """Files of several types and byte orders, cast to one, are joined."""
    write_npy_shards(tmp_path / "a", [WHOLE[:10].astype(">f4")])
    write_npy_shards(tmp_path / "b", [WHOLE[10:20].astype("i2")])
    write_npy_shards(tmp_path / "c", [WHOLE[20:]])
    parts = [open_shards(tmp_path / name).astype("f8") for name in "abc"]
    assert_same(concat(parts)[5:30].compute(), WHOLE[5:30])
    assert_same(concat(parts).astype("f4", casting="same_kind")[::7].compute(), WHOLE[::7].astype("f4"))


def test_functions_are_joined(kinds):
    """Datasets through the same function are joined; a joined dataset goes through a function."""

    def double(rows):
        return rows * 2

    assert_same(concat([part.map(double) for part in kinds])[3:38].compute(), WHOLE[3:38] * 2)
    assert_same(concat(kinds).map(double)[::-1].compute(), WHOLE[::-1] * 2)


def test_batches_go_across(kinds, engine):
    """Batches of joined datasets, shuffled or not, hold each row once."""
    joined = concat(kinds)
    assert_same(np.concatenate([np.asarray(batch) for batch in joined.batches(7, engine=engine)]), WHOLE)
    rows = np.concatenate([np.asarray(batch) for batch in joined.batches(7, shuffle=True, engine=engine)])
    assert_same(rows[np.argsort(rows[:, 0])], WHOLE)


def test_joining_reads_nothing(kinds):
    """Joining and slicing read no data."""
    concat([with_storage(part, RaisingStorage()) for part in kinds[:3]])[5:].plan()


def test_it_travels(kinds):
    """A joined dataset is pickled, and is known again by its fingerprint, which the parts decide."""
    joined = concat(kinds)
    again = pickle.loads(pickle.dumps(joined))  # noqa: S301  # our own
    assert again == joined
    assert_same(again[::3].compute(), WHOLE[::3])
    assert concat(kinds).fingerprint == joined.fingerprint != concat(kinds[::-1]).fingerprint
    assert concat(kinds[:1]) == kinds[0]


def test_fingerprint_is_free_of_the_place(tmp_path, remote):
    """The fingerprint stays when the files move."""
    found = []
    far = remote([WHOLE[30:]])
    for place in ("here", "elsewhere/deep"):
        write_npy_shards(tmp_path / place, [WHOLE[:10], WHOLE[10:30]])
        found.append(concat([open_shards(tmp_path / place), far]).fingerprint)
    assert found[0] == found[1]


def test_an_error_names_the_file(kinds, tmp_path):
    """A file of any part that is gone is named by its own path."""
    joined = concat(kinds)
    os.remove(tmp_path / "c/s.npz")
    with pytest.raises(ShardReadError, match=r"c/s\.npz"):
        joined.compute()


def test_what_cannot_be_joined(kinds, tmp_path):
    """Other row shapes, dtypes, cells or policies are refused, saying which dataset and what to do."""
    a, b = kinds[:2]
    for others, message in (
        ([a, b.astype("f4", casting="same_kind")], r"dataset 1 .* float32, expected .* float64.*astype"),
        ([a, b[:, 0]], r"dataset 1 .* shape \(\)"),
        ([a[:, 0], b[:, 1]], "another selection within each row"),
        ([a, b[3]], "without its axis"),
        ([a.map(abs), b], "other functions"),
        ([], "no dataset"),
        ([a, open_shards(f"memory://joined-{os.getpid()}/*.npy", on_change="warn")], "on_change='raise' and 'warn'"),
    ):
        with pytest.raises(LayoutError, match=message):
            concat(others)
    with pytest.raises(TypeError, match="item 1"):
        concat([a, WHOLE])
    with pytest.raises(TypeError, match="not one dataset"):
        concat(a)


def test_paths_find_their_storage(kinds):
    """Each path is served by the storage whose files begin like it."""
    storage = concat(kinds)._layout.storage
    assert isinstance(storage, JoinedStorage)
    paths = [kinds[3].shards[0].path, kinds[0].shards[0].path, kinds[3].shards[1].path]
    heads = storage.heads(paths, 6)
    assert [head.data for head in heads] == [b"\x93NUMPY"] * 3
    assert storage.fetch([(path, 1, 5) for path in paths]) == [b"NUMPY"] * 3
    assert storage.local_path(paths[1]) == paths[1]
    assert storage.find(paths[1])[0] == "file"
    with storage.open(paths[0]) as file:
        assert file.read(6) == b"\x93NUMPY"
