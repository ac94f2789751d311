import gzip
import json
import lzma
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LayoutError, LazyShardsError, ShardChangedError, ShardReadError
from lazyshards.formats import find_format, zarr_chunks, zarr_codecs
from lazyshards.formats.codecs import CodecError
from lazyshards.layout import Decoded
from lazyshards.storage import LocalStorage
from lazyshards.testing import (
    DTYPES,
    FormatConformance,
    RecordingStorage,
    assert_same,
    example_array,
    index_chains,
    with_storage,
)

pytest.importorskip("numcodecs", reason="numcodecs is not installed")
zarr = pytest.importorskip("zarr", minversion="3", reason="zarr-python 3 is not installed")

pytestmark = pytest.mark.usefixtures("on_numpy")


def save(path, array, chunks=None, version=3, **options):
    """Write a store with zarr-python; every chunk is written."""
    chunks = chunks or (2 if len(array) < 100 else 1000,)
    chunks = (*chunks, *[max(1, size) for size in array.shape[len(chunks) :]])[: array.ndim]
    store = zarr.create_array(
        str(path),
        shape=array.shape,
        dtype=array.dtype,
        chunks=chunks,
        zarr_format=version,
        overwrite=True,
        config={"write_empty_chunks": True},
        **options,
    )
    store[...] = array
    return store


def edit(path, **changes):
    """Change entries of the metadata of a store of version 3; a value of None removes one."""
    file = path / "zarr.json"
    described = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in described.items() if value is not None}))


def chunk_files(path):
    """Return the files of a store that hold chunks."""
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name not in METADATA)


METADATA = {"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"}


