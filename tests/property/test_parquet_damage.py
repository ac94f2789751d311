"""Parquet files whose pages say something else than they should, against what pyarrow makes of them.

Bytes that are changed at random hardly ever reach what is decoded: headers no longer parse, compression fails. So
files are taken apart, and headers, values and the order of pages are changed one at a time.
"""

import copy
import random
import zlib
from contextlib import suppress
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import LazyShardsError
from tests.parquet_files import field, join_pages, set_field, split_pages

ROWS = 700
ODD = (0, 1, 3, 7, 8, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, 1 << 62, -1, -(1 << 31))


@cache
def pages_of(codec, version, dictionary, checksums):
    """Return the pages of a file of two columns, small ones and many."""
    rng = np.random.default_rng(3)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"a": rng.integers(0, 9, ROWS).astype("f8"), "b": rng.random(ROWS)}),
        sink,
        compression=codec,
        data_page_version=version,
        use_dictionary=dictionary,
        write_page_checksum=checksums,
        data_page_size=512,
        write_batch_size=64,
    )
    return split_pages(sink.getvalue().to_pybytes())


def change_number(pick, struct):
    """Change a number in a header, or in a struct within it, or drop it."""
    entry = pick.choice(struct)
    if entry[1] == 12:
        change_number(pick, entry[2])
    elif entry[1] in (1, 2):
        entry[1] = 3 - entry[1]
    elif entry[1] in (4, 5, 6) and pick.random() < 0.8:
        entry[2] = pick.choice([entry[2] + 1, entry[2] - 1, entry[2] * 2, entry[2] + (1 << 32), *ODD])
    else:
        struct.remove(entry)


def change_bytes(pick, data):
    """Change a byte, most likely one of the first, or drop or add some."""
    at = pick.randrange(min(len(data), 12) if pick.random() < 0.6 else len(data))
    kept = data[at + pick.choice([1, 1, 1, 4]) :]
    return (
        data[:at]
        + bytes([pick.choice([0, 1, 2, 127, 128, 255, pick.randrange(256)])] * pick.choice([0, 1, 1, 5]))
        + kept
    )


def change_values(pick, page, codec):
    """Change a page before it was compressed, so that its size and its checksum are right."""
    header, body = page
    inflated = body
    if codec != "none" and field(header, 1) == 3:
        return  # its levels are not compressed
    if codec != "none":
        inflated = pa.decompress(body, field(header, 2), codec, asbytes=True)
    inflated = change_bytes(pick, inflated)
    page[1] = inflated if codec == "none" else pa.compress(inflated, codec, asbytes=True)
    set_field(header, 2, len(inflated))
    set_field(header, 3, len(page[1]))
    if field(header, 4) is not None:
        checksum = zlib.crc32(page[1])
        set_field(header, 4, checksum - (1 << 32) if checksum >> 31 else checksum)


def damage(seed, codec, version, dictionary, checksums):
    """Return a file with one thing changed."""
    pick = random.Random(seed)
    footer, groups = copy.deepcopy(pages_of(codec, version, dictionary, checksums))
    pages = pick.choice(groups[0])
    k = pick.randrange(min(3, len(pages)) if pick.random() < 0.5 else len(pages))
    what = pick.randrange(6)
    if what < 2:
        change_number(pick, pages[k][0])
    elif what < 4:
        change_values(pick, pages[k], codec)
    elif what == 4:
        pages.insert(pick.randrange(len(pages) + 1), copy.deepcopy(pages[k]))
    else:
        del pages[k]
    return join_pages(footer, groups)


def read_by_pyarrow(path):
    """Return the rows, or None if it refuses the file, or finds less or nulls."""
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return None
    if len(table) != ROWS or any(column.null_count for column in table.columns):
        return None
    return np.stack([column.to_numpy() for column in table.columns], 1)


@pytest.mark.parametrize("with_library", [True, False])
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    codec=st.sampled_from(["none", "snappy", "zstd", "gzip"]),
    version=st.sampled_from(["1.0", "2.0"]),
    dictionary=st.booleans(),
    checksums=st.booleans(),
)
def test_damaged_pages(tmp_path_factory, with_library, seed, codec, version, dictionary, checksums):
    """What pages say is read as pyarrow reads it, or refused with an error of the package; never anything else."""
    path = tmp_path_factory.mktemp("damaged") / "a.parquet"
    path.write_bytes(damage(seed, codec, version, dictionary, checksums))
    expected = read_by_pyarrow(path)
    with pytest.MonkeyPatch.context() as patch:
        if not with_library:
            for module in ("parquet_bands", "parquet_pages"):
                patch.setattr(f"lazyshards.formats.{module}.find_library", lambda: None)
        with suppress(LazyShardsError):
            ds = open_shards(path, engine="numpy")
            for rows in (slice(None), slice(300, 303)):
                found = ds[rows].compute()
                assert expected is not None or rows != slice(None), "pyarrow refuses it"
                if expected is not None:
                    wanted = np.ascontiguousarray(expected[rows])
                    np.testing.assert_array_equal(found.view(np.uint64), wanted.view(np.uint64))
