"""Several datasets of equal length as one: rows aligned, results in a dict."""

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from lazyshards import display
from lazyshards.ahead import Pending, Source
from lazyshards.batches import Batches, BatchOptions
from lazyshards.engines.ranks import is_first_rank
from lazyshards.errors import LayoutError, SelectionError
from lazyshards.looking import checked_count, sampled_rows
from lazyshards.plan import ReadPlan
from lazyshards.samplers import Order, Shuffle
from lazyshards.selection import Rows

__all__ = ["Bundle", "Member", "zip_shards"]

Array: TypeAlias = Any
"""An array of the engine's type."""


class Member(Protocol):
    """What a bundle is made of: a ShardedDataset."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what compute() returns."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of its elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of what is selected."""
        ...

    def __getitem__(self, index: object) -> "Member": ...

    def compute(self, engine: str | None = None) -> Array:
        """Read what is selected."""
        ...

    def to_numpy(self) -> npt.NDArray[Any]:
        """Read what is selected into a NumPy array."""
        ...

    def map(
        self, function: Callable[[npt.NDArray[Any]], Any], *, dtype: object, row_shape: Sequence[int] | int | None
    ) -> "Member":
        """Return what a function makes of the rows."""
        ...

    def plan(self, engine: str | None = None) -> ReadPlan:
        """Return what compute() would do."""
        ...

    def explain(self, engine: str | None = None) -> None:
        """Print that."""
        ...

    def _repr_html_(self) -> str: ...

    def batch_source(self, engine: str | None = None) -> Source:
        """Return what batches are taken from."""
        ...


