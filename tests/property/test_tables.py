"""Parquet and Arrow files as their own writers make them, with all that can be chosen, read at any index."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshards import native, open_shards
from lazyshards.errors import LazyShardsError
from lazyshards.formats import columns, parquet_bands, parquet_pages, parquet_rows, parquet_thrift
from lazyshards.testing import assert_same, example_array, index_chains

pytestmark = pytest.mark.usefixtures("on_numpy")

DTYPES = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")


@pytest.fixture
def scratch():
    """Give a directory that every example empties."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


def emptied(path):
    """Return the directory without what the example before it left."""
    shutil.rmtree(path)
    path.mkdir()
    return path


@st.composite
def tables(draw, *, most_rows=40):
    """Draw the shards of a dataset as tables, what they hold, and how they must be opened."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["columns", "fixed", "list", "single"]))
    width = draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(0, most_rows), min_size=1, max_size=3))
    if kind in {"fixed", "list"} and not any(counts):
        counts.append(1)  # without a row nothing tells how long the lists are
    with_nulls = draw(st.booleans())
    options = {"columns": "c0"} if kind == "single" else {}
    if with_nulls:
        options["fill_value"] = 1
    shards, arrays = [], []
    for seed, rows in enumerate(counts):
        values = example_array((rows, width), dtype, seed=seed)
        mask = np.random.default_rng(seed).random((rows, width)) < 0.3 if with_nulls else np.zeros((rows, width), bool)
        if kind in {"columns", "single"}:
            table = pa.table({f"c{k}": pa.array(values[:, k], mask=mask[:, k]) for k in range(width)})
        else:
            flat = pa.array(values.ravel(), mask=mask.ravel())
            fixed = pa.FixedSizeListArray.from_arrays(flat, width)
            table = pa.table({"v": fixed if kind == "fixed" else fixed.cast(pa.list_(flat.type))})
        whole = np.where(mask, np.array(1, dtype), values)
        shards.append(table)
        arrays.append(whole[:, 0] if kind == "single" else whole)
    return shards, np.concatenate(arrays), options


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parquet(scratch, data):
    """Whatever pyarrow's writer was told, and whatever the index, the rows are those that were written."""
    shards, whole, options = data.draw(tables())
    root = emptied(scratch)
    for i, table in enumerate(shards):
        pq.write_table(
            table,
            root / f"part-{i}.parquet",
            row_group_size=data.draw(st.integers(1, 50)),
            compression=data.draw(st.sampled_from(["none", "snappy", "zstd", "gzip", "lz4", "brotli"])),
            use_dictionary=data.draw(st.booleans()),
            # Lists of booleans in pages of version 2 are written by pyarrow so that it cannot read them itself.
            data_page_version="1.0" if whole.dtype == bool else data.draw(st.sampled_from(["1.0", "2.0"])),
            data_page_size=data.draw(st.sampled_from([16, 100, 1 << 20])),  # below, pages without values are not read
            write_batch_size=data.draw(st.sampled_from([1, 3, 1024])),
            write_statistics=data.draw(st.booleans()),
            write_page_index=data.draw(st.booleans()),
            store_schema=data.draw(st.booleans()),
        )
    expected = whole
    with pytest.MonkeyPatch.context() as patch:
        # Bounds so low that what is for long files is met by short ones.
        skipping = data.draw(st.sampled_from([0, 3, 8192]))
        patch.setattr(parquet_rows, "_MOST_WASTED_ROWS", skipping)
        patch.setattr(parquet_bands, "_MOST_WASTED_ROWS", skipping)
        patch.setattr(parquet_bands, "_FEW_ROWS", data.draw(st.sampled_from([0, 5, 8192])))
        patch.setattr(parquet_bands, "_READ_NBYTES", data.draw(st.sampled_from([1, 64, 1 << 17])))
        patch.setattr(parquet_bands, "_BAND_NBYTES", data.draw(st.sampled_from([1, 400, 8 << 20])))
        if data.draw(st.booleans()):
            for module in (parquet_bands, parquet_pages):
                patch.setattr(module, "find_library", lambda: None)
        ds = open_shards(root, **options)
        assert ds.shape == whole.shape
        for index in data.draw(index_chains(whole.shape)):
            ds, expected = ds[index], expected[index]
        assert_same(ds.compute(), expected)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arrow(scratch, data):
    """Whatever pyarrow's writer was told, and whatever the index, the rows are those that were written."""
    shards, whole, options = data.draw(tables())
    root = emptied(scratch)
    for i, table in enumerate(shards):
        kind = pa.ipc.new_stream if data.draw(st.booleans()) else pa.ipc.new_file
        written = pa.ipc.IpcWriteOptions(
            compression=data.draw(st.sampled_from([None, "lz4", "zstd"])),
            use_legacy_format=data.draw(st.booleans()),
        )
        with kind(str(root / f"part-{i}.arrow"), table.schema, options=written) as writer:
            writer.write_table(table, max_chunksize=data.draw(st.integers(1, 50)))
    expected = whole
    ds = open_shards(root, **options)
    assert ds.shape == whole.shape
    for index in data.draw(index_chains(whole.shape)):
        ds, expected = ds[index], expected[index]
    assert_same(ds.compute(), expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 29_999), count=st.integers(1, 3000), data=st.data())
