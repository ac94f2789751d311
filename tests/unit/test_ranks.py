import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

import lazyshards
from lazyshards.engines import bringup, ranks
from lazyshards.errors import LazyShardsError, RankMismatchError
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all


def told(*facts):
    """Return what ranks on hosts a, b, c... say."""
    return [{"host": chr(97 + rank), **each} for rank, each in enumerate(facts)]


def test_difference_names_rank_and_fact():
    """The error says which rank differs, on which host, in what, and what the others have."""
    text = ranks.describe_differences("opening 'd'", told({"rows": "9", "dtype": "f4"}, {"rows": "7", "dtype": "f4"}))
    assert "the ranks differ in opening 'd': rank 1 (on b) has rows 7, where rank 0 (on a) has rows 9." in text
    assert "dtype" not in text


def test_majority_is_the_measure():
    """The few are measured by the many, also where rank 0 is among the few."""
    text = ranks.describe_differences("it", told({"rows": "7"}, {"rows": "9"}, {"rows": "9"}))
    assert "rank 0 (on a) has rows 7, where rank 1 (on b) has rows 9" in text
    assert "rank 2 (" not in text


def test_tie_goes_to_the_first():
    """Of two ranks that differ, the second is named."""
    assert "rank 1 (on b) has rows 9" in ranks.describe_differences("it", told({"rows": "7"}, {"rows": "9"}))


def test_error_is_told_with_who_succeeded():
    """A rank that failed is named with its error, and those on which it went well."""
    text = ranks.describe_differences("it", told({"error": "ShardReadError: gone"}, {"rows": "9"}, {"rows": "9"}))
    assert "rank 0 (on a) failed with ShardReadError: gone" in text
    assert "it went well on rank 1, rank 2" in text


def test_different_errors_are_all_told():
    """Where every rank failed, each its own way, all ways are told."""
    text = ranks.describe_differences("it", told({"error": "A: x"}, {"error": "B: y"}))
    assert "failed with B: y" in text


def test_many_ranks_are_cut_short():
    """However many ranks differ, the message stays short."""
    facts = [{"rows": str(rank)} for rank in range(4_096)]
    text = ranks.describe_differences("it", told(*facts))
    assert "4,085 more ranks differ" in text
    assert len(text) < 2_500


def test_one_process_compares_nothing():
    """In one process the work is done and its result or error passed on, and no fact is asked for."""

    def facts(_):
        raise AssertionError("asked")

    assert ranks.together(lambda: 3, facts, "legate", what="it") == 3
    with pytest.raises(KeyError):
        ranks.together(lambda: {}["x"], facts, "numpy", what="it")
    assert ranks.agree(-(2**62), "legate") == -(2**62)
    assert ranks.is_first_rank()


def test_error_class():
    """RankMismatchError is caught as ours and as a RuntimeError."""
    assert issubclass(RankMismatchError, LazyShardsError)
    assert issubclass(RankMismatchError, RuntimeError)
    assert lazyshards.RankMismatchError is RankMismatchError


class Team:
    """Ranks played one after the other: what each says is noted, then all are told."""

    def __init__(self, monkeypatch):
        self.said, self.turn = [], 0
        monkeypatch.setattr(ranks, "is_shared", lambda engine: True)
        monkeypatch.setattr(ranks, "_exchange", self.exchange)

    def exchange(self, message, width):
        """Note what this rank says; what all say is known in the second round only."""
        assert len(message) <= width
        self.turn += 1
        if len(self.said) < self.turn:
            self.said.append([])
        self.said[self.turn - 1].append(message)
        return self.said[self.turn - 1]

    def play(self, *parts):
        """Return what the last rank gets once all the others have said the same in every round."""
        got = None
        for part in parts:
            self.turn = 0
            try:
                got = part()
            except Exception as exc:  # noqa: BLE001  # what the rank gets
                got = exc
        return got


def test_same_facts_pass(monkeypatch):
    """Ranks that find the same get their results."""
    team = Team(monkeypatch)
    part = lambda: ranks.together(lambda: "r", lambda _: {"rows": 9}, "legate", what="it")  # noqa: E731
    assert team.play(part, part, part) == "r"
    assert len(team.said) == 1


def test_different_facts_raise(monkeypatch):
    """Ranks that find different things compare details, which are bounded, and raise."""
    team = Team(monkeypatch)

    def part(rows):
        return lambda: ranks.together(lambda: rows, lambda n: {"rows": n, "x" * 99: "y" * 9_999}, "legate", what="it")

    got = team.play(part(9), part(7))
    assert isinstance(got, RankMismatchError)
    assert json.loads(team.said[1][0])["rows"] == "7"


def test_same_error_is_passed_on(monkeypatch):
    """What fails on every rank with the same kind of error is that error, whatever its text."""
    team = Team(monkeypatch)

    def part(text):
        def fail():
            raise LazyShardsError(text)

        return lambda: ranks.together(fail, lambda _: {}, "legate", what="it")

    got = team.play(part("node a"), part("node b"))
    assert type(got) is LazyShardsError
    assert str(got) == "node b"


def test_other_errors_are_one(monkeypatch):
    """What fails on every rank in its own way is one error for all."""
    team = Team(monkeypatch)

    def part(kind):
        def fail():
            raise kind("text")

        return lambda: ranks.together(fail, lambda _: {}, "legate", what="it")

    assert isinstance(team.play(part(OSError), part(ValueError)), RankMismatchError)