def zip_shards(**members: Member) -> "Bundle":
    """Return datasets of equal length as one, whose rows stay aligned.

    Parameters
    ----------
    **members : ShardedDataset
        By the name that each has in the results.

    Returns
    -------
    Bundle

    Raises
    ------
    LayoutError
        If their lengths differ, or one has no row axis.

    Examples
    --------
    >>> import numpy as np, lazyshards
    >>> np.save("images.npy", np.arange(12).reshape(6, 2))
    >>> np.save("labels.npy", np.arange(6))
    >>> x, y = [lazyshards.open_shards(f"{name}.npy", engine="numpy") for name in ("images", "labels")]
    >>> both = lazyshards.zip_shards(x=x, y=y)
    >>> both[4:].compute()["y"]
    array([4, 5])
    >>> [batch["x"].shape for batch in both.batches(4)]
    [(4, 2), (2, 2)]
    """
    if not members:
        raise LayoutError("zip_shards() was given no dataset: name each, as in zip_shards(x=images, y=labels)")
    for name, member in members.items():
        if not hasattr(member, "batch_source") or not hasattr(member, "fingerprint"):
            raise TypeError(f"{name}={member!r:.80} is not a dataset: open it with open_shards()")
        if not member.shape:
            raise LayoutError(f"{name} has no row axis: index it with a slice, such as ds[5:6]")
    lengths = {name: member.shape[0] for name, member in members.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise LayoutError(
            f"the datasets differ in their number of rows: {found}; slice them to the rows that they share"
        )
    return Bundle(members)


class Bundle:
    """Datasets of equal length whose rows belong together. Made by :func:`zip_shards`.

    Parameters
    ----------
    members : mapping from str to ShardedDataset
    """

    __slots__ = ("_members",)
    __iter__ = None  # what it would yield, names or rows, is anybody's guess

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = dict(members)

    def keys(self) -> KeysView[str]:
        """Return the names of the datasets."""
        return self._members.keys()

    @property
    def shape(self) -> dict[str, tuple[int, ...]]:
        """Shape of each dataset."""
        return {name: member.shape for name, member in self._members.items()}

    @property
    def dtype(self) -> dict[str, np.dtype[np.generic]]:
        """Type of the elements of each dataset."""
        return {name: member.dtype for name, member in self._members.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all that compute() returns."""
        return sum(member.nbytes for member in self._members.values())

    @property
    def fingerprint(self) -> str:
        """Hex digest of the names and of each dataset's fingerprint."""
        return _fingerprint((name, member.fingerprint) for name, member in self._members.items())

    def __len__(self) -> int:
        """Return the number of rows."""
        return next(iter(self._members.values())).shape[0]

    def __getitem__(self, index: object) -> Any:
        """Return one dataset by its name, or the bundle of the rows that an index picks; nothing is read.

        Parameters
        ----------
        index : str, slice, mask or integer array

        Raises
        ------
        KeyError
            If there is no dataset of that name.
        SelectionError
            If the index is not one of rows.
        """
        if isinstance(index, str):
            try:
                return self._members[index]
            except KeyError:
                raise KeyError(f"no dataset is called {index!r}: there are {', '.join(self._members)}") from None
        if isinstance(index, tuple) or index is None or index is Ellipsis:
            raise SelectionError(f"{index!r} is not an index of rows, which is all that the datasets share")
        if isinstance(index, int | np.integer):
            raise SelectionError(
                f"a bundle keeps its row axis: take bundle[{index}:{int(index) + 1 or ''}], or bundle[name][{index}]"
            )
        return Bundle({name: member[index] for name, member in self._members.items()})

    def __eq__(self, other: object) -> bool:
        return self._members == other._members if isinstance(other, Bundle) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        lines = [f"  {name}: {member.dtype} {member.shape}" for name, member in self._members.items()]
        return "\n".join([f"<Bundle of {len(self):,} rows>", *lines])

    def _repr_html_(self) -> str:
        members = {name: member._repr_html_() for name, member in self._members.items()}
        return display.bundle_html(len(self), self.nbytes, members)

    def compute(self, engine: str | None = None) -> dict[str, Array]:
        """Read what is selected into one array of the engine's type for each dataset.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default each dataset's own.

        Raises
        ------
        As ShardedDataset.compute.
        """
        return {name: member.compute(engine) for name, member in self._members.items()}

    def to_numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Read what is selected into NumPy arrays, whatever the datasets' engines are."""
        return {name: member.to_numpy() for name, member in self._members.items()}

    def head(self, n: int = 5) -> dict[str, npt.NDArray[Any]]:
        """Read the first rows into NumPy arrays.

        Parameters
        ----------
        n : int
            Rows; fewer are returned if there are fewer.
        """
        part: Bundle = self[: checked_count(n, "head()")]
        return part.to_numpy()

    def sample(self, n: int = 5, seed: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Read some rows, drawn at random, the same of each dataset, into NumPy arrays.

        Parameters
        ----------
        n : int
            Rows.
        seed : int, optional
            None draws one. Otherwise as for :meth:`ShardedDataset.sample`.

        Raises
        ------
        ValueError
            If there are fewer rows.
        """
        count = checked_count(n, "sample()")
        if seed is None:
            seed = next(iter(self._members.values())).batch_source().draw_seed()
        part: Bundle = self[sampled_rows(count, len(self), seed)]
        return part.to_numpy()

    def map(
        self,
        name: str,
        function: Callable[[npt.NDArray[Any]], Any],
        *,
        dtype: object = None,
        row_shape: Sequence[int] | int | None = None,
    ) -> "Bundle":
        """Return the bundle in which one dataset is what a function makes of its rows, lazily.

        Parameters
        ----------
        name : str
            Of the dataset.
        function, dtype, row_shape
            As for :meth:`ShardedDataset.map`.

        Raises
        ------
        KeyError
            If there is no dataset of that name.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("images.npy", np.full((6, 2), 51, "u1"))
        >>> np.save("labels.npy", np.arange(6))
        >>> x, y = [lazyshards.open_shards(f"{name}.npy", engine="numpy") for name in ("images", "labels")]
        >>> both = lazyshards.zip_shards(x=x, y=y).map("x", lambda rows: rows / 255, dtype="f8")
        >>> both.head(1)
        {'x': array([[0.2, 0.2]]), 'y': array([0])}
        """
        return Bundle({**self._members, name: self[name].map(function, dtype=dtype, row_shape=row_shape)})

    def plan(self, engine: str | None = None) -> dict[str, ReadPlan]:
        """Return what compute() would do, for each dataset.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default each dataset's own.
        """
        return {name: member.plan(engine) for name, member in self._members.items()}

    def explain(self, engine: str | None = None) -> None:
        """Print the plan of each dataset for a person."""
        for name, member in self._members.items():
            if is_first_rank():
                print(f"{name}:")  # noqa: T201  # what it is for
            member.explain(engine)

    def batches(self, batch_size: int, *, engine: str | None = None, **options: Unpack[BatchOptions]) -> Batches:
        """Return the rows in batches, each a dict of arrays whose rows belong together.

        Parameters
        ----------
        batch_size : int
            Rows of a batch.
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default each dataset's own.
        **options
            As for :meth:`ShardedDataset.batches`; ``shuffle="shards"`` goes by the shards of the first dataset.
        """
        sources = {name: member.batch_source(engine) for name, member in self._members.items()}
        return Batches(_BundleSource(sources), batch_size, **options)

    def to_torch(self) -> Any:
        """Return a map-style torch Dataset whose rows are dicts of tensors, as ShardedDataset.to_torch does."""
        from lazyshards.adapters.torch import TorchRows

        return TorchRows(self)


def _fingerprint(parts: Iterable[tuple[str, str]]) -> str:
    digest = blake2b(digest_size=16)
    digest.update(repr(list(parts)).encode())
    return digest.hexdigest()


class _BundleSource:
    """What batches of a bundle are taken from."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._first = next(iter(sources.values()))
        self.size = self._first.size
        self.row_nbytes = sum(source.row_nbytes for source in sources.values())
        self.together_nbytes = max(source.together_nbytes for source in sources.values())
        self.fingerprint = _fingerprint((name, source.fingerprint) for name, source in sources.items())

    @property
    def title(self) -> str:
        """What is read by which engine, in few words."""
        more = len(self._sources) - 1
        return self._first.title + (f" and {more} more" if more else "")

    @property
    def description(self) -> str:
        """What the rows are, for a person."""
        return "; ".join(f"{name}: {source.description}" for name, source in self._sources.items())

    def edges(self) -> npt.NDArray[np.int64]:
        """Return the edges of the first dataset."""
        return self._first.edges()

    def order(self, shuffle: Shuffle, epoch: int) -> Order:
        """Return the order of an epoch."""
        return shuffle.order(self.size, self.edges, self.fingerprint, epoch)

    def draw_seed(self) -> int:
        """Return a random seed."""
        return self._first.draw_seed()

    @contextmanager
    def reading(self, scattered: int = 0) -> Iterator[None]:
        """Return what must be entered while batches are read ahead: so many rows in no order, if any."""
        with ExitStack() as stack:
            for source in self._sources.values():
                stack.enter_context(source.reading(scattered))
            yield

    def warmed_nbytes(self, scattered: int) -> int:
        """Return the bytes of files that are read front to back while so many rows, in no order, are read ahead."""
        return sum(source.warmed_nbytes(scattered) for source in self._sources.values())

    def begin(self, rows: Rows) -> Pending:
        """Begin to read the rows of every dataset."""
        begun: dict[str, Pending] = {}
        try:
            for name, source in self._sources.items():
                begun[name] = source.begin(rows)
        except BaseException:
            _cancel(begun.values())
            raise
        return _PendingBundle(begun)

    def cost(self, rows: Rows) -> tuple[int, int, int]:
        """Return the shards, requests and bytes of all datasets."""
        shards, requests, nbytes = zip(*[source.cost(rows) for source in self._sources.values()], strict=True)
        return sum(shards), sum(requests), sum(nbytes)


class _PendingBundle:
    """A batch of every dataset that is being read."""

    def __init__(self, pending: Mapping[str, Pending]) -> None:
        self._pending = pending

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for any more."""
        return all(pending.is_done for pending in self._pending.values())

    def result(self) -> dict[str, Array]:
        """Wait for all of them, or raise what went wrong with the first that failed."""
        try:
            return {name: pending.result() for name, pending in self._pending.items()}
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give all of them up."""
        _cancel(self._pending.values())


def _cancel(pending: Iterable[Pending]) -> None:
    for each in pending:
        each.cancel()
