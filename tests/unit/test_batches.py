import json
from types import SimpleNamespace

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.batches import Batches
from lazyshards.errors import StateError
from lazyshards.samplers import RowOrder
from lazyshards.testing import RaisingStorage, RecordingStorage, assert_same, with_storage

pytestmark = pytest.mark.usefixtures("on_numpy")


@pytest.fixture
def numbers(tmp_path):
    """Open 53 rows that hold their own numbers, in seven shards, one of them empty."""
    for i, rows in enumerate(np.split(np.arange(53), [9, 9, 23, 24, 35, 40])):
        np.save(tmp_path / f"shard_{i}.npy", rows)
    return open_shards(tmp_path)


def listed(batches):
    """Return the rows of each batch."""
    return [batch.tolist() for batch in batches]


def joined(batches):
    """Return the rows of all batches."""
    return [row for batch in batches for row in batch.tolist()]


# Sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 52, 53, 54, 2**40])
@pytest.mark.parametrize("drop_last", [False, True])
def test_sizes(numbers, size, drop_last):
    """All batches are full but the last, which is left out if it is to be, and their number is the length."""
    it = numbers.batches(size, drop_last=drop_last)
    found = listed(it)
    full, rest = divmod(53, size)
    assert [len(batch) for batch in found] == [size] * full + [rest] * (rest > 0 and not drop_last)
    assert len(it) == it.batches_per_epoch == len(found)
    assert [row for batch in found for row in batch] == list(range(53))[: full * size if drop_last else 53]


@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
def test_no_rows(numbers, shuffle):
    """Without rows there is no batch, however many epochs, and no hang."""
    it = numbers[:0].batches(4, shuffle=shuffle, epochs=10**12)
    assert (len(it), list(it), it.quality().batches) == (0, [], 0)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": -1}, ValueError),
        ({"batch_size": 2.5}, TypeError),
        ({"batch_size": "4"}, TypeError),
        ({"batch_size": True}, TypeError),
        ({"epochs": 0}, ValueError),
        ({"prefetch": -1}, ValueError),
        ({"block_rows": 0}, ValueError),
        ({"window_blocks": 0}, ValueError),
        ({"seed": 1.5}, TypeError),
        ({"shuffle": "row"}, ValueError),
    ],
)
def test_wrong_options(numbers, option, error):
    """What cannot be meant is refused when the batches are made, naming the option."""
    with pytest.raises(error, match=next(iter(option))):
        numbers.batches(**{"batch_size": 4, **option})


def test_a_single_row_has_no_batches(numbers):
    """A dataset without its row axis has no batches, and says how to keep the axis."""
    with pytest.raises(TypeError, match="without axes"):
        numbers[3].batches(2)


def test_making_them_reads_nothing(numbers):
    """Neither making batches, nor their length, order, state or quality, reads data."""
    it = with_storage(numbers, RaisingStorage()).batches(4, shuffle=True, seed=0)
    it.state_dict(), len(it), it.order(0), it.quality(), repr(it)


# Epochs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["rows", "blocks", "shards"])
def test_epochs_have_orders_of_their_own(numbers, shuffle):
    """Each epoch takes each row once, in its own order, which the seed decides."""
    it = numbers.batches(8, shuffle=shuffle, seed=3, block_rows=4, window_blocks=2)
    first, second = joined(it), joined(it)
    assert sorted(first) == sorted(second) == list(range(53))
    assert first != second
    again = numbers.batches(5, shuffle=shuffle, seed=3, block_rows=4, window_blocks=2)
    assert (joined(again), joined(again)) == (first, second)


def test_several_epochs_in_one_for(numbers):
    """``epochs=n`` runs n epochs in one for, the same that n fors of one epoch run."""
    single = numbers.batches(8, shuffle=True, seed=3)
    one = [joined(single) for _ in range(3)]
    it = numbers.batches(8, shuffle=True, seed=3, epochs=3)
    assert len(it) == 21
    found = joined(it)
    assert found == one[0] + one[1] + one[2]
    assert (it.epoch, it.step) == (3, 0)


def test_set_epoch_begins_there(numbers):
    """``set_epoch`` goes to the start of an epoch, from where a for runs all of its epochs; ``reset`` to the first."""
    it = numbers.batches(8, shuffle=True, seed=3, epochs=2)
    both, next_both = joined(it), joined(it)
    it.set_epoch(1)
    assert joined(it) == both[53:] + next_both[:53]
    it.reset()
    assert joined(it) == both


