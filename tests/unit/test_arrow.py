import os
import pickle
import threading

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from lazyshards import open_shards
from lazyshards.errors import LayoutError, LazyShardsError, ShardChangedError, ShardReadError
from lazyshards.formats import Fault, arrow_rows, arrow_schema, find_format, format_of_bytes, format_of_name
from lazyshards.layout import Decoded, Extents, Packed
from lazyshards.storage import LocalStorage
from lazyshards.testing import DTYPES, FormatConformance, RecordingStorage, assert_same, example_array, with_storage

pytestmark = pytest.mark.usefixtures("on_numpy")

ARROW = find_format("arrow")
REAL = tuple(dtype for dtype in DTYPES if np.dtype(dtype).kind != "c")
CODECS = (None, "lz4", "zstd")


def table_of(array):
    """Return a table with a column for each position of the second axis."""
    return pa.table({f"c{k}": array[:, k] for k in range(array.shape[1])})


def vectors(array, name="v"):
    """Return a table with one column, of lists of fixed size, one within another for each further axis."""
    column = pa.array(np.ascontiguousarray(array).ravel())
    for length in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return pa.table({name: column})


def write_ipc(path, table, *, codec=None, batch_rows=None, stream=False, **options):
    """Write a table as an IPC file or stream."""
    kind = pa.ipc.new_stream if stream else pa.ipc.new_file
    with (
        pa.OSFile(str(path), "wb") as sink,
        kind(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec, **options)) as writer,
    ):
        writer.write_table(table, max_chunksize=batch_rows)


class Conformance(FormatConformance):
    """What all kinds of Arrow files have in common."""

    format = "arrow"
    dtypes = REAL
    head_nbytes = 40 << 10
    codec = None
    stream = False

    def write(self, path, array):
        """Write with pyarrow, in batches that no request knows of."""
        write_ipc(
            path, self.table(array), codec=self.codec, batch_rows=3 if len(array) < 100 else 10_000, stream=self.stream
        )

    def table(self, array):
        """Return the table to write."""
        return table_of(array)


class TestColumns(Conformance):
    """A column for each element of a row, uncompressed."""

    row_shapes = ((1,), (3,), (7,))


class TestColumnsLz4(Conformance):
    """A column for each element of a row, lz4."""

    row_shapes = ((1,), (3,), (7,))
    codec = "lz4"


class TestColumnsZstdStream(Conformance):
    """A stream of columns, zstd."""

    row_shapes = ((1,), (3,), (7,))
    codec = "zstd"
    stream = True


class TestVectors(Conformance):
    """One uncompressed column of lists of fixed size: plain bytes."""

    row_shapes = ((3,), (2, 3))

    def table(self, array):
        """Return the table to write."""
        return vectors(array)


class TestVectorsZstd(TestVectors):
    """One compressed column of lists of fixed size."""

    codec = "zstd"


class TestScalars(Conformance):
    """One column, asked for by its bare name."""

    options = {"columns": "x"}  # noqa: RUF012  # as the base class has it
    dtypes = (*REAL, "M8[us]", "m8[ns]")
    row_shapes = ((),)

    def table(self, array):
        """Return the table to write."""
        return vectors(array, "x") if array.ndim > 1 else pa.table({"x": array})


class TestFeather(Conformance):
    """Feather version 2, as pyarrow writes it: lz4, in large batches."""

    row_shapes = ((3,), (7,))

    def write(self, path, array):
        """Write with pyarrow's own function."""
        pa.feather.write_feather(table_of(array), path)


@pytest.fixture
def save(tmp_path):
    """Give a function that writes tables as shards, and returns their directory."""

    def write(*tables, name="set", **options):
        root = tmp_path / name
        root.mkdir()
        for i, table in enumerate(tables):
            write_ipc(root / f"part-{i}.arrow", table, **options)
        return root

    return write


def refusal(path, **options):
    """Return what is said of shards that cannot be opened."""
    with pytest.raises(LayoutError) as caught:
        open_shards(path, **options)
    return str(caught.value)


def sources(ds):
    """Return the kinds of the shards' sources."""
    return {type(shard.source) for shard in ds.shards}


