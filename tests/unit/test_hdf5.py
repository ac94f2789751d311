"""HDF5: which dataset, how it is stored, what refers to other files, and what is refused."""

import ctypes
import os
import pickle
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import h5py
import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.errors import FormatError, LayoutError, ShardChangedError, ShardReadError, ShardsNotFoundError
from lazyshards.formats import Fault, find_format, format_of_bytes, format_of_name, hdf5_chunks
from lazyshards.layout import Decoded, Extents, Packed, Shard
from lazyshards.storage import LocalStorage
from lazyshards.testing import FormatConformance, RecordingStorage, assert_same, example_array, with_storage

pytestmark = pytest.mark.usefixtures("on_numpy")

HDF5 = find_format("hdf5")
UNKNOWN = 32999
"""A filter that no plugin serves."""


def inspect(path, **options):
    """Return what is found of one file."""
    (found,) = HDF5.inspect([str(path)], LocalStorage(), options)
    return found


def fault(path, **options):
    """Return what is said of a file that cannot be opened."""
    found = inspect(path, **options)
    assert isinstance(found, Fault), found
    return str(found)


def write_file(path, **arrays):
    """Write arrays under these names, ``__`` standing for the slash."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name.replace("__", "/")] = array
    return path


def create(path, array, name="data", libver="earliest", userblock=0, **options):
    """Write one dataset with these creation options."""
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        file.create_dataset(name, data=array, **options)
    return path


def write_chunks(path, shape, chunk, filters, chunks, dtype="f4"):
    """Write a dataset of raw chunks: by place, the bytes and the mask."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(chunk)
    for number, values in filters:
        plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(shape)
        dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.py_create(np.dtype(dtype)), space, dcpl=plist)
        for place, (raw, mask) in chunks.items():
            dataset.write_direct_chunk(place, raw, filter_mask=mask)
    return path


def first_chunk(path, name="data"):
    """Return where the first chunk of a dataset is: first byte and bytes."""
    with h5py.File(path) as file:
        info = file[name].id.get_chunk_info(0)
    return info.byte_offset, info.size


def poke(path, offset, data):
    """Overwrite bytes of a file."""
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


# Conformance ----------------------------------------------------------------------------------------------------


