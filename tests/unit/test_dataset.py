import gc
import pickle
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import lazyshards
from lazyshards import engines, finding, open_shards
from lazyshards.dataset import ShardedDataset
from lazyshards.errors import (
    CapacityError,
    EngineError,
    EngineFallbackWarning,
    EngineUnavailableError,
    SelectionError,
    UnsupportedDtypeError,
)
from lazyshards.plan import Capacity, ReadPlan
from lazyshards.storage import LocalStorage
from lazyshards.testing import (
    EngineConformance,
    RaisingStorage,
    RecordingStorage,
    assert_same,
    example_array,
    with_storage,
    write_npy_shards,
)


class TestEngines(EngineConformance):
    """Every engine that is here."""


# What it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [..., slice(2, 5), 3, (3, 1), (slice(None), 0), (0, 0, 0), slice(0, 0), [1, 1, 0], (slice(None, None, -2), ..., 1)],
    ids=str,
)
def test_properties(opened, index):
    """Shape, dtype, ndim, size, nbytes and len are those of the array."""
    ds, whole = opened((3, 0, 4), (2, 3), "i2")
    part, array = ds[index], np.asarray(whole[index])
    assert (part.shape, part.dtype, part.ndim, part.size, part.nbytes) == (
        array.shape,
        array.dtype,
        array.ndim,
        array.size,
        array.nbytes,
    )
    if array.ndim:
        assert len(part) == len(array)


def test_no_axes_have_no_len(opened):
    """A single element has no length and cannot be iterated, as in NumPy."""
    ds, _ = opened((3,), ())
    with pytest.raises(TypeError, match="len"):
        len(ds[0])
    with pytest.raises(TypeError, match="iteration"):
        list(ds[0])


def test_sizes_beyond_64_bits_do_not_wrap():
    """Sizes are Python integers: a dataset of very many bytes says how many."""
    from lazyshards.layout import Layout, Packed, Shard
    from lazyshards.selection import select_all
    from lazyshards.storage import Stamp

    shards = [Shard("/d/s", 2**40, (2**20,), np.dtype("f8"), Stamp(1), Packed(128))]
    ds = ShardedDataset(Layout.from_shards(shards, "npy", LocalStorage()), select_all(2**40, (2**20,)), "numpy")
    assert (ds.size, ds.nbytes) == (2**60, 2**63)


def test_format_and_shards(opened):
    """A dataset knows its format, and all shards that were opened, whatever was sliced."""
    ds, _ = opened((3, 0, 4))
    assert ds.format == "npy"
    assert [shard.rows for shard in ds[5:6].shards] == [3, 0, 4]
    assert all(isinstance(shard, lazyshards.Shard) for shard in ds.shards)


def test_immutable(opened):
    """Nothing of a dataset can be set, and no attribute added."""
    ds, _ = opened((3,))
    for name in ("shape", "dtype", "new_name"):
        with pytest.raises(AttributeError):
            setattr(ds, name, None)


# Identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((slice(2, 6),), (slice(1, None), slice(1, 5))),
        ((slice(0, 7),), ()),
        ((slice(0, 1),), (slice(0, 3, 7),)),
        ((slice(None, None, 2),), ([0, 2, 4, 6],)),
        (([3, 1, 0], slice(1, None)), ([1, 0],)),
        ((slice(5, 2),), (slice(7, 9),)),
        (((slice(None), slice(0, 1)),), ((slice(None), slice(0, 2, 5)),)),
        (((slice(None), slice(0, 3, 2)),), ((slice(None), slice(0, 4, 2)),)),
        ((np.arange(7) > 3,), (slice(4, 7),)),
    ],
    ids=str,
)
def test_equal(opened, one, other):
    """Datasets that select the same of the same shards are equal and have one hash, whatever steps led there."""
    ds, _ = opened((3, 0, 4))
    a = b = ds
    for index in one:
        a = a[index]
    for index in other:
        b = b[index]
    assert a == b
    assert hash(a) == hash(b)
    assert a.fingerprint == b.fingerprint


