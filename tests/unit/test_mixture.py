from fractions import Fraction

import numpy as np
import pytest

from lazyshards import mix, open_shards
from lazyshards.errors import LayoutError, StateError
from lazyshards.mixture import _pattern, _ranks, _shares
from lazyshards.testing import write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")


@pytest.fixture
def two(tmp_path):
    """Ninety common rows and twenty rare ones, from 1,000 on."""
    write_npy_shards(tmp_path / "common", np.split(np.arange(90), [40]))
    write_npy_shards(tmp_path / "rare", [np.arange(1_000, 1_020)])
    return open_shards(tmp_path / "common"), open_shards(tmp_path / "rare")


def rows_of(batches):
    """Return all rows."""
    return [row for batch in batches for row in batch.tolist()]


@pytest.mark.parametrize("shuffle", [False, True, "shards"])
def test_every_run_has_its_shares(two, shuffle):
    """Any run of rows holds each dataset's share, within one row; no row comes twice in the first epoch."""
    mixture = mix({two[0]: 3, two[1]: 1})
    found = np.array(rows_of(mixture.batches(7, shuffle=shuffle, seed=2)))
    assert len(found) == len(mixture) == len(set(found.tolist())) == 82
    rare = np.cumsum(found >= 1_000)
    for start in range(0, 80, 5):
        for stop in range(start + 4, 80, 9):
            assert abs(int(rare[stop] - rare[start]) - (stop - start) / 4) <= 1


def test_rows_of_an_epoch_may_be_chosen(two):
    """``rows=`` says how many rows an epoch has; datasets that are shorter come again, whole before any twice."""
    mixture = mix({two[0]: 1, two[1]: 1}, rows=200)
    found = rows_of(mixture.batches(30, shuffle=True, seed=0))
    assert len(found) == 200
    rare = [row for row in found if row >= 1_000]
    assert [sorted(rare[i : i + 20]) for i in range(0, 100, 20)] == [list(range(1_000, 1_020))] * 5
    assert rare[:20] != rare[20:40]


def test_paths_are_opened(two, tmp_path):
    """A path as a key is opened."""
    found = rows_of(mix({str(tmp_path / "common"): 3, two[1]: 1}).batches(10))
    assert found == rows_of(mix({two[0]: 3, two[1]: 1}).batches(10))


def test_what_it_is(two):
    """It shows each dataset's fraction, and its rows."""
    mixture = mix({two[0]: 0.7, two[1]: 0.3})
    assert mixture.fractions == (0.7, 0.3)
    assert "70.0000% of 90 rows, npy" in repr(mixture)
    assert mixture.batches(8, shuffle=True).quality().shards_per_batch > 2


def test_shares_are_exact_where_they_can_be():
    """Decimal and whole weights give exact shares; others are rounded to parts of 65,536, never to none."""
    assert _shares([Fraction("0.7"), Fraction("0.3")]) == [7, 3]
    assert _shares([Fraction(4), Fraction(2)]) == [2, 1]
    counts = _shares([Fraction("0.333333333"), Fraction("0.666666667")])
    assert abs(counts[0] / sum(counts) - 1 / 3) < 1e-4
    assert _shares([Fraction(10**9), Fraction(1)])[1] == 1


def test_pattern_is_even():
    """Within a period no dataset is ever more than a row from its share."""
    counts = [7, 3, 1]
    pattern = _pattern(counts)
    assert np.bincount(pattern).tolist() == counts
    for number, count in enumerate(counts):
        given = np.cumsum(pattern == number)
        assert (np.abs(given - np.arange(1, 12) * count / 11) <= 1).all()
    assert _ranks(np.array([0, 1, 0, 0, 1])).tolist() == [0, 0, 1, 2, 1]


def test_what_cannot_be_mixed(two):
    """No dataset, weights that are none, empty datasets, and other row shapes are refused."""
    with pytest.raises(ValueError, match="no dataset"):
        mix({})
    for weight in (0, -1, float("nan"), float("inf"), "x"):
        with pytest.raises(ValueError, match="expected a number above 0"):
            mix({two[0]: weight})
    with pytest.raises(TypeError, match=r"mix\(\) takes a mapping of weights, .* not a list"):
        mix(list(two))
    with pytest.raises(ValueError, match="without rows"):
        mix({two[0]: 1, two[1][:0]: 1})
    with pytest.raises(ValueError, match="rows=0"):
        mix({two[0]: 1}, rows=0)
    with pytest.raises(LayoutError, match="float64"):
        mix({two[0]: 1, two[1].astype("f8"): 1})


def test_state_belongs_to_the_mixture(two):
    """A state of other weights is refused."""
    state = mix({two[0]: 3, two[1]: 1}).batches(8).state_dict()
    with pytest.raises(StateError, match="1 of 20 rows"):
        mix({two[0]: 2, two[1]: 1}).batches(8).load_state_dict(state)
