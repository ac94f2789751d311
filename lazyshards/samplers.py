"""In which order an epoch takes the rows: a pure function of integers, the same everywhere.

Version 1 of the ordering contract; docs/explanation/ordering.md writes it down. Nothing here knows a dataset, an
engine or a clock. An order answers ``rows(start, stop)``, which rows the epoch takes at positions [start, stop),
without having drawn those before them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lazyshards.native import find_library
from lazyshards.selection import Rows

__all__ = [
    "ORDER_VERSION",
    "BlockOrder",
    "FileOrder",
    "KeyedPermutation",
    "Order",
    "RowOrder",
    "ShardOrder",
    "Shuffle",
    "derive_keys",
]

ORDER_VERSION = 1
"""Version of the contract: orders of one version never change."""

_ROUNDS = 8
"""Rounds of the bijection: from six on, the tests of shuffle quality no longer tell it from a drawn permutation."""
_TABLE_ROWS = 4096
"""Largest size that is permuted by sorting keyed hashes: there it is quicker than a network, and mixes better."""
_PAGE_ROWS = 1 << 14
"""Positions that are permuted together: a batch of a few rows costs a page only every so often."""


class Order(Protocol):
    """In which order an epoch takes the rows."""

    def rows(self, start: int, stop: int) -> Rows:
        """Return which rows the epoch takes at positions [start, stop)."""
        ...


def derive_keys(*parts: object, count: int = _ROUNDS) -> tuple[int, ...]:
    """Return ``count`` 64-bit keys that depend on every part: integers and strings, compared by their text."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in (ORDER_VERSION, *parts))
    data = b"".join(
        blake2b(text.encode(), digest_size=64, salt=i.to_bytes(16, "little")).digest() for i in range(-(-count // 8))
    )
    return tuple(int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(count))


class KeyedPermutation:
    """A permutation of [0, size) that is computed for any positions, in no memory: the size may be 10**12.

    A keyed Feistel network on pairs of numbers below ``side``, the least whole number whose square holds ``size``,
    walked along its cycles until it is below ``size`` again; so it is a bijection for every size and every key, and as
    the square is hardly larger than ``size``, few positions walk. Sizes up to 4,096 are sorted by keyed hash.

    Source: J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002 (a network modulo its sides, and
    cycle walking); the round function is Chris Wellons' lowbias32, the hash of the table the finaliser of MurmurHash3
    (Austin Appleby).

    Parameters
    ----------
    size : int
        At most 2**62.
    keys : sequence of int
        One 64-bit key a round, an even number of them; the network takes the lower half of each.
    """

    __slots__ = ("_inverse", "_keys", "_side", "_table", "size")

    def __init__(self, size: int, keys: Sequence[int]) -> None:
        self.size = size
        self._side = isqrt(max(0, size - 1)) + 1
        self._keys = tuple([np.uint32(key & 0xFFFF_FFFF) for key in keys])
        self._table: npt.NDArray[np.int64] | None = None
        self._inverse: npt.NDArray[np.int64] | None = None
        if size <= _TABLE_ROWS:
            hashes = np.arange(size, dtype=np.uint64)
            for key in keys[:2]:
                hashes = _mix(hashes, np.uint64(key))
            self._table = np.argsort(hashes, kind="stable")
            self._inverse = np.argsort(self._table, kind="stable")

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where each position goes, in a new array.

        Parameters
        ----------
        positions : ndarray of int64
            Each in [0, size).
        """
        if self._table is not None:
            return self._table[positions]
        library = find_library()
        if library is None:
            return self._walk(positions, self._encrypt)
        values, keys = np.array(positions, np.int64), np.array(self._keys)
        where = values.ctypes.data, values.size, self.size, self._side, keys.ctypes.data, len(keys)
        library.lazyshards_permute(*where)
        return values

    def inverse(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return which position goes to each of ``positions``."""
        if self._inverse is not None:
            return self._inverse[positions]
        return self._walk(positions, self._decrypt)

    def _walk(self, positions: npt.NDArray[np.int64], step: "_Step") -> npt.NDArray[np.int64]:
        values = step(positions.astype(np.uint64))
        size = np.uint64(self.size)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            walked = step(values[outside])
            values[outside] = walked
            outside = outside[walked >= size]
        return values.view(np.int64)

    def _split(self, values: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        side = np.uint64(self._side)
        left = values // side
        return left.astype(np.uint32), (values - left * side).astype(np.uint32)

    def _join(self, left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        values = left.astype(np.uint64)
        values *= np.uint64(self._side)
        values += right
        return values

    def _round(self, half: npt.NDArray[np.uint32], key: np.uint32) -> npt.NDArray[np.uint32]:
        """Return a keyed number below ``side`` for each of ``half``."""
        mixed = half ^ key
        mixed *= _MULTIPLIER_32_1
        mixed ^= mixed >> _SHIFT_15
        mixed *= _MULTIPLIER_32_2
        mixed ^= mixed >> _SHIFT_16
        scaled = mixed.astype(np.uint64)
        scaled *= np.uint64(self._side)
        scaled >>= _SHIFT_32
        return scaled.astype(np.uint32)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        side = np.uint32(self._side)
        left, right = self._split(values)
        for key in self._keys:
            left += self._round(right, key)
            # Modulo: what was below ``side`` wraps to a huge number, and the other one is the lesser.
            np.minimum(left, left - side, out=left)
            left, right = right, left
        return self._join(left, right)

    def _decrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        side = np.uint32(self._side)
        left, right = self._split(values)
        for key in reversed(self._keys):
            left, right = right, left
            left -= self._round(right, key)
            np.minimum(left, left + side, out=left)
        return self._join(left, right)


class _Step(Protocol):
    def __call__(self, values: npt.NDArray[np.uint64], /) -> npt.NDArray[np.uint64]: ...


_MULTIPLIER_32_1 = np.uint32(0x7FEB352D)
_MULTIPLIER_32_2 = np.uint32(0x846CA68B)
_SHIFT_15 = np.uint32(15)
_SHIFT_16 = np.uint32(16)
_SHIFT_32 = np.uint64(32)
_SHIFT = np.uint64(33)
_MULTIPLIER_1 = np.uint64(0xFF51AFD7ED558CCD)
_MULTIPLIER_2 = np.uint64(0xC4CEB9FE1A85EC53)


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Return a keyed 64-bit hash of each value, in a new array."""
    mixed = values + key
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> _SHIFT
    return mixed


@dataclass(frozen=True, slots=True)
class FileOrder:
    """Rows as they come."""

    size: int
    """Number of rows."""

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows at positions [start, stop): the same numbers."""
        return range(start, stop)


class RowOrder:
    """A true permutation of all rows, drawn a page at a time.

    Parameters
    ----------
    size : int
        Number of rows.
    keys : sequence of int
    """

    def __init__(self, size: int, keys: Sequence[int]) -> None:
        self.size = size
        self._permutation = KeyedPermutation(size, keys)
        self._page: tuple[int, npt.NDArray[np.int64]] | None = None

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows at positions [start, stop)."""
        pieces = []
        while start < stop:
            number, begin = divmod(start, _PAGE_ROWS)
            page = self._page
            if page is None or page[0] != number:
                first = number * _PAGE_ROWS
                positions = np.arange(first, min(first + _PAGE_ROWS, self.size), dtype=np.int64)
                page = self._page = (number, self._permutation(positions))
            end = min(_PAGE_ROWS, begin + stop - start)
            pieces.append(page[1][begin:end])
            start += end - begin
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


class BlockOrder:
    """Blocks of contiguous rows permuted, and the rows of a window of blocks shuffled together.

    Parameters
    ----------
    size : int
        Number of rows.
    keys : sequence of int
        For the blocks.
    window_keys : sequence of int and str
        For the rows of each window; the window's number is mixed in.
    block_rows : int
        Rows of a block; the last block of the dataset may be shorter.
    window_blocks : int
        Blocks that are in memory together.
    """

    def __init__(
        self, size: int, keys: Sequence[int], window_keys: Sequence[int | str], block_rows: int, window_blocks: int
    ) -> None:
        self.size = size
        block_rows = self.block_rows = min(block_rows, max(1, size))
        self.window_blocks = window_blocks
        self._window_keys = tuple(window_keys)
        self._blocks = KeyedPermutation(-(-size // block_rows), keys)
        last = np.array([max(0, self._blocks.size - 1)], np.int64)
        # Where the short block comes in the order: every window before it is full.
        self._short_at = int(self._blocks.inverse(last)[0]) if size else 0
        self._short_by = self._blocks.size * block_rows - size
        self._window: tuple[int, npt.NDArray[np.int64]] | None = None

    def _window_start(self, number: int) -> int:
        """Return the position at which a window begins."""
        blocks = min(number * self.window_blocks, self._blocks.size)
        return blocks * self.block_rows - (self._short_by if self._short_at < blocks else 0)

    def _window_rows(self, number: int) -> npt.NDArray[np.int64]:
        """Return the rows of a window in the order in which the epoch takes them."""
        if self._window is None or self._window[0] != number:
            first = number * self.window_blocks
            blocks = self._blocks(np.arange(first, min(first + self.window_blocks, self._blocks.size), dtype=np.int64))
            rows = (blocks[:, None] * self.block_rows + np.arange(self.block_rows, dtype=np.int64)).ravel()
            rows = rows[rows < self.size]
            keys = derive_keys(*self._window_keys, number)
            self._window = (number, rows[KeyedPermutation(len(rows), keys)(np.arange(len(rows), dtype=np.int64))])
        return self._window[1]

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows at positions [start, stop)."""
        pieces = []
        while start < stop:
            # The short block may make the guess one too low.
            number = start // (self.window_blocks * self.block_rows)
            if self._window_start(number + 1) <= start:
                number += 1
            begin = start - self._window_start(number)
            window = self._window_rows(number)
            end = min(len(window), begin + stop - start)
            pieces.append(window[begin:end])
            start += end - begin
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


class ShardOrder:
    """Shards permuted, and the rows of each shuffled within it.

    Parameters
    ----------
    edges : ndarray of int64
        Positions at which a run of rows of one shard begins, and the number of rows at the end: ascending, from 0.
    keys : sequence of int
        For the order of the shards.
    shard_keys : sequence of int and str
        For the rows of each; the shard's number is mixed in.
    """

    def __init__(self, edges: npt.NDArray[np.int64], keys: Sequence[int], shard_keys: Sequence[int | str]) -> None:
        self.size = int(edges[-1])
        self._edges = edges
        self._shard_keys = tuple(shard_keys)
        count = len(edges) - 1
        self._shards = KeyedPermutation(count, keys)(np.arange(count, dtype=np.int64))
        self._ends = np.cumsum(np.diff(edges)[self._shards])
        self._drawn: tuple[int, KeyedPermutation] | None = None

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows at positions [start, stop)."""
        pieces = []
        while start < stop:
            turn = int(np.searchsorted(self._ends, start, "right"))
            shard, end = int(self._shards[turn]), int(self._ends[turn])
            count = int(self._edges[shard + 1] - self._edges[shard])
            begin = start - (end - count)
            until = min(count, begin + stop - start)
            if self._drawn is None or self._drawn[0] != shard:
                self._drawn = (shard, KeyedPermutation(count, derive_keys(*self._shard_keys, shard)))
            within = self._drawn[1](np.arange(begin, until, dtype=np.int64))
            pieces.append(within + self._edges[shard])
            start += until - begin
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How an epoch is ordered: all that decides it besides the rows themselves."""

    name: str
    """``"rows"``, ``"blocks"``, ``"shards"``, or empty for the order in which rows come."""
    seed: int
    """Of the shuffle."""
    block_rows: int
    """Rows of a block, for ``"blocks"``."""
    window_blocks: int
    """Blocks that are shuffled together, for ``"blocks"``."""

    def order(self, size: int, edges: Callable[[], npt.NDArray[np.int64]], fingerprint: str, epoch: int) -> Order:
        """Return the order of an epoch.

        Parameters
        ----------
        size : int
            Number of rows.
        edges : callable
            Returns the rows at which a run of rows of one shard begins, and the number of rows at the end; called for
            ``"shards"`` only.
        fingerprint : str
            Of the rows.
        epoch : int
            From 0.
        """
        if not self.name or not size:
            return FileOrder(size)
        parts = (self.name, self.seed, epoch, fingerprint)
        if self.name == "rows":
            return RowOrder(size, derive_keys(*parts))
        if self.name == "shards":
            return ShardOrder(edges(), derive_keys(*parts), ("within", *parts))
        blocks = (*parts, self.block_rows, self.window_blocks)
        return BlockOrder(size, derive_keys(*blocks), ("within", *blocks), self.block_rows, self.window_blocks)
