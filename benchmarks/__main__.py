"""The command line: ``python -m benchmarks first_load | later_loads | slices | opening | all``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from benchmarks import (
    elementwise,
    epochs,
    first_load,
    formats_hdf5,
    formats_plain,
    formats_tables,
    formats_zarr,
    later_loads,
    machine,
    metadata,
    opening,
    reductions,
    remote,
    slices,
)
from benchmarks.options import Options
from benchmarks.report import Table, markdown

__all__ = ["main"]

_BENCHMARKS = {
    "first_load": first_load.run,
    "later_loads": later_loads.run,
    "slices": slices.run,
    "opening": opening.run,
    "epochs": epochs.run,
    "metadata": metadata.run,
    "remote": remote.run,
    "formats_hdf5": formats_hdf5.run,
    "formats_plain": formats_plain.run,
    "formats_tables": formats_tables.run,
    "formats_zarr": formats_zarr.run,
    "reductions": reductions.run,
    "elementwise": elementwise.run,
}


def main() -> None:
    """Run the benchmarks that were asked for; print each table as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*_BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="small data, few turns: not for figures to quote")
    parser.add_argument("--full", action="store_true", help="the slow sizes too: opening 50,000 shards")
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="turns of each peer")
    parser.add_argument("--dir", type=Path, default=_default_dir(), help="where the data is kept (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    arguments = parser.parse_args()
    options = Options(arguments.dir.resolve(), arguments.quick, arguments.full, arguments.repeat)
    options.cache_dir.mkdir(parents=True, exist_ok=True)

    described = machine.describe()
    print(f"{described}{' (quick)' * options.quick}", flush=True)
    tables: list[Table] = []
    for name in _BENCHMARKS if arguments.name == "all" else (arguments.name,):
        for table in _BENCHMARKS[name](options):
            tables.append(table)
            print(f"\n{markdown(table)}", flush=True)
    if arguments.json:
        found = [{**asdict(table), "targets": table.verdicts()} for table in tables]
        arguments.json.write_text(json.dumps({"machine": described, "quick": options.quick, "tables": found}, indent=1))


def _default_dir() -> Path:
    """Return a folder for the data below TMPDIR if that is set, else below the user's cache."""
    if folder := os.environ.get("TMPDIR"):
        return Path(folder) / "lazyshards-bench"
    return Path.home() / ".cache" / "lazyshards-bench"


if __name__ == "__main__":
    main()
