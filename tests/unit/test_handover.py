import os
import pickle
import zlib
from dataclasses import replace

import numpy as np
import pytest

import lazyshards
from lazyshards.engines import handover, ranks
from lazyshards.errors import ShardsNotFoundError

GIVEN = {"storage_options": None, "on_change": "raise"}


def offer(layout, path):
    """Return what rank 0 would say of a layout."""
    return handover._Offer(handover._place(str(path), GIVEN)[1], handover._pack(layout))


@pytest.fixture
def layout(write, tmp_path):
    """Give the layout of a few shards."""
    write([3, 0, 4, 5], name="a")
    return lazyshards.open_shards(tmp_path / "a", engine="numpy")._layout


def test_handed_over_whole(layout, tmp_path):
    """A layout that was handed over equals the one that was found, with a storage of this rank's own."""
    taken = handover._take(offer(layout, tmp_path / "a"), str(tmp_path / "a"), {**GIVEN, "on_change": "warn"})
    assert taken == layout
    assert taken.fingerprint == layout.fingerprint
    assert (taken.stamps == layout.stamps).all()
    assert taken.storage.on_change == "warn"


def test_storage_is_not_handed_over(layout):
    """What one rank opened its storage with, such as a key, is not among what it says."""
    packed = handover._pack(layout)
    assert b"Storage" not in zlib.decompress(packed)
    assert b"Storage" in pickle.dumps(layout)


def test_another_path_is_not_taken(layout, tmp_path):
    """A rank that was given another path does not take the layout."""
    assert handover._take(offer(layout, tmp_path / "a"), str(tmp_path / "b"), GIVEN) is None


@pytest.mark.parametrize("harm", ["gone", "longer", "touched", "replaced"])
def test_other_files_are_not_taken(layout, tmp_path, harm):
    """A rank for which a shard is another file does not take the layout."""
    said, path = offer(layout, tmp_path / "a"), layout.path(2)
    if harm == "gone":
        os.remove(path)
    elif harm == "longer":
        with open(path, "ab") as file:
            file.write(b"x")
    elif harm == "touched":
        os.utime(path, ns=(1, 1))
    else:
        os.rename(path, f"{path}.old")
        with open(f"{path}.old", "rb") as file, open(path, "wb") as other:
            other.write(file.read())
        status = os.stat(f"{path}.old")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert handover._take(said, str(tmp_path / "a"), GIVEN) is None


@pytest.mark.parametrize("format", ["hdf5", "parquet", "arrow", "zarr", "raw", "npy", "hdf5 datasets"])
def test_every_format_is_handed_over(tmp_path, format):
    """Whatever has the stamp of a shard, a file, a part of one or the metadata of a store, is known again."""
    path, options = str(tmp_path / "set"), {}
    if format == "hdf5 datasets":
        h5py = pytest.importorskip("h5py")
        path, options = f"{path}.h5", {"dataset": "part_*"}
        with h5py.File(path, "w") as file:
            for i in range(3):
                file[f"part_{i}"] = np.arange(12.0).reshape(4, 3) + i
    else:
        lazyshards.write_shards(np.arange(60, dtype="f4").reshape(20, 3), path, format=format, rows_per_shard=7)
    layout = lazyshards.open_shards(path, engine="numpy", manifest="ignore", **options)._layout
    taken = handover._take(offer(layout, path), path, GIVEN)
    assert taken is not None
    assert taken.fingerprint == layout.fingerprint


class Stamps:
    """A storage of which only stamps are asked for, and which notes of what."""

    def __init__(self, layout):
        self.layout = layout
        self.asked = []

    def heads(self, paths, nbytes):
        """Return the stamps of the layout."""
        assert nbytes == 0
        numbers = [int(path[-8:-4]) for path in paths]
        self.asked.append(numbers)
        return [lazyshards.storage.Head(b"", self.layout.stamp(i)) for i in numbers]


@pytest.mark.parametrize(("total", "each"), [(2, 64), (256, 16), (4_096, 4)])
def test_ranks_look_at_different_shards(write, tmp_path, monkeypatch, total, each):
    """Each rank looks at few stamps, the first and the last among them, and the ranks together at more of them."""
    write([1], name="one")
    whole = lazyshards.open_shards(tmp_path / "one", engine="numpy")._layout
    count = 9_000
    layout = replace(
        whole,
        names=tuple(f"{i:04d}.npy" for i in range(count)),
        ends=np.arange(1, count + 1),
        stamps=np.repeat(whole.stamps, count, 0),
        offsets=np.repeat(whole.offsets, count),
    )
    storage = Stamps(layout)
    monkeypatch.setattr(ranks, "node_count", lambda: total)
    for rank in (0, 1, total - 1):
        monkeypatch.setattr(ranks, "node_id", lambda rank=rank: rank)
        assert handover._looks_alike(replace(layout, storage=storage))
    for numbers in storage.asked:
        assert len(numbers) <= each
        assert numbers[0] == 0
        assert numbers[-1] == count - 1
    assert set(storage.asked[0]) != set(storage.asked[2])


def test_one_process_scans(tmp_path, monkeypatch):
    """In one process nothing is said to anybody, and an error is the usual one."""
    monkeypatch.setattr(ranks, "from_first", lambda value: pytest.fail("somebody was told"))
    with pytest.raises(ShardsNotFoundError):
        handover.scan_together(tmp_path / "nothing", engine="numpy", manifest="auto")


@pytest.mark.parametrize("changed", [False, True])
def test_remote_files(changed):
    """Files behind a URL are known again, or not, by the stamps of their storage; options are each rank's own."""
    import fsspec

    fs = fsspec.filesystem("memory")
    for i in range(3):
        with fs.open(f"/handover/shard_{i}.npy", "wb") as file:
            np.save(file, np.arange(4) + i)
    url = "memory://handover"
    layout = lazyshards.open_shards(url, engine="numpy", storage_options={"skip_instance_cache": True})._layout
    said = offer(layout, url)
    if changed:
        with fs.open("/handover/shard_2.npy", "wb") as file:
            np.save(file, np.arange(5))
    taken = handover._take(said, url, GIVEN)
    fs.rm("/handover", recursive=True)
    assert (taken is None) is changed
    if not changed:
        assert taken.fingerprint == layout.fingerprint
        assert "skip_instance_cache" not in repr(taken.storage)
