import numpy as np
import pytest

import lazyshards
from lazyshards import MapError, SelectionError, open_shards
from lazyshards.errors import FormatError
from lazyshards.storage import LocalStorage
from lazyshards.testing import RaisingStorage, RecordingStorage, assert_same, with_storage, write_npy_shards

WHOLE = np.random.default_rng(5).integers(-9, 9, (200, 3)).astype("f4")


@pytest.fixture
def ds(tmp_path):
    """Open two hundred rows in four shards."""
    write_npy_shards(tmp_path / "set", np.split(WHOLE, [70, 70, 130]))
    return open_shards(tmp_path / "set", engine="numpy")


PREDICATES = {
    "function": (lambda ds: lambda rows: rows[:, 1] > 2, WHOLE[:, 1] > 2),
    "column": (lambda ds: ds[:, 1] > 2, WHOLE[:, 1] > 2),
    "several columns": (lambda ds: (ds[:, 0] < 0) & (ds[:, 2] >= 3), (WHOLE[:, 0] < 0) & (WHOLE[:, 2] >= 3)),
    "equality": (lambda ds: np.equal(ds[:, 0], 4), WHOLE[:, 0] == 4),
    "none": (lambda ds: ds[:, 0] > 100, WHOLE[:, 0] > 100),
    "all": (lambda ds: ds[:, 0] < 100, WHOLE[:, 0] < 100),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_rows_are_those_of_a_mask(ds, engine, name):
    """What a predicate finds is what a mask of its values selects, in a view and its views, on every engine."""
    make, mask = PREDICATES[name]
    found = ds.where_rows(make(ds))
    assert_same(found.compute(engine), WHOLE[mask])
    assert_same(found[::-2, :2].compute(engine), WHOLE[mask][::-2, :2])
    view = ds[150:20:-3]
    assert_same(view.where_rows(make(view)).compute(engine), WHOLE[150:20:-3][mask[150:20:-3]])


def test_windows(ds, monkeypatch):
    """Rows are judged window by window; the windows leave no trace."""
    monkeypatch.setattr("lazyshards.where._WINDOW_ROWS", 7)
    assert_same(ds.where_rows(ds[:, 1] > 2).compute(), WHOLE[WHOLE[:, 1] > 2])


def test_rows_in_one_piece_are_a_range(ds):
    """Rows that follow each other evenly are a range, which reads faster."""
    numbers = np.arange(200)
    marks = ds.map(lambda rows: rows[:, 0] * 0, row_shape=())
    assert isinstance(ds.where_rows(ds[:, 0] < 100)._selection.rows, range)
    assert isinstance(ds.where_rows(np.isfinite(marks))._selection.rows, range)
    assert numbers[-1] == len(ds) - 1


def test_a_mask_as_an_index(ds):
    """A lazy dataset of booleans is an index as well, read when it is used."""
    assert_same(ds[ds[:, 1] > 2].compute(), WHOLE[WHOLE[:, 1] > 2])


def test_each_byte_is_read_once(ds):
    """Finding rows reads each byte once; the view then reads only what it selects."""
    storage = RecordingStorage(LocalStorage())
    seen = with_storage(ds, storage)
    found = seen.where_rows(seen[:, 1] > 2)
    assert sum(nbytes for _, _, nbytes in storage.reads) == WHOLE.nbytes
    storage.reads.clear()
    repr(found), found.plan(), found[:5], found.fingerprint
    assert not storage.reads


def test_a_mask_of_another_dataset(ds, tmp_path):
    """Booleans of other files, one for each row, choose rows as well."""
    labels = np.arange(200) % 7
    write_npy_shards(tmp_path / "labels", [labels])
    other = open_shards(tmp_path / "labels", engine="numpy")
    assert_same(ds.where_rows(np.equal(other, 3)).compute(), WHOLE[labels == 3])


def test_the_fingerprint_is_of_the_rows(ds):
    """A view of the same rows is the same, however it was found."""
    assert ds.where_rows(ds[:, 1] > 2) == ds[np.flatnonzero(WHOLE[:, 1] > 2)]
    assert ds.where_rows(ds[:, 1] > 2) == ds.where_rows(lambda rows: rows[:, 1] > 2)


def test_wrong_predicates(ds):
    """What is no predicate, or gives no boolean for each row, is refused."""
    with pytest.raises(TypeError, match=r"ds\[mask\]"):
        ds.where_rows(np.ones(200, bool))
    with pytest.raises(SelectionError, match="booleans, one for each of the 200 rows"):
        ds.where_rows(ds[:, 1])
    with pytest.raises(SelectionError, match="shape"):
        ds.where_rows(ds > 2)
    with pytest.raises(SelectionError, match="shape"):
        ds.where_rows(ds[:10, 1] > 2)
    with pytest.raises(TypeError, match="single row"):
        ds[3].where_rows(lambda rows: rows > 2)
    with pytest.raises(MapError, match="expected bool"):
        ds.where_rows(lambda rows: rows[:, 0])
    with pytest.raises(MapError, match="ZeroDivisionError"):
        ds.where_rows(lambda rows: 1 / 0)


def test_progress(ds, capsys):
    """Progress counts all rows."""
    pytest.importorskip("tqdm")
    ds.where_rows(ds[:, 1] > 2, progress=True)
    assert "200" in capsys.readouterr().err


# filters= of Parquet ---------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    """Write two files of ten row groups of 50 rows each; give their directory and what they hold."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    count = 1000
    columns = {
        "x": rng.normal(size=count),
        "y": rng.normal(size=count),
        "key": np.arange(count, dtype="i4"),
        "small": (np.arange(count) // 37).astype("u1"),
        "half": (np.arange(count) / 10).astype("f4"),
        "name": np.array([f"n{i // 100:02d}" for i in range(count)]),
        "when": np.datetime64("2024-01-01", "us") + np.arange(count).astype("m8[h]"),
        "flag": np.arange(count) % 3 == 0,
    }
    (tmp_path / "set").mkdir()
    whole = pa.table({**columns, "part": pa.array([None if i % 5 == 0 else i for i in range(count)])})
    for i in range(2):
        pq.write_table(whole.slice(500 * i, 500), tmp_path / "set" / f"part_{i}.parquet", row_group_size=50)
    return tmp_path / "set", whole


FILTERS = [
    [("key", ">", 930)],
    [("key", ">=", 100), ("key", "<", 260)],
    [("key", "==", 512)],
    [("key", "=", 512), ("x", ">", -100.0)],
    [("key", "in", [3, 4, 777])],
    [("key", "in", ())],
    [("key", "not in", [3, 4, 777])],
    [("key", "!=", 4)],
    [("small", "==", 20)],
    [("half", "==", 0.1)],
    [("half", ">", 99)],
    [("half", "<=", 1.1)],
    [("name", "==", "n03")],
    [("name", ">", "n08")],
    [("name", "in", ["n00", "n09"])],
    [("flag", "==", True), ("key", "<", 20)],
    [("part", "<", 12)],
    [("part", "!=", 12)],
    [[("key", "<", 3)], [("key", ">", 996)], [("name", "==", "n05"), ("x", ">", 0.0)]],
    [("key", ">", 5000)],
    [("x", ">", 0.5)],
    [("key", "<", 100.5)],
    [("when", "<", np.datetime64("2024-01-02T05", "us"))],
]


@pytest.mark.parametrize("filters", FILTERS, ids=map(str, FILTERS))
def test_filters_select_what_pyarrow_selects(table, filters):
    """The rows are those that pyarrow finds, in order, of any columns."""
    import pyarrow.parquet as pq

    path, _ = table
    given = [
        [(name, op, value.item() if isinstance(value, np.datetime64) else value) for name, op, value in alternative]
        for alternative in (filters if isinstance(filters[0], list) else [filters])
    ]
    expected = pq.read_table(path, columns=["x", "y"], filters=given)
    found = open_shards(path, columns=["x", "y"], filters=filters, engine="numpy")
    assert_same(found.compute(), np.column_stack([expected["x"].to_numpy(), expected["y"].to_numpy()]))


def test_row_groups_are_skipped(table):
    """What the footer rules out is not read, and of the rest no column but those of the filters."""
    from lazyshards.formats.parquet import ParquetFormat

    path, _ = table
    ds = open_shards(path, columns=["x"], engine="numpy")
    storage = RecordingStorage(LocalStorage())
    finds = ParquetFormat().find_rows
    rows = [finds(shard, [("key", "==", 512)], storage) for shard in ds.shards]
    assert [found.tolist() for found in rows] == [[], [12]]
    import pyarrow.parquet as pq

    chunk = pq.read_metadata(path / "part_1.parquet").row_group(0).column(2)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    assert storage.reads
    for name, offset, nbytes in storage.reads:
        assert name.endswith("part_1.parquet")
        assert start <= offset
        assert offset + nbytes <= start + chunk.total_compressed_size
    storage.reads.clear()
    assert not len(finds(ds.shards[0], [("name", ">", "n5")], storage))
    assert not storage.reads


def test_statistics_may_be_missing(tmp_path):
    """Row groups without statistics, without a value, and with NaN, are looked at."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    values = np.array([np.nan, 1, 2, 3, np.nan, np.nan, 7, 8])
    table = pa.table({"x": values, "n": pa.array([None, None, 1, 2, 3, None, None, None])})
    for name, options in (("with", {}), ("without", {"write_statistics": False})):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2, **options)
        for filters in ([("x", ">=", 3.0)], [("x", "!=", 3.0)], [("n", "<", 3)], [("n", "!=", 1)]):
            expected = pq.read_table(tmp_path / f"{name}.parquet", filters=filters)["x"].to_numpy()
            found = open_shards(tmp_path / f"{name}.parquet", columns="x", filters=filters, engine="numpy")
            assert_same(found.compute(), expected)


@pytest.mark.parametrize(
    ("values", "filters"),
    [
        (np.array([0.1, 0.1, 0.3, 0.3], "f4"), [("c", "in", [0.1])]),
        (np.array([0.1, 0.1, 0.3, 0.3], "f4"), [("c", "in", [0.3, None])]),
        ([1.0, float("nan"), 2.0, 3.0], [("c", "in", [float("nan")])]),
        ([1, None, 2, 3], [("c", "in", [None])]),
        ([1, None, 2, 3], [("c", "in", (None, 3))]),
        ([2**60, 2**60, 1, 2], [("c", "in", [1.0])]),
        (np.array([2**63 + 5, 2**63 + 5, 3, 4], "u8"), [("c", "in", {3})]),
        (np.array([1, 1, 200, 200], "u1"), [("c", "in", [200, 300])]),
        ([1, 2, 3, 4], [("c", "in", ["3"])]),
    ],
)
def test_one_of_several_values(tmp_path, values, filters):
    """Values are looked for in the type of the column, nulls and NaN too, whatever the statistics are."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"x": np.arange(4.0), "c": pa.array(values)})
    pq.write_table(table, tmp_path / "few.parquet", row_group_size=2)
    expected = table.filter(pq.filters_to_expression(filters))["x"].to_numpy()
    assert len(expected)
    found = open_shards(tmp_path / "few.parquet", columns="x", filters=filters, engine="numpy")
    assert_same(found.compute(), expected)


def test_filters_are_an_index_view(table):
    """What filters leave is a dataset as any other: sliced, batched, equal to the same rows."""
    path, whole = table
    ds = open_shards(path, columns=["x"], engine="numpy")
    found = open_shards(path, columns=["x"], filters=[("key", ">=", 40), ("key", "<", 90)], engine="numpy")
    assert found == ds[40:90]
    assert isinstance(found._selection.rows, range)
    assert_same(found[5:7].compute(), whole["x"].to_numpy()[45:47, None])


@pytest.mark.parametrize(
    ("filters", "error", "message"),
    [
        ([("nothing", "==", 1)], ValueError, r"nothing.*'x', 'y'"),
        ([("key", "~", 1)], ValueError, "the operators are"),
        ([("key", "==")], TypeError, "expected conditions"),
        ("key > 3", TypeError, "expected conditions"),
        ([[]], ValueError, "empty list"),
        ([("key", "in", 3)], TypeError, "list of values"),
        ([("key", ">", "text")], ValueError, "cannot be applied"),
        ([("name", ">", 3)], ValueError, "cannot be applied"),
        ([("key", "<", 2**70)], ValueError, "cannot be applied"),
    ],
)
def test_wrong_filters(table, filters, error, message):
    """Filters that mean nothing are refused, with what is wrong."""
    with pytest.raises(error, match=message):
        open_shards(table[0], columns=["x"], filters=filters, engine="numpy")


def test_comparisons_that_cannot_be_made(tmp_path):
    """Numbers that Arrow cannot compare are the filter's fault, with or without statistics, and not the file's."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for name in ("with", "without"):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"x": [2**60 + 1, 2]}), path, write_statistics=name == "with")
        with pytest.raises(ValueError, match=r"cannot be applied.*not in range"):
            open_shards(path, filters=[("x", ">", 0.5)], engine="numpy")


def test_lists_are_no_values(tmp_path):
    """A column of lists cannot be compared."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [[1, 2], [3, 4]]}), tmp_path / "lists.parquet")
    with pytest.raises(ValueError, match="one value a row"):
        open_shards(tmp_path / "lists.parquet", filters=[("x", ">", 1)], engine="numpy")


def test_other_formats_have_no_filters(ds, tmp_path):
    """Files that tell nothing of what they hold have no filters, and the message says what to do."""
    with pytest.raises(FormatError, match="where_rows"):
        open_shards(tmp_path / "set", filters=[("x", ">", 1)], engine="numpy")


def test_bundles_are_filtered_alike(table):
    """Columns that are opened together are filtered together."""
    path, whole = table
    both = open_shards(path, columns={"a": ["x", "y"], "k": "key"}, filters=[("key", "<", 5)], engine="numpy")
    assert_same(both.compute()["k"], whole["key"].to_numpy()[:5])
    assert isinstance(both, lazyshards.Bundle)


def test_nothing_is_read_early(ds):
    """Making a mask reads nothing."""
    lazy = with_storage(ds, RaisingStorage())
    repr((lazy[:, 0] > 3) & (lazy[:, 1] < 2))


def test_memory_is_bounded(tmp_path, child):
    """Finding rows in data, lazily worked on, takes a small part of the memory that the data would."""
    with (tmp_path / "sparse.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1_000_000, 128)})
        file.truncate(file.tell() + 4 * 128 * 1_000_000)
    out = child(
        """
        import sys, tracemalloc
        import numpy as np
        from lazyshards import open_shards
        ds = open_shards(sys.argv[1], engine="numpy")
        work = np.sqrt(ds * 2.5 - np.arange(128))
        tracemalloc.start()
        found = work.where_rows(lambda rows: (rows[:, 0] == 0) & (np.arange(len(rows)) == 0))
        print(len(found), tracemalloc.get_traced_memory()[1])
        """,
        tmp_path / "sparse.npy",
    )
    count, most = map(int, out.split())
    assert count > 0
    assert most < 50e6  # of 512e6, mapped files not counted


def test_damaged_footers(table, child):
    """Whatever is wrong with a footer, filtering raises an error or finds rows, and the process lives."""
    path, _ = table
    child(
        """
        import random, sys
        from lazyshards import LazyShardsError, open_shards
        data = open(sys.argv[1], "rb").read()
        footer = int.from_bytes(data[-8:-4], "little")
        for seed in range(120):
            chance = random.Random(seed)
            damaged = bytearray(data)
            for _ in range(chance.choice([1, 1, 3])):
                damaged[chance.randrange(len(data) - 8 - footer, len(data) - 8)] = chance.randrange(256)
            with open("damaged.parquet", "wb") as file:
                file.write(damaged)
            for filters in ([("key", ">", 120), ("key", "<", 130)], [("name", "==", "n02")]):
                try:
                    open_shards("damaged.parquet", columns=["x"], filters=filters, engine="numpy")
                except (LazyShardsError, ValueError):
                    pass
        """,
        path / "part_0.parquet",
    )
