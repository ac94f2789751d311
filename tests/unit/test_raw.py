import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LayoutError, UnsupportedDtypeError
from lazyshards.testing import (
    DTYPES,
    FormatConformance,
    RecordingStorage,
    assert_same,
    example_array,
    index_chains,
    with_storage,
)
from lazyshards.testing import layouts as drawn_layouts

pytestmark = pytest.mark.usefixtures("on_numpy")


def describe(folder, dtype, shape, **more):
    """Write the description of a directory's shards."""
    text = dtype if isinstance(dtype, list) else np.dtype(dtype).str
    (folder / "meta.json").write_text(json.dumps({"dtype": text, "shape": list(shape), **more}))


@pytest.fixture
def folder(tmp_path):
    """Give a directory with two shards of 12-byte rows, and what they hold."""
    whole = example_array((9, 3), "<f4")
    (tmp_path / "part_0.bin").write_bytes(whole[:4].tobytes())
    (tmp_path / "part_1.bin").write_bytes(whole[4:].tobytes())
    return tmp_path, whole


class TestRawFormat(FormatConformance):
    """Rows as plain bytes, described by meta.json."""

    format = "raw"
    dtypes = (*DTYPES, "S3", "U2", "M8[s]", ">f4", ">i8")
    head_nbytes = 1 + (64 << 10) + 1

    def write(self, path, array):
        """Write the bytes, and beside them what they are."""
        describe(path.parent, array.dtype, array.shape[1:])
        path.write_bytes(array.tobytes())

    def test_damage_is_told(self, shards):
        """A file that is cut within a row is an error that names it; one that is cut between rows holds fewer."""
        ds, whole = shards([5, 4])
        path = ds.shards[1].path
        with open(path, "r+b") as file:
            file.truncate(3 * 12 + 5)
        with pytest.raises(LayoutError, match="shard_1"):
            open_shards([path], format="raw")
        with open(path, "r+b") as file:
            file.truncate(3 * 12)
        assert_same(open_shards([path], format="raw").compute(), whole[5:8])


@pytest.mark.parametrize("suffix", [".bin", ".raw", ".dat", ".f32"])
def test_description_beside_the_shards(tmp_path, suffix):
    """Shards of any suffix are described by meta.json, which is no shard itself."""
    whole = example_array((6, 2), "<f4")
    for i, part in enumerate(np.split(whole, 3)):
        (tmp_path / f"part_{i}{suffix}").write_bytes(part.tobytes())
    describe(tmp_path, "<f4", (2,))
    ds = open_shards(tmp_path, format="raw")
    assert len(ds.shards) == 3
    assert_same(ds.compute(), whole)


def test_format_is_told_by_suffix(folder):
    """A directory of .bin files is raw."""
    path, whole = folder
    assert_same(open_shards(path, dtype="<f4", row_shape=(3,)).compute(), whole)


@pytest.mark.parametrize("row_shape", [3, (3,), [3]], ids=str)
def test_options_describe(folder, row_shape):
    """dtype= and row_shape= do without a description; a row shape of one axis may be its length."""
    path, whole = folder
    assert_same(open_shards(path, format="raw", dtype="<f4", row_shape=row_shape).compute(), whole)


@given(arrays=drawn_layouts(), offset=st.integers(0, 40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_layout_and_index(tmp_path_factory, arrays, offset, data):
    """Shards of any dtype, byte order, row shape and offset give what NumPy gives for any chain of indices."""
    folder = tmp_path_factory.mktemp("raw")
    dtype = arrays[0].dtype
    if not np.prod(arrays[0].shape[1:]):
        return  # rows of no bytes cannot be counted
    for i, array in enumerate(arrays):
        (folder / f"s{i}.bin").write_bytes(b"x" * offset + array.astype(dtype).tobytes())
    found = open_shards(folder, format="raw", dtype=dtype, row_shape=arrays[0].shape[1:], offset=offset)
    expected = np.concatenate([array.astype(dtype) for array in arrays])
    for index in data.draw(index_chains(expected.shape)):
        found, expected = found[index], expected[index]
    assert_same(found.compute(), expected)


def test_offset_in_the_description(tmp_path):
    """Bytes before the first row of each file are passed over."""
    whole = example_array((5, 2), "<i2")
    (tmp_path / "a.bin").write_bytes(b"h" * 100 + whole.tobytes())
    describe(tmp_path, "<i2", (2,), offset=100)
    assert_same(open_shards(tmp_path).compute(), whole)


def test_fields(tmp_path):
    """A description may have a dtype of fields."""
    whole = example_array((5,), np.dtype([("a", "<f4"), ("b", ">i2", (2,))]))
    (tmp_path / "a.bin").write_bytes(whole.tobytes())
    describe(tmp_path, [["a", "<f4"], ["b", ">i2", [2]]], ())
    found = open_shards(tmp_path).compute()
    assert found.dtype == whole.dtype.newbyteorder("=")
    assert np.array_equal(found, whole.astype(found.dtype))


def test_size_mismatch_shows_the_arithmetic(folder):
    """A file that is not a whole number of rows is an error with the sum that does not come out; others are not."""
    path, _ = folder
    with (path / "part_1.bin").open("ab") as file:
        file.write(b"\0" * 7)
    describe(path, "<f4", (3,))
    with pytest.raises(LayoutError) as caught:
        open_shards(path)
    assert "part_1.bin" in str(caught.value)
    assert "67 bytes = 5 x 12 + 7" in str(caught.value)
    assert "part_0.bin" not in str(caught.value)


def test_shorter_than_the_offset(folder):
    """A file that ends before its first row is an error."""
    path, _ = folder
    with pytest.raises(LayoutError, match="expected 100 before the first row"):
        open_shards(path, dtype="<f4", row_shape=3, offset=100)


def test_rows_per_shard(folder):
    """Every shard but the last holds as many rows as the description says."""
    path, whole = folder
    describe(path, "<f4", (3,), rows_per_shard=5)
    with pytest.raises(LayoutError, match=r"part_0.bin': holds 4 rows, but its description says rows_per_shard 5"):
        open_shards(path)
    (path / "part_0.bin").write_bytes(whole[:5].tobytes())
    (path / "part_1.bin").write_bytes(whole[5:].tobytes())
    assert_same(open_shards(path).compute(), whole)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": ">f4"}, "dtype=>f4 was given, but .*says dtype <f4"),
        ({"row_shape": (4,)}, r"row_shape=\(4,\) was given, but .*says shape \(3,\)"),
        ({"offset": 4}, "offset=4 was given, but .*says offset 0"),
    ],
)
def test_options_contradict_the_description(folder, options, text):
    """Options that say something else than the description are an error that shows both."""
    path, _ = folder
    describe(path, "<f4", (3,), offset=0)
    with pytest.raises(LayoutError, match=text):
        open_shards(path, **options)


