"""Remote storage against real servers on loopback, which count what they are asked and fail as they are told."""

import errno
import io
import os
import pickle
import signal
import socket
import tarfile
import threading
import time
import traceback
import zipfile
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from urllib.parse import parse_qsl

import fsspec
import numpy as np
import pytest

from lazyshards import open_shards, write_shards
from lazyshards.cli import main
from lazyshards.errors import LayoutError, ShardChangedError, ShardChangedWarning, ShardReadError, ShardsNotFoundError
from lazyshards.manifest import NAME
from lazyshards.storage import LocalStorage, Part, direct, fsspec_storage, open_storage, readers
from lazyshards.storage.fsspec_storage import FsspecStorage
from lazyshards.storage.patience import Patience
from lazyshards.storage.retry import Retry
from lazyshards.storage.s3_listing import list_directory
from lazyshards.storage.signing import sign_first
from lazyshards.storage.transfers import run_coroutine
from lazyshards.testing import StorageConformance, assert_same, example_array, npy_bytes
from tests.servers import RangeServer, S3Server

pytestmark = [pytest.mark.network, pytest.mark.usefixtures("on_numpy")]
pytest.importorskip("aiohttp", reason="aiohttp is not installed: no HTTP")

QUICK = Retry(tries=4, first_seconds=0.001, most_seconds=0.01)
NONE_AT_ALL = Retry(tries=1)


@pytest.fixture
def http():
    """Give an HTTP server."""
    with RangeServer() as server:
        yield server


@pytest.fixture(scope="session")
def _s3():
    pytest.importorskip("moto", reason="moto is not installed: no S3 server")
    pytest.importorskip("s3fs", reason="s3fs is not installed: no S3")
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(_s3, request):
    """Give an S3 server, and the URL of a place in it that is this test's own."""
    _s3.fault = lambda seen, number: None
    _s3.forget()
    yield _s3
    _s3.fault = _s3.late = lambda seen, number: None


def shards_of(whole, *cuts):
    """Return the files of an array that is cut into shards."""
    return {f"shard_{i}.npy": npy_bytes(rows) for i, rows in enumerate(np.split(whole, list(cuts)))}


def parts_of(storage, wanted):
    """Return parts for each (path, offset, nbytes) and the buffers that they fill."""
    paths = list(dict.fromkeys(path for path, _, _ in wanted))
    stamps = {path: head.stamp for path, head in zip(paths, storage.heads(paths, 1), strict=True)}
    buffers = [bytearray(nbytes) for _, _, nbytes in wanted]
    return [
        Part(path, stamps[path], offset, memoryview(out))
        for (path, offset, _), out in zip(wanted, buffers, strict=True)
    ], buffers


# ------------------------------------------------------------------------------------------- conformance


class TestLocal(StorageConformance):
    def make(self, root, files):
        for name, data in files.items():
            (root / name).write_bytes(data)
        return LocalStorage(), str(root)

    def change(self, path, data):
        Path(path).write_bytes(data)


class TestMemory(StorageConformance):
    @pytest.fixture(autouse=True)
    def _clean(self, tmp_path):
        yield
        fs = fsspec.filesystem("memory")
        if fs.exists(str(tmp_path)):
            fs.rm(str(tmp_path), recursive=True)

    def make(self, root, files):
        fsspec.filesystem("memory").pipe({f"{root}/{name}": data for name, data in files.items()})
        storage, (place,) = open_storage([f"memory:/{root}"], None, "raise")
        return storage, place

    def change(self, path, data):
        fsspec.filesystem("memory").pipe(path, data)


class TestZip(StorageConformance):
    compression = zipfile.ZIP_STORED

    def make(self, root, files):
        self.archive = root / "a.zip"
        self.files = {f"set/{name}": data for name, data in files.items()}
        self._write()
        storage, (place,) = open_storage([f"zip://set::file://{self.archive}"], None, "raise")
        return storage, place

    def change(self, path, data):
        self.files[path.rpartition("zip://")[2]] = data
        self._write()

    def _write(self):
        new = self.archive.with_suffix(".new")
        with zipfile.ZipFile(new, "w", self.compression) as archive:
            archive.writestr("readme.txt", "hello")
            for name, data in self.files.items():
                archive.writestr(name, data)
        new.replace(self.archive)


class TestDeflatedZip(TestZip):
    compression = zipfile.ZIP_DEFLATED


class TestTar(TestZip):
    def make(self, root, files):
        self.archive = root / "a.tar"
        self.files = {f"set/{name}": data for name, data in files.items()}
        self._write()
        storage, (place,) = open_storage([f"tar://set::file://{self.archive}"], None, "raise")
        return storage, place

    def change(self, path, data):
        self.files[path.rpartition("tar://")[2]] = data
        self._write()

    def _write(self):
        new = self.archive.with_suffix(".new")
        with tarfile.open(new, "w") as archive:
            for name, data in self.files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                member.mtime = time.time_ns() // 10**9 + len(data)
                archive.addfile(member, io.BytesIO(data))
        new.replace(self.archive)


class TestSimpleCache(TestMemory):
    cache = "simplecache"

    def make(self, root, files):
        fsspec.filesystem("memory").pipe({f"{root}/set/{name}": data for name, data in files.items()})
        options = {self.cache: {"cache_storage": str(root / "cache")}}
        storage, (place,) = open_storage([f"{self.cache}::memory:/{root}/set"], options, "raise")
        return storage, place

    def change(self, path, data):
        fsspec.filesystem("memory").pipe(path.removeprefix(f"{self.cache}::"), data)


class TestFileCache(TestSimpleCache):
    cache = "filecache"


class TestHttp(StorageConformance):
    options = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _server(self):
        with RangeServer(**self.options) as self.server:
            yield

    def make(self, root, files):
        self.server.files = {f"/set/{name}": data for name, data in files.items()}
        storage, (place,) = open_storage([f"{self.server.url}/set/"], None, "raise")
        return storage, place.rstrip("/")

    def change(self, path, data):
        self.server.files[path.removeprefix(self.server.url)] = data
        self.server.modified += 1


class TestHttpWithoutRanges(TestHttp):
    options = MappingProxyType({"ranges": False})


class TestHttpWithoutLengths(TestHttp):
    options = MappingProxyType({"ranges": False, "lengths": False})


class TestHttpWithoutTags(TestHttp):
    options = MappingProxyType({"tags": False})


class TestS3(StorageConformance):
    @pytest.fixture(autouse=True)
    def _server(self, s3):
        self.server = s3

    def make(self, root, files):
        self.server.put("lake", {f"{root.name}/set/{name}": data for name, data in files.items()})
        storage, (place,) = open_storage([f"s3://lake/{root.name}/set"], self.server.options, "raise")
        return storage, place

    def change(self, path, data):
        self.server.put("lake", {path.removeprefix("s3://lake/"): data})


# ------------------------------------------------------------------------------------------- datasets


