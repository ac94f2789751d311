"""The demonstration: open a dataset, compute ``ds[1_000:5_000]`` on the best engine there is, and check it."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lazyshards.dataset import ShardedDataset
from lazyshards.display import plan_text, size_text
from lazyshards.engines import auto_engine, find_engine
from lazyshards.errors import EngineError, EngineUnavailableError
from lazyshards.opening import open_shards

__all__ = ["demonstrate", "write_example"]

_ROWS = (1_200, 0, 700, 950, 1_100, 400, 1_300, 850, 600, 1_400, 500, 1_000)
"""Rows of the shards of the example: uneven, one of them empty, 10,000 in all."""
_WIDTH = 256
_FORTRAN = 4
"""The shard of the example that is in Fortran order."""
_MOST_NBYTES = 256 << 20
"""Bytes of the user's data that a demonstration computes at most."""


def write_example(folder: Path) -> npt.NDArray[np.float32]:
    """Write the example dataset, twelve uneven ``.npy`` shards, and return what they hold together.

    Parameters
    ----------
    folder : Path
        An existing directory.

    Returns
    -------
    ndarray of float32, (10000, 256)
    """
    whole = np.random.default_rng(0).standard_normal((sum(_ROWS), _WIDTH), dtype=np.float32)
    start = 0
    for i, rows in enumerate(_ROWS):
        shard = whole[start : start + rows]
        np.save(folder / f"shard_{i}.npy", np.asfortranarray(shard) if i == _FORTRAN else shard)
        start += rows
    return whole


def demonstrate(ds: ShardedDataset | None = None, engine: str | None = None) -> Iterator[str]:
    """Yield, as text, each step of opening, slicing and computing, and what the check says.

    Parameters
    ----------
    ds : ShardedDataset, optional
        The user's data; by default the example, written to a temporary directory.
    engine : str, optional
        By default the dataset's own; if that is ``auto`` and Legate does not start, NumPy, and the text says why.

    Raises
    ------
    EngineError
        If what was computed is not what NumPy reads.
    """
    if ds is not None:
        yield from _show(ds, None, engine)
        return
    with tempfile.TemporaryDirectory(prefix="lazyshards-demo-") as folder:
        whole = write_example(Path(folder))
        size = size_text(whole.nbytes)
        yield f"Wrote {len(_ROWS)} uneven shards, {size}: shard 1 is empty, shard {_FORTRAN} in Fortran order.\n"
        yield from _show(open_shards(folder, engine=engine), whole, engine)


def _show(ds: ShardedDataset, whole: npt.NDArray[np.generic] | None, engine: str | None) -> Iterator[str]:
    yield f"{ds!r}\n"
    name, seconds, problem = _bring_up(ds, engine)
    if problem:
        yield f"{problem}\n"
    index = _index(ds)
    part = ds[index]
    plan = part.plan(name)
    yield f"ds[{index.start:_}:{index.stop:_}] reads nothing; what compute() will do:"
    yield _indented(plan_text(plan, name, find_engine(name).capacity(), len(ds.shards))) + "\n"
    start = time.perf_counter()
    result = part.compute(engine=name)
    taken = time.perf_counter() - start
    expected = whole[index] if whole is not None else _expected(ds, part, index, name)
    if expected is not None:
        _check(np.asarray(result), expected)
    checked = "not checked, NumPy itself computed it" if expected is None else "equal to what NumPy reads"
    yield (
        f"ds[{index.start:_}:{index.stop:_}] -> {type(result).__module__.partition('.')[0]} array {result.shape} "
        f"{result.dtype}, {checked}."
    )
    started = f" ({name} was started before, in {seconds:.1f} s)" if seconds >= 0.1 else ""
    tiles = f"{plan.tile_count} tile{'' if plan.tile_count == 1 else 's'}"
    shards = plan.shards
    yield (
        f"engine {name}: {tiles} over {shards} shard{'' if shards == 1 else 's'}, "
        f"{plan.nbytes:,} bytes in {taken * 1000:.1f} ms{started}"
    )


def _bring_up(ds: ShardedDataset, engine: str | None) -> tuple[str, float, str]:
    """Start the engine and return its name, the seconds that it took, and why it is not the one hoped for."""
    name, problem = ds.engine, ""
    start = time.perf_counter()
    try:
        find_engine(name)
    except EngineUnavailableError as exc:
        if engine not in (None, "auto"):
            raise
        name, problem = "numpy", f"Legate does not start here, NumPy serves: {exc}"
    if name == "numpy" and engine in (None, "auto") and not problem and auto_engine()[0] == "numpy":
        problem = f"The engine is NumPy: {auto_engine()[1]}"
    return name, time.perf_counter() - start, problem


def _index(ds: ShardedDataset) -> slice:
    """Return 1_000:5_000, or what of it a smaller dataset, or one of giant rows, has."""
    rows = len(ds)
    start, stop = (1_000, min(5_000, rows)) if rows > 1_000 else (rows // 10, rows)
    most = _MOST_NBYTES * rows // max(1, ds.nbytes)
    return slice(start, min(stop, start + max(1, most)))


def _expected(ds: ShardedDataset, part: ShardedDataset, index: slice, name: str) -> npt.NDArray[np.generic] | None:
    """Return the rows as another reader gives them: np.load for npy files of this machine, else the NumPy engine."""
    if ds.format != "npy" or any("://" in shard.path for shard in ds.shards[:1]):
        return None if name == "numpy" else part.to_numpy()
    pieces = [np.empty((0, *ds.shape[1:]), ds.dtype)]
    start = 0
    for shard in ds.shards:
        low, high = max(index.start, start), min(index.stop, start + shard.rows)
        if low < high:
            pieces.append(np.load(shard.path, mmap_mode="r")[low - start : high - start])
        start += shard.rows
    return np.concatenate(pieces, dtype=ds.dtype)


def _check(result: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> None:
    """Raise unless both hold the same bits, so that NaNs are compared too."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        raise EngineError(
            f"the check failed: computed {result.shape} {result.dtype}, NumPy reads {expected.shape} {expected.dtype}"
        )
    if result.tobytes() != expected.tobytes():
        raise EngineError("the check failed: what was computed differs from what NumPy reads; please report this")


def _indented(text: str) -> str:
    return "\n".join([f"  {line}" for line in text.splitlines()])