def test_a_break_goes_on(numbers):
    """A for after a break goes on with the very next batch."""
    it = numbers.batches(8, shuffle=True, seed=3)
    whole = joined(numbers.batches(8, shuffle=True, seed=3))
    for _, batch in zip(range(3), it, strict=False):
        found = batch
    assert found.tolist() == whole[16:24]
    assert it.step == 3
    assert joined(it) == whole[24:]


def test_a_second_for_ends_the_first(numbers):
    """One iterator has one position: starting a for ends the one that was under way."""
    it = numbers.batches(8)
    first = iter(it)
    next(first)
    second = iter(it)
    assert next(second).tolist() == list(range(8, 16))
    assert next(first, None) is None


def test_transform(numbers):
    """What the transform returns is handed out in place of the batch."""
    assert list(numbers.batches(20, transform=len)) == [20, 20, 13]


def test_views_have_batches(numbers):
    """Batches of any view are the view's rows, in its order."""
    mask = np.arange(53) % 3 == 1
    assert joined(numbers[mask].batches(4)) == np.flatnonzero(mask).tolist()
    assert joined(numbers[::-2].batches(4)) == list(range(52, -1, -2))
    assert sorted(joined(numbers[mask].batches(4, shuffle="shards"))) == np.flatnonzero(mask).tolist()


def test_each_row_is_read_once(numbers):
    """An epoch in file order reads every byte that is wanted once, and no other."""
    storage = RecordingStorage(numbers._layout.storage)
    list(with_storage(numbers, storage).batches(8, prefetch=3))
    assert storage.nbytes == numbers.nbytes


# State --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, "rows", "blocks", "shards"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_anywhere(numbers, shuffle, drop_last):
    """A state taken after any batch, through JSON, continues with the very next one, in any other batch size."""
    make = lambda size: numbers.batches(  # noqa: E731
        size, shuffle=shuffle, seed=9, drop_last=drop_last, block_rows=4, window_blocks=2
    )
    whole = joined(numbers.batches(8, shuffle=shuffle, seed=9, block_rows=4, window_blocks=2))
    it = make(8)
    for count, _ in enumerate(it, 1):
        state = json.loads(json.dumps(it.state_dict()))
        for size in (8, 5):
            other = make(size)
            other.load_state_dict(state)
            rest = whole[8 * count :]
            kept = len(rest) - len(rest) % size if drop_last else len(rest)
            expected = rest[:kept]
            if not kept:  # the epoch is over: the next one comes
                assert other.epoch == 0
                assert len(joined(other)) == (53 - 53 % size if drop_last else 53)
                assert other.epoch == 2
            else:
                assert joined(other) == expected


def test_state_speaks_of_what_was_handed_out(numbers):
    """What was read ahead is no part of the state."""
    it = numbers.batches(8, prefetch=5)
    next(iter(it))
    assert it.state_dict()["position"] == 8
    assert it.step == 1


def test_seed_none_is_drawn_once_and_kept(numbers):
    """``seed=None`` draws a seed, which differs between iterators, is shown, and goes along with the state."""
    one, two = numbers.batches(8, shuffle=True), numbers.batches(8, shuffle=True)
    assert one.seed != two.seed
    assert f"seed={one.seed}" in repr(one)
    whole = joined(one)
    two.load_state_dict(one.state_dict() | {"epoch": 0, "position": 16})
    assert two.seed == one.seed
    assert joined(two) == whole[16:]


def test_state_of_another_dataset_is_refused(numbers, tmp_path):
    """The state of a changed dataset is refused, naming what changed, unless that is what is meant."""
    it = numbers.batches(8)
    next(iter(it))
    state = it.state_dict()
    with pytest.raises(StateError, match=r"it had 53 rows .* now there are 20 rows .*strict=False"):
        numbers[:20].batches(8).load_state_dict(state)
    with pytest.raises(StateError, match="renamed, resized or reordered, or other rows selected"):
        numbers[::-1].batches(8).load_state_dict(state)
    other = numbers[:20].batches(8)
    other.load_state_dict(state, strict=False)
    assert joined(other) == list(range(8, 20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shuffle": "rows"}, "shuffle='rows'"),
        ({"version": 9}, "version 9"),
        ({"order_version": 2}, "order_version 2"),
        ({"position": -1}, "position"),
        ({"position": 54}, "beyond the 53 rows"),
        ({"epoch": "0"}, "epoch"),
        ({"seed": None}, "seed"),
    ],
)
def test_wrong_states(numbers, change, message):
    """A state that is none, or of another order, is refused by name, and the iterator stays as it was."""
    it = numbers.batches(8)
    before = it.state_dict()
    with pytest.raises(StateError, match=message):
        it.load_state_dict(before | change)
    with pytest.raises(StateError, match="no seed, position"):
        it.load_state_dict({key: value for key, value in before.items() if key not in {"seed", "position"}})
    assert it.state_dict() == before


