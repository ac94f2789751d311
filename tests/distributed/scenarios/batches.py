"""Two datasets whose batches and computes interleave, seeds that nobody gave, and many small batches."""

from reporting import ARGUMENTS, DATA, digest, report

import lazyshards

first, second = lazyshards.open_shards(DATA), lazyshards.open_shards(DATA)[::-1]
drawn = first.batches(64, shuffle=True)
interleaved = []
for one, other in zip(first.batches(500, shuffle=True, seed=1), second.batches(300, prefetch=1), strict=False):
    interleaved += [digest(one), digest(other), digest(first[7:20].compute())]
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
    interleaved=interleaved,
    same=taken == again,
    batches=count,
    rows=rows,
    whole=digest(first.compute()),
)