class Stores(FormatConformance):
    """What is different with stores: a shard is a directory."""

    format = "zarr"
    head_nbytes = 3 * (64 << 10)

    def test_only_touched_shards_are_read(self, shards):
        """Rows of one shard are read from its own directory alone."""
        ds, whole = shards([3, 4, 5])
        storage = RecordingStorage(LocalStorage())
        assert_same(with_storage(ds, storage)[4:6].compute(), whole[4:6])
        assert {Path(path).is_relative_to(ds.shards[1].path) for path in storage.paths} == {True}

    def test_damage_is_told(self, shards):
        """A chunk or metadata that is cut anywhere is an error that names the store."""
        ds, _ = shards([5, 4])
        path = Path(ds.shards[1].path)
        for file in sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".zattrs"):
            data = file.read_bytes()
            for size in {0, 1, len(data) // 2, len(data) - 1}:
                file.write_bytes(data[:size])
                with pytest.raises(LazyShardsError, match=path.name):
                    open_shards(path.parent, engine="numpy", **self.options).compute()
            file.write_bytes(data)


class TestVersion3(Stores):
    """Stores of version 3 as zarr-python writes them: zstd."""

    def write(self, path, array):
        """Write with zarr-python."""
        save(path, array)


class TestVersion2(Stores):
    """Stores of version 2 as zarr-python writes them."""

    dtypes = (*DTYPES, ">f4", ">i8", "S3", "M8[s]")

    def write(self, path, array):
        """Write with zarr-python."""
        save(path, array, version=2)


class TestRaw(Stores):
    """Chunks of plain bytes."""

    def write(self, path, array):
        """Write with zarr-python."""
        save(path, array, compressors=None)


class TestSharded(Stores):
    """Chunks in shard files."""

    def write(self, path, array):
        """Write with zarr-python."""
        rows = 2 if len(array) < 100 else 1000
        columns = [2 * -(-size // 2) for size in array.shape[1:2]]
        save(path, array, (rows, 2), shards=(2 * rows, *columns, *array.shape[2:]))


# What others write -------------------------------------------------------------------------------------------------

V2_CODECS = {
    "none": {"compressors": None},
    "blosc": {"compressors": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
    "blosc zstd": {"compressors": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 2}},
    "zstd": {"compressors": {"id": "zstd", "level": 1}},
    "gzip": {"compressors": {"id": "gzip", "level": 1}},
    "zlib": {"compressors": {"id": "zlib", "level": 1}},
    "lz4": {"compressors": {"id": "lz4", "acceleration": 1}},
    "bz2": {"compressors": {"id": "bz2", "level": 1}},
    "lzma": {"compressors": {"id": "lzma"}},
    "shuffle zlib": {"filters": [{"id": "shuffle", "elementsize": 4}], "compressors": {"id": "zlib", "level": 1}},
    "crc32": {"filters": [{"id": "crc32"}], "compressors": {"id": "zstd", "level": 1}},
    "adler32": {"filters": [{"id": "adler32"}], "compressors": None},
    "fletcher32": {"filters": [{"id": "fletcher32"}], "compressors": None},
    "delta": {"filters": [{"id": "delta", "dtype": "<i4"}], "compressors": {"id": "zlib", "level": 1}},
    "delta i2": {"filters": [{"id": "delta", "dtype": "<i4", "astype": "<i2"}], "compressors": {"id": "zstd"}},
    "astype": {"filters": [{"id": "astype", "encode_dtype": "<i8", "decode_dtype": "<i4"}], "compressors": None},
    "offset": {
        "filters": [{"id": "fixedscaleoffset", "dtype": "<i4", "astype": "<i2", "offset": 0, "scale": 1}],
        "compressors": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    },
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("codecs", V2_CODECS)
def test_codecs_of_version_2(tmp_path, codecs, order):
    """Every codec that is known, in either order of axes, gives what zarr-python gives."""
    array = (np.arange(7 * 5).reshape(7, 5) % 97).astype("<i4")
    options = dict(V2_CODECS[codecs])
    root = zarr.open_array(
        str(tmp_path / "a.zarr"),
        mode="w",
        shape=array.shape,
        chunks=(3, 2),
        dtype="<i4",
        zarr_format=2,
        compressor=None,
        order=order,
    )
    described = json.loads((tmp_path / "a.zarr/.zarray").read_text())
    described |= {"compressor": options["compressors"], "filters": options.get("filters")}
    (tmp_path / "a.zarr/.zarray").write_text(json.dumps(described))
    root = zarr.open_array(str(tmp_path / "a.zarr"), mode="r+")
    root[...] = array
    assert np.array_equal(zarr.open_array(str(tmp_path / "a.zarr"), mode="r")[...], array)
    ds = open_shards(tmp_path / "a.zarr")
    assert_same(ds.compute(), array)
    assert_same(ds[1:6, ::-2].compute(), array[1:6, ::-2])


V3_CODECS = {
    "blosc": [zarr.codecs.BloscCodec(cname="lz4")],
    "zstd": [zarr.codecs.ZstdCodec(level=1)],
    "zstd checksum": [zarr.codecs.ZstdCodec(level=1, checksum=True)],
    "gzip": [zarr.codecs.GzipCodec(level=1)],
    "crc32c": [zarr.codecs.Crc32cCodec()],
    "zstd crc32c": [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()],
    "none": None,
}
AXES = st.integers(1, 4)


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_round_trip_through_zarr_python(tmp_path_factory, data):
    """What zarr-python writes, of either version, is read for any index: any chunks, codecs, order, shards."""
    folder = tmp_path_factory.mktemp("zarr")
    row_shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=2)))
    kind = data.draw(st.sampled_from(DTYPES))
    counts = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    arrays = [example_array((n, *row_shape), kind, seed=i) for i, n in enumerate(counts)]
    for i, array in enumerate(arrays):
        chunks = tuple(data.draw(AXES) for _ in array.shape)
        options = {}
        version = data.draw(st.sampled_from((2, 3)))
        if version == 3:
            options["compressors"] = V3_CODECS[data.draw(st.sampled_from(sorted(V3_CODECS)))]
            options["serializer"] = zarr.codecs.BytesCodec(endian=data.draw(st.sampled_from(("little", "big"))))
            if data.draw(st.booleans()) and array.ndim > 1:
                options["filters"] = [zarr.codecs.TransposeCodec(order=data.draw(st.permutations(range(array.ndim))))]
            if data.draw(st.booleans()):
                options["shards"] = tuple(size * data.draw(st.integers(1, 3)) for size in chunks)
        else:
            options["order"] = data.draw(st.sampled_from("CF"))
            options["compressors"] = data.draw(st.sampled_from(("auto", None)))
        save(folder / f"s{i}.zarr", array, chunks, version, **options)
    found, expected = open_shards(folder), np.concatenate(arrays)
    for index in data.draw(index_chains(expected.shape)):
        found, expected = found[index], expected[index]
    assert_same(found.compute(), expected)


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("sharded", [False, True], ids=["chunks", "shards"])
def test_written_by_tensorstore(tmp_path, driver, sharded):
    """Stores that TensorStore wrote are read."""
    ts = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    if sharded and driver == "zarr":
        pytest.skip("version 2 has no shards")
    array = example_array((50, 6), "f4")
    metadata = {"shape": list(array.shape)}
    if driver == "zarr":
        metadata |= {"chunks": [7, 4], "dtype": "<f4", "compressor": {"id": "zstd", "level": 1}}
    else:
        chunk = [14, 4] if sharded else [7, 4]
        inner = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]
        shards = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [7, 2], "codecs": inner}}]
        metadata |= {
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": shards if sharded else inner,
        }
    kvstore = {"driver": "file", "path": str(tmp_path / "a.zarr")}
    ts.open({"driver": driver, "kvstore": kvstore, "metadata": metadata}, create=True).result().write(array).result()
    assert_same(open_shards(tmp_path / "a.zarr")[3:45:2, 1:5].compute(), array[3:45:2, 1:5])