@pytest.mark.parametrize(
    "index",
    [
        slice(1, None),
        slice(None, None, -1),
        0,
        slice(0, 1),
        (slice(None), 0),
        (slice(None), slice(0, 1)),
        [0, 0],
        [1, 0],
    ],
    ids=str,
)
def test_not_equal(opened, index):
    """Another selection is another dataset; an integer is not the slice of one row."""
    ds, _ = opened((3, 0, 4))
    others = [ds, ds[1:], ds[::-1], ds[0], ds[0:1], ds[:, 0], ds[:, 0:1], ds[[0, 0]], ds[[1, 0]]]
    assert [ds[index] == other for other in others].count(True) == 1


def test_equality_needs_the_same_shards(opened):
    """The same content elsewhere is another dataset; opened again it is the same; other types are never equal."""
    ds, _ = opened((3, 4), name="here")
    moved, _ = opened((3, 4), name="there")
    assert ds != moved
    assert ds.fingerprint == moved.fingerprint
    assert ds == open_shards(Path(ds.shards[0].path).parent, engine="numpy")
    assert ds != "dataset"
    assert (ds == np.zeros(7)) is False


def test_pickle(opened):
    """A dataset that travelled is equal, has the same engine and reads the same."""
    ds, whole = opened((3, 0, 4))
    part = ds[5:1:-2, 1:]
    again = pickle.loads(pickle.dumps(part))  # noqa: S301  # our own
    assert again == part
    assert again.engine == "numpy"
    assert_same(again.compute(), whole[5:1:-2, 1:])


# Reading ----------------------------------------------------------------------------------------------------------


def test_numpy_takes_it(opened):
    """np.asarray, np.array and a ufunc read it, with a dtype where one is given."""
    ds, whole = opened((3, 0, 4))
    assert_same(np.asarray(ds), whole)
    assert_same(np.array(ds[2:5]), whole[2:5])
    with np.errstate(all="ignore"):
        assert_same(np.asarray(ds, dtype="f8"), whole.astype("f8"))
    assert_same(ds.to_numpy(), whole)
    assert np.asarray(ds).flags.writeable


def test_never_a_view(opened):
    """NumPy is told that reading always copies."""
    with pytest.raises(ValueError, match="copy=False"):
        opened((3,))[0].__array__(copy=False)


@pytest.mark.parametrize("row_shape", [(), (3,), (2, 0)], ids=str)
@pytest.mark.parametrize("nbytes", [1, 20, 1 << 20])
def test_iteration(opened, monkeypatch, row_shape, nbytes):
    """Iteration gives every row in order, whatever the block that is read at a time."""
    monkeypatch.setattr("lazyshards.dataset._ITERATION_NBYTES", nbytes)
    ds, whole = opened((3, 0, 4), row_shape)
    rows = list(ds)
    assert len(rows) == 7
    for row, expected in zip(rows, whole, strict=True):
        assert_same(row, expected)
    for row, expected in zip(ds[3], whole[3], strict=True) if row_shape else ():
        assert_same(row, expected)


def test_iteration_is_lazy(opened, monkeypatch):
    """The first row is there when one block was read, not the whole dataset."""
    monkeypatch.setattr("lazyshards.dataset._ITERATION_NBYTES", 24)
    ds, _ = opened((3, 4))
    storage = RecordingStorage(LocalStorage())
    next(iter(with_storage(ds, storage)))
    assert storage.nbytes == 24


def test_results_are_the_callers_own(opened):
    """Two computes give two arrays, each writable, and none changes the other."""
    ds, whole = opened((3, 4))
    one, two = ds.compute(), ds.compute()
    one[...] = 0
    assert_same(two, whole)


def test_results_are_freed(tmp_path):
    """A large result is given back to the system when it is dropped."""
    ds = open_shards(write_npy_shards(tmp_path, [np.zeros((2_000_000,))]), engine="numpy")
    array = ds.compute()
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    gone = weakref.ref(base)
    del array, base
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("out", [np.float32(0), [0.0], 1.0, None.__class__], ids=repr)
def test_out_of_one_element_must_be_an_array(opened, out):
    """What cannot be filled is refused as ``out`` of a single element, and not silently left as it was."""
    ds, _ = opened((3,), ())
    with pytest.raises(EngineError, match="out is a"):
        ds[1].compute(out=out)


