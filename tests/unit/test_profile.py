import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from lazyshards import open_shards, recording
from lazyshards.errors import ShardReadError
from lazyshards.recording import Recorder, carried, stage
from lazyshards.testing import assert_same, with_storage, write_npy_shards

CASES = {
    "straight": lambda ds: ds[100:9_000],
    "steps": lambda ds: ds[::3, 1:],
    "backwards": lambda ds: ds[::-1],
    "gather": lambda ds: ds[np.arange(0, 9_000, 2)[::-1].copy()],
    "cast": lambda ds: ds.astype("f8")[5:5_000],
    "map": lambda ds: ds.map(lambda rows: rows * 2)[5:5_000],
    "persisted": lambda ds: ds.persist("numpy")[::2],
    "persisted and gathered": lambda ds: ds.persist("numpy").astype("f8")[[5, 3, 9_000, 5] * 9],
    "one row": lambda ds: ds[7],
    "no rows": lambda ds: ds[:0],
}


@pytest.fixture
def made(tmp_path):
    """Ten thousand rows of 256 bytes in three shards, one of them empty, and what they hold."""
    whole = np.arange(640_000, dtype="f4").reshape(10_000, 64)
    write_npy_shards(tmp_path / "set", np.split(whole, [6_000, 6_000]))
    return open_shards(tmp_path / "set", engine="numpy"), whole


@pytest.mark.parametrize("case", CASES)
def test_profile_computes_what_compute_does(made, engine, case):
    """The array of a profile is that of compute(), of the engine's type, and the numbers of the result are its own."""
    part = CASES[case](made[0])
    profile, plain = part.profile(engine), part.compute(engine)
    assert type(profile.array) is type(plain)
    assert_same(np.asarray(profile.array), np.asarray(plain))
    assert (profile.engine, profile.shape, profile.dtype) == (engine, part.shape, part.dtype)
    assert profile.nbytes == part.nbytes


@pytest.mark.parametrize("case", CASES)
def test_stages_add_up(made, engine, case):
    """The stages by the clock add up to the time of the compute; no stage takes less than no time."""
    profile = CASES[case](made[0]).profile(engine)
    assert sum(each.seconds for each in profile.stages) == pytest.approx(profile.seconds, rel=0.01)
    assert all(each.seconds >= 0 for each in (*profile.stages, *profile.work))
    names = [each.name for each in profile.stages]
    assert names[0] == "plan"
    assert names[-1] == "engine"
    assert "fill" in names or case == "no rows"


@pytest.mark.parametrize("case", CASES)
def test_bytes_and_requests_are_those_of_the_plan(made, engine, case):
    """What was read is what the plan said: as many bytes, in as many requests, in as many leaves as there are tiles."""
    part = CASES[case](made[0])
    profile, plan = part.profile(engine), part.plan(engine)
    assert (profile.bytes_read, profile.requests) == (plan.bytes_read, plan.requests)
    leaves = sum(each.count for each in profile.work if each.name == "other")
    assert profile.tiles == plan.tile_count
    assert leaves == plan.tile_count or case == "no rows"


def test_work_is_what_the_request_needs(made):
    """A request straight into the result only reads; a cast converts, a function maps, with the bytes that they get."""

    def work(part):
        return {each.name: each.nbytes for each in part.profile().work}

    ds, _ = made
    assert work(ds[10:20]) == {"read": 2_560, "other": 0}
    assert work(ds.astype("f8")[10:20]) == {"read": 2_560, "convert": 2_560, "other": 0}
    assert work(ds.map(lambda rows: rows * 2)[10:20]) == {"read": 2_560, "convert": 2_560, "map": 2_560, "other": 0}


@pytest.mark.parametrize("case", ["straight", "steps", "gather", "cast"])
def test_limit_reads_the_same_bytes(made, engine, case):
    """The limit is measured on as many bytes as were read, and set against the time of the compute."""
    profile = CASES[case](made[0]).profile(engine, limit=True)
    assert profile.limit.nbytes == profile.bytes_read
    assert profile.limit_reached == pytest.approx(profile.limit.seconds / profile.seconds)
    assert profile.note == ""


def test_limit_reads_the_very_ranges(made, monkeypatch):
    """Plain reads are of the ranges that the compute read: the files' bytes there are the rows."""
    from lazyshards import profiling

    seen = []
    monkeypatch.setattr(profiling, "_read_plainly", lambda ranges, buffer: seen.extend(ranges))
    monkeypatch.setattr(profiling, "_TRIES", 1)
    ds, whole = made
    for part, rows in ((ds[5_990:6_010], whole[5_990:6_010]), (ds[[9, 5, 7, 6, 9, 1, 2, 3, 4, 6_000, 6_001]], None)):
        seen.clear()
        part.profile(limit=True)
        found = b""
        for path, offset, nbytes in seen:
            with open(path, "rb") as file:
                file.seek(offset)
                found += file.read(nbytes)
        wanted = whole[[1, 2, 3, 4, 5, 6, 7, 9, 6_000, 6_001]] if rows is None else rows
        assert found == wanted.tobytes()
    assert len(seen) == 3  # runs of neighbouring rows are one read


