"""The process that a peer runs in: it sets up, times calls, checks results and tells its memory, when asked."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks.datasets import Dataset
    from benchmarks.peers import Call, Peer

__all__ = ["Check", "Forget", "Message", "Run", "Setup", "Timing", "serve", "status_kib"]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one call took."""

    call: float
    """Seconds of the call itself."""
    asarray: float
    """Seconds of np.asarray of its result; 0 where it was not asked for."""
    peak_nbytes: int
    """Most memory in the process during the call, less what it had before it (VmHWM, mapped files included)."""


class Message(Protocol):
    """A request to a worker."""

    def apply(self, worker: _Worker) -> object:
        """Do it in the worker's process and return the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """Set a peer up."""

    peer: Peer
    dataset: Dataset

    def apply(self, worker: _Worker) -> None:
        """Run the peer's setup."""
        worker.calls[self.peer.name] = self.peer.setup(self.dataset)


@dataclass(frozen=True, slots=True)
class Run:
    """Time a call of the peer for each of some requests; the answer is a Timing each."""

    peer: Peer
    requests: tuple[range, ...]
    asarray: bool = False
    """Whether to time np.asarray of each result as well."""
    memory: bool = False
    """Whether to find the peak memory as well, which costs a little time."""

    def apply(self, worker: _Worker) -> list[Timing]:
        """Drop the result before, untimed, and time each call."""
        call = worker.calls[self.peer.name]
        return [self._time(worker, call, rows) for rows in self.requests]

    def _time(self, worker: _Worker, call: Call, rows: range) -> Timing:
        worker.results.pop(self.peer.name, None)
        before = _reset_peak() if self.memory else 0
        began = time.perf_counter()
        result = call(rows)
        called = time.perf_counter()
        if self.asarray:
            np.asarray(result)
        ended = time.perf_counter()
        peak = status_kib("self", "VmHWM") * 1024 - before if self.memory else 0
        worker.results[self.peer.name] = (result, rows)
        return Timing(called - began, ended - called, peak)


@dataclass(frozen=True, slots=True)
class Check:
    """Check the peer's last result; the answer is what is wrong with it, or an empty string."""

    peer: Peer
    dataset: Dataset

    def apply(self, worker: _Worker) -> str:
        """Run the peer's check."""
        result, rows = worker.results[self.peer.name]
        return self.peer.check(result, self.dataset, rows)


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the peer's last result."""

    peer: Peer

    def apply(self, worker: _Worker) -> None:
        """Drop it."""
        worker.results.pop(self.peer.name, None)


class _Worker:
    """The peers set up in this process, and their last results."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.results: dict[str, tuple[object, range]] = {}


def serve(connection: Connection) -> None:
    """Answer messages until None comes; an exception is answered as its one-line text, in a RuntimeError."""
    worker = _Worker()
    receive: Callable[[], Message | None] = connection.recv
    while (message := receive()) is not None:
        answer: object
        try:
            answer = message.apply(worker)
        except Exception as exc:  # noqa: BLE001  whatever a peer does, the others go on
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            answer = RuntimeError(text[:200])
        connection.send(answer)


def status_kib(pid: int | str, *fields: str) -> int:
    """Return the sum of some fields of ``/proc/PID/status``, in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) for field, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE) if field in fields)


def _reset_peak() -> int:
    """Let VmHWM start again from now; return the bytes in memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("self", "VmRSS") * 1024
