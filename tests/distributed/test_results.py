import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import lazyshards
from lazyshards.engines import bringup

PROGRAMS, CHECKED = 200, 60


@pytest.mark.ranks(1, 2)
def test_every_index_and_format(launch, formats, ranks):
    """Every kind of index gives what NumPy gives, in every format, as a cuPyNumeric array, whatever the ranks."""
    for report in launch("indexes", formats, "all", ranks=ranks).well():
        assert report["wrong"] == []
        assert report["compared"] > 25
        assert report["node_count"] == ranks


@pytest.mark.ranks(4)
def test_four_ranks(launch, formats, ranks):
    """The same on four ranks, more than there may be cores."""
    reports = launch("indexes", formats, "few", ranks=ranks, timeout=300).well()
    assert [report["wrong"] for report in reports] == [[]] * 4
    assert {report["node_count"] for report in reports} == {4}


@pytest.fixture(scope="session")
def expected_programs():
    """Keep what one rank gave."""
    return {}


@pytest.mark.ranks(1, 2)
def test_random_programs(launch, shards, ranks, expected_programs):
    """Random programs of opens, slices, computes and batches give the same on one rank and on several."""
    reports = launch("programs", shards, PROGRAMS, ranks=ranks, timeout=280).well()
    assert len(reports[0]["digests"]) == PROGRAMS
    first = expected_programs.setdefault("digests", reports[0]["digests"])
    for report in reports:
        assert report["digests"] == first


@pytest.mark.ranks(2)
def test_random_programs_checked(launch, shards, ranks, expected_programs):
    """Legate's own check, that all ranks ask for the same in the same order, finds nothing."""
    checked = {"LEGION_DEFAULT_ARGS": "-lg:safe_ctrlrepl 1"}
    for report in launch("programs", shards, CHECKED, ranks=ranks, timeout=200, **checked).well():
        first = expected_programs.get("digests", report["digests"])
        assert report["digests"] == first[:CHECKED]


@pytest.mark.ranks(1, 4)
def test_kill_and_resume(launch, shards, tmp_path, ranks, digest):
    """An epoch that is killed goes on with the very next batch, on another number of ranks."""
    state = tmp_path / "state.json"
    expected = [digest(b) for b in lazyshards.open_shards(shards, engine="numpy").batches(150, shuffle=True, seed=11)]
    if bringup.has_networks():
        assert launch("epoch", shards, state, 5, ranks=2).status != 0
        seen = json.loads(state.read_text())["seen"]
    else:  # one process cannot lose a rank: another engine begins
        batches = lazyshards.open_shards(shards, engine="numpy").batches(150, shuffle=True, seed=11)
        seen = [digest(batch) for _, batch in zip(range(5), batches, strict=False)]
        state.write_text(json.dumps({"state": batches.state_dict()}))
    assert 1 <= len(seen) < len(expected)
    for report in launch("epoch", shards, state, 0, ranks=ranks).well():
        assert seen + report["seen"] == expected


def taken_as_one(ds, raw, digest):
    """Return what scenarios/batches.py should find of several datasets as one, from arrays in memory where it can."""
    whole, turned, other = ds.to_numpy(), ds.to_numpy()[::-1], raw.to_numpy()
    joined = np.concatenate([whole[:1_000], other])
    order = lazyshards.concat([ds[:1_000], raw])
    bundle, mixture = lazyshards.zip_shards(x=ds, y=ds[::-1, 0]), lazyshards.mix({ds: 3, ds[::-1][:500]: 1})
    return {
        "bundle": {"x": digest(whole[10:1_500]), "y": digest(turned[10:1_500, 0].copy())},
        "bundle batches": [[digest(b["x"]), digest(b["y"])] for b in bundle.batches(900, shuffle=True, seed=4)],
        "concat": digest(joined[500:2_000]),
        "concat batches": [digest(b) for b in order.batches(1_300, shuffle="blocks", seed=5)],
        "mix": [digest(b) for b in mixture.batches(700, shuffle=True, seed=6)],
        "map": digest(1 - whole[::3]),
    }


