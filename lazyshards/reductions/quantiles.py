"""Exact quantiles of more than memory holds: passes that count leading bits, until what is left can be sorted.

A number's bits, a sign taken care of, are in the order of the numbers. So the first pass counts how many begin with
each pattern of some bits, and knows in which pattern the wanted rank lies; the next looks at nothing else and counts
the following bits. As soon as all that can still be the answer fits in memory, it is collected and sorted.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshards.display import title_text
from lazyshards.engines.ranks import is_first_rank
from lazyshards.errors import UnsupportedDtypeError
from lazyshards.layout import Layout
from lazyshards.progress import Bar, progress_bar
from lazyshards.reductions.blocks import BlockPlan, Blocks, View, plan_blocks, stream
from lazyshards.reductions.reducers import Values, may_hold_nan
from lazyshards.reductions.running import settled, told
from lazyshards.selection import Cell

__all__ = ["find_median", "find_quantile"]

HELD_NBYTES = 32 << 20
"""Bytes of elements that are collected and sorted; a view of no more is read in one pass."""
TABLE_NBYTES = 4 << 20
"""Bytes of the counts of one pass: the more columns and quantiles, the fewer bits it looks at."""
MOST_BITS, LEAST_BITS = 16, 4
"""Bits that one pass looks at, at most and at least."""

Keys = npt.NDArray[np.unsignedinteger[Any]]
"""Unsigned integers in the order of the elements."""


def find_quantile(
    view: View,
    q: float | Sequence[float] | npt.NDArray[np.floating[Any]],
    axis: int | None,
    keepdims: bool,
    progress: bool,
) -> Any:
    """Return what ``numpy.quantile`` would, by linear interpolation between the two nearest elements."""
    # In float64 whatever the elements are: NumPy takes a q of Python for as coarse as they are, and ranks with it.
    parts = np.asarray(q, np.float64)
    sample = np.quantile(np.zeros((1,) * len(view.shape), view.dtype), q, axis=axis, keepdims=keepdims)

    def answer(values: npt.NDArray[Any], axis: int | None, keepdims: bool) -> npt.NDArray[Any]:
        return np.asarray(np.quantile(values, parts, axis=axis, keepdims=keepdims))

    def between(ranked: "Ranked") -> npt.NDArray[Any]:
        places = parts * (ranked.size - 1)
        below = np.floor(places)
        found = [ranked.pair(int(rank)) for rank in below.ravel()]
        # NumPy itself interpolates: of two elements, the fraction is the quantile.
        values = [
            np.quantile(pair, [part], axis=0)[0] for pair, part in zip(found, (places - below).ravel(), strict=True)
        ]
        return np.array(values).reshape(*places.shape, ranked.columns)

    def ranks(count: int) -> list[int]:
        return [int(rank) for rank in np.floor(parts.ravel() * (count - 1))]

    return _find(view, "quantile", _Question(answer, between, ranks, sample), axis, keepdims, progress)


def find_median(view: View, axis: int | None, keepdims: bool, progress: bool) -> Any:
    """Return what ``numpy.median`` would."""
    sample = np.median(np.zeros((1,) * len(view.shape), view.dtype), axis=axis, keepdims=keepdims)

    def answer(values: npt.NDArray[Any], axis: int | None, keepdims: bool) -> npt.NDArray[Any]:
        return np.asarray(np.median(values, axis=axis, keepdims=keepdims))

    def middle(ranked: "Ranked") -> npt.NDArray[Any]:
        pair = ranked.pair((ranked.size - 1) // 2)
        return np.asarray(np.median(pair if ranked.size % 2 == 0 else pair[:1], axis=0))

    question = _Question(answer, middle, lambda count: [(count - 1) // 2], sample)
    return _find(view, "median", question, axis, keepdims, progress)


class _Question(NamedTuple):
    """What is asked of the elements in order."""

    whole: Callable[[npt.NDArray[Any], int | None, bool], npt.NDArray[Any]]
    """Answers it of an array, by an axis, with or without reduced axes."""
    ranked: Callable[["Ranked"], npt.NDArray[Any]]
    """Answers it of elements of known ranks."""
    ranks: Callable[[int], list[int]]
    """Which ranks it needs, of so many elements; each with the one above it."""
    sample: Any
    """NumPy's answer of one element: its dtype."""