@pytest.mark.parametrize("location", ["start", "end"])
def test_index_at_either_end(tmp_path, location):
    """The index of a shard file may stand at its beginning."""
    array = example_array((9, 4), "f4")
    codec = zarr.codecs.ShardingCodec(chunk_shape=(2, 2), index_location=location)
    zarr.create_array(
        str(tmp_path / "a.zarr"), shape=(9, 4), dtype="f4", chunks=(6, 4), serializer=codec, compressors=None
    )[...] = array
    assert_same(open_shards(tmp_path / "a.zarr")[1:8].compute(), array[1:8])


@pytest.mark.parametrize(
    ("version", "encoding"),
    [
        (2, {"name": "v2", "separator": "."}),
        (2, {"name": "v2", "separator": "/"}),
        (3, {"name": "default", "separator": "/"}),
        (3, {"name": "default", "separator": "."}),
        (3, {"name": "v2", "separator": "."}),
        (3, {"name": "v2", "separator": "/"}),
    ],
    ids=str,
)
def test_names_of_chunks(tmp_path, version, encoding):
    """Every way of naming chunks is known."""
    array = example_array((9, 4), "f4")
    save(tmp_path / "a.zarr", array, (2, 3), version, chunk_key_encoding=encoding)
    assert_same(open_shards(tmp_path / "a.zarr")[1:8].compute(), array[1:8])


@pytest.mark.parametrize("kind", ["U3", "S4", "M8[ns]", "m8[10s]"])
@pytest.mark.filterwarnings("ignore:The data type.*does not have a Zarr V3 specification")
def test_other_types_of_version_3(tmp_path, kind):
    """Text, bytes and times are read as well."""
    array = example_array((5, 2), kind)
    save(tmp_path / "a.zarr", array)
    assert_same(open_shards(tmp_path / "a.zarr").compute(), array)


def test_fields(tmp_path):
    """Records of version 2 are read."""
    array = example_array((5,), np.dtype([("a", "<f4"), ("b", ">i2", (2,))]))
    folder = tmp_path / "a.zarr"
    folder.mkdir()
    described = {
        "zarr_format": 2, "shape": [5], "chunks": [5], "dtype": [["a", "<f4"], ["b", ">i2", [2]]], "compressor": None,
        "fill_value": None, "order": "C", "filters": None,
    }  # fmt: skip
    (folder / ".zarray").write_text(json.dumps(described))
    (folder / "0").write_bytes(array.tobytes())
    found = open_shards(folder).compute()
    assert np.array_equal(found, array.astype(found.dtype))


# Groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_array_in_a_group(tmp_path, version):
    """The only array of a group is found alone; of several the one that is named is taken."""
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=version)
    x, y = example_array((5, 2), "f4"), example_array((5, 2), "f4", seed=1)
    save(tmp_path / "a.zarr/x", x, version=version)
    assert_same(open_shards(tmp_path / "a.zarr").compute(), x)
    group.create_group("deep")
    save(tmp_path / "a.zarr/deep/y", y, version=version)
    assert_same(open_shards(tmp_path / "a.zarr", array="deep/y").compute(), y)
    save(tmp_path / "a.zarr/z", x, version=version)
    with pytest.raises(LayoutError, match=r"a.zarr': is a group of 2 arrays \('x', 'z'\): say which with array="):
        open_shards(tmp_path / "a.zarr")
    assert open_shards(tmp_path / "a.zarr", array="x") != open_shards(tmp_path / "a.zarr", array="z")


def test_missing_array(tmp_path):
    """An array that is not in a store is an error that names both."""
    save(tmp_path / "a.zarr", example_array((5, 2), "f4"))
    with pytest.raises(LayoutError, match=r"a\.zarr': holds no Zarr array at array='x'"):
        open_shards(tmp_path / "a.zarr", array="x")


def test_no_store(tmp_path):
    """A directory without metadata is an error that says so."""
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(LayoutError, match=r"a\.zarr': holds no Zarr array: neither zarr.json nor \.zarray"):
        open_shards(tmp_path / "a.zarr")


def test_files_among_stores(tmp_path):
    """A file with the suffix of a store is an error that names it."""
    save(tmp_path / "s0.zarr", example_array((5, 2), "f4"))
    (tmp_path / "s1.zarr").write_bytes(b"x")
    with pytest.raises(LayoutError, match=r"s1\.zarr"):
        open_shards(tmp_path)


# Chunks that are not there, or damaged ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"shards": (4, 2)}], ids=["chunks", "shards"])
@pytest.mark.parametrize("version", [2, 3])
def test_absent_chunks(tmp_path, version, options):
    """An absent chunk is an error that names store and chunk; with missing_chunks="fill" it is the fill value."""
    if version == 2 and options:
        pytest.skip("version 2 has no shards")
    array = np.full((9, 2), 7, "f4")
    array[:2] = 1
    array[8] = 3
    store = zarr.create_array(
        str(tmp_path / "a.zarr"), shape=(9, 2), dtype="f4", chunks=(2, 2), fill_value=7, zarr_format=version, **options
    )
    store[...] = array
    ds = open_shards(tmp_path / "a.zarr")
    assert_same(ds[:2].compute(), array[:2])
    with pytest.raises(ShardReadError, match=r'a.zarr\' lacks its chunk \[1, 0\].*missing_chunks="fill"'):
        ds.compute()
    filled = open_shards(tmp_path / "a.zarr", missing_chunks="fill")
    assert_same(filled[::-1].compute(), array[::-1])
    assert filled != ds


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("f4", np.nan), ("f4", -np.inf), ("i8", -(2**62) - 1), ("u8", 2**64 - 1), ("?", True),
        ("c8", complex(1, np.inf)), ("S3", b"ab"),
        ("U3", "äb"), ("M8[s]", np.datetime64("2020-01-01", "s")), ("m8[s]", np.timedelta64("NaT", "s")),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore:The data type.*does not have a Zarr V3 specification")
def test_fill_values(tmp_path, version, kind, value):
    """Every kind of fill value is read as zarr-python reads it."""
    store = zarr.create_array(
        str(tmp_path / "a.zarr"), shape=(3,), dtype=kind, chunks=(2,), fill_value=value, zarr_format=version
    )
    assert_same(open_shards(tmp_path / "a.zarr", missing_chunks="fill").compute(), store[...])


def test_no_fill_value(tmp_path):
    """A store of version 2 whose fill value is null cannot be filled."""
    save(tmp_path / "a.zarr", example_array((5, 2), "f4"), version=2)
    described = json.loads((tmp_path / "a.zarr/.zarray").read_text())
    (tmp_path / "a.zarr/.zarray").write_text(json.dumps({**described, "fill_value": None}))
    assert len(open_shards(tmp_path / "a.zarr")) == 5
    with pytest.raises(LayoutError, match="its fill_value is null"):
        open_shards(tmp_path / "a.zarr", missing_chunks="fill")


