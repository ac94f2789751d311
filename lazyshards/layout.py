"""What is on disk: all shards in order, and which rows each of them holds."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from lazyshards.elementwise import Elementwise
from lazyshards.errors import UnsupportedDtypeError
from lazyshards.functions import NamedFunction
from lazyshards.selection import Cell, Rows
from lazyshards.storage.base import Stamp, Storage

__all__ = [
    "MOST_AXES",
    "Decoded",
    "Extent",
    "Extents",
    "Layout",
    "Mapped",
    "Names",
    "Packed",
    "Planes",
    "Segment",
    "Shard",
    "Source",
    "native_dtype",
]


MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
"""Axes that an array can have."""


class Extent(NamedTuple):
    """Consecutive rows that lie as plain packed bytes, in C order, somewhere in a file."""

    first: int
    """Local number of the first row."""
    rows: int
    """How many rows."""
    path: str
    """The file that holds them; empty for the shard's own."""
    offset: int
    """First byte."""


class Packed(NamedTuple):
    """A shard whose rows follow each other as plain bytes in its own file: the core reads them, not the format."""

    offset: int
    """First byte of the first row."""


class Extents(NamedTuple):
    """A shard whose rows are plain bytes in several runs, or in another file."""

    extents: tuple[Extent, ...]
    """In row order, without holes."""


