"""Make Legate importable on this machine, and import it: the one module that starts it.

Legate starts when it is imported, once a process, from what it finds in the environment at that moment. On a
machine without an NVIDIA driver it does not even load, and without a configuration it does not start. `start`
arranges what is missing, imports it, and puts the environment back. Importing this module starts nothing.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lazyshards.errors import EngineUnavailableError

__all__ = [
    "WINDOW",
    "Started",
    "cuda_runtime",
    "default_config",
    "find_driver",
    "free_nbytes",
    "gpu_count",
    "has_networks",
    "is_child_of_rank",
    "start",
    "started",
    "stub_path",
    "usable_cores",
    "why_unavailable",
]

_DRIVER = "libcuda.so.1"
_STUB_MARK = "lazyshards_cuda_stub"  # the symbol that tells the stub from a driver
_INSTALL = 'pip install "lazyshards[legate]"'
_REINSTALL = "pip install --force-reinstall --no-deps --no-cache-dir lazyshards"
_MIB = 1 << 20

# Legion lets 1,024 operations be in flight; a chain of that many on an unfinished Python task waits for itself
# for ever. Sixteen times as many have not been seen to.
WINDOW = 16_384


@dataclass(frozen=True, slots=True)
class Started:
    """What is running, as found when Legate was started."""

    legate: str
    """Version of Legate."""
    cupynumeric: str
    """Version of cuPyNumeric."""
    adopted: bool
    """Whether the program had imported Legate before us; then nothing of its set-up is ours."""
    owner: int
    """Identifier (`threading.get_ident`) of the one thread that may use Legate."""
    pid: int
    """The process that started it; a forked child has the memory but not the running Legate."""
    driver: str | None
    """Path of the NVIDIA driver library, or None where there is none."""
    stub: Path | None
    """The stand-in that was loaded in its place, or None."""
    config: str | None
    """LEGATE_CONFIG at the start: the user's or ours; None where Legate configured itself."""
    sysmem_nbytes: int | None
    """Bytes of the pool that CPU arrays live in, on this rank; None where it cannot be told."""
    fbmem_nbytes: int | None
    """Bytes of the pool of each GPU; 0 without one, None where it cannot be told."""
    node_count: int
    """Processes (ranks) that make up the machine."""
    node_id: int
    """Which of them this is, from 0."""
    processors: Mapping[str, int]
    """Processors of all ranks by kind: "cpu", "omp", "gpu"."""


_RANK_PROCESS = "LAZYSHARDS_RANK_PROCESS"
"""Holds, in a process that Legate's launcher started and in its children, which process that was."""

_started: Started | None = None
_failure: str | None = None  # why the one attempt of this process failed


def start() -> Started:
    """Import Legate and cuPyNumeric in a way that works here, once a process, and say what is running.

    Legate belongs to the thread that imports it, so the first call must come from the main thread. Later calls
    return the same object from any thread.

    Returns
    -------
    Started

    Raises
    ------
    EngineUnavailableError
        Legate is not installed, cannot be loaded, was given a configuration that it refuses, or this is the
        first call and not on the main thread, or a forked child of the process that started it.
    """
    global _started, _failure
    if reason := why_unavailable():
        raise EngineUnavailableError(reason)
    if _started is None:
        try:
            _started = _adopt() if _is_imported() else _bring_up()
        except Exception as exc:
            _failure = f"Legate was found but did not start: {_gist(exc)}."
            raise EngineUnavailableError(_failure) from exc
    return _started


def started() -> Started | None:
    """Return what `start` returned in this process, or None if it has not been called; starts nothing."""
    return _started if _started is not None and _started.pid == os.getpid() else None


def why_unavailable() -> str | None:
    """Say what keeps Legate from being started here and now, or return None; cheap, and imports nothing.

    Returns
    -------
    str or None
        A sentence that names what is missing and the command or change that helps.
    """
    if _started is not None:
        if _started.pid == os.getpid():
            return None
        return (
            "this process was forked from one that runs Legate, which does not survive a fork: "
            'start children with multiprocessing.get_context("spawn").'
        )
    if _failure is not None:
        return _failure
    if not sys.platform.startswith("linux"):
        return f"lazyshards starts Legate on Linux only, and this is {sys.platform}: the NumPy engine serves here."
    if missing := [name for name in ("legate", "cupynumeric") if not _is_installed(name)]:
        return f"{' and '.join(missing)} not installed for {sys.executable}: {_INSTALL}"
    if is_child_of_rank():
        return (
            "this process is a child of a rank of a Legate run, and would wait for the other ranks for ever if it "
            f"started Legate: the NumPy engine serves here; to start a run of its own, unset {_RANK_PROCESS}."
        )
    if threading.current_thread() is not threading.main_thread():
        return (
            f"Legate must be started on the main thread, and this is {threading.current_thread().name!r}: "
            'compute once, or call lazyshards.set_engine("legate"), on the main thread first.'
        )
    if not _is_imported() and find_driver() is None and stub_path() is None:
        return (
            "no NVIDIA driver (libcuda.so.1) on this machine, and no stand-in for one in lazyshards, which is built by "
            f"a C compiler when lazyshards is installed: {_build_command()}"
        )
    return None