@pytest.mark.parametrize(("library", "method"), [("torch", "to_torch"), ("dask", "to_dask")])
def test_missing_library_is_named(opened, monkeypatch, library, method):
    """Where torch or dask is missing, the error of the method that needs it says how to install it."""
    monkeypatch.delitem(sys.modules, f"lazyshards.adapters.{library}", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{method}\(\) needs .*pip install '?{library}"):
        getattr(opened([3])[0], method)()


def test_read_only_out(opened):
    """A read-only ``out`` is refused before anything is read."""
    ds, _ = opened((3,))
    out = np.zeros((3, 3), "f4")
    out.flags.writeable = False
    with pytest.raises(EngineError, match="read-only"):
        with_storage(ds, RaisingStorage()).compute(out=out)


@pytest.mark.parametrize(
    "make", [lambda: np.zeros((6, 6), "f4")[::2, ::2], lambda: np.zeros((3, 3), "f4").T], ids=["strided", "fortran"]
)
def test_out_of_any_strides(opened, make):
    """An ``out`` that is a view with any strides is filled."""
    ds, whole = opened((2, 1))
    out = make()
    assert ds.compute(out=out) is out
    assert_same(out, whole)


def as_strided(count, strides):
    """Return an array of shape (3, 3) with such strides, in elements."""
    return np.lib.stride_tricks.as_strided(np.zeros(count, "f4"), (3, 3), [4 * stride for stride in strides])


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (1, 0), (0, 0), (2, 1)], ids=repr)
def test_out_with_elements_over_one_another(opened, strides):
    """An ``out`` that has not memory for every element is refused: each row would be written over by the next."""
    ds, _ = opened((3,))
    with pytest.raises(EngineError, match="overlap"):
        with_storage(ds, RaisingStorage()).compute(out=as_strided(9, strides))
    with pytest.raises(EngineError, match="overlap"):
        ds[0].compute(out=as_strided(9, (0, 0))[0])


@pytest.mark.parametrize("strides", [(3, 1), (1, 3), (6, 2), (-3, 1)], ids=repr)
def test_out_with_elements_beside_one_another(opened, strides):
    """An ``out`` that has memory for every element is filled, whatever its strides are."""
    ds, whole = opened((3,))
    out = as_strided(18, (3, 1))[::-1] if strides[0] < 0 else as_strided(18, strides)
    assert_same(ds.compute(out=out), whole)


@pytest.mark.parametrize("rows", [(3,), (2, 1)], ids=repr)
def test_out_of_a_subclass(opened, rows):
    """A matrix, which never has one axis, is filled as any array is; a masked array, which hides elements, is not."""
    ds, whole = opened(rows)
    with pytest.warns(PendingDeprecationWarning):
        out = np.matrix(np.zeros((3, 3), "f4"))
    assert ds.compute(out=out) is out
    assert_same(np.asarray(out), whole)
    with pytest.raises(EngineError, match="masked"):
        ds.compute(out=np.ma.array(np.zeros((3, 3), "f4"), mask=True))


# Laziness ---------------------------------------------------------------------------------------------------------


def test_opening_reads_heads_only(write, monkeypatch):
    """Opening reads the first bytes of each file and no row."""
    path, _ = write((1000, 0, 2000))
    storage = RecordingStorage(LocalStorage())
    real = finding.open_storage
    monkeypatch.setattr(finding, "open_storage", lambda *given: (storage, real(*given)[1]))
    ds = open_shards(path, engine="numpy")
    assert ds.shape == (3000, 3)
    assert len(storage.reads) == 3
    assert all((offset, nbytes) == (0, 128) for _, offset, nbytes in storage.reads)


def test_nothing_but_compute_reads(opened):
    """Slicing, comparing, pickling, printing and planning read nothing."""
    ds, _ = opened((300, 0, 400))
    ds = with_storage(ds, RaisingStorage())
    for part in (
        ds,
        ds[5:500:3],
        ds[3],
        ds[[3, 1, 600]],
        ds[np.arange(700) % 2 == 0],
        ds[::-1][:, 0],
        ds[0:0],
        ds[2, 1],
    ):
        assert repr(part)
        assert part._repr_html_()
        assert part.plan("numpy").nbytes == part.nbytes
        assert part.plan("numpy").requests >= 0
        assert part == part[...]
        assert hash(part)
        assert len(part.shards) == 3
        assert pickle.dumps(part)
        assert (part.shape, part.size, part.engine) is not None


def test_explaining_reads_nothing(opened, capsys):
    """explain() prints the plan and reads nothing."""
    ds, _ = opened((300, 0, 400))
    with_storage(ds, RaisingStorage())[5:500].explain()
    assert "shard" in capsys.readouterr().out