def test_memory_and_zip(tmp_path):
    """Exact rows from memory:// and zip://, as directory, glob and list, stored and compressed."""
    whole = example_array((45, 3), "f4")
    files = shards_of(whole, 3, 10, 20)
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/{tmp_path.name}/set/{name}": data for name, data in files.items()})
    urls = [f"memory://{tmp_path.name}/set{end}" for end in ("", "/", "/shard_*.npy")]
    for name, compression in (("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", compression) as archive:
            archive.writestr("readme.txt", "hello")
            for file, data in reversed(files.items()):
                archive.writestr(f"set/{file}", data)
        urls += [f"zip://set{end}::file://{tmp_path}/{name}.zip" for end in ("", "/shard_*.npy")]
    for url in urls:
        ds = open_shards(url)
        assert_same(ds.compute(), whole)
        assert_same(ds[8:22].compute(), whole[8:22])
    paths = [f"memory://{tmp_path.name}/set/shard_{i}.npy" for i in (2, 0)]
    assert_same(open_shards(paths).compute(), np.concatenate([whole[10:20], whole[:3]]))
    with pytest.raises(ShardsNotFoundError, match="none"):
        open_shards(f"memory://{tmp_path.name}/none")
    fs.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_from_many_threads(tmp_path, kind):
    """Threads that read one archive at a time each get their own member's rows."""
    whole = example_array((4000, 5), "i4")
    files = shards_of(whole, *range(250, 4000, 250))
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file, data in files.items():
                archive.writestr(f"set/{file}", data)
    else:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for file, data in files.items():
                member = tarfile.TarInfo(f"set/{file}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    ds = open_shards(f"{kind}://set::file://{tmp_path}/a.{kind}")
    wrong = []

    def read(seed):
        draws = np.random.default_rng(seed)
        for _ in range(10):
            start, stop = sorted(draws.integers(0, 4001, 2))
            if not np.array_equal(ds[start:stop].compute(), whole[start:stop]):
                wrong.append((start, stop))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_than_a_thousand_objects(s3):
    """A listing goes on after its first page, and the object that marks the directory is no shard."""
    s3.put("pages", {"set/": b"", **{f"set/part-{i:04d}.bin": b"%04d" % i for i in range(1005)}})
    storage, (place,) = open_storage(["s3://pages/set"], s3.options, "raise")
    s3.forget()
    kind, entries = storage.find(place)
    assert (kind, len(entries)) == ("directory", 1005)
    assert len(s3.seen) <= 4  # what is it, is it a directory, and two pages


def test_listings_of_s3_are_fresh(s3):
    """What another client uploaded, deleted or overwrote is seen by the next listing."""
    whole = example_array((9, 3), "f4")
    s3.put("fresh", {f"set/shard_{i}.npy": npy_bytes(whole[i : i + 1]) for i in range(3)})
    for url in ("s3://fresh/set", "s3://fresh/set/*.npy"):
        assert len(open_shards(url, storage_options=s3.options)) == 3
        s3.put("fresh", {"set/shard_3.npy": npy_bytes(whole[3:5])})
        assert len(open_shards(url, storage_options=s3.options)) == 5
        s3.client.delete_object(Bucket="fresh", Key="set/shard_3.npy")
        assert len(open_shards(url, storage_options=s3.options)) == 3
    s3.put("fresh", {"set/shard_2.npy": npy_bytes(whole[2:6])})
    assert_same(open_shards("s3://fresh/set/", storage_options=s3.options).compute(), whole[:6])


def test_an_opened_object_is_the_newest(s3):
    """A file object is of the object as it is, not as a listing once told."""
    s3.put("newest", {"set/a.bin": b"0123"})
    storage, (place,) = open_storage(["s3://newest/set"], s3.options, "raise")
    storage.find(place)
    s3.put("newest", {"set/a.bin": b"456789"})
    with storage.open(f"{place}/a.bin") as file:
        assert file.read() == b"456789"


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_http_dataset(http, ranges):
    """Exact rows over HTTP, from a page of links, a pattern, one file, and a list."""
    http.ranges = ranges
    whole = example_array((45, 3), "f4")
    http.files = {f"/set/{name}": data for name, data in shards_of(whole, 3, 10, 20).items()}
    for url in (f"{http.url}/set/", f"{http.url}/set/shard_*.npy"):
        assert_same(open_shards(url).compute(), whole)
    assert_same(open_shards(f"{http.url}/set/shard_1.npy").compute(), whole[3:10])
    paths = [f"{http.url}/set/shard_{i}.npy" for i in (2, 0)]
    assert_same(open_shards(paths)[5:12].compute(), np.concatenate([whole[15:20], whole[:2]]))


def test_an_archive_over_http(http, tmp_path):
    """A zip archive on a server is read there, and one that was replaced is told."""
    whole = example_array((20, 3), "f4")

    def publish(array):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for file, data in shards_of(array, 8).items():
                archive.writestr(f"set/{file}", data)
        http.files["/a.zip"] = (tmp_path / "a.zip").read_bytes()

    publish(whole)
    url = f"zip://set::{http.url}/a.zip"
    ds = open_shards(url)
    assert_same(ds.compute(), whole)
    publish(whole[::-1])
    with pytest.raises(ShardChangedError, match=r"shard_0\.npy"):
        ds.compute()
    assert_same(open_shards(url).compute(), whole[::-1])


def test_empty_files(http, s3):
    """A file without a byte, which has no range that could be asked for, is told from one that is missing."""
    http.files = {"/set/a.bin": b"", "/set/b.bin": b"1"}
    s3.put("empty", {"set/a.bin": b"", "set/b.bin": b"1"})
    for root, options in ((f"{http.url}/set", {}), ("s3://empty/set", s3.options)):
        storage = FsspecStorage(options)
        a, b, c = storage.heads([f"{root}/{name}.bin" for name in "abc"], 10)
        assert (a.data, a.stamp.size, a.error) == (b"", 0, None)
        assert (b.data, b.stamp.size, b.error) == (b"1", 1, None)
        assert isinstance(c.error, FileNotFoundError)
        assert storage.fetch([(f"{root}/a.bin", 0, 5), (f"{root}/b.bin", 1, 5)]) == [b"", b""]


@pytest.mark.parametrize("place", ["directory", "file", "list", "missing", "forbidden", "broken"])
def test_no_secret_is_shown(http, caplog, place):
    """A password and a signature in URLs work, and are in no text, error, cause or log of the package."""
    whole = example_array((20, 3), "f4")
    http.files = {f"/set/{name}": data for name, data in shards_of(whole, 8).items()}
    base = http.url.replace("://", "://ann:planted-1@")
    signed = "?X-Amz-Signature=planted-2"
    paths = {
        "directory": f"{base}/set/",
        "file": f"{base}/set/shard_0.npy{signed}",
        "list": [f"{base}/set/shard_{i}.npy{signed}{i}" for i in range(2)],
    }
    shown = []
    with caplog.at_level("DEBUG", logger="lazyshards"):
        try:
            if place == "missing":
                open_shards(f"{base}/none/a.npy{signed}")
            ds = open_shards(paths.get(place, paths["list"]))
            shown += [repr(ds), str(ds), repr(ds._layout) if hasattr(ds, "_layout") else ""]
            if place in {"forbidden", "broken"}:
                http.fault = lambda seen, number: 403 if place == "forbidden" else 400
            assert_same(ds.compute(), whole[:8] if place == "file" else whole)
        except (ShardReadError, ShardsNotFoundError) as exc:
            shown += traceback.format_exception(exc)
            assert place in {"missing", "forbidden", "broken"}
    text = "".join([*shown, caplog.text])
    assert "planted" not in text
    assert "ann:" not in text
    if place not in {"directory", "file", "missing"}:
        assert any("planted-2" in seen.path for seen in http.seen)


def test_any_registered_protocol(tmp_path):
    """A file system of the user's own, a few bytes at a time and then failing, is read as far as it works."""
    whole = example_array((24, 2), "f4")
    files = shards_of(whole, *range(4, 24, 4))
    broken = set()

    class File(io.RawIOBase):
        def __init__(self, name):
            self.name, self.data, self.at = name, files[name], 0

        def readable(self):
            return True

        def seekable(self):
            return True

        def seek(self, at, whence=0):
            self.at = at + (0, self.at, len(self.data))[whence]
            return self.at

        def readinto(self, out):
            if self.name in broken:
                raise OSError(5, "input/output error")
            data = self.data[self.at : self.at + min(len(out), 7)]
            out[: len(data)] = data
            self.at += len(data)
            return len(data)

    class Odd(fsspec.AbstractFileSystem):
        protocol, cachable = "odd", False

        def ls(self, path, detail=True, **kwargs):
            if not path.strip("/"):
                return [{"name": "box", "size": 0, "type": "directory"}]
            found = [
                {"name": f"box/{name}", "size": len(data), "type": "file"}
                for name, data in files.items()
                if path.strip("/") in {"box", f"box/{name}"}
            ]
            if not found:
                raise FileNotFoundError(path)
            return found if detail else [info["name"] for info in found]

        def _open(self, path, mode="rb", **kwargs):
            return File(path.rpartition("/")[2])

    fsspec.register_implementation("odd", Odd, clobber=True)
    ds = open_shards("odd://box")
    assert_same(ds.compute(), whole)
    broken.add("shard_3.npy")
    with pytest.raises(ShardReadError, match=r"odd://box/shard_3\.npy' cannot be read: input/output error"):
        ds.compute()
    assert_same(ds[:12].compute(), whole[:12])
    broken.clear()
    assert_same(ds.compute(), whole)


# ------------------------------------------------------------------------------------------- cost


def test_cost_over_http(http):
    """Opening costs a listing and a request a shard; a slice costs a request a shard and its own bytes; no HEAD."""
    whole = example_array((4000, 64), "f4")
    http.files = {f"/set/{name}": data for name, data in shards_of(whole, 1000, 2000, 3000).items()}
    ds = open_shards(f"{http.url}/set/")
    assert len(http.gets) == 1 + 4
    http.forget()
    assert_same(ds[900:1100].compute(), whole[900:1100])
    assert [seen.method for seen in http.seen] == ["GET", "GET"]
    assert http.sent_nbytes == 200 * 256


def test_cost_on_s3(s3):
    """Opening costs a listing and a request a shard; a slice costs a request a shard; no HEAD where none is needed."""
    whole = example_array((4000, 64), "f4")
    s3.put("cost", {f"set/{name}": data for name, data in shards_of(whole, 1000, 2000, 3000).items()})
    open_shards("s3://cost/set", storage_options=s3.options)
    s3.forget()
    ds = open_shards("s3://cost/set", storage_options=s3.options)
    assert sum(seen.path.endswith(".npy") for seen in s3.seen) == 4
    assert len(s3.seen) == 4 + 1
    s3.forget()
    assert_same(ds[900:1100].compute(), whole[900:1100])
    assert [seen.method for seen in s3.seen] == ["GET", "GET"]


def test_gaps_are_read_over(http):
    """Ranges within the gap limit are one request, with at most that many bytes too many; others are not."""
    http.files = {"/a.bin": bytes(1 << 20)}
    storage = FsspecStorage(gap_nbytes=1000)
    url = f"{http.url}/a.bin"
    parts, _ = parts_of(storage, [(url, 0, 100), (url, 1100, 100), (url, 2201, 100)])
    http.forget()
    storage.fetch_into(parts)
    assert sorted(seen.range for seen in http.seen) == ["bytes=0-1199", "bytes=2201-2300"]


def test_long_ranges_are_split(http):
    """A range above the limit is several requests, at most so many at a time as are allowed."""
    data = np.random.default_rng(0).bytes(1 << 20)
    http.files = {"/a.bin": data}
    http.fault = lambda seen, number: "slow"
    storage = FsspecStorage(request_nbytes=100_000, concurrency=4)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 5, 1_000_000)])
    http.forget()
    storage.fetch_into(parts)
    assert buffer == data[5:1_000_005]
    assert len(http.seen) == 10
    assert 2 <= http.most_at_a_time <= 4
    assert http.sent_nbytes == 1_000_000


