"""Google's buckets, of an emulator: ``pip install gcsfs gcp-storage-emulator``, in an environment of its own."""

import os
import socket
from http.server import ThreadingHTTPServer

import numpy as np
import pytest

from lazyshards import open_shards, write_shards
from lazyshards.errors import LayoutError
from lazyshards.storage import open_storage
from lazyshards.testing import StorageConformance, assert_same, example_array, npy_bytes

# Else gcsfs asks Google, over gRPC, what kind of bucket it has; it looks when it is imported.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed: no gs://")
emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed: no GCS")
pytestmark = [pytest.mark.network, pytest.mark.usefixtures("on_numpy")]


@pytest.fixture(scope="module")
def options():
    """Give the options that lead to an emulator of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        # Its own server answers one connection at a time, and clients keep theirs.
        patch.setattr(emulator.server, "HTTPServer", ThreadingHTTPServer)
        server = emulator.create_server("127.0.0.1", port, in_memory=True)
        server.start()
        yield {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}", "project": "test"}
        server.stop()


@pytest.fixture
def bucket(options, request):
    """Give the emulator's file system, and a bucket that is this test's own."""
    fs = gcsfs.GCSFileSystem(**options, skip_instance_cache=True)
    box = f"box{abs(hash(request.node.nodeid)):x}"
    fs.mkdir(box)
    return fs, box


class TestGcs(StorageConformance):
    @pytest.fixture(autouse=True)
    def _server(self, bucket, options):
        self.fs, self.box = bucket
        self.options = options

    def make(self, root, files):
        for name, data in files.items():
            self.fs.pipe_file(f"{self.box}/set/{name}", data)
        storage, (place,) = open_storage([f"gs://{self.box}/set"], self.options, "raise")
        return storage, place

    def change(self, path, data):
        self.fs.pipe_file(path.removeprefix("gs://"), data)


def test_datasets(bucket, options):
    """Shards are written, read and replaced, and a manifest is fresh until an object changes."""
    fs, box = bucket
    whole = example_array((20, 3), "f4")
    url = f"gs://{box}/set"
    write_shards(whole + 1, url, rows_per_shard=4, storage_options=options)
    write_shards(whole, url, rows_per_shard=7, storage_options=options, overwrite=True)
    ds = open_shards(url, manifest="require", storage_options=options)
    assert len(ds.shards) == 3
    assert_same(ds[5:18].compute(), whole[5:18])
    fs.pipe_file(ds.shards[1].path.removeprefix("gs://"), npy_bytes(np.zeros((7, 3), "f4")))
    with pytest.raises(LayoutError, match="1 shard changed"):
        open_shards(url, manifest="require", storage_options=options)
