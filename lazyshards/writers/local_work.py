"""Datasets that grow on this machine: in a directory beside the wanted one, which takes its place in one step."""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from lazyshards import catalog, manifest
from lazyshards.atomic import sync_directory, write_atomically
from lazyshards.errors import LayoutError
from lazyshards.formats import format_names, format_of_name
from lazyshards.layout import Layout
from lazyshards.writers.work import Work

__all__ = ["check_names", "check_rows", "has_manifest", "local_work", "remove"]

_STATE = "state.json"
_DATA = "data"


def check_names(names: Mapping[str, bool], place: str) -> None:
    """Raise FileExistsError unless all that a directory holds are shards and what belongs to them.

    Parameters
    ----------
    names : mapping from str to bool
        What it holds, and whether each is a directory.
    place : str
        Which, for the message.
    """
    for name, is_directory in names.items():
        known = format_of_name(name)
        is_store = known is not None and known.directories
        if known is None and name not in {manifest.NAME, "meta.json", "_SUCCESS"} and not name.startswith("."):
            raise FileExistsError(errno.EEXIST, f"it holds {name!r}, no shard: it is not replaced", place)
        if is_directory and not is_store:
            raise FileExistsError(errno.EEXIST, f"it holds the directory {name!r}: it is not replaced", place)


def check_rows(layout: Layout, rows: int) -> None:
    """Raise LayoutError unless all rows that were written are there."""
    if layout.rows != rows:
        raise LayoutError(f"{layout.rows:,} rows are in the shards that were written, expected {rows:,}")


def has_manifest(format: str) -> bool:
    """Return whether the shards of a format that were written get a manifest."""
    return format in format_names() and find_spec("pyarrow") is not None


class _LocalWork(Work):
    def __init__(
        self,
        root: str,
        place: str,
        named: str,
        wanted: Mapping[str, object],
        mark: str,
        *,
        overwrite: bool,
        seal: Callable[[str], None] | None,
    ) -> None:
        super().__init__(wanted, mark)
        self._named = named
        self._seal = seal
        self.folder = os.path.join(root, _DATA)
        self._place = place
        self._overwrite = overwrite
        self._state = os.path.join(root, _STATE)
        with contextlib.suppress(OSError), open(self._state, "rb") as file:
            self.take_over(file.read())
        if not self.shards:
            remove(self.folder)
        os.makedirs(self.folder, exist_ok=True)

    def stamp(self, name: str) -> tuple[object, ...]:
        try:
            status = os.stat(os.path.join(self.folder, name))
        except FileNotFoundError:
            return -1, 0, 0
        return status.st_size, status.st_mtime_ns, status.st_ino

    def save_state(self, state: bytes) -> None:
        write_atomically(self._state, state)

    def finish(self, names: list[str], format: str, rows: int) -> list[str]:
        keep = {*names, "meta.json"}
        for name in os.listdir(self.folder):  # shards of an earlier call, and unfinished ones
            if name not in keep:
                remove(os.path.join(self.folder, name))
        if format in format_names():
            layout = catalog.scan(self.folder, format=format, manifest="ignore")
            check_rows(layout, rows)
            if has_manifest(format):
                catalog.save_manifest(layout, folder=self.folder + "/")
        if self._seal is not None:
            self._seal(self.folder)
        sync_directory(self.folder)
        # From now on what is in the directory may be of another dataset.
        os.unlink(self._state)
        sync_directory(os.path.dirname(self._state))
        _put(self.folder, self._place, overwrite=self._overwrite)
        return [os.path.join(self._named, name) for name in names]


@contextlib.contextmanager
def local_work(
    place: str,
    wanted: Mapping[str, object],
    mark: str,
    *,
    overwrite: bool,
    seal: Callable[[str], None] | None = None,
) -> Iterator[Work]:
    """Open the directory beside the wanted one for this process alone; removed once the dataset is in its place."""
    named = place
    if os.path.islink(place) and os.path.isdir(place):  # what it leads to is replaced
        place = os.path.realpath(place)
    _check_place(place, overwrite=overwrite)
    root = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.lazyshards")
    while True:
        os.makedirs(root, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise FileExistsError(errno.EEXIST, "another process is writing these shards", place) from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(root).st_ino == os.fstat(fd).st_ino:
                break
        os.close(fd)
    try:
        yield _LocalWork(root, place, named, wanted, mark, overwrite=overwrite, seal=seal)
        shutil.rmtree(root)
    finally:
        os.close(fd)


def _check_place(place: str, *, overwrite: bool) -> None:
    """Raise unless a dataset may be put at a path."""
    if not os.path.lexists(place):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return
    if not os.path.isdir(place):
        raise FileExistsError(errno.EEXIST, "it is a file; expected a directory, or nothing", place)
    names = os.listdir(place)
    if names and not overwrite:
        raise FileExistsError(errno.EEXIST, "it holds files; pass overwrite=True to replace it", place)
    check_names({name: os.path.isdir(os.path.join(place, name)) for name in names}, place)
    if os.path.ismount(place):
        raise OSError(errno.EBUSY, "it is a mount point, which cannot be replaced: write to a directory in it", place)


def _put(data: str, place: str, *, overwrite: bool) -> None:
    """Give a complete directory its name, in one step."""
    try:
        os.rename(data, place)  # over nothing, or an empty directory
    except OSError as exc:
        if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST} or not overwrite:
            raise
        _check_place(place, overwrite=overwrite)
        _exchange(data, place)
    sync_directory(os.path.dirname(place))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange(data: str, place: str) -> None:
    """Let two directories change places, in one step where the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(
        _AT_FDCWD, os.fsencode(data), _AT_FDCWD, os.fsencode(place), ctypes.c_uint(_RENAME_EXCHANGE)
    ):
        return
    old = f"{data}.old"
    remove(old)
    os.rename(place, old)
    os.rename(data, place)


def remove(path: str) -> None:
    """Remove a file or a directory with all in it, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
