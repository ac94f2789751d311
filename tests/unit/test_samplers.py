import json
import random
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import samplers
from lazyshards.samplers import (
    ORDER_VERSION,
    BlockOrder,
    FileOrder,
    KeyedPermutation,
    RowOrder,
    ShardOrder,
    Shuffle,
    derive_keys,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden_orders.json"
SHUFFLES = ("", "rows", "blocks", "shards")


def keys(*parts):
    """Return keys that depend on the parts."""
    return derive_keys("test", *parts)


def order(name, size, *, seed=0, epoch=0, fingerprint="f", block_rows=16, window_blocks=4, edges=None):
    """Return an order as batches make it."""
    edges = [0, size] if edges is None else edges
    shuffle = Shuffle(name, seed, block_rows, window_blocks)
    return shuffle.order(size, lambda: np.array(edges, np.int64), fingerprint, epoch)


def everything(found):
    """Return all rows of an order."""
    return np.asarray(found.rows(0, found.size), np.int64)


@pytest.fixture(params=["c", "numpy"])
def arithmetic(request, monkeypatch):
    """Compute a permutation in two ways, in C where the library was built."""
    if request.param == "numpy":
        monkeypatch.setattr(samplers, "find_library", lambda: None)
    elif samplers.find_library() is None:
        pytest.skip("the C library was not built")
    return request.param


@pytest.mark.parametrize("size", [*range(70), 4095, 4096, 4097, 4098, 4225, 4226, 9_999, 65_536, 70_001])
def test_permutation_is_one(size, arithmetic):
    """Every size, around perfect squares and the size of the table too, is permuted: each number comes once."""
    positions = np.arange(size, dtype=np.int64)
    found = KeyedPermutation(size, keys(size))(positions)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), positions)


@given(size=st.integers(1, 2**62), seed=st.integers(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_permutation_of_any_size_has_an_inverse(size, seed, data):
    """Any size up to 2**62 maps into itself, and the inverse leads back: no two positions meet."""
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    permutation = KeyedPermutation(size, keys(seed))
    found = permutation(positions)
    assert ((found >= 0) & (found < size)).all()
    assert np.array_equal(permutation.inverse(found), positions)


@given(size=st.integers(4_097, 2**62), seed=st.integers())
@settings(max_examples=100, deadline=None)
def test_c_and_numpy_agree(size, seed):
    """The C library, where it was built, computes the very same permutation as NumPy."""
    positions = np.linspace(0, size - 1, 700).astype(np.int64) % size
    permutation = KeyedPermutation(size, keys(seed))
    assert np.array_equal(permutation(positions), permutation._walk(positions, permutation._encrypt))


def test_positions_are_left_alone(arithmetic):
    """The permutation does not change what it is given."""
    positions = np.arange(5_000)
    KeyedPermutation(5_000, keys())(positions)
    assert np.array_equal(positions, np.arange(5_000))


@pytest.mark.parametrize("name", SHUFFLES)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 63, 64, 65, 1_000, 20_000])
def test_each_row_once(name, size):
    """Every order of every size takes each row once."""
    edges = [0, size // 3, size // 3, size // 2, size]
    assert np.array_equal(np.sort(everything(order(name, size, edges=edges))), np.arange(size))


@given(
    name=st.sampled_from(SHUFFLES),
    size=st.integers(1, 40_000),
    block_rows=st.integers(1, 3_000) | st.just(10**12),
    window_blocks=st.integers(1, 9) | st.just(10**12),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_any_piece_of_an_order_is_the_same(name, size, block_rows, window_blocks, data):
    """What an order takes at some positions does not depend on how it was asked before."""
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4), label="edges"))
    given_ = {"block_rows": block_rows, "window_blocks": window_blocks, "edges": [0, *cuts, size]}
    whole = everything(order(name, size, **given_))
    found = order(name, size, **given_)
    for _ in range(4):
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        assert np.array_equal(np.asarray(found.rows(start, stop), np.int64), whole[start:stop])


@pytest.mark.parametrize("name", SHUFFLES[1:])
@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"epoch": 1}, {"fingerprint": "g"}, {"seed": -1}, {"seed": 2**80}],
    ids=["seed", "epoch", "fingerprint", "negative seed", "huge seed"],
)
def test_order_depends_on(name, change):
    """Seed, epoch and fingerprint each give another order; the same ones give the same."""
    edges = [0, 100, 250, 300]
    usual = everything(order(name, 300, edges=edges))
    assert np.array_equal(everything(order(name, 300, edges=edges)), usual)
    assert not np.array_equal(everything(order(name, 300, edges=edges, **change)), usual)


def test_keys_tell_types_apart():
    """A seed of 1 is not the text "1", and parts do not run into each other."""
    assert len({derive_keys(1), derive_keys("1"), derive_keys(1, 1), derive_keys(11), derive_keys("1", "")}) == 5


