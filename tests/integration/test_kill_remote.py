"""What is in a bucket after SIGKILL at any request of index, write_shards and convert: the old or the new, never half.

There is nothing of this kind for memory://, which ends with the process that is killed.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import lazyshards
from lazyshards import open_shards, write_shards
from lazyshards.errors import LayoutError, ShardsNotFoundError
from lazyshards.manifest import NAME
from lazyshards.testing import npy_bytes
from lazyshards.verify import verify
from tests.servers import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.usefixtures("on_numpy")]
pytest.importorskip("moto", reason="moto is not installed: no S3 server")
pytest.importorskip("s3fs", reason="s3fs is not installed: no S3")

OLD = np.arange(10.0).reshape(5, 2) + 100
NEW = np.arange(30.0).reshape(10, 3)
BUCKET = "killed"
URL = f"s3://{BUCKET}/set"

DRIVER = """
    import contextlib, json, os, signal, sys, traceback

    import numpy as np
    import lazyshards, lazyshards.storage.remote, lazyshards.writers.remote_work
    import s3fs
    from lazyshards.cli import main

    what, url, source, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    new = np.arange(30.0).reshape(10, 3)

    def act():
        if what == "index":
            lazyshards.open_shards(url, manifest="ignore", storage_options=options).save_manifest()
        elif what == "convert":
            with contextlib.redirect_stdout(sys.stderr):
                assert main(["convert", source, url, "--rows-per-shard", "4", "--overwrite"]) == 0
        else:
            format = what.partition(" ")[2] or "npy"
            lazyshards.write_shards(
                new, url, format=format, rows_per_shard=4, overwrite="overwrite" in what, storage_options=options
            )

    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            sys.stdin.readline()
            try:
                act()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
