import gc
import weakref

import numpy as np
import pytest

from lazyshards import open_shards, zip_shards
from lazyshards.ahead import ReadAhead, most_together
from lazyshards.errors import CapacityError, ShardReadError
from lazyshards.samplers import FileOrder
from lazyshards.testing import RecordingStorage, with_storage, write_npy_shards


class Lines:
    """Rows that are their own numbers, of a kibibyte each; some cannot be read, or not yet begun."""

    size = 1_000
    row_nbytes = 1 << 10
    together_nbytes = 1 << 20

    def __init__(self, bad=(), full=()):
        self.bad = set(bad)
        self.full = set(full)
        self.begun = []
        self.cancelled = []

    def begin(self, rows):
        """Begin to read rows."""
        if len(self.begun) in self.full:
            self.full.remove(len(self.begun))
            raise CapacityError("no room")
        self.begun.append(rows)
        return Line(self, rows)


class Line:
    """Rows that are being read."""

    is_done = False

    def __init__(self, source, rows):
        self.source = source
        self.rows = rows

    def result(self):
        """Return them."""
        if self.source.bad & set(self.rows):
            raise ShardReadError(f"{sorted(self.source.bad & set(self.rows))} cannot be read")
        return np.array(self.rows)

    def cancel(self):
        """Give them up."""
        self.source.cancelled.append(self.rows)


def ahead(source, prefetch=2, start=0, stop=1_000, batch_size=10):
    """Return the batches of some rows in their order."""
    return ReadAhead(source, FileOrder(source.size), start, stop, batch_size, prefetch)


@pytest.mark.parametrize(
    ("batch_size", "row_nbytes", "together"),
    [(1, 1 << 20, 1), (1, (1 << 20) + 1, 1), (1, 1 << 19, 2), (8, 1 << 15, 4), (1, 1, 64), (1, 0, 64), (10**9, 1, 1)],
)
def test_how_many_are_read_together(batch_size, row_nbytes, together):
    """As many batches are read together as a mebibyte holds, say, one at least, 64 at most."""
    source = Lines()
    source.row_nbytes = row_nbytes
    assert most_together(batch_size, source) == together


def test_groups_grow():
    """The first batch is read alone, then four times as many as before, up to the bound, and none beyond the end."""
    source = Lines()
    batches = ahead(source, stop=995)
    stops, rows = zip(*[batches.take() for _ in range(100)], strict=True)
    assert stops == (*range(10, 1_000, 10), 995)
    assert np.concatenate(rows).tolist() == list(range(995))
    assert [len(each) for each in source.begun] == [10, 40, 160, 640, 145]


def test_the_first_batch_does_not_wait_for_others(monkeypatch):
    """A first batch that was read at once is handed out at once: those after it are begun when the next one is due."""
    monkeypatch.setattr(Line, "is_done", True)
    source = Lines()
    batches = ahead(source)
    batches.take()
    assert [len(each) for each in source.begun] == [10]
    batches.take()
    assert [len(each) for each in source.begun] == [10, 40]


def test_a_first_batch_that_is_waited_for_is_read_alone(monkeypatch):
    """No other batch is begun while the first is waited for; once it is there they are, before it is handed out."""
    source = Lines()
    seen = []
    result = Line.result
    monkeypatch.setattr(Line, "result", lambda line: seen.append(len(source.begun)) or result(line))
    batches = ahead(source)
    batches.take()
    assert seen == [1]
    assert [len(each) for each in source.begun] == [10, 40]


def test_a_first_batch_comes_whatever_fails_after_it(monkeypatch):
    """Where no batch but the first can be begun, it is handed out, and the error is raised at the next."""
    source = Lines()
    batches = ahead(source)
    begin = source.begin
    monkeypatch.setattr(source, "begin", lambda rows: begin(rows) if rows[0] == 0 else no_room())
    assert batches.take()[1].tolist() == list(range(10))
    with pytest.raises(CapacityError):
        batches.take()


def no_room():
    """Say that memory is full."""
    raise CapacityError("no room")


def test_without_prefetch_each_is_read_alone():
    """With no batch ahead, only the batch that is asked for is read."""
    source = Lines()
    batches = ahead(source, prefetch=0)
    for count in range(1, 4):
        batches.take()
        assert [len(each) for each in source.begun] == [10] * count


def test_an_error_belongs_to_its_batch():
    """If a group fails, each of its batches is read alone: those before the faulty one come, and those after."""
    source = Lines(bad=[25])
    batches = ahead(source)
    assert [batches.take()[0] for _ in range(2)] == [10, 20]
    with pytest.raises(ShardReadError, match=r"\[25\]"):
        batches.take()
    assert [batches.take()[1].tolist() for _ in range(3)] == [list(range(a, a + 10)) for a in (30, 40, 50)]


def test_a_group_that_cannot_be_begun_is_begun_one_by_one():
    """Where there is no room for a group there may be for a batch; if not, it is tried again when its turn comes."""
    source = Lines(full=[1])
    batches = ahead(source)
    assert [batches.take()[0] for _ in range(5)] == [10, 20, 30, 40, 50]
    assert {len(each) for each in source.begun} == {10}


def test_closing_gives_up_each_group_once():
    """What is not handed out is given up, each read once; what was read is not."""
    source = Lines()
    batches = ahead(source)
    batches.take()
    batches.close()
    assert source.cancelled == source.begun[1:]
    source = Lines()
    batches = ahead(source)
    for _ in range(2):
        batches.take()
    batches.close()
    assert source.cancelled == []


def test_batches_of_a_group_share_no_element(tmp_path, engine):
    """A batch may be written to: no other batch sees it."""
    (path,) = write_npy_shards(tmp_path / "set", [np.arange(4_000).reshape(1_000, 4)])
    for shuffle in (False, True):
        found = []
        for batch in open_shards(path, engine=engine).batches(10, shuffle=shuffle, seed=0):
            found += np.asarray(batch)[:, 0].tolist()
            batch[...] = -1
        assert sorted(found) == list(range(0, 4_000, 4))


def test_parts_of_a_bundle_are_read_together(tmp_path, on_numpy):
    """Small batches of a bundle are read together as well, and stay aligned."""
    write_npy_shards(tmp_path / "x", np.split(np.arange(1_000), [300]))
    write_npy_shards(tmp_path / "y", np.split(-np.arange(1_000), [700]))
    x, y = open_shards(tmp_path / "x"), open_shards(tmp_path / "y")
    storage = RecordingStorage(x._layout.storage)
    rows = [
        row for batch in zip_shards(x=with_storage(x, storage), y=y).batches(10) for row in (batch["x"] + batch["y"])
    ]
    assert rows == [0] * 1_000
    assert len(storage.reads) < 10
    assert storage.nbytes == x.nbytes


def test_memory_of_a_group_goes_with_its_last_batch(tmp_path, on_numpy):
    """Once all batches of a group are handed out and dropped, nothing keeps its memory."""
    (path,) = write_npy_shards(tmp_path / "set", [np.zeros((64, 64 << 10 >> 3))])
    running = iter(open_shards(path).batches(1))
    next(running)
    group = [next(running) for _ in range(4)]
    memory = weakref.ref(group[0].base)
    assert all(batch.base is memory() for batch in group)
    del group
    gc.collect()
    assert memory() is None
