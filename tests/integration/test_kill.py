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

KILLS = 6
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


EVERY_STEP = """
    import os, shutil, signal, sys, traceback
    from pathlib import Path

    import numpy as np
    import lazyshards
    from lazyshards.verify import verify

    STEPS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.truncate"}

    def killed_before(step, action):
        pid = os.fork()
        if pid:
            return os.waitpid(pid, 0)[1]
        left = [step]

        def hook(event, arguments):
            if event in STEPS:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def look(target):
        if not target.exists():
            return None
        ds = lazyshards.open_shards(target, manifest="require")
        assert verify(target, content=True).is_sound
        return ds.compute()

    def is_one_of(found, values):
        return any([found is value if value is None or found is None else np.array_equal(found, value)
                    for value in values])

    what, folder = sys.argv[1], Path(sys.argv[2])
    target, source = folder / "set", folder / "source"
    new = np.arange(30.0).reshape(10, 3)
    lazyshards.write_shards(new, source, rows_per_shard=3)

    if what == "write":
        old = None
        action = lambda: lazyshards.write_shards(new, target, rows_per_shard=4)
    elif what == "overwrite":
        old = np.arange(10.0).reshape(5, 2) + 100
        action = lambda: lazyshards.write_shards(new, target, rows_per_shard=4, overwrite=True)
    elif what == "convert":
        old = None
        ds = lazyshards.open_shards(source)
        action = lambda: lazyshards.write_shards(ds, target, rows_per_shard=4, format="raw")
    else:
        old = new
        action = lambda: lazyshards.open_shards(target, manifest="ignore").save_manifest()

    step, left = 0, 1
    while left:
        step += 1
        for path in (target, folder / ".set.lazyshards"):
            shutil.rmtree(path, ignore_errors=True)
        if old is not None:
            lazyshards.write_shards(old, target, rows_per_shard=2)
        left = killed_before(step, action)
        assert left in (0, signal.SIGKILL), f"step {step} ended with {left}"
        assert is_one_of(look(target), [old, new]), f"step {step} left {look(target)}"
        if left and what in ("write", "overwrite", "convert"):
            try:
                action()
            except FileExistsError:
                assert is_one_of(look(target), [new]), f"step {step}"
            assert not (folder / ".set.lazyshards").exists() or is_one_of(look(target), [new])
            assert is_one_of(look(target), [new]), f"step {step} was not finished by the next call"
        if left and what == "index":
            action()
            assert not [name for name in os.listdir(target) if name.startswith(".")]
    assert is_one_of(look(target), [new])
    print(step)
"""


@pytest.mark.parametrize("what", ["write", "overwrite", "convert", "index"])
def test_every_step(tmp_path, child, what):
    """Killed before any one of its steps in the file system, each command leaves the old or the new; the next ends."""
    steps = int(child(EVERY_STEP, what, tmp_path, LAZYSHARDS_ENGINE="numpy"))
    assert steps > (5 if what == "index" else 30)


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
            assert not target.exists()
        else:
            assert np.array_equal(ds.compute(), written(1))
            assert verify(target).is_sound
    lazyshards.write_shards(written(1), target, format=format, rows_per_shard=150, overwrite=True)
    assert np.array_equal(open_shards(target).compute(), written(1))
    assert not (tmp_path / ".set.lazyshards").exists()


@pytest.mark.parametrize("format", ["npy", "raw"])
def test_overwrite(tmp_path, format):
    """Killed at any moment, replacing a dataset leaves the old one or the new one, whole and with its manifest."""
    target = tmp_path / "set"
    lazyshards.write_shards(written(0), target, format="npy", rows_per_shard=333)
    child = Child(WRITE, 1, target, format)
    seconds = child.finish()
    child.kill()
    values = {0.0, 1.0}
    for i, moment in enumerate(moments(1.1 * seconds), 2):
        child = Child(WRITE, i, target, format)
        child.begin()
        pause(moment)
        child.kill()
        ds = open_shards(target, manifest="require")
        value = float(ds[0, 0].compute())
        values.add(float(i))
        assert value in values
        assert np.array_equal(ds.compute(), written(value))


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
    """Killed again and again, each time later, a conversion goes on where it was and ends."""
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
        pause(0.03 * (attempt + 1))
        child.kill()
        if (tmp_path / "target").exists():
            break
        counts.append(len(list(work.glob("shard_*"))) if work.exists() else 0)
    assert counts == sorted(counts)
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
