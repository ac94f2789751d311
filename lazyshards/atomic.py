"""Files of this machine that are the old one or the new one at every moment, whatever happens to who writes them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

__all__ = ["sync_directory", "write_atomically"]


def write_atomically(path: str, data: bytes) -> None:
    """Write a file of this machine so that at every moment, and after a crash, it is the old one or the new one.

    Writers of the same file wait for one another, so that what a killed one left is taken over by the next.
    """
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.tmp")
    with _locked(partial) as fd:
        os.ftruncate(fd, 0)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError as exc:  # of a full disk, say, which names no file
            raise OSError(exc.errno, exc.strerror, path) from exc
        os.replace(partial, path)
        sync_directory(folder)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Open a file to write, which nobody else has open this way; removed if an error ends the writing."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Whoever held it may have moved it into place meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                break
        os.close(fd)
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def sync_directory(folder: str) -> None:
    """Make what was renamed in a directory last, whatever happens to the machine."""
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
