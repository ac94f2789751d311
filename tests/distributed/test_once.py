import numpy as np
import pytest

import lazyshards
from lazyshards.testing import write_npy_shards

MANY = 2_100
"""Shards that two ranks do not each look at."""


@pytest.fixture(scope="module")
def seen():
    """Keep what was seen: one run goes through everything."""
    return {}


@pytest.fixture
def once(launch, shards, seen, tmp_path_factory):
    """Give what each rank found and did, by case."""
    if not seen:
        many = tmp_path_factory.mktemp("data") / "many"
        write_npy_shards(many, np.split(np.arange(MANY * 6, dtype="f4").reshape(-1, 3), MANY))
        seen["run"] = launch("once", shards, many, timeout=240)  # once, also if it fails
    if len(seen) == 1:
        reports = seen["run"].well()
        seen.update({name: [report[name] for report in reports] for name in reports[0]})
    return seen


def outcomes(once, case):
    """Return what each rank got, how often it listed, and what it wrote."""
    return [[of_rank[case] for of_rank in once[kind]] for kind in ("found", "looks", "writes")]


def assert_same_result(results, kind="returned"):
    """Every rank got the same."""
    assert results[0] == results[1]
    assert results[0][0] == kind, results[0][1]


@pytest.mark.parametrize("case", ["many", "a list", "a glob", "by the manifest", "by its name"])
def test_one_rank_looks(once, case):
    """Of many shards, one rank lists and inspects, and the others take the layout from it."""
    results, looks, writes = outcomes(once, case)
    assert_same_result(results)
    assert looks == ([1, 0] if case in {"many", "a glob", "by the manifest"} else [0, 0])
    assert writes == [0, 0]


def test_many_are_what_they_are(once):
    """A layout that was handed over is that of the files."""
    ways = [outcomes(once, case)[0][1][1] for case in ("many", "by the manifest", "copies", "a path of its own")]
    assert len(set(ways)) == 1


@pytest.mark.parametrize("case", ["few", "a path of its own", "copies", "a function"])
def test_each_rank_looks(once, case):
    """A rank looks by itself if it is little work, or if it may see other files: and the result is the same."""
    results, looks, _ = outcomes(once, case)
    assert_same_result(results)
    assert looks == ([1, 1] if case != "a function" else looks)
    assert min(looks) > 0


@pytest.mark.parametrize(
    ("case", "words"),
    [("another last shard", ("rank 1", "rows 4205", "rows 4200")), ("not mounted", ("rank 1", "ShardsNotFoundError"))],
)
def test_others_notice(once, case, words):
    """A rank for which a shard that it tries is another one looks by itself, and all say how the ranks differ."""
    results, _, _ = outcomes(once, case)
    assert_same_result(results, "RankMismatchError")
    assert all(word in results[0][1] for word in words), results[0][1]


def test_reading_notices(once):
    """A shard that only one rank sees changed, and did not try when opening, is found when read: one error on all."""
    assert_same_result(outcomes(once, "another shard")[0])
    assert outcomes(once, "another shard")[1] == [1, 0]
    results, _, _ = outcomes(once, "reading it")
    assert_same_result(results, "ShardChangedError")
    assert "met by rank 1" in results[0][1]


def test_wrong_argument(once):
    """A wrong argument is the usual error on all ranks."""
    assert_same_result(outcomes(once, "no policy")[0], "ValueError")


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("write numpy", lambda whole: whole),
        ("write dataset", lambda whole: whole[::2]),
        ("write cupynumeric", lambda whole: -whole),
        ("write batches", lambda whole: whole + 1),
        ("write over it", lambda whole: whole[:1_000]),
    ],
)
def test_one_rank_writes(once, shards, case, change, digest):
    """Whatever is written, one rank writes it, and all return the paths of the whole of it."""
    results, _, writes = outcomes(once, case)
    assert_same_result(results)
    assert writes[0] > 0
    assert writes[1] == 0
    expected = change(lazyshards.open_shards(shards, engine="numpy").to_numpy())
    assert digest(expected) in results[0][1]
    assert results[0][1].count("shard_0") == -(-len(expected) // 900)


@pytest.mark.parametrize(
    ("case", "kind", "word"),
    [
        ("write where something is", "FileExistsError", "overwrite=True"),
        ("write lists", "TypeError", "list"),
        ("write what fails on rank 1", "RankMismatchError", "the disk of rank 1"),
    ],
)
def test_writing_fails(once, case, kind, word):
    """What goes wrong while writing is one error on all ranks."""
    results, _, _ = outcomes(once, case)
    assert_same_result(results, kind)
    assert word in results[0][1]


def test_one_rank_indexes(once):
    """A manifest is written by one rank, and is good for all."""
    for case in ("index", "refresh"):
        results, _, writes = outcomes(once, case)
        assert_same_result(results)
        assert writes == [1, 0], case
    assert_same_result(outcomes(once, "index again")[0])


def test_one_rank_warns(once):
    """A shard that changed is warned of by rank 0 alone, whichever rank reads it, and is read."""
    first, other = once["messages"]
    assert len(first) == 1
    assert "changed since the dataset was opened" in first[0]
    assert other == []
    for found in once["found"]:
        assert found["after"] == found["before"]


@pytest.mark.parametrize("case", ["compute", "batches", "bundle", "write"])
def test_one_rank_shows_progress(once, case):
    """Progress bars are shown by rank 0 alone."""
    assert [of_rank[f"shown: {case}"] for of_rank in once["found"]] == [["returned"]] * 2
    assert "2,400 rows" in once["shown"][0][case]
    assert once["shown"][1][case] == ""


@pytest.mark.parametrize("command", ["info", "index", "convert", "verify"])
def test_one_rank_runs_commands(once, command):
    """Commands print on rank 0 alone, and succeed on all."""
    (status, text), (other_status, other_text) = [of_rank[command] for of_rank in once["said"]]
    assert (status, other_status) == (0, 0)
    assert text
    assert other_text == ""


def test_still_in_step(once, shards, digest):
    """After all of it the ranks still do the same."""
    expected = digest(lazyshards.open_shards(shards, engine="numpy")[50:900].compute())
    assert [found["at the end"] for found in once["found"]] == [["returned", expected]] * 2
