"""Shards on servers: a slice, a whole load and an opening, over S3 and HTTP, at several latencies."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.remote_server import KEY, REGION, SECRET, Server
from benchmarks.report import Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.options import Options

__all__ = ["run"]

_LATENCIES = (0, 20, 100)
"""Milliseconds added to each request."""
_ROW = 64
"""Elements of a row, of four bytes."""
_HEADER = 128
"""Bytes of the header of an npy file as small as these."""
_OBJECTS, _SMALL = 4, 16
_PIECE = 8 << 20
"""Bytes of a request where a peer does not choose."""
_THREADS = 16
_LIMIT = "limit: http.client readinto, 16 threads"
_OURS_S3, _OURS_HTTP = "lazyshards, s3://", "lazyshards, http://"


@dataclass(frozen=True, slots=True)
class _Data:
    """What lies on the server."""

    rows: int
    """Of each large object."""
    whole: np.ndarray
    """All rows of the large objects."""

    @property
    def object_nbytes(self) -> int:
        return self.rows * _ROW * 4

    def pieces(self, start: int, stop: int, most: int) -> list[tuple[int, int, int, int]]:
        """Return object, first and last byte in it, and place in the result, of bytes [start, stop) of all rows."""
        found = []
        for i in range(_OBJECTS):
            low, high = max(start, i * self.object_nbytes), min(stop, (i + 1) * self.object_nbytes)
            edges = [*range(low, high, most), high] if low < high else []
            for a, b in pairwise(edges):
                first = _HEADER + a - i * self.object_nbytes
                found.append((i, first, first + b - a, a - start))
        return found


def _make(folder: Path, nbytes: int) -> _Data:
    """Write the objects, if they are not there: a bucket ``lake`` with the large ones, the small ones, and a store."""
    rows = nbytes // _OBJECTS // (_ROW * 4)
    whole = np.arange(_OBJECTS * rows * _ROW, dtype="f4").reshape(-1, _ROW)
    if not (folder / "lake" / f"done-{rows}").exists():
        (folder / "lake" / "large").mkdir(parents=True, exist_ok=True)
        (folder / "lake" / "small").mkdir(exist_ok=True)
        for i, block in enumerate(np.split(whole, _OBJECTS)):
            np.save(folder / "lake" / "large" / f"shard_{i}.npy", block)
        for i in range(_SMALL):
            np.save(folder / "lake" / "small" / f"shard_{i:02}.npy", whole[i * 100 : (i + 1) * 100])
        _write_store(folder / "lake" / "store", whole)
        (folder / "lake" / f"done-{rows}").touch()
    return _Data(rows, whole)


def _write_store(path: Path, whole: np.ndarray) -> None:
    import zarr

    chunk = (max(1, _PIECE // (_ROW * 4)), _ROW)
    store = zarr.create_array(str(path), shape=whole.shape, chunks=chunk, dtype="f4", compressors=None, overwrite=True)
    store[:] = whole


# ---------------------------------------------------------------------------------------------- peers


def _options(server: Server) -> dict[str, Any]:
    return {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": server.url, "region_name": REGION}}


class _Buffers:
    """A result for each size, touched before, so that what is timed is the transfer."""

    def __init__(self) -> None:
        self._kept: dict[int, np.ndarray] = {}

    def rows(self, count: int) -> np.ndarray:
        if count not in self._kept:
            self._kept[count] = np.full((count, _ROW), -1, "f4")
        return self._kept[count]


def _limit(server: Server, data: _Data, buffers: _Buffers) -> Callable[[int, int], np.ndarray]:
    """Read by http.client over connections that stay open, straight into the result, in threads that stay, too."""
    own = threading.local()
    pool = ThreadPoolExecutor(_THREADS)

    def get(out: memoryview, piece: tuple[int, int, int, int]) -> None:
        i, first, stop, place = piece
        if not hasattr(own, "connection"):
            own.connection = HTTPConnection("127.0.0.1", server.port)
        headers = {"Range": f"bytes={first}-{stop - 1}"}
        own.connection.request("GET", f"/lake/large/shard_{i}.npy", headers=headers)
        answer = own.connection.getresponse()
        part = out[place : place + stop - first]
        while len(part):
            part = part[answer.readinto(part) :]

    def read(start: int, stop: int) -> np.ndarray:
        rows = buffers.rows(stop - start)
        out = memoryview(rows.reshape(-1).view("u1"))
        list(pool.map(partial(get, out), data.pieces(start * _ROW * 4, stop * _ROW * 4, _PIECE)))
        return rows

    return read


def _ours(url: str, options: dict[str, Any] | None, buffers: _Buffers) -> Callable[[int, int], np.ndarray]:
    import lazyshards

    ds = lazyshards.open_shards(url, storage_options=options, engine="numpy")

    def read(start: int, stop: int) -> np.ndarray:
        return np.asarray(ds[start:stop].compute(out=buffers.rows(stop - start)))

    return read


def _s3fs(server: Server, data: _Data, most: int) -> Callable[[int, int], np.ndarray]:
    """Read by s3fs, in ranges of at most that many bytes, put together by NumPy."""
    import s3fs

    fs = s3fs.S3FileSystem(**_options(server))

    def read(start: int, stop: int) -> np.ndarray:
        pieces = data.pieces(start * _ROW * 4, stop * _ROW * 4, most)
        names = [f"lake/large/shard_{i}.npy" for i, _, _, _ in pieces]
        found = fs.cat_ranges(names, [first for _, first, _, _ in pieces], [last for _, _, last, _ in pieces])
        return np.concatenate([np.frombuffer(part, "f4") for part in found]).reshape(-1, _ROW)

    return read


def _obstore(server: Server, data: _Data, buffers: _Buffers) -> Callable[[int, int], np.ndarray]:
    """Read by obstore in threads, and copy into the result."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "lake",
        endpoint=server.url,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region=REGION,
        client_options={"allow_http": True},
    )
    pool = ThreadPoolExecutor(_THREADS)

    def read(start: int, stop: int) -> np.ndarray:
        rows = buffers.rows(stop - start)
        out = rows.reshape(-1).view("u1")

        def get(piece: tuple[int, int, int, int]) -> None:
            i, first, last, place = piece
            part = obstore.get_range(store, f"large/shard_{i}.npy", start=first, end=last)
            out[place : place + last - first] = np.frombuffer(part, "u1")

        list(pool.map(get, data.pieces(start * _ROW * 4, stop * _ROW * 4, _PIECE)))
        return rows

    return read


