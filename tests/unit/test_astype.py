import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LayoutError, ShardReadError, UnsupportedDtypeError
from lazyshards.testing import (
    RaisingStorage,
    RecordingStorage,
    assert_same,
    example_array,
    index_chains,
    with_storage,
    write_npy_shards,
)

pytestmark = pytest.mark.usefixtures("on_numpy")

KINDS = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")


def values(shape, dtype):
    """Return values that every cast has an answer for: no NaN, nothing out of range."""
    count = int(np.prod(shape))
    return (np.arange(count) % 100).astype(dtype).reshape(shape)


def save(source, path, array):
    """Write a shard that the core reads in one of its ways."""
    if source == "packed":
        np.save(path, array)
    elif source == "planes":
        np.save(path, np.asfortranarray(array))
    elif source == "decoded":
        with open(path.with_suffix(".npz"), "wb") as file:
            np.savez_compressed(file, array)
    elif source == "decoded planes":
        with open(path.with_suffix(".npz"), "wb") as file:
            np.savez_compressed(file, np.asfortranarray(array))
    else:
        np.save(path, array.astype(array.dtype.newbyteorder(">")))


WIDE = [kind for kind in KINDS[:12] if kind != "f2"]
SOURCES = ("packed", "planes", "decoded", "decoded planes", "other byte order")