class _Conformance(FormatConformance):
    format = "hdf5"
    creation: ClassVar = {}

    def write(self, path, array):
        """Write with h5py."""
        options = dict(self.creation)
        if "chunks" in options:
            if 0 in array.shape:
                options = {"maxshape": (None, *array.shape[1:])}
            else:
                options["chunks"] = tuple(max(1, length // 2) for length in array.shape)
        create(path, array, **options)


class TestContiguous(_Conformance):
    """Contiguous data, which is plain bytes."""


class TestChunked(_Conformance):
    """Chunks that went through no filter."""

    creation: ClassVar = {"chunks": True}


class TestDeflate(_Conformance):
    """Chunks that are decoded here."""

    creation: ClassVar = {"chunks": True, "compression": "gzip", "shuffle": True, "fletcher32": True}


class TestLzf(_Conformance):
    """Chunks that the library decodes."""

    creation: ClassVar = {"chunks": True, "compression": "lzf"}


class TestVirtual(_Conformance):
    """A virtual dataset of chunks in a file beside it."""

    def write(self, path, array):
        """Write a source, and the dataset that refers to it."""
        folder = path.parent / "sources"
        folder.mkdir(exist_ok=True)
        create(folder / path.name, array, **({"chunks": True} if array.size else {}))
        layout = h5py.VirtualLayout(array.shape, array.dtype)
        if array.size:
            layout[:] = h5py.VirtualSource(f"sources/{path.name}", "data", array.shape)
        with h5py.File(path, "w") as file:
            file.create_virtual_dataset("data", layout)

    def test_only_touched_shards_are_read(self, shards):
        """Rows of one shard are read from that shard and its source alone."""
        ds, whole = shards([3, 4, 5])
        storage = RecordingStorage(LocalStorage())
        assert_same(with_storage(ds, storage)[4:6].compute(), whole[4:6])
        path = Path(ds.shards[1].path)
        assert storage.paths == {str(path), str(path.parent / "sources" / path.name)}


# The format -----------------------------------------------------------------------------------------------------


def test_known_by_suffix_and_bytes(tmp_path):
    """HDF5 is known by its suffixes and by its signature."""
    path = write_file(tmp_path / "a.h5", data=np.zeros(3))
    assert [format_of_name(f"a.{suffix}").name for suffix in ("h5", "hdf5", "HE5")] == ["hdf5"] * 3
    assert format_of_bytes(path.read_bytes()[:16]).name == "hdf5"


def test_wrong_options(tmp_path):
    """Every option is checked, and the error names it."""
    path = write_file(tmp_path / "a.h5", data=np.zeros(3))
    for options, error in (
        ({"dataset": 3}, TypeError),
        ({"dataset": ""}, TypeError),
        ({"dataset": []}, TypeError),
        ({"dataset": ["a", 1]}, TypeError),
        ({"allow_external": "yes"}, TypeError),
        ({"unwritten": "zero"}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            open_shards(path, **options)


def test_without_h5py(tmp_path, child):
    """Without h5py the error says what installs it."""
    path = write_file(tmp_path / "a.h5", data=np.zeros(3))
    out = child(
        """
        import sys
        sys.modules["h5py"] = None
        import lazyshards
        try:
            lazyshards.open_shards(sys.argv[1], engine="numpy")
        except lazyshards.FormatError as exc:
            print(exc)
        """,
        path,
    )
    assert "pip install 'lazyshards[hdf5]'" in out


def test_legate_before_h5py(tmp_path, child):
    """Where Legate's HDF5 library came first, the error says what to do, and not what h5py says."""
    (tmp_path / "h5py.py").write_text('raise ValueError("Not a datatype (not a datatype)")')
    path = tmp_path / "a.h5"
    path.write_bytes(b"")
    out = child(
        """
        import sys, types
        sys.path.insert(0, "")
        sys.modules["legate.core"] = types.ModuleType("legate.core")
        import lazyshards
        try:
            lazyshards.open_shards(sys.argv[1], engine="numpy")
        except lazyshards.FormatError as exc:
            print(exc)
        """,
        path,
    )
    assert "put `import h5py` before" in out


# Which dataset --------------------------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path):
    """Give a file with a nested array, a scalar, an empty one, a group, text and links."""
    path = tmp_path / "deep.h5"
    with h5py.File(path, "w") as file:
        file["group/inner/x"] = np.arange(12.0).reshape(4, 3)
        file["scalar"] = np.float32(1)
        file["empty"] = h5py.Empty("f4")
        file["text"] = ["a", "bb"]
        file["soft"] = h5py.SoftLink("/group/inner")
        file["group/back"] = h5py.SoftLink("inner/x")
        file["gone"] = h5py.SoftLink("/nothing")
        file["circle"] = h5py.SoftLink("/circle")
        file["kind"] = np.dtype("f4")
    return path


def test_only_array_is_found(tmp_path):
    """A file with one array needs no name: scalars and groups are none."""
    path = write_file(tmp_path / "a.h5", group__sub__x=np.arange(3), scalar=1.0)
    assert_same(open_shards(path).compute(), np.arange(3))


def test_several_arrays_are_listed(tmp_path):
    """Where there are several arrays, the error lists them."""
    path = write_file(tmp_path / "a.h5", image=np.zeros((4, 3)), group__label=np.zeros(4))
    assert "'group/label' (4,) float64, 'image' (4, 3) float64" in fault(path)


def test_no_array(tmp_path):
    """A file without an array is at fault."""
    assert "holds no array" in fault(write_file(tmp_path / "a.h5", scalar=1.0))


def test_only_arrays_of_other_names(tmp_path):
    """Arrays found alone must have one name: another may be another thing."""
    write_file(tmp_path / "s0.h5", image=np.zeros((2, 3)))
    write_file(tmp_path / "s1.h5", mask=np.zeros((2, 3)))
    with pytest.raises(LayoutError, match=r"s1\.h5'.*'mask'.*'image'"):
        open_shards(tmp_path)


@pytest.mark.parametrize("name", ["group/inner/x", "/group/inner/x", "soft/x", "group/back"])
def test_names(deep, name):
    """A name may be nested, absolute, or lead over soft links."""
    assert_same(open_shards(deep, dataset=name).compute(), np.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "no dataset 'nothing'; it holds 'group/inner/x' (4, 3) float64"),
        ("group", "a group of the name 'group'"),
        ("kind", "a named type"),
        ("scalar", "single value"),
        ("empty", "'empty'"),
        ("text", "variable-length"),
        ("gone", "no dataset 'gone'"),
        ("circle", "circle"),
        ("scalar/x", "'scalar' is no group"),
    ],
)
def test_what_is_no_array(deep, name, said):
    """What cannot be a shard is refused with its name and the file's."""
    message = fault(deep, dataset=name)
    assert said in message
    assert "deep.h5" in message


def test_missing_in_one_shard(tmp_path):
    """A name that one file lacks names that file, the name, and what there is."""
    write_file(tmp_path / "s0.h5", image=np.zeros((2, 3)))
    write_file(tmp_path / "s1.h5", img=np.zeros((2, 3)))
    with pytest.raises(LayoutError, match=r"s1\.h5'.*'image'.*'img'"):
        open_shards(tmp_path, dataset="image")


# Many datasets of one file --------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    """Give a file with a dataset for each of 12 shards, and what they hold together."""
    whole = example_array((78, 3), "f4")
    parts = np.split(whole, np.cumsum(range(1, 12)))
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        for number, part in enumerate(parts):
            options = {"chunks": (1, 3), "compression": "gzip"} if number % 2 and len(part) else {}
            file.create_dataset(f"set/part_{number}", data=part, **options)
        file["set/sub/x"] = np.zeros(3)
        file["other"] = np.zeros(3)
    return path, whole


def test_pattern(many):
    """A pattern takes the datasets in natural order, each a shard."""
    path, whole = many
    ds = open_shards(path, dataset="set/part_*")
    assert_same(ds.compute(), whole)
    assert_same(ds[5:60:7].compute(), whole[5:60:7])
    assert [shard.path for shard in ds.shards][1:3] == [f"{path}::/set/part_1", f"{path}::/set/part_2"]


def test_pattern_leaves_groups_out(many):
    """Groups that a pattern matches are no shards."""
    path, _ = many
    assert len(open_shards(path, dataset="set/*").shards) == 12
    assert len(open_shards(path, dataset="*/part_[0-2]").shards) == 3


def test_list_of_names(many):
    """A list of names keeps its order."""
    path, whole = many
    ds = open_shards(path, dataset=["set/part_2", "/set/part_0"])
    assert_same(ds.compute(), np.concatenate([whole[3:6], whole[:1]]))


def test_pattern_without_a_match(many):
    """A pattern that matches nothing says what there is."""
    path, _ = many
    assert "'set/part_0'" in fault(path, dataset="none/*")


def test_hole_in_a_pattern(many):
    """A number that is missing among the datasets is at fault, as it is among files."""
    path, _ = many
    with h5py.File(path, "r+") as file:
        del file["set/part_4"]
    assert "number 4 is missing of 0 to 11" in fault(path, dataset="set/part_*")


def test_faulty_dataset_of_many(many):
    """What is wrong with one dataset names file and dataset."""
    path, _ = many
    with h5py.File(path, "r+") as file:
        file["set/part_12"] = 3.0
    with pytest.raises(LayoutError, match=r"all\.h5::/set/part_12'.*single value"):
        open_shards(path, dataset="set/part_*")


def test_change_of_many(many):
    """The file's stamp is that of each of its datasets."""
    path, _ = many
    ds = open_shards(path, dataset="set/part_*")
    os.utime(path, ns=(1, 1))
    for rows in (slice(0, 1), slice(1, 3)):  # plain bytes, and decoded
        with pytest.raises(ShardChangedError, match=r"all\.h5"):
            ds[rows].compute()


def test_pickled_many(many):
    """Shards of one file travel to another process."""
    path, whole = many
    ds = open_shards(path, dataset="set/part_*")
    assert_same(pickle.loads(pickle.dumps(ds)).compute(), whole)  # noqa: S301  # our own


def test_literal_name_with_pattern_signs(tmp_path):
    """A name that exists is literal, whatever it holds."""
    path = write_file(tmp_path / "a.h5", **{"x[1]": np.arange(3), "x1": np.zeros(3)})
    assert_same(open_shards(path, dataset="x[1]").compute(), np.arange(3))


# Contiguous data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "?", "S3", "V5", "c8", "f2", "g"])
def test_contiguous_is_plain_bytes(tmp_path, dtype, userblock):
    """Contiguous data of any type is read by the core, from the right byte."""
    array = example_array((5, 3), "f4", seed=2).astype("f4")
    array = array if dtype == "<f4" else example_array((5, 3), dtype) if dtype != "g" else np.arange(15, dtype="g")
    path = create(tmp_path / "a.h5", array, userblock=userblock)
    found = inspect(path)
    assert isinstance(found.source, Packed)
    assert path.read_bytes()[found.source.offset :][: array.nbytes] == array.tobytes()
    assert_same(open_shards(path).compute(), array)


def test_compound(tmp_path):
    """Records are records of NumPy."""
    array = np.array([(1, [2, 3]), (4, [5, 6])], [("a", "<i4"), ("b", ">f8", (2,))])
    assert_same(open_shards(write_file(tmp_path / "a.h5", data=array)).compute(), array)


def test_odd_types(tmp_path):
    """A type that is no NumPy type bit by bit is converted by the library, and an enumeration is its numbers."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(24)
        space = h5py.h5s.create_simple((4,))
        dataset = h5py.h5d.create(file.id, b"odd", odd, space)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, -2, 3, -4], "i4"))
        kind = h5py.enum_dtype({"A": 0, "B": 1}, "i2")
        file.create_dataset("enum", data=np.array([0, 1, 1]), dtype=kind)
        file.create_dataset("lzf", data=np.array([0, 1, 1]), dtype=kind, chunks=(2,), compression="lzf")
    assert_same(open_shards(path, dataset="odd").compute(), np.array([1, -2, 3, -4], "i4"))
    for name in ("enum", "lzf"):
        assert_same(open_shards(path, dataset=name).compute(), np.array([0, 1, 1], "i2"))


def test_arrays_as_elements(tmp_path):
    """Elements that are arrays are axes of the rows."""
    path = tmp_path / "a.h5"
    whole = example_array((5, 3), "i4")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (5,), np.dtype(("i4", (3,))))[...] = whole
    assert_same(open_shards(path).compute(), whole)


def test_compact(tmp_path):
    """Data inside the header is read by the library."""
    path = tmp_path / "a.h5"
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    whole = example_array((5, 3), ">i4")
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(whole.shape)
        h5py.h5d.create(file.id, b"data", h5py.h5t.STD_I32BE, space, dcpl=plist).write(
            h5py.h5s.ALL, h5py.h5s.ALL, whole
        )
    assert isinstance(inspect(path).source, Decoded)
    assert_same(open_shards(path)[::-2, ::-1].compute(), whole[::-2, ::-1])


def test_slice_reads_its_rows(tmp_path):
    """A slice of contiguous data reads its own bytes, and a slice of chunks its own chunks."""
    whole = example_array((1000, 64), "f4")
    for options, most in (({}, 256 * 10), ({"chunks": (10, 64)}, 256 * 10), ({"chunks": (50, 64)}, 256 * 10)):
        path = create(tmp_path / "a.h5", whole, **options)
        storage = RecordingStorage(LocalStorage())
        ds = with_storage(open_shards(path), storage)
        ds[500:510].compute()
        storage.reads.clear()
        assert_same(ds[510:520].compute(), whole[510:520])
        assert storage.nbytes == most


# What was never written -----------------------------------------------------------------------------------------


@pytest.fixture(params=["contiguous", "chunked", "lzf"])
def unwritten(request, tmp_path):
    """Give a function that makes a dataset of which nothing, or one chunk of two, was written."""

    def make(**options):
        chunks = {} if request.param == "contiguous" else {"chunks": (2, 3)}
        if request.param == "lzf":
            chunks["compression"] = "lzf"
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            data = file.create_dataset("data", (4, 3), "f4", **chunks, **options)
            if chunks:
                data[:2] = 1
        with h5py.File(path) as file:
            return path, file["data"][:]

    return make


def test_unwritten(unwritten):
    """Rows that were never written, of a dataset that declares no fill value, are at fault."""
    path, _ = unwritten()
    assert "not all was written" in fault(path)


def test_unwritten_is_filled(unwritten):
    """They are zeros if the user says so."""
    path, whole = unwritten()
    assert_same(open_shards(path, unwritten="fill").compute(), whole)


def test_declared_fill_value(unwritten):
    """They are the fill value that the writer chose."""
    path, whole = unwritten(fillvalue=7)
    assert_same(open_shards(path).compute(), whole)
    assert_same(open_shards(path)[::-1, 1].compute(), whole[::-1, 1])


def test_undefined_fill_value(tmp_path):
    """Where the file says that there is no fill value, nothing stands for what is missing."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((2,))
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"data", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), dcpl=plist)
    assert "not all was written" in fault(tmp_path / "a.h5", unwritten="fill")