def test_ranges_that_a_server_ignores_are_one_request(http):
    """Where each answer is the whole file anyway, it is asked for once a call, not once a range."""
    http.ranges = False
    http.files = {"/a.bin": bytes(range(256)) * 1000}
    storage = FsspecStorage(request_nbytes=1000, gap_nbytes=10)
    url = f"{http.url}/a.bin"
    parts, buffers = parts_of(storage, [(url, 5000, 3000), (url, 200_000, 10)])
    http.forget()
    storage.fetch_into(parts)
    assert len(http.seen) == 1
    assert buffers[0] == http.files["/a.bin"][5000:8000]
    assert buffers[1] == http.files["/a.bin"][200_000:200_010]


def test_a_range_answered_whole_now_and_then(http):
    """A server that ignores some ranges gives no wrong byte."""
    data = np.random.default_rng(0).bytes(5000)
    http.files = {"/a.bin": data}
    http.fault = lambda seen, number: "whole" if number % 3 == 1 else None
    storage = FsspecStorage(request_nbytes=500)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 700, 4000)])
    storage.fetch_into(parts)
    assert buffer == data[700:4700]


def test_a_host_that_ignored_a_range_once(http):
    """One answer that is the whole file does not have later ones be so: ranges are asked for still."""
    http.files = {"/a.bin": bytes(range(250)) * 4000}
    storage = FsspecStorage(request_nbytes=200_000)
    http.fault = lambda seen, number: "whole" if number == 0 else None
    for _ in range(3):
        http.forget()
        assert storage.fetch([(f"{http.url}/a.bin", 500_000, 100)]) == [http.files["/a.bin"][500_000:500_100]]
        http.fault = lambda seen, number: None
    assert [(seen.range, http.sent_nbytes) for seen in http.seen] == [("bytes=500000-500099", 100)]


def test_a_long_file_of_a_host_without_ranges(http, monkeypatch):
    """A file too long to be read whole is refused when it is opened, and not cut off."""
    for module in (fsspec_storage, readers):
        monkeypatch.setattr(module, "MOST_WHOLE_NBYTES", 1000)
    http.ranges = False
    http.files = {"/just.bin": bytes(1000), "/long.bin": bytes(1001)}
    storage = FsspecStorage()
    assert storage.open(f"{http.url}/just.bin").read() == bytes(1000)
    with pytest.raises(ShardReadError, match="1,001 bytes is too long to be read whole"):
        storage.open(f"{http.url}/long.bin")


@pytest.mark.parametrize("nbytes", [300, 300_000])
def test_fewer_bytes_than_asked_for(http, nbytes):
    """A range that is answered in part is asked for again, and is no sign that the file ends there."""
    http.files = {"/a.bin": bytes(range(250)) * 4000}
    storage = FsspecStorage(retry=QUICK)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 100, nbytes)])
    http.forget()
    http.fault = lambda seen, number: "less" if number < 2 else None
    storage.fetch_into(parts)
    assert buffer == http.files["/a.bin"][100 : 100 + nbytes]
    http.fault = lambda seen, number: "less"
    with pytest.raises(ShardReadError, match=rf"answered 'bytes 100-.*/1000000' where 100-{99 + nbytes} were asked"):
        storage.fetch_into(parts)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bytes 5-9/20", (5, 9, 20)),
        ("Bytes 5-9/*", (5, 9, -1)),
        ("bytes=5-9/20 ", (5, 9, 20)),
        *[
            (odd, (-1, -1, -1))
            for odd in ("", "bytes */20", "bytes x-9/20", f"bytes {'9' * 5000}-9/20", "bytes ²-9/20")
        ],
    ],
)
def test_what_an_answer_holds(text, found):
    """A header tells which bytes came, or nothing."""
    assert readers.parse_content_range(text) == found


def test_redirects(http):
    """A file and a directory that lie elsewhere are found there."""
    whole = example_array((20, 3), "f4")
    http.files = {f"/new/{name}": data for name, data in shards_of(whole, 8).items()}
    http.redirects = {"/old/shard_0.npy": "/new/shard_0.npy", "/new": "/new/"}
    assert_same(open_shards(f"{http.url}/old/shard_0.npy").compute(), whole[:8])
    assert_same(open_shards(f"{http.url}/new").compute(), whole)


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", ["reset", "short", "close", "slow", 503, 429, 500])
def test_passing_faults_of_http(http, fault):
    """A reset, a short body, a silent or slow server and a busy one are got over; every byte is right."""
    data = np.random.default_rng(0).bytes(200_000)
    http.files = {"/a.bin": data}
    storage = FsspecStorage(request_nbytes=50_000, retry=QUICK)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 100, 180_000)])
    http.forget()
    http.fault = lambda seen, number: fault if number in {0, 2} else None
    storage.fetch_into(parts)
    assert buffer == data[100:180_100]


