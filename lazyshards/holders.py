"""What holds a shard: the file, or store, that a listing shows, and the file whose stamp is the shard's.

Mostly that is the shard itself. Of several datasets in one HDF5 file each is a shard, and of a Zarr store it is the
metadata that has a stamp. Whatever a shard needs of its own path is taken out before it is saved, and put back after.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lazyshards.details import options_of
from lazyshards.errors import ShardReadError
from lazyshards.formats.zarr import source_of_metadata
from lazyshards.formats.zarr_files import join
from lazyshards.formats.zarr_metadata import ZarrArray
from lazyshards.hashing import feed_file, hash_file, new_hasher
from lazyshards.layout import Decoded, Extents, Shard, Source
from lazyshards.storage.base import Stamp, Storage

__all__ = [
    "Store",
    "decode_store",
    "encode_store",
    "file_of",
    "hash_content",
    "in_file",
    "read_stores",
    "stamped_file",
    "stamped_paths",
    "store_source",
    "without_file",
]


_FILES_AT_A_TIME = 1024
"""Files of a store whose sizes are asked for together."""


class Store(NamedTuple):
    """What is saved of the array in a Zarr store."""

    inner: str
    """Its directory within the store; empty if it is the store."""
    name: str
    """Of its metadata file."""
    text: str
    """What that file holds."""

    @property
    def stamped(self) -> str:
        """Name of the metadata file within the store."""
        return f"{self.inner}/{self.name}".strip("/")


def file_of(path: str, source: Source) -> str:
    """Return the file that holds a shard: the shard's own path, or what its path begins with."""
    if isinstance(source, Extents):
        found = {extent.path for extent in source.extents}
    elif isinstance(source, Decoded):
        found = {getattr(source.detail, "path", "")}
    else:
        return path
    (file,) = found if len(found) == 1 else {""}
    return file if file and path.startswith(f"{file}::/") else path


def stamped_file(path: str, source: Source) -> str:
    """Return the file whose stamp is a shard's: of a store its metadata, else the file that holds the shard."""
    if isinstance(source, Decoded) and isinstance(source.detail, ZarrArray):
        return join(source.detail.folder, source.detail.metadata)
    return file_of(path, source)


def hash_content(path: str, source: Source, stamp: Stamp, storage: Storage, algorithm: str) -> bytes:
    """Return the digest of what holds a shard: of all bytes of a file, or of all files of the array in a store.

    Parameters
    ----------
    path : str
    source : Source
    stamp : Stamp
        The shard's own; files of a store that say other things are taken as they are.
    storage : Storage
    algorithm : str
        See `lazyshards.hashing.new_hasher`.

    Raises
    ------
    ShardReadError
        If it cannot be read, or is not what the stamp belongs to.
    """
    if not (isinstance(source, Decoded) and isinstance(source.detail, ZarrArray)):
        return hash_file(file_of(path, source), stamp, storage, algorithm)
    folder, metadata = source.detail.folder, stamped_file(path, source)
    hasher = new_hasher(algorithm)
    names = sorted(_files_in(folder, "", storage))
    for start in range(0, len(names), _FILES_AT_A_TIME):
        some = names[start : start + _FILES_AT_A_TIME]
        files = [join(folder, name) for name in some]
        for name, file, head in zip(some, files, storage.heads(files, 0), strict=True):
            if head.error is not None:
                raise ShardReadError(f"{file!r} cannot be read: {head.error.strerror or head.error}") from head.error
            hasher.update(f"{name}\0{head.stamp.size}\0".encode("utf-8", "surrogateescape"))
            feed_file(hasher, file, stamp if file == metadata else head.stamp, storage)
    return hasher.digest()


def _files_in(folder: str, within: str, storage: Storage) -> Iterator[str]:
    """Yield the names of all files below a directory, seen from it."""
    _, entries = storage.find(join(folder, within) if within else folder)
    for entry in entries:
        name = entry.path.partition("::")[0].rstrip("/").rpartition("/")[2]
        if entry.is_directory:
            yield from _files_in(folder, f"{within}{name}/", storage)
        else:
            yield within + name


def without_file(path: str, source: Source) -> Source:
    """Return the source of a shard without the path of the file that its own path begins with."""
    return in_file(source, "") if file_of(path, source) != path else source


def in_file(source: Source, file: str) -> Source:
    """Return the source of a shard that lies in a file with its path."""
    if isinstance(source, Extents):
        return Extents(tuple([extent._replace(path=file) for extent in source.extents]))
    if isinstance(source, Decoded) and hasattr(source.detail, "_replace"):
        return source._replace(detail=source.detail._replace(path=file))
    return source


def read_stores(shards: Sequence[Shard], storage: Storage) -> list[Store | None]:
    """Return what is saved of Zarr stores, read from their metadata; None of one that is not what it was.

    Parameters
    ----------
    shards : sequence of Shard
    storage : Storage
    """
    arrays = [shard.source.detail if isinstance(shard.source, Decoded) else None for shard in shards]
    files = [join(array.folder, array.metadata) if isinstance(array, ZarrArray) else "" for array in arrays]
    heads = storage.heads([file for file in files if file], 1)
    texts = storage.fetch([(file, 0, shard.stamp.size) for file, shard in zip(files, shards, strict=True) if file])
    known = iter(zip(heads, texts, strict=True))
    found: list[Store | None] = []
    for shard, array in zip(shards, arrays, strict=True):
        if not isinstance(array, ZarrArray):
            found.append(None)
            continue
        head, text = next(known)
        (link, _, rest), (own, _, _) = array.folder.partition("::"), shard.path.partition("::")
        is_same = head.error is None and head.stamp == shard.stamp and link.startswith(own) and "::" not in rest
        found.append(Store(link[len(own) :].strip("/"), array.metadata, text.decode()) if is_same else None)
    return found


def store_source(path: str, store: Store, options: str) -> Source:
    """Return the source of a Zarr store that was saved."""
    inner = [part for part in store.inner.split("/") if part]
    if ".." in inner or "/" in store.name:
        raise ValueError(f"it names {store.stamped!r}, expected a file in the store")
    folder = join(path, "/".join(inner)) if inner else path
    return source_of_metadata(store.name, folder, store.text, options_of(options))


def encode_store(store: Store, shared: dict[str, int]) -> str:
    """Return a store as text, metadata that several have once."""
    return json.dumps([store.inner, store.name, shared.setdefault(store.text, len(shared))])


def decode_store(text: str, shared: Sequence[str]) -> Store:
    """Return the store that a text stands for; ValueError if it stands for none."""
    inner, name, number = json.loads(text)
    if type(number) is not int or not 0 <= number < len(shared) or not isinstance(inner, str):
        raise ValueError(f"{text[:200]!r} is no store")
    return Store(inner, str(name), shared[number])


def stamped_paths(paths: Sequence[str], stamped: Mapping[str, str]) -> list[str]:
    """Return the files whose stamps are those of shards."""
    return [join(path, stamped[path]) if path in stamped else path for path in paths]
