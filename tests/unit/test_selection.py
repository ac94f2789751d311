import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards.errors import SelectionError
from lazyshards.selection import Selection, as_slice, blocks, cell_index, is_whole, select, select_all
from lazyshards.testing import index_chains


def base(*shape):
    """Return an array whose elements tell where they are."""
    return np.arange(int(np.prod(shape))).reshape(shape)


def chosen(selection, array):
    """Return what a selection means, by NumPy and without any of the code under test but the cell's index."""
    rows = array[np.array(list(selection.rows), np.int64)]
    rows = rows[(slice(None), *cell_index(selection.cell))]
    return rows[0] if selection.scalar else rows


def check(selection, array, expected):
    """Assert that a selection of ``array`` means ``expected``, and says its shape."""
    found = chosen(selection, array)
    assert selection.shape == expected.shape == found.shape
    assert found.tolist() == expected.tolist()


def all_slices(length):
    """Return every slice whose bounds are near an axis of this length."""
    bounds = [None, *range(-length - 2, length + 3)]
    steps = [None, *range(-length - 1, 0), *range(1, length + 2)]
    return [slice(*parts) for parts in itertools.product(bounds, bounds, steps)]


# What an index means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(6))
def test_every_slice_of_rows(length):
    """Every slice of up to five rows is NumPy's: any bound, any step, beyond the ends."""
    array = base(length)
    for index in all_slices(length):
        check(select(select_all(length, ()), index), array, array[index])


@pytest.mark.parametrize("length", range(5))
def test_every_slice_of_every_slice(length):
    """Every slice of every slice of up to four rows is NumPy's."""
    array = base(length)
    seen = set()
    for first in all_slices(length):
        once, left = select(select_all(length, ()), first), array[first]
        if once.rows in seen:
            continue
        seen.add(once.rows)
        for second in all_slices(len(left)):
            check(select(once, second), array, left[second])


@pytest.mark.parametrize("length", range(1, 6))
def test_every_integer_of_every_slice(length):
    """Every integer, positive or negative, of every slice is NumPy's, and drops the axis."""
    array = base(length, 2)
    for first in all_slices(length):
        once, left = select(select_all(length, (2,)), first), array[first]
        for i in range(-len(left), len(left)):
            check(select(once, i), array, left[i])


@pytest.mark.parametrize("length", range(6))
def test_every_mask(length):
    """Every mask is NumPy's, as an array and as a list."""
    array = base(length, 2)
    for mask in itertools.product([False, True], repeat=length):
        if length:
            check(select(select_all(length, (2,)), list(mask)), array, array[list(mask)])
        check(select(select_all(length, (2,)), np.array(mask, bool)), array, array[np.array(mask, bool)])


@pytest.mark.parametrize("length", range(1, 4))
def test_every_index_array(length):
    """Every index array of up to four numbers is NumPy's: any order, repeats, negative."""
    array = base(length)
    for count in range(5):
        for numbers in itertools.product(range(-length, length), repeat=count):
            index = np.array(numbers, np.int64)
            check(select(select_all(length, ()), index), array, array[index])


@pytest.mark.parametrize("index", [[0, 1, 3, 3], [4, 3, 1, 1], [0, 2, 2, 6], [1, 2, 0, 4], [3, 3, 3]], ids=str)
def test_index_arrays_that_begin_and_end_like_a_range(index):
    """An index array that is evenly spaced but for its middle is no range."""
    array = base(7)
    check(select(select_all(7, ()), index), array, array[index])


def test_every_slice_of_every_index_array():
    """Every slice, integer and index array of an index array is NumPy's."""
    array = base(3)
    for numbers in itertools.product(range(3), repeat=3):
        once, left = select(select_all(3, ()), list(numbers)), array[list(numbers)]
        for second in [*all_slices(3), *range(-3, 3), [0, 2], [2, 0, 0], [True, False, True]]:
            check(select(once, second), array, left[second])