def threads_of_ours():
    """Return the threads that the package made."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("lazyshards")}


@pytest.mark.parametrize("fault", ["reset", "short", "close", 503])
def test_faults_that_stay_are_told(http, fault):
    """A fault that does not pass is an error with the URL and what was tried, and the other requests end."""
    http.files = {"/a.bin": bytes(200_000)}
    storage = FsspecStorage(request_nbytes=50_000, retry=QUICK)
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, 200_000)])
    before, ours = threading.active_count(), threads_of_ours()
    http.fault = lambda seen, number: fault
    with pytest.raises(ShardReadError, match=r"/a\.bin' cannot be read: .*tried 4 times"):
        storage.fetch_into(parts)
    http.fault = lambda seen, number: None
    storage.fetch_into(parts)
    assert threading.active_count() <= before + 20  # the server's; ours are counted below
    assert threads_of_ours() <= ours


@pytest.mark.parametrize(("status", "match"), [(403, "permission denied"), (404, "not there"), (400, "400")])
def test_permanent_faults_are_not_tried_again(http, status, match):
    """What is forbidden, missing or wrong is told after one request."""
    http.files = {"/a.bin": bytes(1000)}
    storage = FsspecStorage(retry=QUICK)
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, 1000)])
    http.forget()
    http.fault = lambda seen, number: status
    with pytest.raises(ShardReadError, match=rf"a\.bin' cannot be read: .*{match}"):
        storage.fetch_into(parts)
    assert len(http.seen) == 1


@pytest.mark.parametrize("nbytes", [1_000, 1_000_000])
def test_a_body_that_drips_for_ever(http, nbytes):
    """A byte now and then is no answer: it is given up at the deadline, and the error says what came."""
    http.files = {"/a.bin": bytes(nbytes)}
    storage = FsspecStorage(retry=Retry(deadline_seconds=0.5))
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, nbytes)])
    http.fault = lambda seen, number: "drip"
    start = time.monotonic()
    with pytest.raises(ShardReadError, match=r"a\.bin' cannot be read: only [1-9]\d* bytes came in 0\.5 seconds"):
        storage.fetch_into(parts)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("nbytes", [1_000, 1_000_000])
def test_an_answer_that_never_comes(http, nbytes):
    """What does not answer at all is given up at the deadline, though a silence may last longer."""
    http.files = {"/a.bin": bytes(nbytes)}
    storage = FsspecStorage(retry=Retry(deadline_seconds=0.5))
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, nbytes)])
    release = threading.Event()
    http.fault = lambda seen, number: release.wait(10)
    start = time.monotonic()
    try:
        with pytest.raises(ShardReadError, match=r"a\.bin' cannot be read: "):
            storage.fetch_into(parts)
        assert time.monotonic() - start < 2
    finally:
        release.set()


def test_patience(monkeypatch):
    """It ends at the deadline, which begins anew whenever enough bytes came; a step is no longer than a silence."""
    now = 100.0
    monkeypatch.setattr("lazyshards.storage.patience.time", SimpleNamespace(monotonic=lambda: now))
    patience = Patience(60, 15)
    assert patience.left() == 15
    now = 150
    assert patience.left() == 10
    patience.note(300_000)
    now = 205
    assert patience.left() == 5
    patience.note(1_000)
    now = 211
    with pytest.raises(TimeoutError, match="only 1,000 bytes came in 60 seconds"):
        patience.left()
    assert Patience(60, unseen_nbytes=1 << 20).left() == 60 + 32


def test_opening_gets_over_faults(http):
    """A listing and headers that fail in passing are asked for again."""
    whole = example_array((20, 3), "f4")
    http.files = {f"/set/{name}": data for name, data in shards_of(whole, 8).items()}
    http.fault = lambda seen, number: 503 if number % 2 == 0 else None
    storage, (place,) = open_storage([f"{http.url}/set/"], None, "raise")
    assert len(storage.find(place)[1]) == 2


@pytest.mark.parametrize("fault", [503, 500, "short"])
def test_passing_faults_of_s3(s3, fault):
    """SlowDown, InternalError and a short body are got over."""
    data = np.random.default_rng(0).bytes(100_000)
    s3.put("faults", {"a.bin": data})
    storage = FsspecStorage(s3.options, request_nbytes=30_000, retry=QUICK)
    parts, (buffer,) = parts_of(storage, [("s3://faults/a.bin", 100, 90_000)])
    s3.forget()
    s3.fault = lambda seen, number: fault if number in {0, 2} else None
    storage.fetch_into(parts)
    assert buffer == data[100:90_100]


def test_permanent_faults_of_s3(s3):
    """A forbidden object is told at once, with its URL and without the keys."""
    s3.put("faults", {"a.bin": bytes(1000)})
    storage = FsspecStorage(s3.options, retry=QUICK)
    parts, _ = parts_of(storage, [("s3://faults/a.bin", 0, 1000)])
    s3.forget()
    s3.fault = lambda seen, number: 403
    with pytest.raises(ShardReadError, match=r"s3://faults/a\.bin' cannot be read: permission denied") as caught:
        storage.fetch_into(parts)
    assert len(s3.seen) == 2  # over a connection of our own, and once by s3fs, which knows what to say
    assert "planted" not in str(caught.value).lower()


# ------------------------------------------------------------------------------------------- changes


def test_an_object_replaced_while_it_is_read(http):
    """Old and new bytes of a file never come together: the change is seen in the answers themselves."""
    http.files = {"/a.bin": bytes(1000)}
    storage = FsspecStorage(request_nbytes=100, concurrency=1)
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, 1000)])
    http.forget()

    def fault(seen, number):
        if number == 5:
            http.files["/a.bin"] = bytes([1]) * 1000

    http.fault = fault
    with pytest.raises(ShardChangedError, match=r"a\.bin.*written to"):
        storage.fetch_into(parts)


def test_policies(http):
    """A changed file is refused, read with a warning, or read."""
    http.files = {"/a.bin": b"0123"}
    url = f"{http.url}/a.bin"
    parts, (buffer,) = parts_of(FsspecStorage(), [(url, 0, 4)])
    http.files["/a.bin"] = b"4567"
    with pytest.raises(ShardChangedError):
        FsspecStorage().fetch_into(parts)
    with pytest.warns(ShardChangedWarning, match=r"a\.bin"):
        FsspecStorage(on_change="warn").fetch_into(parts)
    assert buffer == b"4567"
    FsspecStorage(on_change="ignore").fetch_into(parts)
    http.files["/a.bin"] = b"89"
    with pytest.raises(ShardReadError, match="truncated"):
        FsspecStorage(on_change="ignore").fetch_into(parts)


# ------------------------------------------------------------------------------------------- processes


def test_interrupt(http):
    """An interrupt ends a read at once: no request is sent after it, nothing is written, and the storage works on."""
    http.files = {"/a.bin": bytes([1]) * 10_000}
    storage = FsspecStorage(request_nbytes=1000, concurrency=1)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 0, 10_000)])
    http.forget()
    release = threading.Event()

    def fault(seen, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
            release.wait(5)

    http.fault = fault
    try:
        with pytest.raises(KeyboardInterrupt):
            storage.fetch_into(parts)
    finally:
        release.set()
    assert bytes(buffer) == bytes([1]) * 2000 + bytes(8000)
    assert storage.fetch([(f"{http.url}/a.bin", 0, 3)]) == [bytes([1]) * 3]
    assert len(http.seen) == 4
    assert bytes(buffer) == bytes([1]) * 2000 + bytes(8000)
    storage.fetch_into(parts)
    assert bytes(buffer) == bytes([1]) * 10_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the very thing that is tested
def test_a_forked_process_reads_over_its_own_connections(http):
    """Parent and child read at the same time after a fork, each the right bytes."""
    data = np.random.default_rng(0).bytes(100_000)
    http.files = {"/a.bin": data}
    url = f"{http.url}/a.bin"
    storage = FsspecStorage(request_nbytes=5000)
    assert storage.fetch([(url, 7, 50_000)]) == [data[7:50_007]]
    pid = os.fork()
    if not pid:
        right = all(storage.fetch([(url, i, 50_000)]) == [data[i : i + 50_000]] for i in range(5))
        os._exit(0 if right else 1)
    assert all(storage.fetch([(url, i, 50_000)]) == [data[i : i + 50_000]] for i in range(5))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_local_caches(http, tmp_path):
    """A cache of fsspec's before the URL keeps files here: the second read asks the server for no data."""
    whole = example_array((20, 3), "f4")
    http.files = {f"/set/{name}": data for name, data in shards_of(whole, 8).items()}
    options = MappingProxyType({"simplecache": {"cache_storage": str(tmp_path)}})
    urls = [f"simplecache::{http.url}/set/shard_{i}.npy" for i in range(2)]
    ds = open_shards(urls, storage_options=options)
    assert_same(ds.compute(), whole)
    http.forget()
    assert_same(ds.compute(), whole)
    assert http.gets == []


