"""Whether files are still the ones that were opened, where something else than the storage reads them."""

from collections.abc import Sequence

from lazyshards.storage.base import Part, Stamp, Storage

__all__ = ["check_stamps"]


def check_stamps(files: Sequence[tuple[str, Stamp]], storage: Storage) -> None:
    """Raise, or warn, as the storage does, if a file is not the one that was opened.

    The storage compares the stamps of all that it reads: one byte of each file is read, so that it does so. An empty
    file has none, and nothing that could have been read.
    """
    parts = [Part(path, stamp, 0, memoryview(bytearray(1))) for path, stamp in files if stamp.size]
    if parts:
        storage.fetch_into(parts)
