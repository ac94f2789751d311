import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards.layout import Extent, Extents, Layout, Packed, Planes, Shard
from lazyshards.storage import LocalStorage, Stamp


def make(counts, *, root="/data/set", names=None, dtypes="<f4", row_shape=(3,), sizes=None, sources=None, etag=""):
    """Return a layout of shards that are nowhere: nothing here reads."""
    names = names or [f"shard_{i}.npy" for i in range(len(counts))]
    dtypes = [dtypes] * len(counts) if isinstance(dtypes, str) else dtypes
    return Layout.from_shards(
        [
            Shard(
                f"{root}/{name}",
                count,
                row_shape,
                np.dtype(dtype),
                Stamp(sizes[i] if sizes else 128 + count * 12, 7 + i, 100 + i, etag and f"{etag}{i}"),
                sources[i] if sources else Packed(128),
            )
            for i, (count, name, dtype) in enumerate(zip(counts, names, dtypes, strict=True))
        ],
        "npy",
        LocalStorage(),
    )


def owners(layout):
    """Return the path and local number of each row, counted one by one."""
    return [(shard.path, local) for shard in layout.shards for local in range(shard.rows)]


def gathered(layout, rows):
    """Return the path and local number at each place of a buffer that segments fill; None where nothing lands."""
    buffer = np.full(len(rows), None, object)
    for segment in layout.segments(rows):
        path = layout.path(segment.shard)
        places = np.arange(len(rows))[segment.target]
        assert len(places) == len(segment.local)
        for place, local in zip(places.tolist(), list(segment.local), strict=True):
            assert buffer[place] is None, "a place was filled twice"
            buffer[place] = (path, int(local))
    return buffer.tolist()


def every_counts():
    """Return the row counts of every small layout."""
    return [counts for n in range(1, 5) for counts in itertools.product((0, 1, 3), repeat=n)]


def every_range(count):
    """Return every range of rows below a count, once."""
    steps = [*range(-count - 1, 0), *range(1, count + 2)]
    ranges = {range(count)[a:b:s] for a, b, s in itertools.product(range(-1, count + 1), range(count + 1), steps)}
    return [rows for rows in ranges if rows] + [range(0)]


# Segments ---------------------------------------------------------------------------------------------------------


def test_segments_of_every_range():
    """The segments of every range over every small layout put each row in its place, once."""
    for counts in every_counts():
        layout = make(counts)
        owner = owners(layout)
        for rows in every_range(min(5, layout.rows)):
            assert gathered(layout, rows) == [owner[row] for row in rows]


def test_segments_of_every_array():
    """The segments of every index array of up to three rows put each row in its place, once."""
    for counts in ((2, 0, 1), (0, 1, 1, 1), (3,), (0, 2, 0, 0, 1, 0)):
        layout = make(counts)
        owner = owners(layout)
        for rows in itertools.product(range(layout.rows), repeat=3):
            assert gathered(layout, np.array(rows)) == [owner[row] for row in rows]


def test_segments_are_ascending():
    """Segments come in the order of the shards, one for each, and their local rows ascend."""
    layout = make((3, 0, 5, 2))
    for rows in (range(9, -1, -2), np.array([9, 0, 4, 4, 1, 8]), range(10), np.array([3, 3, 3])):
        shards = []
        for segment in layout.segments(rows):
            shards.append(segment.shard)
            assert sorted(segment.local) == list(segment.local)
        assert shards == sorted(set(shards))


def test_no_rows_have_no_segments():
    """No rows touch no shard."""
    layout = make((3, 2))
    assert list(layout.segments(range(0))) == []
    assert list(layout.segments(np.empty(0, np.int64))) == []


@st.composite
def requests(draw):
    """Draw the row counts of a layout, and a range or an array of its rows."""
    counts = draw(st.lists(st.integers(0, 200), min_size=1, max_size=90).filter(any))
    count = sum(counts)
    if draw(st.booleans()):
        rows = range(count)[draw(st.slices(count))]
    else:
        rows = np.array(draw(st.lists(st.integers(0, count - 1), max_size=50)), np.int64)
    return counts, rows