def _build_command() -> str:
    """Return what builds the stand-in: for a checkout, such as one that was never installed, where it lies."""
    root = Path(__file__).resolve().parents[2]
    is_checkout = (root / "hatch_build.py").is_file()
    command = f"pip install -e {shlex.quote(str(root))}" if is_checkout else _REINSTALL
    has_compiler = shutil.which("cc") or shutil.which("gcc")
    return command if has_compiler else f"apt-get install gcc libc6-dev, then {command}"


# ------------------------------------------------------------------------------------------ what is there


def find_driver() -> str | None:
    """Return the path of the NVIDIA driver library that the dynamic loader finds, or None.

    The library is loaded, as Legate will, but not initialised. The stand-in does not count.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return None if hasattr(library, _STUB_MARK) else _mapped_path("libcuda.so")


def stub_path() -> Path | None:
    """Return the stand-in for the driver that came with the wheel, or None if it was built without one."""
    path = Path(__file__).resolve().parents[1] / "_native" / "libcuda_stub.so"
    return path if path.is_file() else None


def gpu_count() -> int:
    """Return how many GPUs the NVIDIA driver has; 0 without a driver, or if it does not say."""
    driver = find_driver()
    return (_device_count(driver) or 0) if driver is not None else 0


def is_child_of_rank() -> bool:
    """Return whether this process was started by one that is a rank of a Legate run, whose environment it inherited."""
    return os.environ.get(_RANK_PROCESS, str(os.getpid())) != str(os.getpid())


def has_networks() -> bool:
    """Return whether the Legate that is installed can be several processes; imports nothing."""
    spec = importlib.util.find_spec("legate")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or []:
        # Written when Legate is built; the same for wheels and conda packages.
        for line in _lines(Path(folder) / "install_info.py"):
            if line.startswith("networks"):
                return any(quoted.strip() for quoted in line.split('"')[1::2])
    return False


def default_config() -> str:
    """Return a LEGATE_CONFIG for the CPUs and the memory that this process may use.

    One processor for each core: the utility processor is idle while tasks run, and since there are more threads
    than cores, Realm pins none of them, so that threads which a task starts may run anywhere. The pool is 0.6 of
    the memory that is free now; its pages are taken when first written, so an empty pool costs nothing.
    """
    sysmem = max(free_nbytes() * 6 // 10 // _MIB, 64)
    return f"--cpus {usable_cores()} --gpus 0 --utility 1 --sysmem {sysmem} --logging gpu=none,threads=none"


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent that fails to import; a module without a spec
        return False


def _is_imported() -> bool:
    # Importing it is what starts it. A failed import takes the name out of sys.modules again.
    return "legate.core" in sys.modules


def _device_count(driver: str) -> int | None:
    """Return how many GPUs the driver has, or None if it does not say."""
    library = ctypes.CDLL(driver)
    count = ctypes.c_int(0)
    no_device = 100  # CUDA_ERROR_NO_DEVICE
    if (status := library.cuInit(0)) == 0:
        status = library.cuDeviceGetCount(ctypes.byref(count))
    return count.value if status == 0 else 0 if status == no_device else None


def _mapped_path(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[2]
            if path.rpartition("/")[2].startswith(name):
                return f"/{path}"
    return _DRIVER


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: its affinity, and its control group's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu", root):
        version_1 = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        match _words(folder / "cpu.max") or version_1:
            case [quota, period] if quota not in {"max", "-1"}:
                cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def free_nbytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may still take: the machine's, its limits', the least."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _lines(root / "proc/meminfo"):
        match line.split():
            case ["MemAvailable:", kib, "kB"]:
                free.append(int(kib) * 1024)
    for folder in _cgroups("memory", root):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if not limit or not used or limit[0] == "max":
            continue
        # Cached file pages count as used, but are given up when memory is asked for.
        stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
        reclaimable = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
        free.append(int(limit[0]) - int(used[0]) + reclaimable)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        free.append(soft // 2)  # libraries and thread stacks live in the same address space
    return max(min(free), 0)


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups, version 2 and 1, that limit this process, inner ones first."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the innermost folders may not be visible; reading them gives nothing.
        folder = mount / path.lstrip("/")
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


# ------------------------------------------------------------------------------------------ starting


def _adopt() -> Started:
    """Take Legate as the program started it, and change nothing."""
    driver = find_driver()
    return _inspect(adopted=True, driver=driver, stub=None, config=os.environ.get("LEGATE_CONFIG"))


def _bring_up() -> Started:
    """Import Legate with what this machine lacks put in its place."""
    # With h5py 3.16 (HDF5 2.0) the other order breaks h5py, and Legate's own HDF5 module with it.
    with contextlib.suppress(ImportError):
        importlib.import_module("h5py")
    driver, stub = find_driver(), None
    if driver is None:
        stub = stub_path()
        assert stub is not None, "why_unavailable has seen to this"
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    if runtime := cuda_runtime():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    changes = {}
    if not os.environ.get("LEGATE_CONFIG") and (driver is None or _device_count(driver) == 0):
        # Left to itself Legate asks the driver for GPUs, and gives up where there are none to count.
        changes["LEGATE_CONFIG"] = default_config()
    legion = os.environ.get("LEGION_DEFAULT_ARGS", "")
    if "-lg:window" not in legion.split():
        changes["LEGION_DEFAULT_ARGS"] = f"{legion} -lg:window {WINDOW}".strip()
    if "REALM_BACKTRACE" not in os.environ:
        # Else Realm answers Ctrl-C itself: it prints a backtrace and ends the process.
        changes["REALM_BACKTRACE"] = "0"
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  # the user's own
    # Only for the start, when they are read: a child process must find its own configuration.
    with _environment(changes):
        running = _inspect(adopted=False, driver=driver, stub=stub, config=os.environ.get("LEGATE_CONFIG"))
    if running.node_count == 1:
        # Legate seeds the global generators when it is imported, so that all ranks draw the same; one rank need not.
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    if (handler := signal.getsignal(signal.SIGINT)) is not None:
        signal.signal(signal.SIGINT, handler)  # again, in case Realm took it in spite of REALM_BACKTRACE
    return running


def _inspect(*, adopted: bool, driver: str | None, stub: Path | None, config: str | None) -> Started:
    """Import Legate and cuPyNumeric, which starts them if they are not running, and ask what there is."""
    core = importlib.import_module("legate.core")
    cupynumeric = importlib.import_module("cupynumeric")
    runtime, kinds = core.get_legate_runtime(), core.TaskTarget
    if runtime.node_count > 1:
        os.environ[_RANK_PROCESS] = str(os.getpid())
    machine = runtime.get_machine()
    if hasattr(runtime, "realm_config"):
        pools = runtime.realm_config()
        sysmem, fbmem = pools.sysmem, pools.fbmem
    else:  # Legate before 26.6
        sysmem, fbmem = _pool(config, "--sysmem"), _pool(config, "--fbmem")
    return Started(
        legate=_version("legate") or importlib.import_module("legate").__version__,
        cupynumeric=_version("nvidia-cupynumeric") or cupynumeric.__version__,
        adopted=adopted,
        owner=threading.get_ident(),
        pid=os.getpid(),
        driver=driver,
        stub=stub,
        config=config,
        sysmem_nbytes=sysmem,
        fbmem_nbytes=fbmem,
        node_count=runtime.node_count,
        node_id=runtime.node_id,
        processors={kind: machine.count(getattr(kinds, kind.upper())) for kind in ("cpu", "omp", "gpu")},
    )


def _version(distribution: str) -> str | None:
    """Return the version that pip knows, or None: other installers may use another name, or none."""
    metadata = importlib.import_module("importlib.metadata")  # here, because it is slow to import
    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def _pool(config: str | None, option: str) -> int | None:
    """Return the bytes that a configuration gives a pool (its options count MiB), or None if it does not say."""
    words = [part for word in shlex.split(config or "") for part in word.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name == option and value.isdigit():
            return int(value) * _MIB
    return None


def cuda_runtime() -> Path | None:
    """Return the CUDA runtime among the installed packages: Legate needs one, brings none, and does not look there.

    None if there is none, or Legate finds the system's.
    """
    folder, name = "cu13", "libcudart.so.13"
    if (_version("legate") or "").startswith("26.1."):
        folder, name = "cuda_runtime", "libcudart.so.12"
    else:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return None
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = (Path(place) / folder / "lib" / name for place in folders or [])
    return next((path for path in paths if path.is_file()), None)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _gist(exc: Exception) -> str:
    """Return what an exception says, without the stack traces that Legate writes into its messages."""
    lines = [line.removeprefix("LEGATE ERROR:").strip() for line in str(exc).splitlines()]
    said = next((line.partition(" ")[2] for line in lines if line.startswith("#0 ")), " ".join(lines[:3]))
    config = os.environ.get("LEGATE_CONFIG")
    hint = f" (with LEGATE_CONFIG={config!r}; unset it to let lazyshards choose)" if config else ""
    return f"{said[:600] or type(exc).__name__}{hint}"
