"""Datasets one after the other as one dataset, of any formats and storages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from os.path import commonprefix
from typing import BinaryIO, TypeVar

import numpy as np

from lazyshards.dataset import ShardedDataset
from lazyshards.errors import LayoutError
from lazyshards.layout import Decoded, Layout, Source
from lazyshards.selection import Rows, Selection, select, select_all
from lazyshards.storage import Entry, Head, OnChange, Part, Storage

__all__ = ["JoinedStorage", "concat"]

T = TypeVar("T")


def concat(datasets: Iterable[ShardedDataset]) -> ShardedDataset:
    """Return the rows of several datasets one after the other, lazily, as one dataset.

    Parameters
    ----------
    datasets : iterable of ShardedDataset
        Of one row shape and dtype; their formats and storages may differ, and each may be a slice.

    Returns
    -------
    ShardedDataset

    Raises
    ------
    LayoutError
        If there is none, or their row shapes, dtypes, or what is done to each row, differ.

    Examples
    --------
    >>> import numpy as np, lazyshards
    >>> np.save("old.npy", np.arange(4))
    >>> np.arange(4, 10).astype("<i8").tofile("new.bin")
    >>> old = lazyshards.open_shards("old.npy", engine="numpy")
    >>> new = lazyshards.open_shards("new.bin", format="raw", dtype="<i8", row_shape=(), engine="numpy")
    >>> lazyshards.concat([old, new[:3]])[2:6].compute()
    array([2, 3, 4, 5])
    """
    if hasattr(datasets, "compute"):  # its rows would be read, one by one
        raise TypeError("concat() takes a list of datasets, as in concat([a, b]), not one dataset")
    given = list(datasets)
    if not given:
        raise LayoutError("concat() was given no dataset")
    for i, dataset in enumerate(given):
        if not isinstance(dataset, ShardedDataset):
            raise TypeError(f"item {i} of concat() is {dataset!r:.80}, expected a dataset that open_shards() returned")
    parts = [_parts(dataset) for dataset in given]
    first, engines = given[0], {engine for _, _, engine in parts}
    for i, (dataset, (_, selection, _)) in enumerate(zip(given, parts, strict=True)):
        if selection.scalar:
            raise LayoutError(f"dataset {i} of concat() is a single row without its axis: index it with a slice")
        if dataset.dtype != first.dtype or dataset.shape[1:] != first.shape[1:]:
            raise LayoutError(
                f"dataset {i} of concat() has rows of shape {dataset.shape[1:]} and {dataset.dtype}, expected "
                f"{first.shape[1:]} and {first.dtype} like dataset 0: use astype() or map() to make them agree"
            )
    narrowed = [(*layout.narrow(selection.rows), selection.cell) for layout, selection, _ in parts]
    layouts = [layout for layout, _, _ in narrowed]
    _check_alike(
        [
            (layout.row_shape, cell, layout.maps, (layout.steps, layout.stored if layout.maps else None))
            for layout, _, cell in narrowed
        ]
    )
    joined = _join(layouts)
    selection = replace(select_all(joined.rows, joined.row_shape), cell=narrowed[0][2])
    if any(not _is_all(rows, layout) for layout, rows, _ in narrowed):
        starts = np.cumsum([0, *[layout.rows for layout in layouts]])
        numbers = [np.asarray(rows, np.int64) + start for (_, rows, _), start in zip(narrowed, starts, strict=False)]
        rows = select(select_all(joined.rows, ()), np.concatenate(numbers)).rows
        selection = replace(selection, rows=rows)
    return ShardedDataset(joined, selection, engines.pop() if len(engines) == 1 else None)


def _parts(dataset: ShardedDataset) -> tuple[Layout, Selection, str | None]:
    return dataset._layout, dataset._selection, dataset._engine  # noqa: SLF001  # what it is made of


def _is_all(rows: Rows, layout: Layout) -> bool:
    return isinstance(rows, range) and rows == range(layout.rows)


def _check_alike(kinds: Sequence[tuple[object, ...]]) -> None:
    """Raise LayoutError if what is done to a row is not the same in all datasets."""
    names = (
        "rows in its files of another shape",
        "another selection within each row",
        "other functions",
        "other casts",
    )
    for i, kind in enumerate(kinds):
        for name, found, expected in zip(names, kind, kinds[0], strict=True):
            if found != expected:
                raise LayoutError(
                    f"dataset {i} of concat() has {name} than dataset 0: {found!r}, expected {expected!r}; join the "
                    "datasets as they were opened, then select, map and cast"
                )


def _join(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of the shards of all layouts, in order."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    storage = _storage([(layout.root, layout.storage) for layout in layouts])
    # By characters: it is cut at the last separator below.
    shared = commonprefix([layout.root for layout in layouts])  # noqa: RUF071
    root = "" if isinstance(storage, JoinedStorage) else shared
    root = root[: root.rfind("/") + 1]
    formats = list(dict.fromkeys(layout.format for layout in layouts))
    stored = {layout.stored for layout in layouts}
    mixed = len(stored) > 1
    names: list[str] = []
    sources: dict[int, Source] = {}
    dtypes: dict[int, np.dtype[np.generic]] = {}
    for layout in layouts:
        start, before = len(names), layout.root[len(root) :]
        names += [before + name for name in layout.names]
        for i, source in layout.sources.items():
            sources[start + i] = _of_format(source, layout.format) if len(formats) > 1 else source
        own = {start + i: layout.stored_dtype(i) for i in range(len(layout))} if mixed else {}
        own |= {start + i: dtype for i, dtype in layout.dtypes.items()}
        dtypes |= {i: dtype for i, dtype in own.items() if dtype != first.dtype} if mixed else own
    etags = [layout.etags if layout.etags is not None else ("",) * len(layout) for layout in layouts]
    digest = blake2b(repr([layout.fingerprint for layout in layouts]).encode(), digest_size=16)
    return replace(
        first,
        format="+".join(formats),
        storage=storage,
        root=root,
        names=tuple(names),
        ends=np.cumsum(np.concatenate([np.diff(layout.ends, prepend=0) for layout in layouts])),
        stamps=np.concatenate([layout.stamps for layout in layouts]),
        offsets=np.concatenate([layout.offsets for layout in layouts]),
        sources=sources,
        dtypes=dtypes,
        etags=tuple([tag for tags in etags for tag in tags]) if any(map(any, etags)) else None,
        stored=None if mixed else first.stored,
        options="",
        manifest="",
        note="",
        identity=digest.hexdigest(),
    )


def _of_format(source: Source, format: str) -> Source:
    """Return the source with the name of its format, if it is for that to decode."""
    if isinstance(source, Decoded) and not source.format:
        return source._replace(format=format)
    return source


def _storage(members: Sequence[tuple[str, Storage]]) -> Storage:
    """Return the one storage of all, or one that knows which of them serves a path."""
    flat: dict[str, Storage] = {}
    for root, storage in members:
        for inner_root, inner in storage.members if isinstance(storage, JoinedStorage) else ((root, storage),):
            if flat.setdefault(inner_root, inner) != inner:
                raise LayoutError(f"files in {inner_root!r} were opened twice, with different options: open them alike")
    storages = list(flat.values())
    if all(storage == storages[0] for storage in storages):
        return storages[0]
    policies = sorted({storage.on_change for storage in storages})
    if len(policies) > 1:
        raise LayoutError(
            f"the datasets were opened with on_change={' and '.join(map(repr, policies))}: open them alike"
        )
    return JoinedStorage(tuple(flat.items()))


@dataclass(frozen=True, slots=True)
class JoinedStorage:
    """Several storages as one: the beginning of a path says which serves it."""

    members: tuple[tuple[str, Storage], ...]
    """What the paths of each begin with, and the storage."""

    @property
    def on_change(self) -> OnChange:
        """What all of them do about a changed shard."""
        return self.members[0][1].on_change

    @property
    def gap_nbytes(self) -> int:
        """Largest gap of all."""
        return max(storage.gap_nbytes for _, storage in self.members)

    @property
    def window_nbytes(self) -> int:
        """Largest window of all."""
        return max(storage.window_nbytes for _, storage in self.members)

    def _of(self, path: str) -> Storage:
        """Return the storage that serves a path: the one of the longest beginning; else the first of its kind."""
        held = [(len(root), i) for i, (root, _) in enumerate(self.members) if path.startswith(root)]
        if held:
            return self.members[max(held)[1]][1]
        scheme = path.partition("://")[0] if "://" in path else ""
        kinds = [root.partition("://")[0] if "://" in root else "" for root, _ in self.members]
        return self.members[kinds.index(scheme) if scheme in kinds else 0][1]

    def _each(self, items: Sequence[T], path: Callable[[T], str]) -> list[tuple[Storage, list[T]]]:
        """Return runs of items that one storage serves."""
        serving: dict[str, Storage] = {}
        runs: list[tuple[Storage, list[T]]] = []
        for item in items:
            name = path(item)
            storage = serving.get(name) or serving.setdefault(name, self._of(name))
            if not runs or runs[-1][0] is not storage:
                runs.append((storage, []))
            runs[-1][1].append(item)
        return runs

    def find(self, path: str) -> tuple[str, list[Entry]]:
        """Return what ``path`` is, and the entries found there."""
        return self._of(path).find(path)

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        """Return the first bytes and the stamp of every file."""
        return [head for storage, run in self._each(paths, str) for head in storage.heads(run, nbytes)]

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        return [data for storage, run in self._each(ranges, lambda item: item[0]) for data in storage.fetch(run)]

    def fetch_into(self, parts: Sequence[Part]) -> None:
        """Fill every part's ``out``, or raise ShardReadError naming the file."""
        for storage, run in self._each(parts, lambda part: part.path):
            storage.fetch_into(run)

    def open(self, path: str) -> BinaryIO:
        """Return the file, open for reading."""
        return self._of(path).open(path)

    def local_path(self, path: str) -> str | None:
        """Return the path of the file on this machine's disk, or None."""
        return self._of(path).local_path(path)
