"""A program that fails on one rank, by no fault of the data, while the others wait for it."""

from reporting import DATA

import lazyshards
from lazyshards.engines.ranks import node_id

ds = lazyshards.open_shards(DATA)
if node_id() == 1:
    raise KeyError("only here")
ds.compute()
