"""The build hook: compile the stand-in for the NVIDIA driver library into the wheel.

With a C compiler on Linux the wheel carries `lazyshards/_native/libcuda_stub.so` and is tagged for the
platform; anywhere else the build says so and makes a pure wheel, which serves the NumPy engine, and Legate
too where a real driver is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("lazyshards/_native/cudastub.c")
STUB = Path("lazyshards/_native/libcuda_stub.so")

# -nostdlib and -fno-builtin: no C library, so no symbol version that an older one lacks. -fno-stack-protector:
# some compilers add calls into the C library otherwise.
FLAGS = ["-O1", "-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-fno-stack-protector", "-Wall", "-Wextra"]
FLAGS += ["-Wl,-soname,libcuda.so.1", "-Wl,--build-id=none"]


class StubHook(BuildHookInterface[Any]):
    """Compile the stub, add it to the wheel, and tag the wheel for the platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed; an editable install has the stub in the source tree."""
        self._scratch = Path(tempfile.mkdtemp(prefix="lazyshards-build-"))
        built = self._compile(self._scratch / STUB.name)
        if built is None:
            return
        if version == "editable":
            # Moved into place by one rename: a process that has the old one mapped keeps it whole.
            target = Path(self.root) / STUB
            fresh = target.with_suffix(f".{os.getpid()}.so")
            shutil.copyfile(built, fresh)
            fresh.replace(target)
        else:
            build_data["force_include"][str(built)] = str(STUB)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 (fixed by hatchling)
        """Remove the scratch folder, after the wheel is packed."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _compile(self, target: Path) -> Path | None:
        """Return the compiled library, or None after a notice that says why there is none."""
        if not sys.platform.startswith("linux"):
            self._notice(f"no stand-in driver library on {sys.platform}: lazyshards starts Legate on Linux only")
            return None
        command = [*compiler(), *FLAGS, "-o", str(target), str(Path(self.root) / SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            detail = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()
            self._notice(
                f"no stand-in driver library: `{shlex.join(command[:1])}` failed ({detail[-1] if detail else exc}). "
                "Without an NVIDIA driver Legate will not start and the NumPy engine serves; "
                "install a C compiler (apt-get install gcc libc6-dev) and install again to change that"
            )
            return None
        return target

    def _notice(self, text: str) -> None:
        self.app.display_warning(f"lazyshards: {text}.")


def compiler() -> list[str]:
    """Return the C compiler's command: $CC when set, else the first of cc, gcc and clang on the PATH."""
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    return [next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc")]


def platform_tag() -> str:
    """Return the wheel's platform: manylinux where its rules hold, else plain linux."""
    plain = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    # The stub needs no C library at all, so the oldest manylinux that pip knows for the architecture is true.
    # A musl system does not install manylinux wheels, and gets the plain tag, good for itself.
    if platform.libc_ver()[0] == "glibc" and plain in {"linux_x86_64", "linux_aarch64"}:
        machine = plain.removeprefix("linux_")
        return f"manylinux2014_{machine}.manylinux_2_17_{machine}"
    return plain