def test_pages_far_within_a_row_group(scratch, start, count, data):
    """Rows far within a row group are exact, wherever the pages of its columns begin, and whatever went before."""
    path = scratch / "part-0.parquet"
    rows = np.arange(30_000)
    if not path.exists():
        table = pa.table(
            {
                "plain": rows,
                "few": rows % 5,
                "nulls": pa.array(rows, mask=rows % 7 == 0),
                "narrow": (rows % 100).astype("i8"),
                "late": np.where(rows < 15_000, 3, rows),
            }
        )
        pq.write_table(
            table, path, data_page_size=8000, write_batch_size=64, compression="zstd", use_dictionary=["few", "late"]
        )
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(90_000)), 3)
        pq.write_table(pa.table({"v": vectors}), scratch / "v.parquet", data_page_size=8000, write_batch_size=64)
    whole = np.stack(
        [rows, rows % 5, np.where(rows % 7 == 0, -1, rows), rows % 100, np.where(rows < 15_000, 3, rows)], 1
    )
    ds = open_shards(path, fill_value=-1)
    at = slice(start, start + count, data.draw(st.sampled_from([1, 1, 7])))
    names = data.draw(st.permutations(range(5)))[: data.draw(st.integers(1, 5))]
    low, high = min(names), max(names) + 1
    assert_same(ds[at, low:high].compute(), whole[at, low:high])
    vectors = np.arange(90_000).reshape(-1, 3)
    assert_same(open_shards(scratch / "v.parquet")[at].compute(), vectors[at])


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_as_headers(data):
    """Whatever the bytes, a header is parsed, is cut, or is malformed: nothing else happens."""
    for parse in (parquet_thrift.parse_struct, lambda data, _: parquet_thrift.count_values(data)):
        with contextlib.suppress(parquet_thrift.CutError, parquet_thrift.MalformedError):
            assert parse(data, 0) is not None


