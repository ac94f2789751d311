import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LayoutError, LazyShardsError, ShardChangedError, ShardReadError
from lazyshards.formats import npz_inflate
from lazyshards.layout import Decoded, Packed, Planes
from lazyshards.testing import (
    DTYPES,
    FormatConformance,
    RecordingStorage,
    assert_same,
    example_array,
    index_chains,
    layouts,
    npy_bytes,
    with_storage,
)

pytestmark = pytest.mark.usefixtures("on_numpy")


def write_zip(path, members, method=zipfile.ZIP_STORED, **options):
    """Write a zip file with these bytes by name."""
    with zipfile.ZipFile(path, "w", method, **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


class TestNpzFormat(FormatConformance):
    """Archives of one stored array, as NumPy writes them."""

    format = "npz"
    dtypes = (*DTYPES, "S3", "M8[s]", ">f4")
    head_nbytes = 5000

    def write(self, path, array):
        """Write with NumPy."""
        np.savez(path, data=array)


class TestFortranOrder(FormatConformance):
    """Archives of one stored array in Fortran order."""

    format = "npz"
    row_shapes = ((3,), (2, 3))
    head_nbytes = 5000

    def write(self, path, array):
        """Write with NumPy, columns first."""
        np.savez(path, data=np.asfortranarray(array))


class TestDeflated(FormatConformance):
    """Archives of one deflated array."""

    format = "npz"
    dtypes = (*DTYPES, "S3", "M8[s]", ">f4")
    head_nbytes = 6000

    def write(self, path, array):
        """Write with NumPy."""
        np.savez_compressed(path, data=array)


class TestDeflatedFortranOrder(FormatConformance):
    """Archives of one deflated array in Fortran order."""

    format = "npz"
    row_shapes = ((3,), (2, 3))
    head_nbytes = 6000

    def write(self, path, array):
        """Write with NumPy, columns first."""
        np.savez_compressed(path, data=np.asfortranarray(array))


@pytest.fixture
def two(tmp_path):
    """Give an archive with two arrays, and what they hold."""
    x, y = example_array((6, 2), "f4"), example_array((4,), "i8")
    path = tmp_path / "a.npz"
    np.savez(path, x=x, y=y)
    return path, x, y


@pytest.mark.parametrize("name", ["x", "x.npy"])
def test_member_by_name(two, name):
    """The array that is named is read, with or without the suffix of its member."""
    path, x, _ = two
    assert_same(open_shards(path, member=name).compute(), x)


def test_which_member_is_not_guessed(two):
    """Of several arrays none is taken; the message names them."""
    with pytest.raises(LayoutError, match=r"holds 2 arrays \('x', 'y'\): say which with member="):
        open_shards(two[0])


def test_missing_member(two):
    """An array that is not there is an error that names those that are."""
    with pytest.raises(LayoutError, match=r"a.npz': holds no array 'z', it holds 'x', 'y'"):
        open_shards(two[0], member="z")


def test_other_members_are_left_out(tmp_path):
    """What is no array in an archive does not count."""
    x = example_array((3, 2), "f4")
    write_zip(tmp_path / "a.npz", {"README.txt": b"about", "x.npy": npy_bytes(x)})
    assert_same(open_shards(tmp_path / "a.npz").compute(), x)


def test_another_member_is_another_dataset(tmp_path):
    """Two arrays of one shape in one archive have two fingerprints."""
    x = example_array((3, 2), "f4")
    np.savez(tmp_path / "a.npz", x=x, y=x)
    assert open_shards(tmp_path / "a.npz", member="x") != open_shards(tmp_path / "a.npz", member="y")


def test_how_members_are_read(tmp_path):
    """Stored arrays are plain bytes, by rows or by columns; deflated ones are decoded."""
    x = example_array((3, 2), "f4")
    np.savez(tmp_path / "a.npz", c=x, f=np.asfortranarray(x))
    np.savez_compressed(tmp_path / "b.npz", c=x)
    assert isinstance(open_shards(tmp_path / "a.npz", member="c").shards[0].source, Packed)
    assert isinstance(open_shards(tmp_path / "a.npz", member="f").shards[0].source, Planes)
    assert isinstance(open_shards(tmp_path / "b.npz", member="c").shards[0].source, Decoded)


def test_stored_and_deflated_shards_together(tmp_path):
    """Shards of one dataset may be kept in different ways."""
    x = example_array((9, 2), "f4")
    np.savez(tmp_path / "s0.npz", x=x[:3])
    np.savez_compressed(tmp_path / "s1.npz", x=x[3:5])
    np.savez_compressed(tmp_path / "s2.npz", x=np.asfortranarray(x[5:]))
    assert_same(open_shards(tmp_path)[1:8].compute(), x[1:8])


def test_extra_fields_and_comments(tmp_path):
    """Extra fields of members, other data before the archive and a comment after it move nothing."""
    x = example_array((50, 2), "f4")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("x.npy")
        info.extra = struct.pack("<HH", 0x7777, 600) + b"e" * 600
        archive.writestr(info, npy_bytes(x))
        archive.comment = b"c" * 9000
    (tmp_path / "a.npz").write_bytes(buffer.getvalue())
    assert_same(open_shards(tmp_path / "a.npz")[7:41].compute(), x[7:41])


def test_many_members(tmp_path):
    """A directory that is longer than the first read is read to its beginning."""
    arrays = {f"array_number_{i:05d}": np.full((2,), i, "u2") for i in range(300)}
    np.savez(tmp_path / "a.npz", **arrays)
    assert open_shards(tmp_path / "a.npz", member="array_number_00007").compute().tolist() == [7, 7]


def test_streamed_archives(tmp_path):
    """An archive that was written to a pipe, with its sizes after the data, is read."""

    class Pipe(io.RawIOBase):
        def __init__(self):
            self.data = b""

        def writable(self):
            return True

        def write(self, data):
            self.data += bytes(data)
            return len(data)

    pipe, x = Pipe(), example_array((9, 2), "f4")
    np.savez(pipe, x=x)
    (tmp_path / "a.npz").write_bytes(pipe.data)
    assert_same(open_shards(tmp_path / "a.npz")[2:7].compute(), x[2:7])


@pytest.mark.parametrize(
    ("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")], ids=["bzip2", "lzma"]
)
def test_other_methods_are_refused(tmp_path, method, name):
    """An array that is compressed in another way is refused by the name of that way."""
    write_zip(tmp_path / "a.npz", {"x.npy": npy_bytes(np.zeros((3, 2)))}, method)
    with pytest.raises(LayoutError, match=f"array 'x' compressed by {name}"):
        open_shards(tmp_path / "a.npz")