def _tensorstore(server: Server) -> Callable[[int, int], np.ndarray]:
    """Read the same rows from a Zarr store of uncompressed chunks, as tensorstore reads no npy."""
    import tensorstore

    kvstore = {"driver": "http", "base_url": server.url, "path": "/lake/store/"}
    store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()

    def read(start: int, stop: int) -> np.ndarray:
        return np.asarray(store[start:stop].read().result())

    return read


def _readers(server: Server, data: _Data) -> tuple[dict[str, Callable[[int, int], np.ndarray]], dict[str, str]]:
    """Return the peers, and why others are absent."""
    buffers = _Buffers()
    makers: dict[str, Callable[[], Callable[[int, int], np.ndarray]]] = {
        _LIMIT: lambda: _limit(server, data, buffers),
        _OURS_S3: lambda: _ours("s3://lake/large", _options(server), buffers),
        _OURS_HTTP: lambda: _ours(f"{server.url}/lake/large/", None, buffers),
        "s3fs cat_ranges, whole": lambda: _s3fs(server, data, 1 << 62),
        "s3fs cat_ranges, 8 MiB": lambda: _s3fs(server, data, _PIECE),
        "obstore get_range, 16 threads": lambda: _obstore(server, data, buffers),
        "tensorstore, zarr3 over http": lambda: _tensorstore(server),
    }
    return _made(makers)


