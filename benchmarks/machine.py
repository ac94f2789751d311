"""Say on which machine a figure was taken, and how much else ran on it meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["CoreUse", "describe", "workers"]

_PACKAGES = ("lazyshards", "numpy", "nvidia-cupynumeric", "h5py", "dask")


def workers() -> int:
    """Return the cores that this process may use: how many threads the limits read with."""
    return len(os.sched_getaffinity(0))


def describe() -> str:
    """Return cores, memory, kernel, versions and date in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return (
        f"{_processor()}, {workers()} cores, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {packages}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    )


class CoreUse:
    """How many cores were busy with other things than the benchmark since this was made.

    Processes started by the benchmark count as its own once they have ended.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._busy = _busy_seconds()
        self._own = _own_seconds()

    def note(self) -> str:
        """Return how many cores others kept busy since, on average, in words."""
        busy = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        others = max(0.0, busy / (time.monotonic() - self._since))
        return f"Meanwhile other work kept {others:.2f} of {workers()} cores busy."


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _processor() -> str:
    with Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _busy_seconds() -> float:
    """Return the seconds that all cores were not idle since boot (user, nice, system, irq, softirq, steal)."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