def test_unwritten_userblock(tmp_path):
    """In a file with a userblock, where unwritten data seems to have an offset, it is seen all the same."""
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file.create_dataset("data", (4, 3), "f4")
    assert "not all was written" in fault(tmp_path / "a.h5")


def test_no_rows(tmp_path):
    """A dataset without rows has none that were not written."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", (0, 3), "f4")
        file.create_dataset("chunked", (0, 3), "f4", maxshape=(None, 3), compression="lzf")
    for name in ("data", "chunked"):
        assert open_shards(tmp_path / "a.h5", dataset=name).compute().shape == (0, 3)


# Chunks ---------------------------------------------------------------------------------------------------------


def test_skipped_filters(tmp_path):
    """A chunk that skipped a filter is read as its mask says."""
    whole = example_array((6, 2), "f4")
    shuffled = whole[2:4].view("u1").reshape(-1, 4).T.tobytes()
    path = write_chunks(
        tmp_path / "a.h5",
        (6, 2),
        (2, 2),
        [(2, (4,)), (1, (4,))],
        {
            (0, 0): (whole[:2].tobytes(), 0b11),
            (2, 0): (shuffled, 0b10),
            (4, 0): (zlib.compress(whole[4:].tobytes()), 0b01),
        },
    )
    assert_same(open_shards(path).compute(), whole)
    assert_same(open_shards(path)[1:6:2, ::-1].compute(), whole[1:6:2, ::-1])


def test_unfiltered_edge(tmp_path):
    """A dataset may be told not to filter chunks that reach beyond its edges, which no chunk's mask tells."""
    whole = example_array((5, 3), "f4")
    path = tmp_path / "a.h5"
    library = next((line for line in Path("/proc/self/maps").read_text().split() if "h5py.libs/libhdf5-" in line), None)
    if library is None:
        pytest.skip("the HDF5 library that h5py uses was not found")
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((2, 2))
    plist.set_shuffle()
    plist.set_deflate(4)
    assert ctypes.CDLL(library).H5Pset_chunk_opts(ctypes.c_int64(plist.id), 2) == 0
    with h5py.File(path, "w", libver="latest") as file:
        space = h5py.h5s.create_simple(whole.shape)
        h5py.h5d.create(file.id, b"data", h5py.h5t.IEEE_F32LE, space, dcpl=plist).write(
            h5py.h5s.ALL, h5py.h5s.ALL, whole
        )
    assert isinstance(inspect(path).source, Decoded)
    assert_same(open_shards(path).compute(), whole)


