"""What `lazyshards doctor` says: what was found here, what is missing, and the command that installs it."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from lazyshards._version import __version__
from lazyshards.engines import bringup

__all__ = ["Library", "Report", "format_report", "report"]

# Name shown, distributions that provide it, the command that installs it, what it is for.
_LIBRARIES = (
    ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), 'pip install "lazyshards[cupy]"', 'engine "cupy", GPU tiles'),
    ("kvikio", ("kvikio-cu13", "kvikio-cu12", "kvikio"), "pip install kvikio-cu13", "reads from disk to GPU memory"),
    ("h5py", ("h5py",), 'pip install "lazyshards[hdf5]"', "HDF5"),
    ("hdf5plugin", ("hdf5plugin",), 'pip install "lazyshards[hdf5]"', "HDF5 compressed by Blosc, Zstandard, LZ4"),
    ("pyarrow", ("pyarrow",), 'pip install "lazyshards[parquet]"', "Parquet and Arrow"),
    ("zarr", ("zarr",), 'pip install "lazyshards[zarr]"', "Zarr"),
    ("s3fs", ("s3fs",), 'pip install "lazyshards[s3]"', "shards on S3"),
    ("tqdm", ("tqdm",), 'pip install "lazyshards[progress]"', "progress bars"),
)

# Legate is started in a child, so that asking never costs the caller his process, or its one start.
_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dataclasses import asdict
from lazyshards.engines import bringup
from lazyshards.errors import EngineUnavailableError
try:
    found = asdict(bringup.start())
except EngineUnavailableError as exc:
    found = {"error": str(exc)}
print(json.dumps(found, default=str))
"""


@dataclass(frozen=True, slots=True)
class Library:
    """An optional library, found or not."""

    name: str
    """Name to import it by."""
    version: str | None
    """Installed version, or None."""
    install: str
    """Command that installs it."""
    purpose: str
    """What it serves."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found on this machine."""

    lazyshards: str
    """Version of this package."""
    python: str
    """Version of Python."""
    executable: str
    """Path of the Python that runs."""
    system: str
    """Operating system and architecture."""
    numpy: str | None
    """Version of NumPy."""
    cores: int
    """Cores that this process may use."""
    legate: Mapping[str, object] | None
    """The fields of `bringup.Started`, or None where Legate did not start."""
    problem: str | None
    """Why Legate did not start, with what helps; None where it did."""
    driver: str | None
    """Path of the NVIDIA driver library, or None."""
    stub: str | None
    """Path of the stand-in for it that this installation has, or None."""
    compiler: str | None
    """Path of the C compiler that a build would use, or None."""
    libraries: tuple[Library, ...]
    """Optional libraries, found or not."""
    engine: str
    """Engine that `auto` takes."""
    engine_reason: str
    """Why it takes that one."""


def report() -> Report:
    """Look at the machine and return what was found; whatever fails is part of the answer, not an error.

    Legate is started in a child process, unless it runs in this one already.
    """
    stub = bringup.stub_path()
    legate, problem = _legate()
    engine, reason = _engine()
    return Report(
        lazyshards=__version__,
        python=platform.python_version(),
        executable=sys.executable or "unknown",
        system=f"{platform.system()} {platform.machine()}",
        numpy=_version("numpy"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        legate=legate,
        problem=problem,
        driver=bringup.find_driver(),
        stub=None if stub is None else str(stub),
        compiler=_compiler(),
        libraries=tuple(Library(name, _version(*names), install, use) for name, names, install, use in _LIBRARIES),
        engine=engine,
        engine_reason=reason,
    )


def format_report(found: Report | None = None) -> str:
    """Return a report as text for a person, without a newline at its end.

    Parameters
    ----------
    found : Report, optional
        What to show; by default the machine is looked at now.
    """
    found = found or report()
    lines = [
        f"lazyshards {found.lazyshards}",
        _line("Python", f"{found.python}  {found.executable}"),
        _line("system", f"{found.system}, {found.cores} cores for this process"),
        _line("NumPy", found.numpy or "missing: pip install numpy"),
        "",
        "Legate",
        *_legate_lines(found),
        _line("driver", found.driver or "none (libcuda.so.1 not found)"),
        *([] if found.driver else [_line("stand-in", found.stub or "none: this installation was built without")]),
        _line("C compiler", found.compiler or "none: apt-get install gcc libc6-dev"),
        "",
        "Optional libraries",
        *(
            _line(one.name, f"{one.version or 'missing':10}  {one.purpose}{'' if one.version else f': {one.install}'}")
            for one in found.libraries
        ),
        "",
        f"Engine: auto takes {found.engine!r}: {found.engine_reason}",
    ]
    return "\n".join(lines)


def _legate_lines(found: Report) -> list[str]:
    if found.legate is None:
        return [_line("state", f"not available: {found.problem}")]
    now = found.legate
    kinds = now["processors"]
    assert isinstance(kinds, Mapping)
    counts = ", ".join(f"{count} {kind.upper()}" for kind, count in kinds.items())
    config = now["config"] or "chosen by Legate itself"
    chosen = "" if os.environ.get("LEGATE_CONFIG") or not now["config"] else "  (chosen by lazyshards)"
    return [
        _line("version", f"Legate {now['legate']}, cuPyNumeric {now['cupynumeric']}"),
        _line("processors", f"{counts}; node {now['node_id']} of {now['node_count']}"),
        _line("memory", f"sysmem {_size(now['sysmem_nbytes'])}, fb {_size(now['fbmem_nbytes'])} a GPU"),
        _line("configured", f"{config}{chosen}"),
    ]


def _line(label: str, text: str) -> str:
    return f"  {label:12}{text}"


def _size(nbytes: object) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if isinstance(nbytes, int) else "unknown"


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _compiler() -> str | None:
    chosen = os.environ.get("CC", "").split()
    return next((path for name in chosen[:1] or ["cc", "gcc", "clang"] if (path := shutil.which(name))), None)


def _engine() -> tuple[str, str]:
    try:
        from lazyshards.engines import auto_engine

        return auto_engine()
    except Exception as exc:  # noqa: BLE001 (the doctor shows what is broken; it does not break with it)
        return "numpy", f"the choice failed: {type(exc).__name__}: {exc}"


def _legate() -> tuple[Mapping[str, object] | None, str | None]:
    """Return what runs when Legate is started here and None, or None and why it does not."""
    try:
        if (running := bringup.started()) is not None:
            return asdict(running), None
        if reason := bringup.why_unavailable():
            return None, reason
        found = _probe()
    except Exception as exc:  # noqa: BLE001 (as above)
        return None, f"{type(exc).__name__}: {exc}"
    return (None, str(found["error"])) if "error" in found else (found, None)


def _probe() -> Mapping[str, object]:
    """Start Legate in a child and return the fields of `Started`, or an "error"."""
    # The same import path as here, so that the child sees the same packages.
    paths = [str(Path(path).resolve()) for path in sys.path]
    command = [sys.executable, "-c", _PROBE, json.dumps(paths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return {"error": "Legate did not start within 120 s, in a child process."}
    # Realm writes there too what it misses, such as /sys in a bare container.
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and objects:
        found = json.loads(objects[-1])
        assert isinstance(found, dict)
        return found
    status = f"status {done.returncode}" if done.returncode >= 0 else signal.Signals(-done.returncode).name
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    config = os.environ.get("LEGATE_CONFIG")
    hint = f" LEGATE_CONFIG is {config!r}; unset it to let lazyshards choose." if config else ""
    return {"error": f"Legate ended the child process that started it ({status}): {' '.join(said)[:300]}{hint}"}
