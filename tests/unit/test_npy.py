import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LayoutError, LazyShardsError, ShardReadError, ShardsNotFoundError
from lazyshards.formats import Fault, find_format, format_of_bytes, format_of_name
from lazyshards.layout import Packed, Planes, Shard
from lazyshards.storage import LocalStorage
from lazyshards.testing import (
    DTYPES,
    FormatConformance,
    RecordingStorage,
    assert_same,
    example_array,
    npy_bytes,
    write_npy_shards,
)

pytestmark = pytest.mark.usefixtures("on_numpy")

NPY = find_format("npy")


def inspect(path, storage=None):
    """Return the shard, or the fault, of one file."""
    (found,) = NPY.inspect([str(path)], storage or LocalStorage(), {})
    return found


def raw_npy(text, *, version=(1, 0), data=b"", pad=True):
    """Return the bytes of a file whose header is this text, whatever it says."""
    body = text if isinstance(text, bytes) else text.encode("utf-8")
    if pad:
        body = body.ljust(117) + b"\n"
    width = 2 if version == (1, 0) else 4
    return b"\x93NUMPY" + bytes(version) + len(body).to_bytes(width, "little") + body + data


def header(descr="'<f4'", shape="(2, 3)", fortran="False"):
    """Return the text of a header."""
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


class TestNpyFormat(FormatConformance):
    """Plain .npy files, as NumPy writes them."""

    format = "npy"
    dtypes = (*DTYPES, "S3", "U2", "M8[s]", "m8[ns]", "V5", "g", "G")
    row_shapes = ((), (3,), (2, 3), (2, 1, 3), (1, 1, 1, 1, 1, 2))
    head_nbytes = 128 + 6

    def write(self, path, array):
        """Write with NumPy."""
        np.save(path, array)


class TestFortranOrder(FormatConformance):
    """.npy files in Fortran order."""

    format = "npy"
    row_shapes = ((3,), (2, 3), (2, 1, 3))
    head_nbytes = 128 + 6

    def write(self, path, array):
        """Write with NumPy, columns first."""
        np.save(path, np.asfortranarray(array))


class TestBigEndian(FormatConformance):
    """.npy files in the byte order of other machines."""

    format = "npy"
    dtypes = tuple(dtype for dtype in DTYPES if np.dtype(dtype).itemsize > 1)
    head_nbytes = 128 + 6

    def write(self, path, array):
        """Write with NumPy, bytes swapped."""
        np.save(path, array.astype(array.dtype.newbyteorder(">")))


# Headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("header_nbytes", [None, 97, 128, 129, 192, 208, 4096, 65_000])
def test_header_versions_and_lengths(tmp_path, version, header_nbytes):
    """Headers of every version, padded to any length, odd ones too, are read."""
    arrays = [example_array((n, 3), "f4", seed=n) for n in (3, 4)]
    for i, array in enumerate(arrays):
        (tmp_path / f"s{i}.npy").write_bytes(npy_bytes(array, version=version, header_nbytes=header_nbytes))
    assert_same(open_shards(tmp_path).compute(), np.concatenate(arrays))


def test_header_over_ten_thousand_bytes(tmp_path):
    """A header too long for NumPy's own limit is read."""
    dtype = np.dtype([(f"measurement_of_channel_number_{i:04d}", "<f4") for i in range(400)])
    array = example_array((3,), dtype)
    (tmp_path / "s.npy").write_bytes(npy_bytes(array, version=(2, 0)))
    ds = open_shards(tmp_path)
    assert ds.dtype == dtype
    assert_same(ds.compute(), array)


def test_header_beyond_the_bound(tmp_path):
    """A header that claims to be enormous is refused by its length, without reading it."""
    path = tmp_path / "s.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + b" " * 200)
    os.truncate(path, 2 << 30)
    storage = RecordingStorage(LocalStorage())
    fault = inspect(path, storage)
    assert isinstance(fault, Fault)
    assert "header of 1,073,741,836 bytes" in fault.found
    assert storage.nbytes <= 128