# Where rows lie ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_plain_bytes_are_not_decoded(save, stream):
    """One uncompressed column of numbers, or of lists of fixed size, lies as plain bytes, a run for each batch."""
    whole = example_array((20, 3), "f4")
    ds = open_shards(save(vectors(whole[:7]), vectors(whole[7:]), batch_rows=4, stream=stream))
    assert sources(ds) == {Extents}
    assert_same(ds.compute(), whole)
    assert_same(ds[3:15, ::-2].compute(), whole[3:15, ::-2])
    one = open_shards(save(table_of(whole), name="one", stream=stream), columns="c1")
    assert sources(one) == {Packed}
    assert_same(one[::-3].compute(), whole[::-3, 1])


def test_what_must_be_decoded(save):
    """Compressed, several or nullable columns, booleans, dates and dictionaries are decoded."""
    numbers = pa.array([1, 2, 3])
    for i, (column, options) in enumerate(
        [
            (numbers, {"codec": "lz4"}),
            (pa.array([True, False, True]), {}),
            (pa.array([1, 2, 3], pa.date32()), {}),
            (numbers.dictionary_encode(), {}),
            (pa.array([[1], [2], [3]]), {}),
        ]
    ):
        assert sources(open_shards(save(pa.table({"x": column}), name=f"set{i}", **options))) == {Decoded}
    assert sources(open_shards(save(pa.table({"x": [1, None]})), fill_value=0)) == {Decoded}


@pytest.mark.parametrize("codec", CODECS)
def test_only_wanted_columns_are_read(save, codec):
    """Of a wide table, the bytes of the wanted columns are read, and the headers that tell where they lie."""
    whole = example_array((4000, 40), "f8")
    path = save(table_of(whole), codec=codec, batch_rows=1000)
    ds = open_shards(path)
    for narrow, wanted in ((ds[:, 2:4], whole[:, 2:4]), (ds[:, 7], whole[:, 7]), (ds[:, ::-20], whole[:, ::-20])):
        storage = RecordingStorage(LocalStorage())
        assert_same(with_storage(narrow, storage).compute(), wanted)
        assert storage.nbytes < wanted.nbytes * 1.1


def test_only_wanted_rows_are_read(save):
    """Of uncompressed columns, nothing but the wanted rows is read, however large the batch is."""
    whole = example_array((100_000, 5), "f8")
    ds = open_shards(save(table_of(whole)))
    storage = RecordingStorage(LocalStorage())
    assert_same(with_storage(ds, storage)[70_000:70_010].compute(), whole[70_000:70_010])
    assert storage.nbytes == 10 * 5 * 8


@pytest.mark.parametrize("codec", CODECS)
def test_giant_batches(save, codec, monkeypatch):
    """A batch beyond what is decompressed at a time is read block by block, and column by column."""
    monkeypatch.setattr(arrow_rows, "_DECOMPRESSED_NBYTES", 10_000)
    monkeypatch.setattr(arrow_rows, "_BLOCK_NBYTES", 10_000)
    whole = example_array((5001, 6), "i4")
    mask = whole % 7 == 0
    nullable = pa.table({f"c{k}": pa.array(whole[:, k], mask=mask[:, k]) for k in range(6)})
    for i, (table, wanted, options) in enumerate(
        [
            (table_of(whole), whole, {}),
            (nullable, np.where(mask, -1, whole), {"fill_value": -1}),
            (vectors(whole > 0), whole > 0, {}),
            (pa.table({"v": pa.array(whole.tolist(), pa.list_(pa.int32()))}), whole, {}),
        ]
    ):
        ds = open_shards(save(table, name=f"set{i}", codec=codec), **options)
        for rows in (slice(None), slice(1, 4999), slice(4000, 4003), slice(4990, 3, -7)):
            assert_same(ds[rows].compute(), wanted[rows])