def test_no_limit_without_being_asked(made):
    """Nothing is read again unless that was asked for."""
    profile = made[0][:10].profile()
    assert profile.limit is profile.limit_reached is None
    assert "limit" not in repr(profile)


def test_libraries_that_read_files_are_said(tmp_path):
    """Where a library reads a file itself, what it reads is decoding, there is no limit, and the profile says both."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4_000.0).reshape(1_000, 4), chunks=(100, 4), compression="lzf")
    profile = open_shards(tmp_path / "a.h5", engine="numpy")[5:900].profile(limit=True)
    work = {each.name: each for each in profile.work}
    assert work["decode"].nbytes >= 895 * 32
    if profile.limit is None:
        assert "a library read files itself" in profile.note
    else:
        assert 0 < profile.bytes_read < (tmp_path / "a.h5").stat().st_size


def test_nothing_is_collected_elsewhere(made, monkeypatch):
    """A compute that nobody profiles makes no recorder and enters no stage, on any thread."""

    def refuse(*_, **__):
        raise AssertionError("a stage was recorded")

    monkeypatch.setattr(Recorder, "stage", refuse)
    monkeypatch.setattr(Recorder, "leaf", refuse)
    ds, whole = made
    assert_same(ds.compute(tiles_per_processor=3), whole)
    assert_same(ds[::3].astype("f8").map(lambda rows: rows).compute(), whole[::3].astype("f8"))
    assert carried(print) is print
    assert stage("read", 5) is stage("map")
    assert recording.recording() is None


def test_other_computes_are_not_mixed_in(made):
    """A compute that runs on another thread at the same time is not part of a profile."""
    ds, _ = made
    go, stop = threading.Event(), threading.Event()

    def others():
        go.set()
        while not stop.is_set():
            ds.compute()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(others)
        go.wait()
        try:
            for _ in range(10):
                assert ds[:8_000].profile().bytes_read == 8_000 * 256
        finally:
            stop.set()
        running.result()


def test_a_failed_compute_leaves_nothing_behind(made):
    """What goes wrong is raised as by compute(), and the next compute is not recorded."""
    ds, _ = made
    name = ds.shards[0].path
    with open(name, "r+b") as file:
        file.truncate(1_000)
    with pytest.raises(ShardReadError):
        ds.profile()
    assert recording.recording() is None


def test_reads_of_another_storage_are_seen(made):
    """Bytes are counted whatever the storage; only of files of this machine there is a limit."""
    from lazyshards.storage import LocalStorage

    class Far(LocalStorage):
        def local_path(self, path):
            return None

    profile = with_storage(made[0], Far())[10:30].profile(limit=True)
    assert profile.bytes_read == 20 * 256
    assert profile.limit is None
    assert "no limit" in profile.note


def test_nested_stages_do_not_count_twice():
    """What is recorded within a stage is not the outer stage's own time."""
    recorder = Recorder()
    with recorder.leaf(), stage("decode", 10), stage("read", 4):
        sum(range(300_000))
    seconds = {name: found[0] for name, found in recorder.found.items()}
    assert seconds["read"] > 10 * seconds["decode"]
    assert seconds["read"] > 10 * seconds["other"]
    assert recorder.found["decode"][1:] == (10, 1)


def test_profile_is_frozen(made):
    """A profile cannot be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        made[0][:5].profile().seconds = 1.0


def test_text_holds_the_numbers(made):
    """The text has the result, every stage with its time and share, and is printable, line by line."""
    profile = made[0].astype("f8")[5:9_000].profile(limit=True)
    text = repr(profile)
    assert text.splitlines()[0].startswith("<Profile of (8995, 64) float64, 4.4 MiB, on numpy in ")
    for name in ("plan", "allocate", "fill", "engine", "read", "convert", "other", "tiles", "limit"):
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name
    assert all(line.isprintable() for line in text.splitlines())
    assert f"{profile.requests:,}" in text


def test_html_is_well_formed(made):
    """The HTML is well-formed, has a line for each stage, and takes the colours of the notebook."""
    profile = made[0][::2, 3].profile(limit=True)
    html = profile._repr_html_()
    root = ET.fromstring(html)  # noqa: S314 (our own text)
    cells = ["".join(cell.itertext()) for cell in root.iter("td")]
    assert {"plan", "fill", "engine", "read", "convert", "other"} <= set(cells)
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b", html)