@pytest.mark.parametrize("name", SHUFFLES)
def test_a_trillion_rows(name):
    """A batch in the middle of 10**12 rows is drawn without those before it."""
    found = order(name, 10**12, edges=[0, 10**11, 10**12], block_rows=1_000)
    rows = np.asarray(found.rows(10**12 // 2, 10**12 // 2 + 1_000), np.int64)
    assert len(np.unique(rows)) == 1_000
    assert rows.max() < 10**12


def test_blocks_stay_within_their_window():
    """A window of a block shuffle holds whole blocks, the short last one among them, and no others."""
    found = BlockOrder(1_003, keys("b"), ("w",), 10, 5)
    rows = everything(found)
    start = 0
    for window in range(-(-101 // 5)):
        stop = found._window_start(window + 1)
        blocks = np.unique(rows[start:stop] // 10)
        assert len(blocks) == min(5, 101 - 5 * window)
        assert sum(min(10, 1_003 - 10 * block) for block in blocks.tolist()) == stop - start
        start = stop


def test_shards_come_one_after_the_other():
    """A shard shuffle takes all rows of one shard before it goes to the next, an empty one included."""
    edges = np.array([0, 40, 40, 45, 100])
    rows = everything(ShardOrder(edges, keys("s"), ("w",)))
    holders = np.searchsorted(edges, rows, "right")
    assert np.count_nonzero(np.diff(holders)) == 2


def test_file_order_is_a_range():
    """Without a shuffle rows come as ranges, which read faster than index arrays."""
    assert FileOrder(10).rows(3, 7) == range(3, 7)


def test_random_state_is_left_alone():
    """Drawing an order neither uses nor changes the global generators."""
    np.random.seed(5)  # noqa: NPY002  # the global state is what this is about
    random.seed(5)
    before = np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    everything(order("rows", 10_000))
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before  # noqa: NPY002


# Quality: what a drawn permutation would give, within bounds that one fails once in a million ---------------------


@pytest.mark.parametrize("size", [1_000, 4_097, 10_007, 65_536])
def test_every_place_is_as_likely(size):
    """Over 300 seeds, rows of every tenth fall into every tenth of the epoch: chi-squared below its 1 - 1e-6 bound."""
    counts = np.zeros((10, 10))
    for seed in range(300):
        rows = everything(RowOrder(size, keys(size, seed)))
        tenths = np.arange(size) * 10 // size
        counts += np.histogram2d(tenths, tenths[rows], bins=(10, 10))[0]
    expected = np.outer(np.bincount(np.arange(size) * 10 // size), np.bincount(np.arange(size) * 10 // size))
    statistic = (((counts - 300 * expected / size) ** 2) / (300 * expected / size)).sum()
    # A permutation has 81 degrees of freedom here; their 1 - 1e-6 quantile is 155.
    assert statistic < 155


@pytest.mark.parametrize("size", [1_000, 4_097, 10_007])
def test_neighbours_part(size):
    """Over 300 seeds, rows that stay, and neighbours that stay neighbours, are as many as chance has: one an epoch."""
    fixed = neighbours = 0
    for seed in range(300):
        rows = everything(RowOrder(size, keys("n", size, seed)))
        fixed += np.count_nonzero(rows == np.arange(size))
        neighbours += np.count_nonzero(np.diff(rows) == 1)
    # Each is about Poisson with mean 300, of standard deviation 17.3: five of them.
    assert abs(fixed - 300) < 87
    assert abs(neighbours - 300) < 87


def test_rank_correlation_is_that_of_chance():
    """Over 200 seeds, the correlation of row and position has mean 0 and the variance 1 / (n - 1)."""
    size = 5_003
    found = [
        np.corrcoef(everything(RowOrder(size, keys("c", seed))), np.arange(size))[0, 1] * np.sqrt(size - 1)
        for seed in range(200)
    ]
    assert abs(np.mean(found)) < 5 / np.sqrt(200)
    assert 0.6 < np.var(found) < 1.6


def test_orders_of_two_epochs_are_unrelated():
    """The order of one epoch tells nothing of the next: their correlation is that of chance, within five deviations."""
    first, second = (everything(order("rows", 20_000, epoch=epoch)) for epoch in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)


def test_batches_mix_all_shards():
    """Batches of 100 rows from ten equal shards hold of each what chance has: chi-squared is within five deviations."""
    rows = everything(order("rows", 100_000))
    counts = np.array([np.bincount(batch // 10_000, minlength=10) for batch in np.split(rows, 1_000)])
    # 9 degrees of freedom a batch: 9,000, of standard deviation 134; five of them.
    assert abs(((counts - 10) ** 2 / 10).sum() - 9_000) < 670


# The contract -----------------------------------------------------------------------------------------------------


def digest(rows):
    """Return a short digest of row numbers."""
    return blake2b(np.asarray(rows).astype("<i8").tobytes(), digest_size=8).hexdigest()


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: case["id"])
def test_golden(case, arithmetic):
    """Orders of version 1 are what they were when the contract was written, however they are computed."""
    assert ORDER_VERSION == 1
    shuffle = Shuffle(case["shuffle"], case["seed"], case["block_rows"], case["window_blocks"])
    found = shuffle.order(case["size"], lambda: np.array(case["edges"]), case["fingerprint"], case["epoch"])
    start, stop = case["positions"]
    rows = np.asarray(found.rows(start, stop), np.int64)
    assert rows[:10].tolist() == case["first"]
    assert digest(rows) == case["digest"]
