"""Numbers, names and selections in words, fit to be shown: no secrets, no escape codes."""

import re
import textwrap

from lazyshards.selection import Cell, Rows, Selection

__all__ = [
    "cell_texts",
    "count_text",
    "folded",
    "hide_secrets",
    "is_all",
    "one_line",
    "plural",
    "printable",
    "rate_text",
    "rows_text",
    "seconds_text",
    "size_text",
]

_WIDTH = 100
"""Columns of a terminal that texts fit."""


def size_text(nbytes: int) -> str:
    """Return a number of bytes for a person.

    Parameters
    ----------
    nbytes : int

    Examples
    --------
    >>> size_text(999), size_text(128_000), size_text(5 << 30)
    ('999 B', '125.0 KiB', '5.0 GiB')
    """
    if nbytes < 1024:
        return f"{nbytes:,} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} EiB"


def folded(text: str, indent: int) -> str:
    """Return a text in lines of at most 100 columns, so that terminals do not break them; long words stay whole.

    Parameters
    ----------
    text : str
        Whose first line is not indented here.
    indent : int
        Columns before each of the lines.

    Examples
    --------
    >>> print("note  " + folded("much to say " * 9, 6))
    note  much to say much to say much to say much to say much to say much to say much to say much to
          say much to say
    """
    lines = textwrap.wrap(text, _WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


def count_text(count: int, noun: str) -> str:
    """Return a number of things in few characters.

    Parameters
    ----------
    count : int
    noun : str

    Examples
    --------
    >>> count_text(1, "tile"), count_text(99_999, "row"), count_text(1_234_567, "shard")
    ('1 tile', '99,999 rows', '1.23 M shards')
    """
    if count < 1_000_000:
        return plural(count, noun)
    unit = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:,.2f} {'  MGT'[unit]} {noun}s"


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]*")


def hide_secrets(text: str) -> str:
    """Return the text with the user, password and query of every URL in it replaced by ``***``.

    Parameters
    ----------
    text : str
        A path, a URL or a message; what is no URL is returned as it is.

    Examples
    --------
    >>> hide_secrets("'s3://key:secret@bucket/a.npy' and 'https://host/a.npy?signature=abc'")
    "'s3://***@bucket/a.npy' and 'https://host/a.npy?***'"
    """
    return _URL.sub(lambda match: _hide(match[0]), text) if "://" in text else text


def _hide(url: str) -> str:
    scheme, _, rest = url.partition("://")
    rest, query, _ = rest.partition("?")
    place, slash, path = rest.partition("/")
    # A password that was not escaped may hold a slash: then what stands before it is no host and port.
    if "@" not in place and "@" in path and not re.fullmatch(r"[^:]*(:\d*)?|\[.*\](:\d*)?", place):
        place, slash, path = rest.rpartition("@")[0] + "@", "", rest.rpartition("@")[2]
    if "@" in place:
        place = "***@" + place.rpartition("@")[2]
    return f"{scheme}://{place}{slash}{path}{'?***' if query else ''}"


def printable(text: str) -> str:
    """Return the text with everything that could not be printed, or would move the cursor, as an escape.

    Parameters
    ----------
    text : str
        A path; names of files may hold line feeds, and bytes that are no text.
    """
    if text.isprintable():
        return text
    return "".join(
        [c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text]
    )


def plural(count: int, noun: str) -> str:
    """Return a number of things."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _span(positions: range, size: int) -> str:
    """Return which of ``size`` positions a range keeps; the second number is the first that is not kept."""
    if not positions:
        return f"none of {size:,}"
    low, high = min(positions[0], positions[-1]), max(positions[0], positions[-1])
    text = f"{low:,} to {high + 1:,} of {size:,}"
    step = abs(positions.step)
    if len(positions) > 1 and step > 1:
        suffix = "th" if step % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
        text += f", every {step:,}{suffix}"
    if len(positions) > 1 and positions.step < 0:
        text += ", backwards"
    return text


def is_all(rows: Rows, total: int) -> bool:
    """Return whether these are all rows, in order."""
    return isinstance(rows, range) and rows == range(total)


def rows_text(selection: Selection, total: int) -> str:
    """Return what is selected of the rows."""
    rows = selection.rows
    if selection.scalar:
        return f"row {int(rows[0]):,} of {total:,}, its axis dropped"
    if is_all(rows, total):
        return f"all {plural(total, 'row')}"
    if not len(rows):
        return f"no rows of {total:,}"
    if isinstance(rows, range):
        return f"rows {_span(rows, total)}"
    return f"{plural(len(rows), 'row')} by index, between {int(rows.min()):,} and {int(rows.max()):,} of {total:,}"


def cell_texts(cell: Cell, row_shape: tuple[int, ...]) -> list[str]:
    """Return what is selected of each axis of a row that is not kept whole; axes are numbered as in the shards."""
    texts = []
    for axis, (kept, size) in enumerate(zip(cell, row_shape, strict=True), 1):
        if isinstance(kept, int):
            texts.append(f"axis {axis} at {kept:,} of {size:,}, dropped")
        elif kept != range(size):
            texts.append(f"axis {axis}: {_span(kept, size)}")
    return texts


def one_line(text: str) -> str:
    """Return a message on one line, without secrets."""
    return " ".join(hide_secrets(text).split())


def seconds_text(seconds: float) -> str:
    """Return a time for a person.

    Parameters
    ----------
    seconds : float

    Examples
    --------
    >>> seconds_text(0.00004), seconds_text(0.0125), seconds_text(2.5), seconds_text(200)
    ('40 us', '12.5 ms', '2.50 s', '200 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def rate_text(nbytes: int, seconds: float) -> str:
    """Return bytes a second for a person; empty if either is nothing.

    Parameters
    ----------
    nbytes : int
    seconds : float

    Examples
    --------
    >>> rate_text(3 << 30, 1.5)
    '2.0 GiB/s'
    """
    return f"{size_text(round(nbytes / seconds))}/s" if nbytes and seconds > 0 else ""
