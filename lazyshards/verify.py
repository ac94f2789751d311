"""Look for everything that can be wrong with a dataset, and report all of it at once."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lazyshards import catalog, manifest
from lazyshards.details import options_text
from lazyshards.errors import FormatError, LayoutError, LazyShardsError, ShardReadError
from lazyshards.finding import Found, check_holes, locate
from lazyshards.formats.base import Fault
from lazyshards.hashing import best_algorithm
from lazyshards.holders import file_of, hash_content
from lazyshards.layout import Layout, Shard
from lazyshards.leaf import fill
from lazyshards.manifest import Manifest
from lazyshards.storage import Stamp

__all__ = ["Finding", "Report", "verify"]

_BLOCK_NBYTES = 16 << 20
"""Bytes of rows that are read at a time, by each job."""
_SHARDS_AT_A_TIME = 1024
"""Shards that are handed to the jobs together."""


class Finding(NamedTuple):
    """One thing that was found."""

    kind: str
    """``hole``, ``duplicate``, ``empty``, ``damaged``, ``drift``, ``changed``, ``manifest``, ``content`` or
    ``unreadable``."""
    path: str
    """The shard; empty if it is the dataset's."""
    text: str
    """What was found, and what was expected."""
    is_fault: bool = True
    """Whether it is a fault rather than a note."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    path: str
    """What was looked at."""
    shards: int = 0
    """How many shards there are."""
    rows: int = 0
    """How many rows those hold that can be opened."""
    read: int = 0
    """How many shards were read to the end, now or by the call that was resumed."""
    findings: tuple[Finding, ...] = field(default=())
    """In the order of the shards, those of the dataset first."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not any([finding.is_fault for finding in self.findings])


Step = Callable[[int], object]
"""Called with the number of shards that were finished since."""


def verify(
    path: object,
    *,
    content: bool = False,
    jobs: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Step | None = None,
    format: str | None = None,
    order: str = "natural",
    holes: str = "raise",
    storage_options: Mapping[str, object] | None = None,
    dtype: object = None,
    **options: object,
) -> Report:
    """Look at all shards of a dataset, and report every fault at once.

    Looked for: numbers that are missing; a shard that is there twice, by path or as two names of one file; headers that
    cannot be read, and files that are cut short; a dtype or row shape that is not that of most; shards that were
    added, removed or changed since the manifest beside them was written. Shards without rows are noted.

    Parameters
    ----------
    path : str, path, or sequence of them
        As for :func:`open_shards`.
    content : bool
        Whether to read every row, as computing does, in blocks, and to compare the hash of each file with that in the
        manifest, and with those of the others.
    jobs : int, optional
        Threads that read contents; by default one for each processor.
    resume : path, optional
        A file in which the shards are noted whose content was found sound, one line each. Those noted in it before,
        and not changed since, are not read again.
    progress : callable, optional
        Called with a number of shards whenever they are finished.
    format, order, holes, storage_options, dtype, **options
        As for :func:`open_shards`.

    Returns
    -------
    Report

    Raises
    ------
    ShardsNotFoundError, FormatError
        If there is nothing to look at.

    Examples
    --------
    >>> from lazyshards.verify import verify
    >>> for i, rows in [(0, 3), (1, 3), (3, 2)]:
    ...     np.save(f"part_{i}.npy", np.zeros(rows))
    >>> report = verify("part_*.npy")
    >>> report.is_sound, [finding.kind for finding in report.findings]
    (False, ['hole'])
    """
    found = locate(
        path,
        format=format,
        order=order,
        holes="ignore",
        storage_options=storage_options,
        dtype=dtype,
        options=options,
    )
    findings: list[Finding] = []
    saved: Manifest | None = found.saved
    if saved is not None:
        found = found._replace(paths=saved.listed()[0], manifest=saved.path)
    elif found.manifest:
        try:
            saved = manifest.read(found.manifest, found.storage)
        except (LayoutError, FormatError, ShardReadError) as exc:
            findings.append(Finding("manifest", found.manifest, f"cannot be used: {exc}", isinstance(exc, LayoutError)))
    if holes == "raise" and len(found.paths) > 1:
        try:
            check_holes(found.paths, found.place, order)
        except LayoutError as exc:
            findings.append(Finding("hole", "", str(exc)))
    described = found.reader.inspect(found.paths, found.storage, found.options)
    shards = [shard for shard in described if isinstance(shard, Shard)]
    by_path: dict[str, list[Finding]] = defaultdict(list)
    for finding in _faults(described, shards, found):
        by_path[finding.path].append(finding)
    for finding in _twice(shards):
        by_path[finding.path].append(finding)
    for shard in shards:
        if not shard.rows:
            by_path[shard.path].append(Finding("empty", shard.path, "holds no rows", is_fault=False))
    if saved is not None:
        findings += _since(saved, found, {file_of(shard.path, shard.source): shard.stamp for shard in shards})
    read = 0
    if content:
        sound = [shard for shard in shards if not any([finding.is_fault for finding in by_path[shard.path]])]
        read, more = _read_contents(sound, found, saved, jobs, resume, progress)
        for finding in more:
            by_path[finding.path].append(finding)
    for place in found.paths:
        findings += by_path.pop(place, [])
    findings += [finding for some in by_path.values() for finding in some]
    return Report(found.place, len(described), sum([shard.rows for shard in shards]), read, tuple(findings))


