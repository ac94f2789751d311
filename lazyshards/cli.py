"""The command line: ``lazyshards info | head | plan | index | verify | convert | run | doctor | demo``."""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import EllipsisType
from typing import TextIO

import numpy as np

from lazyshards._version import __version__
from lazyshards.commands import add_commands, format_option, open_one
from lazyshards.dataset import ShardedDataset
from lazyshards.display import hide_secrets, printable, shards_text
from lazyshards.engines import engine_names
from lazyshards.engines.ranks import is_first_rank
from lazyshards.errors import LazyShardsError, LazyShardsWarning
from lazyshards.formats import format_names
from lazyshards.launch import LAUNCHERS, prepare

__all__ = ["main", "parse_index"]

_INTERRUPTED = 128 + signal.SIGINT
_PIPE_CLOSED = 128 + 13  # SIGPIPE, which not every system names

Item = int | slice | EllipsisType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        0; 1 for an error that the message on stderr explains, or faults that ``verify`` found; 2 for a wrong command
        line; 130 after Ctrl-C; 141 if the reader of the output went away.
    """
    parser = _parser()
    try:
        options, rest = parser.parse_known_args(_guard_index(sys.argv[1:] if argv is None else list(argv)))
        if rest:
            several = not any([argument.startswith("-") for argument in rest])
            hint = "; one path is taken: put a glob in quotes, as in 'data/*.npy'" if several else ""
            parser.error(f"unrecognized arguments: {' '.join(rest[:3])}{' ...' * (len(rest) > 3)}{hint}")
    except SystemExit as exc:  # argparse ends the process, also after --help
        return exc.code if isinstance(exc.code, int) else 2
    command: Callable[[argparse.Namespace], int | None] = options.command
    if getattr(options, "alone", False) and not is_first_rank():
        return 0
    try:
        with _plain_warnings(), _from_one_rank():
            status = command(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return _PIPE_CLOSED
    except (LazyShardsError, OSError, ValueError, MemoryError) as exc:
        return _fail(exc)
    except TypeError as exc:
        if getattr(options, "option", None):  # one that the format does not take
            return _fail(exc)
        raise
    return status or 0


def _parser() -> argparse.ArgumentParser:
    opening = argparse.ArgumentParser(add_help=False)
    formats = [name for name in format_names() if name != "function"]  # that is reader=, which needs Python
    opening.add_argument("--format", choices=formats, help="format of the shards; told by suffix by default")
    opening.add_argument("--engine", choices=engine_names(), help="what computes; auto by default")
    opening.add_argument("--order", choices=("natural", "name"), default="natural", help="order of the shards")
    opening.add_argument("--holes", choices=("raise", "ignore"), default="raise", help="if a number is missing")
    opening.add_argument(
        "--option",
        metavar="NAME=VALUE",
        type=format_option,
        action="append",
        default=[],
        help="option of the format, its value in JSON or as text: --option dataset=x --option row_shape=[3] "
        """--option 'columns=["a", "b"]'""",
    )

    parser = argparse.ArgumentParser("lazyshards", description="Many files as one lazy array.")
    parser.add_argument("--version", action="version", version=f"lazyshards {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    info = commands.add_parser("info", parents=[opening], help="shape, dtype, size and shards of a dataset")
    info.add_argument("path", metavar="PATH", help="directory, glob (in quotes) or file")
    info.add_argument("--shards", action="store_true", help="list every shard")
    info.set_defaults(command=_info)

    head = commands.add_parser("head", parents=[opening], help="print the first rows")
    head.add_argument("path", metavar="PATH", help="directory, glob (in quotes) or file")
    head.add_argument("-n", metavar="N", type=_count, default=5, help="how many rows; 5 by default")
    head.set_defaults(command=_head)

    plan = commands.add_parser("plan", parents=[opening], help="say what computing a slice would do; read no data")
    plan.add_argument("path", metavar="PATH", help="directory, glob (in quotes) or file")
    plan.add_argument("index", metavar="INDEX", type=_index, help="as between NumPy's brackets: 1_000:5_000 or ..., 3")
    plan.set_defaults(command=_plan)

    add_commands(commands, opening)

    run = commands.add_parser("run", help="run a script on several processes or machines by Legate")
    run.add_argument("--ranks", metavar="R", type=int, default=1, help="processes on each node; 1 by default")
    run.add_argument("--nodes", metavar="N", type=int, default=1, help="machines; 1 by default")
    run.add_argument("--launcher", choices=LAUNCHERS, help="srun within a SLURM job, else mpirun, by default")
    run.add_argument("--cpus", metavar="C", type=int, help="processors of each rank; the cores divided by default")
    run.add_argument("--gpus", metavar="G", type=int, help="GPUs of each rank; those there are divided by default")
    run.add_argument("--sysmem", metavar="MIB", type=int, help="memory for the arrays of each rank")
    run.add_argument("--legate", metavar="OPTIONS", default="", help="more options of the legate launcher, in quotes")
    run.add_argument("--dry-run", action="store_true", help="say what would be started, and stop")
    run.add_argument("script", metavar="SCRIPT", help="a Python script, run unchanged on every rank")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    run.set_defaults(command=_run, alone=True)

    doctor = commands.add_parser("doctor", help="say what was found on this machine, and what is missing")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(command=_doctor, alone=True)

    demo = commands.add_parser("demo", parents=[opening], help="open, slice, compute and check a dataset")
    demo.add_argument("path", metavar="PATH", nargs="?", help="your own shards; by default a small example is written")
    demo.set_defaults(command=_demo)
    return parser


# Commands --------------------------------------------------------------------------------------------------------


def _open(options: argparse.Namespace) -> ShardedDataset:
    return open_one(options.path, options, engine=options.engine)


def _info(options: argparse.Namespace) -> None:
    ds = _open(options)
    if not options.shards:
        print(ds)
        return
    print(repr(ds).partition("\n")[0])
    for line in shards_text(ds.shards):
        print(line)


def _head(options: argparse.Namespace) -> None:
    ds = _open(options)
    # Starting Legate takes longer than reading a few rows: it is done if it was asked for.
    rows = ds[: options.n].compute(engine=options.engine or "numpy")
    with np.printoptions(threshold=1_000, edgeitems=3, linewidth=120):
        print(np.asarray(rows))
    print(f"rows 0 to {min(options.n, len(ds)):,} of {len(ds):,}, {ds.dtype}")


def _plan(options: argparse.Namespace) -> None:
    _open(options)[options.index].explain()


def _run(options: argparse.Namespace) -> None:
    launch = prepare(
        options.script,
        options.arguments,
        ranks=options.ranks,
        nodes=options.nodes,
        launcher=options.launcher,
        cpus=options.cpus,
        gpus=options.gpus,
        sysmem=options.sysmem,
        legate=options.legate,
    )
    print(f"lazyshards: starting\n{launch}", file=sys.stdout if options.dry_run else sys.stderr)
    if not options.dry_run:
        launch.start()


def _doctor(options: argparse.Namespace) -> None:
    from lazyshards import doctor

    if options.json:
        print(json.dumps(asdict(doctor.report()), indent=2, default=str))
    else:
        print(doctor.format_report())


def _demo(options: argparse.Namespace) -> None:
    from lazyshards.demo import demonstrate

    ds = None if options.path is None else _open(options)
    for text in demonstrate(ds, options.engine):
        print(text, flush=True)


# Arguments -------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_LEADING_MINUS = re.compile(r"-[0-9][0-9_]*\s*[:,]")


def _guard_index(argv: list[str]) -> list[str]:
    """Return the arguments with an index such as ``-5:`` or ``-1,0`` marked as none of argparse's options."""
    return [f" {argument}" if _LEADING_MINUS.match(argument) else argument for argument in argv]


