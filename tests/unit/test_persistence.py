import copy
import gc
import json
import os
import pickle
import shutil

import numpy as np
import pytest

import lazyshards
from lazyshards import open_shards
from lazyshards.errors import FormatError, LayoutError, ShardReadError
from lazyshards.storage import LocalStorage
from lazyshards.testing import RaisingStorage, RecordingStorage, assert_same, with_storage, write_npy_shards
from lazyshards.writers import local_work

WHOLE = np.arange(-45, 45, dtype="i2").reshape(30, 3)


@pytest.fixture
def ds(tmp_path):
    """Open thirty rows in four shards."""
    write_npy_shards(tmp_path / "set", np.split(WHOLE, [9, 9, 20]))
    return open_shards(tmp_path / "set", engine="numpy")


INDICES = (
    slice(None),
    slice(3, 20, 2),
    slice(None, None, -1),
    (slice(None), slice(None, None, -2)),
    (slice(2, 9), 1),
    [5, 1, 1, 29],
    ([7, 3] * 20, slice(1, None)),
    np.arange(30) % 3 == 0,
    4,
    (4, 2),
    slice(0),
)


@pytest.mark.parametrize("index", INDICES, ids=map(str, range(len(INDICES))))
def test_persisted_rows_are_the_rows(ds, engine, index):
    """Whatever is selected of a persisted dataset, cast or worked on, is NumPy's, on every engine."""
    kept = ds.persist()
    assert kept.engine == "numpy"
    assert_same(kept[index].compute(engine), WHOLE[index])
    assert_same(kept[index].astype("f8").compute(engine), WHOLE[index].astype("f8"))
    assert_same((kept * 2 + 0.5)[index].compute(engine), (WHOLE * 2 + 0.5)[index])
    assert_same(ds[index].persist().compute(engine), WHOLE[index])


def test_disk_is_read_once(ds):
    """Persisting reads each byte once; all that follows reads nothing on disk."""
    storage = RecordingStorage(LocalStorage())
    kept = with_storage(ds, storage).persist()
    assert sum(nbytes for _, _, nbytes in storage.reads) == WHOLE.nbytes
    storage.reads.clear()
    for path in {shard.path for shard in ds.shards}:
        os.unlink(path)
    assert_same(kept[4:9].compute(), WHOLE[4:9])
    assert_same(np.concatenate(list(kept.batches(7))), WHOLE)
    shuffled = np.concatenate(list(kept.batches(7, shuffle=True, seed=1)))
    assert_same(shuffled[np.argsort(shuffled[:, 0])], WHOLE)
    plan = kept[4:9, :2].plan()
    assert (plan.bytes_read, plan.requests, plan.scratch_nbytes) == (5 * 2 * 2, 1, 0)
    assert not storage.reads
    assert kept.persist().shape == kept.shape


def test_work_is_done_once(ds):
    """What functions make of the rows is kept, and not made again."""
    calls = []
    kept = ds.map(lambda rows: calls.append(len(rows)) or rows + 1).persist()
    before = len(calls)
    assert_same(kept.compute(), WHOLE + 1)
    assert len(calls) == before


def test_results_are_ones_own(ds):
    """Writing to what was computed of a persisted dataset changes nothing that is kept."""
    kept = ds.persist()
    for index in (slice(None), slice(2, 5), [1, 2], 3):
        kept[index].compute()[...] = 0
    assert_same(kept.compute(), WHOLE)


def test_persisted_shows_and_knows_itself(ds):
    """A persisted dataset says so, differs from what it was made of, and equals itself."""
    kept = ds[2:].persist()
    assert "persisted: in the memory of this process, computed from 4 npy shards" in repr(kept)
    assert repr(kept).startswith("<ShardedDataset (28, 3) int16, 168 B, in memory, engine numpy>\n")
    assert len(repr(kept).splitlines()) == 3
    assert "persisted: " in kept._repr_html_()
    assert "shards</th>" not in kept._repr_html_()
    assert kept.format == "memory"
    assert kept != ds[2:]
    assert kept == kept[:]
    assert kept.fingerprint == ds[2:].persist().fingerprint != ds[1:].persist().fingerprint
    kept.explain()
    with pytest.raises(LayoutError, match="persisted"):
        kept.save_manifest()


def test_the_engine_of_a_persisted_dataset(ds):
    """The engine is that of the dataset, or the one that was asked for."""
    assert ds.persist().engine == "numpy"
    with pytest.raises(ValueError, match="nonsense"):
        ds.persist("nonsense")