@pytest.mark.skipif(native.find_library() is None, reason="the C library was not built")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_headers_of_pages(scratch, data):
    """The C library finds in the header of a page, whole, cut or damaged, what is found without it."""
    path = scratch / "part-0.parquet"
    pq.write_table(
        pa.table({"x": [3, 4, 4, -7], "t": ["a", "b", "b", "c" * 20]}),
        path,
        use_dictionary=data.draw(st.booleans()),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        write_page_checksum=data.draw(st.booleans()),
        compression=data.draw(st.sampled_from(["none", "snappy"])),
        write_statistics=data.draw(st.booleans()),
    )
    column = pq.read_metadata(path).row_group(0).column(data.draw(st.integers(0, 1)))
    at = data.draw(st.sampled_from([column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]))
    raw = bytearray(path.read_bytes()[at : at + data.draw(st.sampled_from([1, 9, 20, 40, 300]))])
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, min(60, len(raw)) - 1))] = data.draw(st.integers(0, 255))

    def parsed():
        try:
            return parquet_pages.parse_header(bytes(raw), 0)
        except (parquet_thrift.CutError, parquet_thrift.MalformedError):
            return "nothing"

    found = parsed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_pages, "find_library", lambda: None)
        assert found == parsed()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_pages(scratch, data):
    """Whatever byte of a page is changed, reading ends with as many rows as are wanted, or an error names the file."""
    root = emptied(scratch)
    rows = np.arange(9_000)
    columns = [rows, rows % 5, np.where(rows < 5_000, 3, rows)]
    path = root / "part-7.parquet"
    pq.write_table(
        pa.table({f"c{k}": column for k, column in enumerate(columns)}),
        path,
        compression=data.draw(st.sampled_from(["none", "snappy", "zstd"])),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        data_page_size=4_000,
        write_batch_size=500,
        write_page_checksum=data.draw(st.booleans()),
    )
    metadata = pq.read_metadata(path).row_group(0)
    raw = bytearray(path.read_bytes())
    chunk = metadata.column(data.draw(st.integers(0, 2)))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    at = start + data.draw(st.integers(0, min(200, chunk.total_compressed_size) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    for wanted in (slice(0, 9_000), slice(100, 140)):
        try:
            found = open_shards(path)[wanted].compute()
        except LazyShardsError as exc:
            assert "part-7" in str(exc)  # noqa: PT017  # no error is right as well
        else:
            assert found.shape == (wanted.stop - wanted.start, 3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_counts(scratch, data):
    """The values and nulls that a footer counts are those that pyarrow finds in it."""
    shards, _, _ = data.draw(tables())
    path = scratch / "part-0.parquet"
    pq.write_table(
        shards[0],
        path,
        row_group_size=data.draw(st.integers(1, 50)),
        write_statistics=data.draw(st.booleans()),
        store_schema=data.draw(st.booleans()),
    )
    raw = path.read_bytes()
    metadata = pq.read_metadata(path)
    chunks = [
        [metadata.row_group(i).column(k) for k in range(metadata.num_columns)] for i in range(metadata.num_row_groups)
    ]
    expected = [
        [(chunk.num_values, chunk.statistics.null_count if chunk.is_stats_set else None) for chunk in group]
        for group in chunks
    ]
    found = parquet_thrift.count_values(raw[-8 - int.from_bytes(raw[-8:-4], "little") :])
    assert found is not None
    assert [[(chunk.values, chunk.nulls) for chunk in group] for group in found] == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["parquet", "arrow", "arrows"]))
def test_any_damage(scratch, data, kind):
    """Whatever bytes are changed, cut or added, reading ends with rows, or an error that names the file."""
    root = emptied(scratch)
    table = pa.table({"x": np.arange(50), "y": pa.array(np.arange(50), mask=np.arange(50) % 9 == 0)})
    path = root / f"part-7.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=20, compression="zstd")
    else:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with (pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream)(str(path), table.schema, options=options) as w:
            w.write_table(table, max_chunksize=20)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        action = data.draw(st.sampled_from(["change", "cut", "add"]))
        if action == "change":
            raw[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del raw[at : at + data.draw(st.integers(1, 20))]
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=20))
    path.write_bytes(raw)
    try:
        found = open_shards(path, fill_value=0, format=kind.removesuffix("s"))[3:].compute()
    except LazyShardsError as exc:
        assert "part-7" in str(exc)  # noqa: PT017  # no error is right as well
    except MemoryError:
        pass  # so many rows were promised that no result can hold them
    else:
        assert found.ndim == 2


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9000),
    width=st.integers(1, 140),
    dtype=st.sampled_from(["u1", "f4", "f8", "c16"]),
)
def test_columns_become_rows(rows, width, dtype):
    """Columns of any number and length are turned into rows as NumPy stacks them."""
    values = [example_array((rows,), dtype, seed=k % 5) for k in range(width)]
    out = np.zeros((rows, width), dtype)
    columns.write_rows(out, values, (), columns.Scratch(), stacked=True)
    assert_same(out, np.stack(values, 1))