@pytest.mark.parametrize("policy", ["raise", "fill"])
@pytest.mark.parametrize("codecs", ["none", "crc32c", "gzip", "zstd crc32c", "blosc"])
@pytest.mark.parametrize("sharded", [False, True], ids=["chunks", "shards"])
def test_damaged_chunks(tmp_path, codecs, sharded, policy):
    """A chunk that was cut or grown is an error that names the store, never the fill value."""
    options = {"shards": (6, 4)} if sharded else {}
    path = tmp_path / "a.zarr"
    save(path, example_array((9, 4), "f4"), (3, 2), compressors=V3_CODECS[codecs], fill_value=1, **options)
    file = chunk_files(path)[-1]
    data = file.read_bytes()
    for damaged in (data[:-3], data[: len(data) // 2], b"", data + b"1234567", b"\0" * len(data)):
        if codecs in ("none", "blosc") and damaged == b"\0" * len(data) and not sharded:
            continue  # plain zeros are as good as any bytes; blosc tells them by its header, see below
        file.write_bytes(damaged)
        with pytest.raises(ShardReadError, match=r"a\.zarr"):
            open_shards(path, missing_chunks=policy).compute()


@pytest.mark.parametrize("codecs", ["crc32c", "zstd crc32c", "zstd checksum", "gzip"])
def test_checksums(tmp_path, codecs):
    """Where there is a checksum, a byte that was changed is an error."""
    path = tmp_path / "a.zarr"
    array = np.arange(2000, dtype="f4").reshape(-1, 2)
    save(path, array, (1000,), compressors=V3_CODECS[codecs])
    (file,) = chunk_files(path)
    data = file.read_bytes()
    for at in range(20, len(data), max(1, len(data) // 50)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(ShardReadError, match=r"a\.zarr"):
            open_shards(path).compute()


def test_damaged_index(tmp_path):
    """An index that points beyond its file, or whose checksum is wrong, is an error."""
    path = tmp_path / "a.zarr"
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    inner = {"chunk_shape": [2, 2], "codecs": codecs, "index_codecs": codecs, "index_location": "end"}
    save(path, example_array((4, 2), "f4"), (4, 2), compressors=None)
    edit(path, codecs=[{"name": "sharding_indexed", "configuration": inner}])
    (file,) = chunk_files(path)
    body = file.read_bytes()
    file.write_bytes(body + struct.pack("<4Q", 0, 16, 16, 16))
    assert_same(open_shards(path).compute(), example_array((4, 2), "f4"))
    for entries in ((0, 16, 1 << 40, 16), (0, 16, 16, 1 << 40), (0, 16, 2**64 - 16, 32), (0, 16, 2**64 - 1, 16)):
        file.write_bytes(body + struct.pack("<4Q", *entries))
        with pytest.raises(ShardReadError, match="chunks beyond its"):
            open_shards(path).compute()
    file.write_bytes(body + struct.pack("<4Q", 0, 16, 16, 15))
    with pytest.raises(ShardReadError, match="holds 15 bytes, expected 16"):
        open_shards(path).compute()


@pytest.mark.parametrize("codec", ["zstd", "gzip", "blosc"])
def test_bombs(tmp_path, codec):
    """A chunk that would inflate to more than it can hold is an error, without inflating it."""
    path, big = tmp_path / "a.zarr", tmp_path / "b.zarr"
    save(path, np.zeros((4, 2), "f4"), (4, 2), compressors=V3_CODECS[codec])
    save(big, np.zeros((1 << 22,), "f4"), (1 << 22,), compressors=V3_CODECS[codec])
    chunk_files(path)[0].write_bytes(chunk_files(big)[0].read_bytes())
    with pytest.raises(ShardReadError, match=r"a\.zarr"):
        open_shards(path).compute()


def test_changed_metadata_is_told(tmp_path):
    """A store whose metadata was rewritten is an error that names it."""
    path = tmp_path / "a.zarr"
    save(path, example_array((5, 2), "f4"))
    ds = open_shards(path)
    os.utime(path / "zarr.json", ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"a\.zarr"):
        ds.compute()


# Metadata ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": [5]}, "other axes"),
        ({"shape": [-5, 2]}, "its shape is"),
        ({"shape": [5, 2.0]}, "its shape is"),
        ({"shape": []}, "no axes"),
        ({"shape": None}, "lacks 'shape'"),
        ({"zarr_format": 4}, "of version 4"),
        ({"data_type": "bfloat16"}, "data_type is 'bfloat16'"),
        ({"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "x"}}}, "makes no sense"),
        ({"chunk_grid": {"name": "rectilinear"}}, "'rectilinear', expected 'regular'"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 2]}}}, "its chunk_shape is"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 2]}}}, "expected at most"),
        ({"chunk_key_encoding": {"name": "hilbert"}}, "'hilbert'"),
        ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}}}, "separator"),
        ({"storage_transformers": [{"name": "x"}]}, "storage_transformers"),
        ({"encryption": {"name": "x"}}, "'encryption', which must be understood"),
        ({"codecs": []}, "do not make bytes"),
        ({"codecs": [{"name": "bytes"}, {"name": "imagecodecs_jpeg"}]}, "codec 'imagecodecs_jpeg' is not known"),
        ({"codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle"}]}, "'pickle' is not known"),
        ({"codecs": [{"name": "zstd"}, {"name": "bytes"}]}, "stands where it cannot be"),
        ({"codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "gzip"}]}, "after another compressor"),
        ({"codecs": [{"name": "transpose", "configuration": {"order": [0, 0]}}, {"name": "bytes"}]}, "transposed"),
        ({"codecs": 3}, "makes no sense"),
        ({"node_type": "thing"}, "'thing'"),
    ],
    ids=str,
)
def test_metadata_that_is_refused(tmp_path, changes, text):
    """Metadata that makes no sense, or asks for what is not known, is a fault that names store and reason."""
    save(tmp_path / "a.zarr", example_array((5, 2), "f4"))
    edit(tmp_path / "a.zarr", **changes)
    with pytest.raises(LayoutError, match=text) as caught:
        open_shards(tmp_path / "a.zarr")
    assert "a.zarr" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "|O"}, "plain values"),
        ({"filters": [{"id": "vlen-utf8"}]}, "'vlen-utf8' is not known"),
        ({"compressor": {"id": "pickle"}}, "'pickle' is not known"),
        ({"filters": [{"id": "delta", "dtype": "O"}]}, "plain values"),
        ({"order": "K"}, "order is 'K'"),
        ({"zarr_format": 1}, "version 1"),
    ],
    ids=str,
)
def test_metadata_of_version_2_that_is_refused(tmp_path, changes, text):
    """The same of version 2; nothing that would run code is decoded."""
    save(tmp_path / "a.zarr", example_array((5, 2), "f4"), version=2)
    described = json.loads((tmp_path / "a.zarr/.zarray").read_text())
    (tmp_path / "a.zarr/.zarray").write_text(json.dumps({**described, **changes}))
    with pytest.raises(LayoutError, match=text):
        open_shards(tmp_path / "a.zarr")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 5000, "{" + " " * 70_000], ids=lambda text: text[:5])
