"""How the tests of many ranks run: scripts in scenarios/, started by `lazyshards run`, each rank reporting in a file.

Where Legate has no networking (the wheels of 26.6) there is one rank of several processors, and what needs more is not
collected. ``make test-distributed`` sets up one that has it, and runs all.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import lazyshards
from lazyshards.engines import bringup
from lazyshards.testing import example_array, write_npy_shards

HERE = Path(__file__).parent
MOST = 4 if bringup.has_networks() else 1
REQUIRED = "legate" in os.environ.get("LAZYSHARDS_REQUIRE_ENGINES", "")
reason = bringup.why_unavailable()
collect_ignore = ["test_failures.py", "test_once.py"] if MOST == 1 else []


def pytest_generate_tests(metafunc):
    """Run what takes ``ranks`` on the numbers of ranks that its marker names, as far as there can be so many."""
    if "ranks" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        metafunc.parametrize("ranks", [count for count in marker.args if count <= MOST])


def pytest_collection_modifyitems(items):
    """Leave out what needs more ranks than there can be."""
    least = {item: min(marker.args) for item in items if (marker := item.get_closest_marker("ranks"))}
    items[:] = [item for item in items if least.get(item, 1) <= MOST]


@pytest.fixture
def launch(tmp_path):
    """Give a function that runs a scenario and returns what each rank reported and the exit status."""
    if reason is not None and not REQUIRED:
        pytest.skip(reason)

    def run(scenario, data, *arguments, ranks=2, cpus=None, timeout=150, **environment):
        out = tmp_path / f"{scenario}-{ranks}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        command = [sys.executable, "-m", "lazyshards.cli", "run", "--ranks", str(ranks), "--sysmem", "300"]
        command += ["--cpus", str(cpus or (1 if ranks > 1 else 2)), str(HERE / "scenarios" / f"{scenario}.py")]
        command += [str(out), str(data), *map(str, arguments)]
        names = ("LEGATE_CONFIG", "LAZYSHARDS_ENGINE", "LEGION_DEFAULT_ARGS")
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        env = {**inherited, "PYTHONPATH": str(HERE.parents[1]), **environment}
        log = out / "said.txt"  # and no pipe, which ranks that outlive their launcher would keep open
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=out, start_new_session=True
            )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            end(process)
            pytest.fail(f"{scenario} on {ranks} ranks did not end within {timeout} s:\n{log.read_text()[-3000:]}")
        said = log.read_text()
        found = [out / f"rank_{rank}.json" for rank in range(ranks)]
        reports = [json.loads(path.read_text()) if path.exists() else None for path in found]
        return Done(process.returncode, reports, said)

    return run


def end(process):
    """End a launcher, which is asked first, so that it ends its ranks; they are in sessions of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Done:
    """How a run ended."""

    def __init__(self, status, reports, said):
        self.status = status
        self.reports = reports
        self.said = said

    def well(self):
        """Return what each rank reported, of a run that ended well."""
        assert self.status == 0, f"exit status {self.status}:\n{self.said[-6000:]}"
        assert None not in self.reports, self.said[-6000:]
        return self.reports


@pytest.fixture(scope="session")
def digest():
    """Give what scenarios/reporting.py calls a digest."""

    def of(array):
        head = repr((array.dtype.str, array.shape)).encode()
        return hashlib.blake2b(head + array.tobytes(), digest_size=8).hexdigest()

    return of


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Write uneven npy shards once, an empty one among them, and return their directory."""
    path = tmp_path_factory.mktemp("data") / "npy"
    counts = [700, 1, 0, 1300, 399]
    whole = example_array((sum(counts), 3, 2), "f4")
    whole = np.nan_to_num(whole, posinf=1, neginf=-1)  # so that == compares
    write_npy_shards(path, np.split(whole, np.cumsum(counts)[:-1]))
    return path


def safetensors_bytes(rows):
    """Return a safetensors file that holds rows of float32."""
    head = json.dumps({"rows": {"dtype": "F32", "shape": rows.shape, "data_offsets": [0, rows.nbytes]}}).encode()
    return len(head).to_bytes(8, "little") + head + rows.tobytes()


@pytest.fixture(scope="session")
def formats(shards, tmp_path_factory):
    """Write the same rows in every format that can be written, beside the npy shards, and return the directory."""
    root = tmp_path_factory.mktemp("formats")
    source = lazyshards.open_shards(shards, engine="numpy")
    whole = source.to_numpy()
    np.save(root / "whole.npy", whole)
    lazyshards.write_shards(whole, root / "npy", format="npy", rows_per_shard=500)
    for name in ("raw", "hdf5", "parquet", "arrow"):
        # A table has no axes within its cells.
        rows = whole.reshape(len(whole), -1) if name in {"parquet", "arrow"} else whole
        lazyshards.write_shards(rows, root / name, format=name, rows_per_shard=500)
    (root / "npz").mkdir()
    (root / "safetensors").mkdir()
    for i, start in enumerate(range(0, len(whole), 500)):
        rows = whole[start : start + 500]
        np.savez(root / "npz" / f"shard_{i}.npz", rows)
        (root / "safetensors" / f"shard_{i}.safetensors").write_bytes(safetensors_bytes(rows))
        # Legate 26.1 brings Zarr 2, whose stores the writer does not make.
        zarr.open(str(root / "zarr" / f"shard_{i}.zarr"), mode="w", shape=rows.shape, chunks=(64, 3, 2), dtype="f4")[
            :
        ] = rows
    return root