def _count(text: str) -> int:
    if not _INTEGER.fullmatch(text.strip()) or int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def _index(text: str) -> tuple[Item, ...]:
    try:
        return parse_index(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def parse_index(text: str) -> tuple[Item, ...]:
    """Return the index that a text between NumPy's brackets means; nothing in it is evaluated.

    Parameters
    ----------
    text : str
        Integers, slices and ``...``, separated by commas; underscores in integers as in Python.

    Raises
    ------
    ValueError
        If it holds anything else.

    Examples
    --------
    >>> parse_index("1_000:5_000, ..., 3")
    (slice(1000, 5000, None), Ellipsis, 3)
    """
    items = text.split(",")
    if len(items) > 1 and not items[-1].strip():
        items.pop()  # a trailing comma, as in x[5,]
    return tuple([_item(item.strip(), text) for item in items])


def _item(item: str, text: str) -> Item:
    if item == "...":
        return ...
    bounds = [bound.strip() for bound in item.split(":")]
    for bound in bounds:
        if (bound or len(bounds) == 1) and not (_INTEGER.fullmatch(bound) and len(bound) < 100):
            raise ValueError(
                f"{text.strip()!r} is not an index: {item!r} is not an integer, a slice or '...'; "
                "expected something like 1_000:5_000 or ..., 3"
            )
    if len(bounds) > 3:
        raise ValueError(f"{text.strip()!r} is not an index: a slice has at most two colons")
    if len(bounds) == 1:
        return int(bounds[0])
    return slice(*[int(bound) if bound else None for bound in bounds])


# Ends ------------------------------------------------------------------------------------------------------------


def _fail(exc: BaseException) -> int:
    text = "\n".join(map(printable, hide_secrets(str(exc) or type(exc).__name__).splitlines()))
    print(f"lazyshards: error: {text}", file=sys.stderr)
    return 1


def _abandon_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not complain when it ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, sys.stdout.fileno())
        finally:
            os.close(null)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show the package's warnings as one line each."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, LazyShardsWarning):
            print(f"lazyshards: warning: {hide_secrets(str(message))}", file=sys.stderr)
        else:
            shown(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _from_one_rank() -> Iterator[None]:
    """Keep all ranks of a Legate run but the first from printing."""
    if is_first_rank():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main())
