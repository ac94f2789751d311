import tracemalloc
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import access, open_shards
from lazyshards.access import accesses, count_reads
from lazyshards.engines.threads import ThreadEngine
from lazyshards.errors import ShardReadError
from lazyshards.layout import Extent, Extents, Layout, Segment, Shard
from lazyshards.leaf import fill
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage, Stamp
from lazyshards.testing import RecordingStorage, assert_same, example_array, with_storage, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")

KINDS = ("plain", "swapped", "fortran")
INDICES = [
    slice(None),
    slice(3, 17),
    slice(None, None, -1),
    slice(None, None, 4),
    slice(19, 2, -3),
    [19, 0, 7, 7, 8, 9, 2],
    [0, 0, 0],
    11,
    (slice(None), 0),
    (slice(None), slice(1, None)),
    (slice(None), slice(None, None, -1)),
    (slice(None, None, -2), slice(1, 2)),
    ([5, 1, 5], -1),
    (4, 1),
]
SHAPES = [(2,), (3, 5), (2, 60_000), (3, 2, 50_000), (200_000,)]
"""Rows of a few bytes, and rows larger than a block, of which only what is wanted is read."""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Each kind of shard in each row shape, written once; what is read of it is recorded."""
    made = {}

    def give(kind, row_shape):
        if (kind, row_shape) not in made:
            whole = example_array((20, *row_shape), "f8")
            arrays = np.split(whole, [6, 6, 13])
            if kind == "swapped":
                arrays = [array.astype(">f8") for array in arrays]
            elif kind == "fortran":
                arrays = [np.asfortranarray(array) for array in arrays]
            directory = tmp_path_factory.mktemp("shards")
            write_npy_shards(directory, arrays)
            made[kind, row_shape] = open_shards(directory), whole
        return made[kind, row_shape]

    return give


def plan_of(ds, index, workers=1, **options):
    """Return the plan of an index for this many workers."""
    layout = ds._layout
    selection = select(select_all(layout.rows, layout.row_shape), index)
    return compile_plan(layout, selection, Capacity(workers), **options)


def every_request():
    """Return each kind of shard, in each row shape, under each index."""
    # Columns of a Fortran shard are one read each: very wide ones are left to the other kinds.
    return [
        pytest.param(kind, shape, index, id=f"{kind}-{shape}-{index}")
        for kind in KINDS
        for shape in SHAPES
        for index in INDICES
        if kind != "fortran" or np.prod(shape) < 1000
    ]


@pytest.mark.parametrize(("kind", "shape", "index"), every_request())
def test_every_element_once(datasets, kind, shape, index):
    """The accesses of a request land on every element of the buffer exactly once."""
    ds, _ = datasets(kind, shape)
    plan = plan_of(ds, index)
    written = np.zeros(plan.shape, np.int8)
    for segment in plan.layout.segments(plan.rows):
        for piece in accesses(plan.layout.shards[segment.shard], segment, plan.layout, plan.cell, contiguous=True):
            written[piece.target] += 1
    assert (written == 1).all()


@pytest.mark.parametrize(("kind", "shape", "index"), every_request())
def test_the_plans_numbers_are_what_happens(datasets, kind, shape, index):
    """The requests and bytes that a plan counts are those that the leaves make, tile by tile."""
    ds, whole = datasets(kind, shape)
    storage = RecordingStorage(LocalStorage())
    plan = plan_of(with_storage(ds, storage), index, workers=3, tiles_per_processor=1)
    out = np.empty(plan.shape, plan.dtype)
    for tile in plan.tiles:
        fill(out[tile], plan.rows[tile], plan.layout, plan.cell)
    assert (plan.requests, plan.bytes_read) == (len(storage.reads), storage.nbytes)
    expected = whole[index]
    assert_same(out.reshape(expected.shape), expected)


@pytest.mark.parametrize(("kind", "shape", "index"), every_request())
def test_reads_stay_within_the_data(datasets, kind, shape, index):
    """No read begins in the header or goes beyond the end of its file."""
    ds, _ = datasets(kind, shape)
    storage = RecordingStorage(LocalStorage())
    with_storage(ds, storage)[index].compute()
    sizes = {shard.path: shard.stamp.size for shard in ds.shards}
    assert all(offset >= 128 and offset + nbytes <= sizes[path] for path, offset, nbytes in storage.reads)


def test_a_contiguous_slice_is_one_read_a_shard(datasets):
    """A slice of plain rows is one read of each shard that it touches, of exactly the bytes wanted."""
    ds, _ = datasets("plain", (3, 5))
    plan = plan_of(ds, slice(4, 15))
    assert (plan.requests, plan.bytes_read, plan.scratch_nbytes) == (3, plan.nbytes, 0)


def test_far_rows_are_read_alone(datasets):
    """Rows that lie far apart are read one by one, with nothing between them."""
    ds, _ = datasets("plain", (2, 60_000))
    plan = plan_of(ds, [1, 4, 12])
    assert (plan.requests, plan.bytes_read) == (3, plan.nbytes)


def test_one_column_of_giant_rows_reads_little(datasets):
    """Of rows larger than a block, a column is read without the rest of the row."""
    ds, _ = datasets("plain", (200_000,))
    plan = plan_of(ds, (slice(None), 77))
    assert plan.bytes_read <= 20 * 8
    ds, _ = datasets("plain", (2, 60_000))
    assert plan_of(ds, (slice(None), 1)).bytes_read <= 20 * 60_000 * 8


def test_a_few_columns_of_fortran_shards_read_those_only(datasets):
    """Of columns that lie apart, only those wanted are read."""
    ds, _ = datasets("fortran", (3, 5))
    plan = plan_of(ds, (slice(None), 1, slice(2, 4)))
    assert (plan.requests, plan.bytes_read) == (3 * 2, plan.nbytes)


def test_rows_of_a_column_are_read_together(tmp_path):
    """Where each column is a read, rows that lie far apart in it are still one read a column."""
    ds = open_shards(write_npy_shards(tmp_path, [np.asfortranarray(np.zeros((20_000, 2)))]))
    assert plan_of(ds, [0, 19_000]).requests == 2


def test_repeated_rows_are_read_once(datasets):
    """A row that is wanted often is read once."""
    ds, _ = datasets("plain", (2, 60_000))
    plan = plan_of(ds, [7] * 50)
    assert plan.bytes_read == 2 * 60_000 * 8


def test_counting_reads_nothing(datasets):
    """Counting the reads of a tile makes none."""
    ds, _ = datasets("plain", (3, 5))
    storage = RecordingStorage(LocalStorage())
    count_reads(range(20), with_storage(ds, storage)._layout, (range(3), range(5)))
    assert storage.reads == []


def test_no_rows_are_no_reads(datasets):
    """A tile without rows counts nothing."""
    assert count_reads(range(0), datasets("plain", (2,))[0]._layout, (range(2),)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "row_shape", "rows", "index"),
    [
        ("swapped", (50,), 40_000, slice(None)),
        ("swapped", (50,), 40_000, slice(None, None, -1)),
        ("plain", (50,), 40_000, slice(None, None, -1)),
        ("plain", (50,), 40_000, slice(None, None, 2)),
        ("plain", (50,), 40_000, (slice(None), slice(0, 40))),
        ("plain", (50,), 40_000, np.random.default_rng(0).permutation(40_000)),
        ("fortran", (50,), 40_000, slice(None)),
        ("fortran", (50,), 40_000, slice(None, None, -1)),
        ("plain", (2_000_000,), 1, (slice(None), slice(None, None, 2))),
        ("swapped", (2_000_000,), 1, slice(None)),
        ("swapped", (2, 1_000_000), 1, slice(None)),
        ("plain", (2_000_000,), 1, (slice(None), slice(None, None, -1))),
    ],
    ids=str,
)
def test_scratch_is_bounded(tmp_path, kind, row_shape, rows, index):
    """However large the request, and however giant its rows, a leaf needs a few megabytes besides its tile."""
    whole = np.arange(rows * np.prod(row_shape), dtype="f8").reshape(rows, *row_shape)
    stored = {"plain": whole, "swapped": whole.astype(">f8"), "fortran": np.asfortranarray(whole)}[kind]
    plan = plan_of(open_shards(write_npy_shards(tmp_path, [stored])), index)
    out = np.empty(plan.shape, plan.dtype)
    tracemalloc.start()
    try:
        fill(out, plan.rows, plan.layout, plan.cell)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20
    assert plan.scratch_nbytes <= access.WIDE_NBYTES
    assert_same(out, whole[index])


def test_the_capacity_of_threads_is_the_machine():
    """The NumPy engine plans one worker for each processor."""
    assert ThreadEngine().capacity().workers >= 1


def test_a_narrow_cell_of_wide_rows_reads_little(tmp_path):
    """Of rows far wider than the gap limit, a narrow cell reads its own bytes, whichever axis it narrows."""
    whole = np.arange(6 * 50 * 2000, dtype="f4").reshape(6, 50, 2000)
    np.save(tmp_path / "a.npy", whole)
    ds = open_shards(tmp_path / "a.npy", engine="numpy")
    assert ds[:, 7].plan().bytes_read == 6 * 2000 * 4
    assert ds[:, 3:5].plan().bytes_read == 6 * 2 * 2000 * 4
    assert np.array_equal(ds[::-1, 3:5, ::-1].to_numpy(), whole[::-1, 3:5, ::-1])
    assert np.array_equal(ds[1:4, 7, 5].to_numpy(), whole[1:4, 7, 5])


def test_many_extents_are_not_walked():
    """Of a hundred thousand extents, those that hold a wanted row are looked at, and few others."""

    class Counted(tuple):
        __slots__ = ()
        looks = 0

        def __getitem__(self, item):
            Counted.looks += 1
            return tuple.__getitem__(self, item)

        def __iter__(self):
            raise AssertionError("all extents were looked at")

    count = 100_000
    extents = Counted(Extent(3 * i, 3, f"/d/{i}", 64) for i in range(count))
    shard = Shard("/d/all.h5", 3 * count, (4,), np.dtype("f4"), Stamp(1 << 40), Extents(extents))
    layout = Layout.from_shards([shard], "hdf5", LocalStorage())
    for local, wanted in [
        (range(299_990, 300_000), [99_996, 99_997, 99_998, 99_999]),
        (range(0, 300_000, 100_000), [0, 33_333, 66_666]),
        (np.array([5, 5, 150_000, 150_001, 299_999]), [1, 50_000, 99_999]),
    ]:
        Counted.looks = 0
        segment = Segment(0, local, slice(0, len(local)))
        reads = list(accesses(shard, segment, layout, (range(4),), True))
        assert [read.path for read in reads] == [f"/d/{i}" for i in wanted]
        assert Counted.looks < 200


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_any_extents(counts, data):
    """Whatever extents rows lie in, empty ones among them, each row is found where it lies."""
    firsts = [0, *accumulate(counts)]
    extents = tuple(Extent(firsts[i], n, f"/d/{i}", 0) for i, n in enumerate(counts))
    shard = Shard("/d/all.h5", firsts[-1], (), np.dtype("u1"), Stamp(1 << 40), Extents(extents))
    layout = Layout.from_shards([shard], "hdf5", LocalStorage())
    rows = data.draw(st.slices(firsts[-1]).map(range(firsts[-1]).__getitem__).filter(lambda rows: rows.step > 0))
    local = data.draw(st.sampled_from([rows, np.repeat(np.array(rows, np.int64), 2)]))
    found = {}
    for read in accesses(shard, Segment(0, local, slice(0, len(local))), layout, (), True):
        owner = int(read.path[3:])
        places = np.arange(len(local))[read.target[0] if read.target else slice(None)]
        inside = read.offset + np.arange(read.shape[0])[slice(None) if read.source is None else read.source[0]]
        found |= dict(zip(places.tolist(), (firsts[owner] + inside).tolist(), strict=True))
    assert [found[i] for i in range(len(local))] == [int(row) for row in local]


def test_extents_with_a_hole():
    """A row that no extent holds is an error, and never left as it was."""
    shard = Shard("/d/x", 9, (), np.dtype("u1"), Stamp(9), Extents((Extent(0, 4, "", 0), Extent(5, 4, "", 4))))
    layout = Layout.from_shards([shard], "hdf5", LocalStorage())
    with pytest.raises(ShardReadError, match=r"'/d/x' was described without saying where its row 4 lies"):
        list(accesses(shard, Segment(0, range(9), slice(0, 9)), layout, (), True))


@given(
    rows=st.lists(st.integers(0, 199), min_size=1, max_size=30).map(sorted),
    edges=st.lists(st.integers(1, 199), max_size=40, unique=True).map(lambda found: [0, *sorted(found)]),
    step=st.integers(1, 40),
    is_range=st.booleans(),
    row_kib=st.sampled_from((1, 5, 40)),
)
def test_runs_pass_by_blocks_without_a_wanted_row(rows, edges, step, is_range, row_kib):
    """Runs are cut exactly where whole blocks between two wanted rows hold more than a few bytes."""
    local = range(rows[0], 200, step) if is_range else np.array(rows)
    runs = access._runs(local, edges, row_kib << 10)
    starts = {0}
    for i in range(1, len(local)):
        between = [b - a for a, b in zip(edges, [*edges[1:], 200], strict=True) if a > local[i - 1] and b <= local[i]]
        if sum(between) * row_kib << 10 > access.PASSED_NBYTES:
            starts.add(i)
    assert [a for a, _ in runs] == sorted(starts)
    assert [b for _, b in runs] == [*sorted(starts)[1:], len(local)]
