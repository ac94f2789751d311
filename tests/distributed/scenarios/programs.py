"""Random programs of opens, slices, sums, computes and batches: what they give depends on the seed alone."""

import hashlib
import warnings

import numpy as np
from reporting import ARGUMENTS, DATA, digest, report

import lazyshards


def slices(rng, length):
    """Return a random slice, now and then of nothing."""
    ends = [None if rng.random() < 0.2 else int(rng.integers(-length - 2, length + 3)) for _ in range(2)]
    return slice(*ends, int(rng.choice([1, 1, 1, 2, 5, -1, -3])))


def indexed(rng, ds):
    """Return a dataset sliced once or twice."""
    for _ in range(int(rng.integers(1, 3))):
        length = len(ds)
        kind = rng.random()
        if kind < 0.6 or not length:
            ds = ds[slices(rng, length)]
        elif kind < 0.8:
            ds = ds[rng.integers(0, length, int(rng.integers(0, 60)))]
        elif kind < 0.9:
            ds = ds[rng.random(length) < 0.3]
        else:
            ds = ds[:, int(rng.integers(0, 3)), ::-1] if ds.ndim == 3 else ds[:, 0] if ds.ndim == 2 else ds
    return ds


CHANGES = {
    "half": lambda view: view / 2 - 1,
    "clip": lambda view: view.clip(-3, 3),
    "where": lambda view: view.where(view > 0, -1),
    "function": lambda view: np.sqrt(abs(view)),
}
REDUCTIONS = {
    "sum": lambda view: view.sum(axis=0),
    "mean": lambda view: view.mean(),
    "extremes": lambda view: np.stack([view.min(axis=0), view.max(axis=0)]),
    "std": lambda view: view.clip(-3, 3).std(axis=0),
    "median": lambda view: view.median(axis=0),
    "place": lambda view: view.argmax(axis=0),
}


def program(seed, opened):
    """Yield digests of what a program reads."""
    rng = np.random.default_rng(seed)
    if opened and rng.random() < 0.95:
        ds = opened[int(rng.integers(len(opened)))]
    else:
        ds = lazyshards.open_shards(DATA)
        opened.append(ds.astype("f8") if len(opened) == 1 else ds)
    view = indexed(rng, ds)
    if rng.random() < 0.2:
        view = CHANGES[str(rng.choice(list(CHANGES)))](view)
    if rng.random() < 0.2 and view.size:
        yield digest(REDUCTIONS[str(rng.choice(list(REDUCTIONS)))](view))
    if rng.random() < 0.75 or not len(view):
        yield digest(view.compute(tiles_per_processor=int(rng.choice([1, 1, 3])) if rng.random() < 0.5 else None))
        return
    size, shuffle = int(rng.integers(1, 400)), [False, True, "blocks", "shards"][int(rng.integers(4))]
    batches = view.batches(size, shuffle=shuffle, seed=seed, epochs=2, prefetch=int(rng.integers(0, 3)))
    for batch, _ in zip(batches, range(int(rng.integers(1, 4))), strict=False):
        yield digest(batch)


warnings.simplefilter("ignore", RuntimeWarning)  # sums of the largest numbers overflow
opened = []
found = [
    hashlib.blake2b("".join(program(seed, opened)).encode(), digest_size=8).hexdigest()
    for seed in range(int(ARGUMENTS[0]))
]
report(digests=found)
