"""The headers of Arrow IPC files and streams: which messages a file holds, and where each buffer of them lies.

Source: the columnar format's specification, sections "IPC File Format" and "Encapsulated message format". The headers
are FlatBuffers, parsed here and not by pyarrow, which has no way to say where the bytes of a column lie, and which
needs a file: here they are read by ranges, those of many files together.
"""

import struct
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.storage.base import Stamp, Storage

__all__ = [
    "BATCH",
    "DICTIONARY",
    "MAGIC",
    "SCHEMA",
    "DamagedError",
    "FlatBuffer",
    "Message",
    "Scan",
    "header_span",
    "scan_headers",
]

MAGIC = b"ARROW1"
SCHEMA = 1
"""The kind of a message that holds the schema."""
DICTIONARY = 2
"""The kind of one that holds values of a dictionary."""
BATCH = 3
"""The kind of one that holds rows."""
_CONTINUATION = b"\xff\xff\xff\xff"
_TAIL_NBYTES = 10
"""Bytes at the end of a file: the footer's length, and the magic."""
_HEAD_NBYTES = 4096
"""Bytes of the first read, which the schema seldom exceeds."""
_MOST_HEADER_NBYTES = 64 << 20
"""Bytes of the longest header of a message, and of the longest footer, that is parsed."""
_CODECS = ("lz4", "zstd")


class DamagedError(ValueError):
    """What is wrong with a header."""