def _made(makers: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    made, absent = {}, {}
    for name, maker in makers.items():
        try:
            made[name] = maker()
        except ImportError as exc:
            absent[name] = f"not installed: {exc.name}"
    return made, absent


def _openers(server: Server) -> tuple[dict[str, Callable[[], int]], dict[str, str]]:
    """Return what opens the small shards, each as in a process of its own: nothing listed is kept."""

    def ours(url: str, options: dict[str, Any] | None) -> Callable[[], int]:
        import lazyshards

        return lambda: len(lazyshards.open_shards(url, storage_options=options, engine="numpy"))

    def by_s3fs() -> Callable[[], int]:
        import s3fs

        fs = s3fs.S3FileSystem(**_options(server), use_listings_cache=False)

        def opened() -> int:
            names = [name for name in fs.ls("lake/small", refresh=True) if name.endswith(".npy")]
            return _rows_of(fs.cat_ranges(names, [0] * len(names), [_HEADER] * len(names)))

        return opened

    def by_obstore() -> Callable[[], int]:
        import obstore
        from obstore.store import S3Store

        login = {"access_key_id": KEY, "secret_access_key": SECRET, "region": REGION}
        store = S3Store("lake", endpoint=server.url, client_options={"allow_http": True}, **login)
        pool = ThreadPoolExecutor(_THREADS)

        def opened() -> int:
            names = [found["path"] for found in obstore.list(store, "small").collect()]
            heads = pool.map(lambda name: bytes(obstore.get_range(store, name, start=0, end=_HEADER)), names)
            return _rows_of(list(heads))

        return opened

    return _made(
        {
            _OURS_S3: lambda: ours("s3://lake/small", _options(server)),
            _OURS_HTTP: lambda: ours(f"{server.url}/lake/small/", None),
            "s3fs ls, cat_ranges": by_s3fs,
            "obstore list, get_range": by_obstore,
        }
    )


def _rows_of(heads: Sequence[bytes]) -> int:
    """Return the rows that headers of npy files tell."""
    return sum(int(head.partition(b"'shape': (")[2].partition(b",")[0]) for head in heads)


# ---------------------------------------------------------------------------------------------- turns


def _in_turns(
    calls: Mapping[str, Callable[[], object]], turns: int, check: Callable[[object], bool]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time all turn by turn, the first not counted, each answer checked; return seconds, and who is wrong."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    wrong: dict[str, str] = {}
    for turn in range(turns + 1):
        for name, call in calls.items():
            if name in wrong:
                continue
            start = time.perf_counter()
            found = call()
            seconds = time.perf_counter() - start
            if not check(found):
                wrong[name] = "WRONG RESULT"
                del figures[name]
            elif turn:
                figures[name].append(seconds)
    return figures, wrong


def run(options: Options) -> Iterator[Table]:
    """Yield the tables of this benchmark."""
    folder = options.cache_dir / "remote"
    data = _make(folder, 64_000_000 if options.quick else 520_000_000)
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder))
        readers, absent = _readers(server, data)
        openers, others = _openers(server)
        for latency in _LATENCIES:
            server.delay(latency)
            yield from _reading(data, readers, absent, latency, options)
            yield _opening("a server of sendfile", openers, others, latency, options)
        small = stack.enter_context(Server(_small_only(folder), moto=True))
        openers, others = _openers(small)
        del openers[_OURS_HTTP]
        for latency in _LATENCIES:
            small.delay(latency)
            yield _opening("moto", openers, others, latency, options)


def _small_only(folder: Path) -> Path:
    """Return a folder with the small objects alone: moto copies what it holds at every answer."""
    place = folder.parent / "remote-small"
    shutil.copytree(folder / "lake" / "small", place / "lake" / "small", dirs_exist_ok=True)
    return place


def _reading(
    data: _Data, readers: Mapping[str, Any], absent: Mapping[str, str], latency: int, options: Options
) -> Iterator[Table]:
    total = len(data.whole)
    middle = data.rows
    for title, start, stop, bound, usual in (
        ("Slice of 4,000 rows over 2 objects", middle - 2_000, middle + 2_000, 1.1, 20 if latency < 50 else 7),
        (f"{data.whole.nbytes / 1e6:.0f} MB from {_OBJECTS} objects", 0, total, 1.4, 3 if latency else 5),
    ):
        calls = {name: partial(reader, start, stop) for name, reader in readers.items()}
        expected = data.whole[start:stop]
        figures, wrong = _in_turns(calls, options.turns(usual), lambda found, e=expected: np.array_equal(found, e))
        if stop - start == total:
            against = (_LIMIT,)  # at least 0.7 of its bytes a second
        else:
            against = tuple(name for name in figures if name not in {_OURS_S3, _OURS_HTTP, _LIMIT})
        targets = tuple(Target(name, "at most", bound, against) for name in (_OURS_S3, _OURS_HTTP))
        yield Table(
            f"{title}, {latency} ms added to each request",
            "ms",
            {name: [1e3 * seconds for seconds in values] for name, values in figures.items()},
            {**absent, **wrong},
            _LIMIT,
            targets,
            (),
        )


def _opening(
    where: str, openers: Mapping[str, Any], absent: Mapping[str, str], latency: int, options: Options
) -> Table:
    turns = options.turns(15 if latency < 50 else 7)
    figures, wrong = _in_turns(openers, turns, lambda rows: rows == _SMALL * 100)
    others = tuple(name for name in figures if name not in {_OURS_S3, _OURS_HTTP})
    return Table(
        f"Opening {_SMALL} npy shards, {where}, {latency} ms added to each request",
        "ms",
        {name: [1e3 * seconds for seconds in values] for name, values in figures.items()},
        {**absent, **wrong},
        "obstore list, get_range",
        tuple(Target(name, "at most", 1.1, others) for name in (_OURS_S3, _OURS_HTTP) if name in figures),
        (),
    )