def test_a_dataset_travels(s3):
    """A dataset over S3 pickles, options included, and its text holds none of them."""
    whole = example_array((20, 3), "f4")
    s3.put("travel", {f"set/{name}": data for name, data in shards_of(whole, 8).items()})
    ds = open_shards("s3://travel/set", storage_options=s3.options)
    again = pickle.loads(pickle.dumps(ds))  # noqa: S301  # our own
    assert_same(again[3:15].compute(), whole[3:15])
    assert "planted" not in (repr(again) + str(again)).lower()


# ------------------------------------------------------------------------------------------- direct connections


def test_s3_is_read_directly(s3, monkeypatch):
    """Ranges of S3 come over connections of our own, by signed URLs: s3fs is not asked for any."""
    whole = example_array((300, 64), "f4")
    s3.put("direct", {f"set/{name}": data for name, data in shards_of(whole, 100).items()})
    ds = open_shards("s3://direct/set", storage_options=s3.options)
    import s3fs

    real = s3fs.S3FileSystem._call_s3
    asked = []
    monkeypatch.setattr(
        s3fs.S3FileSystem, "_call_s3", lambda self, method, *a, **k: asked.append(method) or real(self, method, *a, **k)
    )
    assert_same(ds[50:150].compute(), whole[50:150])
    assert asked == []


@pytest.mark.parametrize("token", [None, "planted/token+of=a session"])
@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:9/some/where"])
def test_signatures_are_those_of_botocore(endpoint, token):
    """What signs the other URLs of a bucket makes the very URLs that botocore makes, in each style of address."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: no S3")
    client = {"region_name": "eu-central-1"} | ({"endpoint_url": endpoint} if endpoint else {})
    fs = s3fs.S3FileSystem(
        key="AKID",
        secret="planted-secret",
        token=token,
        client_kwargs=client,
        config_kwargs={"signature_version": "s3v4"},
        skip_instance_cache=True,
    )
    name = "set/shard_~1-2.npy"
    for _ in range(5):  # both within one second, sooner or later
        _, signer = run_coroutine(fs.loop, sign_first(fs, "lake", "a", None))
        theirs, _ = run_coroutine(fs.loop, sign_first(fs, "lake", name, None))
        ours = signer.sign(name)
        if dict(parse_qsl(ours))["X-Amz-Date"] == dict(parse_qsl(theirs))["X-Amz-Date"]:
            break
    assert ours.partition("?")[0] == theirs.partition("?")[0]
    assert dict(parse_qsl(ours)) == dict(parse_qsl(theirs))
    assert [signer.sign(odd) for odd in ("a b", "ä", "a//b", "../a", "a%20")] == [None] * 5


def test_signatures_are_not_shown():
    """What signs shows neither its key nor a session's token."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: no S3")
    fs = s3fs.S3FileSystem(key="AKIDPLANTED", secret="planted", token="planted-token", skip_instance_cache=True)
    fs.config_kwargs["signature_version"] = "s3v4"
    _, signer = run_coroutine(fs.loop, sign_first(fs, "lake", "a", None))
    assert "planted" in signer.sign("b")
    assert "planted" not in repr(signer).lower()
    assert repr(signer.key) not in repr(signer)


@pytest.mark.parametrize(
    ("options", "is_direct"),
    [
        ({"token": "a session's+/="}, True),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 7}}, True),
        ({"config_kwargs": {"s3": {"use_dualstack_endpoint": True}}}, True),
        ({"use_ssl": False}, True),
        ({"requester_pays": True}, False),  # a header that is signed would have to be sent
        ({"config_kwargs": {"signature_version": "s3"}}, False),
        ({"config_kwargs": {"proxies": {}}}, False),
        ({"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "x" * 32}}, False),
    ],
)
def test_options_of_s3(s3, options, is_direct):
    """What a signed URL cannot hold is left to s3fs; in either way all is found and read."""
    data = bytes(range(250)) * 4
    s3.put("options", {"set/a.bin": data, "set/b c.bin": data})
    storage = FsspecStorage({**s3.options, **options}, retry=QUICK)
    s3.forget()
    _, entries = storage.find("s3://options/set")
    assert [entry.path for entry in entries] == ["s3://options/set/a.bin", "s3://options/set/b c.bin"]
    assert storage.fetch([(entry.path, 10, 300) for entry in entries]) == [data[10:310]] * 2
    assert {seen.is_signed_url for seen in s3.seen} == {is_direct}


@pytest.mark.parametrize("status", [301, 307, 400, 403])
def test_signed_urls_that_are_refused(s3, status):
    """Of another region, at a wrong time, with expired keys: s3fs is asked, and says what it is if it is more."""
    data = bytes(range(250))
    s3.put("refusing", {"set/a.bin": data})
    storage = FsspecStorage({**s3.options, "max_concurrency": 11}, retry=QUICK)  # whose trust is its own
    s3.fault = lambda seen, number: status if seen.is_signed_url else None
    assert storage.find("s3://refusing/set")[0] == "directory"
    assert storage.fetch([("s3://refusing/set/a.bin", 0, 250)]) == [data]
    s3.fault = lambda seen, number: 403
    with pytest.raises(ShardReadError, match="cannot be read: permission denied"):
        storage.fetch([("s3://refusing/set/a.bin", 0, 250)])


def test_versions_on_s3(s3):
    """A version that is named in the URL is the one that is read."""
    s3.put("versions", {})
    s3.client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    version = s3.client.put_object(Bucket="versions", Key="a.bin", Body=b"first")["VersionId"]
    s3.client.put_object(Bucket="versions", Key="a.bin", Body=b"second")
    storage = FsspecStorage({**s3.options, "version_aware": True})
    paths = [f"s3://versions/a.bin?versionId={version}", "s3://versions/a.bin"]
    assert storage.fetch([(path, 0, 9) for path in paths]) == [b"first", b"second"]


