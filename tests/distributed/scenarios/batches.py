"""Two datasets whose batches and computes interleave, several taken as one, seeds that nobody gave, many batches."""

import os

from reporting import ARGUMENTS, DATA, digest, report

import lazyshards

first, second = lazyshards.open_shards(DATA), lazyshards.open_shards(DATA)[::-1]
drawn = first.batches(64, shuffle=True)
interleaved = []
for one, other in zip(first.batches(500, shuffle=True, seed=1), second.batches(300, prefetch=1), strict=False):
    interleaved += [digest(one), digest(other), digest(first[7:20].compute())]
bundle = lazyshards.zip_shards(x=first, y=second[:, 0])
joined = lazyshards.concat([first[:1_000], lazyshards.open_shards(os.path.join(ARGUMENTS[1], "raw"))])
mixture = lazyshards.mix({first: 3, second[:500]: 1})
taken_as_one = {
    "bundle": {name: digest(array) for name, array in bundle[10:1_500].compute().items()},
    "bundle batches": [
        [digest(batch[name]) for name in ("x", "y")] for batch in bundle.batches(900, shuffle=True, seed=4)
    ],
    "concat": digest(joined[500:2_000].compute()),
    "concat batches": [digest(batch) for batch in joined.batches(1_300, shuffle="blocks", seed=5)],
    "mix": [digest(batch) for batch in mixture.batches(700, shuffle=True, seed=6)],
    "map": digest(first.map(lambda rows: 1 - rows)[::3].compute()),
}
seeds = [each.batches(64, shuffle=True).seed for each in (first, bundle, mixture)]
left = first.batches(100, shuffle=True, seed=2)
taken = [digest(batch) for batch, _ in zip(left, range(3), strict=False)]
left.set_epoch(0)  # gives up what was read ahead
again = [digest(batch) for batch, _ in zip(left, range(3), strict=False)]
count, rows = 0, 0
for batch in first.batches(4, shuffle=True, seed=3, epochs=1_000):
    count, rows = count + 1, rows + len(batch)
    if count == int(ARGUMENTS[0]):
        break
report(
    seed=drawn.seed,
    drawn=digest(next(iter(drawn))),
    seeds=seeds,
    taken_as_one=taken_as_one,
    interleaved=interleaved,
    same=taken == again,
    batches=count,
    rows=rows,
    whole=digest(first.compute()),
)
