"""Write one set of rows with every library of this environment that writes a format of lazyshards.

Usage: ``python write_others.py FOLDER``, once in each environment; the names of the files say library and version. It
runs on Python 3.6 as well, for the libraries of its time. The environments that it was run in are in ``README.md``.
"""

import importlib
import os
import sys

import numpy as np

ROWS = (np.arange(60).reshape(20, 3) - 7).astype("f4")
INTS = ROWS.astype("i4")


def version(name):
    """Return the version of a library."""
    return importlib.import_module(name).__version__


def path(name, library, suffix):
    """Return the path of a file that says who wrote it."""
    return os.path.join(sys.argv[1], f"{library}-{version(library)}-{name}{suffix}")


def npy():
    """Write as numpy does."""
    np.save(path("c", "numpy", ".npy"), ROWS)
    np.save(path("fortran_big", "numpy", ".npy"), np.asfortranarray(ROWS.astype(">f8")))
    np.savez(path("stored", "numpy", ".npz"), x=ROWS, y=INTS)
    np.savez_compressed(path("deflated", "numpy", ".npz"), x=ROWS, y=INTS)


def append():
    """Write a growing .npy file."""
    from npy_append_array import NpyAppendArray

    target = os.path.join(sys.argv[1], "npy_append_array-{}.npy".format(dist("npy-append-array")))
    with NpyAppendArray(target) as file:
        for part in np.split(ROWS, [5, 6]):
            file.append(np.ascontiguousarray(part))


def dist(name):
    """Return the version of a package that has none in its module."""
    from importlib.metadata import version as installed

    return installed(name)


def hdf5():
    """Write what h5py writes."""
    import h5py

    for libver in ("earliest", "latest"):
        with h5py.File(path(libver, "h5py", ".h5"), "w", libver=libver) as file:
            file["contiguous"] = ROWS
            file.create_dataset("chunked", data=ROWS, chunks=(7, 2))
            file.create_dataset("growing", data=ROWS, chunks=(7, 3), maxshape=(None, 3), fletcher32=True)
            file.create_dataset("gzip", data=ROWS, chunks=(6, 3), compression="gzip", shuffle=True, fletcher32=True)
            file.create_dataset("lzf", data=ROWS, chunks=(6, 3), compression="lzf")
            file.create_dataset("big", data=ROWS.astype(">i2"))


def netcdf():
    """Write what netCDF4 writes."""
    import netCDF4

    with netCDF4.Dataset(path("classic_model", "netCDF4", ".nc"), "w", format="NETCDF4") as file:
        file.createDimension("time", None)
        file.createDimension("x", 3)
        file.createVariable("temperature", "f4", ("time", "x"), zlib=True)[:] = ROWS


def h5netcdf():
    """Write what h5netcdf writes."""
    import h5netcdf as library

    with library.File(path("plain", "h5netcdf", ".h5"), "w") as file:
        file.dimensions = {"time": 20, "x": 3}
        file.create_variable("temperature", ("time", "x"), data=ROWS, chunks=(5, 3), compression="gzip")


def pytables():
    """Write what PyTables writes."""
    import tables

    with tables.open_file(path("earray", "tables", ".h5"), "w") as file:
        for name, filters in (("zlib", "zlib"), ("blosc", "blosc"), ("lzo", "zlib")):
            options = tables.Filters(complevel=5, complib=filters, shuffle=True)
            array = file.create_earray("/", name, tables.Float32Atom(), (0, 3), filters=options, chunkshape=(6, 3))
            array.append(ROWS)
        file.create_array("/", "plain", ROWS)


