import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LayoutError
from lazyshards.testing import (
    FormatConformance,
    RecordingStorage,
    assert_same,
    example_array,
    index_chains,
    with_storage,
)

pytestmark = pytest.mark.usefixtures("on_numpy")

NAMES = {
    "?": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16", "u4": "U32", "i4": "I32", "f4": "F32",
    "u8": "U64", "i8": "I64", "f8": "F64", "c8": "C64",
}  # fmt: skip


def safetensors_bytes(tensors, *, pad=0, metadata=None, **changed):
    """Return the bytes of a file with these arrays by name; ``changed`` replaces entries of the header by name."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, array in tensors.items():
        kind = NAMES[array.dtype.newbyteorder("=").str.lstrip("<|=").replace("b1", "?")]
        body = array.astype(array.dtype.newbyteorder("<")).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    for name, change in changed.items():
        header[name] = {**header.get(name, {}), **change} if isinstance(change, dict) else change
    text = json.dumps(header).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def raw_bytes(text, data=b""):
    """Return the bytes of a file whose header is this text, whatever it says."""
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + data


class TestSafetensorsFormat(FormatConformance):
    """Files with one tensor."""

    format = "safetensors"
    dtypes = tuple(NAMES)
    row_shapes = ((), (3,), (2, 3))

    def write(self, path, array):
        """Write by hand."""
        path.write_bytes(safetensors_bytes({"data": array}))


@pytest.fixture
def two(tmp_path):
    """Give a file with two tensors, and what they hold."""
    x, y = example_array((6, 2), "f4"), example_array((4,), "i8")
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"x": x, "y": y}, metadata={"made": "here"}))
    return path, x, y


def test_tensor_by_name(two):
    """The tensor that is named is read, whatever else is in the file."""
    path, x, y = two
    assert_same(open_shards(path, tensor="x").compute(), x)
    assert_same(open_shards(path, tensor="y").compute(), y)


def test_another_tensor_is_another_dataset(two, tmp_path):
    """Two tensors of one shape in one file have two fingerprints."""
    path = tmp_path / "b.safetensors"
    path.write_bytes(safetensors_bytes({"x": two[1], "y": two[1]}))
    assert open_shards(path, tensor="x") != open_shards(path, tensor="y")


def test_which_tensor_is_not_guessed(two):
    """Of several tensors none is taken; the message names them."""
    with pytest.raises(LayoutError, match=r"holds 2 tensors \('x', 'y'\): say which with tensor="):
        open_shards(two[0])


def test_missing_tensor(two):
    """A tensor that is not there is an error that names those that are."""
    with pytest.raises(LayoutError, match=r"a.safetensors': holds no tensor 'z', it holds 'x', 'y'"):
        open_shards(two[0], tensor="z")


def test_many_tensors(tmp_path):
    """A header that is longer than the first read is read to its end; a message names ten tensors at most."""
    tensors = {f"layer.{i:03d}": example_array((2, 2), "f4", seed=i) for i in range(200)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes(tensors, pad=7))
    assert_same(open_shards(path, tensor="layer.123").compute(), tensors["layer.123"])
    with pytest.raises(LayoutError, match="and 190 more"):
        open_shards(path)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_types_without_numpy(tmp_path, kind):
    """A tensor of a type that NumPy lacks is refused by its name; others in the file are read."""
    x = example_array((4, 2), "u1" if kind[1] == "8" else "u2")
    y = example_array((3,), "f4")
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"x": x, "y": y}, x={"dtype": kind}))
    assert_same(open_shards(path, tensor="y").compute(), y)
    with pytest.raises(LayoutError, match=f"tensor 'x' of type {kind}, which NumPy lacks"):
        open_shards(path, tensor="x")


ENTRY = '"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]'


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "holds 0 bytes"),
        (b"\x05\0\0\0", "holds 4 bytes"),
        (b"\xff" * 8 + b"{}", "header of 18,446,744,073,709,551,615 bytes"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "its header alone has 1,048,576"),
        (raw_bytes("{"), "damaged safetensors header"),
        (raw_bytes(b"\xff\xfe"), "damaged safetensors header"),
        (raw_bytes("[]"), "no JSON object"),
        (raw_bytes("[" * 5000), "damaged safetensors header"),
        (raw_bytes('{"x": 3}'), "tensor 'x' lacks"),
        (raw_bytes("{}"), "holds no tensor"),
        (raw_bytes('{"x": {"dtype": "F32", "shape": [2, 3]}}', b"0" * 24), "lacks one of"),
        (raw_bytes(f'{{"x": {{{ENTRY}}}, "x": {{{ENTRY}}}}}', b"0" * 24), "names something twice"),
        (raw_bytes(f'{{"x": {{{ENTRY}}}, "y": {{{ENTRY}}}}}', b"0" * 24), "'y' begins at byte 0, expected 24"),
        (raw_bytes(f'{{"x": {{{ENTRY.replace("24", "28")}}}}}', b"0" * 28), "has 28 bytes, expected 24"),
        (raw_bytes(f'{{"x": {{{ENTRY.replace("[0, 24]", "[4, 28]")}}}}}', b"0" * 28), "begins at byte 4, expected 0"),
        (raw_bytes(f'{{"x": {{{ENTRY.replace("[0, 24]", "[24, 0]")}}}}}', b"0" * 24), "has -24 bytes"),
        (raw_bytes(f'{{"x": {{{ENTRY.replace("3]", "-3]")}}}}}', b"0" * 24), "has shape"),
        (raw_bytes(f'{{"x": {{{ENTRY.replace("3]", "3.0]")}}}}}', b"0" * 24), "has shape"),
        (raw_bytes(f'{{"x": {{{ENTRY.replace("3]", "9" * 30 + "]")}}}}}', b"0" * 24), "has shape"),
        (raw_bytes(f'{{"x": {{{ENTRY}}}}}', b"0" * 23), "is truncated"),
        (raw_bytes(f'{{"x": {{{ENTRY}}}}}', b"0" * 25), "goes on after its tensors"),
        (raw_bytes('{"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', b"0" * 4), "no axes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files(tmp_path, data, fault):
    """A header that lies, or is none, is a fault that names the file and what is wrong."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(LayoutError, match=fault) as caught:
        open_shards(path)
    assert "a.safetensors" in str(caught.value)


