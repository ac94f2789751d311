"""What a dataset costs on many ranks: the real planner on layouts that were never written.

    python -m benchmarks.simulate_scale                  # 1 to 4,096 ranks, up to 1,000,000 shards (1 PB)
    python -m benchmarks.simulate_scale --check DIR      # predictions for this machine beside what is measured
    python -m benchmarks.simulate_scale --skew DIR       # shards of unequal cost, in more and fewer tiles, each engine

A layout of any size is made of names and numbers, the planner runs on it as it would on a rank, and what each rank
would read follows from the plan. Time is a model: see docs/explanation/scaling.md.
"""

import argparse
import pickle
import statistics
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np

import lazyshards
from lazyshards.access import count_reads
from lazyshards.engines import auto_engine, handover
from lazyshards.layout import Layout
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage

ROW_NBYTES = 4096
LATENCY_S, RANK_NBYTES_S = 0.03, 1.5e9
"""A request to an object store, and what one rank reads in a second: the model's two constants, options of main."""


def make_layout(shards, nbytes, seed=0):
    """Return a layout of so many npy shards of uneven length, ``nbytes`` together."""
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, shards)
    rows = np.maximum(1, (weights / weights.sum() * (nbytes // ROW_NBYTES)).astype(np.int64))
    stamps = np.stack([rows * ROW_NBYTES + 128, np.zeros_like(rows), np.arange(shards)], axis=1)
    return Layout(
        format="npy",
        storage=LocalStorage(),
        row_shape=(ROW_NBYTES // 4,),
        dtype=np.dtype("f4"),
        root="/data/",
        names=tuple([f"shard_{i:07d}.npy" for i in range(shards)]),
        ends=np.cumsum(rows),
        stamps=stamps,
        offsets=np.full(shards, 128, np.int64),
    )


def timed(action):
    """Return what an action returns, and the seconds that it took."""
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def loads(plan, ranks):
    """Return the bytes and requests of each rank, or of some of them, evenly spaced, where counting all takes long."""
    if plan.shards <= 100_000:
        return plan.loads(ranks)
    tiles = [plan.tiles[i] for i in np.linspace(0, plan.tile_count - 1, 16 if ranks >= 256 else 2).astype(int)]
    counts = [count_reads(plan.rows[tile], plan.layout, plan.cell) for tile in tiles]
    return np.array([each.file_nbytes for each in counts]), np.array([each.requests for each in counts])


def simulate(layout, ranks, index, latency_s=LATENCY_S, rank_nbytes_s=RANK_NBYTES_S, concurrency=64):
    """Return a row of the table: what computing ``layout[index]`` on so many ranks takes."""
    selection = select(select_all(layout.rows, layout.row_shape), index)
    plan, plan_s = timed(lambda: compile_plan(layout, selection, Capacity(workers=ranks)))
    (nbytes, requests), count_s = timed(lambda: loads(plan, ranks))
    launched = len(pickle.dumps(plan.layout))
    seconds = max(nbytes.max() / rank_nbytes_s, requests.max() * latency_s / concurrency)
    return {
        "shards": len(layout),
        "TB": plan.nbytes / 1e12,
        "ranks": ranks,
        "plan ms": plan_s * 1e3,
        "count s": count_s,
        "plan MB": launched / 1e6,
        "GB/rank": nbytes.mean() / 1e9,
        "req/rank": requests.mean(),
        "skew": nbytes.max() / max(1, nbytes.mean()),
        "read s": seconds,
        "req/s": requests.mean() * ranks / seconds if seconds else 0.0,
    }


def layout_nbytes(shards):
    """Return the bytes of memory that a layout of so many shards takes on every rank."""
    tracemalloc.start()
    layout = make_layout(shards, shards << 20)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del layout
    return held


def opening(shards, ranks, latency_s=LATENCY_S, concurrency=64, store_requests_s=5_500, page=1_000):
    """Return a row of the table: what opening so many shards costs, each rank for itself, and one for all."""
    layout = make_layout(shards, shards * 10**9)
    packed, pack_s = timed(lambda: handover._pack(layout))  # what is handed over
    _, unpack_s = timed(lambda: handover._unpack(packed, layout.storage))
    pages = -(-shards // page)
    sampled = handover._sample_size(shards, ranks)

    def seconds(lists, looks):
        """Return how long so many ranks list and look: bound by their own waiting, or by what the store answers."""
        own = pages * latency_s + looks[0] * latency_s / concurrency
        return max(own, (lists * pages + sum(looks)) / store_requests_s)

    each = seconds(ranks, [shards] * ranks)
    once = seconds(1, [shards]) + seconds(0, [sampled] * (ranks - 1)) if ranks > 1 else each
    return {
        "shards": shards,
        "ranks": ranks,
        "requests, each": ranks * (pages + shards),
        "once": pages + shards + sampled * (ranks - 1),
        "s, each": each,
        "s, once": once,
        "MB handed over": len(packed) / 1e6,
        "pack s": pack_s,
        "unpack s": unpack_s,
    }


def skewed(directory):
    """Print how long reading takes whose one half must be decoded: as planned by default, and in tiles by number."""
    whole = np.random.default_rng(0).integers(0, 40, (16_384, 2_048)).astype("f4")
    parts = {"packed": "npy", "coded": "hdf5"}
    for name, format in parts.items():
        if not (path := Path(directory) / f"skew_{name}").is_dir():
            more = {"compression": "gzip"} if format == "hdf5" else {}
            lazyshards.write_shards(whole, path, format=format, rows_per_shard=2_048, **more)
    ds = lazyshards.concat([lazyshards.open_shards(Path(directory) / f"skew_{name}") for name in parts])
    rows = []
    for engine in dict.fromkeys(["numpy", auto_engine()[0]]):
        times = {tiles: [] for tiles in (None, 1, 2, 4, 16)}
        for _ in range(9):
            for tiles, found in times.items():
                found.append(timed(partial(ds.compute, engine, tiles_per_processor=tiles))[1])
        first = statistics.median(times[1])
        for tiles, found in times.items():
            plan = ds.plan(engine, tiles_per_processor=tiles)
            asked = "default" if tiles is None else str(tiles)
            rows.append({"engine": engine, "tiles a processor": asked, "tiles": plan.tile_count})
            rows[-1] |= {"s": statistics.median(found), "of 1 tile": statistics.median(found) / first}
    table(rows)


def _text(value):
    return value if isinstance(value, str) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def table(rows):
    """Print rows of figures under their names."""
    names = list(rows[0])
    texts = [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *[len(line[i]) for line in texts]) for i, name in enumerate(names)]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for line in texts:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), flush=True)


def check(directory):
    """Print what the plan predicts for one machine beside what reading does: requests and bytes are counted."""
    from lazyshards.testing import RecordingStorage, example_array, with_storage, write_npy_shards

    path = Path(directory) / "simulate_scale"
    if not path.is_dir():
        whole = example_array((65_536, 1024), "f4")
        write_npy_shards(path, np.split(whole, np.cumsum([9_000, 30_000, 1_000, 12_000])))
    ds = lazyshards.open_shards(path, engine="numpy")
    rows = []
    for name, index in {"all": np.s_[:], "a half": np.s_[7_000:40_000], "every 9th": np.s_[::9]}.items():
        recording = RecordingStorage(ds[index]._layout.storage)
        part = with_storage(ds[index], recording)
        plan = part.plan()
        part.compute()
        seconds = min(timed(ds[index].compute)[1] for _ in range(5))
        rows.append(
            {
                "slice": name,
                "requests planned": plan.requests,
                "requests made": len(recording.reads),
                "bytes planned": plan.bytes_read,
                "bytes read": sum(read[2] for read in recording.reads),
                "s": seconds,
                "GB/s": plan.bytes_read / seconds / 1e9,
            }
        )
    table([{name: value for name, value in row.items() if name != "slice"} for row in rows])


def main():
    """Run the simulation, or the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", metavar="DIR", help="measure on this machine, with data that is written there once")
    parser.add_argument("--skew", metavar="DIR", help="the same, of shards of unequal cost")
    parser.add_argument("--latency-ms", type=float, default=LATENCY_S * 1e3)
    parser.add_argument("--rank-gbs", type=float, default=RANK_NBYTES_S / 1e9)
    parser.add_argument("--most-shards", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.check:
        check(options.check)
        return
    if options.skew:
        skewed(options.skew)
        return
    model = {"latency_s": options.latency_ms / 1e3, "rank_nbytes_s": options.rank_gbs * 1e9}
    rows = []
    for shards in (1_000, 100_000, 1_000_000):
        if shards > options.most_shards:
            continue
        layout = make_layout(shards, shards * 10**9)
        rows += [simulate(layout, ranks, np.s_[:], **model) for ranks in (1, 16, 256, 4_096) if shards < 10**6 * ranks]
        rows += [simulate(layout, ranks, np.s_[1_000_000:5_000_000], **model) for ranks in (16, 4_096)]
    table(rows)
    ways = [(1_000, 2), (1_000, 256), (100_000, 16), (100_000, 4_096), (1_000_000, 4_096)]
    table([opening(*way, latency_s=model["latency_s"]) for way in ways if way[0] <= options.most_shards])
    for shards in (1_000, 1_000_000):
        if shards <= options.most_shards:
            print(f"a layout of {shards:,} shards takes {layout_nbytes(shards) / 1e6:,.1f} MB on every rank")


if __name__ == "__main__":
    main()
