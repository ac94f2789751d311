import copy
import gc
import pickle

import numpy as np
import pytest

from lazyshards.errors import FormatError, ShardReadError
from lazyshards.storage import Part, Stamp
from lazyshards.storage.memory import MemoryStorage, keep_array

ROWS = np.arange(12, dtype="i4").reshape(4, 3)


@pytest.fixture
def storage():
    """Keep twelve integers."""
    return keep_array(ROWS.copy(), "abcdefghijkl")


def test_its_bytes_are_the_arrays(storage):
    """What is fetched, opened, or looked at first are the bytes of the array."""
    data = ROWS.tobytes()
    assert storage.fetch([(storage.path, 4, 8), (storage.path, 40, 100)]) == [data[4:12], data[40:]]
    out = bytearray(8)
    storage.fetch_into([Part(storage.path, Stamp(48), 12, memoryview(out))])
    assert bytes(out) == data[12:20]
    (head,) = storage.heads([storage.path], 5)
    assert (head.data, head.stamp.size, head.error) == (data[:5], 48, None)
    with storage.open(storage.path) as file:
        assert file.read() == data
    assert storage.find(storage.path)[0] == "file"
    assert storage.find("elsewhere") == ("missing", [])
    assert storage.local_path(storage.path) is None


def test_nobody_can_change_it(storage):
    """What is kept is read-only."""
    with pytest.raises(ValueError, match="read-only"):
        storage.array[0] = 3


def test_each_array_has_a_key(storage):
    """Keys differ from array to array, and name what was kept."""
    other = keep_array(ROWS.copy(), "abcdefghijkl")
    assert storage != other
    assert storage.key.endswith("-abcdefgh")
    assert {storage, other, MemoryStorage(storage.key)} == {storage, other}
    assert storage.key in repr(storage)


def test_it_lives_as_long_as_it_is_used(storage):
    """A copy finds the array while the original lives, and says so when it is gone."""
    data = pickle.dumps(storage)
    again, copied = pickle.loads(data), copy.copy(storage)  # noqa: S301  # our own
    assert again == copied == storage
    assert again.array is storage.array
    path = storage.path
    kept = storage.array
    storage._kept = None
    del kept
    gc.collect()
    with pytest.raises(ShardReadError, match="gone"):
        again.fetch([(path, 0, 4)])
    with pytest.raises(FormatError, match="cache"):
        pickle.loads(data)  # noqa: S301  # our own
