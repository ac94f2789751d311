import itertools
import pickle
import re

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyshards
from lazyshards.errors import CapacityError
from lazyshards.layout import Layout, Packed, Shard
from lazyshards.plan import SMALL_NBYTES, Capacity, ReadPlan, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage, Stamp


def make(counts, row_shape=(4,), dtype="f4"):
    """Return a layout of shards that are nowhere: nothing here reads."""
    kind = np.dtype(dtype)
    return Layout.from_shards(
        [Shard(f"/d/s{i}", n, row_shape, kind, Stamp(1 << 40), Packed(128)) for i, n in enumerate(counts)],
        "npy",
        LocalStorage(),
    )


def plan_of(layout, index=..., capacity=None, **options):
    """Return the plan of an index."""
    selection = select(select_all(layout.rows, layout.row_shape), index)
    return compile_plan(layout, selection, capacity or Capacity(2), **options)


def covered(plan):
    """Return the rows of the result that the tiles hold, in their order."""
    return list(itertools.chain.from_iterable(range(tile.start, tile.stop) for tile in plan.tiles))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(1, 9),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 300),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_tiles_partition_the_result(counts, workers, tiles_per_processor, tile_nbytes, data):
    """The tiles hold every row of the result once, in order, none is empty, and only the last may be shorter."""
    layout = make(counts)
    index = data.draw(st.slices(layout.rows))
    plan = plan_of(layout, index, Capacity(workers, tile_nbytes), tiles_per_processor=tiles_per_processor)
    assert covered(plan) == list(range(plan.shape[0]))
    assert len(plan.tiles) == plan.tile_count <= max(plan.shape[0], 0)
    sizes = [tile.stop - tile.start for tile in plan.tiles]
    assert all(size == plan.tile_rows for size in sizes[:-1])
    assert all(1 <= size <= plan.tile_rows for size in sizes)


@pytest.mark.parametrize("tiles_per_processor", [1, 3, 10**6])
def test_never_more_tiles_than_rows(tiles_per_processor):
    """However many tiles are asked for, each holds a row."""
    plan = plan_of(make((3, 2)), capacity=Capacity(4), tiles_per_processor=tiles_per_processor)
    assert plan.tile_count <= 5
    assert covered(plan) == list(range(5))


@pytest.mark.parametrize("tiles_per_processor", [None, 1])
def test_uniform_shards_give_one_tile_a_shard(tiles_per_processor):
    """As many uniform shards as workers are one tile each."""
    layout = make([100_000] * 4)
    plan = plan_of(layout, capacity=Capacity(4), tiles_per_processor=tiles_per_processor)
    assert [tile.stop for tile in plan.tiles] == layout.ends.tolist()


@pytest.mark.parametrize("factor", [1, 2, 5])
def test_tiles_per_processor(factor):
    """tiles_per_processor=K gives K tiles for each worker."""
    assert plan_of(make([10_000]), capacity=Capacity(5), tiles_per_processor=factor).tile_count == 5 * factor


def test_small_requests_are_one_tile():
    """Up to a megabyte is one tile; a byte more is shared among the workers."""
    rows = SMALL_NBYTES // 16
    assert plan_of(make([rows]), capacity=Capacity(4)).tile_count == 1
    assert plan_of(make([rows + 1]), capacity=Capacity(4)).tile_count == 4


def test_tiles_fit_their_bound():
    """No tile is larger than the engine's bound, unless it is one row."""
    plan = plan_of(make([1000]), capacity=Capacity(2, tile_nbytes=100))
    assert plan.tile_rows == 6
    assert plan_of(make([1000]), capacity=Capacity(2, tile_nbytes=3)).tile_rows == 1


@pytest.mark.parametrize("bad", [0, -1, np.int64(-3)])
def test_tiles_per_processor_below_one(bad):
    """Fewer than one tile for a processor is a ValueError that says what was given."""
    with pytest.raises(ValueError, match=re.escape(f"tiles_per_processor={bad!r}")):
        plan_of(make((3, 2)), tiles_per_processor=bad)


@pytest.mark.parametrize("bad", [1.5, "2"])
def test_tiles_per_processor_of_another_type(bad):
    """What is no integer is refused when the plan is made, not when its tiles are."""
    with pytest.raises((TypeError, ValueError)):
        plan_of(make((3, 2)), tiles_per_processor=bad)


def test_numbers():
    """A plan says the shape, dtype and bytes of the result, and which shards it touches."""
    layout = make((10, 0, 20, 30), (2, 3), ">i2")
    plan = plan_of(layout, (slice(12, 40, 2), slice(None), 1))
    assert (plan.shape, plan.dtype, plan.row_nbytes, plan.nbytes) == ((14, 2), np.dtype("i2"), 4, 56)
    assert plan.shards == 2
    assert [shard.path for shard in plan.layout.shards] == ["/d/s2", "/d/s3"]