def parquet():
    """Write what pyarrow writes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [pa.array(ROWS[:, k]) for k in range(3)]
    try:
        table = pa.table(dict(zip("abc", columns, strict=False)))
    except AttributeError:
        table = pa.Table.from_arrays(columns, list("abc"))
    pq.write_table(table, path("default", "pyarrow", ".parquet"), row_group_size=7)
    for k, number in enumerate(("1.0", "2.0")):
        options = {"version": number, "use_dictionary": bool(k), "compression": ("gzip", "snappy")[k]}
        pq.write_table(table, path("format" + number, "pyarrow", ".parquet"), row_group_size=9, **options)
    if hasattr(pa, "ipc") and hasattr(pa.ipc, "new_file"):
        opened = pa.ipc.new_file, pa.ipc.new_stream
    else:
        opened = pa.RecordBatchFileWriter, pa.RecordBatchStreamWriter
    for open_one, suffix in zip(opened, (".arrow", ".arrows"), strict=False):
        with open(path("rows", "pyarrow", suffix), "wb") as sink:
            writer = open_one(sink, table.schema)
            for start in (0, 6, 12):
                part = [pa.array(ROWS[start : 20 if start == 12 else start + 6, k]) for k in range(3)]
                writer.write_batch(pa.RecordBatch.from_arrays(part, list("abc")))
            writer.close()
    try:
        from pyarrow import feather

        feather.write_feather(table, path("lz4", "pyarrow", ".feather"), compression="lz4")
    except (ImportError, TypeError):
        pass


def fastparquet():
    """Write what fastparquet writes."""
    import fastparquet as library
    import pandas as pd

    frame = pd.DataFrame({name: ROWS[:, k] for k, name in enumerate("abc")})
    for codec in ("UNCOMPRESSED", "SNAPPY", "GZIP"):
        target = path(codec.lower(), "fastparquet", ".parquet")
        library.write(target, frame, row_group_offsets=[0, 8], compression=codec, has_nulls=codec == "GZIP")


def polars():
    """Write what polars writes."""
    import polars as pl

    frame = pl.DataFrame({name: ROWS[:, k] for k, name in enumerate("abc")})
    frame.write_parquet(path("zstd", "polars", ".parquet"), compression="zstd", row_group_size=6)
    frame.write_parquet(path("plain", "polars", ".parquet"), compression="uncompressed", statistics=False)
    frame.write_ipc(path("lz4", "polars", ".arrow"), compression="lz4")
    frame.write_ipc(path("plain", "polars", ".arrow"), compression="uncompressed")
    rows = pl.DataFrame({"v": pl.Series(ROWS.tolist(), dtype=pl.Array(pl.Float32, 3))})
    rows.write_parquet(path("arrays", "polars", ".parquet"))


def safetensors():
    """Write what safetensors writes."""
    from safetensors.numpy import save_file

    save_file({"x": ROWS, "y": INTS}, path("two", "safetensors", ".safetensors"), metadata={"format": "np"})


def stores():
    """Write Zarr stores."""
    import zarr

    if int(zarr.__version__.split(".")[0]) >= 3:
        for number in (2, 3):
            target = path(f"v{number}", "zarr", ".zarr")
            array = zarr.create_array(target, shape=ROWS.shape, dtype="f4", chunks=(6, 2), zarr_format=number)
            array[...] = ROWS
        target = path("sharded", "zarr", ".zarr")
        array = zarr.create_array(target, shape=ROWS.shape, dtype="f4", chunks=(3, 3), shards=(6, 3))
        array[...] = ROWS
        return
    array = zarr.open_array(path("default", "zarr", ".zarr"), mode="w", shape=ROWS.shape, dtype="f4", chunks=(6, 2))
    array[...] = ROWS
    options = {"compressor": None, "order": "F", "fill_value": 0}
    target = path("fortran", "zarr", ".zarr")
    array = zarr.open_array(target, mode="w", shape=ROWS.shape, dtype=">f4", chunks=(6, 2), **options)
    array[...] = ROWS


def tensorstore():
    """Write what tensorstore writes."""
    import tensorstore as ts

    for driver in ("zarr", "zarr3"):
        target = os.path.join(sys.argv[1], "tensorstore-{}-{}.zarr".format(dist("tensorstore"), driver))
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": target}}
        array = ts.open(spec, create=True, delete_existing=True, dtype=ts.float32, shape=ROWS.shape).result()
        array.write(ROWS).result()


if __name__ == "__main__":
    for write in (
        npy,
        append,
        hdf5,
        netcdf,
        h5netcdf,
        pytables,
        parquet,
        fastparquet,
        polars,
        safetensors,
        stores,
        tensorstore,
    ):
        try:
            write()
        except ImportError as exc:
            print("not here:", exc)
