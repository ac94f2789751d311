import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import ShardChangedError, ShardReadError, native, open_shards
from lazyshards.storage import gather
from lazyshards.storage.base import Part, Stamp
from lazyshards.testing import assert_same, example_array, write_npy_shards

pytestmark = [
    pytest.mark.usefixtures("on_numpy"),
    pytest.mark.skipif(native.find_library() is None, reason="the C library was not built"),
]

LARGE = 4 << 20
"""Bytes from which a copy goes past the caches."""


def part_of(path, offset, nbytes, shift=0):
    """Return a part of the file as it is now, and the array it fills; its memory begins ``shift`` bytes off a page."""
    status = os.stat(path)
    out = np.full(nbytes + shift, 0xEE, np.uint8)[shift:]
    return Part(str(path), Stamp(status.st_size, status.st_mtime_ns, status.st_ino), offset, out.data), out


def read_once(path):
    """Let the file count as one that was read before."""
    assert not gather.copy_into(part_of(path, 0, 1)[0])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a file of 10 MB, and its bytes."""
    path = tmp_path_factory.mktemp("file") / "bytes"
    content = np.random.default_rng(0).integers(0, 256, 10_000_001, np.uint8)
    path.write_bytes(content.tobytes())
    read_once(path)
    return path, content


@given(
    offset=st.integers(0, 10_000_000),
    nbytes=st.one_of(st.integers(1, 9_000), st.integers(LARGE - 70, LARGE + 70), st.just(10_000_001)),
    shift=st.integers(0, 65),
)
@settings(max_examples=60, deadline=None)
def test_equal_to_the_file(file, offset, nbytes, shift):
    """Any stretch, small or large, to memory at any place, is what the file holds; beyond its end nothing is copied."""
    path, content = file
    part, out = part_of(path, offset, nbytes, shift)
    if offset + nbytes > len(content):
        assert not gather.copy_into(part)
    else:
        assert gather.copy_into(part)
        np.testing.assert_array_equal(out, content[offset : offset + nbytes])


def test_offsets_that_no_file_has(file):
    """An offset that would wrap around in 64 bits is refused."""
    path, _ = file
    for offset in (-1, 1 << 63, (1 << 64) + 5):
        part, _ = part_of(path, 0, 8)
        assert not gather.copy_into(part._replace(offset=offset))


def test_the_second_read_comes_from_the_map(tmp_path, monkeypatch):
    """A file is read by position first, and copied out of its map from then on."""
    whole = example_array((3_000, 4), "f4")
    write_npy_shards(tmp_path / "set", [whole])
    ds, calls = open_shards(tmp_path / "set"), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(given) or preadv(*given))
    for _ in range(3):
        assert_same(ds[100:2_900].compute(), whole[100:2_900])
    assert len(calls) == 1


def test_what_is_not_in_memory_is_read(tmp_path, monkeypatch):
    """Bytes that are not in the page cache are read by position: page faults would fetch them one by one."""
    whole = example_array((300_000,), "f8")
    (path,) = write_npy_shards(tmp_path / "set", [whole])
    ds = open_shards(tmp_path / "set")
    for _ in range(2):
        ds.compute()
    gather._maps.clear()  # pages that are mapped are not dropped
    with open(path, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(given) or preadv(*given))
    assert_same(ds.compute(), whole)
    assert calls


def test_a_change_is_seen(tmp_path):
    """A file that was written to, replaced or removed since it was mapped is the error that it always was."""
    whole = example_array((1_000,), "i4")
    for change, error in ((_touch, ShardChangedError), (_replace, ShardChangedError), (os.unlink, ShardReadError)):
        (path,) = write_npy_shards(tmp_path / change.__name__, [whole])
        ds = open_shards(path)
        for _ in range(2):
            assert_same(ds.compute(), whole)
        change(path)
        with pytest.raises(error, match=os.path.basename(path)):
            ds.compute()


def _touch(path):
    os.utime(path, ns=(1, 1))


def _replace(path):
    with open(path, "rb") as before:
        content = before.read()
    with open(f"{path}.new", "wb") as after:
        after.write(content)
    os.utime(f"{path}.new", ns=(os.stat(path).st_mtime_ns,) * 2)
    os.replace(f"{path}.new", path)


def test_who_cannot_ask_reads(tmp_path):
    """Where the kernel does not say what is in memory, since the file is another's, it is read by position."""
    path = tmp_path / "theirs"
    path.write_bytes(bytes(100))
    read_once(path)
    gather.copy_into(part_of(path, 0, 10)[0])
    gather._maps[str(path)].tells = False
    assert not gather.copy_into(part_of(path, 0, 10)[0])


def test_a_file_that_shrinks_does_not_kill(tmp_path):
    """A mapped file that is cut short while its dataset is used is an error that names it, not a SIGBUS."""
    script = textwrap.dedent(
        """
        import os, sys
        import numpy as np
        import lazyshards
        np.save("s_0.npy", np.arange(100_000.0))
        ds = lazyshards.open_shards("s_0.npy", engine="numpy")
        for _ in range(3):
            assert ds[5:90_000].compute()[-1] == 89_999
        os.truncate("s_0.npy", 4096)
        try:
            ds[50_000:].compute()
        except lazyshards.ShardReadError as exc:
            assert "s_0.npy" in str(exc)
            print("named")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "named\n"), done.stderr
