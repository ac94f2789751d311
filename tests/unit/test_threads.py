"""Leaves that share their tile with the other threads of their process."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

import lazyshards
from lazyshards.engines import threads
from lazyshards.engines.threads import fill_together
from lazyshards.errors import ShardReadError
from lazyshards.plan import Capacity, compile_plan


@pytest.mark.parametrize("piece_rows", [1, 7, 50, 99, 100, 1_000, None])
@pytest.mark.parametrize("index", [slice(None), slice(90, 10, -3), [5, 99, 5, 0]])
def test_pieces_make_the_whole(opened, piece_rows, index):
    """However a tile is cut, each row is where one thread would have put it."""
    ds, whole = opened([30, 0, 50, 20])
    plan = ds[index].plan()
    out = np.full(plan.shape, -1, plan.dtype)
    fill_together(out, plan.rows, plan.layout, plan.cell, piece_rows)
    np.testing.assert_array_equal(out, whole[index])


def plan_of_thirty_rows(folder, read):
    """Return the plan of a dataset that a function reads."""
    (folder / "a.bin").write_bytes(b"x")
    options = {"rows": [30], "dtype": "f8", "row_shape": (2,), "engine": "numpy"}
    return lazyshards.open_shards([folder / "a.bin"], reader=read, **options).plan()


def test_several_threads_take_part(tmp_path, monkeypatch):
    """Pieces that wait, wait at the same time: on the thread that asked, and on those of the pool."""
    monkeypatch.setattr(threads, "_executor", ThreadPoolExecutor(2))
    together, names = threading.Barrier(3, timeout=30), set()

    def read(path, start, stop):
        names.add(threading.current_thread().name)
        together.wait()
        return np.zeros((stop - start, 2))

    plan = plan_of_thirty_rows(tmp_path, read)
    fill_together(np.empty(plan.shape, plan.dtype), plan.rows, plan.layout, plan.cell, 10)
    assert len(names) == 3
    assert threading.current_thread().name in names


def test_called_on_the_pool_itself_it_ends(opened, monkeypatch):
    """Who waits for a piece that no thread has come to fills it himself, so that threads of the pool may ask, too."""
    ds, whole = opened([400])
    plan = ds.plan()
    monkeypatch.setattr(threads, "_executor", ThreadPoolExecutor(1))
    outs = [np.empty(plan.shape, plan.dtype) for _ in range(8)]
    asked = [threads._pool().submit(fill_together, out, plan.rows, plan.layout, plan.cell, 9) for out in outs]
    for out, future in zip(outs, asked, strict=True):
        future.result(timeout=60)
        np.testing.assert_array_equal(out, whole)


def test_after_an_error_nobody_writes(tmp_path, monkeypatch):
    """The error of a piece is raised once no other piece is being filled any more."""
    pool, wait = ThreadPoolExecutor(2), threads.wait
    monkeypatch.setattr(threads, "_executor", pool)
    begun, awaited, running = threading.Event(), threading.Event(), []

    def wait_for_others(futures):
        awaited.set()
        return wait(futures)

    def read(path, start, stop):
        if start == 0:
            raise ShardReadError("the first piece fails")
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(30)
        else:
            running.append(start)
            begun.set()
            awaited.wait(30)  # it ends no earlier than the one who asked waits for it
            running.remove(start)
        return np.ones((stop - start, 2))

    monkeypatch.setattr(threads, "wait", wait_for_others)
    plan = plan_of_thirty_rows(tmp_path, read)
    out = np.zeros(plan.shape, plan.dtype)
    with pytest.raises(ShardReadError, match="the first piece fails"):
        fill_together(out, plan.rows, plan.layout, plan.cell, 5)
    assert begun.is_set()
    assert not running
    before = out.copy()
    pool.shutdown(wait=True)
    np.testing.assert_array_equal(out, before)


@pytest.fixture
def uneven(tmp_path):
    """Write gzipped shards of which the first half is noise and the rest zeros; return them and what they hold."""
    whole = np.zeros((8_000, 64), "f4")
    whole[:4_000] = np.random.default_rng(0).random((4_000, 64))
    for i, part in enumerate(np.split(whole, 4)):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file.create_dataset("data", data=part, chunks=(50, 64), compression="gzip")
    return tmp_path, whole


@pytest.mark.parametrize("index", [slice(None), slice(7_900, 100, -1)])
def test_uneven_shards_on_each_engine(uneven, engine, index):
    """Where tiles are unequal work, leaves share theirs, and the result is the same on every engine."""
    path, whole = uneven
    ds = lazyshards.open_shards(path, engine=engine)
    assert compile_plan(ds._layout, ds[index]._selection, Capacity(2)).piece_rows
    np.testing.assert_array_equal(np.asarray(ds[index].compute()), whole[index])


def test_damage_in_a_shared_tile(uneven, engine):
    """A damaged chunk is an error that names the shard, whichever thread came upon it, and the next compute works."""
    path, whole = uneven
    ds = lazyshards.open_shards(path, engine=engine, on_change="ignore")
    with h5py.File(path / "0.h5") as file:
        chunk = file["data"].id.get_chunk_info(20)
    with (path / "0.h5").open("r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(b"\xff" * 64)
    with pytest.raises(ShardReadError, match=r"0\.h5"):
        ds.compute()
    np.testing.assert_array_equal(np.asarray(ds[2_000:].compute()), whole[2_000:])


def test_plans_that_share_count_the_helpers_scratch(uneven):
    """The most bytes in memory count what each helping thread needs beside the leaves."""
    path, _ = uneven
    ds = lazyshards.open_shards(path, engine="numpy").astype("f8")
    plan = compile_plan(ds._layout, ds._selection, Capacity(2))
    assert plan.scratch_nbytes
    assert plan.peak_nbytes(2) == plan.nbytes + 4 * plan.scratch_nbytes


def test_who_waits_for_a_batch_fills_it(opened, monkeypatch):
    """A batch whose tiles no thread has come to is filled by the thread that waits for it."""
    ds, whole = opened([30, 0, 50, 20])
    pool, leave = ThreadPoolExecutor(1), threading.Event()
    monkeypatch.setattr(threads, "_executor", pool)
    pool.submit(leave.wait)
    engine = threads.ThreadEngine()
    plan = ds.plan(tiles_per_processor=3)
    try:
        with engine.reading():
            np.testing.assert_array_equal(engine.begin(plan, may_block=True).result(), whole)
    finally:
        leave.set()
        pool.shutdown()


def test_memory_is_used_again_and_no_callback_tells_of_it():
    """What a dropped batch lay in serves the next; an interrupt while a callback told of it would be lost."""
    engine, rows = threads.ThreadEngine(), (1 << 10, 32)
    with engine.reading():
        first = threads._buffers.take(rows, np.dtype("f8"))
        kept = threads._buffers.take(rows, np.dtype("f8"))
        where, owner = first.ctypes.data, first.base.base.obj
        assert [each.__callback__ for each in weakref.getweakrefs(owner)] == [None]
        view = first[3:]
        del first, owner
        assert threads._buffers.take(rows, np.dtype("f8")).ctypes.data not in (where, kept.ctypes.data)
        del view
        assert threads._buffers.take(rows, np.dtype("f8")).ctypes.data == where
