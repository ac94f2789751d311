"""Files that others wrote: other libraries, and older versions; ``tests/data/README.md`` says where they are from."""

from pathlib import Path

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards.testing import assert_same

pytestmark = pytest.mark.usefixtures("on_numpy")

FOLDER = Path(__file__).parents[1] / "data" / "others"
ROWS = (np.arange(60).reshape(20, 3) - 7).astype("f4")
NAMES = {
    "h5py": ("contiguous", "chunked", "growing", "gzip", "lzf", "big"),
    "netCDF4": ("temperature",),
    "h5netcdf": ("temperature",),
    "tables": ("zlib", "blosc", "lzo", "plain"),
}
OPTIONS = {".npz": "member", ".safetensors": "tensor"}


def every_array():
    """Yield each array of each file: its path, and what it is opened with."""
    for path in sorted(FOLDER.iterdir()):
        library = path.name.split("-")[0]
        if library in NAMES:
            yield from ((path, {"dataset": name}) for name in NAMES[library])
        elif path.suffix in OPTIONS:
            yield from ((path, {OPTIONS[path.suffix]: name}) for name in "xy")
        else:
            yield path, {}


@pytest.mark.parametrize(("path", "options"), [*every_array()], ids=lambda value: str(getattr(value, "name", value)))
def test_what_others_wrote(path, options):
    """Whoever wrote it, and however long ago, the rows are those that were written."""
    ds = open_shards(path, **options)
    assert_same(ds.compute(), ROWS.astype(ds.dtype))
    assert_same(ds[17:2:-3, 1:].compute(), ROWS.astype(ds.dtype)[17:2:-3, 1:])
    assert_same(ds[[19, 0, 7]].compute(), ROWS.astype(ds.dtype)[[19, 0, 7]])


def test_versions_of_one_writer_together():
    """Shards that versions of a library wrote eight years apart are one dataset."""
    paths = sorted(FOLDER.glob("pyarrow-*-rows.arrow"))
    assert len(paths) == 3
    assert_same(open_shards(paths).compute(), np.concatenate([ROWS] * 3))


def test_every_format_is_there():
    """There are files of every kind that others write."""
    suffixes = {path.suffix for path in FOLDER.iterdir()}
    assert suffixes == {
        ".arrow", ".arrows", ".feather", ".h5", ".nc", ".npy", ".npz", ".parquet", ".safetensors", ".zarr",
    }  # fmt: skip
