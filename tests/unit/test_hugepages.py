"""When huge pages are asked for."""

import mmap

import numpy as np

from lazyshards.engines import hugepages

FULL = "Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      0      0\n"


def test_small_blocks_do_not_count():
    """However much is free in blocks smaller than a huge page, there are no huge pages in it."""
    small = "Node 0, zone   Normal 105285 34096 29428 9657 3086 1156 336 111 3\n"
    assert not hugepages.are_free(1, small)
    assert hugepages.are_free(0, FULL)


def test_all_zones_count():
    """Free blocks of all zones and sizes are added up."""
    text = FULL + "Node 0, zone    DMA32 1 0 0 0 0 0 0 0 0 3 0\nNode 1, zone   Normal 0 0 0 0 0 0 0 0 0 0 5\n"
    assert hugepages.are_free((3 * 2 << 20) + (5 * 4 << 20), text)
    assert not hugepages.are_free((3 * 2 << 20) + (5 * 4 << 20) + 1, text)


def test_this_machine_answers():
    """What this machine's kernel says can be read, and no machine has more huge pages than anything."""
    assert not hugepages.are_free(1 << 60)


def test_advice_changes_no_byte(monkeypatch):
    """Advised memory is as writable as any other, whether there are huge pages or not."""
    for free in (True, False):
        monkeypatch.setattr(hugepages, "are_free", lambda nbytes, free=free: free)
        array = np.frombuffer(mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        hugepages.advise(array.ctypes.data, array.nbytes, array.nbytes)
        array[:] = 7
        assert int(array.sum(dtype=np.int64)) == 7 * (16 << 20)
