"""Files made to harm whoever opens them: code in pickles, ways out of the directory, absurd sizes, bombs.

All are opened in one process that may take little memory more than it has; what each led to is compared here.
"""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
import zarr.codecs

import lazyshards
from lazyshards.testing import npy_bytes

MOST_NBYTES = 384 << 20
"""What the process may take besides what it has when all is imported."""
MOST_SECONDS = 10
"""Of the processor, for one file."""
HUGE = 1 << 40

CASES = {}


def case(says, **options):
    """Note how a file is written: the function takes a directory of its own, and may return what is opened."""

    def note(write):
        CASES[write.__name__] = write, says, options
        return write

    return note


class Trap:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder.parent / "ran"),)


def sparse(path, head, nbytes, tail=b""):
    """Write a file of holes between its first and its last bytes."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(nbytes)
        file.seek(0, 2)
        file.write(tail)


# Pickles ----------------------------------------------------------------------------------------------------------


@case("Python objects|objects")
def pickled_npy(folder):
    """Write pickled npy."""
    np.save(folder / "a.npy", np.array([Trap(folder), None], object))


@case("Python objects|objects")
def pickled_field_of_npy(folder):
    """Write pickled field of npy."""
    rows = np.zeros(2, [("x", "f4"), ("o", object)])
    rows["o"][0] = Trap(folder)
    np.save(folder / "a.npy", rows)


@case("Python objects|objects")
def pickled_npz(folder):
    """Write pickled npz."""
    np.savez(folder / "a.npz", x=np.array([Trap(folder)], object))


@case("expected|cannot")
def pickle_named_npy(folder):
    """Write pickle named npy."""
    (folder / "a.npy").write_bytes(pickle.dumps(Trap(folder)))


@case("pickle")
def pickle_codec_of_zarr(folder):
    """Write pickle codec of zarr."""
    array = zarr.create_array(folder / "a.zarr", shape=(2,), dtype="i4", chunks=(2,), zarr_format=2, compressors=None)
    array[...] = 1
    described = json.loads((folder / "a.zarr/.zarray").read_text())
    described["filters"] = [{"id": "pickle"}]
    (folder / "a.zarr/.zarray").write_text(json.dumps(described))
    (folder / "a.zarr/0").write_bytes(pickle.dumps(Trap(folder)))


# Ways out ---------------------------------------------------------------------------------------------------------


def secret(folder):
    """Write rows that nobody who opens the directory has asked for."""
    path = folder.parent / f"secret_of_{folder.name}.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4.0)
    return path


@case("outside|allow_external", dataset="x")
def external_link(folder):
    """Write external link."""
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(secret(folder)), "/x")


@case("outside|allow_external", dataset="x")
def external_link_by_dots(folder):
    """Write external link by dots."""
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink(f"../{secret(folder).name}", "/x")


@case("outside|allow_external", dataset="x")
def external_storage(folder):
    """Write external storage."""
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (4,), "f8", external=[(str(secret(folder)), 0, 32)])


@case("outside|allow_external", dataset="x")
def virtual_source(folder):
    """Write virtual source."""
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(secret(folder)), "x", (4,))
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)


@case("outside|allow_external", dataset="x")
def external_link_to_a_symbolic_link(folder):
    """Write external link to a symbolic link."""
    (folder / "b").symlink_to(secret(folder))
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("b", "/x")
    return folder / "a.h5"


# Sizes ------------------------------------------------------------------------------------------------------------


@case("truncated|header")
def npy_header_of_four_gigabytes(folder):
    """Write npy header of four gigabytes."""
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 100)


@case("header")
def npy_header_of_a_gigabyte_that_is_there(folder):
    """Write npy header of a gigabyte that is there."""
    sparse(folder / "a.npy", b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + b"{", 2 << 30)


@case("bytes")
def npy_of_an_exabyte(folder):
    """Write npy of an exabyte."""
    data = npy_bytes(np.zeros(3))
    claimed = b"(%d,), }" % 10**17
    assert data.count(b"(3,), }".ljust(len(claimed))) == 1
    (folder / "a.npy").write_bytes(data.replace(b"(3,), }".ljust(len(claimed)), claimed))


@case("directory of")
def npz_directory_of_a_gigabyte(folder):
    """Write npz directory of a gigabyte."""
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 1 << 30, 100, 0)
    sparse(folder / "a.npz", b"PK\x03\x04", (1 << 30) + 100, end)


@case("header")
def safetensors_header_of_exabytes(folder):
    """Write safetensors header of exabytes."""
    (folder / "a.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


@case("header")
def safetensors_header_of_a_gigabyte_that_is_there(folder):
    """Write safetensors header of a gigabyte that is there."""
    sparse(folder / "a.safetensors", (1 << 30).to_bytes(8, "little") + b"{", 2 << 30)


@case("expected at most")
def parquet_footer_of_a_gigabyte(folder):
    """Write parquet footer of a gigabyte."""
    sparse(folder / "a.parquet", b"PAR1", 2 << 30, (1 << 30).to_bytes(4, "little") + b"PAR1")


@case("header of|footer of")
def arrow_header_of_a_gigabyte(folder):
    """Write arrow header of a gigabyte."""
    sparse(folder / "a.arrow", b"ARROW1\0\0\xff\xff\xff\xff" + (1 << 30).to_bytes(4, "little"), 2 << 30, b"ARROW1")


@case("footer of")
def arrow_footer_of_a_gigabyte(folder):
    """Write arrow footer of a gigabyte."""
    path = folder / "a.arrow"
    with pa.ipc.new_file(str(path), pa.schema({"x": pa.int64()})) as writer:
        writer.write_batch(pa.record_batch({"x": pa.array([1])}))
    sparse(path, path.read_bytes(), 2 << 30, (1 << 30).to_bytes(4, "little") + b"ARROW1")


@case("zarr.json|metadata")
def zarr_metadata_of_two_gigabytes(folder):
    """Write zarr metadata of two gigabytes."""
    (folder / "a.zarr").mkdir()
    sparse(folder / "a.zarr/zarr.json", b"{", 2 << 30)


@case("chunk")
def zarr_chunk_of_terabytes(folder):
    """Write zarr chunk of terabytes."""
    array = zarr.create_array(folder / "a.zarr", shape=(4,), dtype="u1", chunks=(4,), compressors=None)
    array[...] = 1
    path = folder / "a.zarr/zarr.json"
    path.write_text(re.sub(r'("chunk_shape":\s*\[\s*)4', rf"\g<1>{HUGE}", path.read_text()))


@case("meta.json")
def raw_description_of_two_gigabytes(folder):
    """Write raw description of two gigabytes."""
    (folder / "a.bin").write_bytes(bytes(12))
    sparse(folder / "meta.json", b"{", 2 << 30)


# Bombs ------------------------------------------------------------------------------------------------------------


def deflated(nbytes):
    """Return many zeros, deflated in small pieces so that they are nowhere in memory."""
    packer = zlib.compressobj(9)
    return b"".join([packer.compress(bytes(1 << 20)) for _ in range(nbytes >> 20)]) + packer.flush()


@case("cannot be|bytes")
def npz_that_claims_a_gigabyte(folder):
    """Write npz that claims a gigabyte."""
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy_bytes(np.zeros((30, 2))))
    data = path.read_bytes()
    at = data.rindex(b"PK\x01\x02") + 24
    path.write_bytes(data[:at] + (1 << 30).to_bytes(4, "little") + data[at + 4 :])


@case("deflate|expected")
def hdf5_chunk_of_a_gigabyte(folder):
    """Write hdf5 chunk of a gigabyte."""
    with h5py.File(folder / "a.h5", "w") as file:
        made = file.create_dataset("x", (4,), "f4", chunks=(4,), compression="gzip")
        made.id.write_direct_chunk((0,), deflated(1 << 30))


@case("cannot|expected|damaged")
def hdf5_chunk_of_blosc_that_claims_two_gigabytes(folder):
    """Write hdf5 chunk of blosc that claims two gigabytes."""
    import hdf5plugin

    with h5py.File(folder / "a.h5", "w") as file:
        made = file.create_dataset("x", (4,), "f4", chunks=(4,), **hdf5plugin.Blosc())
        made.id.write_direct_chunk((0,), struct.pack("<4B3I", 2, 1, 0x21, 4, (1 << 31) - 100, 1 << 20, 32) + bytes(16))


def bomb_of_zarr(folder, codec):
    """Write a store whose chunk of 32 bytes inflates to half a gigabyte."""
    path, big = folder / "a.zarr", folder.parent / f"bomb_of_{codec}.zarr"
    codecs = {"zstd": zarr.codecs.ZstdCodec, "gzip": zarr.codecs.GzipCodec, "blosc": zarr.codecs.BloscCodec}
    for place, count in ((path, 8), (big, 1 << 27)):
        store = zarr.create_array(place, shape=(count,), dtype="f4", chunks=(count,), compressors=codecs[codec]())
        store[:4] = 1
    (path / "c/0").write_bytes((big / "c/0").read_bytes())


@case("a.zarr")
def zarr_bomb_of_zstd(folder):
    """Write a chunk that zstd inflates."""
    bomb_of_zarr(folder, "zstd")


@case("a.zarr")
def zarr_bomb_of_gzip(folder):
    """Write a chunk that gzip inflates."""
    bomb_of_zarr(folder, "gzip")


@case("a.zarr")
def zarr_bomb_of_blosc(folder):
    """Write a chunk that blosc inflates."""
    bomb_of_zarr(folder, "blosc")


@case("decompress|damaged|buffer|bytes")
def arrow_buffer_of_terabytes(folder):
    """Write a compressed buffer that claims to be terabytes."""
    path = folder / "a.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(path), pa.schema({"x": pa.int64()}), options=options) as writer:
        writer.write_batch(pa.record_batch({"x": np.zeros(1000, np.int64)}))
    data = path.read_bytes()
    assert data.count((8000).to_bytes(8, "little")) == 1
    path.write_bytes(data.replace((8000).to_bytes(8, "little"), HUGE.to_bytes(8, "little")))


@case("cannot be decoded|damaged")
def parquet_page_of_two_gigabytes(folder):
    """Write parquet page of two gigabytes."""
    path = folder / "a.parquet"
    options = {"use_dictionary": False, "compression": "snappy", "write_statistics": False}
    pq.write_table(pa.table({"x": np.arange(1000)}), path, **options)
    data = path.read_bytes()
    # The header begins with the type of the page, and then, in three bytes, twice its size when it is decompressed.
    assert data[4:7] == b"\x15\x00\x15"
    end = next(i for i in range(7, 12) if data[i] < 128) + 1
    claim = b"\xfe\xff\xff\xff\x0f"
    path.write_bytes(data[:7] + claim + data[end : -500 - len(claim) + end - 7] + data[-500:])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Write all files, open and read each in one other process, and return what was said of each."""
    root = tmp_path_factory.mktemp("untrusted")
    todo = []
    for name, (write, _, options) in CASES.items():
        folder = root / name
        folder.mkdir()
        todo.append((name, str(write(folder) or folder), options))
    code = """
        import json, resource, sys, time
        import h5py, hdf5plugin, numcodecs.blosc, numcodecs.zstd, numpy as np, pyarrow.parquet, isal.isal_zlib
        import lazyshards
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        most = held + int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for name, path, options in json.loads(sys.argv[1]):
            began = time.process_time()
            try:
                ds = lazyshards.open_shards(path, engine="numpy", **options)
                said = ["no error", repr(ds[:2].compute())[:200]]
            except lazyshards.LazyShardsError as exc:
                said = ["told", str(exc)]
            except BaseException as exc:
                said = [type(exc).__name__, str(exc)[:500]]
            print(json.dumps([name, *said, time.process_time() - began]), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(todo), str(MOST_NBYTES)],
        env={**os.environ, "PYTHONPATH": str(Path(lazyshards.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    found = {name: said for name, *said in map(json.loads, done.stdout.splitlines())}
    return root, found, f"exit status {done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("name", CASES)
def test_refused(outcomes, name):
    """It is refused with an error of the package that says why, soon, and within little memory."""
    _, found, ended = outcomes
    assert name in found, ended
    kind, text, seconds = found[name]
    assert kind == "told", text
    assert re.search(CASES[name][1], text), text
    assert seconds < MOST_SECONDS


def test_nothing_ran(outcomes):
    """No code that stood in a file was run."""
    assert not (outcomes[0] / "ran").exists()