@pytest.mark.parametrize(("options", "lacking"), [({}, "dtype= and row_shape="), ({"dtype": "f4"}, "row_shape=")])
def test_nothing_is_guessed(folder, options, lacking):
    """Without a description what is lacking is named."""
    path, _ = folder
    with pytest.raises(LayoutError, match=f"give {lacking}"):
        open_shards(path, **options)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "makes no sense"),
        ("[]", "it is a list"),
        ('{"dtype": "f4", "shape": [3], "stride": 1}', "unknown key 'stride'"),
        ('{"dtype": "f9", "shape": [3]}', "not a dtype"),
        ('{"dtype": "O", "shape": [3]}', "expected a dtype of plain values"),
        ('{"dtype": "U", "shape": [3]}', "does not say one size"),
        ('{"dtype": "f4", "shape": 3}', "its shape is 3"),
        ('{"dtype": "f4", "shape": [-3]}', "its shape is"),
        ('{"dtype": "f4", "shape": [3], "offset": -1}', "its offset is -1"),
        ('{"dtype": "f4", "shape": [3], "rows_per_shard": 1.5}', "its rows_per_shard is 1.5"),
        ('{"dtype": "f4", "shape": [0]}', "a row takes no bytes"),
        (" " * 70_000, "more than 65,536 bytes"),
        ("[" * 60_000, "makes no sense"),
    ],
    ids=lambda text: text[:30],
)
def test_damaged_descriptions(folder, text, fault):
    """A description that makes no sense is a fault of the shards beside it that says why."""
    path, _ = folder
    (path / "meta.json").write_text(text)
    with pytest.raises(LayoutError, match=fault):
        open_shards(path)


@pytest.mark.parametrize(
    "options", [{"row_shape": "3"}, {"row_shape": (1.5,)}, {"row_shape": -1}, {"offset": -4}, {"offset": "4"}], ids=str
)
def test_options_of_the_wrong_kind(folder, options):
    """An option that makes no sense is a TypeError that names it."""
    path, _ = folder
    with pytest.raises(TypeError, match=next(iter(options))):
        open_shards(path, format="raw", **options)


def test_python_objects_are_refused(folder):
    """Pointers in a file are no data."""
    with pytest.raises(UnsupportedDtypeError):
        open_shards(folder[0], format="raw", dtype=object, row_shape=())


def test_description_of_each_directory(tmp_path):
    """Shards in several directories each have the description that lies beside them."""
    whole = example_array((6, 2), "<f4")
    for i, kind in enumerate(("<f4", ">f4")):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "a.bin").write_bytes(whole[3 * i : 3 * i + 3].astype(kind).tobytes())
        describe(tmp_path / str(i), kind, (2,))
    assert_same(open_shards(tmp_path / "*" / "a.bin").compute(), whole)


def test_another_offset_is_another_dataset(folder):
    """What is read of the same files differs by options, and so do the fingerprints."""
    path, _ = folder
    kinds = [{"dtype": "<f4", "row_shape": 3}, {"dtype": "<i4", "row_shape": 3}, {"dtype": "<f4", "row_shape": (1, 3)}]
    assert len({open_shards(path, **kind).fingerprint for kind in kinds}) == 3


def test_reads_only_what_is_asked(folder):
    """A slice reads the bytes of its rows."""
    path, whole = folder
    ds = open_shards(path, dtype="<f4", row_shape=3)
    storage = RecordingStorage(ds._layout.storage)
    assert_same(with_storage(ds, storage)[3:6].compute(), whole[3:6])
    assert [(offset, nbytes) for _, offset, nbytes in storage.reads] == [(36, 12), (0, 24)]


def test_remote(folder):
    """Descriptions and shards are found in an object store as well."""
    fsspec = pytest.importorskip("fsspec")
    path, whole = folder
    describe(path, "<f4", (3,))
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/raw_shards", recursive=True)
    try:
        assert_same(open_shards("memory://raw_shards")[2:7].compute(), whole[2:7])
    finally:
        memory.rm("/raw_shards", recursive=True)