"""


class Driver:
    """A process that forks another one for each call, which is killed at a request or ends."""

    def __init__(self, server, what, source):
        import json

        root = Path(lazyshards.__file__).resolve().parents[1]
        login = {
            "AWS_ACCESS_KEY_ID": server.options["key"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret"],
            "AWS_ENDPOINT_URL": server.url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        command = [sys.executable, "-c", textwrap.dedent(DRIVER), what, URL, str(source), json.dumps(server.options)]
        self._server = server
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **login, "PYTHONPATH": str(root), "LAZYSHARDS_ENGINE": "numpy"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, step=-1, *, after=False):
        """Run it, killed at a request of that number, before it has an effect or after; return how it ended."""
        self._process.stdin.write("fork\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self._server.forget()
        self._server.fault = self._server.late = lambda seen, number: None

        def kill(seen, number):
            if number == step:
                os.kill(pid, signal.SIGKILL)
                return None if after else 500
            return None

        setattr(self._server, "late" if after else "fault", kill)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        self._server.fault = self._server.late = lambda seen, number: None
        return status


@pytest.fixture(scope="module")
def server():
    """Give an S3 server."""
    with S3Server() as made:
        made.put(BUCKET, {})
        yield made


def objects(server):
    """Return all objects in the bucket."""
    found = server.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {item["Key"]: server.client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in found}


def reset(server, files):
    """Put these objects in the place of all that are there."""
    for key in objects(server):
        server.client.delete_object(Bucket=BUCKET, Key=key)
    server.put(BUCKET, files)


def look(server):
    """Return the rows that are there, "nothing", or "unfinished"."""
    try:
        ds = open_shards(URL, storage_options=server.options)
    except ShardsNotFoundError:
        return "nothing"
    except LayoutError as exc:
        return "unfinished" if "call write_shards() for it again" in str(exc) else str(exc)
    assert verify(URL, storage_options=server.options).is_sound
    return ds.compute()


def is_one_of(found, expected):
    """Return whether what is there is one of these."""
    return any(isinstance(found, str) == isinstance(each, str) and np.array_equal(found, each) for each in expected)


CASES = {
    "write": ["nothing", "unfinished", NEW],
    "overwrite": [OLD, NEW],
    "overwrite zarr": [OLD, NEW],
    "overwrite raw": [OLD, "unfinished", NEW],
    "overwrite foreign": [OLD, NEW],
    "convert": [OLD, NEW],
    "index": [NEW],
}


def moments(requests):
    """Return requests, and whether each has its effect: some of all, and more of the last, where datasets change."""
    pairs = [(step, after) for step in range(requests) for after in (False, True)]
    return sorted({*pairs[::19], *pairs[-13::3], *pairs[-2:]})


@pytest.mark.parametrize("what", CASES)
def test_every_request(server, tmp_path, what):
    """Killed at any one of its requests, a command leaves the old or the new; the same call ends it and tidies up."""
    write_shards(NEW, tmp_path / "source", rows_per_shard=3)
    reset(server, {})
    if what == "overwrite foreign":  # written by others, without a manifest
        what, before = "overwrite", {f"set/part-{i}.npy": npy_bytes(OLD[2 * i : 2 * i + 2]) for i in range(3)}
        expected = CASES["overwrite"]
    else:
        expected = CASES[what]
        if what == "index":
            write_shards(NEW, URL, rows_per_shard=3, storage_options=server.options)
        elif what != "write":
            write_shards(OLD, URL, rows_per_shard=2, storage_options=server.options)
        before = objects(server)
    seen = set()
    with Driver(server, what, tmp_path / "source") as driver:
        assert driver.run() == 0
        requests = len(server.seen)
        count = len(objects(server))
        for step, after in moments(requests):
            reset(server, before)
            assert driver.run(step, after=after) == signal.SIGKILL
            found = look(server)
            assert is_one_of(found, expected), f"request {step} left {found}"
            seen.add(found if isinstance(found, str) else found.shape)
            assert driver.run() == 0 or what == "write"  # it had ended
            assert is_one_of(look(server), [NEW]), f"request {step} was not finished by the next call"
            names = objects(server)
            assert len(names) == count
            assert f"set/{NAME}" in names
    assert len(seen) >= min(2, len(expected))
    assert requests > (2 if what == "index" else 20)


def test_readers_while_a_dataset_is_replaced(server):
    """At each request of a call that replaces a dataset a reader sees the old one or the new one, whole."""
    reset(server, {})
    write_shards(OLD, URL, rows_per_shard=2, storage_options=server.options)
    shapes = []
    busy = []

    def look_meanwhile(seen, number):
        if not busy:
            busy.append(True)
            try:
                found = look(server)
                assert is_one_of(found, [OLD, NEW])
                shapes.append(found.shape)
            finally:
                busy.clear()

    server.fault = look_meanwhile
    try:
        write_shards(NEW, URL, rows_per_shard=4, overwrite=True, storage_options=server.options)
    finally:
        server.fault = lambda seen, number: None
    assert shapes == sorted(shapes, key=lambda shape: shape == NEW.shape)
    assert {OLD.shape, NEW.shape} == set(shapes)
    names = [shard.path.rpartition("/")[2] for shard in open_shards(URL, storage_options=server.options).shards]
    assert [name[:13] for name in names] == [f"shard_0000{i}.r" for i in range(3)]


def test_another_call_while_a_dataset_is_replaced(server):
    """A call for other rows, after one that was cut off, replaces the old ones; without overwrite nothing is."""

    class Failing:
        shape, dtype = NEW.shape, NEW.dtype

        def __getitem__(self, rows):
            if rows.start:
                raise RuntimeError("cut off")
            return NEW[rows]

    reset(server, {})
    write_shards(OLD, URL, rows_per_shard=2, storage_options=server.options)
    with pytest.raises(RuntimeError, match="cut off"):
        write_shards(Failing(), URL, rows_per_shard=4, overwrite=True, storage_options=server.options)
    assert is_one_of(look(server), [OLD])
    with pytest.raises(FileExistsError, match="pass overwrite=True to go on"):
        write_shards(NEW, URL, rows_per_shard=4, storage_options=server.options)
    assert is_one_of(look(server), [OLD])
    write_shards(NEW + 1, URL, rows_per_shard=5, overwrite=True, storage_options=server.options)
    assert is_one_of(look(server), [NEW + 1])
    assert len(objects(server)) == 2 + 1
