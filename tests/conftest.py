"""Fixtures of all tests: the engines that are here, and shards to read with them.

``LAZYSHARDS_REQUIRE_ENGINES=numpy,legate`` makes a missing engine a failure where it would be a skip.
``HYPOTHESIS_PROFILE=random`` draws other examples in each run than the fixed ones, to look for what they do not show.
"""

import importlib.util
import os
import signal
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from lazyshards import open_shards
from lazyshards.engines import bringup, find_engine
from lazyshards.errors import EngineUnavailableError
from lazyshards.testing import example_array, write_npy_shards

settings.register_profile("fixed", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# A script's background jobs ignore Control-C, and their children with them; tests that send one must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ENGINES = ("numpy", "cupy", "legate")
REQUIRED = {name.strip() for name in os.environ.get("LAZYSHARDS_REQUIRE_ENGINES", "").split(",")} - {""}


def _bring_up(name):
    """Return why an engine cannot run here, or None; Legate is started by this, on the main thread."""
    if name == "legate" and (reason := bringup.why_unavailable()):
        return reason
    if name == "cupy" and importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        find_engine(name)
    except EngineUnavailableError as exc:
        return str(exc)
    return None


@pytest.fixture(scope="session")
def _reasons():
    """Remember what was found, so that an engine that cannot start is tried once."""
    return {}


@pytest.fixture(params=ENGINES)
def engine(request, _reasons):
    """Each engine that is here; one that is not skips with the reason, or fails if it is required."""
    name = request.param
    if name not in _reasons:
        _reasons[name] = _bring_up(name)
    if _reasons[name] is not None:
        if name in REQUIRED:
            pytest.fail(f"the {name} engine is required and cannot run: {_reasons[name]}")
        pytest.skip(f"the {name} engine cannot run: {_reasons[name]}")
    return name


@pytest.fixture
def on_numpy(monkeypatch):
    """Make NumPy the engine of all that does not say otherwise, so that Legate is not started by chance."""
    monkeypatch.setenv("LAZYSHARDS_ENGINE", "numpy")


@pytest.fixture
def write(tmp_path):
    """Give a function that writes shards of these row counts and returns their directory and what they hold."""

    def make(counts, row_shape=(3,), dtype="f4", *, name="set", pattern="shard_{:04d}.npy", first=0):
        whole = example_array((sum(counts), *row_shape), dtype)
        write_npy_shards(tmp_path / name, np.split(whole, np.cumsum(counts)[:-1]), pattern=pattern, first=first)
        return tmp_path / name, whole

    return make


@pytest.fixture
def opened(write):
    """Give a function that writes shards and returns them opened on NumPy, and what they hold."""

    def make(counts, row_shape=(3,), dtype="f4", **options):
        path, whole = write(counts, row_shape, dtype, **options)
        return open_shards(path, engine="numpy"), whole

    return make


@pytest.fixture
def child(tmp_path):
    """Give a function that runs code in a fresh Python, which must end cleanly, and returns what it printed."""
    import subprocess
    import sys

    def run(code, *arguments, **environment):
        root = Path(bringup.__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(root), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def pytest_collection_modifyitems(items):
    """Run what needs Legate last: all else runs in a process that has not started it."""
    items.sort(key=lambda item: getattr(getattr(item, "callspec", None), "params", {}).get("engine") == "legate")
