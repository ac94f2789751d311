import os
import shlex
import subprocess
import sys

import pytest

from lazyshards import launch
from lazyshards.cli import main
from lazyshards.engines import bringup
from lazyshards.errors import EngineUnavailableError


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Give a machine of eight cores and 10 GiB, with a networked Legate, mpirun and srun on the PATH."""
    for name in ("legate", "mpirun", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(bringup, "usable_cores", lambda: 8)
    monkeypatch.setattr(bringup, "free_nbytes", lambda: 10 << 30)
    monkeypatch.setattr(bringup, "gpu_count", lambda: 0)
    monkeypatch.setattr(bringup, "has_networks", lambda: True)
    (tmp_path / "script.py").write_text("print()\n")
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}


def prepared(machine, *, more=None, **options):
    """Return the launch of the script, and its options by name."""
    environ = {**machine, **(more or {})}
    script = machine["PATH"].partition(":")[0] + "/script.py"
    found = launch.prepare(script, ["-x", "1"], environ=environ, **options)
    assert found.command[-3:] == (script, "-x", "1")
    return found, dict(zip(found.command[1:-3:2], found.command[2:-3:2], strict=False))


def test_machine_is_divided(machine):
    """Cores and memory are divided among the ranks of a node, and the rest is for the system."""
    _, options = prepared(machine, ranks=4, nodes=2)
    assert options["--cpus"] == "2"
    assert options["--sysmem"] == str(10 * 1024 * 6 // 10 // 4)
    assert options["--gpus"] == "0"
    assert (options["--nodes"], options["--ranks-per-node"], options["--launcher"]) == ("2", "4", "mpirun")


def test_more_ranks_than_cores(machine):
    """Every rank has a processor at least."""
    _, options = prepared(machine, ranks=16)
    assert options["--cpus"] == "1"


def test_gpus_are_divided(machine, monkeypatch):
    """GPUs are divided, too, and then Legate may speak of them."""
    monkeypatch.setattr(bringup, "gpu_count", lambda: 4)
    found, options = prepared(machine, ranks=2)
    assert options["--gpus"] == "2"
    assert "--logging" not in found.command


def test_what_is_given_wins(machine):
    """Options replace what would be chosen, and more of them reach the launcher before the script."""
    found, options = prepared(machine, ranks=2, cpus=3, gpus=1, sysmem=77, legate="--launcher-extra '--hostfile h'")
    assert (options["--cpus"], options["--gpus"], options["--sysmem"]) == ("3", "1", "77")
    assert "--hostfile h" in found.command


def test_own_configuration_wins(machine):
    """LEGATE_CONFIG replaces the configuration, and every variable that is set is kept."""
    mine = {"LEGATE_CONFIG": "--cpus 1", "UCX_LOG_LEVEL": "info", "LEGATE_MPI_WRAPPER": "mine.so"}
    found, _ = prepared(machine, more=mine, ranks=2)
    assert "--cpus" not in found.command
    assert not set(mine) & set(found.environment)


def test_paths_are_added_to(machine):
    """PATH and LD_LIBRARY_PATH keep what the caller had, and python on the PATH is this interpreter."""
    found, _ = prepared(machine, more={"LD_LIBRARY_PATH": "/mine"}, ranks=2)
    assert found.environment["PATH"].endswith(machine["PATH"])
    if "LD_LIBRARY_PATH" in found.environment:
        assert found.environment["LD_LIBRARY_PATH"].split(":")[0] == "/mine"
    done = subprocess.run(
        ["python", "-c", "import sys; print(sys.prefix)"],
        env={**os.environ, "PATH": found.environment["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == sys.prefix


@pytest.mark.skipif(bringup.find_driver() is not None, reason="this machine has an NVIDIA driver")
def test_stub_has_its_soname(machine):
    """Without a driver its stand-in is found by the loader under the driver's name."""
    found, _ = prepared(machine)
    paths = found.environment["LD_LIBRARY_PATH"].split(":")
    held = [path for path in paths if os.path.exists(os.path.join(path, "libcuda.so.1"))]
    assert [os.path.realpath(os.path.join(path, "libcuda.so.1")) for path in held] == [str(bringup.stub_path())]


def test_launchers(machine):
    """A single process needs none; several take srun within a job, else mpirun."""
    assert prepared(machine)[1]["--launcher"] == "none"
    assert prepared(machine, ranks=2)[1]["--launcher"] == "mpirun"
    assert prepared(machine, ranks=2, more={"SLURM_JOB_ID": "1"})[1]["--launcher"] == "srun"
    assert prepared(machine, ranks=2, launcher="mpirun", more={"SLURM_JOB_ID": "1"})[1]["--launcher"] == "mpirun"


def test_root_is_root_only(machine, monkeypatch):
    """Open MPI is allowed to run as root only where root is who runs it."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "OMPI_ALLOW_RUN_AS_ROOT" in prepared(machine, ranks=2)[0].environment
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in prepared(machine, ranks=2)[0].environment


def test_no_networking(machine, monkeypatch):
    """Several ranks with a Legate that is one process are refused, and the extra that helps is named."""
    monkeypatch.setattr(bringup, "has_networks", lambda: False)
    with pytest.raises(EngineUnavailableError, match=r"lazyshards\[cluster\]"):
        prepared(machine, ranks=2)
    assert prepared(machine, ranks=1)


def test_missing_launcher(machine, monkeypatch):
    """A launcher that is not there is named, with those that may be."""
    os.remove(machine["PATH"].partition(":")[0] + "/srun")
    with pytest.raises(EngineUnavailableError, match="srun is not on the PATH"):
        prepared({**machine, "PATH": machine["PATH"].partition(":")[0]}, ranks=2, launcher="srun")


@pytest.mark.parametrize(
    ("options", "error"), [({"ranks": 0}, ValueError), ({"nodes": -1}, ValueError), ({"launcher": "ssh"}, ValueError)]
)
def test_wrong_options(machine, options, error):
    """Numbers below one and unknown launchers are refused."""
    with pytest.raises(error):
        prepared(machine, **options)


def test_missing_script(machine):
    """A script that is not there is refused before anything is started."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        launch.prepare("nowhere.py", environ=machine)


def test_text_can_be_pasted(machine):
    """What is shown is what a shell would run."""
    found, _ = prepared(machine, ranks=2)
    *settings, command = str(found).splitlines()
    assert tuple(shlex.split(command)) == found.command
    assert dict(shlex.split(line)[0].split("=", 1) for line in settings) == found.environment


def test_dry_run(machine, monkeypatch, capsys):
    """On the command line --dry-run says what would be started, and starts nothing."""
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    script = machine["PATH"].partition(":")[0] + "/script.py"
    assert main(["run", "--ranks", "2", "--dry-run", script, "--its", "own"]) == 0
    assert f"{script} --its own" in capsys.readouterr().out


def test_networks_are_told_from_the_file(monkeypatch, tmp_path):
    """Whether Legate has networking is read from what its build left, without importing it."""
    (tmp_path / "legate").mkdir()
    (tmp_path / "legate/__init__.py").write_text("raise ImportError\n")
    info = tmp_path / "legate/install_info.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "legate", raising=False)
    for text, expected in (('"ucx"', True), ('""', False)):
        info.write_text(f"networks: list[str] = str({text}).split()\n")
        assert bringup.has_networks() is expected
