"""What the ranks of a Legate run settle together: that all see the same data, one seed, one error for all.

Legate runs the whole program on every rank, and ranks that ask it for different things hang, abort, or get wrong data
without a word. So they compare, by a collective that Legate carries, before they ask: `together` when a dataset is
opened, `check_same` before it is read. All of them raise, or none. With one process, or an engine that is each
process's own, nothing is compared and nothing is started.
"""

import faulthandler
import functools
import json
import os
import pickle
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from lazyshards.engines import bringup
from lazyshards.errors import EngineError, RankMismatchError
from lazyshards.layout import Layout
from lazyshards.plan import ReadPlan
from lazyshards.storage.changes import warnings_kept

__all__ = [
    "Facts",
    "agree",
    "check_same",
    "describe_differences",
    "end_together",
    "from_first",
    "gather",
    "is_first_rank",
    "is_shared",
    "layout_facts",
    "node_count",
    "node_id",
    "once",
    "plan_facts",
    "rank_note",
    "shared_out",
    "together",
]

T = TypeVar("T")

Ask: TypeAlias = Callable[[object], None]
"""Called by rank 0 with what it is about to do that every rank has to do with it."""
Facts: TypeAlias = Mapping[str, object]
"""What must be the same on every rank, by the words that an error shall use for it."""

_RANK = "LEGATE_GLOBAL_RANK"
"""Set by Legate's launcher in every process that it starts."""
_DIGEST_NBYTES = 16
_DETAIL_NBYTES = 4096
"""Bytes that each rank may say about itself when something differs."""
_PATIENCE_S = 20
"""Seconds that a rank whose program failed waits for the others before it ends the run."""


def node_id() -> int:
    """Return which rank this process is, from 0; 0 where there is only one. Starts nothing."""
    started = bringup.started()
    if started is not None:
        return started.node_id
    text = os.environ.get(_RANK, "")
    return int(text) if text.isdigit() and not bringup.is_child_of_rank() else 0


def node_count() -> int:
    """Return how many ranks there are, as far as Legate was started."""
    started = bringup.started()
    return 1 if started is None else started.node_count


def is_first_rank() -> bool:
    """Return whether this process is the one of all ranks that prints, warns and shows progress."""
    return node_id() == 0


def is_shared(engine: str) -> bool:
    """Return whether what an engine does is done by several ranks together.

    Parameters
    ----------
    engine : str
        ``"legate"``, or the name of an engine that is each process's own. Under Legate's launcher it is started for
        this, as only then it is known how many ranks there are.
    """
    if engine != "legate":
        return False
    started = bringup.started()
    if started is None and _RANK in os.environ and bringup.why_unavailable() is None:
        started = bringup.start()
    return started is not None and started.node_count > 1 and started.owner == threading.get_ident()


# ------------------------------------------------------------------------------------------ settling


def rank_note(engine: str) -> str:
    """Return, for a person, of which rank numbers are that were taken on this one; empty if there is one only.

    Parameters
    ----------
    engine : str
        What it was that took the time.
    """
    started = bringup.started()
    if not is_shared(engine) or started is None:
        return ""
    return f"the stages are those of rank {started.node_id} of {started.node_count}"


def agree(value: int, engine: str) -> int:
    """Return rank 0's value, on every rank.

    Parameters
    ----------
    value : int
        In 64 bits, signed.
    engine : str
        What will use it.
    """
    if not is_shared(engine):
        return value
    return int(from_first(value))


def from_first(value: object) -> Any:
    """Return what rank 0 gives, on every rank, which all must call it where there are several.

    Parameters
    ----------
    value : object
        Can be pickled; that of other ranks is not looked at. No file holds it: it goes from process to process.
    """
    end_together()
    from lazyshards.engines.exchange import broadcast

    message = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if is_first_rank() else b""
    return pickle.loads(broadcast(message))  # noqa: S301  # from rank 0 of this very run


