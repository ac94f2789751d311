import threading

from lazyshards.formats.kept import Kept


def test_least_recently_used_goes_first():
    """When the bytes do not suffice, what was asked for longest ago goes."""
    kept = Kept(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 4)
    assert kept.get("a") == 1
    kept.put("c", 3, 4)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]


def test_what_is_too_large_is_not_kept():
    """A thing larger than all that may be kept pushes nothing out."""
    kept = Kept(10)
    kept.put("a", 1, 10)
    kept.put("b", 2, 11)
    assert (kept.get("a"), kept.get("b")) == (1, None)


def test_kept_anew():
    """A thing that is kept again counts once, with its new bytes."""
    kept = Kept(10)
    kept.put("a", 1, 9)
    kept.put("a", 2, 1)
    kept.put("b", 3, 9)
    assert (kept.get("a"), kept.get("b")) == (2, 3)


def test_forgotten_after_a_fork(child):
    """A child process can go on though another thread held the lock when it was forked."""
    out = child("""
        import os, threading
        from lazyshards.formats.kept import Kept
        kept = Kept(10)
        kept.put("a", 1, 1)
        kept._lock.acquire()
        if os.fork() == 0:
            kept.put("b", 2, 1)
            print(kept.get("a"), kept.get("b"), flush=True)
            os._exit(0)
        os.wait()
    """)
    assert out.split() == ["None", "2"]


def test_from_many_threads():
    """Threads that keep and ask at the same time find nothing wrong."""
    kept = Kept(100)
    wrong = []

    def work(base):
        for i in range(2000):
            key = (base * i) % 37
            kept.put(key, key, 1 + key % 9)
            if kept.get(key) not in (None, key):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(nbytes for _, nbytes in kept._items.values()) == kept._nbytes <= 100
