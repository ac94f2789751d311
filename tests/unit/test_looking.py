import numpy as np
import pytest

from lazyshards import open_shards, zip_shards
from lazyshards.looking import sampled_rows
from lazyshards.storage import LocalStorage
from lazyshards.testing import assert_same, with_storage, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")


@pytest.mark.parametrize("n", [0, 1, 5, 65, 1_000, np.int64(3)])
def test_head_is_the_first_rows(opened, n):
    """head(n) is what slicing gives, of however many rows there are, as a NumPy array."""
    ds, whole = opened((40, 0, 25))
    for part, rows in ((ds, whole), (ds[::-2], whole[::-2]), (ds[[7, 3, 60]], whole[[7, 3, 60]])):
        found = part.head(n)
        assert type(found) is np.ndarray
        assert_same(found, rows[: int(n)])


def test_head_is_of_numpy_whatever_the_engine(opened, engine):
    """head() and sample() give NumPy arrays on every engine: they are to be looked at."""
    ds, whole = opened((40, 25))
    ds = open_shards([shard.path for shard in ds.shards], engine=engine)
    assert_same(ds.head(), whole[:5])
    assert type(ds.sample(3, seed=1)) is np.ndarray


def test_head_reads_no_more(opened):
    """head() opens no shard but those that hold the first rows."""
    read = []

    class Counting(LocalStorage):
        def fetch_into(self, parts):
            read.extend(part.path for part in parts)
            LocalStorage.fetch_into(self, parts)

    ds, _ = opened((4, 4, 4))
    with_storage(ds, Counting()).head(5)
    assert read == [ds.shards[0].path, ds.shards[1].path]


@pytest.mark.parametrize("n", [0, 1, 7, 64, 65])
def test_sample_takes_different_rows_in_order(opened, n):
    """sample(n) gives n different rows, in the order in which they lie."""
    whole = np.arange(65)
    ds, _ = opened((40, 0, 25))
    positions = ds.map(lambda rows: rows[:, 0], row_shape=())  # a lazy view, as good as any
    assert positions.sample(n, seed=3).shape == (n,)
    rows = sampled_rows(n, 65, 3)
    assert len(set(rows.tolist())) == n
    assert_same(rows, np.sort(rows))
    assert set(rows.tolist()) <= set(whole.tolist())
    assert_same(ds.sample(n, seed=3), ds.to_numpy()[rows])


def test_sample_is_decided_by_its_seed(opened):
    """The same seed draws the same rows, another one others, and none draws anew."""
    ds, _ = opened((400, 250))
    assert_same(ds.sample(20, seed=5), ds.sample(20, seed=5))
    assert not np.array_equal(ds.sample(20, seed=5), ds.sample(20, seed=6), equal_nan=True)
    drawn = [ds.sample(20).tobytes() for _ in range(3)]
    assert len(set(drawn)) == 3


def test_sample_is_uniform():
    """Every row is drawn about as often as any other, and pairs of neighbours are not preferred."""
    size, count, seeds = 50, 10, 4_000
    drawn = np.array([sampled_rows(count, size, seed) for seed in range(seeds)])
    times = np.bincount(drawn.ravel(), minlength=size)
    expected = seeds * count / size
    # Chi-squared with 49 degrees of freedom: 1 in a million above 114.
    assert ((times - expected) ** 2 / expected).sum() < 114
    pairs = (np.diff(drawn, axis=1) == 1).sum() / seeds
    assert pairs == pytest.approx(count * (count - 1) / size, rel=0.1)


def test_sample_costs_what_is_drawn():
    """Drawing of a million million rows takes memory for those drawn."""
    import tracemalloc

    tracemalloc.start()
    rows = sampled_rows(1_000, 10**12, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(rows)) == 1_000
    assert peak < 1 << 20
    assert rows[-1] > 9 * 10**11


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda ds: ds.sample(66), ValueError, r"sample\(66\) of 65 rows: no row is taken twice"),
        (lambda ds: ds.sample(-1), ValueError, "0 or more, not -1"),
        (lambda ds: ds.head(-1), ValueError, "0 or more, not -1"),
        (lambda ds: ds.head(2.5), TypeError, "a number of rows, not 2.5"),
        (lambda ds: ds.sample("3"), TypeError, "a number of rows, not '3'"),
        (lambda ds: ds[3].head(), TypeError, "head of a single row"),
        (lambda ds: ds[3].sample(), TypeError, "sample of a single row"),
        (lambda ds: ds[3, 0].head(), TypeError, "head of a single row"),
    ],
)
def test_bad_numbers_are_refused(opened, call, error, text):
    """What is no number of rows, or more than there are, is refused by name."""
    ds, _ = opened((40, 25))
    with pytest.raises(error, match=text):
        call(ds)


def test_bundles_are_looked_at_by_row(tmp_path, capsys):
    """A bundle's head and sample take the same rows of each dataset; plan, explain and HTML are of each by name."""
    write_npy_shards(tmp_path / "x", np.split(np.arange(60).reshape(30, 2), [7, 20]))
    write_npy_shards(tmp_path / "y", np.split(np.arange(30), [11]))
    both = zip_shards(x=open_shards(tmp_path / "x"), y=open_shards(tmp_path / "y"))
    assert_same(both.head(2)["x"], np.arange(4).reshape(2, 2))
    assert_same(both[::-1].head(2)["y"], np.array([29, 28]))
    drawn = both.sample(6, seed=2)
    assert_same(drawn["x"][:, 0], 2 * drawn["y"])
    assert_same(both["y"].sample(6, seed=2), drawn["y"])
    assert len({both.sample(6)["y"].tobytes() for _ in range(3)}) > 1
    assert {name: plan.shape for name, plan in both[3:].plan().items()} == {"x": (27, 2), "y": (27,)}
    both.explain()
    assert capsys.readouterr().out.count("shards touched") == 2
    with pytest.raises(ValueError, match="of 30 rows"):
        both.sample(31)


def test_bundles_map_by_name(tmp_path):
    """Mapping one dataset of a bundle leaves the others as they are; a wrong name says which there are."""
    write_npy_shards(tmp_path / "x", [np.arange(6.0).reshape(3, 2)])
    write_npy_shards(tmp_path / "y", [np.arange(3)])
    both = zip_shards(x=open_shards(tmp_path / "x"), y=open_shards(tmp_path / "y"))
    mapped = both.map("x", lambda rows: rows.sum(axis=1), row_shape=())[1:]
    assert_same(mapped.to_numpy()["x"], np.array([5.0, 9.0]))
    assert mapped["y"] == both["y"][1:]
    with pytest.raises(KeyError, match="there are x, y"):
        both.map("z", abs)


def test_bundle_html_is_that_of_its_datasets(tmp_path):
    """The HTML of a bundle holds each dataset under its name, escaped, and is well-formed."""
    from xml.etree import ElementTree as ET

    write_npy_shards(tmp_path / "x", [np.arange(6.0).reshape(3, 2)])
    ds = open_shards(tmp_path / "x")
    html = zip_shards(**{"a<b>": ds, "c": ds[::-1]})._repr_html_()
    root = ET.fromstring(html.replace(" open>", ">"))  # noqa: S314 (our own text)
    names = [each.text for each in root.iter("summary")]
    assert [name for name in names if name != "shards"] == ["a<b>", "c"]
    assert len(root.findall(".//{*}svg")) == 2
