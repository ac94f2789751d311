import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lazyshards import concat, mix, open_shards, zip_shards
from lazyshards.testing import write_npy_shards

# Legate warns about whoever seeds a generator, and hypothesis seeds them all before each example.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Seeding the random number generator")

numbers = itertools.count()
shard_rows = st.lists(st.integers(0, 12), min_size=1, max_size=5)
batch_sizes = st.integers(1, 15) | st.just(1_000)


class Epochs(RuleBasedStateMachine):
    """A consumer that stops, saves, loads and goes on in every way, against the order that nobody interrupted."""

    def __init__(self, root, engine):
        super().__init__()
        self.root = root
        self.engine = engine

    @initialize(data=st.data())
    def open(self, data):
        """Write a dataset whose rows hold their own numbers, and choose a view, an order and a way to read it."""
        counts = data.draw(shard_rows, label="rows of each shard")
        size = sum(counts)
        whole = np.stack([np.arange(size), -np.arange(size)], axis=1)
        self.directory = f"{self.root}/{next(numbers)}"
        write_npy_shards(self.directory, np.split(whole, np.cumsum(counts)[:-1]))
        view = data.draw(st.sampled_from(["all", "mask", "backwards", "slice", "cell"]), label="view")
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
        self.index = {
            "all": slice(None),
            "mask": mask,
            "backwards": slice(None, None, -1),
            "slice": slice(size // 4, size - size // 5, 2),
            "cell": (slice(None), slice(1)),
        }[view]
        self.kind = data.draw(st.sampled_from(["dataset", "bundle", "concat", "mapped"]), label="kind")
        self.order = {
            "shuffle": data.draw(st.sampled_from([False, "rows", "blocks", "shards"]), label="shuffle"),
            "seed": data.draw(st.integers(0, 3), label="seed"),
            "block_rows": data.draw(st.integers(1, 9), label="block_rows"),
            "window_blocks": data.draw(st.integers(1, 4), label="window_blocks"),
        }
        self.epochs = data.draw(st.integers(1, 3), label="epochs")
        self.drop_last = data.draw(st.booleans(), label="drop_last")
        self.held = sorted(whole[self.index][:, 0].tolist())
        self.size = len(self.held)
        self.expected = {}
        self.epoch = self.position = self.first = 0
        self.make(data)

    def source(self):
        """Open it anew, as another process would."""
        ds = open_shards(self.directory, engine=self.engine)[self.index]
        if self.kind == "mapped":
            return ds.map(_with_its_negative, row_shape=ds.shape[1:])
        if self.kind == "concat" and self.size:
            return concat([ds[: self.size // 2], ds[self.size // 2 :]])
        return zip_shards(x=ds, y=ds[:, 0]) if self.kind == "bundle" else ds

    def make(self, data):
        """Make an iterator that reads in its own way."""
        self.batch_size = data.draw(batch_sizes, label="batch_size")
        self.it = self.source().batches(
            self.batch_size,
            epochs=self.epochs,
            drop_last=self.drop_last,
            prefetch=data.draw(st.integers(0, 4), label="prefetch"),
            **self.order,
        )
        self.run = None

    def rows_of(self, batch):
        """Return the numbers of the rows of a batch, all of whose parts must belong together."""
        if isinstance(batch, dict):
            x, y = np.asarray(batch["x"]), np.asarray(batch["y"])
            assert np.array_equal(x[:, 0], y)
            return x[:, 0].tolist()
        batch = np.asarray(batch)
        if batch.shape[1] == 2:
            assert np.array_equal(batch[:, 1], -batch[:, 0])
        return batch[:, 0].tolist()

    def whole_epoch(self, epoch):
        """Return the rows of an epoch in the order of a run that nothing interrupts, each of them there once."""
        if epoch not in self.expected:
            it = self.source().batches(7, prefetch=0, **self.order)
            it.set_epoch(epoch)
            rows = [row for batch in it for row in self.rows_of(batch)]
            assert sorted(rows) == self.held
            self.expected[epoch] = rows
        return self.expected[epoch]

    @precondition(lambda self: self.run is None)
    @rule()
    def begin(self):
        """Start a for."""
        self.run = iter(self.it)
        if self.position and self.finished():
            self.epoch, self.position = self.epoch + 1, 0
        if self.epoch >= self.first + self.epochs:
            self.first = self.epoch

    def finished(self):
        """Return whether the epoch has no further batch."""
        left = self.size - self.position
        return left < self.batch_size if self.drop_last else not left

    @precondition(lambda self: self.run is not None)
    @rule(count=st.integers(1, 6))
    def take(self, count):
        """Take batches: each is the next piece of the uninterrupted order."""
        for _ in range(count):
            while self.finished() and self.epoch < self.first + self.epochs:
                self.epoch, self.position = self.epoch + 1, 0
            over = self.epoch >= self.first + self.epochs
            batch = next(self.run, None)
            assert (batch is None) == over
            if over:
                self.run = None
                return
            expected = self.whole_epoch(self.epoch)[self.position : self.position + self.batch_size]
            assert self.rows_of(batch) == expected
            self.position += len(expected)
            assert (self.it.epoch, self.it.state_dict()["position"]) == (self.epoch, self.position)

    @precondition(lambda self: self.run is not None)
    @rule()
    def stop(self):
        """Break off: what was read ahead is forgotten, nothing is lost."""
        self.run = None

    @rule(data=st.data())
    def save_and_load(self, data):
        """Carry the state, as JSON, to another object that reads in another way."""
        state = json.loads(json.dumps(self.it.state_dict()))
        self.make(data)
        self.it.load_state_dict(state)
        assert self.it.state_dict() == state

    @rule(epoch=st.integers(0, 4))
    def set_epoch(self, epoch):
        """Go to the start of an epoch."""
        self.it.set_epoch(epoch)
        self.run = None
        self.epoch = self.first = epoch
        self.position = 0

    @rule()
    def reset(self):
        """Go back to the beginning."""
        self.it.reset()
        self.run = None
        self.epoch = self.first = self.position = 0


def _with_its_negative(rows):
    """Return the same rows, made anew."""
    return np.concatenate([rows[:, :1], -rows[:, :1]], axis=1)[:, : rows.shape[1]]


def run_machine(root, engine, examples):
    """Let hypothesis look for a way to break it."""
    run_state_machine_as_test(
        lambda: Epochs(root, engine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_consumer_on_numpy(tmp_path):
    """Whatever a consumer does, each row comes once an epoch, in the uninterrupted order."""
    run_machine(tmp_path, "numpy", 100)


def test_any_consumer_on_each_engine(tmp_path, engine):
    """The same holds on every engine."""
    run_machine(tmp_path, engine, 25)


@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
@pytest.mark.parametrize("sizes", [(50, 20), (7, 90, 3), (1, 1)])
def test_a_mixture_is_resumed_anywhere(tmp_path, shuffle, sizes):
    """A mixture goes on exactly at every position, and over all epochs takes all rows of a dataset before any again."""
    datasets = []
    for i, size in enumerate(sizes):
        (path,) = write_npy_shards(tmp_path / f"{shuffle}{i}", [np.arange(size) + 1_000 * i])
        datasets.append(open_shards(path, engine="numpy"))
    weights = dict(zip(datasets, (3, 1, 0.5), strict=False))
    make = lambda size: mix(weights).batches(size, shuffle=shuffle, seed=5, epochs=4, block_rows=4)  # noqa: E731
    whole = [row for batch in make(6) for row in batch.tolist()]
    assert len(whole) == 4 * len(mix(weights))
    for i, size in enumerate(sizes):
        own = [row for row in whole if row // 1_000 == i]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    it, seen = make(6), 0
    for batch in it:
        seen += len(batch)
        other = make(5)
        other.load_state_dict(it.state_dict())
        assert [row for rest in other for row in rest.tolist()] == (whole[seen:] or _next_group(make, 5))


def _next_group(make, size):
    """Return what follows the epochs of one for."""
    it = make(size)
    it.set_epoch(4)
    return [row for batch in it for row in batch.tolist()]
