import json

import fsspec
import numpy as np
import pytest

from lazyshards import open_shards, unfinished, write_shards
from lazyshards.errors import LayoutError
from lazyshards.testing import assert_same, npy_bytes

pytestmark = pytest.mark.usefixtures("on_numpy")

OLD, NEW = np.arange(6.0), np.arange(10.0) + 50


@pytest.fixture
def place(tmp_path):
    """Give a file system and a directory in it with a dataset and another one that is to replace it."""
    fs = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}"
    write_shards(OLD, f"memory:/{root}/set", rows_per_shard=3)
    for i, rows in enumerate(np.split(NEW, 2)):
        fs.pipe(f"{root}/set/{unfinished.tagged(i, '.npy', 'r0a1b2c3d')}", npy_bytes(rows))
    yield fs, f"{root}/set"
    fs.rm(root, recursive=True)


def mark(fs, root, **fields):
    """Write the file that says what is going on."""
    fs.pipe(f"{root}/{unfinished.NAME}", json.dumps({"writer": "a1", **fields, "wanted": {}}).encode())


@pytest.mark.parametrize(("step", "rows"), [("old", OLD), ("new", NEW)])
def test_which_shards_are_the_dataset(place, step, rows):
    """While a dataset is replaced it is the old one or the new one, as the file says, and never both."""
    fs, root = place
    mark(fs, root, tag="r0a1b2c3d", old="", step=step)
    assert_same(open_shards(f"memory:/{root}").compute(), rows)


def test_the_manifest_is_the_step(place):
    """Once the manifest names the new shards they are the dataset, whatever the file says."""
    fs, root = place
    new = [f"memory:/{root}/{unfinished.tagged(i, '.npy', 'r0a1b2c3d')}" for i in range(2)]
    mark(fs, root, tag="r0a1b2c3d", old="", step="old")
    fs.rm(f"{root}/_lazyshards.arrow")
    assert_same(open_shards(f"memory:/{root}").compute(), OLD)
    open_shards(new).save_manifest()
    assert_same(open_shards(f"memory:/{root}", manifest="require").compute(), NEW)
    fs.pipe(f"{root}/_lazyshards.arrow", b"ARROW1 cut off")
    assert_same(open_shards(f"memory:/{root}").compute(), OLD)


@pytest.mark.parametrize("fields", [{}, {"tag": "", "old": "", "step": ""}, {"tag": "r0", "old": "", "step": "closed"}])
def test_nothing_can_be_opened(place, fields):
    """Of a first dataset, and for the moment that raw shards need, nothing is opened."""
    fs, root = place
    mark(fs, root, **fields)
    with pytest.raises(LayoutError, match="is being written, or was when that was cut off"):
        open_shards(f"memory:/{root}")


def test_tags():
    """The tag in a name is that which was put there, and names of others have none."""
    tag = unfinished.begun("").tag
    assert unfinished.tag_of(unfinished.tagged(7, ".zarr", tag)) == tag
    for name in ("shard_00007.npy", "shard_1.r12.npy", "part.r0a1b2c3d.npy", "shard_1.x0a1b2c3d.npy", ""):
        assert unfinished.tag_of(name) == ""
    assert unfinished.parse(b"") == unfinished.parse(b'{"writer": "a", "wanted": 1}') == unfinished.Replacement()
