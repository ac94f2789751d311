import decimal
import inspect
import os
import pickle
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lazyshards import native, open_shards
from lazyshards.errors import FormatError, LayoutError, LazyShardsError, ShardChangedError, ShardReadError
from lazyshards.formats import (
    Fault,
    find_format,
    format_of_bytes,
    format_of_name,
    parquet_bands,
    parquet_footers,
    parquet_pages,
    parquet_rows,
)
from lazyshards.formats.kept import Kept
from lazyshards.formats.parquet_thrift import MalformedError
from lazyshards.layout import Decoded, Shard
from lazyshards.storage import LocalStorage
from lazyshards.testing import DTYPES, FormatConformance, RecordingStorage, assert_same, example_array, with_storage
from tests.parquet_files import field, format_struct, join_pages, set_field, split_pages

pytestmark = pytest.mark.usefixtures("on_numpy")

PARQUET = find_format("parquet")
REAL = tuple(dtype for dtype in DTYPES if np.dtype(dtype).kind != "c")


def table_of(array, names=None):
    """Return a table with a column for each position of the second axis."""
    names = names or [f"c{k}" for k in range(array.shape[1])]
    return pa.table({name: array[:, k] for k, name in enumerate(names)})


def vectors(array, name="v"):
    """Return a table with one column, of lists of fixed size, one within another for each further axis."""
    column = pa.array(np.ascontiguousarray(array).ravel())
    for length in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return pa.table({name: column})


class TestColumns(FormatConformance):
    """A column for each element of a row, as pandas writes them."""

    format = "parquet"
    dtypes = REAL
    row_shapes = ((1,), (3,), (7,))
    head_nbytes = 20 << 10

    def write(self, path, array):
        """Write with pyarrow, in row groups that no request knows of."""
        pq.write_table(table_of(array), path, row_group_size=3 if len(array) < 100 else 10_000)


class TestVectors(FormatConformance):
    """One column of lists of fixed size."""

    format = "parquet"
    dtypes = REAL
    row_shapes = ((3,), (2, 3))
    head_nbytes = 20 << 10

    def write(self, path, array):
        """Write with pyarrow."""
        pq.write_table(vectors(array), path, row_group_size=2 if len(array) < 100 else 10_000)


class TestScalars(FormatConformance):
    """One column, asked for by its bare name."""

    format = "parquet"
    options = {"columns": "x"}  # noqa: RUF012  # as the base class has it
    dtypes = (*REAL, "M8[us]", "m8[ns]")
    row_shapes = ((),)
    head_nbytes = 20 << 10

    def write(self, path, array):
        """Write with pyarrow; rows with axes are lists."""
        table = vectors(array, "x") if array.ndim > 1 else pa.table({"x": array})
        pq.write_table(table, path, row_group_size=3 if len(array) < 100 else 10_000, compression="zstd")


@pytest.fixture
def save(tmp_path):
    """Give a function that writes tables as shards, and returns their directory."""

    def write(*tables, name="set", **options):
        root = tmp_path / name
        root.mkdir()
        for i, table in enumerate(tables):
            pq.write_table(table, root / f"part-{i}.parquet", **options)
        return root

    return write


def refusal(path, **options):
    """Return what is said of shards that cannot be opened."""
    with pytest.raises(LayoutError) as caught:
        open_shards(path, **options)
    return str(caught.value)


# Columns ----------------------------------------------------------------------------------------------------------


def test_columns_are_matched_by_name(save):
    """Columns that stand in another order in another shard land under their own name."""
    whole = np.arange(45).reshape(15, 3)
    orders = ["abc", "cab", "bca"]
    path = save(
        *[
            pa.table({name: part[:, "abc".index(name)] for name in order})
            for order, part in zip(orders, np.split(whole, [4, 9]), strict=True)
        ]
    )
    assert_same(open_shards(path).compute(), whole)
    for columns in (["a", "b"], ["c", "a"], ["b"]):
        assert_same(open_shards(path, columns=columns).compute(), whole[:, ["abc".index(name) for name in columns]])


def test_a_bare_name_is_no_axis(save):
    """A list of one name keeps the axis of columns, a bare name does not."""
    path = save(pa.table({"x": [1, 2], "y": [3, 4]}))
    assert open_shards(path, columns="x").shape == (2,)
    assert open_shards(path, columns=["x"]).shape == (2, 1)
    assert open_shards(path).shape == (2, 2)


def test_names_with_dots_and_structs(save):
    """A name that holds a dot is not taken for a part of a struct."""
    path = save(pa.table({"a": [{"b": 1}, {"b": 2}], "a.b": [3, 4]}))
    assert_same(open_shards(path, columns="a.b").compute(), np.array([3, 4]))


def test_only_wanted_columns_are_read(save):
    """Of a wide table, the bytes of the columns that a cell or an option asks for are read, and few others."""
    whole = example_array((20_000, 40), "f8")
    path = save(table_of(whole), compression="none", use_dictionary=False)
    ds = open_shards(path)
    for narrow, wanted in (
        (ds[:, 2:4], whole[:, 2:4]),
        (ds[:, 7], whole[:, 7]),
        (ds[:, ::-20], whole[:, ::-20]),
        (open_shards(path, columns=["c9", "c3"]), whole[:, [9, 3]]),
    ):
        storage = RecordingStorage(LocalStorage())
        assert_same(with_storage(narrow, storage).compute(), wanted)
        assert storage.nbytes < wanted.nbytes * 1.2


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"columns": []}, ValueError, "no column"),
        ({"columns": 3}, TypeError, "no name"),
        ({"columns": ["a", 3]}, TypeError, "no name"),
        ({"columns": ["a", "a"]}, ValueError, "more than once"),
        ({"nulls": "zero"}, ValueError, "no policy|not a policy"),
        ({"nulls": "nan", "fill_value": 3}, ValueError, "one of them"),
        ({"fill_value": "x"}, TypeError, "no.* number"),
        ({"column": "a"}, TypeError, "'column'"),
        ({"colums": "a"}, TypeError, r"did you mean columns=\?"),
        ({"dtype": "nonsense"}, TypeError, "nonsense"),
    ],
    ids=str,
)
def test_wrong_options(save, options, error, says):
    """An option that makes no sense is refused by its name, whatever the files hold."""
    path = save(pa.table({"a": [1]}))
    with pytest.raises(error, match=says):
        open_shards(path, **options)