def test_headers_are_parsed_once(save, monkeypatch):
    """A second read of a shard does not read its headers again; a fresh process does."""
    whole = example_array((20, 3), "f4")
    ds = open_shards(save(table_of(whole), batch_rows=5))
    storage = RecordingStorage(LocalStorage())
    assert_same(with_storage(ds, storage)[2:4].compute(), whole[2:4])
    assert len(storage.reads) == 3
    monkeypatch.setattr(arrow_schema, "CACHE", arrow_schema.Cache(1000))
    assert_same(with_storage(pickle.loads(pickle.dumps(ds)), storage)[2:4].compute(), whole[2:4])  # noqa: S301  # our own
    assert len(storage.reads) > 6


def test_schemas_longer_than_the_first_read(save):
    """A schema, and a footer, that the first read does not reach are fetched whole."""
    whole = np.arange(12_000).reshape(4, 3000)
    for stream in (False, True):
        path = save(table_of(whole[:1]), table_of(whole[1:]), name=f"set{stream}", batch_rows=2, stream=stream)
        assert_same(open_shards(path).compute(), whole)
        assert_same(open_shards(path)[1:3, 2990:].compute(), whole[1:3, 2990:])


# Types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([0, 1], pa.timestamp("us", "UTC")), np.array([0, 1], "M8[us]")),
        (pa.array([0, 1], pa.date32()), np.array([0, 1], "M8[D]")),
        (pa.array([5, 1], pa.duration("us")), np.array([5, 1], "m8[us]")),
        (pa.array([1.5, 2, 1.5], pa.float32()).dictionary_encode(), np.array([1.5, 2, 1.5], "f4")),
        (pa.array(np.array([1.5, 2], "f2")), np.array([1.5, 2], "f2")),
        (pa.array([True, False, True] * 30), np.array([True, False, True] * 30)),
        (pa.array([2**63, 1], pa.uint64()), np.array([2**63, 1], "u8")),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_types(save, values, wanted, codec):
    """Every type that NumPy has too is read as that one."""
    ds = open_shards(save(pa.table({"x": values}), codec=codec, batch_rows=2), columns="x")
    assert_same(ds.compute(), wanted)
    assert_same(ds[1:].compute(), wanted[1:])


OTHERS = {
    "text": pa.array(["a", "b"]),
    "binary": pa.array([b"a", b"b"]),
    "large_text": pa.array(["a", "b"], pa.large_string()),
    "fixed_binary": pa.array([b"ab", b"cd"], pa.binary(2)),
    "struct": pa.array([{"p": 1, "q": "x"}, {"p": 2, "q": "y"}]),
    "structs": pa.array([[{"p": 1}], [{"p": 2}, {"p": 3}]]),
    "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "words": pa.array(["a", "b"]).dictionary_encode(),
    "null": pa.array([None, None]),
    "ragged": pa.array([[1], [2, 3]]),
    "nested": pa.array([[[1]], [[2]]]),
    "time": pa.array([1, 2], pa.time32("s")),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_types_are_refused_and_passed_by(save, name, codec):
    """A column of anything but numbers is named, with its shard; columns before and behind it are read."""
    table = pa.table({"a": [1, 2], name: OTHERS[name], "z": [3, None]})
    path = save(table, codec=codec)
    said = refusal(path, columns=name)
    assert "part-0.arrow" in said
    assert repr(name) in said
    assert_same(open_shards(path, columns=["z", "a"], fill_value=4).compute(), np.array([[3, 1], [4, 2]]))


def test_behind_types_of_unknown_layout(save):
    """A column behind one whose buffers cannot be told apart is refused; one before it is read."""
    views = pa.array(["a", "a text of more than twelve bytes"], pa.string_view())
    path = save(pa.table({"a": [1, 2], "view": views, "z": [3, 4]}))
    assert_same(open_shards(path, columns="a").compute(), np.array([1, 2]))
    assert "'z'" in refusal(path, columns="z")


@pytest.mark.parametrize("codec", CODECS)
def test_dictionaries(save, codec):
    """Dictionaries of numbers, nulls in index or values among them, and several of them, are looked up."""
    first = pa.DictionaryArray.from_arrays(pa.array([0, 2, None, 1], pa.int8()), pa.array([10.0, None, 30.0]))
    second = pa.DictionaryArray.from_arrays(pa.array([1, 0, 0, 1], pa.int8()), pa.array([-1.0, -2.0]))
    path = save(pa.table({"x": first, "y": second}), codec=codec)
    assert_same(open_shards(path, nulls="nan").compute(), np.array([[10, -2], [30, -1], [np.nan, -1], [np.nan, -2]]))


def test_growing_dictionaries(tmp_path):
    """A dictionary to which later batches add is read; one that they replace is refused."""
    schema = pa.schema([("x", pa.dictionary(pa.int8(), pa.int64()))])

    def batch(indices, values):
        return pa.record_batch([pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values))], schema)

    grows = [batch([0, 1], [10, 20]), batch([2, 0], [10, 20, 30])]
    for kind, path in ((pa.ipc.new_stream, "grows.arrows"), (pa.ipc.new_file, "grows.arrow")):
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        with kind(str(tmp_path / path), schema, options=options) as writer:
            for item in grows:
                writer.write_batch(item)
        assert_same(open_shards(tmp_path / path, columns="x").compute(), np.array([10, 20, 30, 10]))
    with pa.ipc.new_stream(str(tmp_path / "other.arrows"), schema) as writer:
        writer.write_batch(grows[0])
        writer.write_batch(batch([0, 1], [7, 8]))
    assert "replaces" in refusal(tmp_path / "other.arrows")