@pytest.mark.parametrize("index", [slice(0, 0), (slice(None), slice(0, 0)), [], slice(5, 2)], ids=str)
def test_nothing(index):
    """A result that holds nothing has no tile, no byte and no read, and keeps its shape."""
    layout = make((3, 2))
    plan = plan_of(layout, index)
    assert (plan.tile_count, plan.tiles, plan.nbytes, plan.requests, plan.bytes_read) == (0, [], 0, 0, 0)
    assert plan.shape == np.empty((5, 4))[index].shape
    assert plan.peak_nbytes(4) == 0


def test_an_integer_keeps_its_row_axis_in_the_plan():
    """A plan has a row axis even where the dataset's was dropped."""
    plan = plan_of(make((3, 2)), 4)
    assert (plan.shape, list(plan.rows), plan.shards) == ((1, 4), [1], 1)


def test_plans_are_frozen_and_pickle():
    """A plan cannot be changed, and one that travelled says the same."""
    plan = plan_of(make((30, 2)), slice(None, None, -1), tiles_per_processor=3)
    with pytest.raises(AttributeError):
        plan.tile_rows = 1
    again = pickle.loads(pickle.dumps(plan))  # noqa: S301  # our own
    assert isinstance(again, ReadPlan)
    for name in ("shape", "dtype", "tiles", "rows", "cell", "layout", "requests", "bytes_read", "scratch_nbytes"):
        assert getattr(again, name) == getattr(plan, name)


def test_peak():
    """The peak is the result and the scratch of the leaves that run together."""
    plan = plan_of(make((400_000,), dtype=">f4"), capacity=Capacity(4))
    assert plan.scratch_nbytes > 0
    assert plan.peak_nbytes(4) == plan.nbytes + 4 * plan.scratch_nbytes
    assert plan.peak_nbytes(100) == plan.nbytes + 4 * plan.scratch_nbytes


# Capacity ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_what_would():
    """A result that does not fit is refused; the message's rows fit, and one more does not."""
    layout, capacity = make((1000,)), Capacity(2, result_nbytes=1234)
    with pytest.raises(CapacityError) as caught:
        plan_of(layout, capacity=capacity)
    message = str(caught.value)
    assert f"{16_000:,} bytes" in message
    assert f"{1234:,}" in message
    fits = int(re.search(r"at most ([\d,]+)", message)[1].replace(",", ""))
    assert plan_of(layout, slice(fits), capacity).shape[0] == fits
    with pytest.raises(CapacityError):
        plan_of(layout, slice(fits + 1), capacity)


def test_not_even_one_row_fits():
    """Where not even one row fits, the message says that none does."""
    with pytest.raises(CapacityError, match="at most 0 "):
        plan_of(make((10,)), capacity=Capacity(1, result_nbytes=15))


def test_what_just_fits_is_not_refused():
    """A result of exactly the free bytes is not refused, nor an empty one where nothing is free."""
    assert plan_of(make((10,)), capacity=Capacity(1, result_nbytes=160)).nbytes == 160
    assert plan_of(make((10,)), slice(0, 0), Capacity(1, result_nbytes=0)).nbytes == 0


def test_refusal_counts_what_is_wanted():
    """What counts is the slice, not the dataset."""
    capacity = Capacity(1, result_nbytes=200)
    assert plan_of(make((10**9,)), slice(5, 15), capacity).nbytes == 160
    assert plan_of(make((10**9,)), (slice(0, 40), 0), capacity).nbytes == 160


def test_loads_are_per_processor(opened):
    """Tiles are dealt in blocks, as Legate does, and the loads of all processors are those of the plan."""
    ds, _ = opened([10, 1, 1, 1, 1, 26])
    plan = compile_plan(ds._layout, ds._selection, Capacity(workers=2), tiles_per_processor=2)
    nbytes, requests = plan.loads(2)
    assert nbytes.tolist() == [20 * 12, 20 * 12]
    assert requests.tolist() == [6, 2]
    assert nbytes.sum() == plan.bytes_read
    assert requests.sum() == plan.requests


def test_skew_is_the_busiest_over_the_mean(opened):
    """Skew is 1 where all read as much, also nothing, and the number of workers where one reads all."""
    ds, _ = opened([40])
    even = compile_plan(ds._layout, ds._selection, Capacity(workers=2), tiles_per_processor=1)
    assert even.skew(2) == 1
    single = compile_plan(ds._layout, ds._selection, Capacity(workers=1))
    assert single.skew(4) == 4
    nothing = compile_plan(ds._layout, ds[:0]._selection, Capacity(workers=2))
    assert nothing.skew(2) == 1