def test_compute_reads(opened):
    """The double that proves the rest: compute() on it raises."""
    ds, _ = opened((3,))
    with pytest.raises(AssertionError, match="data was read"):
        with_storage(ds, RaisingStorage()).compute()


@pytest.mark.parametrize(
    ("index", "touched"),
    [
        (slice(None), {0, 2, 3}),
        (slice(0, 3), {0}),
        (slice(3, 4), {2}),
        (slice(2, 8), {0, 2, 3}),
        (slice(None, None, 100), {0}),
        (7, {3}),
        (-1, {3}),
        ([0, 8], {0, 3}),
        (slice(0, 0), set()),
        ([], set()),
        (slice(8, 2, -1), {2, 3}),
        (slice(0, 9, 4), {0, 2, 3}),
    ],
    ids=str,
)
def test_only_touched_shards_are_read(opened, index, touched):
    """Only the files that hold wanted rows are read, and none more than it holds."""
    ds, whole = opened((3, 0, 4, 2))
    storage = RecordingStorage(LocalStorage())
    assert_same(with_storage(ds, storage)[index].compute(), whole[index])
    assert storage.paths == {ds.shards[i].path for i in touched}


def test_a_contiguous_slice_reads_its_own_bytes(opened):
    """A contiguous slice of whole rows reads exactly its bytes."""
    ds, _ = opened((30, 40, 20))
    storage = RecordingStorage(LocalStorage())
    part = with_storage(ds, storage)[10:85]
    part.compute()
    assert storage.nbytes == part.nbytes


def test_computing_again_reads_again(opened):
    """Nothing is kept between two computes."""
    ds, _ = opened((3,))
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(ds, storage)
    ds.compute()
    ds.compute()
    assert len(storage.reads) == 2


# Engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_choice(monkeypatch):
    """Let the process choose its engine anew, and forget the choice afterwards."""
    monkeypatch.delenv("LAZYSHARDS_ENGINE", raising=False)
    monkeypatch.setattr(engines, "_auto", None)
    monkeypatch.setattr(engines, "_preferred", None)
    return monkeypatch


def test_the_nearest_word_decides(write, fresh_choice):
    """What compute() is told comes before what the dataset was, then set_engine, then the environment."""
    path, whole = write((3, 4))
    fresh_choice.setattr(engines.bringup, "why_unavailable", lambda: "it was switched off for this test")
    assert open_shards(path).engine == "numpy"
    fresh_choice.setenv("LAZYSHARDS_ENGINE", "numpy")
    assert open_shards(path, engine="auto").engine == "numpy"
    assert_same(open_shards(path, engine="auto").compute(engine="numpy"), whole)


def test_set_engine(write, fresh_choice):
    """set_engine is for every dataset that has no engine of its own, and None takes it back."""
    path, _ = write((3,))
    ds = open_shards(path)
    fresh_choice.setenv("LAZYSHARDS_ENGINE", "no such engine")
    lazyshards.set_engine("numpy")
    assert ds.engine == "numpy"
    lazyshards.set_engine(None)
    with pytest.raises(ValueError, match="no such engine"):
        ds.compute()


def test_unknown_engines(write):
    """An engine that does not exist is refused wherever it is named, with those that do."""
    path, _ = write((3,))
    with pytest.raises(ValueError, match=r"'dask'.*'numpy'"):
        open_shards(path, engine="dask")
    with pytest.raises(ValueError, match="'dask'"):
        lazyshards.set_engine("dask")
    with pytest.raises(ValueError, match="'dask'"):
        open_shards(path, engine="numpy").compute(engine="dask")
    with pytest.raises(ValueError, match="'dask'"):
        open_shards(path, engine="numpy").plan(engine="dask")


