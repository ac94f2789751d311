"""What hostile data and hostile use must not do: end the process, hang it, or give a wrong row without a word."""

import random

import h5py
import numpy as np
import pytest

import lazyshards
from lazyshards import open_shards
from lazyshards.errors import LazyShardsError
from lazyshards.testing import assert_same

pytestmark = pytest.mark.usefixtures("on_numpy")

WHOLE = np.arange(60, dtype="f4").reshape(20, 3)

FORKS = """
    import faulthandler, os, sys, threading, warnings
    import numpy as np, numpy.ma, lazyshards
    whole = np.arange(120.0).reshape(-1, 3)
    np.save("shard_0.npy", whole)
    ds = lazyshards.open_shards(".", engine="numpy")
    rows = np.random.default_rng(0).permutation(40)
    ending = threading.Event()

    def read():
        while not ending.is_set():
            ds[rows].compute()
            list(ds.batches(7))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    ds[rows].compute()
    for _ in range(100):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: it is what is tried here
            child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(20, exit=True)
            right = np.array_equal(ds[rows].compute(), whole[rows])
            os._exit(0 if right and np.array_equal(np.concatenate(list(ds.batches(7))), whole) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            break
    ending.set()
    for thread in threads:
        thread.join()
    print(status)
"""


def test_children_forked_while_threads_read(child):
    """A child that is forked while other threads gather rows and take batches finds no lock that nobody opens."""
    assert child(FORKS).splitlines()[-1] == "0"


FULL = """
    import resource, signal, sys
    import numpy as np, lazyshards
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    compression = {"compression": "gzip"} if sys.argv[1] == "gzip" else {}
    try:
        lazyshards.write_shards(np.random.rand(20_000, 3), "set", format="hdf5", rows_per_shard=5_000, **compression)
    except OSError as exc:
        print("told", exc.errno)
"""


@pytest.mark.parametrize("most", [0, 1_000, 4_000, 100_000])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_full_disk_while_hdf5_is_written(child, tmp_path, compression, most):
    """A disk that is full is an error of the system for HDF5, too, whose library would else end the process."""
    assert child(FULL, compression, most).splitlines()[-1] == "told 27"
    assert not (tmp_path / "set").exists()


def write(kind, path):
    """Write the rows as one file of a kind; return its path and what it is opened with."""
    if kind == "npy":
        np.save(path / "a.npy", WHOLE)
        return path / "a.npy"
    if kind == "columns":
        np.save(path / "a.npy", np.asfortranarray(WHOLE))
        return path / "a.npy"
    if kind in {"npz", "deflated"}:
        (np.savez if kind == "npz" else np.savez_compressed)(path / "a.npz", x=WHOLE)
        return path / "a.npz"
    if kind == "chunked":
        with h5py.File(path / "a.h5", "w") as file:
            file.create_dataset("x", data=WHOLE, chunks=(4, 3), compression="gzip", shuffle=True, fletcher32=True)
        return path / "a.h5"
    return lazyshards.write_shards(WHOLE, path / "set", format=kind)[0]


def damage(chosen, data):
    """Return the bytes with a few of them flipped, lost, put in or set to extremes."""
    found = bytearray(data)
    at = chosen.choice([chosen.randrange(len(data)), chosen.randrange(min(128, len(data)))])
    match chosen.randrange(5):
        case 0:
            found[at] ^= 1 << chosen.randrange(8)
        case 1:
            found[at : at + 8] = chosen.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(7) + b"\x80"])
        case 2:
            del found[at:]
        case 3:
            del found[at : at + chosen.randrange(1, 64)]
        case 4:
            found[at:at] = chosen.randbytes(chosen.randrange(1, 64))
    return bytes(found)


@pytest.mark.parametrize("kind", ["npy", "columns", "npz", "deflated", "hdf5", "chunked", "parquet", "arrow"])
def test_damaged_files(kind, tmp_path):
    """A damaged file is refused with an error of the package, or gives the same rows however they are asked for."""
    path = write(kind, tmp_path)
    with open(path, "rb") as file:
        data = file.read()
    chosen = random.Random(kind)
    for _ in range(60):
        with open(path, "wb") as file:
            file.write(damage(chosen, data))
        try:
            ds = open_shards(path)
            if ds.nbytes > 1 << 20:
                ds = ds[:5]
            if ds.nbytes > 1 << 20:
                continue
            whole = ds.compute()
            backwards = ds[::-1].compute()
        except LazyShardsError:
            continue
        assert_same(backwards[::-1], whole)
