import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshards import leaf, native, open_shards
from lazyshards.access import is_gathered
from lazyshards.errors import ShardReadError
from lazyshards.storage import gather
from lazyshards.testing import assert_same, example_array, write_npy_shards

pytestmark = [
    pytest.mark.usefixtures("on_numpy"),
    pytest.mark.skipif(native.find_library() is None, reason="the C library was not built"),
]


def gathered(ds, rows):
    """Return rows as the C library copies them; it must take them."""
    out = np.empty((len(rows), *ds.shape[1:]), ds.dtype)
    assert is_gathered(rows, ds._layout, ds._selection.cell)
    assert leaf._gather(out, rows, ds._layout)
    return out


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    row_shape=st.lists(st.integers(1, 5), max_size=2).map(tuple),
    dtype=st.sampled_from(["?", "i2", "f4", "c16", "S3"]),
    seed=st.integers(0, 1_000),
    most=st.sampled_from([10, 300, 5_000]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equal_to_the_general_path(tmp_path_factory, counts, row_shape, dtype, seed, most):
    """Any rows of any shards, repeated and in any order, are what positional reads and NumPy say."""
    whole = example_array((sum(counts), *row_shape), dtype)
    path = tmp_path_factory.mktemp("set")
    write_npy_shards(path, np.split(whole, np.cumsum(counts)[:-1]))
    ds = open_shards(path)
    rows = np.random.default_rng(seed).integers(0, len(whole), most)
    assert_same(gathered(ds, rows), whole[rows])
    slow = open_shards(path, on_change="ignore")  # this policy is not for maps
    assert not is_gathered(rows, slow._layout, slow._selection.cell)
    assert_same(slow[rows].compute(), whole[rows])
    assert_same(ds[rows].compute(), whole[rows])


def test_rows_of_many_pages(tmp_path):
    """Rows longer than a page, and a page of them, are whole."""
    whole = example_array((60, 5_000), "f8")
    write_npy_shards(tmp_path / "set", np.split(whole, [20, 21]))
    rows = np.random.default_rng(0).integers(0, 60, 50)
    assert_same(gathered(open_shards(tmp_path / "set"), rows), whole[rows])


def test_cold_rows(tmp_path):
    """Rows that are not in the page cache are asked for together and are whole."""
    whole = example_array((5_000, 128), "f8")
    (path,) = write_npy_shards(tmp_path / "set", [whole])
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rows = np.random.default_rng(0).integers(0, 5_000, 700)
    assert_same(gathered(open_shards(path), rows), whole[rows])


def test_many_shards(tmp_path):
    """Of more shards than are mapped together, only those that are touched are."""
    whole = np.arange(400)
    write_npy_shards(tmp_path / "set", np.split(whole, 400))
    rows = np.arange(100, 130)[::-1].copy() ^ 3
    assert_same(gathered(open_shards(tmp_path / "set"), rows), whole[rows])


def test_maps_are_bounded(tmp_path, monkeypatch):
    """No more maps are kept than the bound, and rows stay right while maps come and go."""
    monkeypatch.setattr(gather, "_MOST_MAPS", 3)
    monkeypatch.setattr(gather, "_MOST_TABLES", 1)
    monkeypatch.setattr(leaf, "_FEW_SHARDS", 0)
    whole = np.arange(1_000)
    write_npy_shards(tmp_path / "set", np.split(whole, 20))
    ds = open_shards(tmp_path / "set")
    for seed in range(10):
        rows = np.random.default_rng(seed).integers(0, 1_000, 20)
        assert_same(ds[rows].compute(), whole[rows])
    assert len(gather._maps) <= 3


def test_from_many_threads(tmp_path):
    """Any number of threads may gather at the same time."""
    whole = example_array((20_000, 16), "f8")
    write_npy_shards(tmp_path / "set", np.split(whole, 4))
    ds, wrong = open_shards(tmp_path / "set"), []

    def work(seed):
        generator = np.random.default_rng(seed)
        for _ in range(30):
            rows = generator.integers(0, len(whole), 500)
            if not np.array_equal(ds[rows].compute().view("u8"), whole[rows].view("u8")):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_missing_file_is_named(tmp_path):
    """A file that is gone, mapped or not, is an error that names it."""
    paths = write_npy_shards(tmp_path / "set", np.split(np.arange(1_000), 4))
    ds = open_shards(tmp_path / "set")
    rows = np.arange(1_000)[::-1].copy() ^ 1
    ds[rows].compute()
    os.remove(paths[2])
    with pytest.raises(ShardReadError, match="shard_0002"):
        ds[rows].compute()


@pytest.mark.parametrize(
    ("field", "value"),
    [("offsets", 10_000), ("offsets", -100_000), ("offsets", 2**63 - 100), ("ends", 2**61), ("ends", 2**62 + 8)],
)
def test_rows_beyond_their_file_are_never_copied(tmp_path, field, value):
    """A layout that says that rows lie outside of their file, as a forged manifest may, gives no foreign memory."""
    ds = open_shards(write_npy_shards(tmp_path / "set", [np.arange(1_000.0)])[0])
    layout = ds._layout
    given = {name: getattr(layout, name) for name in ("stamps", "ends", "offsets")} | {field: np.array([value])}
    rows = np.arange(int(given["ends"][0]) - 100, int(given["ends"][0]))
    assert not gather.gather_into(np.empty(100), rows, layout.root, layout.names, **given)


def test_plan_counts_what_is_copied(tmp_path):
    """The plan of such rows has one read a row, and not a byte more than is wanted."""
    write_npy_shards(tmp_path / "set", np.split(np.arange(4_000).reshape(1_000, 4), 4))
    plan = open_shards(tmp_path / "set")[np.arange(1_000)[::-1].copy() ^ 1].plan()
    assert (plan.requests, plan.bytes_read) == (1_000, plan.nbytes)


def test_without_the_library(tmp_path, monkeypatch):
    """Where the library was not built, positional reads serve."""
    monkeypatch.setattr("lazyshards.storage.local.find_library", lambda: None)
    whole = np.arange(1_000)
    write_npy_shards(tmp_path / "set", np.split(whole, 4))
    ds, rows = open_shards(tmp_path / "set"), np.arange(1_000)[::-1].copy() ^ 1
    assert not is_gathered(rows, ds._layout, ds._selection.cell)
    assert_same(ds[rows].compute(), whole[rows])