def test_unknown_column(save):
    """A column that is not there is named, with those that are."""
    said = refusal(save(pa.table({"a": [1], "b": [2]})), columns=["zz"])
    assert "part-0.parquet" in said
    assert "no column 'zz'; it has 'a', 'b'" in said


def test_several_columns_in_one_text(save):
    """Names of columns with commas between them, as a shell passes them, are answered with the list that is meant."""
    path = save(pa.table({"a": [1], "b": [2]}))
    for text in ("a,b", "['a', 'b']"):
        assert 'several columns are a list: columns=["a", "b"]' in refusal(path, columns=text)


def test_text_names_the_columns_that_are_none(save):
    """A column of text is refused with the names of those that can be read."""
    said = refusal(save(pa.table({"id": [1], "name": ["x"], "temp": [0.5]})))
    assert "column 'name' is string, expected numbers; name the columns that are wanted, of 'id', 'temp' with" in said


def test_column_that_is_there_twice(save):
    """A name that two columns have cannot be asked for."""
    path = save(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]))
    assert "2 columns called 'a'" in refusal(path)


def test_pandas_index_is_no_column(save):
    """The index that pandas writes without a name is left out, unless it is asked for."""
    path = save(pa.table({"x": [1, 2], "__index_level_0__": [7, 8]}))
    assert_same(open_shards(path).compute(), np.array([[1], [2]]))
    assert_same(open_shards(path, columns="__index_level_0__").compute(), np.array([7, 8]))


def test_three_thousand_columns(save):
    """Very wide tables are read, and narrow parts of them."""
    whole = np.arange(8 * 3000).reshape(8, 3000)
    ds = open_shards(save(table_of(whole[:3]), table_of(whole[3:])))
    assert_same(ds.compute(), whole)
    assert_same(ds[2:5, 2990:].compute(), whole[2:5, 2990:])


# Schemas that differ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(
    ("narrow", "wide"), [("i4", "i8"), ("u1", "i4"), ("u4", "i8"), ("f4", "f8"), ("f2", "f4"), ("i1", "i2")]
)
def test_widening(save, narrow, wide, turn):
    """Shards that hold a column in different widths are read in one that holds them all."""
    low, high = np.arange(3).astype(narrow), np.array([1, 2, 3]).astype(wide)
    high[1] = np.finfo(wide).max if np.dtype(wide).kind == "f" else np.iinfo(wide).max
    parts = [low, high][::turn]
    ds = open_shards(save(*[pa.table({"x": part}) for part in parts]), columns="x")
    assert_same(ds.compute(), np.concatenate(parts))
    assert_same(ds[::-2].compute(), np.concatenate(parts)[::-2])


@pytest.mark.parametrize(
    "odd", [pa.array(["3", "4"]), pa.array([1.5, 2.5]), pa.array([True, False]), pa.array([1, 2], pa.uint64())], ids=str
)
def test_types_that_do_not_go_together(save, odd):
    """A column of a type that cannot be widened exactly to that of the others is named, with its shard."""
    path = save(pa.table({"x": [1, 2]}), pa.table({"x": [3, 4]}), pa.table({"x": odd}))
    said = refusal(path)
    assert "part-2.parquet" in said
    assert "'x'" in said


def test_extra_and_missing_columns(save):
    """A column that only one shard has, or lacks, is named with the shard, and does not matter if it is not wanted."""
    less, more = pa.table({"a": [1, 2]}), pa.table({"a": [3, 4], "b": [5, 6]})
    for i, tables in enumerate(((less, more), (more, less))):
        path = save(*tables, name=f"set{i}")
        said = refusal(path)
        assert "part-1.parquet" in said
        assert "'b'" in said
        wanted = np.array([1, 2, 3, 4] if i == 0 else [3, 4, 1, 2])
        assert_same(open_shards(path, columns="a").compute(), wanted)


def test_nullability_alone_is_no_difference(save):
    """A column that may hold nulls and one that may not are read as one."""
    required = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    path = save(pa.table({"x": [1, 2]}, schema=required), pa.table({"x": [3, 4]}))
    assert_same(open_shards(path, columns="x").compute(), np.array([1, 2, 3, 4]))


def test_columns_of_different_types(save):
    """Columns of different types are refused with their types, and read where a common one is asked for."""
    path = save(pa.table({"n": [1, 2], "x": [0.5, 1.5]}))
    said = refusal(path)
    assert "'n' int64, 'x' double" in said
    assert "columns=" in said
    assert "dtype=" in said
    assert_same(open_shards(path, columns=["x"]).compute(), np.array([[0.5], [1.5]]))
    assert_same(open_shards(path, dtype="f8").compute(), np.array([[1, 0.5], [2, 1.5]]))


def test_dtype_must_hold_the_values(save):
    """A dtype that values could be lost in is refused, with the column."""
    path = save(pa.table({"n": [1, 2], "x": [0.5, 1.5]}))
    assert "'n' is int64" in refusal(path, dtype="i4")


