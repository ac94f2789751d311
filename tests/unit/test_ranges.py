from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshards.storage.base import Part, Stamp
from lazyshards.storage.ranges import coalesce

FILE = bytes(range(256)) * 4


STAMP = Stamp(1024)


def parts_of(wanted, path="a", stamp=STAMP):
    """Return a part for each (offset, nbytes)."""
    return [Part(path, stamp, offset, memoryview(bytearray(nbytes))) for offset, nbytes in wanted]


def spans(requests):
    """Return what each request asks for."""
    return [(request.start, request.stop) for request in requests]


def serve(requests):
    """Answer each request from the file."""
    for request in requests:
        request.scatter(FILE[request.start : request.stop])


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 120)), max_size=12), st.integers(0, 200), st.integers(1, 300)
)
def test_what_is_wanted_arrives(wanted, gap, most):
    """Every part gets exactly its own bytes, however they are merged and split, and however they overlap."""
    parts = parts_of(wanted)
    serve(coalesce(parts, gap, most))
    assert [bytes(part.out) for part in parts] == [FILE[o : o + n] for o, n in wanted]


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 120)), max_size=12), st.integers(0, 200), st.integers(1, 300)
)
def test_limits(wanted, gap, most):
    """No request is longer than the limit, begins or ends with unwanted bytes, or holds a gap above the limit."""
    for request in coalesce(parts_of(wanted), gap, most):
        assert 0 < request.stop - request.start <= most
        covered = sorted((piece.start, piece.start + len(piece.out)) for piece in request.pieces)
        assert covered[0][0] == 0
        reached = 0
        for start, stop in covered:
            assert start - reached <= gap
            reached = max(reached, stop)
        assert reached == request.stop - request.start


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 200))
def test_no_needless_requests(wanted, gap):
    """With no limit of length, two requests of a file are further apart than the gap."""
    ordered = sorted(spans(coalesce(parts_of(wanted), gap, 1 << 40)))
    assert all(later[0] - earlier[1] > gap for earlier, later in pairwise(ordered))


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 120)), max_size=12, unique_by=lambda w: w[0] // 120))
def test_without_gaps_only_wanted_bytes_are_asked(wanted):
    """With a gap of nothing, each request is made of wanted bytes alone."""
    for request in coalesce(parts_of(wanted), 0, 1 << 40):
        asked = set(range(request.start, request.stop))
        assert asked <= {byte for offset, nbytes in wanted for byte in range(offset, offset + nbytes)}


@pytest.mark.parametrize(
    ("wanted", "gap", "most", "expected"),
    [
        ([], 10, 100, []),
        ([(5, 0)], 10, 100, []),
        ([(0, 10), (20, 10)], 10, 100, [(0, 30)]),
        ([(0, 10), (20, 10)], 9, 100, [(0, 10), (20, 30)]),
        ([(20, 10), (0, 10)], 10, 100, [(0, 30)]),
        ([(0, 250)], 10, 100, [(0, 100), (100, 200), (200, 250)]),
        ([(0, 60), (60, 60)], 0, 100, [(0, 100), (100, 120)]),
        ([(0, 95), (97, 50)], 10, 100, [(0, 100), (100, 147)]),
        ([(0, 95), (100, 50)], 10, 100, [(0, 95), (100, 150)]),
    ],
)
def test_merging_and_splitting(wanted, gap, most, expected):
    """Neighbours within the gap are one request, and a long range is several."""
    assert spans(coalesce(parts_of(wanted), gap, most)) == expected


def test_files_are_kept_apart():
    """Ranges of two files are never one request, and each request has the stamp of its file."""
    parts = [
        *parts_of([(0, 10)], "a", Stamp(1)),
        *parts_of([(10, 10)], "b", Stamp(2)),
        *parts_of([(10, 5)], "a", Stamp(1)),
    ]
    assert [(r.path, r.stamp.size, r.start, r.stop) for r in coalesce(parts, 100, 100)] == [
        ("a", 1, 0, 15),
        ("b", 2, 10, 20),
    ]


def test_short_answers_fill_what_they_reach():
    """Of an answer that ends early, the bytes that came are put in place and the others are left alone."""
    (first, second) = parts_of([(0, 4), (6, 4)])
    (request,) = coalesce([first, second], 2, 100)
    request.scatter(FILE[:8])
    assert (bytes(first.out), bytes(second.out)) == (FILE[:4], FILE[6:8] + b"\0\0")