def test_persisted_travels_within_its_process(ds, child, tmp_path):
    """Pickled, it is found where it is kept while it lives, and refused elsewhere and later."""
    kept = ds.persist()
    data = pickle.dumps(kept)
    assert len(data) < 10_000
    again = pickle.loads(data)  # noqa: S301  # our own
    assert_same(again.compute(), WHOLE)
    (tmp_path / "kept").write_bytes(data)
    out = child(
        """
        import pickle, sys
        try:
            pickle.loads(open(sys.argv[1], "rb").read())
        except Exception as exc:
            print(type(exc).__name__, exc)
        """,
        tmp_path / "kept",
    )
    assert "FormatError" in out
    assert "cache(path)" in out
    del kept
    with pytest.raises(ShardReadError, match="gone"):
        again.compute()
    with pytest.raises(FormatError):
        pickle.loads(data)  # noqa: S301  # our own


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda kept: kept[:]], ids=["copy", "deepcopy", "slice"])
def test_copies_keep_what_was_persisted(ds, copied):
    """A copy of a persisted dataset keeps its rows as well, and shares their memory."""
    kept = ds.persist()
    again = copied(kept)
    assert again == kept
    assert again._layout.storage.array is kept._layout.storage.array
    del kept
    gc.collect()
    assert_same(again.compute(), WHOLE)


def test_persisted_joins_others(ds):
    """A persisted dataset is one of those that concat() and zip_shards() take."""
    kept, other = ds[:5].persist(), ds[7:9].persist()
    assert_same(lazyshards.concat([kept, ds[5:], other])[2:32].compute(), np.concatenate([WHOLE, WHOLE[7:9]])[2:32])
    joined = lazyshards.concat([kept, other])
    assert_same(joined[[6, 0, 5, 1, 2, 2, 2, 2, 3, 4]].compute(), joined.compute()[[6, 0, 5, 1, 2, 2, 2, 2, 3, 4]])
    assert_same(lazyshards.zip_shards(x=kept, y=ds[:5])[1:3].compute()["x"], WHOLE[1:3])


def test_other_dtypes(tmp_path):
    """Rows of any dtype, and without elements, are kept."""
    for i, array in enumerate((np.array(["a", "bc"]), np.zeros((0, 4)), np.zeros((3, 0)), np.array([1, 2], "M8[s]"))):
        write_npy_shards(tmp_path / str(i), [array])
        assert_same(open_shards(tmp_path / str(i), engine="numpy").persist().compute(), array)


# cache -----------------------------------------------------------------------------------------------------------


def test_cache_writes_once(ds, tmp_path, monkeypatch):
    """The first call writes shards that hold the rows; the next opens them and reads nothing else."""
    lazy = (ds - 1)[:, ::-1] / 2
    cached = lazy.cache(tmp_path / "cache", rows_per_shard=8)
    assert_same(cached.compute(), ((WHOLE - 1)[:, ::-1]) / 2)
    assert [shard.rows for shard in cached.shards] == [8, 8, 8, 6]
    assert f"cached: as npy shards in '{tmp_path}/cache', computed from 4 npy shards" in " ".join(repr(cached).split())
    monkeypatch.setattr("lazyshards.persistence.write_sealed", None)
    again = with_storage((ds - 1)[:, ::-1] / 2, RaisingStorage()).cache(tmp_path / "cache", rows_per_shard=8)
    assert again == cached
    assert_same(again[3:9].compute(), cached[3:9].compute())
    assert_same(open_shards(tmp_path / "cache", engine="numpy").compute(), cached.compute())


def test_cache_of_another_dataset(ds, tmp_path):
    """What was made of another dataset, or in another way, is refused, and replaced only if that is asked for."""
    ds.cache(tmp_path / "cache")
    with pytest.raises(FileExistsError, match=r"another dataset.*overwrite=True"):
        ds[1:].cache(tmp_path / "cache")
    with pytest.raises(FileExistsError, match="another dataset"):
        (ds + 1).cache(tmp_path / "cache")
    with pytest.raises(FileExistsError, match=r"in another way.*raw"):
        ds.cache(tmp_path / "cache", "raw")
    assert_same(ds.cache(tmp_path / "cache").compute(), WHOLE)
    assert_same((ds + 1).cache(tmp_path / "cache", overwrite=True).compute(), WHOLE + 1)
    with pytest.raises(FileExistsError, match="another dataset"):
        ds.cache(tmp_path / "cache")


def test_cache_of_files_that_changed(ds, tmp_path):
    """A shard of the same size that was written since makes the cache another's."""
    ds.cache(tmp_path / "cache")
    path = ds.shards[0].path
    np.save(path, np.load(path)[::-1])
    changed = open_shards(tmp_path / "set", engine="numpy")
    assert changed.fingerprint == ds.fingerprint
    with pytest.raises(FileExistsError, match="changed since"):
        changed.cache(tmp_path / "cache")