def test_every_basic_index_of_a_cell():
    """Slices and integers on the axes of a row are NumPy's, applied twice."""
    array = base(2, 3)
    items = [*all_slices(3)[::7], *range(-3, 3)]
    for first in items:
        once, left = select(select_all(2, (3,)), (slice(None), first)), array[:, first]
        check(once, array, left)
        if left.ndim == 2:
            for second in [*all_slices(left.shape[1])[::5], *range(-left.shape[1], left.shape[1])]:
                check(select(once, (slice(None), second)), array, left[:, second])


@pytest.mark.parametrize(
    "index",
    [
        (),
        ...,
        (...,),
        (..., 0),
        (0, ...),
        (0, ..., 1),
        (0, 1, 2, ...),
        (..., 0, 1, 2),
        (0, 1, 2),
        (slice(1, None), 1),
        (slice(None), ..., slice(None, None, -1)),
        ([1, 0, 1], ..., -1),
        ([1, 0, 1], slice(None), 2),
        ([1, 0, 1], 2, slice(1, 3)),
        (np.array([True, False]), 0),
        (np.int8(1), np.uint64(2)),
        (np.array(1), 2),
        ((1, 0), 2),
        range(2),
        range(1, -1, -1),
        range(0),
        (range(-2, 0), 1),
        [],
        np.empty(0, np.uint8),
        np.array([1, 0], np.uint64),
        np.array([-1, 0], np.int8),
        (1, slice(10, 20)),
        slice(np.int64(0), np.int64(1)),
    ],
    ids=repr,
)
def test_tuples_and_ellipsis(index):
    """Tuples, Ellipsis, NumPy integers and ranges mean what they mean to NumPy."""
    array = base(2, 3, 4)
    check(select(select_all(2, (3, 4)), index), array, array[index])


def test_a_row_indexed_again():
    """What is left when the row axis is dropped takes basic indices, and drops to nothing."""
    array = base(4, 3, 2)
    row = select(select_all(4, (3, 2)), 2)
    check(row, array, array[2])
    check(select(row, slice(None, None, -1)), array, array[2][::-1])
    check(select(row, (1, 0)), array, array[2][1, 0])
    check(select(select(row, (1, 0)), ()), array, np.asarray(array[2][1, 0][()]))
    check(select(select(row, (1, 0)), ...), array, array[2][1, 0][...])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_chain(data):
    """Any chain of indices on any shape is NumPy's."""
    shape = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 3)))
    array = left = base(*shape)
    selection = select_all(shape[0], shape[1:])
    for index in data.draw(index_chains(shape, most=5)):
        selection, left = select(selection, index), np.asarray(left[index])
    check(selection, array, left)


def test_evenly_spaced_rows_stay_a_range():
    """Rows that are evenly spaced are kept as a range, however they were asked for."""
    everything = select_all(10, ())
    for index in ([2, 4, 6], [6, 4, 2], np.arange(10) > 6, [5], [], range(1, 9, 3), np.arange(10)[::-1]):
        assert isinstance(select(everything, index).rows, range)
    assert isinstance(select(select(everything, [7, 3, 1, 0]), slice(0, 2)).rows, range)


def test_one_form_for_each_selection():
    """A selection of one row or none has one form, whatever step led there."""
    everything = select_all(10, ())
    for index in (slice(3, 4), slice(3, None, 100), slice(3, None, 2**70), [3]):
        assert repr(select(everything, index).rows) == "range(3, 4)"
    for index in (slice(5, 2), slice(100, 200), []):
        assert repr(select(everything, index).rows) == "range(0, 0)"


def test_huge_steps():
    """A step beyond 64 bits is taken, and what it leaves can be indexed again."""
    array = base(5)
    for step in (2**63, 2**70, -(2**70)):
        once = select(select_all(5, ()), slice(None, None, step))
        check(once, array, array[::step])
        check(select(once, [0, 0]), array, array[::step][[0, 0]])