def test_shrunk_dataset(tmp_path):
    """After a dataset was cut and grown, what is read is what the library reads."""
    path = create(tmp_path / "a.h5", np.arange(20.0), chunks=(6,), maxshape=(None,), fillvalue=-1, compression="gzip")
    with h5py.File(path, "r+") as file:
        file["data"].resize((7,))
        file["data"].resize((15,))
        whole = file["data"][:]
    assert_same(open_shards(path).compute(), whole)


def test_many_chunks(tmp_path, monkeypatch):
    """Where a dataset has too many chunks to list, those that are wanted are asked for."""
    whole = example_array((50, 3), "f4")
    path = create(tmp_path / "a.h5", whole, chunks=(1, 2), compression="gzip")
    monkeypatch.setattr(hdf5_chunks, "_MOST_LISTED", 10)
    assert_same(open_shards(path)[7:31:5].compute(), whole[7:31:5])
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (10**6, 10**6, 10**6), "f4", chunks=(1, 1, 1), fillvalue=3)
        data[5, 5, 5] = 1
    ds = open_shards(path)
    assert_same(ds[5, 4:6, 5].compute(), np.array([3, 1], "f4"))


def test_rest_of_a_chunk_is_kept(tmp_path):
    """Slices of one chunk decode it once, and yet see that the file changed."""
    whole = example_array((100, 3), "f4")
    path = create(tmp_path / "a.h5", whole, chunks=(100, 3), compression="gzip")
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(open_shards(path), storage)
    assert_same(ds[:10].compute(), whole[:10])
    storage.reads.clear()
    assert_same(ds[10:20].compute(), whole[10:20])
    assert storage.reads == [(str(path), 0, 1)]
    os.utime(path, ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"a\.h5"):
        ds[20:30].compute()


