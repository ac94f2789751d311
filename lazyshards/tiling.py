"""How many rows a tile has, so that tiles begin where a format's own blocks begin."""

from bisect import bisect_left, bisect_right
from itertools import accumulate

from lazyshards.layout import Decoded, Layout
from lazyshards.selection import Rows

__all__ = ["align_tile_rows"]

_MOST_TILES = 64
"""Tiles up to which it is tried: of more, each holds fewer rows, and their borders seldom fall together."""
_MOST_TRIED = 64
"""Sizes of a tile that are compared at most."""
_MOST_LONGER = 8
"""A tile may be longer by one part in so many; what the others wait for it has to be less than what is saved."""


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
