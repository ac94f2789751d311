"""The saved form of a layout: one columnar file beside the shards, written at once or not at all.

It is an Arrow IPC file, so that a million shards are opened without making a million objects; what is in it, says
`manifest_bytes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lazyshards.atomic import write_atomically
from lazyshards.errors import LayoutError, ShardReadError
from lazyshards.holders import file_of
from lazyshards.layout import Layout
from lazyshards.manifest_bytes import NAME, Manifest, as_stored, decode, encode
from lazyshards.storage.base import Stamp, Storage

__all__ = [
    "NAME",
    "Differences",
    "Manifest",
    "compare",
    "decode",
    "encode",
    "folder_of",
    "read",
    "save",
]

_MAGIC = b"ARROW1"
_MOST_NBYTES = 64 << 30
_BESIDE = ("meta.json",)
"""Files beside the shards that say how those are read."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What is not as a manifest has it; all empty if nothing is."""

    added: Sequence[str] = ()
    """Paths that it does not know."""
    removed: Sequence[str] = ()
    """Paths that are not there any more."""
    changed: Sequence[str] = ()
    """Paths of files that are not the ones that were indexed."""
    other: str = ""
    """What else is wrong, in words."""

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.added or self.removed or self.changed or self.other)

    def __str__(self) -> str:
        """Return what changed, the first names spelled out."""
        texts = [self.other] if self.other else []
        for what in ("added", "removed", "changed"):
            paths = getattr(self, what)
            if paths:
                names = ", ".join([repr(path.rpartition("/")[2]) for path in paths[:3]])
                more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
                texts.append(f"{len(paths):,} shard{'s' * (len(paths) > 1)} {what} ({names}{more})")
        return "; ".join(texts)


def read(path: str, storage: Storage) -> Manifest:
    """Return the manifest at ``path``.

    Raises
    ------
    ShardReadError
        If it cannot be read.
    LayoutError
        If it is damaged; see `decode`.
    FormatError
        If pyarrow is not installed.
    """
    (head,) = storage.heads([path], len(_MAGIC))
    if head.error is not None:
        raise ShardReadError(f"{path!r} cannot be read: {head.error.strerror or head.error}") from head.error
    if head.data != _MAGIC or not 0 < head.stamp.size < _MOST_NBYTES:
        raise LayoutError(f"{path!r} begins with {head.data!r}, expected a manifest, an Arrow file ({_MAGIC!r})")
    (data,) = storage.fetch([(path, 0, head.stamp.size)])
    return decode(data, path, storage)


def save(
    layout: Layout, *, algorithm: str = "", hashes: npt.NDArray[np.uint8] | None = None, folder: str | None = None
) -> str:
    """Write the manifest of a layout beside its shards, at once or not at all, and return its path.

    An object store replaces an object at once, too; on other remote file systems one that was cut off is found damaged
    when it is read.

    Parameters
    ----------
    layout : Layout
    algorithm, hashes
        See `encode`.
    folder : str, optional
        Directory of the manifest, with the separator; by default that which all shards lie in.

    Raises
    ------
    LayoutError
        If the layout cannot be saved.
    OSError
        If the file cannot be written.
    """
    folder = folder_of(layout) if folder is None else folder
    beside = _beside_stamps(layout.storage, folder, layout.format)
    data = encode(layout, folder, beside=beside, algorithm=algorithm, hashes=hashes)
    path, put = layout.storage.local_path(folder + NAME), getattr(layout.storage, "put", None)
    if path is not None:
        write_atomically(path, data)
    elif put is not None:
        put(folder + NAME, data)
    else:
        raise LayoutError(f"the storage of {folder!r} cannot be written to, so that the shards have no manifest")
    return folder + NAME


def folder_of(layout: Layout) -> str:
    """Return the directory, with the separator, that all files and stores of a layout lie in."""
    layout = as_stored(layout)
    file = file_of(layout.path(0), layout.source(0)) if len(layout) else layout.root
    return layout.root if file.startswith(layout.root) else file[: file.rfind("/") + 1]


def _beside_stamps(storage: Storage, folder: str, format: str) -> dict[str, Stamp]:
    """Return the stamps of the files in a directory that say how the shards beside them are read."""
    if format != "raw":
        return {}
    heads = storage.heads([folder + name for name in _BESIDE], 0)
    return {name: head.stamp for name, head in zip(_BESIDE, heads, strict=True) if head.error is None}


def compare(
    manifest: Manifest, paths: Sequence[str], stamps: Sequence[Stamp | None], *, format: str, options: str
) -> Differences:
    """Return what differs between a manifest and what is there.

    Parameters
    ----------
    manifest : Manifest
    paths : sequence of str
        The shards that are there, in order.
    stamps : sequence of Stamp or None
        Their stamps; None of a file that cannot be looked at.
    format : str
        Name of the format that they would be read by.
    options : str
        Options of the format, as text.
    """
    layout = manifest.layout
    if layout.format != format:
        return Differences(other=f"it is of format {layout.format}, not {format}")
    if layout.options != options:
        return Differences(other=f"it was made with the options {layout.options or 'none'}, not {options or 'none'}")
    if _beside_stamps(layout.storage, manifest.folder, format) != manifest.beside:
        return Differences(other=f"{_BESIDE[0]!r}, which describes the shards, changed")
    saved, numbers = manifest.listed()
    if saved == list(paths):
        return Differences(changed=_changed(layout, numbers, paths, stamps))
    known = dict(zip(saved, numbers, strict=True))
    here = set(paths)
    both = [i for i, path in enumerate(paths) if path in known]
    found = Differences(
        added=[path for path in paths if path not in known],
        removed=[path for path in saved if path not in here],
        changed=_changed(layout, [known[paths[i]] for i in both], [paths[i] for i in both], [stamps[i] for i in both]),
    )
    return found or Differences(other="its shards are in another order")


def _changed(layout: Layout, numbers: Sequence[int], paths: Sequence[str], stamps: Sequence[Stamp | None]) -> list[str]:
    """Return the paths of the files whose stamps are not those of the layout's shards of these numbers."""
    if not len(paths):
        return []
    missing = Stamp(-2)
    sizes, mtimes, inodes, etags = zip(*[stamp or missing for stamp in stamps], strict=True)
    saved = layout.stamps if isinstance(numbers, range) else layout.stamps[np.array(numbers)]
    differs = (saved != np.array([sizes, mtimes, inodes], np.int64).T).any(1)
    if layout.etags is not None or any(etags):
        kept = layout.etags or [""] * len(layout)
        differs |= np.array([kept[n] != etag for n, etag in zip(numbers, etags, strict=True)])
    return [paths[i] for i in np.flatnonzero(differs).tolist()]