def test_damaged_metadata(tmp_path, text):
    """Metadata that is no JSON object is a fault of the store; the others are inspected."""
    save(tmp_path / "s0.zarr", example_array((5, 2), "f4"))
    save(tmp_path / "s1.zarr", example_array((5, 2), "f4"))
    (tmp_path / "s1.zarr/zarr.json").write_text(text)
    with pytest.raises(LayoutError, match=r"1 of 2 shards.*\n.*s1.zarr': has damaged metadata"):
        open_shards(tmp_path)


def test_large_attributes(tmp_path):
    """Metadata longer than the first read is read to its end; beyond the bound it is refused unread."""
    path = tmp_path / "a.zarr"
    array = example_array((5, 2), "f4")
    save(path, array, attributes={"text": "x" * 100_000})
    assert_same(open_shards(path).compute(), array)
    os.truncate(path / "zarr.json", 1 << 30)
    with pytest.raises(LayoutError, match="1,073,741,824 bytes, expected at most"):
        open_shards(path)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"array": 3}, TypeError), ({"missing_chunks": "zero"}, ValueError)],
    ids=str,
)
def test_options_of_the_wrong_kind(tmp_path, options, error):
    """An option that makes no sense is named."""
    save(tmp_path / "a.zarr", example_array((5, 2), "f4"))
    with pytest.raises(error, match=next(iter(options))):
        open_shards(tmp_path / "a.zarr", **options)


