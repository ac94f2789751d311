import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lazyshards.engines import bringup
from lazyshards.errors import EngineUnavailableError

ROOT = Path(bringup.__file__).resolve().parents[2]
SMALL = "--cpus 1 --gpus 0 --utility 1 --sysmem 256 --logging gpu=none,threads=none"
NAMES = ("LEGATE_CONFIG", "LEGION_DEFAULT_ARGS", "REALM_BACKTRACE", "LD_LIBRARY_PATH")
REQUIRED = "legate" in os.environ.get("LAZYSHARDS_REQUIRE_ENGINES", "")

reason = bringup.why_unavailable()
needs_legate = pytest.mark.skipif(reason is not None and not REQUIRED, reason=str(reason))
needs_no_driver = pytest.mark.skipif(bringup.find_driver() is not None, reason="this machine has an NVIDIA driver")


def environment(**extra):
    """Return this process' environment without what would configure Legate, and with what is given."""
    bare = {name: value for name, value in os.environ.items() if name not in NAMES}
    return {**bare, "PYTHONPATH": str(ROOT), **extra}


def child(code, *, python_options=(), **extra):
    """Run code in a fresh Python and return what its last line says, as JSON."""
    done = subprocess.run(
        [sys.executable, *python_options, "-c", textwrap.dedent(code)],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def test_import_starts_nothing():
    """Importing the module imports neither Legate nor cuPyNumeric nor h5py."""
    found = child("""
        import json, sys
        import lazyshards.engines.bringup
        print(json.dumps([name for name in ("legate", "cupynumeric", "h5py") if name in sys.modules]))
    """)
    assert found == []


def test_asking_starts_nothing():
    """why_unavailable and default_config import neither Legate nor cuPyNumeric."""
    found = child("""
        import json, sys
        from lazyshards.engines import bringup
        bringup.why_unavailable(), bringup.default_config(), bringup.find_driver(), bringup.stub_path()
        print(json.dumps([name for name in ("legate", "cupynumeric", "h5py") if name in sys.modules]))
    """)
    assert found == []


@needs_legate
@needs_no_driver
def test_stub_serves_where_there_is_no_driver():
    """Without a driver and in a bare environment, start() loads the stub and cuPyNumeric computes."""
    found = child("""
        import json
        from lazyshards.engines import bringup
        now = bringup.start()
        import cupynumeric
        total = float(cupynumeric.arange(1000).sum())
        print(json.dumps([total, str(now.stub), now.driver, dict(now.processors), now.sysmem_nbytes, now.adopted,
                          now.node_count, now.node_id]))
    """)
    total, stub, driver, processors, sysmem, adopted, count, node = found
    assert (total, stub, driver, adopted) == (499_500.0, str(bringup.stub_path()), None, False)
    assert processors == {"cpu": len(os.sched_getaffinity(0)), "omp": 0, "gpu": 0}
    assert (count, node) == (1, 0)
    assert sysmem >= 64 << 20


@needs_legate
def test_config_of_the_user_is_respected():
    """With LEGATE_CONFIG set, exactly that configuration runs, and the variable stays as it was."""
    found = child(
        """
        import json, os
        from lazyshards.engines import bringup
        now = bringup.start()
        print(json.dumps([now.config, os.environ["LEGATE_CONFIG"], now.processors["cpu"], now.sysmem_nbytes]))
        """,
        LEGATE_CONFIG=SMALL,
    )
    assert found == [SMALL, SMALL, 1, 256 << 20]


@needs_legate
def test_environment_is_put_back():
    """After start() the environment is what it was, so that a child process chooses for itself."""
    found = child("""
        import json, os
        from lazyshards.engines import bringup
        before = dict(os.environ)
        bringup.start()
        print(json.dumps(before == dict(os.environ)))
    """)
    assert found is True


@needs_legate
def test_window_of_the_user_is_respected():
    """A -lg:window of the user's stays; without one the wide window goes beside the user's other arguments."""
    code = """
        import json, os
        from lazyshards.engines import bringup
        seen = []
        inspect = bringup._inspect
        bringup._inspect = lambda **known: (seen.append(os.environ["LEGION_DEFAULT_ARGS"]), inspect(**known))[1]
        bringup.start()
        print(json.dumps(seen))
    """
    assert child(code, LEGION_DEFAULT_ARGS="-lg:window 2048") == ["-lg:window 2048"]
    assert child(code, LEGION_DEFAULT_ARGS="-level gpu=6") == ["-level gpu=6 -lg:window 16384"]


@needs_legate
@needs_no_driver
def test_refused_config_is_an_error_with_the_reason():
    """A configuration that Legate refuses is an EngineUnavailableError that shows it, and is remembered."""
    found = child(
        """
        import json
        from lazyshards.engines import bringup
        from lazyshards.errors import EngineUnavailableError
        try:
            bringup.start()
        except EngineUnavailableError as exc:
            print(json.dumps([str(exc), bringup.why_unavailable()]))
        """,
        LEGATE_CONFIG="--cpus 1",
    )
    assert found[0] == found[1]
    assert "LEGATE_CONFIG='--cpus 1'" in found[0]
    assert "could not determine the number of GPUs" in found[0]
    assert "Stack trace" not in found[0]


@needs_legate
def test_h5py_comes_first(tmp_path):
    """h5py works after start(), whichever version: it is imported before Legate."""
    pytest.importorskip("h5py")
    found = child(f"""
        import json, sys
        from lazyshards.engines import bringup
        bringup.start()
        names = list(sys.modules)
        import h5py
        with h5py.File({str(tmp_path / "a.h5")!r}, "w") as file:
            file["x"] = [1, 2, 3]
            total = int(file["x"][...].sum())
        print(json.dumps([names.index("h5py") < names.index("legate"), total]))
    """)
    assert found == [True, 6]


@needs_legate
def test_start_is_idempotent_from_any_thread():
    """After the first call, start() returns the same object, also on another thread, with the main one as owner."""
    found = child("""
        import json, threading
        from lazyshards.engines import bringup
        assert bringup.started() is None
        first, seen = bringup.start(), []
        thread = threading.Thread(target=lambda: seen.append(bringup.start() is first))
        thread.start()
        thread.join()
        print(json.dumps([seen, bringup.start() is first, bringup.started() is first,
                          first.owner == threading.main_thread().ident]))
    """)
    assert found == [[True], True, True, True]


@needs_legate
def test_start_off_the_main_thread_is_refused():
    """The first start() on another thread raises, says so, imports nothing, and harms no later start()."""
    found = child("""
        import json, sys, threading
        from lazyshards.engines import bringup
        from lazyshards.errors import EngineUnavailableError
        said = []
        def attempt():
            try:
                bringup.start()
            except EngineUnavailableError as exc:
                said.append(str(exc))
        thread = threading.Thread(target=attempt, name="reader-7")
        thread.start()
        thread.join()
        imported = "legate" in sys.modules
        print(json.dumps([said, imported, bringup.start().node_count]))
    """)
    [said], imported, count = found
    assert "main thread" in said
    assert "reader-7" in said
    assert (imported, count) == (False, 1)


@needs_legate
@needs_no_driver
def test_legate_that_the_program_imported_is_adopted():
    """Legate imported by the program itself is used as it is: nothing is set, nothing is loaded."""
    found = child(
        f"""
        import ctypes, json, os
        for library in {list(map(str, filter(None, [bringup.stub_path(), bringup.cuda_runtime()])))}:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        import legate.core
        before = dict(os.environ)
        from lazyshards.engines import bringup
        now = bringup.start()
        print(json.dumps([now.adopted, now.stub, now.driver, now.processors["cpu"], before == dict(os.environ)]))
        """,
        LEGATE_CONFIG=SMALL,
    )
    assert found == [True, None, None, 1, True]


@needs_legate
def test_forked_child_is_told():
    """A forked child of a process that runs Legate gets an error that says so, in place of a hang."""
    found = child(
        """
        import json, os, sys, warnings
        warnings.simplefilter("ignore")  # Python 3.12 warns of forking beside threads, which is the point here
        from lazyshards.engines import bringup
        bringup.start()
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, json.dumps([bringup.why_unavailable(), bringup.started()]).encode())
            os._exit(0)
        os.wait()
        print(os.read(read, 65536).decode())
        """,
        LEGATE_CONFIG=SMALL,
    )
    assert "forked" in found[0]
    assert "spawn" in found[0]
    assert found[1] is None


@needs_legate
def test_child_process_starts_for_itself():
    """A Python that was started by a process that runs Legate starts Legate too."""
    found = child("""
        import json, subprocess, sys
        from lazyshards.engines import bringup
        bringup.start()
        code = "from lazyshards.engines import bringup; print(bringup.start().processors['cpu'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        print(json.dumps([int(done.stdout), bringup.start().processors["cpu"]]))
    """)
    assert found[0] == found[1] > 0


@needs_legate
def test_interrupt_is_a_keyboard_interrupt():
    """SIGINT after start() raises KeyboardInterrupt in Python, and the process and Legate go on."""
    code = """
        import sys, time
        from lazyshards.engines import bringup
        bringup.start()
        import cupynumeric
        try:
            print("waiting", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", float(cupynumeric.ones(10).sum()))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted 10.0\n"
    assert process.returncode == 0


@needs_legate
@needs_no_driver
def test_a_driver_without_devices_is_given_a_config(tmp_path):
    """A driver that finds no GPU counts as a driver, needs no stub, and still gets a configuration for the CPUs."""
    source = (ROOT / "lazyshards/_native/cudastub.c").read_text().replace("lazyshards_cuda_stub", "another")
    (tmp_path / "driver.c").write_text(source)
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(tmp_path / "driver.c")]
    subprocess.run(command, check=True)
    found = child(
        """
        import json
        from lazyshards.engines import bringup
        now = bringup.start()
        print(json.dumps([now.driver, now.stub, now.config]))
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert found[:2] == [str(library), None]
    assert "--gpus 0" in found[2]


@pytest.mark.parametrize("hidden", ["legate", "cupynumeric"])
def test_missing_package_is_named_with_the_command(hidden):
    """Where Legate or cuPyNumeric is not installed, the reason names it and the pip command."""
    found = child(f"""
        import importlib.util, json
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == {hidden!r} else find(name, package)
        from lazyshards.engines import bringup
        from lazyshards.errors import EngineUnavailableError
        try:
            bringup.start()
        except EngineUnavailableError as exc:
            print(json.dumps([bringup.why_unavailable(), str(exc)]))
    """)
    assert found[0] == found[1]
    assert hidden in found[0]
    assert 'pip install "lazyshards[legate]"' in found[0]


def test_missing_stub_is_named_with_the_command(monkeypatch):
    """With neither driver nor stub, the reason says why and how to get a compiler."""
    monkeypatch.setattr(bringup, "_started", None)
    monkeypatch.setattr(bringup, "_failure", None)
    monkeypatch.setattr(bringup, "_is_imported", lambda: False)
    monkeypatch.setattr(bringup, "_is_installed", lambda name: True)
    monkeypatch.setattr(bringup, "find_driver", lambda: None)
    monkeypatch.setattr(bringup, "stub_path", lambda: None)
    monkeypatch.setattr(bringup.shutil, "which", lambda name: None)
    command = bringup.why_unavailable().split(": ")[-1]
    assert command == f"apt-get install gcc libc6-dev, then pip install -e {ROOT}"
    monkeypatch.setattr(bringup.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert bringup.why_unavailable().endswith(f": pip install -e {ROOT}")
    monkeypatch.setattr(bringup, "__file__", "/somewhere/site-packages/lazyshards/engines/bringup.py")
    assert bringup.why_unavailable().endswith("pip install --force-reinstall --no-deps --no-cache-dir lazyshards")


def test_other_systems_are_told(monkeypatch):
    """Elsewhere than on Linux the reason is the system, and start() raises it."""
    monkeypatch.setattr(bringup, "_started", None)
    monkeypatch.setattr(bringup, "_failure", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert bringup.find_driver() is None
    with pytest.raises(EngineUnavailableError, match="Linux only, and this is darwin"):
        bringup.start()


def test_default_config_fits_the_machine():
    """The configuration has a processor a core, no GPU, and less memory than the machine has."""
    words = bringup.default_config().split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--gpus"] == "0"
    assert 1 <= int(options["--cpus"]) <= len(os.sched_getaffinity(0))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 64 <= int(options["--sysmem"]) <= physical * 0.6 / (1 << 20)


GIB = 1 << 30


def machine(root, *, groups, files):
    """Write the part of /proc and /sys that the module reads."""
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n", "proc/self/cgroup": groups, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("", {}, 8 * GIB, id="no control groups: what the machine has available"),
        pytest.param(
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
            id="version 2: the limit of a parent, less what is used, more what can be reclaimed",
        ),
        pytest.param(
            "4:memory:/a\n0::/\n",
            {
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            2 * GIB,
            id="version 1: the inner limit; the outer one is unlimited",
        ),
        pytest.param(
            "0::/gone\n",
            {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"},
            0,
            id="over its limit, and the inner folder not visible from a container",
        ),
    ],
)
def test_free_memory_minds_control_groups(tmp_path, monkeypatch, groups, files, expected):
    """Free memory is the least of the machine's and of what each control group leaves."""
    monkeypatch.setattr(bringup.resource, "getrlimit", lambda which: (bringup.resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(bringup.os, "sysconf", lambda name: 1 << 20)
    assert bringup.free_nbytes(machine(tmp_path, groups=groups, files=files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 16),
        ({"sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 3),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_mind_control_groups(tmp_path, monkeypatch, files, expected):
    """Cores are those of the affinity, or the quota of a control group, rounded up, if that is less."""
    monkeypatch.setattr(bringup.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert bringup.usable_cores(machine(tmp_path, groups="1:cpu,cpuacct:/\n0::/a\n", files=files)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        ("--cpus 2", None),
        ("--cpus 2 --sysmem 300 --gpus 0", 300 << 20),
        ("--sysmem=300", 300 << 20),
        ("--sysmem auto", None),
    ],
)
def test_pool_is_read_from_the_config(config, expected):
    """For Legate before 26.6, the size of a pool is what the configuration says, in MiB, or unknown."""
    assert bringup._pool(config, "--sysmem") == expected