@pytest.mark.parametrize("suffix", ["h5", "npz", "parquet"])
def test_skew_counts_encoded_rows_as_they_are_stored(tmp_path, suffix):
    """Where one half is noise and the other zeros, who decodes the zeros reads next to nothing of the files."""
    noise = np.random.default_rng(0).random((4_000, 64))
    for i, values in enumerate([noise, np.zeros_like(noise)]):
        if suffix == "h5":
            with h5py.File(tmp_path / f"{i}.h5", "w") as file:
                file.create_dataset("data", data=values, chunks=(500, 64), compression="gzip")
        elif suffix == "npz":
            np.savez_compressed(tmp_path / f"{i}.npz", values)
        else:
            table = pa.table({f"c{k:02d}": values[:, k] for k in range(64)})
            pq.write_table(table, tmp_path / f"{i}.parquet", compression="zstd")
    ds = lazyshards.open_shards(tmp_path, engine="numpy")
    plan = compile_plan(ds._layout, ds._selection, Capacity(workers=2))
    nbytes, _ = plan.loads(2)
    assert nbytes.tolist() == [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert plan.skew(2) > 1.9
    assert plan.bytes_read == ds.nbytes


def write_gzipped(path, values):
    """Write a file of one gzipped dataset, in chunks of 500 rows."""
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(500, *values.shape[1:]), compression="gzip")


@pytest.mark.parametrize(("noisy", "tiles"), [((0, 1), 8), ((0, 1, 2, 3), 2), ((), 2)])
def test_uneven_cost_makes_more_tiles_where_they_are_dealt(tmp_path, noisy, tiles):
    """A processor that is done with cheap shards takes tiles of dear ones; shards that cost the same are not cut."""
    for i in range(4):
        values = np.random.default_rng(i).random((4_000, 64)) if i in noisy else np.zeros((4_000, 64))
        write_gzipped(tmp_path / f"{i}.h5", values)
    ds = lazyshards.open_shards(tmp_path, engine="numpy")
    dealt, dealing = Capacity(2), Capacity(2, takes_next=True)
    plan = compile_plan(ds._layout, ds._selection, dealing)
    assert plan.tile_count == tiles
    assert plan.bytes_read == ds.nbytes  # no chunk is decoded twice
    assert compile_plan(ds._layout, ds._selection, dealt).tile_count == 2
    assert compile_plan(ds._layout, ds._selection, dealing, tiles_per_processor=1).tile_count == 2
    assert compile_plan(ds._layout, ds[:100]._selection, dealing).tile_count == 1
    np.testing.assert_array_equal(ds.compute(), ds.compute(tiles_per_processor=1))


def test_encoded_beside_plain_shards_are_dealt(tmp_path):
    """Plain shards joined with encoded ones are read while those are decoded."""
    write_gzipped(tmp_path / "a.h5", np.zeros((4_000, 64)))
    np.save(tmp_path / "b.npy", np.zeros((4_000, 64)))
    a, b = [lazyshards.open_shards(tmp_path / name, engine="numpy") for name in ("a.h5", "b.npy")]
    both, dealing = lazyshards.concat([a, b]), Capacity(2, takes_next=True)
    assert compile_plan(both._layout, both._selection, dealing).tile_count == 8
    assert compile_plan(both._layout, both[::-2]._selection, dealing).tile_count == 8
    assert compile_plan(b._layout, b._selection, dealing).tile_count == 2


def test_what_is_decoded_from_its_start_is_not_cut_for_evenness(tmp_path):
    """A deflated member is one block: each tile that begins within it would decode what comes before."""
    for i, values in enumerate([np.random.default_rng(0).random((4_000, 64)), np.zeros((4_000, 64))]):
        np.savez_compressed(tmp_path / f"{i}.npz", values)
    ds = lazyshards.open_shards(tmp_path, engine="numpy")
    assert compile_plan(ds._layout, ds._selection, Capacity(2, takes_next=True)).tile_count == 2


def test_skew_of_shards_that_share_a_file_counts_decoded_bytes(tmp_path):
    """What each of several encoded datasets takes of its file is not looked up: they count once decoded."""
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for i in range(2):
            file.create_dataset(f"data/{i}", data=np.zeros((4_000, 64)), chunks=(500, 64), compression="gzip")
    ds = lazyshards.open_shards(tmp_path / "all.h5", dataset="data/*", engine="numpy")
    plan = compile_plan(ds._layout, ds._selection, Capacity(workers=2))
    assert plan.loads(2)[0].tolist() == [ds.nbytes // 2] * 2


def test_repr_is_one_line(opened):
    """A plan prints as what it makes and how it is cut, and not as all that it holds."""
    ds, _ = opened([10, 30])
    plan = compile_plan(ds._layout, ds._selection, Capacity(workers=2), tiles_per_processor=1)
    assert repr(plan) == f"<ReadPlan {plan.shape} {plan.dtype}, {plan.nbytes:,} bytes, 2 tiles of up to 20 rows>"
