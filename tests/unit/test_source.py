import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.testing import write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")


@pytest.fixture
def ds(tmp_path):
    """Write 53 rows in seven shards, two of them empty, one at each end of a run."""
    write_npy_shards(tmp_path, np.split(np.arange(53), [0, 9, 9, 23, 24, 40]))
    return open_shards(tmp_path)


@pytest.mark.parametrize("start", [None, 0, 3, 9, 23, 52, 53])
@pytest.mark.parametrize("stop", [None, 0, 9, 10, 24, 51])
@pytest.mark.parametrize("step", [1, 2, 7, 60, -1, -4])
def test_edges_lie_where_the_shard_changes(ds, start, stop, step):
    """Runs of rows of one shard begin where the next row is of another shard, in slices as in index arrays."""
    index = slice(start, stop, step)
    rows = np.arange(53)[index]
    holder = np.searchsorted(np.cumsum([0, 9, 0, 14, 1, 16, 13]), rows, "right")
    expected = [0, *(np.flatnonzero(np.diff(holder)) + 1).tolist(), len(rows)] if len(rows) else [0]
    assert ds[index].batch_source().edges().tolist() == expected
    if len(rows):
        assert ds[rows].batch_source().edges().tolist() == expected
