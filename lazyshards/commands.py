"""What the commands ``index``, ``verify`` and ``convert`` do."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict

from lazyshards.dataset import ShardedDataset
from lazyshards.display import hide_secrets, printable
from lazyshards.errors import LayoutError
from lazyshards.finding import locate
from lazyshards.opening import open_shards
from lazyshards.verify import Report, Step, verify
from lazyshards.writers import writable_formats
from lazyshards.writing import write_shards

__all__ = ["add_commands", "format_option", "open_one"]


def add_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", opening: argparse.ArgumentParser
) -> None:
    """Add the commands to a parser.

    Parameters
    ----------
    commands : argparse action
        What ``add_subparsers`` returned.
    opening : ArgumentParser
        Holds the options of opening a dataset.
    """
    index = commands.add_parser("index", parents=[opening], help="write a manifest, so that opening is quick")
    index.add_argument("path", metavar="PATH", help="directory, or glob (in quotes)")
    index.add_argument("--content", action="store_true", help="read all files and save a hash of each one's content")
    index.set_defaults(command=_index, alone=True)  # of several ranks, one does it

    check = commands.add_parser("verify", parents=[opening], help="find all faults; exit with 1 if there are any")
    check.add_argument("path", metavar="PATH", help="directory, glob (in quotes) or file")
    check.add_argument("--content", action="store_true", help="read every row, and compare content hashes")
    check.add_argument("--jobs", metavar="N", type=_number, help="threads that read; one for each processor by default")
    check.add_argument("--resume", metavar="FILE", help="note sound shards in FILE, and do not read those noted there")
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(command=_verify, alone=True)

    convert = commands.add_parser("convert", parents=[opening], help="write a dataset in another format")
    convert.add_argument("source", metavar="SRC", help="directory, glob (in quotes) or file")
    convert.add_argument("target", metavar="DST", help="directory; it appears when all is written")
    convert.add_argument("--to", choices=writable_formats(), default="npy", help="format to write; npy by default")
    convert.add_argument("--rows-per-shard", metavar="N", type=_number, help="rows of each shard")
    convert.add_argument("--nbytes-per-shard", metavar="N", type=_size, help="or its bytes, as 64M; 256M by default")
    convert.add_argument("--compression", metavar="NAME", help="as the format's library calls it")
    convert.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    convert.set_defaults(command=_convert, alone=True)


def open_one(
    path: str, options: argparse.Namespace, *, engine: str | None = "numpy", manifest: str = "auto"
) -> ShardedDataset:
    """Return the dataset at a path, opened with the options that every command takes.

    Parameters
    ----------
    path : str
    options : Namespace
        What was parsed.
    engine : str, optional
    manifest : str
        As for `lazyshards.open_shards`.

    Raises
    ------
    LayoutError
        If the options mean several arrays.
    """
    ds: object = open_shards(
        path,
        format=options.format,
        engine=engine,
        order=options.order,
        holes=options.holes,
        manifest=manifest,
        **dict(options.option),
    )
    if not isinstance(ds, ShardedDataset):
        raise LayoutError("the options mean several arrays, expected one")
    return ds


def _index(options: argparse.Namespace) -> int:
    ds = open_one(options.path, options, manifest="ignore")
    place = ds.save_manifest(content=options.content)
    print(f"{printable(hide_secrets(place))}: {len(ds.shards):,} shards, {len(ds):,} rows")
    return 0


def _verify(options: argparse.Namespace) -> int:
    count = 0
    if options.content and sys.stderr.isatty():
        count = len(locate(options.path, format=options.format, holes="ignore", options=dict(options.option)).paths)
    with _bar(count) as progress:
        report = verify(
            options.path,
            content=options.content,
            jobs=options.jobs,
            resume=options.resume,
            progress=progress,
            format=options.format,
            order=options.order,
            holes=options.holes,
            **dict(options.option),
        )
    if options.json:
        found = [{**finding._asdict(), "path": hide_secrets(finding.path)} for finding in report.findings]
        print(json.dumps({**asdict(report), "is_sound": report.is_sound, "findings": found}, indent=2))
    else:
        for line in _lines(report):
            print(printable(hide_secrets(line)))
    return 0 if report.is_sound else 1


def _lines(report: Report) -> Iterator[str]:
    """Yield a report for a person."""
    for finding in report.findings:
        kind = finding.kind if finding.is_fault else f"note: {finding.kind}"
        place = f"{finding.path!r} " if finding.path else ""
        yield f"{kind}: {place}{' '.join(finding.text.split())}"
    faults = sum([finding.is_fault for finding in report.findings])
    read = f", {report.read:,} read to the end" if report.read else ""
    wrong = f"{faults:,} fault{'s' * (faults != 1)}" if faults else "sound"
    yield f"{report.shards:,} shards, {report.rows:,} rows{read}: {wrong}"


def _convert(options: argparse.Namespace) -> int:
    ds = open_one(options.source, options)
    more = {} if options.compression is None else {"compression": options.compression}
    try:
        paths = write_shards(
            ds,
            options.target,
            format=options.to,
            rows_per_shard=options.rows_per_shard,
            nbytes_per_shard=options.nbytes_per_shard,
            overwrite=options.overwrite,
            progress=_has_bar(),
            **more,
        )
    except FileExistsError as exc:
        text = (exc.strerror or str(exc)).replace("overwrite=True", "--overwrite")
        raise FileExistsError(f"{exc.filename!r} is there already: {text}") from exc
    shards = f"{len(paths):,} {options.to} shard{'s' * (len(paths) != 1)}"
    print(f"{printable(options.target)}: {shards}, {len(ds):,} rows")
    return 0


def _has_bar() -> bool:
    """Return whether somebody looks at a progress bar, and tqdm can draw it."""
    try:
        import tqdm
    except ImportError:
        return False
    return sys.stderr.isatty() and bool(tqdm)


@contextlib.contextmanager
def _bar(count: int) -> Iterator[Step | None]:
    """Show a progress bar of shards, if somebody looks at it."""
    if not count or not _has_bar():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=count, unit="shard", desc="verify") as bar:
        yield bar.update


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]+(_[0-9]+)*", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 1 or more")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9_]+)\s*([KMGT]?)(i?B)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected bytes, as 64M or 1_000_000")
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def format_option(text: str) -> tuple[str, object]:
    """Return the name and the value that ``NAME=VALUE`` gives: JSON, or else text."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
