"""Azure's blobs, of the emulator azurite: ``npm install azurite``, and its programs on the PATH; and adlfs."""

import shutil
import socket
import subprocess
import time

import numpy as np
import pytest

from lazyshards import open_shards, write_shards
from lazyshards.errors import LayoutError
from lazyshards.storage import open_storage
from lazyshards.testing import StorageConformance, assert_same, example_array, npy_bytes

adlfs = pytest.importorskip("adlfs", reason="adlfs is not installed: no abfs://")
pytestmark = [pytest.mark.network, pytest.mark.usefixtures("on_numpy")]

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account that every azurite has."""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Give the options that lead to an emulator of its own."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed: no Azure")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    command = [program, "--location", str(folder), "--blobPort", str(port), "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        place = f"http://127.0.0.1:{port}/devstoreaccount1"
        text = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={KEY};BlobEndpoint={place};"
        yield {"connection_string": text}
        server.kill()


@pytest.fixture
def azure(options, request):
    """Give the emulator's file system, and a container that is this test's own."""
    fs = adlfs.AzureBlobFileSystem(**options)
    box = f"box{abs(hash(request.node.nodeid)):x}"
    fs.mkdir(box)
    return fs, box


class TestAzure(StorageConformance):
    @pytest.fixture(autouse=True)
    def _server(self, azure, options):
        self.fs, self.box = azure
        self.options = options

    def make(self, root, files):
        for name, data in files.items():
            self.fs.pipe_file(f"{self.box}/set/{name}", data)
        storage, (place,) = open_storage([f"abfs://{self.box}/set"], self.options, "raise")
        return storage, place

    def change(self, path, data):
        self.fs.pipe_file(path.removeprefix("abfs://"), data)


def test_datasets(azure, options):
    """Shards are read and written, and a manifest is fresh until a blob changes."""
    fs, box = azure
    whole = example_array((20, 3), "f4")
    url = f"abfs://{box}/set"
    write_shards(whole, url, rows_per_shard=7, storage_options=options)
    ds = open_shards(url, manifest="require", storage_options=options)
    assert_same(ds[5:18].compute(), whole[5:18])
    assert KEY not in repr(ds) + repr(ds.shards)
    fs.pipe_file(f"{box}/set/shard_00001.npy", npy_bytes(np.zeros((7, 3), "f4")))
    with pytest.raises(LayoutError, match="1 shard changed"):
        open_shards(url, manifest="require", storage_options=options)
