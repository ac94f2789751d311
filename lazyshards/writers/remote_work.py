"""Datasets that grow on a remote storage: shard by shard, behind a file that says so until all is there.

A shard is written on this machine and uploaded when it is finished, as object stores have no half objects. Directories
cannot change places there, so that a file marks the directory as unfinished; see `lazyshards.unfinished`. It says who
writes, too: whoever begins takes it over, and a call that finds it taken ends, so that no rows are mixed.
"""

import contextlib
import errno
import json
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from lazyshards import catalog, manifest, unfinished
from lazyshards.errors import ShardReadError
from lazyshards.finding import Found
from lazyshards.formats import find_format, format_names
from lazyshards.storage import open_storage
from lazyshards.storage.fsspec_storage import FsspecStorage
from lazyshards.writers.local_work import check_names, check_rows, has_manifest, remove
from lazyshards.writers.work import Work, Written

__all__ = ["remote_work"]

_SIDECAR = "meta.json"
_MOST_UPLOADS = 4
_MOST_NBYTES = 128 << 20
"""Bytes of shards that are uploaded together: of a larger one fsspec's own client uploads several parts at a time."""


class _Pending(NamedTuple):
    """A shard on its way."""

    number: int
    nbytes: int
    upload: "Future[tuple[object, ...]]"


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
        self._marker = f"{place}/{unfinished.NAME}"
        self._format = str(wanted["format"])
        self._inside = "/zarr.json" if self._format == "zarr" else ""
        """File by which a store is known again: the one that is uploaded last."""
        self._uploads = ThreadPoolExecutor(_MOST_UPLOADS, "lazyshards-upload")
        self._pending: deque[_Pending] = deque()
        self._replaces, left = self._begin(self._listed(), overwrite=overwrite)
        self._storage.put(self._marker, self.state())
        for name in left:
            self._storage.remove(f"{place}/{name}")

    def _begin(self, held: Mapping[str, bool], *, overwrite: bool) -> tuple[unfinished.Replacement, list[str]]:
        """Take over what an earlier call for the same had written.

        Returns
        -------
        Replacement
            What is to be replaced when all is written.
        list of str
            Names of what is neither that nor taken over.
        """
        visible = [name for name in held if name[0] not in "._" and name != _SIDECAR]
        others = [name for name in held if name != unfinished.NAME]
        if unfinished.NAME not in held:
            if others and not overwrite:
                raise FileExistsError(errno.EEXIST, "it holds files; pass overwrite=True to replace it", self._place)
            check_names(held, self._place)
            if not visible:
                return unfinished.Replacement(), others
            return unfinished.begun(unfinished.tag_of(visible[0])), []
        (head,) = self._storage.heads([self._marker], 0)
        (state,) = self._storage.fetch([(self._marker, 0, max(0, head.stamp.size))])
        before = unfinished.parse(state)
        if before.tag and not overwrite:
            raise FileExistsError(errno.EEXIST, "it is being replaced; pass overwrite=True to go on", self._place)
        self.take_over(state)
        if self.shards:
            return before, []
        if not before.tag:
            return before, others
        left, old = before.tag, before.old
        if unfinished.is_replaced(before, f"{self._place}/", self._storage):
            left, old = old, left
        rest = [name for name in visible if unfinished.tag_of(name) == left]
        return (unfinished.begun(old), rest) if len(rest) < len(visible) else (unfinished.Replacement(), others)

    def name(self, number: int, suffix: str) -> str:
        """Return the name of a shard."""
        return unfinished.tagged(number, suffix, self._replaces.tag)

    def state(self, **more: str) -> bytes:
        """Return what `take_over` takes, and which dataset is replaced."""
        return super().state(**self._replaces._asdict(), **more)

    def _step(self, step: str) -> None:
        """Say which shards are the dataset."""
        self._replaces = self._replaces._replace(step=step)
        self.save_state(self.state())

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

    def add(self, number: int, name: str, rows: int, digest: str) -> None:
        """Upload a finished shard while the next is written, several small ones at a time."""
        nbytes = sum([os.path.getsize(path) for path in _files_of(os.path.join(self.folder, name))])
        while self._pending and (
            self._pending[0].upload.done()
            or len(self._pending) >= _MOST_UPLOADS
            or sum([each.nbytes for each in self._pending]) + nbytes > _MOST_NBYTES
        ):
            self._settle()
        upload = self._uploads.submit(self._upload, number, name)
        self.shards[number:] = [Written(rows, digest, ())]
        self._pending.append(_Pending(number, nbytes, upload))

    def _settle(self) -> None:
        """Wait until the upload that began first has ended, and save that it has."""
        number, _, upload = self._pending.popleft()
        self.shards[number] = self.shards[number]._replace(stamp=upload.result())
        self.save_state(self.state())

    def end(self, error: BaseException | None) -> None:
        """End the uploads: those under way are saved if the source was at fault, and left alone if an interrupt was."""
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                while self._pending:
                    self._settle()
        self._uploads.shutdown(wait=error is None or isinstance(error, Exception), cancel_futures=True)

    def _upload(self, number: int, name: str) -> tuple[object, ...]:
        self._check_mine()
        sidecar = os.path.join(self.folder, _SIDECAR)
        if os.path.exists(sidecar) and not number:
            self._storage.put_file(self._own_sidecar(), sidecar)
        local = os.path.join(self.folder, name)
        for path in _files_of(local):
            self._storage.put_file(f"{self._place}/{name}{path.removeprefix(local)}", path)
        remove(local)
        return self.stamp(name)

    def save_state(self, state: bytes) -> None:
        self._check_mine()
        self._storage.put(self._marker, state)

    def _own_sidecar(self) -> str:
        """Return where the description of these shards lies until they are the dataset."""
        return f"{self._place}/{f'_meta.{self._replaces.tag}.json' if self._replaces.tag else _SIDECAR}"

    def finish(self, names: list[str], format: str, rows: int) -> list[str]:
        while self._pending:
            self._settle()
        self._check_mine()
        replaces = bool(self._replaces.tag)
        keep = {*names, unfinished.NAME, *([_SIDECAR] if format == "raw" else [])}
        if not replaces:
            self._remove_all_but(keep)
        elif format == "raw" and self._replaces.step != "new":  # one file describes all shards, whosever they are
            self._step("closed")
            (head,) = self._storage.heads([self._own_sidecar()], 0)
            (described,) = self._storage.fetch([(self._own_sidecar(), 0, head.stamp.size)])
            self._storage.put(f"{self._place}/{_SIDECAR}", described)
        paths = [f"{self._place}/{name}" for name in names]
        if format in format_names():
            found = Found(self._place, paths, find_format(format), self._storage, {}, None)
            layout = catalog.describe(found, "ignore")
            check_rows(layout, rows)
            self._check_shards(names)
            self._check_mine()
            if has_manifest(format):
                catalog.save_manifest(layout, folder=f"{self._place}/")
                keep.add(manifest.NAME)
        if replaces:
            self._step("new")
            self._remove_all_but(keep)
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
        work = _RemoteWork(folder, place.rstrip("/"), storage, wanted, mark, overwrite=overwrite)
        try:
            yield work
        except BaseException as exc:
            work.end(exc)
            raise
        work.end(None)
