import gc
import mmap
import os

import numpy as np
import pytest

from lazyshards.engines.ledger import Ledger, _find_run, find_pool


@pytest.fixture
def ledger():
    """Return a pool of 100 bytes that begins at 1,000."""
    ledger = Ledger(100)
    ledger.place_pool(1_000)
    return ledger


def test_gaps_are_counted_and_not_sums(ledger):
    """What fits is the largest free piece, however much is free in all."""
    first, second = ledger.add(20), ledger.add(10)
    ledger.place(first, 1_000)
    ledger.place(second, 1_050)
    assert ledger.live_nbytes == 30
    assert ledger.largest_gap() == 40
    ledger.drop(second)
    assert ledger.largest_gap() == 80
    ledger.drop(first)
    assert ledger.largest_gap() == 100


def test_what_lies_nowhere_yet_is_taken_off(ledger):
    """A piece whose place is not known takes from the largest gap, and so does all where the pool's is not."""
    ledger.place(ledger.add(20), 1_040)
    ledger.add(15)
    assert ledger.largest_gap() == 40 - 15
    blind = Ledger(100)
    blind.add(30)
    assert blind.largest_gap() == 70


def test_a_dropped_result_counts_until_no_array_lies_there(ledger):
    """A result of known memory stays taken after it was dropped, until it is seen that nothing lies in it."""
    number = ledger.add(60, "a")
    ledger.place(number, 1_000)
    ledger.drop(number)
    assert ledger.live_nbytes == 60
    ledger.see({"a": 1})
    assert (ledger.live_nbytes, ledger.largest_gap()) == (60, 40)
    ledger.see({})
    assert (ledger.live_nbytes, ledger.largest_gap()) == (0, 100)


def test_memory_that_was_given_back_is_free_at_once(ledger):
    """A piece that nobody holds any more, nor any view of it, is free, whether its place is known or not."""
    placed, loose = ledger.add(60, "a"), ledger.add(15, "b")
    ledger.place(placed, 1_000)
    for number, left in ((loose, 60), (placed, 0)):
        ledger.drop(number)
        ledger.free(number)
        ledger.free(number)  # twice is once
        assert ledger.live_nbytes == left
    assert ledger.largest_gap() == 100


def test_a_result_dropped_while_another_is_noted(ledger):
    """The collector may drop results at any moment, within the ledger as well: that neither hangs nor miscounts."""

    class Dropped:
        def __init__(self):
            self.number = ledger.add(10)
            self.itself = self

        def __del__(self):
            ledger.drop(self.number)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Dropped()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert ledger.live_nbytes == 0


def test_what_is_alive_stays(ledger):
    """A result that was not dropped stays, whatever is seen."""
    ledger.place(ledger.add(60, "a"), 1_000)
    ledger.see({})
    assert ledger.live_nbytes == 60


def test_arrays_of_others_count(ledger):
    """Arrays that lie in no result of ours take their bytes as well, each look anew."""
    ledger.place(ledger.add(10, "ours"), 1_000)
    ledger.see({"ours": 10, "theirs": 25, "others": 5})
    assert (ledger.live_nbytes, ledger.largest_gap()) == (40, 90 - 30)
    ledger.see({"ours": 10})
    assert ledger.largest_gap() == 90


def test_a_result_in_the_place_of_a_dropped_one(ledger):
    """Where a new result lies, no dropped one does any more."""
    first, second = ledger.add(40, "a"), ledger.add(40, "b")
    ledger.place(first, 1_000)
    ledger.drop(first)
    ledger.place(second, 1_020)
    assert ledger.live_nbytes == 40
    ledger.place(first, 1_000)  # too late, and no matter
    ledger.drop(first)
    assert ledger.live_nbytes == 40


def test_the_pool_is_the_run_of_that_size():
    """The pool that holds an address begins where adjoining pieces of memory add up to its size."""
    pieces = [(0, 10), (20, 50), (50, 70), (70, 120), (130, 140)]
    assert _find_run(pieces, 60, 100) == 20
    assert _find_run(pieces, 60, 70) == 50
    assert _find_run(pieces, 15, 10) is None
    assert _find_run(pieces, 5, 11) is None


def test_the_pool_is_found_beside_mapped_files_of_any_name(tmp_path):
    """The name of a mapped file, which may be no text, does not keep the pool from being found."""
    name = os.fsencode(tmp_path) + b"/\xff\xfe\n"
    with open(name, "w+b") as file:
        file.write(b"content")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            pool = mmap.mmap(-1, 3 * mmap.PAGESIZE)
            address = np.frombuffer(pool, np.uint8).ctypes.data
            assert find_pool(address + 1, 1 << 60) is None  # it was looked for, and none is as large
