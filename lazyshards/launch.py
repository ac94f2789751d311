"""What `lazyshards run` does: find out what Legate's launcher needs on this machine, show it, and start a script."""

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lazyshards.engines import bringup
from lazyshards.errors import EngineUnavailableError

__all__ = ["LAUNCHERS", "Launch", "prepare"]

LAUNCHERS = ("mpirun", "srun", "none")
_CLUSTER = 'pip install "lazyshards[cluster]", in an environment of its own'
_MPI_WRAPPER = "liblegate_mpi_wrapper_ompi.so"
_FEW_CORES = 4
"""Cores of a rank below which one thread, and not two, serves the network: threads that poll take turns on them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and what is added to the environment for it."""

    command: tuple[str, ...]
    """Program and arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set, by name; what the caller had set is not among them, unless it is added to."""

    def __str__(self) -> str:
        lines = [f"  {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*lines, f"  {shlex.join(self.command)}"])

    def start(self) -> None:
        """Become the command: this process ends here, and its exit status is the command's."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.command[0], self.command, {**os.environ, **self.environment})  # noqa: S606  # our own words


def prepare(
    script: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 1,
    nodes: int = 1,
    launcher: str | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    sysmem: int | None = None,
    legate: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Launch:
    """Return what starts a script under Legate's launcher, with a configuration that fits this machine.

    Parameters
    ----------
    script : str
        Path of a Python script; it runs unchanged, once on every rank.
    arguments : sequence of str
        Its arguments.
    ranks : int
        Processes on each node.
    nodes : int
        Machines, taken to be like this one.
    launcher : {"mpirun", "srun", "none"}, optional
        What starts several ranks. By default srun within a SLURM job, else mpirun; none for a single process.
    cpus, gpus : int, optional
        Of each rank. By default the cores and GPUs of this machine, divided among its ranks.
    sysmem : int, optional
        MiB that arrays may take on each rank. By default 0.6 of the memory that is free, divided among the ranks.
    legate : str
        More options of Legate's launcher, as in a shell; they win over those chosen here.
    environ : mapping
        The environment that the command will find. What is set there is kept; ``LEGATE_CONFIG`` replaces the whole
        configuration chosen here.

    Raises
    ------
    EngineUnavailableError
        If Legate or the launcher is not installed, or Legate has no networking and several ranks are asked for.
    FileNotFoundError
        If there is no such script.
    """
    if ranks < 1 or nodes < 1:
        raise ValueError(f"ranks={ranks} and nodes={nodes} must be 1 or more")
    if launcher is not None and launcher not in LAUNCHERS:
        raise ValueError(f"launcher={launcher!r} is none: use {', '.join(map(repr, LAUNCHERS))}")
    if not os.path.isfile(script):
        raise FileNotFoundError(f"no script at {script!r}")
    path = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])
    program = shutil.which("legate", path=path)
    if program is None:
        raise EngineUnavailableError(f"Legate's launcher, legate, is not installed for {sys.executable}: {_CLUSTER}")
    total = ranks * nodes
    launcher = _launcher(total, launcher, environ, path)
    command = [program, "--nodes", str(nodes), "--ranks-per-node", str(ranks), "--launcher", launcher]
    if not environ.get("LEGATE_CONFIG"):
        command += _configuration(ranks, cpus, gpus, sysmem)
    command += [*shlex.split(legate), script, *arguments]
    wanted = _environment(total, launcher, path, environ)
    if launcher == "mpirun" and nodes == 1:
        # More ranks than cores are meant; the names for Open MPI 5 and 4.
        wanted["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        wanted["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if total > 1 and bringup.usable_cores() // ranks < _FEW_CORES:
        wanted["REALM_DEFAULT_ARGS"] = "-ll:bgwork 1"
    kept = {"PATH", "LD_LIBRARY_PATH"}  # these are added to, and not replaced
    return Launch(
        tuple(command), {name: value for name, value in wanted.items() if name in kept or not environ.get(name)}
    )


def _launcher(total: int, launcher: str | None, environ: Mapping[str, str], path: str) -> str:
    """Return what starts the ranks, if it is there and Legate can be as many."""
    if launcher is None:
        slurm = "SLURM_JOB_ID" in environ and shutil.which("srun", path=path) is not None
        launcher = "none" if total == 1 else "srun" if slurm else "mpirun"
    if total > 1 and not bringup.has_networks():
        raise EngineUnavailableError(
            f"{total} ranks were asked for, but the Legate that is installed for {sys.executable} was built without "
            f"networking and is always one process. One that has it: {_CLUSTER}"
        )
    if launcher != "none" and shutil.which(launcher, path=path) is None:
        raise EngineUnavailableError(
            f"{launcher} is not on the PATH, and starts the ranks: use launcher "
            f"{' or '.join(repr(name) for name in LAUNCHERS if name != launcher)}; Open MPI's mpirun comes with "
            f"{_CLUSTER}"
        )
    return launcher


def _configuration(ranks: int, cpus: int | None, gpus: int | None, sysmem: int | None) -> list[str]:
    """Return the options that divide this machine among its ranks."""
    cores = bringup.usable_cores()
    if cpus is None:
        cpus = max(1, cores // ranks)
    if gpus is None:
        gpus = bringup.gpu_count() // ranks
    if sysmem is None:
        sysmem = max(64, bringup.free_nbytes() * 6 // 10 // ranks >> 20)
    options = ["--cpus", str(cpus), "--gpus", str(gpus), "--utility", "1", "--sysmem", str(sysmem)]
    # Without a driver Legate complains of its absence at every start.
    return options if gpus else [*options, "--logging", "gpu=none,threads=none"]


def _environment(total: int, launcher: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Legate, UCX and MPI need here."""
    prefix = Path(sys.prefix)
    wanted = {"PATH": _with_python(path), "LEGION_DEFAULT_ARGS": f"-lg:window {bringup.WINDOW}"}
    libraries = [text for text in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if text]
    own_mpi = (prefix / "bin/mpirun").is_file()
    if own_mpi:
        libraries.append(str(prefix / "lib"))
    if bringup.find_driver() is None and (stub := bringup.stub_path()) is not None:
        libraries.append(_stub_folder(stub, environ))
    if runtime := bringup.cuda_runtime():
        libraries.append(str(runtime.parent))
    if libraries:
        wanted["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys(libraries))
    if total > 1:
        wanted["UCX_LOG_LEVEL"] = "error"  # UCX warns on every rank of versions that work
        if own_mpi:
            # The wheel's libmpi.so is a linker script, by which Legate cannot tell whose MPI it is.
            wanted["LEGATE_MPI_WRAPPER"] = _MPI_WRAPPER
        if own_mpi and launcher == "srun":
            wanted["PMIX_MCA_psec"] = "native"  # SLURM's PMIx asks for munge first, which the wheel's lacks and says so
    if launcher == "mpirun" and os.geteuid() == 0:
        wanted["OMPI_ALLOW_RUN_AS_ROOT"] = wanted["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return wanted


def _with_python(path: str) -> str:
    """Return a PATH on which ``python``, which Legate's launcher starts, is this interpreter."""
    found = shutil.which("python", path=path)
    if found is not None and os.path.dirname(found) == os.path.dirname(sys.executable):
        return path
    folder = Path(tempfile.mkdtemp(prefix="lazyshards-python-"))
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (folder / "python").chmod(0o755)
    return os.pathsep.join([str(folder), path])


def _stub_folder(stub: Path, environ: Mapping[str, str]) -> str:
    """Return a folder that holds the stand-in for the NVIDIA driver under the name by which the loader asks for it."""
    caches = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(caches) / "lazyshards" / "driver", Path(tempfile.gettempdir()) / f"lazyshards-{os.getuid()}"):
        link = folder / "libcuda.so.1"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if link.is_symlink() and os.readlink(link) == str(stub):
                return str(folder)
            made = folder / f"libcuda.so.1.{os.getpid()}"
            made.symlink_to(stub)
            made.replace(link)
        except OSError:
            continue
        return str(folder)
    raise EngineUnavailableError(
        f"no NVIDIA driver, and its stand-in {str(stub)!r} cannot be put below {caches!r} or {tempfile.gettempdir()!r} "
        "under the name libcuda.so.1: set XDG_CACHE_HOME to a folder that can be written to"
    )