def test_anonymous_urls():
    """Where nothing is signed the URL is the object's own."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: no S3")
    fs = s3fs.S3FileSystem(anon=True, client_kwargs={"endpoint_url": "http://127.0.0.1:9"}, skip_instance_cache=True)
    _, signer = run_coroutine(fs.loop, sign_first(fs, "lake", "a", None))
    assert signer.sign("set/b.npy") == "http://127.0.0.1:9/lake/set/b.npy"


def test_listings_are_those_of_s3fs(s3, monkeypatch):
    """A directory of a bucket is listed as s3fs lists it, odd names included, and s3fs is not asked."""
    names = ["a b.bin", "a+b.bin", "ä%20.bin", "a&b=c#d<e>.bin", "plain.bin", "inner/x.bin", "odd +/y.bin", ""]
    s3.put("listed", {f"set/{name}": name.encode() for name in names} | {"top.bin": b"1"})
    storage = FsspecStorage(s3.options)
    storage.fetch([("s3://listed/set/plain.bin", 0, 1)])
    mount, _ = storage._locate("s3://listed/set")
    keys = ("name", "type", "size", "ETag")
    for path in ("listed/set", "listed"):
        ours = list_directory(mount, path, NONE_AT_ALL, run_coroutine)
        theirs = mount.fs.ls(path, refresh=True, detail=True)
        assert sorted([info.get(key) or "" for key in keys] for info in ours) == sorted(
            [info.get(key) or "" for key in keys] for info in theirs
        )
    monkeypatch.setattr(mount.fs, "_call_s3", None)
    assert len(storage.find("s3://listed/set")[1]) == 7


def test_a_listing_that_is_refused(s3):
    """Where a signed URL lists nothing s3fs lists in its own way."""
    s3.put("unlisted", {"set/a.bin": b"1"})
    s3.fault = lambda seen, number: 403 if seen.is_signed_url else None
    kind, entries = FsspecStorage(s3.options, retry=QUICK).find("s3://unlisted/set")
    assert (kind, [entry.path for entry in entries]) == ("directory", ["s3://unlisted/set/a.bin"])


def test_many_short_answers(s3):
    """Heads that are asked for at once over open connections are right, though some fail and connections end."""
    files = {f"set/{i:02}.bin": b"%02d" % i * 50 for i in range(30)}
    s3.put("volley", files)
    storage = FsspecStorage(s3.options, retry=QUICK)
    paths = [f"s3://volley/{name}" for name in files]
    for fault in (None, 503, 404, "short"):
        for _ in range(3):
            s3.forget()
            s3.fault = lambda seen, number, fault=fault: fault if number in {1, 4, 9} and fault != 404 else None
            heads = storage.heads([*paths, "s3://volley/set/none"], 64)
            assert [head.data for head in heads[:-1]] == [data[:64] for data in files.values()]
            assert isinstance(heads[-1].error, FileNotFoundError)


def test_refused_signatures(s3):
    """Where a server refuses signed URLs s3fs reads in its own way, and after some calls nothing else is tried."""
    data = np.random.default_rng(0).bytes(1000)
    s3.put("refused", {"a.bin": data})
    storage = FsspecStorage(s3.options, retry=QUICK)
    parts, (buffer,) = parts_of(storage, [("s3://refused/a.bin", 100, 500)])
    s3.fault = lambda seen, number: 403 if seen.is_signed_url else None
    counts = []
    for _ in range(10):
        s3.forget()
        storage.fetch_into(parts)
        counts.append(len(s3.seen))
    assert buffer == data[100:600]
    assert counts == [2] * 8 + [1] * 2


def test_odd_names_on_s3(s3):
    """Names that a URL must escape are signed and read."""
    names = ["a b.bin", "a+b.bin", "ä%20?.bin", "a&b=c#d.bin"]
    s3.put("odd", {f"set/{name}": name.encode() for name in names})
    storage = FsspecStorage(s3.options)
    assert storage.fetch([(f"s3://odd/set/{name}", 1, 99) for name in names]) == [name.encode()[1:] for name in names]


@pytest.mark.parametrize(
    "fault", ["reset", "short", "close", "slow", 503, 429, 500, 404, "whole", "coded", "junk", "less"]
)
def test_passing_faults_of_large_answers(http, fault):
    """What fails in passing over connections of our own is got over, and what is no range is read in the other way."""
    data = np.random.default_rng(0).bytes(2_000_000)
    http.files = {"/a.bin": data}
    storage = FsspecStorage(request_nbytes=500_000, retry=QUICK)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 100, 1_800_000)])
    http.forget()
    http.fault = lambda seen, number: fault if number in {0, 2} else None
    storage.fetch_into(parts)
    assert buffer == data[100:1_800_100]


@pytest.mark.parametrize("fault", ["reset", "short", "close", 503])
def test_faults_of_large_answers_that_stay(http, fault):
    """A fault that does not pass is told as over any other connection, and no thread is left."""
    http.files = {"/a.bin": bytes(2_000_000)}
    storage = FsspecStorage(request_nbytes=500_000, retry=QUICK)
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, 2_000_000)])
    http.fault, ours = lambda seen, number: fault, threads_of_ours()
    with pytest.raises(ShardReadError, match=r"/a\.bin' cannot be read: .*tried 4 times"):
        storage.fetch_into(parts)
    assert threads_of_ours() <= ours
    http.fault = lambda seen, number: None
    storage.fetch_into(parts)


@pytest.mark.parametrize("status", [403, 404, 400])
def test_permanent_faults_of_large_answers(http, status):
    """What is forbidden, missing or wrong is asked for once more, in the other way, and then told."""
    http.files = {"/a.bin": bytes(1_000_000)}
    storage = FsspecStorage(retry=QUICK)
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, 1_000_000)])
    http.forget()
    http.fault = lambda seen, number: status
    with pytest.raises(ShardReadError, match=r"a\.bin' cannot be read"):
        storage.fetch_into(parts)
    assert len(http.seen) == 2


def test_large_answers_from_elsewhere(http):
    """A redirect is followed, and the user's headers go to another host no more."""
    data = np.random.default_rng(0).bytes(1_000_000)
    with RangeServer(files={"/new.bin": data}) as other:
        http.files = {"/near.bin": data}
        http.redirects = {"/old.bin": f"{other.url}/new.bin", "/far.bin": "/near.bin"}
        storage = FsspecStorage({"headers": {"Authorization": "Bearer planted"}})
        for name in ("old", "far"):
            (found,) = storage.fetch([(f"{http.url}/{name}.bin", 10, 900_000)])
            assert found == data[10:900_010]
        assert [seen.authorization for seen in http.seen] == ["Bearer planted"] * 3
        assert [seen.authorization for seen in other.seen] == [""]


@pytest.mark.parametrize("where", ["headers", "client_kwargs"])
def test_headers_stay_with_their_host(http, where, tmp_path):
    """Small reads, listings, files that are opened, and what lies in an archive: no header goes to another host."""
    whole = example_array((20, 3), "f4")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for file, data in shards_of(whole, 8).items():
            archive.writestr(f"set/{file}", data)
    headers = {"Authorization": "Bearer planted", "X-Key": "planted"}
    options = {"headers": headers} if where == "headers" else {"client_kwargs": {"headers": headers}}
    with RangeServer() as other:
        other.files = {f"/set/{name}": data for name, data in shards_of(whole, 8).items()}
        other.files["/a.zip"] = (tmp_path / "a.zip").read_bytes()
        http.redirects = {f"{path}": f"{other.url}{path}" for path in (*other.files, "/set/")}
        http.files = {"/near.npy": npy_bytes(whole)}
        http.redirects["/far.npy"] = "/near.npy"
        assert_same(open_shards(f"{http.url}/set/shard_1.npy", storage_options=options).compute(), whole[8:])
        storage, (place,) = open_storage([f"{http.url}/set/shard_0.npy"], options, "raise")
        with storage.open(place) as file:
            assert file.read(6) == b"\x93NUMPY"
        inside = open_shards(f"zip://set::{http.url}/a.zip", storage_options={"http": options})
        assert_same(inside.compute(), whole)
        assert {(seen.authorization, seen.secrets) for seen in http.seen} == {("Bearer planted", "planted")}
        assert {(seen.authorization, seen.secrets) for seen in other.seen} == {("", "")}
        http.forget()
        assert_same(open_shards(f"{http.url}/far.npy", storage_options=options).compute(), whole)
        assert {seen.secrets for seen in http.seen} == {"planted"}


def test_cookies_stay_with_their_host(http):
    """Cookies are the session's, for any host: a redirect to another one is refused, and says so."""
    data = npy_bytes(np.zeros(3))
    with RangeServer(files={"/a.npy": data}) as other:
        http.files = {"/near.npy": data}
        http.redirects = {"/a.npy": f"{other.url}/a.npy", "/far.npy": "/near.npy"}
        storage = FsspecStorage({"client_kwargs": {"cookies": {"key": "planted"}}}, retry=NONE_AT_ALL)
        with pytest.raises(ShardReadError, match="sends on to another host") as caught:
            storage.fetch([(f"{http.url}/a.npy", 0, 10)])
        assert "planted" not in str(caught.value)
        assert storage.fetch([(f"{http.url}/far.npy", 0, 10)]) == [data[:10]]
        assert other.seen == []