def test_a_missing_engine_says_what_installs_it(write, monkeypatch):
    """An engine that is not installed is an ImportError with the command that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    monkeypatch.delitem(__import__("sys").modules, "lazyshards.engines.cupy", raising=False)
    monkeypatch.setattr(engines, "_engines", {"numpy": engines.find_engine("numpy")})
    path, _ = write((3,))
    with pytest.raises(EngineUnavailableError, match="pip install"):
        open_shards(path, engine="cupy").compute()


def test_auto_takes_numpy_for_what_legate_lacks(write, fresh_choice):
    """The automatic choice warns when it takes NumPy for a dtype that Legate has not, and only when it computes."""
    fresh_choice.setattr(engines, "_auto", ("legate", "for this test"))
    path, whole = write((3,), (2,), "S3")
    ds = open_shards(path)
    assert ds.engine == "numpy"
    with pytest.warns(EngineFallbackWarning, match="dtype"):
        found = ds.compute()
    assert_same(found, whole)


def test_auto_takes_numpy_on_other_threads(write, fresh_choice):
    """The automatic choice warns when it takes NumPy on a thread that Legate does not serve."""
    fresh_choice.setattr(engines, "_auto", ("legate", "for this test"))
    path, whole = write((3,))
    ds, found = open_shards(path), []

    def run():
        with pytest.warns(EngineFallbackWarning, match="main thread"):
            found.append(ds.compute())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_same(found[0], whole)


def test_a_dtype_that_the_engine_lacks(tmp_path, engine):
    """A dtype that an engine cannot hold is an error that names one that can, before anything is read."""
    ds = open_shards(write_npy_shards(tmp_path, [example_array((3,), "S4")]), engine="numpy")
    if engine == "numpy":
        assert_same(ds.compute(), example_array((3,), "S4"))
        return
    with pytest.raises(UnsupportedDtypeError, match='engine="numpy"'):
        with_storage(ds, RaisingStorage()).compute(engine=engine)


def test_too_many_axes(tmp_path, engine):
    """More axes than an engine holds are an error that names one that can, and a slice with fewer is read."""
    whole = example_array((2, 1, 1, 1, 1, 1, 1, 3), "f4")
    ds = open_shards(write_npy_shards(tmp_path, [whole]), engine=engine)
    if engines.find_engine(engine).why_not(np.dtype("f4"), 8) is not None:
        with pytest.raises(UnsupportedDtypeError, match='engine="numpy"'):
            ds.compute()
    assert_same(ds[:, 0, 0, ..., 1].compute(), whole[:, 0, 0, ..., 1])


def test_what_does_not_fit_is_refused_before_it_is_read(opened, monkeypatch):
    """A result that does not fit is refused by compute() before anything is read; its plan says how large it is."""
    ds, _ = opened((30,))
    engine = engines.find_engine("numpy")
    monkeypatch.setattr(type(engine), "capacity", lambda *_: Capacity(2, result_nbytes=100))
    lazy = with_storage(ds, RaisingStorage())
    with pytest.raises(CapacityError, match="at most 8 "):
        lazy.compute()
    assert lazy.plan().nbytes == 360


def test_plan(opened):
    """plan() is the plan that compute() would run."""
    ds, _ = opened((3, 0, 4))
    plan = ds[2:5].plan()
    assert isinstance(plan, ReadPlan)
    assert (plan.shape, plan.shards, plan.requests, plan.bytes_read) == ((3, 3), 2, 2, 36)


def test_selection_errors_name_the_index(opened):
    """An index out of bounds is an IndexError with the index and the size."""
    ds, _ = opened((3,))
    with pytest.raises(SelectionError, match=r"index 3 .* size 3"):
        ds[3]
    with pytest.raises(IndexError):
        ds[0][5]


def test_iteration_ends_for_old_style_loops(opened):
    """A loop by index ends with IndexError, as for any sequence."""
    ds, whole = opened((3,))
    rows, i = [], 0
    while True:
        try:
            rows.append(ds[i].compute())
        except IndexError:
            break
        i += 1
    assert_same(np.array(rows), whole)


def test_progress_counts_every_row_once(opened, engine, capsys):
    """compute(progress=True) gives the same array, and a bar that ends at the number of rows."""
    ds, whole = opened((40, 0, 25))
    got = ds[::2].compute(engine=engine, progress=True)
    assert np.array_equal(np.asarray(got), whole[::2], equal_nan=True)
    said = capsys.readouterr().err
    assert said.startswith(f"compute set[::2] on {engine}: 33 of 33 rows (100 %)")


def test_progress_of_a_failing_compute(opened, engine):
    """A shard that cannot be read raises its error, progress bar or not, and nothing hangs."""
    ds, _ = opened((40, 25))
    Path(ds.shards[1].path).unlink()
    with pytest.raises(lazyshards.ShardReadError, match=r"shard_0001\.npy"):
        ds.compute(engine=engine, progress=True)