class Planes(NamedTuple):
    """A shard stored by columns, each column's rows packed: Fortran order."""

    start: int
    """First byte of the first column."""
    stride: int
    """Bytes from one column to the next; the columns follow each other in Fortran order of the row's axes."""

    def offsets(self, row_shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Return the first byte of each column, in an array of the row's shape."""
        count = int(np.prod(row_shape, dtype=np.int64))
        return self.start + self.stride * np.arange(count, dtype=np.int64).reshape(row_shape, order="F")


class Decoded(NamedTuple):
    """A shard that its format must decode."""

    detail: object
    """What the format needs to read it again; picklable."""
    edges: tuple[int, ...] = ()
    """Local rows at which the format's own blocks begin, if decoding from elsewhere costs more."""
    format: str = ""
    """Name of the format, where it is not the layout's."""

    @property
    def has_file(self) -> bool:
        """Whether the shard is one file of its own: no store, and not one of several shards in a file."""
        return not (getattr(self.detail, "path", "") or getattr(self.detail, "folder", ""))


Source: TypeAlias = Packed | Extents | Planes | Decoded


class Shard(NamedTuple):
    """One file, or store, holding consecutive rows.

    A named tuple and not a dataclass: opening makes one for every file, and it is built four times as fast.
    """

    path: str
    """Path or URL."""
    rows: int
    """How many rows."""
    row_shape: tuple[int, ...]
    """Shape of one row."""
    dtype: np.dtype[np.generic]
    """Type as stored, byte order included."""
    stamp: Stamp
    """How the file is known again."""
    source: Source
    """Where the rows lie in it."""

    @property
    def coded_nbytes(self) -> int | None:
        """Bytes of the file, if its rows are encoded; None if not, or if it is a store, or holds several shards.

        What a shard takes of those would have to be looked up piece by piece.
        """
        return self.stamp.size if type(self.source) is Decoded and self.source.has_file else None


class Segment(NamedTuple):
    """The rows of one shard that one request needs, and where they land."""

    shard: int
    """Number of the shard in the layout."""
    local: Rows
    """Rows of the shard, ascending."""
    target: slice | npt.NDArray[np.int64]
    """Rows of the buffer, in the order of ``local``; a slice may run backwards."""


_ENCODING = ("utf-8", "surrogateescape")
"""Names of files are bytes: those that are no UTF-8 keep theirs."""


class Mapped(NamedTuple):
    """A function that makes rows out of rows, and what the layout was without it."""

    function: NamedFunction | Elementwise
    """Takes a block of rows and returns as many, of the layout's dtype and row shape (before a later cast)."""
    cell: Cell
    """The basic index on each row that the function is given; work on elements is given less if less is wanted."""
    row_shape: tuple[int, ...]
    """Shape of a row before the cell is applied."""
    dtype: np.dtype[np.generic]
    """Type of the elements that the function is given."""
    stored: np.dtype[np.generic] | None
    """As the layout's, before."""
    steps: tuple[np.dtype[np.generic], ...]
    """As the layout's, before."""


class Names(Sequence[str]):
    """Many names in one buffer of bytes, each made a text when it is asked for.

    Parameters
    ----------
    data : bytes-like
        The names in UTF-8, one after the other, without separators; none holds a null byte.
    offsets : ndarray of int64, (names + 1,)
        Where each begins in ``data``, and where the last ends.

    Examples
    --------
    >>> names = Names(b"a.npyb.npy", np.array([0, 5, 10]))
    >>> names[1], list(names[:1])
    ('b.npy', ['a.npy'])
    """

    __slots__ = ("data", "offsets")

    def __init__(self, data: bytes | memoryview, offsets: npt.NDArray[np.int64]) -> None:
        self.data = data
        self.offsets = offsets

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Names":
        """Return the names of a sequence."""
        if isinstance(texts, cls):
            return texts
        joined = np.frombuffer("\0".join(texts).encode(*_ENCODING), np.uint8)
        borders = np.flatnonzero(joined == 0)
        ends = [*borders[: len(texts) - 1] - np.arange(len(borders)), len(joined) - len(borders)] if len(texts) else []
        return cls(joined[joined != 0].tobytes(), np.array([0, *ends], np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            start, stop = self.offsets[numbers : numbers + 2].tolist()
            return str(self.data[start:stop], *_ENCODING)
        if numbers.step != 1:
            return tuple([self[i] for i in numbers])
        offsets = self.offsets[numbers.start : numbers.stop + 1]
        if not numbers:
            return ()
        # Bytes of its own, so that a few names of a million are pickled alone.
        return Names(bytes(self.data[int(offsets[0]) : int(offsets[-1])]), offsets - offsets[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.joined().decode(*_ENCODING).split("\0") if len(self) else ())

    def __reduce__(self) -> tuple[type["Names"], tuple[bytes, npt.NDArray[np.int64]]]:
        return Names, (bytes(self.data), self.offsets)

    def joined(self) -> bytes:
        """Return all names with a null byte between each two."""
        data = np.frombuffer(self.data, np.uint8)[int(self.offsets[0]) : int(self.offsets[-1])]
        return np.insert(data, self.offsets[1:-1] - self.offsets[0], 0).tobytes()


@dataclass(frozen=True, eq=False)
class Layout:
    """All shards in order. Columnar, so that a million shards fit; equal if the fingerprints are."""

    format: str
    """Name of the format."""
    storage: Storage
    """Where the bytes come from."""
    row_shape: tuple[int, ...]
    """Shape of one row, the same in every shard."""
    dtype: np.dtype[np.generic]
    """Type of the elements of a result, in native byte order."""
    root: str
    """What every path begins with; not part of the fingerprint."""
    names: Sequence[str]
    """The rest of each path."""
    ends: npt.NDArray[np.int64]
    """Rows up to and with each shard."""
    stamps: npt.NDArray[np.int64]
    """(shards, 3): size in bytes, mtime in ns, inode of each file."""
    offsets: npt.NDArray[np.int64]
    """First byte of the packed rows in each shard's own file; -1 where ``sources`` has more to say."""
    sources: Mapping[int, Source] = field(default_factory=dict)
    """Sources of the shards that are not one packed run."""
    dtypes: Mapping[int, np.dtype[np.generic]] = field(default_factory=dict)
    """Types as stored, of the shards where it is neither ``stored`` nor, if that is None, ``dtype``."""
    etags: Sequence[str] | None = None
    """Entity tag of each shard, where the storage has them."""
    stored: np.dtype[np.generic] | None = None
    """Type as stored, if elements are cast; None if it is ``dtype``."""
    steps: tuple[np.dtype[np.generic], ...] = ()
    """Types that each element is cast to, in order, before it is cast to ``dtype``: one for each cast of a cast."""
    options: str = ""
    """Options of the format, as text: part of the fingerprint, since they decide what is read."""
    manifest: str = ""
    """What a saved manifest had to do with it, for people; empty if nothing."""
    maps: tuple[Mapped, ...] = ()
    """Functions that each row goes through, in order; ``row_shape`` and ``dtype`` are those after the last."""
    identity: str = ""
    """What the fingerprint has in place of the names, where they have no root in common."""
    note: str = ""
    """Where the rows were put, for people; empty if nowhere else than they came from."""

    @classmethod
    def from_shards(
        cls,
        shards: Sequence[Shard],
        format: str,
        storage: Storage,
        *,
        dtype: np.dtype[np.generic] | None = None,
        options: str = "",
    ) -> "Layout":
        """Return the layout of shards that agree in row shape and, byte order aside, in dtype.

        Parameters
        ----------
        shards : sequence of Shard
            At least one.
        format : str
        storage : Storage
        dtype : dtype, optional
            What the elements are cast to; then the shards' own may differ.
        options : str
            Options of the format, as text.
        """
        paths, rows, _, dtypes, stamps, sources = zip(*shards, strict=True)
        root = _common_root(paths)
        native = dtypes[0].newbyteorder("=")
        target = native if dtype is None else dtype
        offsets = [source.offset if type(source) is Packed else -1 for source in sources]
        sizes, mtimes, inodes, etags = zip(*stamps, strict=True)
        return cls(
            format=format,
            storage=storage,
            row_shape=shards[0].row_shape,
            dtype=target,
            root=root,
            names=tuple([path[len(root) :] for path in paths]),
            ends=np.cumsum(np.array(rows, np.int64)),
            stamps=np.array([sizes, mtimes, inodes], np.int64).T.copy(),
            offsets=np.array(offsets, np.int64),
            sources={i: source for i, source in enumerate(sources) if type(source) is not Packed},
            dtypes={i: other for i, other in enumerate(dtypes) if other is not native and other != native},
            etags=tuple(etags) if any(etags) else None,
            stored=None if target == native else native,
            options=options,
        )

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.ends)

    @property
    def rows(self) -> int:
        """Number of rows of all shards."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        count = self.dtype.itemsize
        for size in self.row_shape:
            count *= size
        return count

    @property
    def shards(self) -> "Shards":
        """The shards, as a sequence."""
        return Shards(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of names, rows, sizes, dtype and shape: the same on every machine and mount point."""
        digest = hashlib.blake2b(digest_size=16)
        head = (1, self.format, self.dtype.descr if self.dtype.names else self.dtype.str, self.row_shape, len(self))
        digest.update(repr(head).encode())
        names = [self.identity] if self.identity else self.names
        digest.update(names.joined() if isinstance(names, Names) else "\0".join(names).encode(*_ENCODING))
        digest.update(self.ends.astype("<i8").tobytes())
        digest.update(self.stamps[:, 0].astype("<i8").tobytes())
        digest.update(repr([(i, _dtype_text(dtype)) for i, dtype in sorted(self.dtypes.items())]).encode())
        if self.sources:
            kinds = [(i, type(source).__name__) for i, source in sorted(self.sources.items())]
            digest.update(repr(kinds).encode())
        if self.stored is not None or self.options:
            casts = [_dtype_text(dtype) for dtype in (self.stored, *self.steps) if dtype is not None]
            digest.update(repr((casts, self.options)).encode())
        for step in self.maps:
            digest.update(repr((step.function, step.cell, step.row_shape, _dtype_text(step.dtype))).encode())
            if isinstance(step.function, Elementwise):
                digest.update(step.function.root.digest)
        return digest.hexdigest()

    @cached_property
    def _quick_ends(self) -> Sequence[int]:
        """The ends, as what is quickest to bisect: plain numbers, where they are few."""
        ends: Sequence[int] = self.ends.tolist() if len(self) <= _FEW else self.ends  # type: ignore[assignment]
        return ends

    def path(self, shard: int) -> str:
        """Return the path of a shard."""
        return self.root + self.names[shard]

    def stamp(self, shard: int) -> Stamp:
        """Return the stamp of a shard."""
        size, mtime_ns, inode = self.stamps[shard].tolist()
        return Stamp(size, mtime_ns, inode, self.etags[shard] if self.etags is not None else "")

    def source(self, shard: int) -> Source:
        """Return where the rows of a shard lie."""
        offset = int(self.offsets[shard])
        if offset >= 0:
            return Packed(offset)
        return self.sources[shard]

    def stored_dtype(self, shard: int) -> np.dtype[np.generic]:
        """Return the type that a shard stores, byte order included."""
        usual = self.dtype if self.stored is None else self.stored
        return self.dtypes.get(shard, usual) if self.dtypes else usual

    @property
    def cast_from(self) -> tuple[np.dtype[np.generic], ...]:
        """Types that are cast to ``dtype`` when they are read, in native byte order; empty if none are."""
        usual = self.dtype if self.stored is None else self.stored
        others = () if self.maps else set(self.dtypes.values())  # what was mapped is no longer of the files' types
        found = {usual, *[dtype.newbyteorder("=") for dtype in others]}
        return tuple(sorted(found - {self.dtype} if not self.steps else found, key=_dtype_text))

    @property
    def dtype_text(self) -> str:
        """The type of the elements, and what it is cast from, if anything is: for people."""
        if not self.cast_from:
            return str(self.dtype)
        before = " or ".join(map(str, self.cast_from))
        return f"{self.dtype} (cast from {' to '.join([before, *map(str, self.steps)])})"

    def cast(self, dtype: np.dtype[np.generic]) -> "Layout":
        """Return the layout whose elements are cast to ``dtype``, in native byte order, after all casts made before."""
        if dtype == self.dtype:
            return self
        steps = (*self.steps, self.dtype) if self.cast_from else ()
        return replace(self, dtype=dtype, stored=self.dtype if self.stored is None else self.stored, steps=steps)

    def map(
        self,
        function: NamedFunction | Elementwise,
        cell: Cell,
        dtype: np.dtype[np.generic],
        row_shape: tuple[int, ...],
    ) -> "Layout":
        """Return the layout whose rows are what a function makes of these.

        Parameters
        ----------
        function : NamedFunction or Elementwise
        cell : tuple
            The basic index on each row that it is given.
        dtype : dtype
            Of what it returns.
        row_shape : tuple of int
            Of one row of what it returns.
        """
        step = Mapped(function, cell, self.row_shape, self.dtype, self.stored, self.steps)
        return replace(self, row_shape=row_shape, dtype=dtype, stored=None, steps=(), maps=(*self.maps, step))

    @property
    def below(self) -> "Layout":
        """The layout without the last function that its rows go through."""
        *maps, last = self.maps
        return replace(
            self,
            row_shape=last.row_shape,
            dtype=last.dtype,
            stored=last.stored,
            steps=last.steps,
            maps=tuple(maps),
        )

    @property
    def maps_text(self) -> str:
        """The functions that rows go through, and what each makes of them: for people."""
        layout, texts = self, []
        while layout.maps:
            step = layout.maps[-1]
            shape = tuple([len(axis) for axis in step.cell if isinstance(axis, range)])
            made = layout.dtype if layout.stored is None else layout.stored
            texts.append(f"{step.function}: {step.dtype} {shape} to {made} {layout.row_shape}")
            layout = layout.below
        return ", then ".join(reversed(texts))

    def start_stop(self, shard: int) -> tuple[int, int]:
        """Return the global rows [start, stop) that a shard holds."""
        ends = self._quick_ends
        return (int(ends[shard - 1]) if shard else 0), int(ends[shard])

    def end(self, shard: int) -> int:
        """Return the rows up to and with a shard."""
        return int(self._quick_ends[shard])

    def offset(self, shard: int) -> int:
        """Return the first byte of a packed shard's rows in its own file."""
        return int(self.offsets[shard])

    def segments(self, rows: Rows) -> Iterator[Segment]:
        """Yield what each shard contributes to a buffer that holds ``rows`` in order, shards ascending.

        Parameters
        ----------
        rows : range or ndarray of int64
            Global row numbers, all within the layout.
        """
        if isinstance(rows, range):
            return self._range_segments(rows)
        return self._array_segments(rows)

    def _range_segments(self, rows: range) -> Iterator[Segment]:
        count = len(rows)
        if not count:
            return
        ascending = rows if rows.step > 0 else rows[::-1]
        low, step = ascending[0], ascending.step
        high = ascending[-1]
        first = int(self.ends.searchsorted(low, "right"))
        last = int(self.ends.searchsorted(high, "right"))
        start = int(self.ends[first - 1]) if first else 0
        done = 0
        for shard, stop in enumerate(self.ends[first : last + 1].tolist(), first):
            # Rows of the request below the shard's end; a step may jump over the whole shard.
            until = count if stop > high else -(-(stop - low) // step)
            if until > done:
                at = low + done * step - start
                local = range(at, at + (until - done) * step, step)
                if rows.step > 0:
                    target = slice(done, until)
                else:
                    target = slice(count - 1 - done, count - 1 - until if until < count else None, -1)
                yield Segment(shard, local, target)
                done = until
            start = stop

    def _array_segments(self, rows: npt.NDArray[np.int64]) -> Iterator[Segment]:
        if not len(rows):
            return
        order = None if bool((np.diff(rows) >= 0).all()) else np.argsort(rows, kind="stable")
        ascending = rows if order is None else rows[order]
        first = int(self.ends.searchsorted(ascending[0], "right"))
        last = int(self.ends.searchsorted(ascending[-1], "right"))
        cuts = np.searchsorted(ascending, self.ends[first : last + 1], "left").tolist()
        start = int(self.ends[first - 1]) if first else 0
        done = 0
        for shard, stop, until in zip(range(first, last + 1), self.ends[first : last + 1].tolist(), cuts, strict=True):
            if until > done:
                target = slice(done, until) if order is None else order[done:until]
                yield Segment(shard, ascending[done:until] - start, target)
                done = until
            start = stop

    def narrow(self, rows: Rows) -> "tuple[Layout, Rows]":
        """Return the layout of the shards that ``rows`` touch, and the same rows numbered in it.

        Parameters
        ----------
        rows : range or ndarray of int64
            Global row numbers, all within the layout.
        """
        if not len(rows):
            return self._pick(slice(0, 0)), range(0)
        if isinstance(rows, range):
            low, high = (rows[0], rows[-1]) if rows.step > 0 else (rows[-1], rows[0])
            first = self.shard_of(low)
            last = first if high < self.end(first) else self.shard_of(high)
            if first == 0 and last == len(self) - 1:
                return self, rows
            start = int(self.ends[first - 1]) if first else 0
            return self._pick(slice(first, last + 1)), range(rows.start - start, rows.stop - start, rows.step)
        holder = self.ends.searchsorted(rows, "right")
        touched = np.unique(holder)
        if len(touched) == len(self):
            return self, rows
        layout = self._pick(touched)
        starts = self._starts(touched)
        moved = layout.ends - np.diff(layout.ends, prepend=0) - starts
        return layout, rows + moved[np.searchsorted(touched, holder)]

    def _pick(self, which: slice | npt.NDArray[np.int64]) -> "Layout":
        """Return the layout of some of the shards, in order."""
        if isinstance(which, slice):
            numbers: Sequence[int] = range(len(self))[which]
            names, ends = self.names[which], self.ends[which]
            if numbers and numbers[0]:
                ends = ends - self.ends[numbers[0] - 1]
        else:
            numbers = which.tolist()
            names, ends = tuple([self.names[i] for i in numbers]), np.cumsum(self.ends[which] - self._starts(which))
        # Every slice of every dataset comes by here, and dataclasses.replace would take most of its time.
        picked = object.__new__(Layout)
        values = picked.__dict__
        values.update(self.__getstate__())
        values["names"], values["ends"] = names, ends
        values["stamps"], values["offsets"] = self.stamps[which], self.offsets[which]
        if self.sources:
            values["sources"] = {i: self.sources[n] for i, n in enumerate(numbers) if n in self.sources}
        if self.dtypes:
            values["dtypes"] = {i: self.dtypes[n] for i, n in enumerate(numbers) if n in self.dtypes}
        if self.etags is not None:
            values["etags"] = tuple([self.etags[n] for n in numbers])
        values["manifest"] = ""
        return picked

    def _starts(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows before some of the shards."""
        return np.where(which, self.ends[which - 1], 0)

    def with_shards(self, found: Mapping[int, Shard]) -> "Layout":
        """Return the layout with some shards described anew: stamp and source; rows, shape and dtype stay.

        Parameters
        ----------
        found : mapping from int to Shard
            By number of the shard.
        """
        stamps, offsets = self.stamps.copy(), self.offsets.copy()
        sources, etags = dict(self.sources), None if self.etags is None else list(self.etags)
        for i, shard in found.items():
            stamps[i] = shard.stamp[:3]
            if etags is not None:
                etags[i] = shard.stamp.etag
            offsets[i] = shard.source.offset if type(shard.source) is Packed else -1
            sources.pop(i, None)
            if type(shard.source) is not Packed:
                sources[i] = shard.source
        return replace(
            self, stamps=stamps, offsets=offsets, sources=sources, etags=None if etags is None else tuple(etags)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self.root == other.root and self.fingerprint == other.fingerprint)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone, without what was worked out from them."""
        values = self.__dict__
        return {name: values[name] for name in _FIELDS}

    def shard_of(self, row: int) -> int:
        """Return the number of the shard that holds a global row."""
        return bisect_right(self._quick_ends, row)


_FIELDS = tuple([each.name for each in fields(Layout)])
_FEW = 4096
"""Shards whose ends are kept as plain numbers, too."""


def native_dtype(dtype: object) -> np.dtype[np.generic]:
    """Return a dtype, in native byte order, that the elements of a dataset can have.

    Raises
    ------
    UnsupportedDtypeError
        If it is no dtype, of Python objects, an array of its own, or of no size.
    """
    try:
        found: np.dtype[np.generic] = np.dtype(dtype)  # type: ignore[call-overload]  # what it raises is the answer
    except (TypeError, ValueError) as exc:
        raise UnsupportedDtypeError(f"dtype={dtype!r} is not a dtype: {exc}") from exc
    if dtype is None or found.hasobject:
        raise UnsupportedDtypeError(f"dtype={dtype!r} is {found}, expected a dtype of plain values")
    if found.subdtype is not None or not found.itemsize:
        raise UnsupportedDtypeError(f"dtype={dtype!r} does not say one size, expected one such as {_SIZED!r}")
    return found.newbyteorder("=")


_SIZED = "U8"


def _dtype_text(dtype: np.dtype[np.generic]) -> str:
    return repr(dtype.descr) if dtype.names else dtype.str


def _common_root(paths: Sequence[str]) -> str:
    """Return what all paths begin with, up to and with the last separator that they share."""
    low, high = min(paths), max(paths)
    n = bisect_left(range(min(len(low), len(high))), True, key=lambda i: low[: i + 1] != high[: i + 1])
    return low[: low.rfind("/", 0, n) + 1]


class Shards(Sequence[Shard]):
    """The shards of a layout, each built when it is asked for."""

    __slots__ = ("_layout",)

    def __init__(self, layout: Layout) -> None:
        while layout.maps:  # a shard is what is on disk
            layout = layout.below
        self._layout = layout

    def __len__(self) -> int:
        return len(self._layout)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        layout = self._layout
        start, stop = layout.start_stop(number)
        return Shard(
            layout.path(number),
            stop - start,
            layout.row_shape,
            layout.stored_dtype(number),
            layout.stamp(number),
            layout.source(number),
        )

    def __repr__(self) -> str:
        return (
            f"<{len(self)} shards: "
            + ", ".join(f"{s.path!r} ({s.rows:,} rows)" for s in self[:3])
            + (", ...>" if len(self) > 3 else ">")
        )