class Message(NamedTuple):
    """A message's header, and where its body lies."""

    kind: int
    """Which of the kinds of message."""
    body: int
    """First byte of the body in the file."""
    body_nbytes: int
    """Bytes of the body."""
    rows: int = 0
    """Rows of a batch."""
    nodes: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
    """Length and null count of each array of a batch, depth first."""
    buffers: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
    """First byte in the body and length of each buffer of a batch."""
    codec: str = ""
    """What compressed the buffers, if anything did."""
    dictionary: int = 0
    """Number of the dictionary that a dictionary batch belongs to."""
    delta: bool = False
    """Whether a dictionary batch adds to those before it."""
    data: bytes = b""
    """The FlatBuffer of a batch."""
    places: tuple[int, int] = (0, 0)
    """Where in it the length of the body and the list of buffers stand."""

    def moved(self, buffers: npt.NDArray[np.int64], body_nbytes: int) -> bytes:
        """Return the header of the same batch with its buffers elsewhere, as it stands before a body."""
        data = bytearray(self.data.ljust(-(-len(self.data) // 8) * 8, b"\0"))
        struct.pack_into("<q", data, self.places[0], body_nbytes)
        np.frombuffer(data, "<i8", buffers.size, self.places[1])[:] = buffers.ravel()
        return _CONTINUATION + len(data).to_bytes(4, "little") + bytes(data)


class FlatBuffer:
    """The bytes of a FlatBuffer. Whatever leads out of them is an error."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def number(self, format: str, at: int) -> int:
        """Return one number."""
        if at < 0:
            raise DamagedError("a header that points outside of itself")
        try:
            return int(struct.unpack_from(format, self._data, at)[0])
        except struct.error:
            raise DamagedError("a header that points outside of itself") from None

    def root(self) -> int:
        """Return where the root table begins."""
        return self.follow(0)

    def follow(self, at: int) -> int:
        """Return where an offset leads."""
        return at + self.number("<I", at)

    def field(self, table: int, slot: int) -> int:
        """Return where a field of a table begins; 0 if it is left out."""
        entries = table - self.number("<i", table)
        if 4 + 2 * slot >= self.number("<H", entries):
            return 0
        offset = self.number("<H", entries + 4 + 2 * slot)
        return table + offset if offset else 0

    def value(self, table: int, slot: int, format: str, default: int = 0) -> int:
        """Return a number that is a field of a table."""
        at = self.field(table, slot)
        return self.number(format, at) if at else default

    def vector(self, table: int, slot: int) -> int:
        """Return where the first item of a vector that is a field of a table begins; 0 if it is left out."""
        at = self.field(table, slot)
        return self.follow(at) + 4 if at else 0

    def structs(self, table: int, slot: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        """Return a vector of structs that is a field of a table."""
        at = self.field(table, slot)
        if not at:
            return np.empty(0, dtype)
        at = self.follow(at)
        count = self.number("<I", at)
        if at + 4 + count * dtype.itemsize > len(self._data):
            raise DamagedError("a header that points outside of itself")
        return np.frombuffer(self._data, dtype, count, at + 4)

    def tables(self, table: int, slot: int) -> list[int]:
        """Return where the tables of a vector that is a field of a table begin."""
        at = self.field(table, slot)
        if not at:
            return []
        at = self.follow(at)
        count = self.number("<I", at)
        if at + 4 + 4 * count > len(self._data):
            raise DamagedError("a header that points outside of itself")
        return [self.follow(at + 4 + 4 * i) for i in range(count)]


_PAIR = np.dtype([("a", "<i8"), ("b", "<i8")])
_BLOCK = np.dtype([("offset", "<i8"), ("header", "<i4"), ("pad", "<i4"), ("body", "<i8")])


def header_span(data: bytes, at: int = 0) -> tuple[int, int]:
    """Return where the header that begins at ``at`` has its FlatBuffer, and how long that is; 0 at a stream's end."""
    if len(data) < at + 4:
        raise DamagedError("a header that is cut")
    if data[at : at + 4] == _CONTINUATION:
        if len(data) < at + 8:
            raise DamagedError("a header that is cut")
        at += 4
    size = int.from_bytes(data[at : at + 4], "little", signed=True)  # before version 0.15, all that there was
    if not 0 <= size <= _MOST_HEADER_NBYTES:
        raise DamagedError(f"a header of {size:,} bytes, expected at most {_MOST_HEADER_NBYTES:,}")
    return at + 4, size


def _parse_message(data: bytes, body: int) -> Message:
    """Parse the FlatBuffer of a message whose body begins at byte ``body`` of the file."""
    flat = FlatBuffer(data)
    message = flat.root()
    kind, body_nbytes = flat.value(message, 1, "<B"), flat.value(message, 3, "<q")
    if body_nbytes < 0:
        raise DamagedError(f"a message of {body_nbytes:,} bytes")
    if kind not in (DICTIONARY, BATCH):
        return Message(kind, body, body_nbytes)
    number, delta = 0, False
    batch = flat.follow(flat.field(message, 2))
    if kind == DICTIONARY:
        number, delta = flat.value(batch, 0, "<q"), bool(flat.value(batch, 2, "<B"))
        batch = flat.follow(flat.field(batch, 1))
    rows = flat.value(batch, 0, "<q")
    nodes = flat.structs(batch, 1, _PAIR).view("<i8").reshape(-1, 2)
    buffers = flat.structs(batch, 2, _PAIR).view("<i8").reshape(-1, 2)
    codec = ""
    compression = flat.field(batch, 3)
    if compression:
        compression = flat.follow(compression)
        which, method = flat.value(compression, 0, "<b"), flat.value(compression, 1, "<b")
        if which not in (0, 1) or method:
            raise DamagedError(f"buffers compressed by an unknown codec ({which}, {method})")
        codec = _CODECS[which]
    if rows < 0 or (nodes < 0).any() or (buffers < 0).any() or (buffers > body_nbytes - buffers[:, ::-1]).any():
        raise DamagedError("a batch whose buffers do not fit its body")
    places = (flat.field(message, 3), flat.vector(batch, 2))
    return Message(kind, body, body_nbytes, rows, nodes, buffers, codec, number, delta, data, places)


_Steps: TypeAlias = Generator[list[tuple[int, int]], list[bytes], None]
"""Yields what must be read, first byte and length, and is sent what was read."""


class Scan:
    """The headers of one file as they are found, one read after another: the reads of many files go together."""

    def __init__(self, path: str, size: int, head: bytes, step_nbytes: int) -> None:
        self.path = path
        self.size = size
        self.step_nbytes = step_nbytes
        self.schema = b""
        self.footer = b""
        self.messages: list[Message] = []
        self.nbytes = 0
        self.fault: Fault | None = None
        self._steps = self._file(head) if head.startswith(MAGIC) else self._stream(head)

    def advance(self, answers: list[bytes] | None) -> list[tuple[int, int]]:
        """Return what must be read next, given what was read last; nothing if all is known."""
        try:
            return next(self._steps) if answers is None else self._steps.send(answers)
        except StopIteration:
            return []
        except DamagedError as exc:
            self.fault = Fault(self.path, f"has {exc}")
            return []

    def _file(self, head: bytes) -> _Steps:
        """Read a file: from its footer to the header of each batch."""
        start, size = header_span(head, 8)
        need = start + size
        tail_nbytes = min(self.size, self.step_nbytes)
        reads = [(self.size - tail_nbytes, tail_nbytes)]
        if need > len(head):
            reads.append((0, need))
        tail, *longer = yield reads
        self.schema = (longer[0] if longer else head)[8:need]
        if tail[-6:] != MAGIC:
            raise DamagedError(
                f"{tail[-6:]!r} at its end, expected {MAGIC!r}: it is cut, or its writer never closed it"
            )
        size = int.from_bytes(tail[-10:-6], "little", signed=True)
        if not 0 < size <= min(_MOST_HEADER_NBYTES, self.size - _TAIL_NBYTES):
            raise DamagedError(f"a footer of {size:,} bytes, in a file of {self.size:,}")
        if size + _TAIL_NBYTES > len(tail):
            (tail,) = yield [(self.size - size - _TAIL_NBYTES, size + _TAIL_NBYTES)]
        if not _is_schema(self.schema):  # polars writes it without the length that must stand before it
            self.schema, self.footer = b"", tail[-size - _TAIL_NBYTES :]
        flat = FlatBuffer(tail[-size - _TAIL_NBYTES : -_TAIL_NBYTES])
        table = flat.root()
        blocks = np.concatenate([flat.structs(table, 2, _BLOCK), flat.structs(table, 3, _BLOCK)])
        end = self.size - size - _TAIL_NBYTES
        for block in blocks:
            if not 0 < block["header"] <= _MOST_HEADER_NBYTES or not 8 <= block["offset"] <= end - block["header"]:
                raise DamagedError("a footer that points outside of the file")
        headers = yield [(int(block["offset"]), int(block["header"])) for block in blocks]
        for block, data in zip(blocks.tolist(), headers, strict=True):
            start, size = header_span(data)
            self._add(data[start : start + size], block[0] + block[1], end)

    def _stream(self, head: bytes) -> _Steps:
        """Read a stream: from each message to the next."""
        at, data, begin = 0, head, 0
        while True:
            if len(data) < at - begin + 8 and begin + len(data) < self.size:
                (data,), begin = (yield [(at, self.step_nbytes)]), at
            if at - begin + 4 > len(data):
                raise DamagedError("no end-of-stream mark: it is cut, or its writer never closed it")
            start, size = header_span(data, at - begin)
            if not size:
                if begin + start < self.size:
                    raise DamagedError(f"bytes behind the end-of-stream mark, from byte {begin + start:,} on")
                return
            if begin + start + size > self.size:
                raise DamagedError("a header that is cut: the file is truncated")
            if start + size > len(data):
                (data,), begin = (yield [(at, start + size - (at - begin))]), at
                start, size = header_span(data)
            body = begin + start + size
            if not self.schema:
                self.schema = data[at - begin : start + size]
                at = body
            else:
                at = body + self._add(data[start : start + size], body, self.size)

    def _add(self, data: bytes, body: int, end: int) -> int:
        """Note a message; return the bytes of its body."""
        message = _parse_message(data, body)
        if body + message.body_nbytes > end:
            raise DamagedError(
                f"a message of {message.body_nbytes:,} bytes at byte {body:,}, and ends before: it is truncated"
            )
        self.messages.append(message)
        self.nbytes += 500 + len(message.data)
        return message.body_nbytes


def scan_headers(paths: Sequence[str], storage: Storage) -> list[tuple[Stamp, Scan | Fault]]:
    """Return stamp and headers of each file, or what is wrong; read for all files together."""
    heads = storage.heads(paths, _HEAD_NBYTES)
    scans: list[Scan | Fault] = []
    for path, (data, stamp, error) in zip(paths, heads, strict=True):
        if error is not None:
            scans.append(Fault(path, f"cannot be read: {error.strerror or error}", error))
        elif data.startswith(b"FEA1"):
            scans.append(Fault(path, "is Feather version 1, expected version 2 (write it again with a later pyarrow)"))
        elif (
            (data.startswith(MAGIC) and stamp.size >= 8 + _TAIL_NBYTES)
            or data.startswith(_CONTINUATION)
            or _is_old_stream(data)
        ):
            scans.append(Scan(path, stamp.size, data, storage.gap_nbytes))
        else:
            what = f"begins with {data[:8]!r}" if data else "is empty"
            scans.append(Fault(path, f"{what}, expected an Arrow file ({MAGIC!r}) or stream ({_CONTINUATION!r})"))
    answers: dict[int, list[bytes] | None] = {i: None for i, scan in enumerate(scans) if isinstance(scan, Scan)}
    while answers:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for i, answer in answers.items():
            scan = scans[i]
            assert isinstance(scan, Scan)
            reads = scan.advance(answer)
            if reads:
                wanted[i] = reads
        found = iter(storage.fetch([(paths[i], *read) for i, reads in wanted.items() for read in reads]))
        answers = {i: [next(found) for _ in reads] for i, reads in wanted.items()}
    return [
        (head.stamp, scan if isinstance(scan, Fault) else scan.fault or scan)
        for scan, head in zip(scans, heads, strict=True)
    ]


def _is_schema(data: bytes) -> bool:
    """Return whether this is a message that holds a schema, the bytes before its FlatBuffer included."""
    try:
        start, size = header_span(data)
        flat = FlatBuffer(data[start : start + size])
        return flat.value(flat.root(), 1, "<B") == SCHEMA
    except DamagedError:
        return False


def _is_old_stream(data: bytes) -> bool:
    """Return whether a file begins like a stream of before version 0.15: with the length of a schema's FlatBuffer."""
    size = int.from_bytes(data[:4], "little")
    if not 16 <= size <= _HEAD_NBYTES or len(data) < 4 + size or size % 4:
        return False
    flat = FlatBuffer(data[4 : 4 + size])
    try:
        return flat.value(flat.root(), 1, "<B") == SCHEMA
    except DamagedError:
        return False
