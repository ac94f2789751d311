"""Datasets interleaved by weight: which dataset gives the row at each position, and which of its rows that is."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from hashlib import blake2b
from math import gcd, lcm
from typing import NoReturn, Unpack

import numpy as np
import numpy.typing as npt

from lazyshards.ahead import Source
from lazyshards.batches import Batches, BatchOptions
from lazyshards.dataset import ShardedDataset
from lazyshards.joined import concat
from lazyshards.opening import open_shards
from lazyshards.samplers import Order, Shuffle
from lazyshards.selection import Rows

__all__ = ["MixOrder", "Mixture", "mix"]

_MOST_PERIOD = 1 << 16
"""Positions after which the interleaving repeats, at most; weights are rounded to shares of it where they must be."""


def mix(weights: Mapping[ShardedDataset | str, float], *, rows: int | None = None) -> "Mixture":
    """Interleave datasets by weight, deterministically: any run of rows holds each one's share, within a row or so.

    Parameters
    ----------
    weights : mapping from ShardedDataset or path to float
        Above 0; only their ratios count. A path is opened with :func:`open_shards`. All have one row shape and dtype.
    rows : int, optional
        Rows of an epoch. By default as many as can be taken before a dataset would give a row twice.

    Returns
    -------
    Mixture
        Its ``batches`` are like those of a dataset. Each dataset goes on from epoch to epoch where it was: all its rows
        come once before any comes again.

    Raises
    ------
    ValueError
        If a weight is not above 0, or a dataset is empty.
    LayoutError
        If row shapes or dtypes differ.

    Examples
    --------
    >>> import numpy as np, lazyshards
    >>> np.save("common.npy", np.arange(90))
    >>> np.save("rare.npy", np.arange(100, 120))
    >>> common, rare = [lazyshards.open_shards(f"{name}.npy", engine="numpy") for name in ("common", "rare")]
    >>> mixture = lazyshards.mix({common: 3, rare: 1})
    >>> len(mixture)
    82
    >>> next(iter(mixture.batches(8))).tolist()
    [0, 1, 100, 2, 3, 4, 101, 5]
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"mix() takes a mapping of weights, as in mix({{a: 3, b: 1}}), not a {type(weights).__name__}")
    if not weights:
        raise ValueError("mix() was given no dataset")
    datasets = [open_shards(key) if isinstance(key, str) else key for key in weights]
    counts = _shares([_weight(weight, name) for name, weight in weights.items()])
    joined = concat(datasets)
    for dataset in datasets:
        if not len(dataset):
            raise ValueError(f"a dataset without rows cannot be mixed: {dataset!r:.200}")
    pattern = _pattern(counts)
    if rows is None:
        rows = _most_rows(pattern, counts, [len(dataset) for dataset in datasets])
    elif operator.index(rows) < 1:
        raise ValueError(f"rows={rows!r} must be an integer, 1 or more")
    return Mixture(datasets, joined, counts, pattern, operator.index(rows))


def _weight(weight: object, name: object) -> Fraction:
    """Return a weight as the fraction that its decimals say."""
    try:
        fraction = Fraction(str(weight))
    except (TypeError, ValueError):
        fraction = Fraction(0)
    if fraction <= 0:
        what = repr(name).partition("\n")[0]
        raise ValueError(f"the weight of {what:.80} is {weight!r}, expected a number above 0")
    return fraction


