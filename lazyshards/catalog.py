"""From a path, a glob or a list to a layout: find the shards, inspect or recall them, check; all faults at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lazyshards import manifest as manifests
from lazyshards.details import options_of, options_text
from lazyshards.errors import FormatError, LayoutError, ShardChangedError, ShardReadError, ShardsNotFoundError
from lazyshards.finding import Found, locate, natural_key
from lazyshards.formats import find_format
from lazyshards.formats.base import Fault, describe_faults
from lazyshards.hashing import DIGEST_NBYTES, best_algorithm
from lazyshards.holders import file_of, hash_content, stamped_file, stamped_paths
from lazyshards.layout import MOST_AXES, Decoded, Layout, Shard
from lazyshards.manifest import Manifest
from lazyshards.storage import Stamp, Storage

__all__ = [
    "check_policy",
    "describe",
    "disagreements",
    "hash_shards",
    "natural_key",
    "refreshed",
    "save_manifest",
    "scan",
]


def scan(
    path: object,
    *,
    format: str | None = None,
    order: str = "natural",
    holes: str = "raise",
    on_change: str = "raise",
    storage_options: Mapping[str, object] | None = None,
    dtype: object = None,
    manifest: str = "auto",
    options: Mapping[str, object] | None = None,
) -> Layout:
    """Return the layout of the shards at ``path``.

    Parameters
    ----------
    path : str, path or sequence of them
        A directory, a glob, one file, or a list of files, which keeps its order.
    format : str, optional
        Name of the format; by default told by suffix, then by first bytes.
    order : {"natural", "name"}
        Numbers in names compared as numbers, or names compared as text.
    holes : {"raise", "ignore"}
        What to do if numbered names skip a number.
    on_change : {"raise", "warn", "refresh", "ignore"}
        What is done about a shard that changed since it was opened.
    storage_options : mapping, optional
        For fsspec.
    dtype : dtype, optional
        What the elements are cast to, where that is safe; or, for a format whose files do not say it, what they are.
    manifest : {"auto", "require", "refresh", "ignore"}
        What to do about a saved manifest; see :func:`lazyshards.open_shards`.
    options : mapping, optional
        For the format.

    Raises
    ------
    ShardsNotFoundError, FormatError, LayoutError, ShardReadError
    """
    check_policy(manifest)
    found = locate(
        path,
        format=format,
        order=order,
        holes=holes,
        on_change=on_change,
        storage_options=storage_options,
        dtype=dtype,
        options=options,
    )
    return describe(found, manifest)


def check_policy(manifest: str) -> None:
    """Raise ValueError if this is no policy about manifests."""
    if manifest not in ("auto", "require", "refresh", "ignore"):
        raise ValueError(f'manifest={manifest!r} is not a policy: use "auto", "require", "refresh" or "ignore"')


def describe(found: Found, manifest: str) -> Layout:
    """Return the layout of shards that were found: by their manifest, if there is one and it may be used, or headers.

    Parameters
    ----------
    found : Found
    manifest : {"auto", "require", "refresh", "ignore"}
        See `scan`, which raises the same errors.
    """
    if found.saved is not None:
        return _open_manifest(found, manifest)
    if manifest == "ignore" or (not found.manifest and manifest == "auto"):
        return _inspect(found)
    return _use_manifest(found, manifest)


def _inspect(found: Found) -> Layout:
    """Return the layout of the files, if every one is a shard and all agree."""
    return _agreed(found, found.reader.inspect(found.paths, found.storage, found.options))


def _agreed(found: Found, described: Sequence[Shard | Fault]) -> Layout:
    """Return the layout of what was found in the files, if every one is a shard and all agree."""
    dtype = found.dtype
    faults = [shard for shard in described if isinstance(shard, Fault)]
    shards = [shard for shard in described if isinstance(shard, Shard)]
    faults += disagreements(shards, dtype)
    if not faults and shards and len(shards[0].row_shape) >= MOST_AXES:
        axes = 1 + len(shards[0].row_shape)
        faults = [Fault(shard.path, f"has {axes} axes, expected at most the {MOST_AXES} of NumPy") for shard in shards]
    total = sum([shard.rows for shard in shards])
    if total >= 1 << 63:  # only rows without elements can be so many
        raise LayoutError(f"{shards[0].path!r} and the others hold {total:,} rows together, expected less than 2**63")
    if not faults:
        text = options_text(found.options)
        return Layout.from_shards(shards, found.reader.name, found.storage, dtype=dtype, options=text)
    some = f"{len(faults):,} of {len(described):,} shards" if len(described) > 1 else "the shard"
    message = describe_faults(faults, f"{some} cannot be opened")
    if message.endswith(" more"):
        message += "; `lazyshards verify` lists all of them"
    errors = [fault.error for fault in faults]
    if all(isinstance(error, FileNotFoundError) for error in errors):
        raise ShardsNotFoundError(message) from errors[0]
    if all(error is not None for error in errors):
        raise ShardReadError(message) from errors[0]
    raise LayoutError(message)


def disagreements(shards: Sequence[Shard], dtype: np.dtype[np.generic] | None) -> list[Fault]:
    """Return a fault for each shard that cannot be of one dataset with most of them.

    Parameters
    ----------
    shards : sequence of Shard
    dtype : dtype or None
        What all are cast to, if they are.
    """
    return _disagreements(shards) if dtype is None else _unsafe_casts(shards, dtype)


# Saved manifests -------------------------------------------------------------------------------------------------


def _use_manifest(found: Found, policy: str) -> Layout:
    """Return the layout that the manifest beside the shards has, if it is fresh; else do as the policy says."""
    if not found.manifest:
        if policy == "require":
            raise ShardsNotFoundError(
                f"{found.place!r} holds no {manifests.NAME}; write one with `lazyshards index` or save_manifest(), or "
                'leave out manifest="require"'
            )
        layout = _inspect(found)
        save_manifest(layout, folder=found.folder or None)
        return replace(layout, manifest="a new one was written")
    stale = ""
    saved: Manifest | None = None
    known: Layout | None = None
    differences = manifests.Differences(other="it cannot be used")
    try:
        saved = manifests.read(found.manifest, found.storage)
        text = options_text(found.options)
        stamps = _stamps_now(found, saved)
        differences = manifests.compare(saved, found.paths, stamps, format=found.reader.name, options=text)
        stale = str(differences)
        known = None if stale else _cast(saved, found.dtype)
    except (FormatError, LayoutError, ShardReadError) as exc:
        stale = str(exc)
    if known is not None:
        return replace(known, manifest="its headers were not read again, as no file changed")
    if policy == "require" and stale:
        raise LayoutError(
            f"{found.manifest!r} is stale: {stale}; write it again with `lazyshards index`, or open with "
            'manifest="refresh", or with "auto" to do without it'
        )
    if not stale:
        return _inspect(found)  # it is fresh, and leaves the headers to be read
    layout = (policy == "refresh" and saved is not None and _inspect_some(found, saved, differences)) or _inspect(found)
    if policy == "refresh":
        algorithm, hashes = _hashed_again(layout, saved)
        manifests.save(layout, folder=found.folder, algorithm=algorithm, hashes=hashes)
        return replace(layout, manifest=f"written again: {stale}")
    return replace(layout, manifest=f"not used: {stale}")


def _inspect_some(found: Found, saved: Manifest, differences: manifests.Differences) -> Layout | None:
    """Return the layout of the files, of which only those that changed are looked at; None if that does not do."""
    if differences.other or not saved.is_complete or saved.inner is not None:
        return None
    wanted = {*differences.added, *differences.changed}
    kept = [path for path in found.paths if path not in wanted]
    if not kept:
        return None
    numbers = dict(zip(*saved.listed(), strict=True))
    before = saved.layout.shards
    # One that is known is looked at as well: the others are to be taken as it was.
    looked_at = [kept[0], *[path for path in found.paths if path in wanted]]
    described = found.reader.inspect(looked_at, found.storage, found.options)
    if len(described) != len(looked_at) or described[0] != before[numbers[kept[0]]]:
        return None
    anew = dict(zip(looked_at, described, strict=True))
    return _agreed(found, [anew[path] if path in anew else before[numbers[path]] for path in found.paths])


def _open_manifest(found: Found, policy: str) -> Layout:
    """Return the layout of a manifest that was asked for by its own name: what it lists is the dataset."""
    saved = found.saved
    assert saved is not None
    if policy == "ignore":
        raise ValueError(f'manifest="ignore" makes no sense for {saved.path!r}, which is one: open its directory')
    text = options_text(found.options)
    if saved.layout.options != text:
        raise LayoutError(
            f"{saved.path!r} was made with the options {saved.layout.options or 'none'}, not {text or 'none'}; "
            "open its directory to choose others"
        )
    if policy == "auto" and saved.is_complete:
        layout = _cast(saved, found.dtype)
        if layout is None:
            kinds = ", ".join(sorted({str(saved.layout.dtype), *map(str, saved.layout.dtypes.values())}))
            raise LayoutError(f"{saved.path!r} lists shards of the dtypes {kinds}: give a dtype= that holds all safely")
        return replace(layout, manifest="opened by its name; each shard is checked when it is read")
    listed, _ = saved.listed()
    there = found._replace(paths=listed)
    if policy == "auto":
        return replace(_inspect(there), manifest="opened by its name; its format reads all headers again")
    again = locate(saved.folder, format=found.reader.name, options=found.options, holes="ignore", storage=found.storage)
    if set(again.paths) == set(listed):  # whatever the order was in which they were opened, it stays
        again = again._replace(paths=listed)
    return _use_manifest(again._replace(dtype=found.dtype, manifest=saved.path), policy)


def _cast(saved: Manifest, dtype: np.dtype[np.generic] | None) -> Layout | None:
    """Return the saved layout cast as was asked; None if it does not say all, or must be refused as a scan does."""
    layout = saved.layout
    if not saved.is_complete:
        return None
    if dtype is not None:
        stored = {layout.dtype, *layout.dtypes.values()}
        return layout.cast(dtype) if all([np.can_cast(other, dtype, "safe") for other in stored]) else None
    kinds = {other.newbyteorder("=") for other in set(layout.dtypes.values())} - {layout.dtype}
    return None if kinds else layout


def _stamps_now(found: Found, saved: Manifest) -> list[Stamp | None]:
    """Return the stamps that the files have, of stores those of the files that describe them."""
    stamped = saved.stamped()
    heads = found.storage.heads(stamped_paths(found.paths, stamped) if stamped else found.paths, 0)
    return [None if head.error is not None else head.stamp for head in heads]


def _hashed_again(layout: Layout, saved: Manifest | None) -> tuple[str, npt.NDArray[np.uint8] | None]:
    """Return the content hashes of a layout: those of unchanged files as they were, if there were any."""
    if saved is None or saved.hashes is None:
        return "", None
    before = saved.layout
    known = {before.root + name: i for i, name in enumerate(before.names)}
    hashes = np.empty((len(layout), DIGEST_NBYTES), np.uint8)
    for i in range(len(layout)):
        path, stamp = layout.path(i), layout.stamp(i)
        j = known.get(path)
        if j is not None and before.stamp(j) == stamp:
            hashes[i] = saved.hashes[j]
        else:
            hashes[i] = np.frombuffer(
                hash_content(path, layout.source(i), stamp, layout.storage, saved.algorithm), np.uint8
            )
    return saved.algorithm, hashes


def save_manifest(layout: Layout, *, content: bool = False, folder: str | None = None) -> str:
    """Write the manifest of a layout and return its path; see :meth:`lazyshards.ShardedDataset.save_manifest`.

    Parameters
    ----------
    layout : Layout
    content : bool
        Whether to save a hash of what each shard's file holds, or all files of its store.
    folder : str, optional
        Directory of the manifest, with the separator. By default that which all shards lie in; then no manifest is
        replaced that lists others which are still there.
    """
    if folder is None:
        folder = manifests.folder_of(layout)
        _check_replaced(layout, folder)
    if not content:
        return manifests.save(layout, folder=folder)
    algorithm = best_algorithm()
    return manifests.save(layout, folder=folder, algorithm=algorithm, hashes=hash_shards(layout, algorithm))


def _check_replaced(layout: Layout, folder: str) -> None:
    """Raise LayoutError if a manifest lists shards that are there and that a layout lacks."""
    storage = layout.storage
    (head,) = storage.heads([folder + manifests.NAME], 0)
    if head.error is not None:
        return
    try:
        before = manifests.read(folder + manifests.NAME, storage)
    except (LayoutError, FormatError, ShardReadError):
        return  # nothing is lost with it
    own = {layout.root + name for name in layout.names}
    others = [path for path in [before.layout.root + name for name in before.layout.names] if path not in own]
    there = [path for path, head in zip(others, _present(before, others, storage), strict=True) if head]
    if there:
        raise LayoutError(
            f"{folder + manifests.NAME!r} lists {len(there):,} shards that this dataset does not have, such as "
            f"{there[0]!r}: open {folder!r} to save the manifest of all, or remove that file first"
        )


def _present(before: Manifest, paths: Sequence[str], storage: Storage) -> list[bool]:
    """Return which shards of a manifest are still there."""
    stamped = before.stamped()
    files = [stamped_paths([path], stamped)[0] for path in paths]
    if before.inner is not None:
        layout = before.layout
        known = {layout.path(i): layout.path(i)[: len(layout.path(i)) - int(n)] for i, n in enumerate(before.inner)}
        files = [known[path] for path in paths]
    return [head.error is None for head in storage.heads(files, 0)]


def hash_shards(layout: Layout, algorithm: str) -> npt.NDArray[np.uint8]:
    """Return the content hash of every shard, (shards, 16)."""
    hashes = np.empty((len(layout), DIGEST_NBYTES), np.uint8)
    file, digest = "", b""
    for i in range(len(layout)):
        path, source = layout.path(i), layout.source(i)
        if file_of(path, source) != file:  # of several shards in one file it is the same
            file, digest = file_of(path, source), hash_content(path, source, layout.stamp(i), layout.storage, algorithm)
        hashes[i] = np.frombuffer(digest, np.uint8)
    return hashes


def refreshed(layout: Layout) -> Layout:
    """Return the layout with the shards described anew whose files changed since; itself if none did.

    Raises
    ------
    ShardChangedError
        If one is no longer what it was: in rows, row shape or dtype, or as a shard at all.
    """
    paths = [layout.path(i) for i in range(len(layout))]
    files = paths
    if layout.format in {"hdf5", "zarr"}:  # a shard may be a part of a file, or a directory
        files = [stamped_file(path, layout.source(i)) for i, path in enumerate(paths)]
    heads = layout.storage.heads(files, 0)
    numbers = [i for i, head in enumerate(heads) if head.error is not None or head.stamp != layout.stamp(i)]
    if not numbers:
        return layout
    stored = layout
    while stored.maps:
        stored = stored.below
    found: dict[int, Shard] = {}
    faults: list[Fault] = []
    reader = find_format(layout.format)
    some = [paths[i] for i in numbers]
    if layout.identity:
        described: list[Shard | Fault] = [
            Fault(path, "belongs to datasets that were joined, which are not described anew") for path in some
        ]
    else:
        described = reader.inspect(some, layout.storage, options_of(layout.options))
    for i, shard in zip(numbers, described, strict=True):
        before = stored.shards[i]
        if isinstance(shard, Fault):
            faults.append(shard)
        elif _columns(shard) != _columns(before):
            faults.append(Fault(shard.path, "has other columns, or has them in another order"))
        elif shard[1:4] != before[1:4]:
            faults.append(Fault(shard.path, f"holds {_what(shard)}, expected {_what(before)} as when it was opened"))
        else:
            found[i] = shard
    if faults:
        raise ShardChangedError(
            describe_faults(faults, 'shards changed since the dataset was opened, more than on_change="refresh" allows')
            + "\nopen the dataset again"
        )
    return layout.with_shards(found)


def _columns(shard: Shard) -> object:
    """Return which columns of a table are its rows, if its format says: one file alone may be taken another way."""
    return getattr(shard.source.detail, "view", None) if isinstance(shard.source, Decoded) else None


def _what(shard: Shard) -> str:
    return f"{shard.rows:,} rows of shape {shard.row_shape} and dtype {shard.dtype.str}"


def _unsafe_casts(shards: Sequence[Shard], dtype: np.dtype[np.generic]) -> list[Fault]:
    """Return a fault for each shard that cannot be cast safely, or whose rows are not shaped like most."""
    safe = {stored: np.can_cast(stored, dtype, "safe") for stored in {shard.dtype for shard in shards}}
    faults = _disagreements([shard._replace(dtype=dtype) for shard in shards])
    faults += [
        Fault(
            shard.path,
            f"has dtype {shard.dtype}, which cannot be cast safely to {dtype}, the dtype= that was asked for; to lose "
            f'values knowingly, open it without dtype= and use astype("{dtype}", casting="same_kind") or "unsafe"',
        )
        for shard in shards
        if not safe[shard.dtype]
    ]
    return faults


def _disagreements(shards: Sequence[Shard]) -> list[Fault]:
    """Return a fault for each shard that is not like most of them."""
    kinds: dict[tuple[object, ...], list[Shard]] = {}
    last: tuple[object, object] = (None, None)
    holders: list[Shard] = []
    for shard in shards:
        if shard.dtype is not last[0] or shard.row_shape != last[1]:
            last = (shard.dtype, shard.row_shape)
            holders = kinds.setdefault((shard.dtype.newbyteorder("="), shard.row_shape), [])
        holders.append(shard)
    if len(kinds) < 2:
        return []
    (dtype, row_shape), usual = max(kinds.items(), key=lambda kind: len(kind[1]))
    like = f"like {usual[0].path!r}"
    faults = []
    for (other_dtype, other_shape), odd in kinds.items():
        if odd is usual:
            continue
        wrong, right = [], []
        if other_dtype != dtype:
            wrong.append(f"dtype {other_dtype}")
            right.append(f"{dtype}")
        if other_shape != row_shape:
            wrong.append(f"rows of shape {other_shape}")
            right.append(f"{row_shape}")
        faults += [
            Fault(shard.path, f"has {' and '.join(wrong)}, expected {' and '.join(right)} {like}") for shard in odd
        ]
    return faults
