"""How many rows a tile has, so that tiles begin where a format's own blocks begin."""

from bisect import bisect_left, bisect_right
from itertools import accumulate

import numpy as np

from lazyshards.layout import Decoded, Layout
from lazyshards.selection import Rows

__all__ = ["align_tile_rows", "deal_tile_rows"]

_MOST_TILES = 64
"""Tiles up to which it is tried: of more, each holds fewer rows, and their borders seldom fall together."""
_MOST_TRIED = 64
"""Sizes of a tile that are compared at most."""
_MOST_LONGER = 8
"""A tile may be longer by one part in so many; what the others wait for it has to be less than what is saved."""
_MOST_WEIGHED = 4096
"""Shards of which it is asked whether they cost the same."""
_UNEVEN = 1.5
"""How many times more bytes of a file a row of one shard takes than that of another, for them to differ."""
_DEALT = 4
"""Smaller tiles out of one, where they are dealt as workers get free: the last is waited for a quarter as long."""
_MOST_TWICE = 8
"""One part in so many of the rows may be decoded twice for it."""


def align_tile_rows(rows: Rows, layout: Layout, tile_rows: int, most: int) -> int:
    """Return the size of a tile, from ``tile_rows`` to ``most``, with which the busiest tile decodes the fewest rows.

    A block of a format (a row group, a batch, a chunk) that two tiles share is decoded by both. All tiles but the last
    are of one size, so that blocks of one size, or few tiles, can be met; where none can, ``tile_rows`` stays.

    Parameters
    ----------
    rows : range or ndarray of int64
        Rows of the layout; only those of a range lie in blocks in their order.
    layout : Layout
    tile_rows : int
        Rows of a tile if all are to be as long as each other.
    most : int
        Rows that a tile can hold.
    """
    tiles = -(-len(rows) // tile_rows)
    if not isinstance(rows, range) or not 1 < tiles <= _MOST_TILES or not _lies_in_blocks(layout, tiles * _MOST_TRIED):
        return tile_rows
    longest = min(most, tile_rows + tile_rows // _MOST_LONGER)
    # Every border of a block near the end of some tile is one that a tile may end with.
    places = _borders(rows, layout)
    tried = {tile_rows}
    for number in range(1, tiles):
        for place in places[bisect_left(places, number * tile_rows) : bisect_right(places, number * longest)]:
            if place % number == 0:
                tried.add(place // number)
        if len(tried) > _MOST_TRIED:
            return tile_rows  # blocks so small that little is decoded twice
    return min(tried, key=lambda size: (_decoded(places, len(rows), size), size))


def deal_tile_rows(rows: Rows, layout: Layout, tile_rows: int) -> int:
    """Return the size of what workers take one after the other, whoever is free: less than a tile, if work is uneven.

    Where some shards are encoded and not all alike, as many rows are not as much work.

    Parameters
    ----------
    rows : range or ndarray of int64
        Rows of the layout; an array of them is taken to come from everywhere.
    layout : Layout
        Narrowed to the shards that the rows touch.
    tile_rows : int
        Rows of a tile if each worker has one.
    """
    if not isinstance(rows, range) or not _differ_in_cost(layout):
        return tile_rows
    smaller = align_tile_rows(rows, layout, -(-tile_rows // _DEALT), tile_rows)
    return tile_rows if _decoded_twice(rows, layout, smaller) * _MOST_TWICE > len(rows) else smaller


def _differ_in_cost(layout: Layout) -> bool:
    """Return whether some shards are encoded, and rows of some take more bytes of their file than those of others."""
    if not layout.sources or not 1 < len(layout) <= _MOST_WEIGHED:
        return False
    rows = np.diff(layout.ends, prepend=0)
    costs = np.zeros(len(layout))  # of what is not encoded
    for number, source in layout.sources.items():
        if isinstance(source, Decoded) and rows[number]:
            if not source.has_file:
                return False  # nobody knows
            costs[number] = layout.stamps[number, 0] / rows[number]
    costs = costs[rows > 0]
    return bool(len(costs) and costs.max() > _UNEVEN * costs.min())


def _decoded_twice(rows: range, layout: Layout, size: int) -> int:
    """Return the rows of the blocks in which a tile ends and another begins, so that both decode them."""
    count = 0
    for end in range(size, len(rows), size):
        first, last = _block_of(rows[end], layout)
        if first <= rows[end - 1] < last:
            count += last - first
    return count // abs(rows.step)


def _block_of(row: int, layout: Layout) -> tuple[int, int]:
    """Return the rows of the block that a row is decoded with; none if it is not."""
    shard = layout.shard_of(row)
    source = layout.sources.get(shard)
    if not isinstance(source, Decoded):
        return row, row
    start, stop = layout.start_stop(shard)
    edges = (*(source.edges or (0,)), stop - start)
    after = bisect_right(edges, row - start)
    return start + edges[after - 1], start + edges[after]


def _lies_in_blocks(layout: Layout, most: int) -> bool:
    """Return whether all rows lie in blocks that are decoded, of few shards."""
    if len(layout) > most or len(layout.sources) < len(layout):
        return False
    ends = layout.ends.tolist()
    return all(
        [
            isinstance(source, Decoded) and (len(source.edges) > 0 or start == end)
            for source, start, end in zip(map(layout.source, range(len(ends))), [0, *ends], ends, strict=False)
        ]
    )


def _borders(rows: range, layout: Layout) -> list[int]:
    """Return the places in the request, ascending, at which blocks and shards begin; 0 and its length among them."""
    count = len(rows)
    low, high = (rows[0], rows[-1]) if rows.step > 0 else (rows[-1], rows[0])
    places = {0, count}
    for shard in range(layout.shard_of(low), layout.shard_of(high) + 1):
        start, stop = layout.start_stop(shard)
        source = layout.sources.get(shard)
        assert isinstance(source, Decoded)
        near = source.edges[bisect_right(source.edges, low - start) : bisect_left(source.edges, high + 1 - start)]
        for edge in (0, *near, stop - start):
            # The first row of the request that lies on the other side of the border.
            moved = start + edge - rows.start
            place = -(-moved // rows.step) if rows.step > 0 else moved // rows.step + 1
            if 0 < place < count:
                places.add(place)
    return sorted(places)


def _decoded(places: list[int], count: int, size: int) -> int:
    """Return the rows that the busiest tile decodes, if each decodes the blocks that it touches from end to end."""
    ends = [*accumulate([size] * (-(-count // size) - 1)), count]
    most = start = 0
    for end in ends:
        most = max(most, places[bisect_left(places, end)] - places[bisect_right(places, start) - 1])
        start = end
    return most