def test_dictionary_index_out_of_bounds(tmp_path):
    """An index that points outside of its dictionary is an error that names the file."""
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([5, 6]))
    path = tmp_path / "part-0.arrow"
    write_ipc(path, pa.table({"x": values}))
    data = path.read_bytes()
    at = data.rfind(b"\x00\x01\x00\x00\x00\x00\x00\x00")
    path.write_bytes(data[:at] + b"\x00\x77" + data[at + 2 :])
    with pytest.raises(ShardReadError, match="part-0"):
        open_shards(path, columns="x").compute()


@pytest.mark.parametrize("codec", CODECS)
def test_lists_of_one_length(save, codec):
    """Lists of one length are an axis of the rows, whether or not their type says so."""
    whole = example_array((7, 3), "u1").astype("f4")
    for i, kind in enumerate([pa.list_(pa.float32(), 3), pa.list_(pa.float32()), pa.large_list(pa.float32())]):
        tables = [pa.table({"v": pa.array(part.tolist(), kind)}) for part in np.split(whole, [4, 4])]
        ds = open_shards(save(*tables, name=f"set{i}", batch_rows=2, codec=codec))
        assert_same(ds.compute(), whole)
        assert_same(ds[1:6, ::-2].compute(), whole[1:6, ::-2])


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0], [1.0, 2.0]],
        [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]],
        [None, [3.0, 4.0]],
        [[1.0, 2.0], [], [3.0, 4.0, 5.0, 6.0]],
    ],
    ids=str,
)
def test_ragged_lists(save, rows):
    """Lists of different lengths, and nulls among them, are an error that names shard and column."""
    path = save(pa.table({"v": [[1.0, 2.0]]}), pa.table({"v": rows}))
    with pytest.raises(LazyShardsError, match=r"(?s)part-1\.arrow.*'v'"):
        open_shards(path).compute()


def test_null_among_fixed_lists(save):
    """A null in place of a list of fixed size is an error that names shard and column, whatever nulls become."""
    path = save(pa.table({"v": pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2))}))
    assert "1 null in place of lists" in refusal(path, nulls="nan")


def test_tensors(save):
    """Arrow's own type of tensors is rows of that shape, and plain bytes."""
    whole = np.arange(24, dtype="f4").reshape(4, 2, 3)
    ds = open_shards(save(pa.table({"v": pa.FixedShapeTensorArray.from_numpy_ndarray(whole)})))
    assert sources(ds) == {Packed}
    assert_same(ds.compute(), whole)


@pytest.mark.parametrize("turn", [1, -1])
def test_widening(save, turn):
    """Shards that hold a column in different widths are read in one that holds them all."""
    parts = [np.arange(3, dtype="i4"), np.array([1, 2**40, 3])][::turn]
    ds = open_shards(save(*[pa.table({"x": part}) for part in parts]), columns="x")
    assert_same(ds.compute(), np.concatenate(parts))


