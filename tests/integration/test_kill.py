"""What is on disk after SIGKILL in the middle of index, write_shards and convert: the old or the new, never half."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import lazyshards
from lazyshards import open_shards
from lazyshards.errors import ShardsNotFoundError
from lazyshards.manifest import NAME
from lazyshards.testing import write_npy_shards
from lazyshards.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_numpy")]

KILLS = 25
ROWS = 4_000


class Child:
    """A Python process that runs code again and again for each line it is sent, until it is killed."""

    def __init__(self, code, *arguments):
        root = Path(lazyshards.__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(root), "LAZYSHARDS_ENGINE": "numpy"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def begin(self):
        """Let it begin."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def kill(self):
        """Kill it, and return whether it had ended before."""
        os.kill(self._process.pid, signal.SIGKILL)
        left = self._process.stdout.read()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        return left == "done\n"

    def finish(self):
        """Wait until it is done and return the seconds that took."""
        start = time.perf_counter()
        self.begin()
        assert self._process.stdout.readline() == "done\n"
        return time.perf_counter() - start


def moments(seconds):
    """Yield pauses spread over a time, in an order that is always the same."""
    generator = random.Random(4)
    return [seconds * (i + generator.random()) / KILLS for i in range(KILLS)]


def pause(seconds):
    """Wait without sleeping: the time between two system calls is what is probed."""
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        os.sched_yield()


WRITE = """
    import sys
    import numpy as np, lazyshards
    value, path, format = float(sys.argv[1]), sys.argv[2], sys.argv[3]
    rows = np.arange(4_000 * 8, dtype="f4").reshape(4_000, 8) + np.float32(value)
    lazyshards.write_shards(np.zeros(3), path + "-warm", format=format, overwrite=True)
    print("ready", flush=True)
    sys.stdin.readline()
    lazyshards.write_shards(rows, path, format=format, rows_per_shard=150, overwrite=True)
    print("done", flush=True)
"""


def written(value):
    """Return the rows that the child writes for a value."""
    return np.arange(ROWS * 8, dtype="f4").reshape(ROWS, 8) + np.float32(value)


@pytest.mark.parametrize("format", ["npy", "hdf5"])
def test_write_shards(tmp_path, format):
    """Killed at any moment, a first write leaves nothing or all; the next one ends well and leaves nothing else."""
    target = tmp_path / "set"
    child = Child(WRITE, 1, target, format)
    seconds = child.finish()
    child.kill()
    open_shards(target)
    found = {"nothing": 0, "all": 0}
    for moment in moments(1.1 * seconds):
        child = Child(WRITE, 1, target, format)
        for path in (target, tmp_path / ".set.lazyshards"):
            shutil.rmtree(path, ignore_errors=True)
        child.begin()
        pause(moment)
        child.kill()
        try:
            ds = open_shards(target)
        except ShardsNotFoundError:
            found["nothing"] += 1
        else:
            found["all"] += 1
            assert np.array_equal(ds.compute(), written(1))
            assert verify(target).is_sound
    lazyshards.write_shards(written(1), target, format=format, rows_per_shard=150, overwrite=True)
    assert np.array_equal(open_shards(target).compute(), written(1))
    assert not (tmp_path / ".set.lazyshards").exists()
    assert found["nothing"]


@pytest.mark.parametrize("format", ["npy", "raw"])
def test_overwrite(tmp_path, format):
    """Killed at any moment, replacing a dataset leaves the old one or the new one, whole and with its manifest."""
    target = tmp_path / "set"
    lazyshards.write_shards(written(0), target, format="npy", rows_per_shard=333)
    child = Child(WRITE, 1, target, format)
    seconds = child.finish()
    child.kill()
    values = {0.0, 1.0}
    seen = set()
    for i, moment in enumerate(moments(1.1 * seconds), 2):
        child = Child(WRITE, i, target, format)
        child.begin()
        pause(moment)
        child.kill()
        ds = open_shards(target, manifest="require")
        value = float(ds[0, 0].compute())
        values.add(float(i))
        assert value in values
        seen.add(value)
        assert np.array_equal(ds.compute(), written(value))
    assert len(seen) > 1


CONVERT = """
    import sys
    import numpy as np, lazyshards
    from lazyshards.cli import main
    print("ready", flush=True)
    sys.stdin.readline()
    assert main(["convert", sys.argv[1], sys.argv[2], "--rows-per-shard", "100", "--to", "parquet"]) == 0
    print("done", flush=True)
"""


def test_convert_is_resumed(tmp_path):
    """Killed again and again, each time a little later than the last, a conversion goes on where it was and ends."""
    rows = written(0)
    write_npy_shards(tmp_path / "source", np.array_split(rows, 7))
    child = Child(CONVERT, tmp_path / "source", tmp_path / "whole")
    child.begin()
    child._process.stdout.readline()
    child.kill()
    work = tmp_path / ".target.lazyshards" / "data"
    counts = []
    for attempt in range(200):
        child = Child(CONVERT, tmp_path / "source", tmp_path / "target")
        child.begin()
        pause(0.03 + attempt * 0.002)
        child.kill()
        if (tmp_path / "target").exists():
            break
        counts.append(len(list(work.glob("shard_*"))) if work.exists() else 0)
    assert counts == sorted(counts)
    assert max(counts) > 0
    assert np.array_equal(open_shards(tmp_path / "target").compute(), rows)
    assert verify(tmp_path / "target", content=True).is_sound
    whole = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == whole


INDEX = """
    import sys
    import lazyshards
    ds = lazyshards.open_shards(sys.argv[1], manifest="ignore")
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        ds.save_manifest()
"""


def test_index(tmp_path):
    """Killed at any moment, writing a manifest over another leaves one that is whole and fresh."""
    write_npy_shards(tmp_path, [np.full(3, i) for i in range(200)])
    ds = open_shards(tmp_path)
    ds.save_manifest()
    size = (tmp_path / NAME).stat().st_size
    for moment in moments(0.1):
        child = Child(INDEX, tmp_path)
        child.begin()
        pause(moment)
        child.kill()
        assert (tmp_path / NAME).stat().st_size == size
        assert open_shards(tmp_path, manifest="require") == ds
    ds.save_manifest()
    assert len(list(tmp_path.iterdir())) == 201


def test_two_indexers(tmp_path):
    """Two processes that index the same directory at a time leave one whole manifest, and no other file."""
    write_npy_shards(tmp_path, [np.full(3, i) for i in range(50)])
    children = [Child(INDEX, tmp_path) for _ in range(2)]
    for child in children:
        child.begin()
    ds = open_shards(tmp_path, manifest="ignore")
    for _ in range(30):
        assert (tmp_path / NAME).exists() is False or open_shards(tmp_path, manifest="require") == ds
        pause(0.005)
    for child in children:
        child.kill()
    ds.save_manifest()
    assert open_shards(tmp_path, manifest="require") == ds
    assert len(list(tmp_path.iterdir())) == 51