# Types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([0, 1], pa.timestamp("us", "UTC")), np.array([0, 1], "M8[us]")),
        (pa.array([0, 1], pa.timestamp("ms")), np.array([0, 1], "M8[ms]")),
        (pa.array([0, 1], pa.date32()), np.array([0, 1], "M8[D]")),
        (pa.array([5, 1], pa.duration("us")), np.array([5, 1], "m8[us]")),
        (pa.array([1.5, 2, 1.5], pa.float32()).dictionary_encode(), np.array([1.5, 2, 1.5], "f4")),
        (pa.array(np.array([1.5, 2], "f2")), np.array([1.5, 2], "f2")),
        (pa.array([True, False, True] * 30), np.array([True, False, True] * 30)),
        (pa.array([2**63, 1], pa.uint64()), np.array([2**63, 1], "u8")),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_types(save, values, wanted):
    """Every type that NumPy has too is read as that one."""
    ds = open_shards(save(pa.table({"x": values}), row_group_size=2), columns="x")
    assert_same(ds.compute(), wanted)
    assert_same(ds[1:].compute(), wanted[1:])


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a"]),
        pa.array([b"a"]),
        pa.array([{"p": 1}]),
        pa.array([[{"p": 1}]]),
        pa.array([[[1.0]]]),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([decimal.Decimal("1.5")]),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array([None]),
        pa.array([1], pa.time32("s")),
        pa.array([["a"]]),
    ],
    ids=lambda value: str(value.type),
)
def test_other_types_are_refused(save, values):
    """A column of anything but numbers is named, with its type and shard, and does not matter if it is not wanted."""
    path = save(pa.table({"v": values, "x": np.arange(len(values))}))
    said = refusal(path, columns="v")
    assert "part-0.parquet" in said
    assert "'v'" in said
    assert_same(open_shards(path, columns="x").compute(), np.arange(len(values)))


def test_decimals(save):
    """Decimals are refused, unless a dtype is asked for: then each becomes the nearest number."""
    values = [decimal.Decimal(n) / 100 for n in range(-2000, 2000, 7)]
    path = save(pa.table({"x": pa.array(values, pa.decimal128(10, 2))}))
    assert "dtype='float64'" in refusal(path, columns="x")
    assert_same(open_shards(path, columns="x", dtype="f8").compute(), np.array(list(map(float, values))))
    whole = save(
        pa.table({"x": pa.array([decimal.Decimal(3), decimal.Decimal(-4)], pa.decimal128(30, 5))}), name="whole"
    )
    assert_same(open_shards(whole, columns="x", dtype="i8").compute(), np.array([3, -4]))
    with pytest.raises(ShardReadError, match=r"part-0\.parquet"):
        open_shards(path, columns="x", dtype="i8").compute()


# Lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32(), 3), pa.list_(pa.float32()), pa.large_list(pa.float32())], ids=str
)
def test_lists_of_one_length(save, kind):
    """Lists of one length are an axis of the rows, whether or not their type says so."""
    whole = example_array((7, 3), "u1").astype("f4")
    tables = [pa.table({"v": pa.array(part.tolist(), kind)}) for part in np.split(whole, [4, 4])]
    ds = open_shards(save(*tables, row_group_size=2))
    assert_same(ds.compute(), whole)
    assert_same(ds[1:6, ::-2].compute(), whole[1:6, ::-2])


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0], [1.0, 2.0]],
        [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]],
        [None, [3.0, 4.0]],
        [[1.0, 2.0], [], [3.0, 4.0, 5.0]],
        [[1.0], None, [2.0, 3.0]],
    ],
    ids=str,
)
def test_ragged_lists(save, rows):
    """Lists of different lengths, and nulls among them, are an error that names shard and column."""
    path = save(pa.table({"v": [[1.0, 2.0]]}), pa.table({"v": rows}))
    with pytest.raises(LazyShardsError, match=r"(?s)part-1\.parquet.*'v'"):
        open_shards(path).compute()


def test_several_columns_of_lists(save):
    """Columns of lists of one length are stacked; of different lengths they are refused with their shapes."""
    two = {
        "v": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
        "w": pa.array([[5, 6], [7, 8]], pa.list_(pa.int32(), 2)),
    }
    ds = open_shards(save(pa.table(two), name="two"))
    assert_same(ds.compute(), np.array([[[1, 2], [5, 6]], [[3, 4], [7, 8]]], "i4"))
    assert_same(ds[:, 1, 0].compute(), np.array([5, 7], "i4"))
    odd = save(pa.table({"v": two["v"], "x": pa.array([1, 2], pa.int32())}), name="odd")
    assert "'v' (2,), 'x' ()" in refusal(odd)


def test_tensors(save):
    """Arrow's own type of tensors is rows of that shape."""
    whole = np.arange(24, dtype="f4").reshape(4, 2, 3)
    path = save(pa.table({"v": pa.FixedShapeTensorArray.from_numpy_ndarray(whole)}))
    assert_same(open_shards(path).compute(), whole)


# Nulls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", [True, False])
def test_nulls_are_an_error(save, statistics):
    """Nulls are an error that names shard and column: when the shard is opened if its footer tells, else when read."""
    path = save(pa.table({"x": [1, 2]}), pa.table({"x": [1, None, 3]}), write_statistics=statistics)
    if statistics:
        assert "column 'x' holds 1 null, expected values" in refusal(path)
    else:
        ds = open_shards(path)
        assert_same(ds[:2].compute(), np.array([[1], [2]]))
        with pytest.raises(ShardReadError, match=r"part-1\.parquet.*'x' holds 1 null"):
            ds.compute()


