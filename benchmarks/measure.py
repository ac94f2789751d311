"""Run peers turn by turn (A B C, A B C, ...), each in its process, hot or cold, and collect what they took."""

from __future__ import annotations

import multiprocessing
import statistics
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

from benchmarks import page_cache
from benchmarks.worker import Check, Forget, Message, Run, Setup, Timing, serve, status_kib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from benchmarks.datasets import Dataset
    from benchmarks.peers import Peer

__all__ = ["Measured", "Memory", "PeerError", "in_fresh_processes", "in_warm_processes", "memory_of_first_load"]

_PATIENCE_S = 600
"""Seconds after which a worker that does not answer is given up."""

_SAMPLE_S = 0.002
"""Seconds between two looks at a worker's anonymous memory."""

T = TypeVar("T")


class PeerError(Exception):
    """A peer that is absent, fails or is wrong; the message says which."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The timings of all peers that could be measured."""

    timings: dict[str, list[Timing]] = field(default_factory=dict)
    """By peer; the same place in each list is the same turn."""
    absent: dict[str, str] = field(default_factory=dict)
    """By peer that has no timings, why: not installed, failed, or wrong."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to trust the figures."""

    def figures(self, figure: Callable[[Timing], float]) -> dict[str, list[float]]:
        """Return one number of each timing."""
        return {name: [figure(timing) for timing in timings] for name, timings in self.timings.items()}

    def give_up(self, peer: Peer, reason: object) -> None:
        """Count a peer as absent, whatever it did before."""
        self.timings.pop(peer.name, None)
        self.absent[peer.name] = str(reason)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that a load took at its peak, over what the process had before."""

    resident_nbytes: int
    """All resident memory, pages of mapped files included (VmHWM)."""
    anonymous_nbytes: int
    """Without mapped files; sampled, so that a shorter peak may be missed."""


class _Host:
    """One worker process, started fresh."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self._ended = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # it may be gone
            self._connection.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def ask(self, message: Message, expected: type[T]) -> T:
        """Return the worker's answer; a failure is a PeerError."""
        self.tell(message)
        return self.answer(expected, _PATIENCE_S)

    def tell(self, message: Message) -> None:
        """Send a message without waiting for the answer."""
        if self._ended:
            raise PeerError(self._ended)
        self._connection.send(message)

    def answer(self, expected: type[T], patience_s: float) -> T:
        """Wait for the answer to the last message."""
        try:
            if not self._connection.poll(patience_s):
                self._ended = f"no answer in {patience_s} s"
                self._process.kill()
                raise PeerError(self._ended)
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as exc:
            self._process.join(30)
            self._ended = f"its process ended with code {self._process.exitcode}"
            raise PeerError(self._ended) from exc
        if isinstance(answer, RuntimeError):
            raise PeerError(str(answer))
        if not isinstance(answer, expected):
            raise TypeError(f"worker answered {answer!r}, expected {expected}")
        return answer

    def sampled_answer(self, expected: type[T]) -> tuple[T, int]:
        """Wait for the answer; return with it the most anonymous memory seen meanwhile, in bytes."""
        most = 0
        while not self._connection.poll(_SAMPLE_S):
            most = max(most, self.anonymous_nbytes())
        most = max(most, self.anonymous_nbytes())
        return self.answer(expected, _PATIENCE_S), most

    def anonymous_nbytes(self) -> int:
        """Return the worker's resident memory that belongs to no file, in bytes."""
        return status_kib(self._process.pid or 0, "RssAnon", "RssShmem") * 1024

    def check(self, peer: Peer, dataset: Dataset) -> None:
        """Raise PeerError if the peer's last result is wrong."""
        if fault := self.ask(Check(peer, dataset), str):
            raise PeerError(f"WRONG RESULT: {fault}")


def in_fresh_processes(
    peers: Iterable[Peer], dataset: Dataset, rows: range, repeat: int, *, asarray: bool = False
) -> Measured:
    """Time the first call of a process, hot; each result is checked after its timing, as a check before would warm."""
    measured = Measured()
    page_cache.warm(dataset.paths)
    for _ in range(repeat):
        for peer in peers:
            if peer.name in measured.absent:
                continue
            try:
                with _Host() as host:
                    host.ask(Setup(peer, dataset), type(None))
                    timings = host.ask(Run(peer, (rows,), asarray), list)
                    host.check(peer, dataset)
                measured.timings.setdefault(peer.name, []).extend(timings)
            except PeerError as exc:
                measured.give_up(peer, exc)
    _note_residency(measured, dataset)
    return measured