def test_unicode_field_names(tmp_path):
    """Field names that are no Latin-1 need version 3, and are read."""
    array = example_array((2,), [("größe", "<f4"), ("名", "<i4")])
    (tmp_path / "s.npy").write_bytes(npy_bytes(array, version=(3, 0)))
    assert_same(open_shards(tmp_path).compute(), array)


def test_header_is_read_with_few_bytes(tmp_path):
    """A plain header is one read of 128 bytes for each file."""
    paths = write_npy_shards(tmp_path, [np.zeros((100, 9))] * 5)
    storage = RecordingStorage(LocalStorage())
    assert all(isinstance(item, Shard) for item in NPY.inspect(paths, storage, {}))
    assert storage.reads == [(path, 0, 128) for path in paths]


@pytest.mark.parametrize("shape", [(0,), (5,), (1, 1), (2, 3), (0, 3), (4, 0), (2, 2, 2, 2), (1,) * 20], ids=str)
@pytest.mark.parametrize("order", "CF")
def test_shapes(tmp_path, shape, order):
    """Every shape with a row axis is read, zero-row and zero-wide ones too, in either order."""
    array = np.asarray(example_array(shape, "i2"), order=order)
    np.save(tmp_path / "s.npy", array)
    ds = open_shards(tmp_path)
    assert ds.shape == shape
    assert_same(ds.compute(), array)


def test_both_orders_in_one_dataset(tmp_path):
    """C and Fortran shards, of either byte order, mix."""
    whole = example_array((16, 2, 3), "f4")
    parts = np.split(whole, [4, 9, 10])
    parts[1:3] = [np.asfortranarray(part) for part in parts[1:3]]
    parts[2:] = [part.astype(">f4") for part in parts[2:]]
    ds = open_shards(write_npy_shards(tmp_path, parts))
    for index in (slice(None), slice(3, 12), slice(None, None, -1), [15, 4, 4, 0], (slice(None), 1, slice(0, 2))):
        assert_same(ds[index].compute(), whole[index])


def test_fortran_rows_without_axes_are_plain(tmp_path):
    """One axis lies the same in both orders: it is read as plain bytes."""
    path = tmp_path / "s.npy"
    path.write_bytes(raw_npy(header(shape="(4,)", fortran="True"), data=bytes(16)))
    assert isinstance(inspect(path).source, Packed)
    np.save(path, np.asfortranarray(np.zeros((4, 2))))
    assert isinstance(inspect(path).source, Planes)


@pytest.mark.parametrize(
    "dtype",
    [
        [("id", "<i8"), ("xy", "<f4", (2,)), ("tag", "S4"), ("in", [("u", "u1"), ("v", "<U2")])],
        [("a", ">i4"), ("b", "<f8")],
        np.dtype([("a", "u1"), ("b", "<f8")], align=True),
    ],
    ids=str,
)
def test_structured(tmp_path, dtype):
    """Structured rows, nested, aligned and of mixed byte order, are read field by field."""
    arrays = [np.zeros(n, dtype) for n in (3, 0, 4)]
    for name in arrays[0].dtype.names:
        for array in arrays:
            if array.dtype[name].names is None:
                array[name] = np.arange(len(array)).reshape(-1, *[1] * (array[name].ndim - 1))
    found = open_shards(write_npy_shards(tmp_path, arrays)).compute()
    wanted = np.concatenate(arrays)
    for name in wanted.dtype.names:
        assert found[name].tolist() == wanted[name].tolist()


def test_longer_files_are_read(tmp_path):
    """Bytes after the array that are no second array do not matter."""
    path = tmp_path / "s.npy"
    path.write_bytes(npy_bytes(np.arange(5)) + b"trailing bytes")
    assert_same(open_shards(path).compute(), np.arange(5))


# Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
def test_truncated_at_every_byte(tmp_path, version):
    """A file that ends anywhere before its last byte is an error that names it, when it is opened."""
    data = npy_bytes(np.arange(6, dtype="i2").reshape(2, 3), version=version)
    path = tmp_path / "shard_7.npy"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(LayoutError, match="shard_7"):
            open_shards(path)
    path.write_bytes(data)
    assert_same(open_shards(path).compute(), np.arange(6, dtype="i2").reshape(2, 3))


def test_truncation_says_the_sizes(tmp_path):
    """What is said of a truncated file is its size and the size that it should have."""
    (path,) = write_npy_shards(tmp_path, [np.zeros((4, 3), "f4")])
    os.truncate(path, 150)
    with pytest.raises(LayoutError, match=r"truncated: it holds 150 bytes, its header promises 176 .4 rows of shape"):
        open_shards(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"\x93NUMP", "begins with"),
        (b"PK\x03\x04" + bytes(100), "begins with"),
        (b"\x93NUMPY", "ends within 6 bytes"),
        (b"\x93NUMPY\x04\x00" + bytes(100), "version 4.0"),
        (b"\x93NUMPY\x00\x00" + bytes(100), "version 0.0"),
        (raw_npy("not a dict"), "damaged .npy header"),
        (raw_npy("[1, 2]"), "no dict of"),
        (raw_npy("{'descr': '<f4', 'shape': (2,)}"), "no dict of"),
        (raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}"), "no dict of"),
        (raw_npy(header(shape="[2, 3]")), "shape is"),
        (raw_npy(header(shape="(2, -3)")), "shape is"),
        (raw_npy(header(shape="(2.0,)")), "shape is"),
        (raw_npy(header(shape="(True,)")), "shape is"),
        (raw_npy(header(fortran="0")), "fortran_order is 0"),
        (raw_npy(header("'<q9'")), "damaged .npy header"),
        (raw_npy(header("'nonsense'")), "damaged .npy header"),
        (raw_npy(header("None")), "damaged .npy header"),
        (raw_npy(header("[('a', 'b', 'c', 'd')]")), "damaged .npy header"),
        (raw_npy(header("'<f4'").encode("utf-8") + b"\xff", version=(3, 0)), "damaged .npy header"),
        (raw_npy(header(shape="()"), data=bytes(4)), "0-d array"),
        (raw_npy(header("'|O'"), data=bytes(400)), "Python objects"),
        (raw_npy(header("'|O8'"), data=bytes(400)), "Python objects"),
        (raw_npy(header("[('a', '<f4'), ('b', '|O')]"), data=bytes(400)), "Python objects"),
        (raw_npy(header(shape=f"({10**30},)")), "shape"),
        (raw_npy(header(shape=f"({10**30}, 0)")), "shape"),
        (raw_npy(header(shape=f"(0, {2**63 - 1}, {2**63 - 1})")), "shape"),
        (raw_npy(header("'|S0'", shape=f"({10**12},)")), "dtype"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_headers(tmp_path, data, says):
    """Every damaged header, and every array that cannot be rows, is a fault that says what was found."""
    path = tmp_path / "shard_7.npy"
    path.write_bytes(data)
    fault = inspect(path)
    assert isinstance(fault, Fault)
    assert says in fault.found
    with pytest.raises(LayoutError, match="shard_7"):
        open_shards(path)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 60_000,
        "-" * 60_000 + "1",
        "+".join("1" * 60_000),
        "[" * 30_000 + "]" * 30_000,
        "{1:" * 20_000,
        "a" + ".b" * 30_000,
        "9" * 60_000,
        header(shape="(" + "9" * 5000 + ",)"),
        header(descr="[" * 500 + "]" * 500),
        "'" + "\\x" * 10,
        "'\\d'",
        "\0",
    ],
    ids=lambda text: text[:12],
)
def test_hostile_headers(tmp_path, text):
    """A header made to exhaust a parser is a fault: no crash, no warning, no other exception."""
    path = tmp_path / "shard_7.npy"
    path.write_bytes(raw_npy(text, version=(2, 0)))
    assert isinstance(inspect(path), Fault)