def test_huge_row_numbers():
    """Rows beyond 2**31 and 2**32 keep their numbers in slices and arrays."""
    rows = 2**40
    everything = select_all(rows, ())
    assert list(select(everything, slice(2**33, None, 2**38)).rows) == list(range(2**33, rows, 2**38))
    assert list(select(everything, [2**33, 5, -1]).rows) == [2**33, 5, rows - 1]


def test_the_callers_array_is_copied():
    """An index array that the caller changes afterwards changes no selection."""
    index = np.array([3, 1, 2, 0, 0])
    selection = select(select_all(4, ()), index)
    index[:] = 0
    assert list(selection.rows) == [3, 1, 2, 0, 0]


def test_index_arrays_are_frozen():
    """The rows of a selection cannot be written to, nor those of a slice of it."""
    selection = select(select_all(4, ()), [3, 1, 2, 0, 0])
    for rows in (selection.rows, select(selection, slice(1, None)).rows):
        with pytest.raises(ValueError, match="read-only"):
            rows[0] = 1


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (4, "index 4 is out of bounds for the rows .* size 4"),
        (-5, "index -5 is out of bounds"),
        (10**30, "out of bounds"),
        ([0, 4], "index 4 is out of bounds"),
        ([-5, 0], "index -5 is out of bounds"),
        (np.array([2**63], np.uint64), "index 9223372036854775808 is out of bounds"),
        (range(2, 6), "index 5 is out of bounds"),
        ((0, 3), "index 3 is out of bounds for axis 1 with size 3"),
        ((slice(None), -4), "index -4 is out of bounds for axis 1"),
        ((0, 0, 0, 0), "too many indices: the dataset has 3 axes"),
        ((..., 0, 0, 0, 0), "too many indices"),
        ((..., ...), "single Ellipsis"),
        (None, "newaxis"),
        ((0, None), "newaxis"),
        (True, "single boolean"),
        (np.False_, "single boolean"),
        (np.array(True), "single boolean"),
        ((0, True), "single boolean"),
        (1.5, "1.5 cannot index"),
        ("x", "'x' cannot index"),
        ({}, "cannot index"),
        (slice(0, 5, 0), "not a valid slice"),
        (slice("a", "b"), "not a valid slice"),
        (slice(1.0), "not a valid slice"),
        ((0, slice(None, None, 0)), "not a valid slice"),
        (np.ones(3, bool), "3 entries, expected one for each of 4 rows"),
        (np.ones((4, 3), bool), "one axis"),
        ([[0, 1], [2, 3]], "one axis"),
        ([[0], [1, 2]], "not a regular array"),
        ([0.0, 1.0], "integers or booleans, this one holds float64"),
        (np.empty(0), "integers or booleans"),
        (["a"], "integers or booleans"),
        ((0, [0, 1]), "axis 1 lazily"),
        ((slice(None), np.array([True, False, True])), "axis 1 lazily"),
        ((slice(None), 0.5), "axis 1 lazily"),
    ],
    ids=repr,
)
def test_refusals(index, says):
    """What NumPy refuses, and what cannot be lazy, is an IndexError that says what was found."""
    with pytest.raises(SelectionError, match=says):
        select(select_all(4, (3, 2)), index)


@pytest.mark.parametrize("index", [range(2**70), range(10**13), range(-(10**13), 0), range(3, 10**13, 10**6)], ids=repr)
def test_ranges_out_of_bounds_are_refused_at_once(index):
    """A range beyond the rows is refused by its ends: no array of its length is made, of which no memory has room."""
    with pytest.raises(SelectionError, match="out of bounds"):
        select(select_all(4, (3, 2)), index)


def test_arrays_after_the_row_axis_is_gone():
    """An array cannot index what is left of one row: it would not be an index of the rows."""
    with pytest.raises(SelectionError, match="axis 1 lazily"):
        select(select(select_all(4, (3,)), 0), [0, 1])


