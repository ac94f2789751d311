"""Reductions are each rank's own work: all of them must find the same, or raise the same."""

from reporting import DATA, caught, digest, report

import lazyshards

ds = lazyshards.open_shards(DATA)
found = {
    "sum": ds.sum(axis=0, dtype="f8"),
    "std": ds.std(dtype="f8"),
    "argmax": ds.argmax(),
    "median": ds.median(axis=0),
    "cov": ds[:, 0].cov(),
    "any": ds[::2].any(axis=1),
}
report(
    digests={name: digest(result) for name, result in found.items()},
    stats=repr(ds.stats()),
    own=ds.reduce(len, lambda left, right: left + right),
    refused=caught(ds[:0].min),
    computed=digest(ds[3:7].compute()),
)
