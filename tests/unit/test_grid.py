import itertools

import numpy as np
import pytest

from lazyshards.formats.grid import ascending, spans, wanted

LENGTH = 7


def axes_of(length):
    """Every way to take positions of an axis: ranges with steps of both signs, and single positions."""
    found = [range(length)[a:b:c] for a in range(length) for b in range(length + 1) for c in (1, 2, 5)]
    found += [axis[::-1] for axis in found]
    return [axis for axis in dict.fromkeys(found) if len(axis)] + list(range(length))


@pytest.mark.parametrize("size", range(1, LENGTH + 2))
def test_spans_are_exhaustive(size):
    """Of every ascending axis the spans name each position once, in order, in the chunk that holds it."""
    for axis in [axis for axis in axes_of(LENGTH) if isinstance(axis, range) and axis.step > 0]:
        found = spans(axis, size, LENGTH)
        positions = [span.number * size + n for span in found for n in range(size)[span.source]]
        assert positions == list(axis)
        assert [n for span in found for n in range(len(axis))[span.target]] == list(range(len(axis)))
        assert len({span.number for span in found}) == len(found)
        for span in found:
            there = [n for n in range(LENGTH) if n // size == span.number]
            taken = [n for n in axis if n // size == span.number]
            assert span.is_all == (taken == there)
            assert span.is_whole == (taken == there and len(there) == size)


@pytest.mark.parametrize("chunk", [(1, 1), (2, 3), (5, 7), (7, 2)])
def test_wanted_is_numpy(chunk):
    """Chunks copied as they are wanted give what NumPy gives, for rows and every cell."""
    array = np.arange(LENGTH * LENGTH).reshape(LENGTH, LENGTH)
    full = np.full([-(-LENGTH // size) * size for size in chunk], -1)
    full[:LENGTH, :LENGTH] = array
    for start, column in itertools.product((0, 3), axes_of(LENGTH)):
        index = column if isinstance(column, int) else list(column)
        expected = array[start:][:, index]
        out = np.full(expected.shape, -2)
        view, axes = ascending(out, start, (column,))
        for want in wanted(view, [spans(axis, size, LENGTH) for axis, size in zip(axes, chunk, strict=True)]):
            place = [slice(n * size, (n + 1) * size) for n, size in zip(want.place, chunk, strict=True)]
            assert want.target.base is not None
            want.target[...] = full[tuple(place)][want.source]
            if want.is_straight(out.dtype):
                assert want.target.shape == chunk
        assert np.array_equal(out, expected)


def test_nothing_is_wanted_of_no_rows():
    """No rows need no chunk."""
    view, axes = ascending(np.empty((0, 3)), 2, (range(3),))
    assert list(wanted(view, [spans(axis, 2, 9) for axis in axes])) == []


def test_straight_needs_the_same_bytes():
    """A whole chunk of another type, or one that lands in pieces or reversed, is not put straight into place."""
    for out, column, dtype, straight in (
        (np.empty((4, 3), "f4"), range(3), "f4", True),
        (np.empty((4, 3), "f4"), range(3), ">f4", False),
        (np.empty((4, 3), "f4"), range(2, -1, -1), "f4", False),
        (np.empty((4, 3), "f8")[:, ::2], range(2), "f8", False),
    ):
        view, axes = ascending(out, 0, (column,))
        (want,) = wanted(view, [spans(axes[0], 4, 4), spans(axes[1], len(column), len(column))])
        assert want.is_straight(np.dtype(dtype)) == straight