@given(requests())
@settings(max_examples=200, deadline=None)
def test_segments_of_anything(request):
    """Segments put each row in its place, whatever the layout and the request."""
    counts, rows = request
    layout = make(counts)
    owner = owners(layout)
    assert gathered(layout, rows) == [owner[row] for row in rows]


# Narrowing --------------------------------------------------------------------------------------------------------


@given(requests())
@settings(max_examples=200, deadline=None)
def test_narrowing_changes_nothing(request):
    """The narrowed rows of the narrowed layout are the same rows of the same files."""
    counts, rows = request
    layout = make(counts)
    narrowed, moved = layout.narrow(rows)
    owner = owners(layout)
    assert gathered(narrowed, moved) == [owner[row] for row in rows]


@given(requests())
@settings(max_examples=200, deadline=None)
def test_narrowing_of_a_gather_keeps_touched_shards_only(request):
    """A gather keeps the shards that it touches; a range keeps those between its first and last row."""
    counts, rows = request
    layout = make(counts)
    narrowed, _ = layout.narrow(rows)
    touched = {layout.path(layout.shard_of(int(row))) for row in rows}
    kept = [narrowed.path(i) for i in range(len(narrowed))]
    if isinstance(rows, range):
        assert not rows or {kept[0], kept[-1]} <= touched
    elif len(touched) < len(layout):
        assert kept == [path for path in (layout.path(i) for i in range(len(layout))) if path in touched]


def test_narrowing_keeps_every_column():
    """Types, sources, stamps and entity tags stay with their shard."""
    sources = [Planes(128, 8), Packed(67), Packed(68), Planes(192, 20)]
    layout = make((2, 3, 4, 5), dtypes=["<f4", ">f4", "<f4", ">f4"], sources=sources, etag="tag")
    for rows, kept in ((range(3, 8), [1, 2]), (np.array([13, 0, 1]), [0, 3]), (range(14), [0, 1, 2, 3])):
        assert list(layout.narrow(rows)[0].shards) == [layout.shards[i] for i in kept]


def test_narrowing_twice():
    """A narrowed layout narrows again to the same rows of the same files."""
    layout = make((2, 0, 3, 4, 1))
    owner = owners(layout)
    first, rows = layout.narrow(range(2, 9))
    second, again = first.narrow(rows[2:5])
    assert gathered(second, again) == [owner[row] for row in range(4, 7)]


# Identity ---------------------------------------------------------------------------------------------------------


def test_fingerprint_is_pinned():
    """The fingerprint is the same in every process, on every machine and in every release of its version."""
    assert make((3, 0, 4)).fingerprint == "855522d6f008174fc8761f4f83a7e00a"


def test_fingerprint_knows_no_place():
    """The same shards under another root, written at another time, have the same fingerprint."""
    shards = list(make((3, 0, 4)).shards)
    moved = [
        shard._replace(path=shard.path.replace("/data/set", "/mnt/x"), stamp=Stamp(shard.stamp.size))
        for shard in shards
    ]
    assert Layout.from_shards(moved, "npy", LocalStorage()).fingerprint == make((3, 0, 4)).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        {"names": ["shard_0.npy", "shard_1.npy", "shard_3.npy"]},
        {"names": ["shard_1.npy", "shard_0.npy", "shard_2.npy"]},
        {"counts": (3, 1, 3)},
        {"counts": (4, 0, 3)},
        {"sizes": [164, 128, 177]},
        {"dtypes": "<i4"},
        {"dtypes": "<f8"},
        {"dtypes": ["<f4", ">f4", "<f4"]},
        {"row_shape": (3, 1)},
        {"row_shape": ()},
        {"counts": (3, 4), "names": ["shard_0.npy", "shard_2.npy"]},
    ],
    ids=repr,
)
def test_fingerprint_differs(other):
    """Another name, order, row count, size, dtype, byte order or row shape is another fingerprint."""
    assert make(**{"counts": (3, 0, 4), **other}).fingerprint != make((3, 0, 4)).fingerprint


def test_fingerprint_knows_which_shard_is_swapped():
    """The same number of shards in the other byte order, but not the same ones, is another fingerprint."""
    one, other = (make((3, 4), dtypes=dtypes) for dtypes in (["<f4", ">f4"], [">f4", "<f4"]))
    assert one.fingerprint != other.fingerprint