def test_facts_do_not_depend_on_the_place(write, tmp_path):
    """The same files below another root have the same facts, and other files, rows, or tiles have others."""
    write([4, 6], name="a")
    write([4, 6], name="b")
    write([4, 7], name="c")

    def facts(name, index, workers=2):
        layout = lazyshards.open_shards(tmp_path / name, engine="numpy")._layout
        selection = select(select_all(layout.rows, layout.row_shape), index)
        return ranks.plan_facts(compile_plan(layout, selection, Capacity(workers), tiles_per_processor=1))

    usual = facts("a", np.s_[2:8])
    assert facts("b", np.s_[2:8]) == usual
    assert facts("c", np.s_[2:8]) != usual
    assert facts("a", np.s_[2:9]) != usual
    assert facts("a", np.s_[2:8, 1]) != usual
    assert facts("a", np.s_[2:8], workers=3) != usual
    assert facts("a", np.array([2, 3])) != facts("a", np.array([2, 4]))


def test_child_of_a_rank(monkeypatch):
    """A process that a rank started does not start Legate, which would wait for the others for ever."""
    code = """
        import sys
        from lazyshards.engines import bringup, ranks
        print(bringup.is_child_of_rank(), ranks.node_id(), "child of a rank" in (bringup.why_unavailable() or ""))
    """
    monkeypatch.setenv("LAZYSHARDS_RANK_PROCESS", "1")
    monkeypatch.setenv("LEGATE_GLOBAL_RANK", "3")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())],
        capture_output=True,
        text=True,
        check=True,
        env={**__import__("os").environ, "PYTHONPATH": str(bringup.Path(bringup.__file__).parents[2])},
    )
    assert done.stdout.split()[:2] == ["True", "0"]


def test_once_in_one_process():
    """In one process the work is done, and asking is for nobody."""
    assert ranks.once(lambda ask: (ask("anything"), 3), "legate", what="it") == (None, 3)


class First:
    """Rank 0, and then another that is told the same."""

    def __init__(self, monkeypatch):
        self.said, self.heard, self.is_first = [], 0, True
        monkeypatch.setattr(ranks, "is_shared", lambda engine: True)
        monkeypatch.setattr(ranks, "is_first_rank", lambda: self.is_first)
        monkeypatch.setattr(ranks, "from_first", self.from_first)
        monkeypatch.setattr(ranks, "together", lambda work, facts, engine, what: work())

    def from_first(self, value):
        """Note what rank 0 says; tell it to the other."""
        if self.is_first:
            self.said.append(pickle.dumps(value))
        else:
            self.heard += 1
        return pickle.loads(self.said[-1] if self.is_first else self.said[self.heard - 1])  # noqa: S301  # our own

    def play(self, work, answer=None):
        """Return what rank 0 got, then what the other got."""
        got = []
        for self.is_first in (True, False):
            try:
                got.append(ranks.once(work if self.is_first else None, "legate", what="it", answer=answer))
            except Exception as exc:  # noqa: BLE001  # what the rank gets
                got.append(exc)
        return got


def test_once_is_done_once(monkeypatch):
    """Rank 0 works, the other answers what it is asked, in order, and gets the result."""
    answered = []
    first = First(monkeypatch)
    assert first.play(lambda ask: [ask(i) for i in range(3)] and "done", answered.append) == ["done", "done"]
    assert answered == [0, 1, 2]
    assert first.heard == len(first.said)


def test_once_fails_for_all(monkeypatch):
    """What goes wrong on rank 0 is raised on the other, with all that the error holds."""

    def work(_):
        raise FileExistsError(17, "it is there", "place")

    mine, other = First(monkeypatch).play(work)
    assert type(mine) is type(other) is FileExistsError
    assert (other.errno, other.filename) == (17, "place")


class OddError(Exception):
    """An error that cannot be had back from its pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_once_fails_oddly(monkeypatch):
    """An error that does not travel is told in words."""

    def work(_):
        raise OddError("a", "b")

    mine, other = First(monkeypatch).play(work)
    assert type(mine) is OddError
    assert "OddError: a b" in str(other)
    assert isinstance(other, LazyShardsError)


def test_once_answer_fails(monkeypatch):
    """A rank that cannot answer goes on to the end, so that nobody waits for it, and then says so."""

    def answer(command):
        raise OSError(f"no {command}")

    first = First(monkeypatch)
    mine, other = first.play(lambda ask: [ask(i) for i in range(3)] and "done", answer)
    assert mine == "done"
    assert str(other) == "no 2"
    assert first.heard == len(first.said)


@pytest.mark.parametrize("command", ["index", "convert", "verify"])
def test_other_ranks_run_no_commands(child, write, command):
    """A command that reads by itself, or writes, is for rank 0: on another rank it ends well and does nothing."""
    path, _ = write([2, 3])
    code = """
        import os, sys
        from lazyshards import cli
        path = sys.argv[1]
        more = [path + "-converted"] if sys.argv[2] == "convert" else []
        status = cli.main([sys.argv[2], path, *more])
        print([status, os.path.exists(path + "-converted"), os.path.exists(path + "/_lazyshards.arrow")])
    """
    said = child(code, str(path), command, LEGATE_GLOBAL_RANK="1", LAZYSHARDS_ENGINE="numpy")
    assert said.strip() == "[0, False, False]"
    alone = child(code, str(path), command, LAZYSHARDS_ENGINE="numpy")
    assert alone.strip().splitlines()[-1] == f"[0, {command == 'convert'}, {command == 'index'}]"
