from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards.layout import Decoded, Extent, Extents, Layout, Packed, Shard
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage, Stamp
from lazyshards.tiling import align_tile_rows

KIND = np.dtype("f8")


def make(*shards):
    """Return a layout of shards that are nowhere, each of so many rows and such edges, or of a source."""
    made = []
    for i, (rows, source) in enumerate(shards):
        known = Decoded(None, source) if type(source) is tuple else source
        made.append(Shard(f"/d/{i}", rows, (4_000,), KIND, Stamp(1 << 40), known))
    return Layout.from_shards(made, "npy", LocalStorage())


def tile_rows(layout, index, workers):
    """Return the rows of a tile of the plan of an index."""
    return compile_plan(layout, select(select_all(layout.rows, (4_000,)), index), Capacity(workers)).tile_rows


@pytest.mark.parametrize(
    ("index", "workers", "expected"),
    [
        (slice(None), 2, 500),
        (slice(None), 4, 250),  # no border lies near
        (slice(None), 10, 100),
        (slice(30, 1_000), 2, 485),
        (slice(0, 990), 2, 500),
        (slice(10, 980), 2, 490),
        (slice(None, None, -1), 2, 500),
        (slice(None, 9, -1), 2, 500),
        (slice(None, None, 2), 2, 250),
        (slice(0, 900, 3), 3, 100),
    ],
)
def test_tiles_begin_where_blocks_begin(index, workers, expected):
    """Tiles are made a little longer where they then begin with a block, whatever the step."""
    layout = make((1_000, tuple(range(0, 1_000, 100))))
    assert tile_rows(layout, index, workers) == expected


def test_uneven_blocks_and_shards():
    """The one border of two tiles is put where a block begins, whichever of them and in whichever shard."""
    layout = make((300, (0, 7, 130)), (0, ()), (400, (0, 71, 390)))
    assert tile_rows(layout, slice(None), 2) == 371
    assert tile_rows(layout, slice(100, None), 2) == 300


@pytest.mark.parametrize(
    "sources",
    [
        [(1_000, Packed(64))],
        [(1_000, Extents((Extent(0, 510, "", 0), Extent(510, 490, "", 9_999_999))))],
        [(1_000, ())],
        [(500, (0, 10)), (500, Packed(64))],
    ],
)
def test_what_has_no_blocks_is_cut_evenly(sources):
    """Where rows are read by themselves, or nothing is known of blocks, all tiles are as long as each other."""
    assert tile_rows(make(*sources), slice(None), 2) == 500


def test_rows_at_random_are_cut_evenly():
    """An index array has no order of blocks to follow."""
    layout = make((1_000, (0, 510)))
    assert tile_rows(layout, np.random.default_rng(0).permutation(1_000), 2) == 500


def test_a_tile_never_holds_more_than_it_can():
    """No alignment makes a tile longer than an engine can hold."""
    layout = make((1_000, (0, 510)))
    selection = select_all(1_000, (4_000,))
    row_nbytes = 4_000 * 8
    for most, expected in ((505, 500), (510, 510)):
        assert compile_plan(layout, selection, Capacity(2, most * row_nbytes)).tile_rows == expected


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(2, 5),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_the_busiest_tile_never_decodes_more(blocks, tiles, data):
    """Counted block by block, the busiest tile decodes no more rows than it would with tiles of one length."""
    layout = make(*[(sum(sizes), tuple([0, *accumulate(sizes)][:-1])) for sizes in blocks])
    rows = range(layout.rows)[data.draw(st.slices(layout.rows))]
    if len(rows) < tiles:
        return
    even = -(-len(rows) // tiles)
    found = align_tile_rows(rows, layout, even, len(rows))
    owner = np.repeat(np.arange(sum(map(len, blocks))), [size for sizes in blocks for size in sizes])

    def busiest(size):
        # As a request sees it: of a block, the rows of the request that it holds.
        held = owner[np.array(rows)]
        counts = np.bincount(held)
        return max(counts[np.unique(held[at : at + size])].sum() for at in range(0, len(rows), size))

    assert even <= found <= even + even // 8
    assert busiest(found) <= busiest(even)