def shards(folder, source, array, cuts=(2, 2, 5)):
    """Write shards of one kind; return their paths."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.split(array, [cut for cut in cuts if cut < len(array)])):
        save(source, folder / f"s{i}.npy", part)
    return folder


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("stored", "target"), [("i2", "f4"), ("f4", "f8"), ("f4", "c8"), ("u1", "i8"), ("?", "f2")])
def test_every_source(tmp_path, engine, source, stored, target):
    """Every way in which rows are read casts them, on every engine, in one tile and in several."""
    array = values((9, 4), stored)
    ds = open_shards(shards(tmp_path / "s", source, array)).astype(target)
    assert ds.dtype == target
    for index in (slice(None), slice(1, 8), slice(None, None, -2), (slice(None), slice(1, 3)), [7, 0, 3]):
        found = ds[index].compute(engine=engine, tiles_per_processor=2)
        assert_same(np.asarray(found.get() if engine == "cupy" else found), array[index].astype(target))


@given(data=st.data(), stored=st.sampled_from(KINDS), target=st.sampled_from(KINDS), source=st.sampled_from(SOURCES))
@settings(max_examples=120, deadline=None)
def test_any_cast_and_index(tmp_path_factory, data, stored, target, source):
    """Any cast that a rule allows, before, between or after any indices, is what NumPy gives by that rule."""
    if np.dtype(stored).kind == "c" and np.dtype(target).kind != "c":
        return  # NumPy warns
    casting = data.draw(st.sampled_from(("safe", "same_kind", "unsafe")))
    array = values((data.draw(st.integers(0, 7)), *data.draw(st.lists(st.integers(0, 3), max_size=2))), stored)
    found = open_shards(shards(tmp_path_factory.mktemp("cast"), source, array))
    chain = data.draw(index_chains(array.shape))
    at = data.draw(st.integers(0, len(chain)))
    expected = array
    for i in range(len(chain) + 1):
        if i == at:
            if not np.can_cast(stored, target, casting):
                with pytest.raises(UnsupportedDtypeError):
                    found.astype(target, casting)
                return
            found, expected = found.astype(target, casting), np.asarray(expected).astype(target, casting=casting)
        if i < len(chain):
            found, expected = found[chain[i]], np.asarray(expected)[chain[i]]
    assert_same(found.compute(), expected)


@given(
    kinds=st.lists(st.sampled_from(WIDE), min_size=1, max_size=4),
    source=st.sampled_from(SOURCES),
)
@settings(max_examples=60, deadline=None)
def test_casts_of_casts(tmp_path_factory, kinds, source):
    """A cast of a cast goes through the type in between, with all that is lost there, as in NumPy."""
    array = (np.arange(24) * 37).astype("u2").reshape(8, 3)
    found, expected = open_shards(shards(tmp_path_factory.mktemp("cast"), source, array)), array
    for kind in kinds:
        if np.dtype(kind).kind in "iu" and expected.dtype.kind == "f":
            low, high = float(expected.min()), float(expected.max())
            if low < np.iinfo(kind).min or high > np.iinfo(kind).max:
                continue  # out of range: whatever the processor does
        found, expected = found.astype(kind, "unsafe"), expected.astype(kind)
    assert_same(found[::-1, 1:].compute(), expected[::-1, 1:])


def test_nothing_is_read(opened):
    """A cast reads nothing."""
    ds, _ = opened([4, 5])
    lazy = with_storage(ds, RaisingStorage()).astype("f8")[2:6]
    assert (lazy.shape, lazy.dtype, lazy.nbytes) == ((4, 3), np.dtype("f8"), 96)


def test_same_dtype_is_the_same_dataset(opened):
    """A cast to the type that it has changes nothing, whatever the byte order."""
    ds, _ = opened([4, 5])
    assert ds.astype("f4") == ds
    assert ds.astype(">f4") == ds


def test_casts_are_told_apart(opened):
    """Another cast is another fingerprint, on the way to one type as well."""
    ds, _ = opened([4, 5], dtype="i2")
    found = [ds, ds.astype("i4"), ds.astype("f8"), ds.astype("i4").astype("f8"), ds.astype("i1", "same_kind")]
    assert len({each.fingerprint for each in found}) == len(found)
    assert len(set(found)) == len(found)
    assert ds.astype("i4") == ds.astype("i4")


@pytest.mark.parametrize(
    ("stored", "target", "casting", "enough"),
    [
        ("f8", "f4", "safe", "same_kind"),
        ("i8", "f4", "safe", "same_kind"),
        ("f4", "i4", "safe", "unsafe"),
        ("f4", "i4", "same_kind", "unsafe"),
        ("c8", "f4", "same_kind", "unsafe"),
    ],
)
def test_rules(opened, stored, target, casting, enough):
    """What a rule does not allow is a TypeError that names both types and the rule that would."""
    ds, _ = opened([3], dtype=stored)
    with pytest.raises(TypeError, match=f'{np.dtype(stored)} to {np.dtype(target)} .*casting="{enough}"') as caught:
        ds.astype(target, casting)
    assert isinstance(caught.value, UnsupportedDtypeError)


def test_safe_is_the_rule(opened):
    """Without a rule, nothing is lost."""
    ds, _ = opened([3], dtype="f8")
    with pytest.raises(UnsupportedDtypeError):
        ds.astype("f4")


@pytest.mark.parametrize("dtype", ["O", "f9", None, "U", "V", ("f4", 3), object(), [("a", "O")]], ids=repr)
def test_no_dtype_of_elements(opened, dtype):
    """What no element can have is a TypeError."""
    ds, _ = opened([3])
    with pytest.raises(UnsupportedDtypeError, match="dtype="):
        ds.astype(dtype, "unsafe")


def test_no_rule(opened):
    """A rule that there is not is a ValueError that lists them."""
    ds, _ = opened([3])
    with pytest.raises(ValueError, match='"safe", "same_kind" or "unsafe"'):
        ds.astype("f8", "strict")


def test_text_that_is_no_number(tmp_path):
    """A value that cannot be cast is an error that names the file and both types."""
    np.save(tmp_path / "s0.npy", np.array(["1", "2"]))
    np.save(tmp_path / "s1.npy", np.array(["3", "x"]))
    ds = open_shards(tmp_path).astype("i4", "unsafe")
    assert ds[:3].compute().tolist() == [1, 2, 3]
    with pytest.raises(ShardReadError, match=r"s1\.npy' holds a value that cannot be cast from <U1 to int32"):
        ds.compute()


def test_fields_and_times(tmp_path):
    """Records and times are cast as NumPy casts them."""
    records = example_array((5,), np.dtype([("a", "<i2"), ("b", "<i2")]))
    target = np.dtype([("a", "<f4"), ("b", "<f8")])
    np.save(tmp_path / "r.npy", records)
    assert np.array_equal(open_shards(tmp_path / "r.npy").astype(target).compute(), records.astype(target))
    times = np.array(["2020-01-01", "2021-06-01"], "M8[D]")
    np.save(tmp_path / "t.npy", times)
    assert_same(open_shards(tmp_path / "t.npy").astype("M8[s]").compute(), times.astype("M8[s]"))


def test_shown(opened, capsys):
    """The dataset and its plan show what is cast to what."""
    ds, _ = opened([4, 5], dtype="i2")
    assert "cast" not in repr(ds)
    cast = ds.astype("f4").astype("f8")
    assert "float64 (cast from int16 to float32)" in repr(cast)
    cast.explain()
    assert "float64 (cast from int16 to float32)" in capsys.readouterr().out


def test_plan_counts_what_is_stored(opened):
    """A plan counts the bytes of the files as read, and those of the result as wanted; the leaf reads as planned."""
    ds, whole = opened([400, 500], dtype="i2")
    cast = ds.astype("f8")[100:600]
    plan = cast.plan()
    assert (plan.nbytes, plan.bytes_read) == (500 * 3 * 8, 500 * 3 * 2)
    storage = RecordingStorage(ds._layout.storage)
    assert_same(with_storage(cast, storage).compute(), whole[100:600].astype("f8"))
    assert storage.nbytes == plan.bytes_read
    assert len(storage.reads) == plan.requests


def test_scratch_is_bounded(tmp_path):
    """A cast needs a block of scratch, whatever is cast."""
    np.save(tmp_path / "s0.npy", np.zeros((1 << 20, 4), "f4"))
    plan = open_shards(tmp_path).astype("f8").astype("f4", "unsafe").plan()
    assert 0 < plan.scratch_nbytes <= 2 << 20


def test_pickles(opened):
    """A cast travels to another process."""
    ds, whole = opened([4, 5], dtype="i2")
    cast = pickle.loads(pickle.dumps(ds.astype("f4").astype("f8")))  # noqa: S301  # our own
    assert_same(cast[1:8].compute(), whole[1:8].astype("f8"))


def test_into_an_array(opened):
    """An array to be filled has the type that is cast to."""
    ds, whole = opened([4, 5], dtype="i2")
    out = np.empty((9, 3))
    assert ds.astype("f8").compute(out=out) is out
    assert_same(out, whole.astype("f8"))


# dtype= when opened -------------------------------------------------------------------------------------------------


def test_shards_of_several_types(tmp_path, engine):
    """Shards of different types are one dataset if each can be cast safely."""
    parts = [values((n, 2), kind) for n, kind in ((3, "f4"), (2, ">i2"), (0, "?"), (4, "f2"), (2, "f4"))]
    write_npy_shards(tmp_path, parts)
    ds = open_shards(tmp_path, dtype="f4")
    expected = np.concatenate(parts, dtype="f4", casting="safe")
    assert_same(ds.to_numpy(), expected)
    found = ds[1:10].compute(engine=engine, tiles_per_processor=2)
    assert_same(np.asarray(found.get() if engine == "cupy" else found), expected[1:10])
    assert "float32 (cast from" in repr(ds)


def test_cast_again_after_several_types(tmp_path):
    """A cast of such a dataset goes through the type that it was opened with."""
    parts = [values((3, 2), "f8") + 0.1, values((3, 2), "f4") + np.float32(0.1)]
    write_npy_shards(tmp_path, parts)
    ds = open_shards(tmp_path, dtype="f8").astype("f4", "same_kind").astype("f8")
    assert_same(ds.compute(), np.concatenate(parts, dtype="f8").astype("f4").astype("f8"))


def test_unsafe_shards_are_all_named(tmp_path):
    """Every shard that cannot be cast safely is named, with both types."""
    write_npy_shards(tmp_path, [np.zeros((2, 3), kind) for kind in ("f4", "f8", "i8", "f2")])
    with pytest.raises(LayoutError, match=r"2 of 4 shards") as caught:
        open_shards(tmp_path, dtype="f4")
    assert "shard_0001.npy': has dtype float64, which cannot be cast safely to float32" in str(caught.value)
    assert "shard_0002.npy': has dtype int64" in str(caught.value)


def test_row_shapes_must_still_agree(tmp_path):
    """A type says nothing about the shape."""
    write_npy_shards(tmp_path, [np.zeros((2, 3), "f4"), np.zeros((2, 3), "f2"), np.zeros((2, 4), "f4")])
    with pytest.raises(LayoutError, match=r"shard_0002.npy': has rows of shape \(4,\), expected \(3,\)"):
        open_shards(tmp_path, dtype="f4")


def test_narrowed(tmp_path):
    """The part of a dataset that touches only some shards casts those right."""
    parts = [values((3, 2), kind) for kind in ("i2", "u1", "f4", "?")]
    write_npy_shards(tmp_path, parts)
    ds = open_shards(tmp_path, dtype="f8")
    expected = np.concatenate(parts, dtype="f8")
    for start in range(12):
        assert_same(ds[start : start + 2].compute(), expected[start : start + 2])
        assert_same(ds[[start, 11 - start]].compute(), expected[[start, 11 - start]])