def test_equality_knows_the_place():
    """Layouts are equal if the same files at the same place are; equal ones have one hash."""
    layout = make((3, 0, 4))
    assert layout == make((3, 0, 4))
    assert hash(layout) == hash(make((3, 0, 4)))
    assert layout != make((3, 0, 4), root="/elsewhere")
    assert layout != make((3, 0, 5))
    assert layout != "layout"


def test_pickle():
    """A layout that travelled is the same, shard by shard."""
    layout = make((2, 3), dtypes=["<f4", ">f4"], sources=[Planes(128, 8), Packed(99)])
    again = pickle.loads(pickle.dumps(layout))  # noqa: S301  # our own
    assert again == layout
    assert list(again.shards) == list(layout.shards)


# Columns ----------------------------------------------------------------------------------------------------------


def test_shards_come_back_as_they_went_in():
    """Every shard is rebuilt from the columns with all that it had: odd extents, types, stamps, tags."""
    extents = Extents((Extent(0, 1, "/other/file", 8), Extent(1, 2, "", 300)))
    sources = [Packed(128), extents, Planes(128, 16), Extents((Extent(0, 1, "/x", 0),))]
    shards = [
        Shard(
            f"/d/s{i}", source_rows, (3,), np.dtype(dtype), Stamp(1000 + i, 2**62 + i, 2**63 - 1 - i, f"e{i}"), source
        )
        for i, (source_rows, dtype, source) in enumerate(
            zip((2, 3, 4, 1), ("<f4", ">f4", "<f4", ">f4"), sources, strict=True)
        )
    ]
    assert list(Layout.from_shards(shards, "npy", LocalStorage()).shards) == shards


def test_native_byte_order():
    """The type of a layout is native, whatever the shards store."""
    assert make((1, 1), dtypes=">i4").dtype == np.dtype("=i4")
    assert make((1, 1), dtypes=[">i4", "<i4"]).stored_dtype(0) == np.dtype(">i4")


def test_shards_are_a_sequence():
    """Shards are found from either end and by slice, and are not beyond the ends."""
    shards = make((1, 2, 3)).shards
    assert (len(shards), shards[-1].rows, [shard.rows for shard in shards[::-1]]) == (3, 3, [3, 2, 1])
    with pytest.raises(IndexError):
        shards[3]


@pytest.mark.parametrize(
    ("paths", "root"),
    [
        (["/a/b/x.npy"], "/a/b/"),
        (["/a/b/x1.npy", "/a/b/x2.npy"], "/a/b/"),
        (["/a/b/x.npy", "/a/bc/x.npy"], "/a/"),
        (["/x.npy", "/y.npy"], "/"),
        (["/a/b", "/a/b/c"], "/a/"),
        (["/a/x.npy", "/a/x.npy"], "/a/"),
        (["s3://bucket/x", "s3://bucket/y"], "s3://bucket/"),
    ],
    ids=repr,
)
def test_root(paths, root):
    """The root is whole directories that all paths share, and paths are rebuilt from it."""
    shards = [Shard(path, 1, (), np.dtype("f4"), Stamp(4), Packed(0)) for path in paths]
    layout = Layout.from_shards(shards, "npy", LocalStorage())
    assert layout.root == root
    assert [layout.path(i) for i in range(len(paths))] == paths


def test_names_that_are_not_text():
    """A file name that is no UTF-8 has a fingerprint, too."""
    name = b"\xff\xfe.npy".decode("utf-8", "surrogateescape")
    assert len(make((1,), names=[name]).fingerprint) == 32


def test_a_hundred_thousand_shards():
    """Each of very many shards is found by bisection: a request touches its own and no other."""
    count = 100_000
    layout = Layout(
        "npy",
        LocalStorage(),
        (),
        np.dtype("f4"),
        "/d/",
        range(count),
        np.arange(1, count + 1) * 10,
        np.zeros((count, 3), np.int64),
        np.full(count, 128),
    )
    narrowed, rows = layout.narrow(range(999_990, 999_995))
    assert (len(narrowed), rows) == (1, range(5))
    (segment,) = layout.segments(range(555_555, 555_557))
    assert (segment.shard, segment.local) == (55_555, range(5, 7))