def test_columns_of_different_types(save):
    """Columns of different types are refused with their types, and read where a common one is asked for."""
    path = save(pa.table({"n": [1, 2], "x": [0.5, 1.5]}))
    assert "'n' int64, 'x' double" in refusal(path)
    assert_same(open_shards(path, dtype="f8").compute(), np.array([[1, 0.5], [2, 1.5]]))


@pytest.mark.parametrize("codec", CODECS)
def test_nulls(save, codec):
    """Nulls are an error when the shard is opened, or become what was asked for; no other value does."""
    whole = example_array((500,), "u1").astype("f4")
    mask = whole > 200
    path = save(pa.table({"x": pa.array(whole, mask=mask)}), batch_rows=99, codec=codec)
    said = refusal(path)
    assert "part-0.arrow" in said
    assert f"column 'x' holds {mask.sum()} nulls" in said
    assert_same(open_shards(path, columns="x", nulls="nan").compute(), np.where(mask, np.float32(np.nan), whole))
    filled = open_shards(path, columns="x", fill_value=-1)
    for rows in (slice(None), slice(3, 470), slice(101, 103), slice(400, 90, -3)):
        assert_same(filled[rows].compute(), np.where(mask, np.float32(-1), whole)[rows])


# Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_cut_at_every_byte(tmp_path, stream):
    """A file or stream that ends anywhere before its last byte is an error that names it, when it is opened."""
    path = tmp_path / "part-7.arrow"
    write_ipc(path, pa.table({"x": np.arange(5), "y": np.arange(5)}), batch_rows=3, stream=stream)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(LayoutError, match="part-7"):
            open_shards(path, format="arrow")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_byte_damaged(tmp_path, stream, codec):
    """A damaged byte anywhere is an error of ours, or another value where nothing guards it: never a crash."""
    path = tmp_path / "part-7.arrow"
    table = pa.table({"x": pa.array([1, 2, None, 4, 5]), "y": pa.array([1, 2, 3, 1, 2]).dictionary_encode()})
    write_ipc(path, table, batch_rows=3, stream=stream, codec=codec)
    data = path.read_bytes()
    for at in range(len(data)):
        flip = (0xFF, 0x01, 0x80)[at % 3]
        path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        try:
            assert open_shards(path, format="arrow", fill_value=0).compute().ndim == 2
        except LazyShardsError as exc:
            assert "part-7" in str(exc)  # noqa: PT017  # no error is right as well


@pytest.mark.parametrize("decompressed_nbytes", [24 << 20, 0], ids=["whole", "block by block"])
def test_compressed_data_that_ends_early(tmp_path, monkeypatch, decompressed_nbytes):
    """LZ4 data that holds less than its length says is an error: what was never written is never read."""
    monkeypatch.setattr(arrow_rows, "_DECOMPRESSED_NBYTES", decompressed_nbytes)
    path = tmp_path / "part-7.arrow"
    write_ipc(path, pa.table({"x": np.zeros(5000, "i8")}), codec="lz4")
    whole = pa.Codec("lz4").compress(bytes(40_000), asbytes=True)
    shorter = (pa.Codec("lz4").compress(bytes(count), asbytes=True) for count in range(39_999, 39_000, -1))
    short = next(data for data in shorter if len(data) == len(whole))
    data = path.read_bytes()
    assert data.count(whole) == 1
    path.write_bytes(data.replace(whole, short))
    with pytest.raises(ShardReadError, match=r"part-7\.arrow"):
        open_shards(path, columns="x").compute()