def _faults(described: Sequence[Shard | Fault], shards: Sequence[Shard], found: Found) -> Iterator[Finding]:
    """Yield the shards that cannot be opened, and those that are not like most."""
    for fault in described:
        if isinstance(fault, Fault):
            yield Finding("unreadable" if fault.error is not None else "damaged", fault.path, fault.found)
    for fault in catalog.disagreements(shards, found.dtype):
        yield Finding("drift", fault.path, fault.found)


def _twice(shards: Sequence[Shard]) -> Iterator[Finding]:
    """Yield the shards that are there twice: by path, or as another name of the same file."""
    paths: set[str] = set()
    files: dict[tuple[int, int, int], str] = {}
    for shard in shards:
        size, mtime_ns, inode, _ = shard.stamp
        if shard.path in paths:
            yield Finding("duplicate", shard.path, "is listed twice")
        file = file_of(shard.path, shard.source)  # which may hold several
        if inode and (other := files.setdefault((inode, size, mtime_ns), file)) != file:
            yield Finding("duplicate", shard.path, f"is another name of the file {other!r}")
        paths.add(shard.path)


def _since(saved: Manifest, found: Found, stamps: Mapping[str, Stamp]) -> Iterator[Finding]:
    """Yield what changed since the manifest was written."""
    here = [path for path in found.paths if path in stamps]
    text = options_text(found.options)
    what = manifest.compare(saved, here, [stamps[path] for path in here], format=found.reader.name, options=text)
    if what.other:
        yield Finding("manifest", saved.path, f"is stale: {what.other}")
    for path in what.changed:
        yield Finding("changed", path, "is not the file that the manifest knows: it was written to or replaced since")
    for path in what.added:
        yield Finding("changed", path, "is not in the manifest: it was added since")
    for path in sorted(set(what.removed) - set(found.paths)):
        yield Finding("changed", path, "is in the manifest and not there: it was removed since")


# Contents --------------------------------------------------------------------------------------------------------