@pytest.mark.parametrize("statistics", [True, False])
def test_nulls_are_filled(save, statistics):
    """Nulls become NaN, or a number, if that is asked for; no other value does."""
    whole = example_array((500,), "u1").astype("f4")
    mask = whole > 200
    path = save(pa.table({"x": pa.array(whole, mask=mask)}), row_group_size=99, write_statistics=statistics)
    assert_same(open_shards(path, columns="x", nulls="nan").compute(), np.where(mask, np.float32(np.nan), whole))
    assert_same(open_shards(path, columns="x", fill_value=-1).compute(), np.where(mask, np.float32(-1), whole))
    assert_same(
        open_shards(path, columns="x", fill_value=-1)[400:90:-3].compute(),
        np.where(mask, np.float32(-1), whole)[400:90:-3],
    )


def test_nulls_of_integers(save):
    """Large integers beside nulls keep every digit; NaN is no integer, and neither is a fraction."""
    path = save(pa.table({"x": [2**62 + 1, None]}))
    assert_same(open_shards(path, columns="x", fill_value=-1).compute(), np.array([2**62 + 1, -1]))
    assert "no NaN" in refusal(path, nulls="nan")
    assert "0.5 is no int64" in refusal(path, fill_value=0.5)
    assert "is no int64" in refusal(path, fill_value=2**70)


# Row groups -------------------------------------------------------------------------------------------------------


@pytest.fixture
def odd_groups(tmp_path):
    """Give shards without a row group, with empty ones, without rows, and with many."""
    schema = pa.schema([("x", pa.int64())])

    def part(low, high):
        return pa.table({"x": np.arange(low, high)}, schema=schema)

    with pq.ParquetWriter(tmp_path / "part-0.parquet", schema):
        pass
    with pq.ParquetWriter(tmp_path / "part-1.parquet", schema) as writer:
        for low, high in ((0, 0), (0, 5), (5, 5), (5, 5), (5, 6), (6, 20), (20, 20)):
            writer.write_table(part(low, high))
    pq.write_table(part(20, 20), tmp_path / "part-2.parquet")
    pq.write_table(part(20, 47), tmp_path / "part-3.parquet", row_group_size=4)
    return tmp_path


def test_row_groups_of_all_sizes(odd_groups):
    """Rows are exact across every border of row groups, of shards without any, and of empty ones."""
    ds = open_shards(odd_groups, columns="x")
    for low in range(0, 47, 3):
        for step in (1, 2, 5):
            assert_same(ds[low : low + 11 : step].compute(), np.arange(47)[low : low + 11 : step])
    assert_same(ds[::-1].compute(), np.arange(47)[::-1])
    assert_same(ds[[46, 0, 5, 5, 19, 20]].compute(), np.array([46, 0, 5, 5, 19, 20]))


def test_edges_are_where_row_groups_begin(odd_groups):
    """The local rows at which decoding can begin are known, empty row groups left out."""
    assert [shard.source.edges for shard in open_shards(odd_groups).shards] == [
        (),
        (0, 5, 6),
        (),
        (0, 4, 8, 12, 16, 20, 24),
    ]


def test_only_touched_row_groups_are_read(save):
    """A slice reads the row groups that it overlaps, and of a giant one little more than what it wants."""
    whole = example_array((400_000,), "i8")
    small = save(pa.table({"x": whole}), row_group_size=10_000, compression="none", use_dictionary=False)
    giant = save(pa.table({"x": whole}), name="giant", compression="none", use_dictionary=False)
    for path, rows, most in (
        (small, slice(15_000, 15_010), 80_000 * 1.2),
        (small, slice(9_995, 10_005), 160_000 * 1.2),
        (giant, slice(10, 20), 1.2e6),
    ):
        storage = RecordingStorage(LocalStorage())
        assert_same(with_storage(open_shards(path, columns="x"), storage)[rows].compute(), whole[rows])
        assert storage.nbytes <= most


def test_a_row_group_beyond_the_window(save, monkeypatch):
    """Of a row group that is too large to be held, each column is read piece by piece."""
    monkeypatch.setattr(parquet_rows, "_WINDOW_NBYTES", 256 << 10)
    whole = example_array((100_000, 3), "f8")
    path = save(table_of(whole), compression="none", use_dictionary=False)
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(open_shards(path), storage)
    assert_same(ds.compute(), whole)
    assert_same(ds[70_000:70_010].compute(), whole[70_000:70_010])
    assert max(nbytes for _, _, nbytes in storage.reads) < 1200 << 10  # a page


# Footers ----------------------------------------------------------------------------------------------------------


def test_footers_are_parsed_once(save, monkeypatch):
    """A second read of a shard does not read its footer again, and a fresh process reads it by its range."""
    path = save(pa.table({"x": np.arange(10)}))
    ds = open_shards(path, columns="x")
    storage = RecordingStorage(LocalStorage())
    assert_same(with_storage(ds, storage)[2:4].compute(), np.arange(2, 4))
    size = ds.shards[0].stamp.size
    assert not [read for read in storage.reads if sum(read[1:]) == size]
    monkeypatch.setattr(parquet_footers, "CACHE", parquet_footers.Cache(1000))
    assert_same(with_storage(pickle.loads(pickle.dumps(ds)), storage)[2:4].compute(), np.arange(2, 4))  # noqa: S301  # our own
    assert len([read for read in storage.reads if sum(read[1:]) == size]) == 1


