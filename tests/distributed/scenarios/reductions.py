"""Reductions of few blocks are each rank's own work, of many they are shared: all find, or raise, the same."""

import os
from pathlib import Path

import numpy as np
from reporting import ARGUMENTS, DATA, caught, digest, report

import lazyshards
from lazyshards.engines import ranks
from lazyshards.reductions import blocks, products

ds = lazyshards.open_shards(DATA)
found = {
    "sum": ds.sum(axis=0, dtype="f8"),
    "std": ds.std(dtype="f8"),
    "argmax": ds.argmax(),
    "median": ds.median(axis=0),
    "cov": ds[:, 0].cov(),
    "any": ds[::2].any(axis=1),
}

partial = products.Covariance.partial
if not ranks.is_first_rank():  # as on a processor for which BLAS has other code

    def rounded_otherwise(reducer, block, first):
        """Return the spread, off by one rounding."""
        spread = partial(reducer, block, first)
        return spread._replace(products=np.nextafter(spread.products, np.inf))

    products.Covariance.partial = rounded_otherwise
rounded = ds[:, 0].cov()
products.Covariance.partial = partial
off = 0.0 if ranks.is_first_rank() else 1e-9
mapped = ds.map(lambda rows: np.tanh(rows.astype("f8")) + off, dtype="f8").sum(axis=0)

read = []
fill = blocks.fill
blocks.fill = lambda out, rows, *rest: read.append(len(rows)) or fill(out, rows, *rest)
blocks.BLOCK_ELEMENTS, blocks.RUN_NBYTES = 60, 1_000
shared = {
    "sum": ds.sum(axis=0, dtype="f8"),
    "std": ds.std(dtype="f8"),
    "nanmean": ds.nanmean(axis=0),
    "argmax": ds.argmax(),
    "cov": ds[:, 0].cov(),
    "histogram": ds.histogram(7, (-9, 9))[0],
    "all": ds.all(),
}
del read[:]
ds.max()

cut = lazyshards.open_shards(ARGUMENTS[0])
if ranks.is_first_rank():
    os.truncate(max(Path(ARGUMENTS[0]).iterdir()), 200)
ranks.from_first(None)
report(
    shared={name: digest(result) for name, result in shared.items()},
    read=sum(read),
    cut=caught(cut.sum),
    digests={name: digest(result) for name, result in found.items()},
    rounded=digest(rounded),
    mapped=digest(mapped),
    stats=repr(ds.stats()),
    own=ds.reduce(len, lambda left, right: left + right),
    refused=caught(ds[:0].min),
    computed=digest(ds[3:7].compute()),
)