def memory_of_first_load(
    peers: Iterable[Peer], dataset: Dataset, rows: range, small: range
) -> tuple[dict[str, Memory], dict[str, str]]:
    """Return the peak memory of loading ``rows`` in a fresh process, and by peer that has none, why.

    The ``small`` load before it lets an engine take what it takes once for itself, whatever the size of the result.
    """
    memories: dict[str, Memory] = {}
    absent: dict[str, str] = {}
    for peer in peers:
        try:
            with _Host() as host:
                host.ask(Setup(peer, dataset), type(None))
                host.ask(Run(peer, (small,)), list)
                host.ask(Forget(peer), type(None))
                before = host.anonymous_nbytes()
                host.tell(Run(peer, (rows,), memory=True))
                (timing,), most = host.sampled_answer(list)
                host.check(peer, dataset)
            memories[peer.name] = Memory(timing.peak_nbytes, most - before)
        except PeerError as exc:
            absent[peer.name] = str(exc)
    return memories, absent


def in_warm_processes(
    peers: Iterable[Peer],
    dataset: Dataset,
    turns: Sequence[tuple[range, ...]],
    *,
    cold: bool = False,
    asarray: bool = False,
    check_first: bool = True,
) -> Measured:
    """Time calls in processes that have made one call before.

    Parameters
    ----------
    peers : iterable of Peer
        Who takes turns.
    dataset : Dataset
        What they read.
    turns : sequence of tuple of range
        The requests of each turn. A turn's timing is the median of its calls.
    cold : bool
        Take all shards out of the page cache before each turn of each peer; then a turn must have one request.
    asarray : bool
        Time np.asarray of each result as well.
    check_first : bool
        Check the untimed first result before timing, and the last one after it; if False the last one only. A check
        calls np.asarray, which changes where a Legate result lives, and so what later loads cost.
    """
    measured = Measured()
    resident_nbytes = 0
    page_cache.warm(dataset.paths)
    with ExitStack() as stack:
        crew = _Crew(dataset, measured, _set_up(stack, peers, dataset, measured))
        for peer in crew.hosts:
            crew.ask(peer, Run(peer, turns[0][:1], asarray), list)
            if check_first:
                crew.check(peer)
        for requests in turns:
            for peer in crew.hosts:
                if cold:
                    page_cache.drop(dataset.paths)
                    resident_nbytes = max(resident_nbytes, page_cache.resident_nbytes(dataset.paths))
                if timings := crew.ask(peer, Run(peer, requests, asarray), list):
                    measured.timings.setdefault(peer.name, []).append(_median(timings))
        for peer in crew.hosts:
            crew.check(peer)
    if not cold:
        _note_residency(measured, dataset)
    elif resident_nbytes:
        measured.notes.append(f"Not quite cold: up to {resident_nbytes / 2**20:.1f} MiB stayed in the page cache.")
    else:
        measured.notes.append("Cold: before each measurement no page of any shard was in the page cache.")
    return measured


@dataclass(frozen=True, slots=True)
class _Crew:
    """The peers that take turns, each with its process."""

    dataset: Dataset
    measured: Measured
    hosts: dict[Peer, _Host]

    def ask(self, peer: Peer, message: Message, expected: type[T]) -> T | None:
        """Ask the peer's process; from its first failure on the peer counts as absent and is asked no more."""
        if peer.name in self.measured.absent:
            return None
        try:
            return self.hosts[peer].ask(message, expected)
        except PeerError as exc:
            self.measured.give_up(peer, exc)
            return None

    def check(self, peer: Peer) -> None:
        """Give the peer up if its last result is wrong."""
        if fault := self.ask(peer, Check(peer, self.dataset), str):
            self.measured.give_up(peer, f"WRONG RESULT: {fault}")


def _set_up(stack: ExitStack, peers: Iterable[Peer], dataset: Dataset, measured: Measured) -> dict[Peer, _Host]:
    """Start the peers' processes, which end with ``stack``; return the host of each peer that could be set up."""
    homes: dict[str, _Host] = {}
    hosts: dict[Peer, _Host] = {}
    for peer in peers:
        home = peer.home or peer.name
        if home not in homes:
            homes[home] = stack.enter_context(_Host())
        try:
            homes[home].ask(Setup(peer, dataset), type(None))
            hosts[peer] = homes[home]
        except PeerError as exc:
            measured.give_up(peer, exc)
    return hosts


def _median(timings: list[Timing]) -> Timing:
    return Timing(
        statistics.median(timing.call for timing in timings),
        statistics.median(timing.asarray for timing in timings),
        max(timing.peak_nbytes for timing in timings),
    )


def _note_residency(measured: Measured, dataset: Dataset) -> None:
    """Say so if the page cache lost pages during a hot measurement."""
    missing = sum(path.stat().st_size for path in dataset.paths) - page_cache.resident_nbytes(dataset.paths)
    if missing > 0:
        measured.notes.append(f"Not quite hot: {missing / 2**20:.1f} MiB had left the page cache at the end.")