def test_absurd_header_is_not_read(tmp_path):
    """A header that claims to be enormous is refused by its length."""
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little") + b"{")
        file.truncate(2 << 30)
    storage = RecordingStorage(open_shards_storage())
    from lazyshards.formats import find_format

    (fault,) = find_format("safetensors").inspect([str(path)], storage, {})
    assert "header of 1,073,741,824 bytes" in fault.found
    assert storage.nbytes <= 4096


def open_shards_storage():
    """Return the storage of local files."""
    from lazyshards.storage import LocalStorage

    return LocalStorage()


def test_option_of_the_wrong_kind(two):
    """A name that is no text is a TypeError."""
    with pytest.raises(TypeError, match="tensor=3"):
        open_shards(two[0], tensor=3)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_round_trip_through_the_library(tmp_path_factory, data):
    """What the safetensors library writes is read, for any index, whatever lies beside it in the file."""
    numpy_files = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    folder = tmp_path_factory.mktemp("safetensors")
    kind = data.draw(st.sampled_from([name for name in NAMES if name != "c8"]))
    row_shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    counts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    arrays = [example_array((n, *row_shape), kind, seed=i) for i, n in enumerate(counts)]
    for i, array in enumerate(arrays):
        others = {f"other{j}": example_array((j,), "u1") for j in range(data.draw(st.integers(0, 3)))}
        numpy_files.save_file({**others, "wanted": array}, folder / f"s{i}.safetensors", metadata={"a": "b"})
    found, expected = open_shards(folder, tensor="wanted"), np.concatenate(arrays)
    for index in data.draw(index_chains(expected.shape)):
        found, expected = found[index], expected[index]
    assert_same(found.compute(), expected)


def test_reads_only_what_is_asked(two):
    """A slice reads the bytes of its rows, wherever the tensor begins."""
    path, _, y = two
    ds = open_shards(path, tensor="y")
    storage = RecordingStorage(ds._layout.storage)
    assert_same(with_storage(ds, storage)[1:3].compute(), y[1:3])
    assert storage.nbytes == 16