def test_large_answers_without_a_handle(http, monkeypatch):
    """Where no further connection can be opened, those of the file system's own client are used."""
    data = np.random.default_rng(0).bytes(1_000_000)
    http.files = {"/a.bin": data}
    storage = FsspecStorage(retry=QUICK)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 10, 900_000)])

    def connect(connection):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(HTTPConnection, "connect", connect)
    storage.fetch_into(parts)
    assert buffer == data[10:900_010]


@pytest.mark.parametrize("location", ["http://ann:sesame@127.0.0.1:9/a.bin", "http://[bad"])
def test_odd_redirects_of_large_answers(http, location):
    """A redirect to a URL with a password, or to none at all, is left to the other way; no message has the password."""
    http.files = {"/a.bin": bytes(1_000_000)}
    storage = FsspecStorage(retry=NONE_AT_ALL)
    parts, _ = parts_of(storage, [(f"{http.url}/a.bin", 0, 1_000_000)])
    http.forget()
    http.redirects = {"/a.bin": location}
    with pytest.raises(ShardReadError, match=r"a\.bin' cannot be read") as caught:
        storage.fetch_into(parts)
    assert len(http.seen) == 2
    assert "sesame" not in str(caught.value)


def test_a_redirect_to_less_safety(monkeypatch):
    """From https to http of the same host the user's headers do not go along."""
    asked = []

    def ask(connections, url, headers, interrupt, patience):
        asked.append((url, dict(headers)))
        return HTTPConnection("host"), SimpleNamespace(status=302, headers={"Location": "http://host/a"})

    monkeypatch.setattr(direct, "_ask", ask)
    route = direct.Route("https://host/a", {"X-Key": "planted"}, 0.0)
    with pytest.raises(direct.NotServedError):
        direct.read_direct(direct.Connections("http"), route, 0, 9, None, direct.Interrupt(), Patience(9))
    assert [(url, headers.get("X-Key")) for url, headers in asked[:2]] == [
        ("https://host/a", "planted"),
        ("http://host/a", None),
    ]


def test_a_connection_that_the_server_closed(http):
    """A connection that was left open and ended meanwhile costs no try."""
    data = np.random.default_rng(0).bytes(1_000_000)
    http.files = {"/a.bin": data}
    storage = FsspecStorage(retry=NONE_AT_ALL)
    assert storage.fetch([(f"{http.url}/a.bin", 0, 1_000_000)]) == [data]
    http.hang_up()
    assert storage.fetch([(f"{http.url}/a.bin", 0, 1_000_000)]) == [data]