def _shares(weights: Sequence[Fraction]) -> list[int]:
    """Return how many positions of a period each dataset gets: whole numbers in the ratio of the weights."""
    common = lcm(*[weight.denominator for weight in weights])
    counts = [int(weight * common) for weight in weights]
    divisor = reduce(gcd, counts)
    counts = [count // divisor for count in counts]
    total = sum(counts)
    if total <= _MOST_PERIOD:
        return counts
    return [max(1, round(Fraction(count * _MOST_PERIOD, total))) for count in counts]


def _pattern(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return which dataset each position of a period belongs to: each one's positions as evenly spaced as can be."""
    places = np.concatenate([(2 * np.arange(count) + 1) / (2 * count) for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]


def _ranks(pattern: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for each position, how many before it in the period belong to the same dataset."""
    order = np.argsort(pattern, kind="stable")
    ordered = pattern[order]
    ranks = np.empty(len(pattern), np.int64)
    ranks[order] = np.arange(len(pattern)) - np.searchsorted(ordered, ordered, "left")
    return ranks


def _most_rows(pattern: npt.NDArray[np.int64], counts: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the first position at which a dataset would have given more rows than it has."""
    ranks, most = _ranks(pattern), []
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        periods, rest = divmod(size, count)
        at = np.flatnonzero((pattern == number) & (ranks == rest))
        most.append(periods * len(pattern) + int(at[0]))
    return min(most)


class MixOrder:
    """The rows of an epoch of a mixture, numbered in the datasets one after the other.

    Parameters
    ----------
    pattern : ndarray of int64
        Which dataset each position of a period belongs to.
    counts : sequence of int
        How many positions of a period each dataset has.
    sizes : sequence of int
        Rows of each dataset.
    epoch : (int, int)
        Its number, and the rows of each epoch.
    orders : callable
        ``orders(dataset, turn)`` returns in which order a dataset gives its rows for the turn-th time.
    """

    def __init__(
        self,
        pattern: npt.NDArray[np.int64],
        counts: Sequence[int],
        sizes: Sequence[int],
        epoch: tuple[int, int],
        orders: Callable[[int, int], Order],
    ) -> None:
        self._pattern = pattern
        self._ranks = _ranks(pattern)
        self._counts = counts
        self._sizes = sizes
        self._starts = np.cumsum([0, *sizes]).tolist()
        number, rows = epoch
        self._rows = rows
        periods, rest = divmod(rows, len(pattern))
        in_rest = np.bincount(pattern[:rest], minlength=len(counts)).tolist()
        self._drawn = [number * (periods * count + more) for count, more in zip(counts, in_rest, strict=True)]
        self._orders = orders
        self._known: dict[tuple[int, int], Order] = {}

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows at positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        period, at = np.divmod(positions, len(self._pattern))
        holder, rank = self._pattern[at], self._ranks[at]
        found = np.empty(len(positions), np.int64)
        for number, count in enumerate(self._counts):
            where = np.flatnonzero(holder == number)
            if len(where):
                first = self._drawn[number] + int(period[where[0]]) * count + int(rank[where[0]])
                found[where] = self._draw(number, first, first + len(where)) + self._starts[number]
        return found

    def _draw(self, number: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return what a dataset gives at its draws [first, last), which may be of several turns."""
        size, pieces = self._sizes[number], []
        while first < last:
            turn, begin = divmod(first, size)
            end = min(size, begin + last - first)
            if (number, turn) not in self._known:
                self._known = {key: order for key, order in self._known.items() if key[0] != number}
                self._known[number, turn] = self._orders(number, turn)
            pieces.append(np.asarray(self._known[number, turn].rows(begin, end), np.int64))
            first += end - begin
        return np.concatenate(pieces)


class Mixture:
    """Datasets interleaved by weight. Made by :func:`mix`.

    Parameters
    ----------
    datasets : sequence of ShardedDataset
    joined : ShardedDataset
        The same one after the other.
    counts : sequence of int
        Share of each.
    pattern : ndarray of int64
        Which dataset each position of a period belongs to.
    rows : int
        Rows of an epoch.
    """

    def __init__(
        self,
        datasets: Sequence[ShardedDataset],
        joined: ShardedDataset,
        counts: Sequence[int],
        pattern: npt.NDArray[np.int64],
        rows: int,
    ) -> None:
        self._datasets = datasets
        self._joined = joined
        self._counts = counts
        self._pattern = pattern
        self._rows = rows

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        return self._rows

    @property
    def fractions(self) -> tuple[float, ...]:
        """Which part of the rows each dataset gives."""
        return tuple(count / len(self._pattern) for count in self._counts)

    def __repr__(self) -> str:
        parts = [
            f"  {fraction:.4%} of {len(dataset):,} rows, {dataset.format}"
            for fraction, dataset in zip(self.fractions, self._datasets, strict=True)
        ]
        shape = self._joined.shape[1:]
        return "\n".join([f"<Mixture of {self._rows:,} rows of {self._joined.dtype} {shape} an epoch>", *parts])

    def batches(self, batch_size: int, *, engine: str | None = None, **options: Unpack[BatchOptions]) -> Batches:
        """Return the rows in batches, each with every dataset's share of it.

        Parameters
        ----------
        batch_size : int
            Rows of a batch.
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default the datasets' own.
        **options
            As for :meth:`ShardedDataset.batches`; a shuffle is made within each dataset.
        """
        sources = [dataset.batch_source(engine) for dataset in self._datasets]
        source = _MixSource(self._joined.batch_source(engine), sources, self._counts, self._pattern, self._rows)
        return Batches(source, batch_size, **options)

    def to_torch(self) -> NoReturn:
        """Raise TypeError: row i of a mixture is another one in each epoch, so that torch cannot ask for it by number.

        Its batches are a torch IterableDataset: ``mixture.batches(256).to_torch()``.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError(
            "a mixture goes on from epoch to epoch, so that it is no map-style torch Dataset; its batches are an "
            "IterableDataset with a state: mixture.batches(256, shuffle=True).to_torch()"
        )


class _MixSource:
    """What batches of a mixture are taken from: rows of the joined datasets."""

    def __init__(
        self,
        joined: Source,
        sources: Sequence[Source],
        counts: Sequence[int],
        pattern: npt.NDArray[np.int64],
        rows: int,
    ) -> None:
        self._sources = sources
        self._counts = counts
        self._pattern = pattern
        self.size = rows
        self.row_nbytes, self.together_nbytes = joined.row_nbytes, joined.together_nbytes
        self.edges, self.reading, self.draw_seed = joined.edges, joined.reading, joined.draw_seed
        self.begin, self.cost, self.warmed_nbytes = joined.begin, joined.cost, joined.warmed_nbytes
        text = repr(([source.fingerprint for source in sources], list(counts), rows))
        self.fingerprint = blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def title(self) -> str:
        """What is read by which engine, in few words."""
        first = self._sources[0].title
        return first if len(self._sources) == 1 else f"{first} and {len(self._sources) - 1} more"

    @property
    def description(self) -> str:
        """What the rows are, for a person."""
        parts: Iterable[tuple[int, Source]] = zip(self._counts, self._sources, strict=True)
        return f"{self.size:,} rows: " + "; ".join(f"{count} of {source.description}" for count, source in parts)

    def order(self, shuffle: Shuffle, epoch: int) -> Order:
        """Return the order of an epoch."""
        sizes = [source.size for source in self._sources]
        return MixOrder(
            self._pattern,
            self._counts,
            sizes,
            (epoch, self.size),
            lambda number, turn: self._sources[number].order(shuffle, turn),
        )