@pytest.mark.parametrize("options", [{}, {"tiles_per_processor": 1}])
def test_few_rows_decode_the_chunks_that_hold_them(tmp_path, monkeypatch, options):
    """Of rows far apart no chunk is decoded that holds none of them, and none twice in a tile."""
    whole = np.arange(40_000 * 64, dtype="f4").reshape(40_000, 64)
    path = create(tmp_path / "a.h5", whole, chunks=(100, 64), compression="gzip", compression_opts=1)
    ds = open_shards(path)
    decoded = []
    decode = hdf5_chunks.decode
    monkeypatch.setattr(hdf5_chunks, "decode", lambda *arguments: (decoded.append(1), decode(*arguments)))
    rows = np.random.default_rng(0).choice(40_000, 150)
    assert_same(ds[rows].compute(**options), whole[rows])
    assert len(np.unique(rows // 100)) <= len(decoded) < 1.1 * len(np.unique(rows // 100))
    decoded.clear()
    assert_same(ds[50::1000].compute(**options), whole[50::1000])
    assert len(decoded) <= 40  # some are kept from before


def test_threads(tmp_path):
    """Threads that read any layouts at once get what they asked for."""
    whole = example_array((200, 3), "f4")
    layouts = ({}, {"chunks": (7, 2), "compression": "gzip", "shuffle": True}, {"chunks": (7, 2), "compression": "lzf"})
    opened = [
        open_shards(create(tmp_path / f"{i}.h5", whole, **options), engine="numpy") for i, options in enumerate(layouts)
    ]
    wrong = []

    def read(seed):
        generator = np.random.default_rng(seed)
        for _ in range(20):
            a, b = sorted(generator.integers(0, 201, 2).tolist())
            ds = opened[int(generator.integers(3))]
            if not np.array_equal(ds[a:b].compute().view("u4"), whole[a:b].view("u4")):
                wrong.append((seed, a, b))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Damage ---------------------------------------------------------------------------------------------------------


def raises_damage(path, *said):
    """Check that reading a file fails, and what is said of it."""
    with pytest.raises(ShardReadError, match=r"(?s)a\.h5.*" + ".*".join(said)):
        open_shards(path).compute()


@pytest.mark.parametrize("filters", [{"compression": "gzip", "fletcher32": True}, {"fletcher32": True}])
@pytest.mark.parametrize("at", [0, 7, -1])
def test_wrong_checksum(tmp_path, filters, at):
    """A byte that was flipped, in the data or in the checksum, is an error that names file, dataset and chunk."""
    path = create(tmp_path / "a.h5", example_array((9, 3), "f4"), chunks=(4, 3), **filters)
    offset, size = first_chunk(path)
    place = offset + at % size
    poke(path, place, bytes([path.read_bytes()[place] ^ 1]))
    raises_damage(path, r"'data' that begins at \(0, 0\)", "fletcher32")


@pytest.mark.parametrize("at", [0, 1, 20, -1])
def test_damaged_deflate(tmp_path, at):
    """A damaged stream is an error that names file, dataset and chunk."""
    path = create(tmp_path / "a.h5", np.arange(300.0), chunks=(150,), compression="gzip")
    offset, size = first_chunk(path)
    place = offset + at % size
    poke(path, place, bytes([path.read_bytes()[place] ^ 0x55]))
    raises_damage(path, r"'data' that begins at \(0,\)", "deflate")


@pytest.mark.parametrize("count", [1, 10**7])
def test_wrong_size(tmp_path, count):
    """A stream that inflates to less or far more than a chunk is refused without inflating it all."""
    path = write_chunks(tmp_path / "a.h5", (4,), (4,), [(1, (4,))], {(0,): (zlib.compress(bytes(count)), 0)})
    raises_damage(path, "deflate|expected 16")


def test_wrong_size_of_a_raw_chunk(tmp_path):
    """A chunk that skipped all filters must have the size of a chunk."""
    path = write_chunks(tmp_path / "a.h5", (4,), (4,), [(1, (4,))], {(0,): (bytes(15), 1)})
    raises_damage(path, "15 bytes, expected 16")


@pytest.mark.parametrize("size", [0, 1, 8, 40, 100, 800, 2000, 2100])
def test_truncated(tmp_path, size):
    """A file that was cut anywhere is at fault and named."""
    path = write_file(tmp_path / "a.h5", data=np.zeros(100))
    path.write_bytes(path.read_bytes()[:size])
    assert "a.h5" in fault(path)


def test_not_hdf5(tmp_path):
    """A file that is no HDF5 file says what it begins with; one that is not there is not found."""
    path = tmp_path / "a.h5"
    path.write_bytes(b"CDF\x01" + bytes(100))
    assert "begins with b'CDF\\x01\\x00\\x00\\x00\\x00', expected an HDF5 file" in fault(path)
    with pytest.raises(ShardsNotFoundError, match=r"b\.h5"):
        open_shards([tmp_path / "b.h5"])


def test_garbage_never_ends_the_process(tmp_path):
    """Files with random bytes changed are read right or are an error of ours."""
    whole = example_array((60, 3), "f4")
    path = create(tmp_path / "a.h5", whole, chunks=(7, 3), compression="gzip", fletcher32=True, shuffle=True)
    data = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for place in generator.integers(8, len(data), 3):
            damaged[place] = int(generator.integers(256))
        path.write_bytes(damaged)
        with suppress(LayoutError, ShardReadError):
            assert_same(open_shards(path).compute(), whole)


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"], ids=str)
def test_a_pipe_in_the_place_of_a_file(tmp_path, compression):
    """A named pipe that took a shard's name is an error when it is read, and no wait in the HDF5 library."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((20, 3), "f4"), chunks=(4, 3), compression=compression)
    ds = open_shards(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ShardReadError, match=r"a\.h5"):
        ds.compute()


# Filters --------------------------------------------------------------------------------------------------------


def test_missing_filter(tmp_path):
    """A filter that no plugin serves is at fault by its number, in the shard that needs it."""
    create(tmp_path / "s0.h5", np.zeros((4, 3), "f4"))
    write_chunks(tmp_path / "s1.h5", (4, 3), (4, 3), [(UNKNOWN, (1,))], {(0, 0): (b"\x02\x01" * 20, 0)})
    with pytest.raises(LayoutError, match=r"s1\.h5.*filter 32999.*plugin"):
        open_shards(tmp_path)


def test_missing_filter_that_was_skipped(tmp_path):
    """A filter that every chunk skipped is not needed."""
    path = write_chunks(
        tmp_path / "a.h5", (4,), (4,), [(UNKNOWN, (1,))], {(0,): (np.arange(4, dtype="f4").tobytes(), 1)}
    )
    assert_same(open_shards(path).compute(), np.arange(4, dtype="f4"))


@pytest.mark.parametrize("number", [32001, 32004, 32015])
@pytest.mark.parametrize("raw", [b"", b"\x00" * 12, b"\xff" * 40, b"\x28\xb5\x2f\xfd" + b"\x20\x10" + b"\xff" * 20])
def test_garbage_in_plugins(tmp_path, number, raw):
    """Bytes that no filter wrote are an error, and never more than a chunk is written."""
    pytest.importorskip("numcodecs")
    path = write_chunks(tmp_path / "a.h5", (4,), (4,), [(number, (2, 2, 4, 16, 5, 1, 1))], {(0,): (raw or b"\0", 0)})
    with pytest.raises((ShardReadError, LayoutError), match=r"a\.h5"):
        open_shards(path).compute()


def test_without_numcodecs(tmp_path, monkeypatch):
    """Where the decoders are missing, the library reads."""
    hdf5plugin = pytest.importorskip("hdf5plugin")
    from lazyshards.formats import codecs

    whole = example_array((60, 3), "f4")
    path = create(tmp_path / "a.h5", whole, chunks=(7, 3), **hdf5plugin.Blosc(cname="lz4"))
    monkeypatch.setattr(codecs, "_codec", lambda name: None)
    assert_same(open_shards(path).compute(), whole)


@pytest.mark.parametrize("module", ["deflate", "isal.isal_zlib", "zlib"])
def test_each_inflater(tmp_path, monkeypatch, module):
    """With any of the libraries that inflate, Python's own zlib last, the same is read, with the same checks."""
    from lazyshards.formats import codecs

    found = pytest.importorskip(module)
    monkeypatch.setattr(codecs, "_libdeflate", lambda: found if module == "deflate" else None)
    monkeypatch.setattr(codecs, "inflater", lambda: zlib if module == "deflate" else found)
    whole = example_array((60, 3), "f4")
    path = create(tmp_path / "a.h5", whole, chunks=(7, 3), compression="gzip")
    assert_same(open_shards(path).compute(), whole)
    write_chunks(path, (4,), (4,), [(1, (4,))], {(0,): (zlib.compress(bytes(10**7)), 0)})
    raises_damage(path, "deflate")
    for data in (zlib.compress(bytes(15)), zlib.compress(bytes(16))[:-1], zlib.compress(bytes(16))[:-4] + bytes(4)):
        write_chunks(path, (4,), (4,), [(1, (4,))], {(0,): (data, 0)})
        raises_damage(path, "deflate|expected 16")


# Other files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path):
    """Give a directory of a shard that refers to files inside it and outside, in every way."""
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    whole = example_array((4, 3), "f4")
    for place in (root / "inside", tmp_path):
        write_file(place / "other.h5", x=whole)
        (place / "raw.bin").write_bytes(bytes(8) + whole.tobytes())
    with h5py.File(root / "main.h5", "w") as file:
        for name, place in (("in", "inside"), ("out", "..")):
            file[f"link_{name}"] = h5py.ExternalLink(f"{place}/other.h5", "/x")
            layout = h5py.VirtualLayout(whole.shape, "f4")
            layout[:] = h5py.VirtualSource(f"{place}/other.h5", "x", whole.shape)
            file.create_virtual_dataset(f"virtual_{name}", layout)
            odd = h5py.VirtualLayout(whole.shape[::-1], "f4")
            for column in range(3):
                odd[column] = h5py.VirtualSource(f"{place}/other.h5", "x", whole.shape)[:, column]
            file.create_virtual_dataset(f"odd_{name}", odd)
            file.create_dataset(f"raw_{name}", whole.shape, "f4", external=[(f"{place}/raw.bin", 8, 48)])
    return root / "main.h5", whole


KINDS = ("link", "virtual", "odd", "raw")


@pytest.mark.parametrize("kind", KINDS)
def test_inside_the_directory(linked, kind):
    """Files inside the dataset's directory are followed."""
    path, whole = linked
    expected = whole.T if kind == "odd" else whole
    ds = open_shards(path, dataset=f"{kind}_in")
    assert_same(ds.compute(), expected)
    assert_same(ds[::-2, 1:].compute(), expected[::-2, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_outside_the_directory(linked, kind):
    """Files outside it are refused, named, unless the user allows them."""
    path, whole = linked
    message = fault(path, dataset=f"{kind}_out")
    assert "outside the dataset's directory" in message
    assert "allow_external=True" in message
    assert_same(
        open_shards(path, dataset=f"{kind}_out", allow_external=True).compute(), whole.T if kind == "odd" else whole
    )


def test_outside_by_a_symbolic_link(linked):
    """A symbolic link inside the directory does not lead out of it."""
    path, _ = linked
    target = path.parent / "inside" / "other.h5"
    target.unlink()
    target.symlink_to(path.parent.parent / "other.h5")
    assert "outside" in fault(path, dataset="link_in")


@pytest.mark.parametrize("kind", KINDS)
def test_missing_when_opened(linked, kind):
    """A file that is referred to and is not there is at fault, and never filled."""
    path, _ = linked
    for name in ("other.h5", "raw.bin"):
        (path.parent / "inside" / name).unlink()
    message = fault(path, dataset=f"{kind}_in")
    assert "main.h5" in message
    assert "inside" in message


@pytest.mark.parametrize("kind", KINDS)
def test_missing_when_read(linked, kind):
    """A file that vanished after it was opened is an error that names both files."""
    path, _ = linked
    ds = open_shards(path, dataset=f"{kind}_in")
    for name in ("other.h5", "raw.bin"):
        (path.parent / "inside" / name).unlink()
    with pytest.raises(ShardReadError, match=r"main\.h5.*inside/(other\.h5|raw\.bin)"):
        ds.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_changed_source(linked, kind):
    """A file that is referred to is known by its stamp, as the shard itself is."""
    path, _ = linked
    ds = open_shards(path, dataset=f"{kind}_in")
    for name in ("other.h5", "raw.bin"):
        os.utime(path.parent / "inside" / name, ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"main\.h5.*inside/(other\.h5|raw\.bin)"):
        ds.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_changed_main(linked, kind):
    """The file that refers to others is known by its stamp, too."""
    path, _ = linked
    ds = open_shards(path, dataset=f"{kind}_in")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"main\.h5"):
        ds.compute()


def test_short_raw_file(linked):
    """External storage that is too short is at fault: the library would read zeros."""
    path, _ = linked
    os.truncate(path.parent / "inside" / "raw.bin", 55)
    assert "holds 55 bytes, expected 56 bytes" in fault(path, dataset="raw_in")


@pytest.mark.parametrize("kind", ["virtual", "odd"])
def test_shrunk_source(linked, kind):
    """A source smaller than what is mapped of it is at fault: the library would fill the rest."""
    path, whole = linked
    write_file(path.parent / "inside" / "other.h5", x=whole[:3])
    assert "other.h5', which has shape (3, 3), expected" in fault(path, dataset=f"{kind}_in")


def test_gap_in_a_virtual_dataset(tmp_path):
    """Rows that nothing is mapped to are at fault, unless a fill value was chosen for them."""
    whole = write_file(tmp_path / "other.h5", x=np.ones((2, 3), "f4"))
    for fillvalue in (None, 5):
        layout = h5py.VirtualLayout((4, 3), "f4")
        layout[1:3] = h5py.VirtualSource(whole.name, "x", (2, 3))
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_virtual_dataset("data", layout, fillvalue=fillvalue)
        if fillvalue is None:
            assert "not all was written" in fault(tmp_path / "a.h5")
        else:
            expected = np.full((4, 3), 5, "f4")
            expected[1:3] = 1
            assert_same(open_shards(tmp_path / "a.h5").compute(), expected)


def test_unlimited_virtual_dataset(tmp_path):
    """A virtual dataset that grows with its sources is refused."""
    write_file(tmp_path / "other.h5", x=np.ones((2, 3), "f4"))
    layout = h5py.VirtualLayout((2, 3), "f4", maxshape=(None, 3))
    source = h5py.VirtualSource("other.h5", "x", (2, 3), maxshape=(None, 3))
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    assert "unlimited" in fault(tmp_path / "a.h5")


def test_virtual_datasets_of_virtual_datasets(tmp_path):
    """Sources may be virtual themselves, in the same file or another, and in any byte order."""
    whole = example_array((6, 2), "i4")
    write_file(tmp_path / "s0.h5", x=whole[:2].astype(">i4"))
    create(tmp_path / "s1.h5", whole[2:], "x", chunks=(3, 1), compression="gzip")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        first = h5py.VirtualLayout((6, 2), "i4")
        first[:2] = h5py.VirtualSource("s0.h5", "x", (2, 2))
        first[2:] = h5py.VirtualSource("s1.h5", "x", (4, 2))
        file.create_virtual_dataset("first", first)
        second = h5py.VirtualLayout((4, 2), "i4")
        second[:] = h5py.VirtualSource(".", "first", (6, 2))[1:5]
        file.create_virtual_dataset("second", second)
    ds = open_shards(tmp_path / "a.h5", dataset="second")
    assert_same(ds.compute(), whole[1:5])
    assert_same(ds[::-1, 0].compute(), whole[4:0:-1, 0])


def test_links_in_a_circle(tmp_path):
    """Files that refer to one another without end are at fault."""
    for a, b in (("a", "b"), ("b", "a")):
        with h5py.File(tmp_path / f"{a}.h5", "w") as file:
            file["data"] = h5py.ExternalLink(f"{b}.h5", "/data")
    assert "without end" in fault(tmp_path / "a.h5", dataset="data")


def test_pattern_over_external_links(linked):
    """A pattern may match external links, as detectors write them."""
    path, whole = linked
    with h5py.File(path, "r+") as file:
        for number in range(3):
            file[f"entry/data_{number}"] = h5py.ExternalLink("inside/other.h5", "/x")
    ds = open_shards(path, dataset="entry/data_*")
    assert_same(ds.compute(), np.concatenate([whole] * 3))


# Locks ----------------------------------------------------------------------------------------------------------

_WRITER = """
import h5py, sys
with h5py.File(sys.argv[1], "r+", libver="latest") as file:
    if sys.argv[2] == "swmr":
        file.swmr_mode = True
    file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["plain", "swmr"])
def test_writer_in_another_process(tmp_path, mode):
    """A file that another process writes to is at fault, named, and is fine again when that one has ended."""
    path = create(tmp_path / "a.h5", np.arange(6.0), libver="latest", chunks=(2,))
    command = [sys.executable, "-c", _WRITER, str(path), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline().strip() == b"ready"
        message = fault(path)
        writer.stdin.close()
        writer.wait(20)
    assert "locked by another process" in message if mode == "plain" else "open for writing in another" in message
    assert_same(open_shards(path).compute(), np.arange(6.0))


def test_writer_in_this_process(tmp_path):
    """A file that this process has open for writing is at fault, because its rows may be in memory only."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(6.0)
        file.flush()
        assert "open for writing in this process" in fault(path)
        file["data"][:] = 1
    assert_same(open_shards(path).compute(), np.ones(6))


def test_reader_in_this_process(tmp_path):
    """A file that the user has open for reading stays open for the user."""
    path = create(tmp_path / "a.h5", np.arange(6.0), chunks=(2,), compression="lzf")
    with h5py.File(path) as file:
        data = file["data"]
        assert_same(open_shards(path).compute(), np.arange(6.0))
        assert data[5] == 5


def test_files_are_closed(tmp_path):
    """Nothing stays open: a writer can open the file after it was read, or found faulty."""
    path = create(tmp_path / "a.h5", np.arange(6.0), chunks=(2,), compression="lzf")
    ds = open_shards(path)
    ds.compute()
    found = inspect(path, dataset="nothing")
    with h5py.File(path, "r+") as file:
        file["data"][0] = 7
    assert isinstance(found, Fault)


# Remote ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(request):
    """Give a function that puts a file into fsspec's memory, and returns its URL."""
    import fsspec

    root = f"/hdf5_{abs(hash(request.node.name))}"
    system = fsspec.filesystem("memory")

    def put(path):
        system.pipe_file(f"{root}/{path.name}", path.read_bytes())
        return f"memory:/{root}"

    yield put
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (7, 2), "compression": "gzip"}, {"chunks": (7, 2), "compression": "lzf"}], ids=str
)
def test_remote(tmp_path, memory, options):
    """Every way to read works by ranges, without a file of this machine."""
    whole = example_array((50, 3), "f4")
    for number, part in enumerate(np.split(whole, 2)):
        url = memory(create(tmp_path / f"s{number}.h5", part, **options))
    ds = open_shards(url)
    assert_same(ds.compute(), whole)
    assert_same(ds[40:3:-3, 1].compute(), whole[40:3:-3, 1])