def _read_contents(
    shards: Sequence[Shard],
    found: Found,
    saved: Manifest | None,
    jobs: int | None,
    resume: str | os.PathLike[str] | None,
    progress: Step | None,
) -> tuple[int, list[Finding]]:
    """Read every row of every shard; return how many shards were read to the end, and what is wrong with the others."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs!r}: expected 1 or more")
    algorithm = saved.algorithm if saved is not None and saved.algorithm else best_algorithm()
    expected: dict[str, bytes] = {}
    if saved is not None and saved.hashes is not None:
        rows = zip(saved.layout.names, saved.hashes, strict=True)
        expected = {saved.layout.root + name: digest.tobytes() for name, digest in rows}
    journal = _Journal(resume, algorithm)

    def look_at(shard: Shard) -> tuple[bytes, str]:
        known = journal.known(shard)
        if known is not None:
            return known, ""
        try:
            digest = digests.get(file := file_of(shard.path, shard.source), b"")
            if not digest:  # of several datasets in one file it is the same
                digest = hash_content(shard.path, shard.source, shard.stamp, found.storage, algorithm)
            if file != shard.path:
                digests[file] = digest
            _read_rows(shard, found)
        except (LazyShardsError, OSError, ValueError) as exc:
            return b"", str(exc)
        return digest, ""

    findings: list[Finding] = []
    digests: dict[str, bytes] = {}
    holders: dict[bytes, str] = {}
    read = 0
    with journal, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        few = [shards[start : start + _SHARDS_AT_A_TIME] for start in range(0, len(shards), _SHARDS_AT_A_TIME)]
        looked = (pair for some in few for pair in zip(some, pool.map(look_at, some), strict=True))
        for shard, (digest, problem) in looked:
            if problem:
                findings.append(Finding("unreadable", shard.path, problem))
            else:
                read += 1
                file = file_of(shard.path, shard.source)
                other = holders.setdefault(digest, file) if digest and shard.rows else file
                if digest and expected.get(shard.path, digest) != digest:
                    text = f"holds other bytes than when it was indexed: {algorithm} {digest.hex()}, expected "
                    findings.append(Finding("content", shard.path, text + expected[shard.path].hex()))
                elif other != file:
                    findings.append(Finding("duplicate", shard.path, f"holds the same bytes as {other!r}"))
                    journal.note(shard, digest)
                else:
                    journal.note(shard, digest)
            if progress is not None:
                progress(1)
    return read, findings


def _read_rows(shard: Shard, found: Found) -> None:
    """Read all rows of a shard as computing does, a block at a time."""
    layout = Layout.from_shards([shard], found.reader.name, found.storage, options=options_text(found.options))
    step = max(1, _BLOCK_NBYTES // max(1, layout.row_nbytes))
    cell = tuple(map(range, layout.row_shape))
    block = np.empty((min(step, shard.rows), *layout.row_shape), layout.dtype)
    for start in range(0, shard.rows, step):
        rows = range(start, min(start + step, shard.rows))
        fill(block[: len(rows)], rows, layout, cell)


class _Journal:
    """The shards whose content was found sound, one line each, kept in a file if there is one.

    A line that was cut off when the process was killed is passed over.
    """

    def __init__(self, path: str | os.PathLike[str] | None, algorithm: str) -> None:
        self._path = path
        self._algorithm = algorithm
        self._known: dict[str, tuple[list[object], bytes]] = {}
        if path is None or not os.path.exists(path):
            return
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                try:
                    name, stamp, used, digest = json.loads(line)
                    if used == algorithm:
                        self._known[name] = list(stamp), bytes.fromhex(digest)
                except (ValueError, TypeError):
                    continue

    def __enter__(self) -> None:
        self._file = None if self._path is None else open(self._path, "ab", buffering=0)
        if self._file is not None and self._file.tell():
            self._write("\n")

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def known(self, shard: Shard) -> bytes | None:
        """Return the digest that a shard had when it was found sound, if it is still that file."""
        stamp, digest = self._known.get(shard.path, (None, b""))
        return digest if stamp == list(shard.stamp) else None

    def note(self, shard: Shard, digest: bytes) -> None:
        """Note that a shard is sound."""
        if self._file is not None and self.known(shard) is None:
            self._write(json.dumps([shard.path, list(shard.stamp), self._algorithm, digest.hex()]) + "\n")

    def _write(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.write(line.encode())
        except OSError as exc:  # of a full disk, say, which names no file
            raise OSError(exc.errno, exc.strerror, str(self._path)) from exc