def test_encrypted_members_are_refused(two):
    """An encrypted array is refused."""
    path, _, _ = two
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        data[archive.getinfo("x.npy").header_offset + 6] |= 1
    path.write_bytes(data)
    with pytest.raises(LayoutError, match="encrypted"):
        open_shards(path, member="x")


@pytest.mark.parametrize(
    "content",
    [np.array([{"a": 1}, None]), np.float32(3)],
    ids=["objects", "single value"],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_that_npy_refuses(tmp_path, content, save):
    """What the npy format refuses is refused in an archive, by its name."""
    save(tmp_path / "a.npz", x=content)
    with pytest.raises(LayoutError, match=r"a.npz': holds an array 'x' that holds"):
        open_shards(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_array_longer_than_its_member(tmp_path, method):
    """A header that promises more than the member holds is an error."""
    data = npy_bytes(np.zeros((30, 2)))
    write_zip(tmp_path / "a.npz", {"x.npy": data[:-100]}, method)
    with pytest.raises(LayoutError, match="array 'x' that is truncated"):
        open_shards(tmp_path / "a.npz")


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\x03\x04" + b"0" * 9000, b"\x93NUMPY"], ids=["", "2", "9 kB", "npy"])
def test_no_archive(tmp_path, data):
    """What is no archive is a fault that names the file."""
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(LayoutError, match=r"a\.npz"):
        open_shards(tmp_path / "a.npz")


def test_absurd_directory(tmp_path):
    """A directory that claims to be enormous is refused by its length."""
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 1 << 30, 100, 0)
    with (tmp_path / "a.npz").open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate((1 << 30) + 100)
        file.seek(0, 2)
        file.write(end)
    with pytest.raises(LayoutError, match="has a directory of"):
        open_shards(tmp_path / "a.npz")


def test_bombs_are_refused(tmp_path):
    """A member that claims to hold more than deflate can make of its bytes is refused when it is opened."""
    path = tmp_path / "a.npz"
    write_zip(path, {"x.npy": npy_bytes(np.zeros((30, 2)))}, zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("x.npy").file_size
    at = data.rindex(b"PK\x01\x02") + 24
    assert int.from_bytes(data[at : at + 4], "little") == size
    path.write_bytes(data[:at] + (1 << 30).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(LayoutError, match="cannot be 1,073,741,824 bytes"):
        open_shards(path)


def test_damaged_data_is_told(tmp_path):
    """Deflated bytes that were changed are an error, by deflate's own rules or by the checksum at the end."""
    path = tmp_path / "a.npz"
    x = np.arange(4000, dtype="f4").reshape(-1, 2)
    np.savez_compressed(path, x=x)
    data = path.read_bytes()
    wrong = 0
    for at in range(300, len(data) - 300, 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            found = open_shards(path).compute()
        except LazyShardsError as exc:
            assert "a.npz" in str(exc)  # noqa: PT017  # each of many places
        else:
            wrong += not np.array_equal(found, x)
    assert wrong == 0


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("row_shape", [(3,), (700, 1000)], ids=str)
def test_pieces(tmp_path, monkeypatch, order, row_shape):
    """Rows that span pieces, and rows longer than a piece, are put together."""
    monkeypatch.setattr(npz_inflate, "_PIECE_NBYTES", 1000)
    x = np.asarray(example_array((1500 if row_shape == (3,) else 3, *row_shape), ">i2"), order=order)
    np.savez_compressed(tmp_path / "a.npz", x=x)
    ds = open_shards(tmp_path / "a.npz")
    for index in (slice(1, 3), (slice(None), 2), (slice(None, None, -1), slice(1, 3))):
        assert_same(ds[index].compute(), x[index])


def test_reading_on_does_not_begin_at_the_beginning(tmp_path):
    """Slices in order inflate a member once, not each of them from its beginning."""
    x = example_array((1 << 18, 2), "f8")
    np.savez_compressed(tmp_path / "a.npz", x=x)
    ds = open_shards(tmp_path / "a.npz")
    storage = RecordingStorage(ds._layout.storage)
    recorded = with_storage(ds, storage)
    for start in range(0, len(x), 1 << 14):
        assert_same(recorded[start : start + (1 << 14)].compute(), x[start : start + (1 << 14)])
    assert storage.nbytes < 1.1 * (tmp_path / "a.npz").stat().st_size


def test_change_between_slices_is_told(tmp_path):
    """An archive that was rewritten between two slices is an error, though what was inflated would go on."""
    x = example_array((1000, 2), "f8")
    np.savez_compressed(tmp_path / "a.npz", x=x)
    ds = open_shards(tmp_path / "a.npz")
    assert_same(ds[:10].compute(), x[:10])
    np.savez_compressed(tmp_path / "a.npz", x=x + 1)
    with pytest.raises(ShardChangedError, match=r"a\.npz"):
        ds[10:20].compute()


def test_threads_share_no_stream(tmp_path):
    """Tiles that are read at the same time each have a stream of their own."""
    x = example_array((40_000, 8), "f8")
    np.savez_compressed(tmp_path / "a.npz", x=x)
    assert_same(open_shards(tmp_path / "a.npz").compute(tiles_per_processor=4), x)


@given(arrays=layouts(), compressed=st.lists(st.booleans(), min_size=5, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_layout_and_index(tmp_path_factory, arrays, compressed, data):
    """What NumPy writes, stored or deflated, in any order of axes and bytes, gives what NumPy gives for any index."""
    folder = tmp_path_factory.mktemp("npz")
    for i, array in enumerate(arrays):
        (np.savez_compressed if compressed[i] else np.savez)(folder / f"s{i}.npz", array)
    native = arrays[0].dtype.newbyteorder("=")
    found, expected = open_shards(folder), np.concatenate([array.astype(native) for array in arrays])
    for index in data.draw(index_chains(expected.shape)):
        found, expected = found[index], expected[index]
    assert_same(found.compute(), expected)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_remote(tmp_path, save):
    """Archives in an object store are read by ranges."""
    fsspec = pytest.importorskip("fsspec")
    x = example_array((500, 3), "f4")
    buffer = io.BytesIO()
    save(buffer, x=x)
    memory = fsspec.filesystem("memory")
    memory.pipe("/npz_shards/s0.npz", buffer.getvalue())
    try:
        assert_same(open_shards("memory://npz_shards")[100:300].compute(), x[100:300])
    finally:
        memory.rm("/npz_shards", recursive=True)


def test_missing_when_read(tmp_path):
    """A deflated archive that vanished is an error that names it."""
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((3, 2)))
    ds = open_shards(tmp_path / "a.npz")
    (tmp_path / "a.npz").unlink()
    with pytest.raises(ShardReadError, match=r"a\.npz"):
        ds.compute()


def test_zipfile_is_imported_when_it_is_needed(child):
    """``import lazyshards`` does not import zipfile, which would take longer than most of the package."""
    assert child("import sys, lazyshards; print('zipfile' in sys.modules)").strip() == "False"


def test_without_isal(tmp_path, monkeypatch):
    """Where isal is missing, Python's own zlib inflates, with the same checks."""
    monkeypatch.setattr(npz_inflate, "inflater", lambda: zlib)
    x = example_array((3000, 5), "f8")
    np.savez_compressed(tmp_path / "a.npz", x=x)
    ds = open_shards(tmp_path / "a.npz")
    assert_same(ds[::-7, 1:3].compute(), x[::-7, 1:3])
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ShardReadError, match=r"a.npz' is damaged: its array 'x' does not inflate"):
        open_shards(tmp_path / "a.npz").compute()