def test_remote_heads_are_one_read(tmp_path, memory):
    """The metadata of a simple file is in its first read."""
    url = memory(create(tmp_path / "a.h5", example_array((9000, 3), "f4")))
    ds = open_shards(url)
    storage = RecordingStorage(ds.shards and ds._layout.storage)
    (found,) = HDF5.inspect([f"{url}/a.h5"], _Remote(storage), {})
    assert isinstance(found, Shard), found
    assert len(storage.reads) == 1


class _Remote:
    """A storage whose question for a local path is not recorded as a read."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def local_path(self, path):
        return None


def test_remote_virtual_dataset(linked, memory):
    """Sources beside a remote file are followed by name; what the library would have to open is refused."""
    path, whole = linked
    url = memory(path)
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe_file(f"{url.removeprefix('memory:/')}/inside/other.h5", (path.parent / "inside/other.h5").read_bytes())
    for kind in ("virtual", "link"):
        assert_same(open_shards(f"{url}/main.h5", dataset=f"{kind}_in").compute(), whole)
    for name in ("odd_in", "link_out"):
        with pytest.raises(LayoutError, match=r"main\.h5"):
            open_shards(f"{url}/main.h5", dataset=name)


def test_remote_truncated(tmp_path, memory):
    """A remote file that was cut is at fault and named."""
    path = create(tmp_path / "a.h5", np.zeros(100))
    path.write_bytes(path.read_bytes()[:2500])
    with pytest.raises(LayoutError, match=r"a\.h5.*truncated"):
        open_shards(memory(path))


def test_extents_name_the_file(many):
    """A plain dataset of many is read from the file, whatever the shard is called."""
    path, _ = many
    source = open_shards(path, dataset="set/part_0").shards[0].source
    assert isinstance(source, Packed)
    source = open_shards(path, dataset=["set/part_0"]).shards[0].source
    assert isinstance(source, Extents)
    assert source.extents[0].path == str(path)


def test_format_error_is_ours():
    """What is raised without h5py is an error of the package."""
    assert issubclass(FormatError, ValueError)