class Ranked(NamedTuple):
    """Elements of each column by rank."""

    size: int
    """Elements of a column."""
    values: dict[int, npt.NDArray[Any]]
    """By rank from 0, the element of each column."""

    @property
    def columns(self) -> int:
        """How many columns."""
        return len(next(iter(self.values.values())))

    def pair(self, rank: int) -> npt.NDArray[Any]:
        """Return the elements of a rank and, if there is one, of the next."""
        return np.stack([self.values[rank], self.values[min(rank + 1, self.size - 1)]])


def _find(view: View, name: str, question: _Question, axis: int | None, keepdims: bool, progress: bool) -> Any:
    shape, scalar = view.shape, view.selection.scalar
    rows_only = axis is not None and not scalar
    if rows_only and axis not in (0, -len(shape)):
        raise ValueError(
            f"axis={axis} of a {name}: expected 0, the rows, or None, all elements; for quantiles of each row use "
            f"map(), with numpy.{name}"
        )
    if view.dtype.kind not in "biuf" or view.dtype.itemsize > 8:
        raise UnsupportedDtypeError(
            f"no {name} of {view.dtype} can be found: expected booleans, integers, or floating ones of 64 bits at most"
        )
    if not view.size:
        none = question.whole(np.empty(shape, view.dtype), axis, keepdims)
        return told(none.astype(np.asarray(question.sample).dtype))

    kept = tuple([size if rows_only and i else 1 for i, size in enumerate(shape) if keepdims or (rows_only and i)])
    sample = np.asarray(question.sample)
    asked = sample.shape[: sample.ndim - len(kept)]
    if not scalar and 0 in asked:
        return told(np.empty(asked + kept, sample.dtype))

    def look(layout: Layout) -> npt.NDArray[Any]:
        title = f"{name} of {title_text(layout, view.selection)}"
        with progress_bar(None, title, shown=progress and is_first_rank()) as bar:
            found = [look_at(layout, cell, bar) for cell in cells]
        return found[0] if scalar else np.concatenate([each.reshape(*asked, -1) for each in found], axis=-1)

    def look_at(layout: Layout, cell: Cell, bar: Bar) -> npt.NDArray[Any]:
        plan = plan_blocks(layout, replace(view.selection, cell=cell))
        if not scalar and plan.read.nbytes > HELD_NBYTES:
            return _by_passes(plan, question, rows_only, bar)
        whole = _read(plan, bar)
        return question.whole(whole[0] if scalar else whole, axis, keepdims)

    cells = [view.selection.cell]
    if rows_only:
        # As many columns as can be held with all their rows, or counted together by the fewest bits.
        held = HELD_NBYTES // (len(view.selection.rows) * view.dtype.itemsize)
        counted = TABLE_NBYTES // (np.dtype(np.int64).itemsize << LEAST_BITS) // max(1, 2 * prod(asked))
        cells = _stripes(view.selection.cell, max(1, held, counted))
    found = settled(view, look, what=f"the {name} of {len(view.selection.rows):,} rows")
    return told((found if scalar else found.reshape(asked + kept)).astype(sample.dtype, copy=False))


