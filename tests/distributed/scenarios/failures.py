"""Whatever goes wrong on one rank only: what each rank gets, how long it takes, and that the next compute works."""

import gc
import os
import shutil
import time

import numpy as np
from reporting import DATA, OUT, caught, digest, report

import lazyshards
from lazyshards.engines.ranks import node_id

RANK = node_id()
found, seconds = {}, {}


def local(name):
    """Return a copy of the shards that this rank alone sees, and those of rank 1 changed as the scenario wants."""
    path = os.path.join(OUT, f"{name}-{RANK}")
    shutil.copytree(DATA, path)
    return path


def shard(path, number):
    """Return the path of one shard."""
    return sorted(os.path.join(path, name) for name in os.listdir(path))[number]


def case(name, action):
    """Note what an action gave, and how long it took."""
    began = time.monotonic()
    found[name] = caught(action)
    seconds[name] = round(time.monotonic() - began, 1)


good = lazyshards.open_shards(DATA)


def works():
    """Read something that every rank sees."""
    return digest(good[50:900].compute())


def missing_last(path):
    """Remove the last shard, whose absence its siblings' names do not show."""
    os.remove(shard(path, -1))


def missing_middle(path):
    """Remove a shard from the middle."""
    os.remove(shard(path, 1))


def missing_all(path):
    """Remove all of them."""
    shutil.rmtree(path)


def resized(path):
    """Make a shard shorter."""
    np.save(shard(path, 3), np.zeros((1_200, 3, 2), "f4"))


def other_dtype(path):
    """Make all shards another dtype."""
    for i in range(5):
        np.save(shard(path, i), np.load(shard(path, i)).astype("f8"))


def damaged(path):
    """Make a shard none."""
    with open(shard(path, 0), "r+b") as file:
        file.write(b"not numpy")


for harm in (missing_last, missing_middle, missing_all, resized, other_dtype, damaged):
    path = local(harm.__name__)
    if RANK == 1:
        harm(path)
    case(f"open: {harm.__name__}", lambda path=path: lazyshards.open_shards(path).shape)

nowhere = os.path.join(OUT, "nowhere")
case("open: missing for all", lambda: lazyshards.open_shards(nowhere))

path = local("vanished")
vanishing = lazyshards.open_shards(path)
if RANK == 1:
    os.remove(shard(path, 3))
case("read: vanished", lambda: vanishing.compute(tiles_per_processor=2))
case("after it", works)

path = local("rewritten")
changing = lazyshards.open_shards(path)
if RANK == 1:
    np.save(shard(path, 3), np.ones((1_300, 3, 2), "f4"))
case("read: rewritten", lambda: changing.compute(tiles_per_processor=2))

path = local("vanished for batches")
vanishing = lazyshards.open_shards(path)
if RANK == 0:
    os.remove(shard(path, 3))
case("batches: vanished", lambda: len(list(vanishing.batches(700))))
case("after them", works)

lasting = lazyshards.open_shards(local("refreshed"), on_change="refresh")
if RANK == 1:
    np.save(shard(os.path.join(OUT, "refreshed-1"), 3), np.ones((1_300, 3, 1), "f4"))
case("refresh: rewritten", lasting.compute)


def wide(rows):
    """Make each row 400,000 bytes."""
    return np.repeat(rows[:, :1, 0], 100_000, axis=1)


large = good.map(wide, row_shape=(100_000,))
case("too large", large.compute)
kept = [large[:500].compute()]
if RANK == 1:
    kept.append(kept)  # of 200 MB, in a cycle that is there until it is collected
gc.disable()
del kept
case("large", lambda: float(large[:950].compute()[949].max()))  # more than fits beside those on rank 1
gc.enable()
case("batches too large", lambda: len(list(large.batches(2_000))))
case("after too large", works)

generator = np.random.default_rng(RANK)
case("rows of its own", good[generator.integers(0, 2_400, 50)].compute)
case("a slice of its own", good[: 1_000 + RANK].compute)
case("a seed of its own", lambda: next(iter(good.batches(10, shuffle=True, seed=RANK))))
case("a batch size of its own", lambda: next(iter(good.batches(10 + RANK))))


def resume():
    """Take up an epoch elsewhere on each rank."""
    batches = good.batches(10, shuffle=True, seed=5)
    batches.load_state_dict({**batches.state_dict(), "position": 10 * RANK})
    return next(iter(batches)).shape


case("a state of its own", resume)
case("after all", works)
case("on NumPy, alone", lambda: RANK or float(lazyshards.open_shards(DATA, engine="numpy")[:5].compute()[0, 0, 0]))
report(found=found, seconds=seconds)
