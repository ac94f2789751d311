import re

import numpy as np
import pytest

from lazyshards import ShardedDataset, hints, open_shards
from lazyshards.testing import RecordingStorage, assert_same, with_storage, write_npy_shards

WHOLE = np.arange(30.0).reshape(10, 3)


@pytest.fixture
def ds(tmp_path):
    """Open ten rows in two shards."""
    write_npy_shards(tmp_path / "set", np.split(WHOLE, [4]))
    return open_shards(tmp_path / "set", engine="numpy")


@pytest.mark.parametrize("name", hints._HINTS)
def test_what_arrays_have_is_named(ds, name):
    """Asking for what arrays have, and a dataset has not, says what to do instead, by names that there are."""
    assert not hasattr(ShardedDataset, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': ") as caught:
        getattr(ds, name)
    assert caught.value.name == name
    for called in re.findall(r"(?<![\w.])([a-z_]+)\(", str(caught.value)):
        assert hasattr(ShardedDataset, called) or called in {"float", "int"}


def test_other_names_have_no_hint(ds):
    """Other names are missed as of any object."""
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = ds.nonsense
    assert getattr(ds, "_repr_png_", None) is None


def test_numpy_functions_are_not_misled(ds):
    """Functions of NumPy that ask for a method first work on the array, as before."""
    assert_same(np.transpose(ds), WHOLE.T)
    assert_same(np.reshape(ds, (5, 6)), WHOLE.reshape(5, 6))


def test_contains_reads_until_it_is_found(tmp_path):
    """Whether an element is there is what NumPy says."""
    write_npy_shards(tmp_path / "set", np.split(WHOLE, [4]))
    ds = open_shards(tmp_path / "set", engine="numpy")
    assert 29 in ds
    assert 30 not in ds
    assert 4 in ds[:, 1]
    assert 5 not in ds[:, 1]
    assert np.full(1, np.nan)[0] not in ds


def test_contains_stops(tmp_path, monkeypatch):
    """Nothing is read behind the blocks among which it was found."""
    monkeypatch.setattr("lazyshards.reductions.blocks.FAR_RUN_NBYTES", 1 << 16)
    monkeypatch.setattr("lazyshards.reductions.blocks.BLOCK_ELEMENTS", 1 << 12)
    write_npy_shards(tmp_path / "set", [np.arange(2_000_000.0)])
    ds = open_shards(tmp_path / "set", engine="numpy")
    storage = RecordingStorage(ds._layout.storage)
    assert 5 in with_storage(ds, storage)
    assert storage.nbytes < ds.nbytes


def test_a_dataset_gives_its_elements_to_others(ds):
    """What takes arrays by DLPack gets them, in memory of its own."""
    found = np.from_dlpack(ds[2:5])
    assert_same(found, WHOLE[2:5])
