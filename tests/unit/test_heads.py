import os

import pytest

from lazyshards import native
from lazyshards.storage import heads
from lazyshards.storage.heads import read_heads

needs_library = pytest.mark.skipif(native.find_library() is None, reason="the C library was not built")


@pytest.fixture
def odd_paths(tmp_path):
    """Return paths of every kind, each of which is read or is an error of its own."""
    (tmp_path / "long").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "a\nname \u20ac").write_bytes(b"euro")
    with open(os.fsencode(tmp_path) + b"/\xff\xfe", "wb") as file:
        file.write(b"no utf-8")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("long")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "directory").mkdir()
    names = ["long", "short", "missing", "empty", "pipe", "a\nname \u20ac", "link", "loop", "directory", "long/below"]
    return [
        *[f"{tmp_path}/{name}" for name in names],
        os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"),
        "",
        "x" * 5000,
    ]


def same(one, other):
    """Assert that two heads are equal, errors by their number."""
    assert (one.data, one.stamp) == (other.data, other.stamp)
    assert getattr(one.error, "errno", None) == getattr(other.error, "errno", None)


@needs_library
@pytest.mark.parametrize("nbytes", [0, 1, 64, 4096])
def test_the_library_reads_what_python_reads(odd_paths, nbytes):
    """Bytes, stamps and errors are the same either way, whatever the paths are."""
    found = heads._read_by_library(odd_paths, nbytes)
    expected = heads._read_by_python(odd_paths, nbytes)
    assert len(found) == len(odd_paths)
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@needs_library
@pytest.mark.parametrize("name", ["with\0null", "\ud800"])
def test_names_that_are_none(odd_paths, name):
    """A name that no file can have is an error of its own, and the others are read."""
    found = heads._read_by_library([*odd_paths, name], 8)
    same(found[0], heads._read_by_python(odd_paths[:1], 8)[0])
    assert "not a path" in str(found[-1].error)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("library", [pytest.param(True, marks=needs_library), False])
def test_many_keep_their_order(tmp_path, monkeypatch, slow, library):
    """However many threads read, the heads come in the order of the paths."""
    paths = [str(tmp_path / f"{i}") for i in range(1_100)]
    for path in paths:
        with open(path, "w") as file:
            file.write(path[-6:])
    if slow:
        monkeypatch.setattr(heads, "_SLOW_SECONDS", 0)
    if not library:
        monkeypatch.setattr(heads, "find_library", lambda: None)
    found = read_heads(paths, 64)
    assert [head.data.decode() for head in found] == [path[-6:] for path in paths]
    monkeypatch.setattr(heads, "_MOST_NBYTES", 64 * 7)
    assert read_heads(paths, 64) == found
    assert read_heads([], 64) == []