def _stripes(cell: Cell, most: int) -> list[Cell]:
    """Return cells of at most so many columns that make up a cell, in the order of its columns."""
    axes = [i for i, axis in enumerate(cell) if type(axis) is range and len(axis) > 1]
    if not axes or prod([len(axis) for axis in cell if type(axis) is range]) <= most:
        return [cell]
    at, axis = axes[0], cell[axes[0]]
    assert type(axis) is range
    parts = axis[: len(axis) // 2], axis[len(axis) // 2 :]
    return [stripe for part in parts for stripe in _stripes((*cell[:at], part, *cell[at + 1 :]), most)]


def _read(plan: BlockPlan, bar: Bar) -> npt.NDArray[Any]:
    """Return all rows."""
    whole = np.empty(plan.read.shape, plan.read.dtype)

    def place(blocks: Blocks) -> None:
        for block, first in blocks:
            whole[first : first + len(block)] = block

    for _ in stream(plan, place, bar.update):
        pass
    return whole


def _by_passes(plan: BlockPlan, question: _Question, rows_only: bool, bar: Bar) -> npt.NDArray[Any]:
    width = prod(plan.read.cell_shape)
    count, columns = (len(plan.read.rows), width) if rows_only else (len(plan.read.rows) * width, 1)
    ranks = sorted({min(rank + i, count - 1) for rank in question.ranks(count) for i in (0, 1)})
    dtype = np.dtype(np.uint8) if plan.read.dtype == np.bool_ else plan.read.dtype
    search = _Search(dtype, columns, ranks)
    while not search.is_narrow and search.known < search.total:
        counts = search.begin()
        for _ in stream(plan, counts.add, bar.update):
            pass
        search.narrow(counts)
        if search.missing.all():
            break
    if search.known < search.total and not search.missing.all():
        found = search.collect(chain.from_iterable(stream(plan, search.candidates, bar.update)))
    else:
        found = search.prefixes
    values = {rank: _values(keys, dtype).astype(plan.read.dtype) for rank, keys in zip(ranks, found, strict=True)}
    answer = question.ranked(Ranked(count, values))
    if search.missing.any():
        answer = np.where(search.missing, np.nan, answer).astype(answer.dtype)
    return answer


def _keys(block: Values, dtype: np.dtype[np.generic], columns: int) -> Keys:
    """Return the keys of a block, a column of them for each column that is ranked by itself."""
    unsigned: np.dtype[Any] = np.dtype(f"u{dtype.itemsize}")
    top = unsigned.type(1 << (8 * dtype.itemsize - 1))
    bits: Keys = block.reshape(-1, columns).view(unsigned)
    if dtype.kind == "u":
        return bits
    if dtype.kind == "i":
        moved: Keys = bits ^ top
        return moved
    # The sign of negative numbers is turned, and with it the order of the rest.
    flipped: Keys = np.where(bits & top, ~bits, bits | top)
    return flipped


def _values(keys: Keys, dtype: np.dtype[np.generic]) -> npt.NDArray[Any]:
    """Return the elements of keys."""
    unsigned: np.dtype[Any] = np.dtype(f"u{dtype.itemsize}")
    top, keys = unsigned.type(1 << (8 * dtype.itemsize - 1)), keys.astype(unsigned)
    if dtype.kind == "i":
        keys = keys ^ top
    elif dtype.kind == "f":
        keys = np.where(keys & top, keys ^ top, ~keys)
    return keys.view(dtype)


def _distinct(prefixes: npt.NDArray[np.uint64]) -> list[int]:
    """Return where each of the prefixes that differ in some column comes first; numpy.unique takes minutes if wide."""
    first: dict[bytes, int] = {}
    for i, prefix in enumerate(prefixes):
        first.setdefault(prefix.tobytes(), i)
    return list(first.values())


@dataclass(slots=True)
class _Counts:
    """How many keys have each pattern of the bits that this pass looks at, of those whose first bits are known."""

    dtype: np.dtype[np.generic]
    columns: int
    shift: int
    """Bits that no pass has looked at after this one."""
    bits: int
    groups: npt.NDArray[np.uint64]
    """First bits that ranks were found to have, distinct, by column."""
    table: npt.NDArray[np.int64]
    """By group, column and pattern."""
    missing: npt.NDArray[np.bool_]
    """By column, whether a NaN was seen."""
    lock: AbstractContextManager[Any] = field(default_factory=threading.Lock)

    def add(self, blocks: Blocks) -> None:
        """Count blocks; the order does not matter."""
        for block, _ in blocks:
            self._add(block)

    def _add(self, block: Values) -> None:
        keys = _keys(block, self.dtype, self.columns)
        seen = np.isnan(block.reshape(-1, self.columns)).any(axis=0) if may_hold_nan(block.dtype) else False
        size = self.columns << self.bits
        start = np.arange(self.columns, dtype=np.int64) << self.bits
        leading = (keys >> keys.dtype.type(self.shift)).astype(np.uint64)
        pattern = (leading & np.uint64((1 << self.bits) - 1)).astype(np.int64) + start
        whole = self.shift + self.bits == 8 * keys.dtype.itemsize
        for i, group in enumerate(self.groups):
            wanted = pattern if whole else pattern[(leading >> np.uint64(self.bits)) == group]
            counted = np.bincount(wanted.ravel(), minlength=size).reshape(self.columns, -1)
            with self.lock:
                self.table[i] += counted
        with self.lock:
            self.missing |= seen


class _Search:
    """Which first bits the elements of some ranks have, by column.

    Parameters
    ----------
    dtype : dtype
        Of the elements.
    columns : int
    ranks : list of int
        In all of a column.
    """

    def __init__(self, dtype: np.dtype[np.generic], columns: int, ranks: list[int]) -> None:
        self._dtype, self._columns = dtype, columns
        self.total = 8 * dtype.itemsize
        self.known = 0
        self.prefixes = np.zeros((len(ranks), columns), np.uint64)
        # Ranks among the elements with the same first bits.
        self._within = np.repeat(np.array(ranks, np.int64)[:, None], columns, axis=1)
        self.missing = np.zeros(columns, np.bool_)
        self.left_nbytes = HELD_NBYTES + 1
        self._candidates: npt.NDArray[np.uint64] = self.prefixes[:1]

    def begin(self) -> _Counts:
        """Return the counts of the next pass, of nothing yet."""
        groups = self.prefixes[_distinct(self.prefixes)]
        fits = (TABLE_NBYTES // (8 * groups.size)).bit_length() - 1
        bits = min(max(min(fits, MOST_BITS), LEAST_BITS), self.total - self.known)
        table = np.zeros((len(groups), self._columns, 1 << bits), np.int64)
        shift = self.total - self.known - bits
        return _Counts(self._dtype, self._columns, shift, bits, groups, table, self.missing)

    def narrow(self, counts: _Counts) -> None:
        """Append the bits that the ranks have by these counts."""
        every = np.arange(self._columns)
        sizes = np.empty_like(self._within)
        for i, prefix in enumerate(self.prefixes):
            group = int(np.flatnonzero((counts.groups == prefix).all(axis=1))[0])
            ends = np.cumsum(counts.table[group], axis=1)
            pattern = (ends <= self._within[i][:, None]).sum(axis=1)
            sizes[i] = counts.table[group][every, pattern]
            self._within[i] -= ends[every, pattern] - sizes[i]
            self.prefixes[i] = (prefix << np.uint64(counts.bits)) | pattern.astype(np.uint64)
        self.known += counts.bits
        kept = _distinct(self.prefixes)
        self._candidates = self.prefixes[kept]
        self.left_nbytes = int(sizes[kept][:, ~self.missing].sum()) * 8

    @property
    def _rest(self) -> int:
        """Bits that are not known yet."""
        return self.total - self.known

    @property
    def is_narrow(self) -> bool:
        """Whether what can still be the answer may be collected, the rest of an element's bits beside its column."""
        return self.left_nbytes <= HELD_NBYTES and self._rest + self._columns.bit_length() <= 64

    def candidates(self, blocks: Blocks) -> list[list[npt.NDArray[np.uint64]]]:
        """Return, of each block and group, column and rest of the elements that have the group's first bits."""
        return [self._candidates_of(block) for block, _ in blocks]

    def _candidates_of(self, block: Values) -> list[npt.NDArray[np.uint64]]:
        keys = _keys(block, self._dtype, self._columns)
        leading = (keys >> keys.dtype.type(self._rest)).astype(np.uint64)
        rest = np.uint64((1 << self._rest) - 1)
        found = []
        for group in self._candidates:
            places, columns = np.nonzero((leading == group) & ~self.missing)
            found.append((columns.astype(np.uint64) << np.uint64(self._rest)) | (keys[places, columns] & rest))
        return found

    def collect(self, parts: Iterable[list[npt.NDArray[np.uint64]]]) -> npt.NDArray[np.uint64]:
        """Return the keys of all ranks, of what every block has for each group."""
        found = np.zeros_like(self.prefixes)
        pieces: list[list[npt.NDArray[np.uint64]]] = [[] for _ in self._candidates]
        for part in parts:
            for group, piece in zip(pieces, part, strict=True):
                group.append(piece)
        every = np.flatnonzero(~self.missing)
        shift = np.uint64(self._rest)
        for prefix, group in zip(self._candidates, pieces, strict=True):
            ordered = np.sort(np.concatenate(group))
            group.clear()
            starts = np.searchsorted(ordered, every.astype(np.uint64) << shift)
            for i in np.flatnonzero((self.prefixes == prefix).all(axis=1)):
                rest = ordered[starts + self._within[i, every]] & np.uint64((1 << self._rest) - 1)
                found[i, every] = (prefix[every] << shift) | rest
        return found