def test_objects_are_never_unpickled(tmp_path):
    """The pickle of an object array, or of an object field, never runs."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    plain = np.array([Trap(), None], object)
    field = np.zeros(2, [("x", "f4"), ("o", object)])
    field["o"] = plain
    for name, array in (("plain.npy", plain), ("field.npy", field)):
        np.save(tmp_path / name, array, allow_pickle=True)
        with pytest.raises(LayoutError, match=f"{name}.*Python objects"):
            open_shards(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_second_array(tmp_path):
    """A file in which a second array follows the first is refused: only the first would be read."""
    path = tmp_path / "log.npy"
    path.write_bytes(npy_bytes(np.arange(3)) + npy_bytes(np.arange(4)))
    with pytest.raises(LayoutError, match=r"log\.npy.*second array"):
        open_shards(path)


def test_second_array_after_an_empty_one(tmp_path):
    """An empty first array hides the second no better, nor does Fortran order."""
    for first in (np.empty((0, 3)), np.asfortranarray(np.zeros((2, 3)))):
        path = tmp_path / "log.npy"
        path.write_bytes(npy_bytes(first) + npy_bytes(np.arange(4)))
        with pytest.raises(LayoutError, match="second array"):
            open_shards(path)


def test_all_faults_are_told_at_once(tmp_path):
    """The message lists every faulty shard with what was found, and no healthy one."""
    paths = write_npy_shards(tmp_path, [np.zeros((2, 3))] * 6)
    os.truncate(paths[1], 10)
    os.truncate(paths[3], 150)
    np.save(paths[4], np.zeros((2, 4)))
    with pytest.raises(LayoutError) as caught:
        open_shards(tmp_path)
    message = str(caught.value)
    assert [Path(path).name in message for path in paths] == [False, True, False, True, True, False] or (
        # The shard that the others are compared with is named, too.
        [Path(path).name in message for path in paths[1:]] == [True, False, True, True, False]
    )
    assert "3 of 6 shards" in message


def test_the_first_ten_faults_are_spelled_out(tmp_path):
    """Of very many faults the first ten are spelled out, and the rest are counted."""
    for path in write_npy_shards(tmp_path, [np.zeros(3)] * 25):
        os.truncate(path, 20)
    with pytest.raises(LayoutError, match="and 15 more") as caught:
        open_shards(tmp_path)
    assert str(caught.value).count("shard_") == 10


@pytest.mark.parametrize("kind", ["directory", "pipe", "missing"])
def test_what_is_no_file(tmp_path, kind):
    """A directory, a named pipe and nothing, given as shards, are errors that name them; none hangs."""
    good, odd = tmp_path / "good.npy", tmp_path / "odd.npy"
    np.save(good, np.zeros(3))
    if kind == "directory":
        odd.mkdir()
    elif kind == "pipe":
        os.mkfifo(odd)
    with pytest.raises(LazyShardsError, match=r"odd\.npy"):
        open_shards([good, odd])


def test_missing_and_unreadable_have_their_own_errors(tmp_path):
    """A missing shard is a FileNotFoundError; a directory in its place is an OSError of reading."""
    with pytest.raises(ShardsNotFoundError):
        open_shards([tmp_path / "gone.npy"])
    (tmp_path / "odd.npy").mkdir()
    with pytest.raises(ShardReadError):
        open_shards([tmp_path / "odd.npy"])


# Any bytes --------------------------------------------------------------------------------------------------------

LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(
        ["<f4", ">i8", "|O", "|S0", "|V0", "<U999999999", "<M8[s]", "f", "", "4f4", "f4,f4", "(2,)f4", ">g"]
    )
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.tuples(inner, inner),
    max_leaves=8,
)
HEADERS = st.builds(
    lambda descr, fortran, shape: {"descr": descr, "fortran_order": fortran, "shape": shape},
    LITERALS | st.sampled_from(["<f4", ">i2", "|u1", "<c8"]),
    st.booleans() | LITERALS,
    st.lists(st.integers(0, 5) | st.integers(0, 2**65), max_size=4).map(tuple) | LITERALS,
).map(repr)


@st.composite
def files(draw):
    """Draw bytes: anything, any header, or a good file with bytes of it changed."""
    kind = draw(st.sampled_from(("bytes", "literal", "header", "changed")))
    if kind == "bytes":
        return draw(st.sampled_from((b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00"))) + draw(st.binary(max_size=300))
    if kind in ("literal", "header"):
        text = draw(LITERALS.map(repr) if kind == "literal" else HEADERS).encode("utf-8", "backslashreplace")
        return raw_npy(
            text,
            version=draw(st.sampled_from([(1, 0), (2, 0), (3, 0)])),
            data=draw(st.binary(max_size=200)),
            pad=draw(st.booleans()),
        )
    data = bytearray(npy_bytes(example_array((3, 2), draw(st.sampled_from(DTYPES)))))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, 127))] = draw(st.integers(0, 255))
    return bytes(data)


@pytest.fixture(scope="module")
def scratch():
    """One directory for all examples."""
    directory = tempfile.mkdtemp()
    yield Path(directory)
    shutil.rmtree(directory)


@given(data=files())
@settings(max_examples=400, deadline=None)
def test_any_bytes(scratch, data):
    """Whatever a file holds, it is opened and read, or refused by one of our errors that names it."""
    path = scratch / "shard_7.npy"
    path.write_bytes(data)
    try:
        ds = open_shards(path)
        len(ds), repr(ds), ds.nbytes, ds.fingerprint
        found = ds[:3].compute()
    except LazyShardsError as exc:
        assert "shard_7" in str(exc)  # noqa: PT017  # success is a right outcome, too
    else:
        assert (found.shape, found.dtype) == (ds[:3].shape, ds.dtype)


@given(data=files())
@settings(max_examples=300, deadline=None)
def test_what_numpy_reads_is_read(scratch, data):
    """A file that NumPy loads without pickle, as rows, is opened, and holds the same."""
    path = scratch / "shard_8.npy"
    path.write_bytes(data)
    try:
        with path.open("rb") as file:
            wanted = np.load(file, allow_pickle=False)
            longer = file.read(6)
    except Exception:  # noqa: BLE001  # NumPy raises anything
        return
    if not isinstance(wanted, np.ndarray) or not wanted.ndim or not wanted.dtype.itemsize or longer == b"\x93NUMPY":
        return
    assert_same(open_shards(path).compute(), wanted)


# Telling the format -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npy", "A.NPY", "/x/y.z/a.npy", "s3://b/a.npy"])
def test_told_by_suffix(name):
    """The suffix tells, in capitals too."""
    assert format_of_name(name) is NPY


@pytest.mark.parametrize("name", ["a.npz", "npy", "a.npy.gz", "/x.npy/data", "a.npyx"])
def test_not_told_by_suffix(name):
    """Another suffix is not taken for ours."""
    assert format_of_name(name) is not NPY


def test_told_by_first_bytes(tmp_path):
    """Files without a telling suffix are told by their first bytes."""
    assert format_of_bytes(b"\x93NUMPY\x01") is NPY
    assert format_of_bytes(b"\x93NUMP") is not NPY
    for i in range(2):
        (tmp_path / f"part-{i}").write_bytes(npy_bytes(np.arange(3)))
    assert open_shards(tmp_path).shape == (6,)


def test_elements_that_are_arrays(tmp_path):
    """A header that hides axes in the type, so that its shape is not that of the array, is refused."""
    header = b"{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (3,), }\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(24))
    with pytest.raises(LayoutError, match="elements that are arrays"):
        open_shards(tmp_path)