def test_bounds_follow_the_slice():
    """Bounds are those of what is left, not of the dataset."""
    with pytest.raises(SelectionError, match="size 2"):
        select(select(select_all(10, ()), slice(4, 6)), 2)


# The small functions ----------------------------------------------------------------------------------------------


def test_as_slice_is_the_range():
    """The slice of a range picks what the range counts, backwards down to 0 included."""
    numbers = list(range(6))
    for index in all_slices(6):
        positions = range(6)[index]
        assert numbers[as_slice(positions)] == list(positions)


def test_is_whole():
    """Only every position, in place, is whole."""
    assert is_whole((range(3), range(2)), (3, 2))
    assert is_whole((), ())
    for cell in ((range(2), range(2)), (range(2, -1, -1), range(2)), (0, range(2)), (range(3), 1)):
        assert not is_whole(cell, (3, 2))


def test_cell_of_one_position_is_not_dropped():
    """A slice of one position keeps its axis, an integer drops it."""
    assert Selection(range(4), (range(1, 2), 1)).shape == (4, 1)


LIMITS = [
    {"gap_nbytes": gap, "block_nbytes": block, "dense_nbytes": dense}
    for gap, block, dense in itertools.product((0, 10, 25, 1000), (1, 30, 1000), (1, 25, 1000))
]


def every_local():
    """Return ranges and ascending arrays, with repeats, of rows below 9."""
    ranges = [range(start, 9, step) for start, step in itertools.product(range(0, 9, 2), range(1, 5))]
    sets = [
        np.array(rows)
        for count in range(1, 5)
        for rows in itertools.combinations_with_replacement((0, 1, 2, 4, 5, 8), count)
    ]
    return [*ranges, *sets]


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: "-".join(map(str, limits.values())))
def test_blocks_partition_the_rows(limits):
    """The blocks of a request hold each wanted row once, in order, and say where it is."""
    for local in every_local():
        found = []
        for block in blocks(local, 10, **limits):
            read = np.arange(block.start, block.stop)
            assert block.target.start == len(found)
            found += read[block.source].tolist()
            assert block.target.stop == len(found)
        assert found == list(local)


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: "-".join(map(str, limits.values())))
def test_blocks_keep_their_limits(limits):
    """No block is larger than allowed unless it is one row, and none reads across more unwanted bytes than allowed."""
    for local in every_local():
        for block in blocks(local, 10, **limits):
            size = (block.stop - block.start) * 10
            wanted = np.unique(np.arange(block.start, block.stop)[block.source])
            most = limits["dense_nbytes"] if block.dense else max(limits["block_nbytes"], limits["dense_nbytes"])
            assert size <= most or block.stop - block.start == 1
            assert ((np.diff(wanted) - 1) * 10 <= limits["gap_nbytes"]).all()
            assert (wanted[0], wanted[-1]) == (block.start, block.stop - 1)


def test_dense_is_every_row_once():
    """Only a block of which every row is wanted, once and in order, is dense."""
    for local in every_local():
        for block in blocks(local, 10, gap_nbytes=1000, block_nbytes=1000, dense_nbytes=1000):
            read = np.arange(block.start, block.stop)
            assert not block.dense or read[block.source].tolist() == read.tolist()


def test_near_rows_are_read_together():
    """Rows as near as the gap are one read, rows farther apart are two."""
    limits = {"block_nbytes": 1000, "dense_nbytes": 1000}
    assert len(list(blocks(np.array([0, 3]), 10, gap_nbytes=20, **limits))) == 1
    assert len(list(blocks(np.array([0, 3]), 10, gap_nbytes=19, **limits))) == 2
    assert len(list(blocks(range(0, 6, 3), 10, gap_nbytes=20, **limits))) == 1
    assert len(list(blocks(range(0, 6, 3), 10, gap_nbytes=19, **limits))) == 2
