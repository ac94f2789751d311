"""Open a dataset on many ranks with one listing and one look at each shard: rank 0 hands the layout to the others.

Where that is little work, every rank does it by itself, which shows most. A rank to which the files look another way
than to rank 0, or that was given another path, always does. Whoever found the layout, all compare it before they go on.
"""

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from lazyshards import catalog
from lazyshards.details import names_function
from lazyshards.engines import ranks
from lazyshards.engines.collector import collector_off
from lazyshards.finding import address, locate
from lazyshards.holders import stamped_file
from lazyshards.layout import Layout
from lazyshards.storage import Storage

__all__ = ["scan_together"]

_BY_EACH = 4_096
"""Shards times ranks up to which every rank looks at all shards: what a file system or an object store bears well."""
_SAMPLED = 4_096
"""Stamps that all ranks together look at, of a layout that was handed over..."""
_SAMPLED_BY_ONE = range(4, 65)
"""...and how many each looks at, at least and at most."""


class _Offer(NamedTuple):
    """What rank 0 says once it has found the shards."""

    place: bytes
    """Digest of the paths, as the storage takes them, that it looked at."""
    layout: bytes
    """All of the layout but the storage, packed."""


def scan_together(path: object, *, engine: str, manifest: str, **given: Any) -> Layout:
    """Return the layout of the shards at ``path``, the same on every rank, or raise one error on all.

    Parameters
    ----------
    path : str, path or sequence of them
    engine : str
        What the dataset is for; with one that is each process's own, this is `lazyshards.catalog.scan`.
    manifest : {"auto", "require", "refresh", "ignore"}
        As for `lazyshards.open_shards`; only rank 0 writes one.
    **given
        All else that `lazyshards.catalog.scan` takes.

    Raises
    ------
    RankMismatchError
        If the ranks see different files.
    Exception
        What `lazyshards.catalog.scan` raises, if it does so on every rank.
    """
    if not ranks.is_shared(engine):
        with collector_off():  # it would look again and again at what is made for each shard
            return catalog.scan(path, manifest=manifest, **given)
    if isinstance(path, Iterator):
        path = list(path)
    with collector_off():
        work = (_as_first if ranks.is_first_rank() else _as_other)(path, manifest, given)
        return ranks.together(work, ranks.layout_facts, engine, what=f"opening {path!r:.200}")


def _as_first(path: object, manifest: str, given: Mapping[str, Any]) -> Callable[[], Layout]:
    """Look at the shards, tell the other ranks, and return what gives the layout, or raises what went wrong."""
    offer: _Offer | None = None
    layout: Layout | None = None
    error: Exception | None = None
    try:
        catalog.check_policy(manifest)
        found = locate(path, **given)
        count = len(found.paths) if found.saved is None else len(found.saved.layout)
        is_little = count * ranks.node_count() <= _BY_EACH
        if not is_little or manifest == "refresh":
            layout = catalog.describe(found, manifest)
        # A function that reads shards is known to each rank by its own look at them.
        if layout is not None and not is_little and not names_function(layout.options):
            offer = _Offer(_place(path, given)[1], _pack(layout))
    except Exception as exc:  # noqa: BLE001  # raised where the other ranks can be told of it
        error = exc
    ranks.from_first(offer)

    def work() -> Layout:
        if error is not None:
            raise error
        return catalog.describe(found, manifest) if layout is None else layout

    return work


def _as_other(path: object, manifest: str, given: Mapping[str, Any]) -> Callable[[], Layout]:
    """Wait for what rank 0 found, and return what gives that, or what is seen from here."""
    offer: _Offer | None = ranks.from_first(None)

    def work() -> Layout:
        taken = None if offer is None else _take(offer, path, given)
        # If one was to be written, rank 0 has done so by now.
        return taken or catalog.scan(path, manifest="auto" if manifest == "refresh" else manifest, **given)

    return work


def _take(offer: _Offer, path: object, given: Mapping[str, Any]) -> Layout | None:
    """Return the layout that was handed over; None if the files are not, or may not be, the same here."""
    storage, place = _place(path, given)
    if place != offer.place:
        return None
    layout = _unpack(offer.layout, storage)
    return layout if _looks_alike(layout) else None


def _place(path: object, given: Mapping[str, Any]) -> tuple[Storage, bytes]:
    """Return the storage of a path, and a digest of the path as the storage takes it."""
    storage, paths = address(path, given.get("storage_options"), given.get("on_change", "raise"))
    return storage, blake2b("\0".join(paths).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _pack(layout: Layout) -> bytes:
    """Return a layout without its storage, which each rank makes.

    Nothing of it is put into a file: what is unpacked was packed by rank 0 of this very run.
    """
    values = {field.name: getattr(layout, field.name) for field in fields(layout) if field.name != "storage"}
    return zlib.compress(pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL), 1)


def _unpack(packed: bytes, storage: Storage) -> Layout:
    """Return a layout that `_pack` packed on rank 0 of this run, with a storage of this rank's."""
    return Layout(storage=storage, **pickle.loads(zlib.decompress(packed)))  # noqa: S301  # rank 0's own


def _sample_size(count: int, total: int) -> int:
    """Return of how many shards each rank looks at the stamps."""
    return min(count, max(_SAMPLED_BY_ONE[0], min(_SAMPLED_BY_ONE[-1], _SAMPLED // total)))


def _looks_alike(layout: Layout) -> bool:
    """Return whether some of the shards, others on each rank, are the same files here, by size, time and inode."""
    count, total = len(layout), ranks.node_count()
    sampled = _sample_size(count, total)
    # Evenly spaced from the first to the last, but for a step that is each rank's own.
    spaced = np.linspace(0, count - 1, sampled).astype(np.int64)
    spaced[1:-1] += ranks.node_id() * (count // max(1, sampled)) // total
    numbers = np.unique(np.minimum(spaced, count - 1)).tolist()
    heads = layout.storage.heads([stamped_file(layout.path(i), layout.source(i)) for i in numbers], 0)
    return all(head.error is None and head.stamp == layout.stamp(i) for i, head in zip(numbers, heads, strict=True))