# What is read ------------------------------------------------------------------------------------------------------


def test_edges(tmp_path):
    """The borders of chunks are told to the planner."""
    save(tmp_path / "a.zarr", example_array((9, 2), "f4"), (4,))
    (shard,) = open_shards(tmp_path / "a.zarr").shards
    assert isinstance(shard.source, Decoded)
    assert shard.source.edges == (0, 4, 8)


def test_only_needed_chunks_are_opened(tmp_path):
    """A slice of rows and columns opens the chunks that hold them."""
    array = example_array((10, 9), "f4")
    save(tmp_path / "a.zarr", array, (3, 3))
    ds = open_shards(tmp_path / "a.zarr")
    storage = RecordingStorage(LocalStorage())
    assert_same(with_storage(ds, storage)[4:8, 5].compute(), array[4:8, 5])
    names = {str(Path(path).relative_to(tmp_path / "a.zarr")) for path in storage.paths}
    assert names == {"zarr.json", "c/1/1", "c/2/1"}


@pytest.mark.parametrize("options", [{}, {"compressors": None}, {"shards": (12, 6)}], ids=["zstd", "raw", "shards"])
def test_remote(tmp_path, options):
    """Stores in an object store are read, several chunks at a time; a lost chunk is an error there, too."""
    fsspec = pytest.importorskip("fsspec")
    array = example_array((40, 6), "f4")
    save(tmp_path / "s0.zarr", array[:25], (3, 2), **options)
    save(tmp_path / "s1.zarr", array[25:], (3, 2), **options)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/zarr_stores", recursive=True)
    try:
        ds = open_shards("memory://zarr_stores")
        assert_same(ds[3:38:2, 1:5].compute(), array[3:38:2, 1:5])
        lost = chunk_files(tmp_path / "s0.zarr")[-1].relative_to(tmp_path)
        memory.rm(f"/zarr_stores/{lost}")
        with pytest.raises(ShardReadError, match=r"s0.zarr' lacks its chunk"):
            ds.compute()
    finally:
        memory.rm("/zarr_stores", recursive=True)


def test_missing_library_is_told(tmp_path, monkeypatch):
    """Without numcodecs a store that needs it is a fault that says what to install; one that does not is read."""

    def absent():
        raise zarr_codecs.RefusedError("its codecs need numcodecs: pip install 'lazyshards[zarr]'")

    monkeypatch.setattr(zarr_codecs, "_numcodecs", absent)
    array = example_array((5, 2), "f4")
    save(tmp_path / "s0.zarr", array, compressors=V3_CODECS["gzip"])
    assert_same(open_shards(tmp_path / "s0.zarr").compute(), array)
    save(tmp_path / "s1.zarr", array)
    with pytest.raises(LayoutError, match=r"pip install 'lazyshards\[zarr\]'"):
        open_shards(tmp_path / "s1.zarr")


def test_without_isal(tmp_path, monkeypatch):
    """Where isal is missing, Python's own zlib inflates, with the same checks."""
    monkeypatch.setattr(zarr_codecs, "inflater", lambda: zlib)
    array = example_array((20, 3), "f4")
    save(tmp_path / "s0.zarr", array, compressors=V3_CODECS["gzip"])
    ds = open_shards(tmp_path / "s0.zarr")
    assert_same(ds.compute(), array)
    path = chunk_files(tmp_path / "s0.zarr")[0]
    path.write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(ShardReadError, match=r"s0.zarr' is damaged: its chunk \[0, 0\]: gzip: more than"):
        ds.compute()


