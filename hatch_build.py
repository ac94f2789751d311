"""The build hook: compile the two C libraries of the package into the wheel.

With a C compiler on Linux the wheel carries `lazyshards/_native/libcuda_stub.so`, a stand-in for the NVIDIA driver
library, and `libgather.so`, which makes shuffled batches quick, and is tagged for the platform; anywhere else the build
says so and makes a pure wheel, which serves the NumPy engine, and Legate too where a real driver is installed.
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

NATIVE = Path("lazyshards/_native")

# -nostdlib and -fno-builtin: no C library, so no symbol version that an older one lacks. -fno-stack-protector:
# some compilers add calls into the C library otherwise.
BARE = ["-O1", "-nostdlib", "-fno-builtin", "-fno-stack-protector", "-Wl,-soname,libcuda.so.1"]

LIBRARIES = {
    "libcuda_stub.so": ("cudastub.c", BARE),
    "libgather.so": ("gather.c", ["-O3"]),
}
"""By name of the library, its source and its own flags."""

FLAGS = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Wl,--build-id=none"]


class NativeHook(BuildHookInterface[Any]):
    """Compile the libraries, add them to the wheel, and tag the wheel for the platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed; an editable install has the libraries in the source tree."""
        self._scratch = Path(tempfile.mkdtemp(prefix="lazyshards-build-"))
        if not sys.platform.startswith("linux"):
            self._notice(f"no C libraries on {sys.platform}: lazyshards starts Legate, and maps files, on Linux only")
            return
        for name, (source, flags) in LIBRARIES.items():
            built = self._compile(NATIVE / source, flags, self._scratch / name)
            if built is None:
                continue
            if version == "editable":
                # Moved into place by one rename: a process that has the old one mapped keeps it whole.
                target = Path(self.root) / NATIVE / name
                fresh = target.with_suffix(f".{os.getpid()}.so")
                shutil.copyfile(built, fresh)
                fresh.replace(target)
            else:
                build_data["force_include"][str(built)] = str(NATIVE / name)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the scratch folder, after the wheel is packed."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _compile(self, source: Path, flags: list[str], target: Path) -> Path | None:
        """Return the compiled library, or None after a notice that says why there is none."""
        command = [*compiler(), *FLAGS, *flags, "-o", str(target), str(Path(self.root) / source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            detail = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()
            self._notice(
                f"no {target.name}: `{shlex.join(command[:1])}` failed ({detail[-1] if detail else exc}). "
                "Without an NVIDIA driver Legate will not start and the NumPy engine serves, shuffled batches slower; "
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
    # The stub needs no C library at all, and gather.c only what glibc 2.17 has: manylinux2014 is true.
    # A musl system does not install manylinux wheels, and gets the plain tag, good for itself.
    if platform.libc_ver()[0] == "glibc" and plain in {"linux_x86_64", "linux_aarch64"}:
        machine = plain.removeprefix("linux_")
        return f"manylinux2014_{machine}.manylinux_2_17_{machine}"
    return plain