def test_footers_longer_than_the_first_read(save):
    """A footer that the first read does not reach is fetched whole."""
    path = save(table_of(np.arange(4000).reshape(2, 2000)))
    storage = RecordingStorage(LocalStorage())
    (shard,) = PARQUET.inspect([str(path / "part-0.parquet")], storage, {})
    assert isinstance(shard, Shard)
    assert len(storage.reads) == 3


def test_details_are_small(save):
    """What is kept of each of many shards is a few bytes when it travels."""
    path = save(*[table_of(np.arange(300).reshape(3, 100))] * 20)
    details = [shard.source for shard in open_shards(path).shards]
    assert all(isinstance(source, Decoded) for source in details)
    assert len(pickle.dumps(details)) < len(pickle.dumps(details[:1])) + 20 * 40


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"PAR", "begins with"),
        (b"PAR1", "truncated"),
        (b"PARE" + bytes(100), "encrypted"),
        (b"PAR1" + bytes(100), "ends with"),
        (b"PAR1" + bytes(20) + (1 << 30).to_bytes(4, "little") + b"PAR1", "damaged footer"),
        (b"PAR1" + bytes(20) + (20).to_bytes(4, "little") + b"PAR1", "damaged footer"),
        (b"PAR1" + b"\xff" * 20 + (20).to_bytes(4, "little") + b"PAR1", "damaged footer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_files(tmp_path, data, says):
    """What is no whole Parquet file is a fault that says what was found."""
    path = tmp_path / "part-7.parquet"
    path.write_bytes(data)
    (fault,) = PARQUET.inspect([str(path)], LocalStorage(), {})
    assert isinstance(fault, Fault)
    assert says in fault.found


def test_a_footer_beyond_the_bound(tmp_path):
    """A footer that claims to be enormous is refused by its length, without reading it."""
    path = tmp_path / "part-7.parquet"
    path.write_bytes(b"PAR1")
    os.truncate(path, 2 << 30)
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.write((1 << 30).to_bytes(4, "little") + b"PAR1")
    storage = RecordingStorage(LocalStorage())
    (fault,) = PARQUET.inspect([str(path)], storage, {})
    assert isinstance(fault, Fault)
    assert "expected at most" in fault.found
    assert storage.nbytes < 100_000


def test_damage_within_a_row_group(save):
    """Damaged pages are an error that names the file: no crash, and never other values without a word."""
    whole = np.arange(4000)
    path = save(pa.table({"x": whole}), compression="zstd")
    file = path / "part-0.parquet"
    data = bytearray(file.read_bytes())
    ds = open_shards(path, columns="x", on_change="ignore")
    end = ds.shards[0].stamp.size - ds.shards[0].source.detail.footer_nbytes
    for at in range(4, 60):
        damaged = data.copy()
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        try:
            found = ds.compute()
        except ShardReadError as exc:
            assert "part-0.parquet" in str(exc)  # noqa: PT017  # no error is right as well
        else:
            assert found.shape == (4000,)  # a value within a page, which has no checksum
    file.write_bytes(data[: end // 2] + data[end:])
    with pytest.raises(LazyShardsError, match="part-0"):
        ds.compute()


@pytest.mark.parametrize("flip", [0xFF, 0x01])
def test_every_byte_of_a_footer_damaged(save, flip):
    """A damaged byte anywhere in a footer is an error of ours, or changes nothing: pyarrow must not end the process."""
    path = save(pa.table({"x": [1, None, 3, 4]}), row_group_size=2, store_schema=False)
    file = path / "part-0.parquet"
    data = file.read_bytes()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(end, len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        try:
            assert open_shards(path, fill_value=0).compute().ndim == 2
        except LazyShardsError as exc:
            assert "part-0.parquet" in str(exc)  # noqa: PT017  # no error is right as well


def test_checksums_of_pages_are_checked(save):
    """A page that has a checksum, and is damaged, is an error that names the file."""
    whole = np.arange(4000)
    path = save(pa.table({"x": whole}), compression="none", use_dictionary=False, write_page_checksum=True)
    file = path / "part-0.parquet"
    data = bytearray(file.read_bytes())
    data[data.index((1234).to_bytes(8, "little"))] ^= 1
    ds = open_shards(path, columns="x", on_change="ignore")
    assert_same(ds.compute(), whole)
    file.write_bytes(data)
    with pytest.raises(ShardReadError, match=r"part-0\.parquet"):
        ds.compute()


def test_change_before_the_footer_is_read_again(save, monkeypatch):
    """A shard that was replaced is told even where nothing of it was kept in memory."""
    path = save(pa.table({"x": np.arange(10)}))
    ds = open_shards(path)
    monkeypatch.setattr(parquet_footers, "CACHE", parquet_footers.Cache(1000))
    pq.write_table(pa.table({"x": np.arange(5)}), path / "part-0.parquet")
    with pytest.raises(ShardChangedError, match="part-0"):
        ds.compute()


def test_all_faults_are_told_at_once(save):
    """Every faulty shard is listed, with its own fault, and no healthy one."""
    path = save(
        *[pa.table({"x": [1.0, 2.0]})] * 4, pa.table({"x": ["a"]}), pa.table({"y": [1.0]}), pa.table({"x": [None, 1.0]})
    )
    os.truncate(path / "part-1.parquet", 50)
    said = refusal(path)
    for number in (1, 4, 5, 6):
        assert f"part-{number}.parquet" in said
    for number in (2, 3):
        assert f"part-{number}.parquet': " not in said


# Other ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "A.PQ", "/x/y.z/a.pq"])
def test_told_by_suffix(name):
    """The suffix tells, in capitals too."""
    assert format_of_name(name) is PARQUET


def test_told_by_first_bytes():
    """The first bytes tell where no suffix does."""
    assert format_of_bytes(b"PAR1\x15\x04") is PARQUET


def test_mixed_with_npy(save):
    """Files of two formats in one directory are an error that names both; a named format reads its own."""
    path = save(pa.table({"x": [1.0, 2.0]}))
    np.save(path / "part-1.npy", np.arange(6.0).reshape(3, 2))
    with pytest.raises(FormatError, match=r"(?s)npy.*parquet"):
        open_shards(path)
    assert_same(open_shards(path, format="npy").compute(), np.arange(6.0).reshape(3, 2))


def test_remote(save):
    """A storage without files of its own is read by ranges: no more bytes than locally."""
    import fsspec

    whole = example_array((1000, 4), "f4")
    path = save(table_of(whole), row_group_size=100)
    memory = fsspec.filesystem("memory")
    memory.pipe("/parquet_remote/part-0.parquet", (path / "part-0.parquet").read_bytes())
    ds = open_shards("memory://parquet_remote/*.parquet")
    assert_same(ds[250:420, 1:3].compute(), whole[250:420, 1:3])
    assert_same(ds[::-37].compute(), whole[::-37])


def test_eight_threads(save):
    """Many threads read from one dataset at a time, each what it asked for."""
    whole = example_array((4000, 5), "f4")
    ds = open_shards(save(table_of(whole[:1700]), table_of(whole[1700:]), row_group_size=300))
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


def test_reading_starts_no_thread(save):
    """Decoding happens on the thread that asks for it."""
    ds = open_shards(save(table_of(example_array((1000, 5), "f4"))))
    before = set(threading.enumerate())
    PARQUET.read_into(ds.shards[0], 10, np.empty((20, 5), "f4"), (range(5),), LocalStorage())
    assert set(threading.enumerate()) == before


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
    assert "pip install 'lazyshards[parquet]'" in out


# A few rows -------------------------------------------------------------------------------------------------------


def written(save, **options):
    """Write columns that are coded in every way, and return a dataset of them and the rows."""
    count = 30_000
    rows = np.arange(count)
    columns = [rows * 7, rows % 5, np.full(count, 3), np.where(rows < 15_000, rows, 4), rows[::-1] % 4096]
    table = pa.table({f"c{k}": column for k, column in enumerate(columns)})
    path = save(table, **{"row_group_size": 20_000, "data_page_size": 20_000, "write_batch_size": 500, **options})
    return open_shards(path), np.stack(columns, 1)


@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize("dictionary", [True, False, ["c1", "c3"]], ids=str)
def test_a_few_rows(save, monkeypatch, compression, dictionary, page_version):
    """A few rows are exact however their pages are coded, and need no library but where it alone knows the codec."""
    ds, whole = written(
        save, compression=compression, use_dictionary=dictionary, data_page_version=page_version,
        write_page_checksum=True,
    )  # fmt: skip
    if compression != "lz4":
        monkeypatch.setattr(parquet_rows, "_decode", None)
    for start, stop in [(0, 1), (19_990, 20_010), (14_000, 16_000), (29_999, 30_000), (503, 4_711)]:
        assert_same(ds[start:stop].compute(), whole[start:stop])
        assert_same(ds[start:stop, 3:1:-1].compute(), whole[start:stop, 3:1:-1])
    assert_same(ds[[7, 7, 25_000, 3]].compute(), whole[[7, 7, 25_000, 3]])


@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8", "<u8", "<f4", "<f8"])
def test_a_few_rows_of_each_type(save, monkeypatch, kind):
    """The bits of values of four and of eight bytes are those that were written."""
    whole = example_array((500,), kind)
    ds = open_shards(save(pa.table({"x": whole})), columns="x")
    monkeypatch.setattr(parquet_rows, "_decode", None)
    assert_same(ds[100:300].compute(), whole[100:300])


needs_library = pytest.mark.skipif(native.find_library() is None, reason="the C library was not built")


@needs_library
@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli"])
@pytest.mark.parametrize("dictionary", [True, False, ["c1", "c3"]], ids=str)
def test_many_rows(save, monkeypatch, compression, dictionary, page_version):
    """Many rows are exact however their pages are coded, and need pyarrow for no more than to decompress them."""
    ds, whole = written(
        save, compression=compression, use_dictionary=dictionary, data_page_version=page_version,
        write_page_checksum=True,
    )  # fmt: skip
    monkeypatch.setattr(parquet_rows, "_decode", None)
    for start, stop in [(0, 30_000), (9_001, 29_999), (19_000, 30_000), (3, 12_000)]:
        assert_same(ds[start:stop].compute(), whole[start:stop])
        assert_same(ds[start:stop, 3:1:-1].compute(), whole[start:stop, 3:1:-1])
    assert_same(ds[::-7].compute(), whole[::-7])


@needs_library
@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8", "<u8", "<f4", "<f8"])
@pytest.mark.parametrize("columns", [1, 3, 70])
def test_many_rows_of_each_type(save, monkeypatch, kind, columns):
    """As many columns as there are, of values of four and of eight bytes, become the rows that were written."""
    whole = example_array((9_001, columns), kind)
    ds = open_shards(save(table_of(whole)))
    monkeypatch.setattr(parquet_rows, "_decode", None)
    assert_same(ds.compute(), whole)
    assert_same(ds[:8_999, columns // 2 :].compute(), whole[:8_999, columns // 2 :])


@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli"])
@pytest.mark.parametrize("dictionary", [True, False, ["c1", "c3"]], ids=str)
def test_rows_without_the_c_library(save, monkeypatch, compression, dictionary, page_version):
    """Where the C library was not built, few rows and many are the same."""
    for module in (parquet_bands, parquet_pages):
        monkeypatch.setattr(module, "find_library", lambda: None)
    ds, whole = written(
        save, compression=compression, use_dictionary=dictionary, data_page_version=page_version,
    )  # fmt: skip
    assert_same(ds.compute(), whole)
    monkeypatch.setattr(parquet_rows, "_decode", None)
    for start, stop in [(0, 1), (19_990, 20_010), (14_000, 16_000), (503, 4_711), (504, 4_710)]:
        assert_same(ds[start:stop].compute(), whole[start:stop])


def test_values_that_lie_in_the_file_as_they_are(save):
    """Of a plain page that was seen before, no more than the wanted values are read."""
    whole = example_array((5_000, 3), "f8")
    path = save(table_of(whole), compression="none", use_dictionary=False)
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(open_shards(path), storage)
    assert_same(ds[2_000:2_010].compute(), whole[2_000:2_010])
    storage.reads.clear()
    assert_same(ds[4_000:4_007].compute(), whole[4_000:4_007])
    assert storage.nbytes == 7 * 3 * 8


@needs_library
def test_memory_of_many_rows(save):
    """What is read together of many columns with dictionaries is bounded, whatever the row group holds."""
    whole = np.stack([np.random.default_rng(k).permutation(60_000) for k in range(40)], 1)
    path = save(table_of(whole), row_group_size=1 << 20, compression="none")
    sizes = []

    class Storage(RecordingStorage):
        def fetch_into(self, parts):
            sizes.append(sum([len(part.out) for part in parts]))
            super().fetch_into(parts)

    assert_same(with_storage(open_shards(path), Storage(LocalStorage())).compute(), whole)
    assert max(sizes) <= 4 << 20 < os.path.getsize(path / "part-0.parquet") // 5


def test_what_is_left_of_a_long_range_is_not_kept(save, monkeypatch):
    """Dictionaries for a few rows at the end of a row group are kept only if they are asked for again."""
    kept = Kept(64 << 20)
    monkeypatch.setattr(parquet_bands, "DICTIONARIES", kept)
    ds, whole = written(save, use_dictionary=True)
    keys = []
    put = kept.put
    monkeypatch.setattr(kept, "put", lambda key, value, nbytes: (keys.append(key), put(key, value, nbytes)))
    for count in (0, 5):
        assert_same(ds[:50].compute(), whole[:50])
        assert len(keys) == count
    assert_same(ds[24_000:24_050].compute(), whole[24_000:24_050])
    assert len(keys) == 10


def test_dictionaries_are_read_once(save):
    """The dictionary of a row group is read for the first slice in it, and kept for the next."""
    ds, whole = written(save, use_dictionary=True, dictionary_pagesize_limit=1 << 20)
    size = pq.read_metadata(ds.shards[0].path).row_group(0).column(0).total_compressed_size
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(ds, storage)
    counts = []
    for start in (9_000, 9_100, 9_050):
        storage.reads.clear()
        assert_same(ds[start : start + 50, :1].compute(), whole[start : start + 50, :1])
        counts.append(storage.nbytes)
    assert counts[0] > size // 2 > counts[1]
    assert counts[1] == counts[2]


def test_pages_that_need_the_library_are_tried_once(save):
    """Where no statistics tell of nulls, pages are not read in vain again, nor those of other encodings ever."""
    rows = np.arange(20_000)
    nulls = pa.array(rows, mask=rows % 7 == 0)
    path = save(pa.table({"x": nulls, "y": nulls}), write_statistics=False, use_dictionary=False, compression="none")
    coded = save(pa.table({"x": rows}), use_dictionary=False, column_encoding="DELTA_BINARY_PACKED", name="coded")
    storage = RecordingStorage(LocalStorage())
    ds = with_storage(open_shards(path, fill_value=-1), storage)
    counts = []
    for _ in range(3):
        storage.reads.clear()
        assert_same(ds.compute()[:, 0], np.where(rows % 7 == 0, -1, rows))
        counts.append(storage.nbytes)
    assert counts[0] > counts[1] == counts[2]
    assert_same(open_shards(coded)[:, 0].compute(), rows)


def test_nulls_of_a_few_rows_are_left_to_the_library(save):
    """Nulls are an error, or filled, in a few rows as in many."""
    values = pa.array([1.0, None, 3.0] * 100)
    path = save(pa.table({"x": values}), write_statistics=False)
    with pytest.raises(ShardReadError, match=r"column 'x' holds .* null"):
        open_shards(path)[3:9].compute()
    assert np.isnan(open_shards(path, nulls="nan")[4, 0].compute())


@pytest.mark.parametrize("dictionary", [True, False])
def test_wrong_checksum_of_a_few_rows(save, dictionary):
    """A page that does not match its checksum is an error for a few rows, too."""
    path = save(
        pa.table({"x": np.arange(3_000)}), compression="none", use_dictionary=dictionary, write_page_checksum=True
    )
    file = path / "part-0.parquet"
    data = bytearray(file.read_bytes())
    data[600] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShardReadError, match=r"part-0\.parquet"):
        open_shards(path)[:3_000].compute()


def test_an_index_beyond_the_dictionary(save):
    """A place that the dictionary does not have is an error, and never another value."""
    path = save(pa.table({"x": np.arange(5) * 1_000}), compression="none", write_statistics=False)
    file = path / "part-0.parquet"
    data = file.read_bytes()
    packed = bytes([3, 3, 0b10001000, 0b01000110, 0])  # eight places of three bits, the first five 0 to 4
    assert data.count(packed) == 1
    file.write_bytes(data.replace(packed, bytes([3, 3, 0b10001111, 0b01000110, 0])))
    with pytest.raises(ShardReadError, match=r"part-0\.parquet"):
        open_shards(path)[:2].compute()


# Pages that say something else than they should -----------------------------------------------------------------------


def damaged(save, change, **options):
    """Write a file of 20,000 rows, change the pages of its first column, and return where it lies."""
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, **options}
    path = save(pa.table({"x": np.arange(20_000) % 50}), **options) / "part-0.parquet"
    footer, groups = split_pages(path.read_bytes())
    change(groups[0][0], footer)
    path.write_bytes(join_pages(footer, groups))
    return path


def test_a_dictionary_that_ends_within_a_value(save):
    """A dictionary whose bytes are not those of whole values is an error of ours."""

    def change(pages, _):
        assert field(pages[0][0], 1) == 2
        pages[0][1] = pages[0][1][:-3]
        set_field(pages[0][0], 2, len(pages[0][1]))
        set_field(pages[0][0], 3, len(pages[0][1]))

    path = damaged(save, change, use_dictionary=True)
    for rows in (slice(None), slice(70, 75)):
        with pytest.raises(ShardReadError):
            open_shards(path)[rows].compute()


def test_a_second_dictionary(save):
    """A column with two dictionaries is an error, as for pyarrow: which of them is meant nobody can say."""
    path = damaged(save, lambda pages, _: pages.insert(1, pages[0]), use_dictionary=True)
    for rows in (slice(None), slice(70, 75)):
        with pytest.raises(ShardReadError, match="dictionary"):
            open_shards(path)[rows].compute()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_levels_that_tell_of_nulls(save, version):
    """Levels are believed, not what the header of the page says beside them."""

    def change(pages, _):
        for page in pages:
            end = field(page[0], 8, 5) or 4 + int.from_bytes(page[1][:4], "little")
            assert page[1][end - 1] == 1
            page[1] = page[1][: end - 1] + b"\0" + page[1][end:]

    path = damaged(save, change, data_page_version=version)
    for rows in (slice(None), slice(70, 75)):
        with pytest.raises(ShardReadError, match="null"):
            open_shards(path)[rows].compute()


def test_a_column_without_pages(save):
    """A column that has no bytes at all is an error that names the file, the first time and the next."""
    path = damaged(save, lambda pages, _: pages.clear())
    for rows in (slice(None), slice(70, 75), slice(70, 75)):
        with pytest.raises(ShardReadError, match="damaged"):
            open_shards(path)[rows].compute()


def test_a_header_without_an_end(save):
    """Of a page whose header claims to be enormous, no more is read than a header can have."""
    longest = []

    class Storage(RecordingStorage):
        def fetch_into(self, parts):
            longest.append(max([len(part.out) for part in parts], default=0))
            super().fetch_into(parts)

    def change(pages, _):
        header = [[1, 5, 0], [2, 5, 8], [3, 5, 8], [5, 12, [[1, 5, 1], [2, 5, 0], [3, 5, 3], [4, 5, 3]]]]
        pages[0] = [[*header, [9, 8, bytes(48 << 20)]], bytes(8)]

    path = damaged(save, change)
    with pytest.raises(ShardReadError):
        with_storage(open_shards(path), Storage(LocalStorage()))[:].compute()
    assert max(longest) <= 9 << 20


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize(
    "numbers",
    [
        {1: 1 << 32},
        {2: 8 + (1 << 32)},
        {5: [[1, 5, 1 + (1 << 32)], [2, 5, 0], [3, 5, 3], [4, 5, 3]]},
        {(1 << 63) - 1: 1},
    ],
)
def test_numbers_of_headers_that_do_not_fit(monkeypatch, with_library, numbers):
    """A number of more than 32 bits is no header: who keeps 32 of them reads another; nor is a field beyond 16 bits."""
    if with_library and native.find_library() is None:
        pytest.skip("the C library was not built")
    if not with_library:
        monkeypatch.setattr(parquet_pages, "find_library", lambda: None)
    fields = {1: 0, 2: 8, 3: 8, 5: [[1, 5, 1], [2, 5, 0], [3, 5, 3], [4, 5, 3]]}

    def header(fields):
        return format_struct([[k, 12 if isinstance(value, list) else 5, value] for k, value in fields.items()])

    assert parquet_pages.parse_header(header(fields) + bytes(9), 0).values == 1
    with pytest.raises(MalformedError):
        parquet_pages.parse_header(header({**fields, **numbers}) + b"\x15\2\0" + bytes(9), 0)


@pytest.mark.parametrize("native_pages", [True, False])
def test_memory_of_pages_that_inflate(save, child, native_pages):
    """What the pages of columns that are read together take once decompressed is bounded, whoever decodes them."""
    constant = pa.table({f"c{k}": np.zeros(300_000, "f4") for k in range(400)})
    options = {"use_dictionary": False, "compression": "zstd", "data_page_size": 1 << 20}
    if "max_rows_per_page" in inspect.signature(pq.write_table).parameters:  # else there is no such limit
        options["max_rows_per_page"] = 1 << 30
    path = save(constant, row_group_size=1 << 20, **options)
    out = child(
        """
        import resource, sys
        import lazyshards, lazyshards.formats.parquet_rows as rows
        if sys.argv[2] == "False":
            rows.read_columns = lambda *arguments: False
        ds = lazyshards.open_shards(sys.argv[1], engine="numpy")
        ds[:9_000, :1].compute()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ds[:9_000].compute()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """,
        path,
        native_pages,
    )
    assert int(out) < 200 << 10  # KiB