@pytest.mark.parametrize("module", ["isal.isal_zlib", "zlib"])
def test_gzip(module, monkeypatch):
    """Streams one after the other are one chunk; a wrong checksum, a cut and bytes left over are errors."""
    monkeypatch.setattr(zarr_codecs, "inflater", lambda: pytest.importorskip(module))
    array = np.arange(3000, dtype="u1")
    codecs = (zarr_codecs.Codec("gzip"),)
    whole = gzip.compress(array.tobytes())
    double = gzip.compress(array[:1000].tobytes()) + gzip.compress(array[1000:].tobytes())
    for data in (whole, double):
        out = np.zeros_like(array)
        zarr_codecs.undo(codecs, [len(out)], data, out)
        assert np.array_equal(out, array)
    checksum = bytearray(whole)
    checksum[-8] ^= 1
    for data in (bytes(checksum), whole[:-1], whole[:50], whole + b"x", gzip.compress(bytes(3001)), b"", b"PK"):
        with pytest.raises(CodecError, match=r"^gzip: "):
            zarr_codecs.undo(codecs, [len(out)], data, out)


def test_lzma_takes_bounded_memory():
    """A stream that asks for more working memory than any preset takes is refused before it is given any."""
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    codecs = (zarr_codecs.Codec("lzma"),)
    out = np.empty(100, "u1")
    with pytest.raises(CodecError, match=r"lzma: Memory usage limit"):
        zarr_codecs.undo(codecs, [100], lzma.compress(bytes(100), filters=filters), out)
    zarr_codecs.undo(codecs, [100], lzma.compress(bytes(100), preset=9), out)
    assert not out.any()


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_of_a_chunk_are_decoded_once(tmp_path, monkeypatch, sharded):
    """Slices in order decode a chunk once, not each of them anew, until the chunk is written anew."""
    array = example_array((96, 3), "f4")
    options = {"shards": (48, 3)} if sharded else {}
    save(tmp_path / "s0.zarr", array, (24,), compressors=V3_CODECS["zstd"], **options)
    ds = open_shards(tmp_path / "s0.zarr")
    decoded = []
    undo = zarr_chunks.undo
    monkeypatch.setattr(zarr_chunks, "undo", lambda *arguments: (decoded.append(1), undo(*arguments)))
    for start in range(0, 96, 4):
        assert_same(ds[start : start + 4].compute(), array[start : start + 4])
    assert len(decoded) == 4
    for path in chunk_files(tmp_path / "s0.zarr"):
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, 1))
    assert_same(ds[:4].compute(), array[:4])
    assert len(decoded) == 5


@pytest.mark.parametrize("sharded", [False, True])
def test_few_rows_decode_the_chunks_that_hold_them(tmp_path, monkeypatch, sharded):
    """Of rows far apart no chunk is decoded that holds none of them, and none twice."""
    array = np.arange(40_000 * 64, dtype="f4").reshape(40_000, 64)
    options = {"shards": (8_000, 64)} if sharded else {}
    save(tmp_path / "s0.zarr", array, (100,), compressors=V3_CODECS["zstd"], **options)
    ds = open_shards(tmp_path / "s0.zarr")
    decoded = []
    undo = zarr_chunks.undo
    monkeypatch.setattr(zarr_chunks, "undo", lambda *arguments: (decoded.append(1), undo(*arguments)))
    rows = np.random.default_rng(0).choice(40_000, 150)
    assert_same(ds[rows].compute(), array[rows])
    assert len(decoded) == len(np.unique(rows // 100))


def test_several_tiles(tmp_path, engine):
    """Tiles that do not end where chunks end are put together by every engine."""
    array = example_array((1003, 5), "f4")
    save(tmp_path / "s0.zarr", array[:500], (64,))
    save(tmp_path / "s1.zarr", array[500:], (64, 2), compressors=V3_CODECS["blosc"])
    found = open_shards(tmp_path)[7:990].compute(engine=engine, tiles_per_processor=3)
    assert np.array_equal(np.asarray(found.get() if engine == "cupy" else found).view("u4"), array[7:990].view("u4"))


def test_astype(tmp_path):
    """What is decoded is cast like anything else."""
    array = np.arange(30, dtype="i2").reshape(10, 3)
    save(tmp_path / "a.zarr", array)
    assert_same(open_shards(tmp_path / "a.zarr").astype("f8")[::-2, 1].compute(), array[::-2, 1].astype("f8"))


def test_registered():
    """Stores are directories whose names end in .zarr."""
    format = find_format("zarr")
    assert (format.directories, format.suffixes) == (True, (".zarr",))