def test_bytes_behind_a_stream(tmp_path):
    """A stream behind which another follows is refused: only the first would be read."""
    path = tmp_path / "both.arrows"
    write_ipc(path, pa.table({"x": [1]}), stream=True)
    path.write_bytes(path.read_bytes() * 2)
    assert "behind the end-of-stream mark" in refusal(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"ARRO", "begins with"),
        (b"ARROW1\0\0", "begins with"),
        (b"FEA1" + bytes(100), "version 1"),
        (b"ARROW1\0\0" + bytes(100), "has "),
        (b"ARROW1\0\0" + b"\xff" * 100, "has a header"),
        (b"\xff\xff\xff\xff" + (1 << 30).to_bytes(4, "little") + bytes(100), "expected at most"),
        (b"\xff\xff\xff\xff" + bytes(100), "has "),
        (b"\x10\0\0\0" + bytes(100), "begins with"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_files(tmp_path, data, says):
    """What is no whole Arrow file is a fault that says what was found."""
    path = tmp_path / "part-7.arrow"
    path.write_bytes(data)
    (fault,) = ARROW.inspect([str(path)], LocalStorage(), {})
    assert isinstance(fault, Fault)
    assert says in fault.found


def test_a_footer_beyond_the_bound(tmp_path):
    """A footer that claims to be enormous is refused by its length, without reading it."""
    path = tmp_path / "part-7.arrow"
    write_ipc(path, pa.table({"x": [1]}))
    with path.open("r+b") as file:
        file.truncate(2 << 30)
        file.seek(0, 2)
        file.write((1 << 30).to_bytes(4, "little") + b"ARROW1")
    storage = RecordingStorage(LocalStorage())
    (fault,) = ARROW.inspect([str(path)], storage, {})
    assert isinstance(fault, Fault)
    assert storage.nbytes < 100_000


def test_all_faults_are_told_at_once(save):
    """Every faulty shard is listed, with its own fault, and no healthy one."""
    tables = [pa.table({"x": [1.0, 2.0]})] * 4
    path = save(*tables, pa.table({"x": ["a"]}), pa.table({"y": [1.0]}), pa.table({"x": [None, 1.0]}))
    os.truncate(path / "part-1.arrow", 300)
    said = refusal(path)
    for number in (1, 4, 5, 6):
        assert f"part-{number}.arrow" in said
    for number in (2, 3):
        assert f"part-{number}.arrow': " not in said


# Other ------------------------------------------------------------------------------------------------------------


def test_streams_under_any_suffix(tmp_path):
    """A stream is known by its bytes, whatever it is called, and files and streams mix."""
    whole = example_array((9, 2), "f4")
    write_ipc(tmp_path / "part-0.arrow", table_of(whole[:4]), stream=True, batch_rows=3)
    write_ipc(tmp_path / "part-1.arrow", table_of(whole[4:4]), stream=True)
    write_ipc(tmp_path / "part-2.arrow", table_of(whole[4:]))
    assert_same(open_shards(tmp_path).compute(), whole)


@pytest.mark.parametrize("stream", [False, True])
def test_headers_of_old_versions(tmp_path, stream):
    """Files of before version 0.15, whose headers have no continuation mark, are read."""
    whole = example_array((9, 2), "f4")
    path = tmp_path / "part-0.arrow"
    write_ipc(path, table_of(whole), stream=stream, batch_rows=4, use_legacy_format=True)
    assert_same(open_shards(path, format="arrow").compute(), whole)


@pytest.mark.parametrize("alignment", [8, 64])
def test_columns_sliced_before_they_were_written(save, alignment):
    """What was sliced off before writing is no part of the rows."""
    whole = example_array((50, 3), "f4")
    mask = np.arange(50) % 3 == 0
    table = pa.table({"x": pa.array(whole[:, 0], mask=mask), "y": whole[:, 1]}).slice(7, 30)
    path = save(table, vectors(whole).rename_columns(["v"]).slice(7, 30).slice(0, 0), name=f"set{alignment}")
    os.unlink(path / "part-1.arrow")
    filled = np.stack([np.where(mask, np.float32(0), whole[:, 0]), whole[:, 1]], 1)[7:37]
    assert_same(open_shards(path, fill_value=0).compute(), filled)
    assert_same(
        open_shards(save(vectors(whole).slice(7, 30), name=f"v{alignment}", batch_rows=4)).compute(), whole[7:37]
    )


@pytest.mark.parametrize("name", ["a.arrow", "A.FEATHER", "/x/y.z/a.ipc", "a.arrows"])
def test_told_by_suffix(name):
    """The suffix tells, in capitals too."""
    assert format_of_name(name) is ARROW


def test_told_by_first_bytes():
    """The first bytes tell where no suffix does."""
    assert format_of_bytes(b"ARROW1\0\0\xff\xff") is ARROW


@pytest.mark.parametrize("codec", CODECS)
def test_remote(save, codec):
    """A storage without files of its own is read by ranges."""
    import fsspec

    whole = example_array((1000, 4), "f4")
    path = save(table_of(whole), batch_rows=100, codec=codec)
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/arrow_remote_{codec}/part-0.arrow", (path / "part-0.arrow").read_bytes())
    ds = open_shards(f"memory://arrow_remote_{codec}/*.arrow")
    assert_same(ds[250:420, 1:3].compute(), whole[250:420, 1:3])
    assert_same(ds[::-37].compute(), whole[::-37])


def test_eight_threads(save):
    """Many threads read from one dataset at a time, each what it asked for."""
    whole = example_array((4000, 5), "f4")
    ds = open_shards(save(table_of(whole[:1700]), table_of(whole[1700:]), batch_rows=300, codec="zstd"))
    wrong = []

    def read(start):
        for at in range(start, 3900, 800):
            found, wanted = ds[at : at + 100].compute(), whole[at : at + 100]
            wrong.extend([] if found.tobytes() == wanted.tobytes() else [at])

    threads = [threading.Thread(target=read, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_pyarrow(save, child):
    """Where pyarrow is missing, the error says how to install it."""
    path = save(pa.table({"x": [1]}))
    out = child(
        """
        import sys
        sys.modules["pyarrow"] = None
        import lazyshards
        try:
            lazyshards.open_shards(sys.argv[1], engine="numpy")
        except lazyshards.FormatError as exc:
            print(exc)
        """,
        path,
    )
    assert "pip install 'lazyshards[arrow]'" in out


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("make", [table_of, vectors])
def test_rest_of_a_batch_is_kept(tmp_path, codec, make):
    """Slices of one compressed batch decompress it once, and yet see that the file changed."""
    array = np.random.default_rng(0).normal(size=(4_000, 6)).astype("f4")  # noise, which is stored as it is
    array[:, 1] = 0
    write_ipc(tmp_path / "a.arrow", make(array), codec=codec, batch_rows=2_000)
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(open_shards(tmp_path / "a.arrow"), storage)
    for start in range(0, 4_000, 500):
        storage.reads.clear()
        assert_same(ds[start : start + 500].compute(), array[start : start + 500])
        small = [nbytes for _, _, nbytes in storage.reads] == [1]
        assert small == (start % 2_000 > 0)
    assert_same(ds[2_000:].compute(), array[2_000:])  # a batch that is all wanted is decompressed anew
    assert_same(ds[2_100:2_200].compute(), array[2_100:2_200])
    os.utime(tmp_path / "a.arrow", ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"a\.arrow"):
        ds[2_500:2_600].compute()


def test_few_rows_decompress_the_batches_that_hold_them(tmp_path, monkeypatch):
    """Of rows far apart no batch is decompressed that holds none of them, and none twice."""
    array = np.arange(40_000 * 16, dtype="f4").reshape(40_000, 16)
    write_ipc(tmp_path / "a.arrow", table_of(array), codec="zstd", batch_rows=400)
    ds = open_shards(tmp_path / "a.arrow")
    asked, put = [], []
    ask, keep = arrow_rows.BatchReader._record_batch, arrow_rows._decompressed.put

    def record(self, names, *, is_all):
        asked.append(self._batch.body)
        return ask(self, names, is_all=is_all)

    monkeypatch.setattr(arrow_rows.BatchReader, "_record_batch", record)
    monkeypatch.setattr(arrow_rows._decompressed, "put", lambda key, *rest: (put.append(key), keep(key, *rest)))
    rows = np.random.default_rng(0).choice(40_000, 60)
    assert_same(ds[rows].compute(), array[rows])
    assert len(set(asked)) == len(np.unique(rows // 400))
    assert len(put) == len(set(put))