def test_interrupt_of_large_answers(http):
    """An interrupt ends all requests at once; nothing is written after it, and no thread is left."""
    http.files = {"/a.bin": bytes([1]) * 4_000_000}
    storage = FsspecStorage(request_nbytes=1_000_000, concurrency=3)
    parts, (buffer,) = parts_of(storage, [(f"{http.url}/a.bin", 0, 4_000_000)])
    http.forget()
    release, ours = threading.Event(), threads_of_ours()

    def fault(seen, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        release.wait(5)

    http.fault = fault
    try:
        with pytest.raises(KeyboardInterrupt):
            storage.fetch_into(parts)
        assert threads_of_ours() <= ours
    finally:
        release.set()
    assert bytes(buffer) == bytes(4_000_000)
    http.fault = lambda seen, number: None
    storage.fetch_into(parts)
    assert bytes(buffer) == bytes([1]) * 4_000_000


# ------------------------------------------------------------------------------------------- writing


FORMATS = ("arrow", "hdf5", "npy", "parquet", "raw", "zarr")


@pytest.mark.parametrize("format", FORMATS)
def test_write_shards_to_s3(s3, format):
    """Every format is written to a bucket, with a manifest of files, and nothing else is left there."""
    whole = example_array((20, 3), "f4")
    s3.put("written", {})
    paths = write_shards(
        whole, f"s3://written/{format}/set", format=format, rows_per_shard=7, storage_options=s3.options
    )
    assert [path.rpartition("/")[0] for path in paths] == [f"s3://written/{format}/set"] * 3
    ds = open_shards(f"s3://written/{format}/set", manifest="require", storage_options=s3.options)
    assert_same(ds.compute(), whole)
    names = {path.rpartition("/")[2] for path in paths} | {NAME} | ({"meta.json"} if format == "raw" else set())
    found = s3.client.list_objects_v2(Bucket="written", Prefix=f"{format}/set/")["Contents"]
    assert {item["Key"].split("/")[2] for item in found} == names
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_shards(whole, f"s3://written/{format}/set", format=format, storage_options=s3.options)


def test_an_iterator_is_written_to_s3(s3):
    """Arrays from an iterator are cut into shards on the way."""
    s3.put("streamed", {})
    arrays = [np.full((i, 2), i, "i4") for i in range(1, 9)]
    write_shards(iter(arrays), "s3://streamed/set", rows_per_shard=10, storage_options=s3.options)
    assert_same(open_shards("s3://streamed/set", storage_options=s3.options).compute(), np.concatenate(arrays))


class Failing:
    """An array that cannot be read from some row on."""

    def __init__(self, array, until):
        self.array, self.until, self.shape, self.dtype = array, until, array.shape, array.dtype

    def __getitem__(self, rows):
        if rows.start >= self.until:
            raise ShardReadError("the disk is gone")
        return self.array[rows]


class Watched:
    """An array that tells which row is read next."""

    def __init__(self, array, tell):
        self.array, self.tell, self.shape, self.dtype = array, tell, array.shape, array.dtype

    def __getitem__(self, rows):
        self.tell(rows.start)
        return self.array[rows]


def test_unfinished_on_s3(s3):
    """What was cut off is not opened, says what to do, and is gone on with: finished shards are not sent again."""
    whole = example_array((20, 3), "f4")
    s3.put("unfinished", {})
    url = "s3://unfinished/set"
    with pytest.raises(ShardReadError, match="disk is gone"):
        write_shards(Failing(whole, 10), url, rows_per_shard=5, storage_options=s3.options)
    with pytest.raises(LayoutError, match=r"is being written, or was when that was cut off: call write_shards"):
        open_shards(url, storage_options=s3.options)
    s3.forget()
    write_shards(whole, url, rows_per_shard=5, storage_options=s3.options)
    sent = [seen.path for seen in s3.seen if seen.method == "PUT" and seen.path.endswith(".npy")]
    assert sorted(sent) == [f"/unfinished/set/shard_0000{i}.npy" for i in (2, 3)]
    assert_same(open_shards(url, manifest="require", storage_options=s3.options).compute(), whole)


@pytest.mark.parametrize(("at", "until"), [(0, 5), (5, 5), (5, 20), (15, 10), (15, 20)])
def test_two_writers_on_s3(s3, at, until):
    """Of two calls that write to one place, the one that began last ends well, the other with an error; rows unmixed.

    The second begins when the first is about to read row ``at``, and waits at row ``until`` for the first to end.
    """
    rows = np.arange(40.0).reshape(20, 2)
    bucket = f"writers-{at}-{until}"
    s3.put(bucket, {})
    write = partial(write_shards, path=f"s3://{bucket}/set", rows_per_shard=5, storage_options=s3.options)
    turn, ended = threading.Event(), threading.Event()

    def at_second(row):
        if row == until:
            turn.set()
            assert ended.wait(30)

    def at_first(row):
        if row == at and not second.ident:
            second.start()
            assert turn.wait(30)

    def begin_second():
        write(Watched(-rows, at_second))
        turn.set()

    second = threading.Thread(target=begin_second)
    with pytest.raises(FileExistsError, match="another call writes these shards"):
        write(Watched(rows, at_first))
    ended.set()
    second.join(30)
    assert_same(open_shards(f"s3://{bucket}/set", storage_options=s3.options).compute(), -rows)


def test_a_shard_replaced_while_others_are_written(s3):
    """A shard that somebody put in the place of one that was written is found at the end, and written again."""
    rows = np.arange(40.0).reshape(20, 2)
    s3.put("intruder", {})
    url = "s3://intruder/set"

    uploaded = threading.Event()

    def look(seen, number):
        if seen.path.endswith("shard_00001.npy") and seen.method in {"GET", "HEAD"}:
            uploaded.set()

    def intrude(row):
        if row == 15:
            assert uploaded.wait(30)
            s3.put("intruder", {"set/shard_00001.npy": npy_bytes(-rows[:5])})

    s3.late = look
    with pytest.raises(FileExistsError, match="another call writes these shards"):
        write_shards(Watched(rows, intrude), url, rows_per_shard=5, storage_options=s3.options)
    with pytest.raises(LayoutError, match="is being written"):
        open_shards(url, storage_options=s3.options)
    write_shards(rows, url, rows_per_shard=5, storage_options=s3.options)
    assert_same(open_shards(url, storage_options=s3.options).compute(), rows)


def test_uploads_side_by_side(s3):
    """A few shards are uploaded while the next are written, in whatever order they come to an end."""
    s3.put("parallel", {})
    now, most = set(), []

    def arrive(seen, number):
        if seen.method == "PUT" and seen.path.endswith(".npy"):
            now.add(seen.path)
            most.append(len(now))
            threading.Event().wait(0.05 if "0.npy" in seen.path else 0.02)

    s3.fault = arrive
    s3.late = lambda seen, number: now.discard(seen.path)
    write_shards(np.arange(40), "s3://parallel/set", rows_per_shard=3, storage_options=s3.options)
    assert 2 <= max(most) <= 4
    ds = open_shards("s3://parallel/set", manifest="require", storage_options=s3.options)
    assert_same(ds.compute(), np.arange(40))


def test_overwriting_on_s3(s3):
    """A dataset is replaced if that is asked for, and other files never are."""
    s3.put("replaced", {})
    url, options = "s3://replaced/set", s3.options
    write_shards(np.arange(30.0), url, rows_per_shard=3, storage_options=options)
    write_shards(np.arange(4), url, format="raw", overwrite=True, storage_options=options)
    assert_same(open_shards(url, manifest="require", storage_options=options).compute(), np.arange(4))
    s3.put("replaced", {"set/notes.txt": b"mine"})
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        write_shards(np.arange(4), url, overwrite=True, storage_options=options)
    assert s3.client.get_object(Bucket="replaced", Key="set/notes.txt")["Body"].read() == b"mine"


@pytest.mark.parametrize("fault", [503, 500])
def test_uploads_are_tried_again(s3, fault):
    """An upload that fails in passing is sent again; one that stays is an error that names the object."""
    bucket = f"uploads-{fault}"
    s3.put(bucket, {})
    number = iter(range(10_000))
    s3.fault = lambda seen, _: fault if seen.method == "PUT" and next(number) in {0, 2} else None
    write_shards(np.arange(9), f"s3://{bucket}/set", rows_per_shard=4, storage_options=s3.options)
    assert_same(open_shards(f"s3://{bucket}/set", storage_options=s3.options).compute(), np.arange(9))
    s3.fault = lambda seen, number: 403 if seen.method == "PUT" else None
    with pytest.raises(ShardReadError, match=r"s3://uploads-\d+/other/.*cannot be written: permission denied"):
        write_shards(np.arange(9), f"s3://{bucket}/other", storage_options=s3.options)


def test_convert_between_stores(s3, tmp_path, monkeypatch, capsys):
    """The command reads and writes URLs, logged in as the environment says."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    whole = example_array((20, 3), "f4")
    s3.put("commands", {f"npy/{name}": data for name, data in shards_of(whole, 8).items()})
    assert main(["convert", "s3://commands/npy", "s3://commands/raw", "--to", "raw", "--rows-per-shard", "6"]) == 0
    assert main(["index", "s3://commands/npy", "--content"]) == 0
    assert main(["verify", "s3://commands/npy", "--content"]) == 0
    assert main(["convert", "s3://commands/raw", str(tmp_path / "back")]) == 0
    assert_same(open_shards(tmp_path / "back").compute(), whole)
    assert "2 shards, 20 rows, 2 read to the end: sound" in capsys.readouterr().out


def test_writing_where_nothing_can_be_written(http):
    """A server that takes no files gives an error that names the URL."""
    http.files = {"/set/a.bin": b"0"}
    with pytest.raises((OSError, NotImplementedError), match=r"/none/"):
        write_shards(np.arange(3), f"{http.url}/none")


# ------------------------------------------------------------------------------------------- manifests


def test_manifest_on_s3(s3):
    """A manifest in a bucket is used while one listing shows the same entity tags; what changed is named."""
    whole = example_array((20, 3), "f4")
    s3.put("indexed", {f"set/{name}": data for name, data in shards_of(whole, 8, 15).items()})
    url, options = "s3://indexed/set", s3.options
    assert open_shards(url, storage_options=options).save_manifest(content=True) == f"{url}/{NAME}"
    s3.forget()
    ds = open_shards(url, manifest="require", storage_options=options)
    assert not [seen for seen in s3.seen if seen.path.endswith(".npy")]
    assert all(stamp.etag for stamp in (shard.stamp for shard in ds.shards))
    assert_same(ds[5:17].compute(), whole[5:17])
    by_name = open_shards(f"{url}/{NAME}", storage_options=options)
    assert by_name == ds
    s3.put("indexed", {"set/shard_1.npy": npy_bytes(whole[8:15] + 1)})
    with pytest.raises(LayoutError, match=r"1 shard changed \('shard_1\.npy'\)"):
        open_shards(url, manifest="require", storage_options=options)
    with pytest.raises(ShardChangedError):
        by_name.compute()
    s3.forget()
    again = open_shards(url, manifest="refresh", storage_options=options)
    assert_same(again.compute(), np.concatenate([whole[:8], whole[8:15] + 1, whole[15:]]))


# ------------------------------------------------------------------------------------------- dead servers


def test_a_dead_s3(monkeypatch):
    """An endpoint where nobody answers is told within the deadline, though three libraries try again."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    options = {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
    storage = FsspecStorage(options, retry=Retry(tries=3, first_seconds=0.01, deadline_seconds=5))
    start = time.monotonic()
    with pytest.raises(ShardReadError, match="tried 3 times"):
        storage.find("s3://lake/set")
    assert time.monotonic() - start < 5


def test_a_silent_s3():
    """One that takes connections and never answers is given up at the deadline, after one silence a try."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        options = {
            "key": "a",
            "secret": "b",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"},
            "config_kwargs": {"read_timeout": 1},
        }
        storage = FsspecStorage(options, retry=Retry(first_seconds=0.01, deadline_seconds=2))
        start = time.monotonic()
        with pytest.raises(ShardReadError, match=r"s3://lake/set' cannot be listed"):
            storage.find("s3://lake/set")
        assert time.monotonic() - start < 4


FEW_HANDLES = """
    import os, resource, sys
    import numpy as np, lazyshards
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ds = lazyshards.open_shards([f"{sys.argv[1]}/shard_{i}.npy" for i in range(150)], engine="numpy")
    print(np.array_equal(ds.compute(), np.arange(300.0)), len(os.listdir("/proc/self/fd")) < 48)
    order = np.random.default_rng(0).permutation(300)
    print(np.array_equal(ds[order].compute(), order), len(os.listdir("/proc/self/fd")) < 48)
"""


def test_more_shards_than_open_connections(http, child):
    """Connections take a part of the handles that the process may have, and leave some to others."""
    http.files = {f"/shard_{i}.npy": npy_bytes(np.arange(2.0 * i, 2.0 * i + 2)) for i in range(150)}
    assert child(FEW_HANDLES, http.url).split() == ["True"] * 4
