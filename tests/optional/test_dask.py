import pickle

import numpy as np
import pytest

da = pytest.importorskip("dask.array", reason="needs the dependency group `bench`")

from dask.base import tokenize  # noqa: E402  # only where dask is

from lazyshards import open_shards  # noqa: E402
from lazyshards.testing import RaisingStorage, RecordingStorage, assert_same, with_storage, write_npy_shards  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_numpy")

WHOLE = np.arange(400.0).reshape(100, 4)


@pytest.fixture
def ds(tmp_path):
    """Write a hundred rows in three shards."""
    write_npy_shards(tmp_path / "x", np.split(WHOLE, [30, 31]))
    return open_shards(tmp_path / "x")


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_blocks_are_the_rows(ds, scheduler):
    """A dask array has the dataset's shape, dtype and elements, in blocks of bounded size."""
    array = ds.to_dask(block_nbytes=1_000)
    assert isinstance(array, da.Array)
    assert (array.shape, array.dtype) == (ds.shape, ds.dtype)
    assert array.chunks == ((31, 31, 31, 7), (4,))
    assert_same(array.compute(scheduler=scheduler), WHOLE)
    assert_same((array[::-3, 1] + 1).compute(scheduler=scheduler), WHOLE[::-3, 1] + 1)
    assert_same(array[[5, 99, 5]].sum(axis=0).compute(scheduler=scheduler), WHOLE[[5, 99, 5]].sum(axis=0))


def test_a_block_is_a_tile(ds):
    """By default a block is a tile of the plan."""
    assert ds.to_dask().chunks[0] == tuple(tile.stop - tile.start for tile in ds.plan("numpy").tiles)


def test_only_touched_blocks_are_read(ds):
    """Making the array reads nothing, and computing a slice reads the blocks that it touches."""
    with_storage(ds, RaisingStorage()).to_dask()
    storage = RecordingStorage(ds._layout.storage)
    with_storage(ds, storage).to_dask(block_nbytes=320)[42:48].compute(scheduler="sync")
    assert storage.nbytes == 10 * 32


def test_token_is_deterministic(ds, child):
    """The name and the token of the same data are the same in every process, and others for other data."""
    out = child(
        """
        import sys, lazyshards
        from dask.base import tokenize
        ds = lazyshards.open_shards(sys.argv[1], engine="numpy")
        print(ds.to_dask().name, tokenize(ds))
        """,
        ds.shards[0].path.rpartition("/")[0],
    )
    assert out.split() == [ds.to_dask().name, tokenize(ds)]
    assert ds[1:].to_dask().name != ds.to_dask().name
    assert tokenize(ds[1:]) != tokenize(ds)


def test_it_travels(ds):
    """The array is pickled and computed elsewhere."""
    again = pickle.loads(pickle.dumps(ds.to_dask()[10:20]))  # noqa: S301  # our own
    assert_same(again.compute(), WHOLE[10:20])


def test_no_rows_and_single_rows(ds):
    """Datasets without rows, or without their row axis, are arrays as well; one without axes is none."""
    assert ds[:0].to_dask().compute().shape == (0, 4)
    assert_same(ds[3].to_dask().compute(), WHOLE[3])
    with pytest.raises(TypeError, match="without axes"):
        ds[3, 1].to_dask()