@pytest.mark.ranks(1, 2)
def test_batches(launch, shards, formats, ranks, digest):
    """Interleaved iterations do not mix, seeds that nobody gave are one, and many small batches do not hang."""
    count = int(os.environ.get("LAZYSHARDS_MANY_BATCHES", "100"))
    reports = launch("batches", shards, count, formats, ranks=ranks, timeout=max(150, count)).well()
    ds = lazyshards.open_shards(shards, engine="numpy")
    raw = lazyshards.open_shards(formats / "raw", engine="numpy")
    pairs = zip(ds.batches(500, shuffle=True, seed=1), ds[::-1].batches(300), strict=False)
    interleaved = [digest(part) for one, other in pairs for part in (one, other, ds[7:20].compute())]
    for report in reports:
        assert report == reports[0]
        assert report["interleaved"] == interleaved
        assert report["same"]
        assert report["taken_as_one"] == taken_as_one(ds, raw, digest)
        assert len(set(report["seeds"])) == len(report["seeds"])
        assert report["batches"] == count
        assert report["drawn"] == digest(next(iter(ds.batches(64, shuffle=True, seed=report["seed"]))))
        assert report["whole"] == digest(ds.to_numpy())


@pytest.mark.ranks(1, 2)
def test_reductions(launch, shards, tmp_path, monkeypatch, ranks, digest):
    """Reductions give on every rank, to the bit, what they give in one process, and errors on all of them.

    Ranks share the blocks, so that each is read by one.
    """
    ds = lazyshards.open_shards(shards, engine="numpy")
    found = {
        "sum": ds.sum(axis=0, dtype="f8"),
        "std": ds.std(dtype="f8"),
        "argmax": ds.argmax(),
        "median": ds.median(axis=0),
        "cov": ds[:, 0].cov(),
        "any": ds[::2].any(axis=1),
    }
    stats = repr(ds.stats())
    mapped = ds.map(lambda rows: np.tanh(rows.astype("f8")), dtype="f8").sum(axis=0)
    monkeypatch.setattr("lazyshards.reductions.blocks.BLOCK_ELEMENTS", 60)
    monkeypatch.setattr("lazyshards.reductions.blocks.RUN_NBYTES", 1_000)
    shared = {
        "sum": ds.sum(axis=0, dtype="f8"),
        "std": ds.std(dtype="f8"),
        "nanmean": ds.nanmean(axis=0),
        "argmax": ds.argmax(),
        "cov": ds[:, 0].cov(),
        "histogram": ds.histogram(7, (-9, 9))[0],
        "all": ds.all(),
    }
    shutil.copytree(shards, tmp_path / "cut")
    reports = launch("reductions", shards, tmp_path / "cut", ranks=ranks).well()
    assert sum(report["read"] for report in reports) == len(ds)
    assert all(report["read"] > len(ds) // (2 * ranks) for report in reports)
    for report in reports:
        assert report["shared"] == {name: digest(result) for name, result in shared.items()}
        assert report["cut"][0] == "ShardChangedError"
        assert report["digests"] == {name: digest(result) for name, result in found.items()}
        assert report["rounded"] == digest(found["cov"])
        assert report["mapped"] == digest(mapped)
        assert report["stats"] == stats
        assert report["own"] == len(ds)
        assert report["refused"][0] == "ValueError"
        assert report["computed"] == digest(ds[3:7].to_numpy())


def test_scenarios_are_used():
    """Each scenario is started by a test."""
    here = Path(__file__).parent
    tests = "".join(path.read_text() for path in here.glob("test_*.py"))
    for path in (here / "scenarios").glob("*.py"):
        assert path.stem == "reporting" or f'launch("{path.stem}"' in tests
