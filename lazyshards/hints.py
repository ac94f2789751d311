"""What to do instead, for names that a dataset has not and that people who know arrays ask it for."""

__all__ = ["hint_for"]

_COMPUTE = "compute() it first, and use that of the array"
_AXES = "its rows are its first axis; compute() the part that you need, and rearrange the array"
_ROWS = "map(function, row_shape=...) makes rows of another shape lazily"
_LABELS = "it has no labels; index it by position, such as ds[1_000:5_000, 3]"
_CHANGE = "it is read-only; compute() makes an array that may be changed, map() changes rows lazily"

_HINTS = {
    **dict.fromkeys(("T", "mT", "swapaxes", "transpose"), _AXES),
    **dict.fromkeys(("flatten", "ravel", "reshape", "squeeze"), f"{_ROWS}; {_AXES}"),
    **dict.fromkeys(("argsort", "cumprod", "cumsum", "dot", "ptp", "repeat", "searchsorted", "sort"), _COMPUTE),
    **dict.fromkeys(
        ("tobytes", "tofile"), "to_numpy() it first; lazyshards.write_shards() writes it in bounded memory"
    ),
    **dict.fromkeys(("fill", "partition", "put", "resize"), _CHANGE),
    **dict.fromkeys(("columns", "iloc", "index", "loc"), _LABELS),
    **dict.fromkeys(("apply", "assign", "transform"), "use map(function), which is given blocks of rows"),
    "array": "use to_numpy(), or np.asarray(ds)",
    "chunks": "it has shards, see ds.shards, and the plan's tiles, see ds.explain()",
    "concat": "use lazyshards.concat([ds, other])",
    "copy": "a dataset never changes and needs no copy; compute() makes a new array each time",
    "data": "use to_numpy(), or np.asarray(ds)",
    "describe": "use stats()",
    "filter": "use where_rows(predicate)",
    "imag": "use map(np.imag, dtype=...)",
    "item": "use float(ds[i, j]) or int(ds[i, j]), or compute() it first",
    "itemsize": "use ds.dtype.itemsize",
    "load": "use compute()",
    "numpy": "use to_numpy(), or np.asarray(ds)",
    "percentile": "use quantile(q / 100), which is exact and streamed",
    "query": "use where_rows(predicate)",
    "read": "use compute()",
    "real": "use map(np.real, dtype=...)",
    "rechunk": "shards are as they are; cache(path, rows_per_shard=...) writes others",
    "save": "use cache(path), or lazyshards.write_shards(ds, path)",
    "select": "use where_rows(predicate)",
    "shuffle": "use batches(batch_size, shuffle=True)",
    "strides": "it is not in memory; compute() it first",
    "tail": "use ds[-5:].to_numpy()",
    "take": "index it with an array of row numbers, ds[rows]",
    "to_list": "use to_numpy().tolist()",
    "tolist": "use to_numpy().tolist()",
    "unique": "use reduce(lambda rows: np.unique(rows), lambda a, b: np.union1d(a, b))",
    "values": "use to_numpy(), or np.asarray(ds)",
    "view": "use astype() for another dtype; compute() it first to look at its bytes otherwise",
}


def hint_for(name: str) -> str:
    """Return what to do instead of asking a dataset for ``name``; empty if there is nothing to say.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> hint_for("percentile")
    'use quantile(q / 100), which is exact and streamed'
    """
    return _HINTS.get(name, "")
