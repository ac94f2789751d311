"""What a user writes to load shards with Legate by hand. Importing this starts Legate.

Kept plain and with its faults (module globals, a leaf that may raise): it is the baseline, not an example.
"""

import bisect
import glob
from typing import Any

import cupynumeric
import numpy as np
from legate.core import TaskContext, TaskTarget, VariantCode, get_legate_runtime
from legate.core.data_interface import as_logical_array
from legate.core.task import OutputStore, task

__all__ = ["load", "walk"]

PATHS: list[str] = []
CUM_ROWS: list[int] = []
TILE_ROWS = 0
START = 0


def walk(folder: str) -> tuple[list[str], list[int]]:
    """Return the shards in string order and their cumulative rows."""
    paths = sorted(glob.glob(f"{folder}/shard_*.npy"))
    rows = []
    dtype, trailing = None, None
    for path in paths:
        shard = np.load(path, mmap_mode="r")
        if dtype is None:
            dtype, trailing = shard.dtype, shard.shape[1:]
        if shard.dtype != dtype or shard.shape[1:] != trailing:
            raise ValueError(f"{path}: {shard.dtype} {shard.shape[1:]}, expected {dtype} {trailing}")
        rows.append(shard.shape[0])
    return paths, np.cumsum([0, *rows]).tolist()


@task(variants=(VariantCode.CPU, VariantCode.OMP, VariantCode.GPU))
def _read_tile(ctx: TaskContext, out: OutputStore) -> None:
    on_gpu = ctx.get_variant_kind() == VariantCode.GPU
    view: Any
    if on_gpu:
        import cupy

        view = cupy.from_dlpack(out)
    else:
        view = np.asarray(out)
    first = START + ctx.task_index[0] * TILE_ROWS
    last = first + view.shape[0]
    shard = bisect.bisect_right(CUM_ROWS, first) - 1
    while shard < len(PATHS) and CUM_ROWS[shard] < last:
        lo, hi = max(first, CUM_ROWS[shard]), min(last, CUM_ROWS[shard + 1])
        mapped = np.load(PATHS[shard], mmap_mode="r")
        rows = np.ascontiguousarray(mapped[lo - CUM_ROWS[shard] : hi - CUM_ROWS[shard]])
        if on_gpu:
            view[lo - first : hi - first].set(rows)
        else:
            view[lo - first : hi - first] = rows
        shard += 1


def load(paths: list[str], cum_rows: list[int], start: int, stop: int) -> Any:
    """Return rows [start, stop) as a cuPyNumeric array."""
    global PATHS, CUM_ROWS, TILE_ROWS, START
    runtime = get_legate_runtime()
    machine = runtime.get_machine()
    sample = np.load(paths[0], mmap_mode="r")
    trailing = sample.shape[1:]
    total = stop - start
    processors = max(machine.count(kind) for kind in (TaskTarget.GPU, TaskTarget.OMP, TaskTarget.CPU))
    PATHS, CUM_ROWS, START = paths, cum_rows, start
    TILE_ROWS = -(-total // processors)
    out = cupynumeric.empty((total, *trailing), sample.dtype)
    partition = as_logical_array(out).data.partition_by_tiling((TILE_ROWS, *trailing))
    manual = runtime.create_manual_task(_read_tile.library, _read_tile.task_id, (-(-total // TILE_ROWS),))
    manual.add_output(partition)
    manual.execute()
    runtime.issue_execution_fence(block=True)
    return out
