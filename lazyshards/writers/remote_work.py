"""Datasets that grow on a remote storage: shard by shard, behind a file that says so until all is there.

A shard is written on this machine and uploaded when it is finished, as object stores have no half objects. Directories
cannot change places there, so that a file marks the directory as unfinished: while it is there nobody opens it. It says
who writes, too: whoever begins takes it over, and a call that finds it taken ends, so that no rows are mixed.
"""

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping

from lazyshards import catalog, manifest
from lazyshards.errors import ShardReadError
from lazyshards.finding import Found
from lazyshards.formats import find_format, format_names
from lazyshards.storage import open_storage
from lazyshards.storage.fsspec_storage import FsspecStorage
from lazyshards.writers.local_work import check_names, check_rows, has_manifest, remove
from lazyshards.writers.work import Work

__all__ = ["remote_work"]

_SIDECAR = "meta.json"


class _RemoteWork(Work):
    def __init__(
        self,
        folder: str,
        place: str,
        storage: FsspecStorage,
        wanted: Mapping[str, object],
        mark: str,
        *,
        overwrite: bool,
    ) -> None:
        super().__init__(wanted, mark)
        self.folder = folder
        self._place = place
        self._storage = storage
        self._marker = f"{place}/{manifest.UNFINISHED}"
        self._format = str(wanted["format"])
        self._inside = "/zarr.json" if self._format == "zarr" else ""
        """File by which a store is known again: the one that is uploaded last."""
        held = self._listed()
        if held.pop(manifest.UNFINISHED, None) is not None:
            (head,) = storage.heads([self._marker], 0)
            (state,) = storage.fetch([(self._marker, 0, max(0, head.stamp.size))])
            self.take_over(state)
        elif held:
            if not overwrite:
                raise FileExistsError(errno.EEXIST, "it holds files; pass overwrite=True to replace it", place)
            check_names(held, place)
        self._storage.put(self._marker, self.state())
        if not self.shards:
            self._remove_all_but({manifest.UNFINISHED})

    def _listed(self) -> dict[str, bool]:
        """Return the names that are there, and whether each is a directory."""
        kind, entries = self._storage.find(self._place)
        if kind == "file":
            raise FileExistsError(errno.EEXIST, "it is a file; expected a directory, or nothing", self._place)
        if kind == "glob":
            raise ValueError(f"{self._place!r} is a pattern, expected a directory to write")
        return {path.rstrip("/").rpartition("/")[2]: is_directory for path, is_directory in entries}

    def _remove_all_but(self, names: set[str]) -> None:
        for name in self._listed().keys() - names:
            self._storage.remove(f"{self._place}/{name}")

    def stamp(self, name: str) -> tuple[object, ...]:
        (head,) = self._storage.heads([f"{self._place}/{name}{self._inside}"], 0)
        return (-1, 0, 0, "") if head.error is not None else tuple(head.stamp)

    def _check_mine(self) -> None:
        """Raise FileExistsError if another call has begun to write there since, or has ended."""
        mine = json.dumps({"writer": self.writer})[:-1].encode()
        (head,) = self._storage.heads([self._marker], len(mine))
        if head.error is not None and not isinstance(head.error, FileNotFoundError):
            raise ShardReadError(
                f"{self._marker!r} cannot be read: {head.error.strerror or head.error}"
            ) from head.error
        if head.data != mine:
            self._refuse()

    def _check_shards(self, names: list[str]) -> None:
        """Raise FileExistsError if a shard is not the one that was written."""
        heads = self._storage.heads([f"{self._place}/{name}{self._inside}" for name in names], 1)
        if [tuple(head.stamp) for head in heads] != [shard.stamp for shard in self.shards[: len(names)]]:
            self._refuse()

    def _refuse(self) -> None:
        text = "another call writes these shards, or has written them meanwhile: let one write at a time"
        raise FileExistsError(errno.EEXIST, text, self._place)

    def keep(self, name: str) -> None:
        self._check_mine()
        sidecar = os.path.join(self.folder, _SIDECAR)
        if os.path.exists(sidecar) and not self.shards:
            self._storage.put_file(f"{self._place}/{_SIDECAR}", sidecar)
        local = os.path.join(self.folder, name)
        for path in _files_of(local):
            self._storage.put_file(f"{self._place}/{name}{path.removeprefix(local)}", path)
        remove(local)

    def save_state(self, state: bytes) -> None:
        self._check_mine()
        self._storage.put(self._marker, state)

    def finish(self, names: list[str], format: str, rows: int) -> list[str]:
        self._check_mine()
        self._remove_all_but({*names, manifest.UNFINISHED, *([_SIDECAR] if format == "raw" else [])})
        paths = [f"{self._place}/{name}" for name in names]
        if format in format_names():
            found = Found(self._place, paths, find_format(format), self._storage, {}, None)
            layout = catalog.describe(found, "ignore")
            check_rows(layout, rows)
            if has_manifest(format):
                catalog.save_manifest(layout, folder=f"{self._place}/")
        self._check_shards(names)
        self._check_mine()
        self._storage.remove(self._marker)
        return paths


def _files_of(path: str) -> Iterator[str]:
    """Yield a file, or all that are in a store, the one that describes it last."""
    if os.path.isfile(path):
        yield path
        return
    found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    yield from sorted(found, key=lambda file: (os.path.basename(file) == "zarr.json", file))


@contextlib.contextmanager
def remote_work(
    url: str, options: Mapping[str, object] | None, wanted: Mapping[str, object], mark: str, *, overwrite: bool
) -> Iterator[Work]:
    """Begin a dataset at a URL, or go on with it; shards are written in a directory of this machine's own before."""
    storage, (place,) = open_storage([url], options, "raise")
    if not isinstance(storage, FsspecStorage):
        raise TypeError(f"{place!r} is a path of this machine")
    with tempfile.TemporaryDirectory(prefix="lazyshards-") as folder:
        yield _RemoteWork(folder, place.rstrip("/"), storage, wanted, mark, overwrite=overwrite)
