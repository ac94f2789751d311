"""Compute every kind of index of every format and compare with NumPy."""

import os

import numpy as np
from reporting import ARGUMENTS, DATA, report

import lazyshards
from lazyshards.engines import bringup

kinds = {
    "slice": np.s_[100:1500],
    "everything": np.s_[:],
    "steps": np.s_[::7],
    "backwards": np.s_[2000:10:-3],
    "integer": np.s_[701],
    "negative integer": np.s_[-1],
    "nothing": np.s_[5:5],
    "gather": np.random.default_rng(0).integers(0, 2400, 333),
    "mask": np.arange(2400) % 5 == 0,
    "inner axes": np.s_[10:2000, 1, ::-1],
    "one element": np.s_[1234, 2, 1],
    "ellipsis": np.s_[..., 0],
}
whole = np.load(os.path.join(DATA, "whole.npy"))
everything = ARGUMENTS[0] == "all"
few = ("slice", "steps", "gather") if everything else ("gather",)
wrong, compared = [], 0
for name in sorted(os.listdir(DATA)):
    path = os.path.join(DATA, name)
    if not os.path.isdir(path):
        continue
    ds = lazyshards.open_shards(path)
    expected = whole.reshape(len(whole), *ds.shape[1:])
    for kind, index in kinds.items():
        if (
            name != "npy" or (not everything and kind in {"everything", "integer", "nothing", "ellipsis"})
        ) and kind not in few:
            continue
        for tiles in (None, 3) if name == "npy" and kind in {"slice", "gather"} else (2,):
            found = ds[index].compute(tiles_per_processor=tiles)
            compared += 1
            if type(found).__module__.split(".")[0] != "cupynumeric":
                wrong.append((name, kind, f"is a {type(found)}"))
            elif not np.array_equal(np.asarray(found), expected[index]) or found.shape != np.shape(expected[index]):
                wrong.append((name, kind, tiles))
    out = ds[:100].compute()
    if not np.array_equal(np.asarray(ds[100:200].compute(out=out)), expected[100:200]):
        wrong.append((name, "out", None))
report(wrong=wrong, compared=compared, node_count=bringup.started().node_count)