def test_blocks_are_part_of_the_order(numbers):
    """A state of one block shuffle is refused by another one."""
    state = numbers.batches(8, shuffle="blocks", block_rows=4).state_dict()
    with pytest.raises(StateError, match="block_rows=4"):
        numbers.batches(8, shuffle="blocks", block_rows=5).load_state_dict(state)


# Cost ---------------------------------------------------------------------------------------------------------------


def test_quality_tells_shuffles_apart(tmp_path):
    """The report has 1 for file order and about 0 for a full shuffle, and shows what each costs."""
    for i in range(10):
        np.save(tmp_path / f"s{i}.npy", np.zeros((500, 4)))
    ds = open_shards(tmp_path)
    quality = {
        name: ds.batches(50, shuffle=name, seed=0, block_rows=10, window_blocks=4).quality()
        for name in (False, "rows", "blocks", "shards")
    }
    assert quality[False].rank_correlation == pytest.approx(1)
    assert abs(quality["rows"].rank_correlation) < 0.1
    assert quality["rows"].shards_per_batch > 9
    assert quality[False].shards_per_batch == quality["shards"].shards_per_batch == 1
    assert quality[False].requests_per_batch < quality["blocks"].requests_per_batch
    assert quality["rows"].read_amplification >= 1
    assert "rank correlation" in str(quality["rows"])


def test_memory_ahead(numbers, tmp_path):
    """The bytes read ahead are those of the batches that are prefetched, and of those read together with the next."""
    np.save(tmp_path / "wide.npy", np.zeros((100, 32 << 10)))
    wide = open_shards(tmp_path / "wide.npy")
    assert wide.batches(2, prefetch=3).ahead_nbytes == (3 + 2) * 2 * (256 << 10)
    assert wide.batches(8, prefetch=3).ahead_nbytes == (3 + 1) * 8 * (256 << 10)
    assert wide.batches(8, prefetch=50).ahead_nbytes == wide.nbytes
    assert numbers.batches(8, prefetch=3).ahead_nbytes == numbers.nbytes
    assert numbers.batches(8, prefetch=0).ahead_nbytes == 8 * 8


def test_prefetch_is_bounded():
    """No more batches are begun than were handed out, the next one, and those asked for beside it."""
    begun = []

    def begin(rows):
        begun.append(rows)
        return SimpleNamespace(is_done=False, result=lambda: rows, cancel=lambda: None)

    class Source:
        size, row_nbytes, together_nbytes, fingerprint, description = 1_000, 8, 1 << 20, "", ""

        def order(self, shuffle, epoch):
            return RowOrder(1_000, (1, 2))

        def reading(self, scattered=0):
            import contextlib

            return contextlib.nullcontext()

    source = Source()
    source.begin = begin
    source.row_nbytes = 1 << 20
    for count, _ in enumerate(Batches(source, 10, prefetch=4), 1):
        assert len(begun) == min(100, count + 1 + 4)
    begun.clear()
    source.row_nbytes = 1 << 10  # a hundred batches of them go into a mebibyte, at most 64 are read together
    it = Batches(source, 10, prefetch=4)
    for count, _ in enumerate(it, 1):
        rows = sum(map(len, begun))
        assert (rows - 10 * count) * 1_024 <= it.ahead_nbytes <= (4 + 64) * 10 * 1_024
    assert [len(rows) // 10 for rows in begun] == [1, 4, 16, 64, 15]


def test_progress_bar_counts_rows(numbers, capsys):
    """The progress bar ends at the rows of all epochs that are left."""
    it = numbers.batches(8, epochs=2, progress=True)
    next(iter(it))
    assert len(list(it)) == 13
    said = capsys.readouterr().err
    assert " on numpy: 98 of 98 rows (100 %)" in said
    assert said.startswith("batches of ")


def test_batches_are_of_the_engine(numbers, engine):
    """Batches are arrays of the engine that was asked for, complete and independent of each other."""
    found = list(open_shards([shard.path for shard in numbers.shards], engine=engine).batches(20))
    kind = type(numbers[:3].compute(engine))
    assert all(isinstance(batch, kind) for batch in found)
    assert_same(np.concatenate([np.asarray(batch) for batch in found]), np.arange(53))