def once(work: Callable[[Ask], T], engine: str, *, what: str, answer: Callable[[Any], object] | None = None) -> T:
    """Return what ``work`` returns on rank 0, on every rank, or raise what it raised there; the others wait for it.

    Parameters
    ----------
    work : callable
        Does what must be done by one rank only, such as writing. It is given a function to be called, with anything
        that can be pickled, before it does what all ranks must do, such as looking at a cuPyNumeric array.
    engine : str
        Where that is each process's own, every process works for itself.
    what : str
        What is done, for errors.
    answer : callable, optional
        Does, on the other ranks, what rank 0 said.

    Raises
    ------
    Exception
        What ``work`` raised.
    RankMismatchError
        If ``answer`` failed on another rank.
    """
    if not is_shared(engine):
        return work(lambda _: None)
    result: Any = None
    error: Exception | None = None
    if is_first_rank():
        try:
            result = work(lambda command: from_first(("ask", command)))
        except Exception as exc:  # noqa: BLE001  # raised below, once the others know
            error = exc
        from_first(("end", result, _portable(error)))
        if error is not None:
            raise error
    else:
        wrong: Exception | None = None
        while (told := from_first(None))[0] == "ask":
            try:
                assert answer is not None, "rank 0 asked, and nobody is there to answer"
                answer(told[1])
            except Exception as exc:  # noqa: BLE001  # rank 0 goes on and must not wait for ever
                wrong = exc
        _, result, error = told
        if error is not None:
            raise error
        error = wrong
    if answer is not None:
        together(lambda: _raise(error), lambda _: {}, engine, what=what)
    return result  # type: ignore[no-any-return]  # rank 0's own


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _portable(error: Exception | None) -> Exception | None:
    """Return an error as other ranks can raise it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # as it comes back
    except Exception:  # noqa: BLE001  # whatever it is that cannot be had back
        return EngineError(f"rank {node_id()} failed with {type(error).__name__}: {error}")
    return error


def check_same(what: str, facts: Facts) -> None:
    """Raise RankMismatchError on every rank if the facts are not the same on all. Every rank must call it.

    Parameters
    ----------
    what : str
        What is about to be done, for the error.
    facts : mapping
    """
    together(lambda: None, lambda _: facts, "legate", what=what)


def together(work: Callable[[], T], facts: Callable[[T], Facts], engine: str, *, what: str) -> T:
    """Return what ``work`` returns if it succeeds on every rank and all find the same; else raise on every rank.

    Parameters
    ----------
    work : callable
        May fail on one rank and not on another. Launches nothing.
    facts : callable
        Returns, of a result, what must be the same.
    engine : str
        What the result is for; where that is each process's own, only ``work`` is called.
    what : str
        What is done, for the error.

    Raises
    ------
    RankMismatchError
        If it failed on some ranks only, or with different errors, or the facts differ.
    Exception
        What ``work`` raised, if it raised the same kind on all ranks.
    """
    if not is_shared(engine):
        return work()
    error: Exception | None = None
    try:
        # What another rank would warn of, rank 0 does; or they differ.
        with nullcontext() if is_first_rank() else warnings_kept():
            result = work()
        found = {name: str(value) for name, value in facts(result).items()}
    except Exception as exc:  # noqa: BLE001  # raised again below, once the others know
        error, found = exc, {}
    said = "" if error is None else type(error).__name__
    digest = blake2b(repr((said, sorted(found.items()))).encode(), digest_size=_DIGEST_NBYTES).digest()
    if len(set(_exchange(digest, _DIGEST_NBYTES))) > 1:
        detail = {"host": platform.node()[:64], **{name: text[:200] for name, text in found.items()}}
        if error is not None:
            detail["error"] = f"{said}: {error}"[:600]
        # Bounded by leaving facts out, the last first, since half a text could not be read again.
        while len(json.dumps(detail)) > _DETAIL_NBYTES:
            detail.popitem()
        told = [json.loads(text) for text in _exchange(json.dumps(detail).encode(), _DETAIL_NBYTES)]
        raise RankMismatchError(describe_differences(what, told)) from error
    if error is not None:
        raise error
    return result


def gather(text: str) -> list[str]:
    """Return what every rank says, in at most 256 bytes of ASCII, by rank. Every rank must call it."""
    return [told.decode("ascii") for told in _exchange(text.encode("ascii"), 256)]


def shared_out(work: Callable[[], T]) -> list[T]:
    """Return what every rank's share of some work gave, by rank, or raise on all what the first that failed raised.

    Every rank must call it, in the same place of the program.

    Parameters
    ----------
    work : callable
        Does this rank's share. It launches nothing; what it returns can be pickled.
    """
    end_together()
    from lazyshards.engines.exchange import exchange_all

    error: Exception | None = None
    try:
        message = pickle.dumps((work(), None), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # noqa: BLE001  # raised below, once the others know
        error = exc
        message = pickle.dumps((None, _portable(exc)), protocol=pickle.HIGHEST_PROTOCOL)
    told = [pickle.loads(each) for each in exchange_all(message)]  # noqa: S301  # from the ranks of this very run
    failed = [rank for rank, (_, wrong) in enumerate(told) if wrong is not None]
    if failed:
        if failed[0] == node_id() and error is not None:
            raise error
        raise told[failed[0]][1]
    return [done for done, _ in told]


def _exchange(message: bytes, width: int) -> list[bytes]:
    end_together()
    from lazyshards.engines.exchange import exchange

    return exchange(message, width)


def layout_facts(layout: Layout) -> dict[str, object]:
    """Return what must be the same of a layout: nothing that depends on where it is mounted, or on clocks."""
    return {
        "shards": len(layout),
        "rows": layout.rows,
        "row shape": layout.row_shape,
        "dtype": layout.dtype,
        "bytes in files": int(layout.stamps[:, 0].sum()),
        "fingerprint": layout.fingerprint,
    }


def plan_facts(plan: ReadPlan) -> dict[str, object]:
    """Return what must be the same of a plan: all that decides what is launched, and what it will give."""
    rows = plan.rows
    wanted = rows if isinstance(rows, range) else blake2b(rows.tobytes(), digest_size=_DIGEST_NBYTES).hexdigest()
    return {
        **layout_facts(plan.layout),
        "rows wanted": len(rows),
        "which rows": wanted,
        "cell": plan.cell,
        "rows of a tile": plan.tile_rows,
    }


# ------------------------------------------------------------------------------------------ saying it


def describe_differences(what: str, told: Sequence[Mapping[str, str]]) -> str:
    """Return an error for ranks that do not agree.

    Parameters
    ----------
    what : str
        What was done.
    told : sequence of mappings
        By rank: ``host``, ``error`` if it failed, and the facts.

    Examples
    --------
    >>> describe_differences("opening 'd'", [{"host": "a", "rows": "9"}, {"host": "b", "rows": "7"}]).split(". ")[0]
    "the ranks differ in opening 'd': rank 1 (on b) has rows 7, where rank 0 (on a) has rows 9"
    """
    kinds = [tuple((name, text) for name, text in each.items() if name != "host") for each in told]
    counts = Counter(kinds)
    most = max(counts.values())
    # What the others are measured by: one that succeeded, of the largest group, the first rank's if tied.
    good = [kind for kind in kinds if "error" not in dict(kind)] or kinds
    usual = next((kind for kind in good if counts[kind] == most), good[0])
    like = kinds.index(usual)
    texts = []
    odd = [rank for rank, kind in enumerate(kinds) if kind != usual]
    for rank in odd[:10]:
        here, there = dict(kinds[rank]), dict(usual)
        place = f"rank {rank} (on {told[rank]['host']})"
        if "error" in here:
            texts.append(f"{place} failed with {here['error']}")
            continue
        names = [name for name in here if here[name] != there.get(name)]
        wrong = ", ".join(f"{name} {here[name]}" for name in names)
        right = ", ".join(f"{name} {there[name]}" for name in names if name in there)
        texts.append(f"{place} has {wrong}, where rank {like} (on {told[like]['host']}) has {right or 'an error'}")
    if len(odd) > 10:
        texts.append(f"{len(odd) - 10:,} more ranks differ")
    if any("error" in dict(kind) for kind in kinds) and "error" not in dict(usual):
        texts.append(f"it went well on {', '.join(f'rank {rank}' for rank, kind in enumerate(kinds) if kind == usual)}")
    return (
        f"the ranks differ in {what}: {'; '.join(texts)}. All ranks must run the same program on the same files: see "
        "that the path is on storage which every node shares and sees alike, that nobody writes there, and that no "
        "argument depends on the rank, the time or an unseeded random generator"
    )


# ------------------------------------------------------------------------------------------ ending


@functools.cache
def end_together() -> None:
    """See to it that a program that fails on one rank ends on all, where Legate would wait for that rank for ever.

    After an uncaught exception the process is given some seconds to end with the others. If it has not by then, the
    others are still waiting: it is ended with status 1, for which launchers end all ranks.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        before(kind, exc, trace)
        sys.stdout.flush()
        # Its thread needs no interpreter lock, which Legate may hold while it waits.
        faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)

    sys.excepthook = hook