@pytest.mark.parametrize("format", ["npy", "zarr"])
@pytest.mark.parametrize("change", ["replaced", "touched", "added"])
def test_cached_files_that_changed(ds, tmp_path, format, change):
    """Cached files that are not those that were written, of the same size or not, are refused until overwritten."""
    place = tmp_path / "cache"
    ds.cache(place, format)
    file = max(path for path in place.rglob("*") if path.is_file() and path.name != ".lazyshards-cache.json")
    before = file.stat()
    if change == "replaced":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink()
        file.write_bytes(content)
    elif change == "touched":
        os.utime(file, ns=(0, before.st_mtime_ns + 1_000_000_000))
    else:
        shutil.copy(file, file.with_name(f"more{file.suffix}"))
    with pytest.raises(FileExistsError, match="own files changed"):
        ds.cache(place, format)
    assert_same(ds.cache(place, format, overwrite=True).compute(), WHOLE)
    assert_same(ds.cache(place, format).compute(), WHOLE)


def test_a_manifest_is_no_change_of_a_cache(ds, tmp_path):
    """A cache of which a manifest was saved is the same cache."""
    ds.cache(tmp_path / "cache").save_manifest()
    assert_same(ds.cache(tmp_path / "cache").compute(), WHOLE)


def test_what_is_no_cache(ds, tmp_path):
    """Files that no cache() call wrote, and a mark that is damaged, are refused; so are a row, and what is no path."""
    with pytest.raises(FileExistsError, match="not known to be a cache"):
        ds.cache(tmp_path / "set")
    ds.cache(tmp_path / "cache")
    (tmp_path / "cache" / ".lazyshards-cache.json").write_text("[1")
    with pytest.raises(FileExistsError, match="cannot be read"):
        ds.cache(tmp_path / "cache")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="it is a file"):
        ds.cache(tmp_path / "file")
    with pytest.raises(TypeError, match="single row"):
        ds[2].cache(tmp_path / "row")
    with pytest.raises(TypeError, match="directory"):
        ds.cache(3)
    with pytest.raises(ValueError, match="URL"):
        ds.cache("s3://bucket/cache")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_cache_appears_with_its_mark(ds, tmp_path, monkeypatch, moment):
    """Cut off just before or after its directory gets its name, a cache is made, or found, by the next call."""

    def put(data, place, *, overwrite):
        if moment == "after":
            really(data, place, overwrite=overwrite)
        raise KeyboardInterrupt

    really = local_work._put
    monkeypatch.setattr(local_work, "_put", put)
    with pytest.raises(KeyboardInterrupt):
        ds.cache(tmp_path / "cache")
    assert (tmp_path / "cache").exists() == (moment == "after")
    monkeypatch.setattr(local_work, "_put", really)
    assert_same(ds.cache(tmp_path / "cache").compute(), WHOLE)
    monkeypatch.setattr("lazyshards.persistence.write_sealed", None)
    assert_same(ds.cache(tmp_path / "cache").compute(), WHOLE)


def test_an_interrupted_cache_goes_on(ds, tmp_path):
    """Shards that a call finished before it failed are not computed again."""
    seen, limit = set(), 5

    def picky(rows):
        seen.update(rows[:, 0].tolist())
        if len(seen) > limit:
            raise RuntimeError("interrupted")
        return rows

    worked = ds.map(picky)
    with pytest.raises(lazyshards.MapError, match="interrupted"):
        worked.cache(tmp_path / "cache", rows_per_shard=1)
    assert not (tmp_path / "cache").exists()
    seen.clear()
    limit = 30
    cached = worked.cache(tmp_path / "cache", rows_per_shard=1)
    assert_same(cached.compute(), WHOLE)
    assert seen == set(WHOLE[5:, 0].tolist())


@pytest.mark.parametrize("format", ["npy", "raw", "hdf5", "parquet", "arrow", "zarr"])
def test_cache_in_every_format(ds, tmp_path, format):
    """Whatever the format, the rows are those that were computed."""
    for name in {"hdf5": ["h5py"], "parquet": ["pyarrow"], "arrow": ["pyarrow"], "zarr": ["zarr"]}.get(format, []):
        pytest.importorskip(name)
    cached = ds.astype("f4").cache(tmp_path / "cache", format)
    assert_same(cached.compute(), WHOLE.astype("f4"))
    assert ds.astype("f4").cache(tmp_path / "cache", format) == cached


def test_the_mark_says_what_it_is(ds, tmp_path):
    """The file beside the shards holds the fingerprint of what was cached."""
    ds.cache(tmp_path / "cache")
    mark = json.loads((tmp_path / "cache" / ".lazyshards-cache.json").read_text())
    assert mark["fingerprint"] == ds.fingerprint
