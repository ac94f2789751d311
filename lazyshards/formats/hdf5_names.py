"""Names in HDF5 files: what they lead to, which there are, and which a pattern matches.

Links are followed here and not by the library, which would open another file for an external link without asking.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from typing import Any, NamedTuple

from lazyshards.formats.hdf5_library import H5File, RefusedError, as_text, encode, h5py

__all__ = [
    "Elsewhere",
    "array_names",
    "describe_names",
    "find_dataset",
    "matching_names",
]

_MOST_NAMES = 11
"""Arrays of a file that are looked for, where it is asked which there are."""
_MOST_LINKS = 64
"""Links that are followed for one name: more are a circle."""
_NUMBER = re.compile(r"(\d+)")


class Elsewhere(NamedTuple):
    """Where an external link points."""

    file: str
    """The file, as the link has it."""
    name: str
    """The object in it."""


def array_names(file: H5File) -> list[str]:
    """Return the names of the file's arrays, a few of them: datasets with at least one axis. Links are not followed."""
    library = h5py()
    found: list[str] = []

    def look(name: bytes) -> bool | None:
        if library.h5o.get_info(file.id, name).type != library.h5o.TYPE_DATASET:
            return None
        if library.h5d.open(file.id, name).get_space().get_simple_extent_ndims():
            found.append(as_text(name))
        return len(found) == _MOST_NAMES or None

    library.h5o.visit(file.id, look)
    return found


def matching_names(file: H5File, pattern: str) -> list[str]:
    """Return the names that a pattern matches, in natural order; groups are left out.

    A name that exists is literal, whatever characters it holds.

    Raises
    ------
    RefusedError
        If there is none, or a number is missing from those that there are.
    """
    parts = [part for part in pattern.split("/") if part]
    names = [""]
    for part in parts:
        found = []
        for name in names:
            group = _find_object(file, name)
            # Nothing is matched beyond an external link: what is there belongs to another file.
            if isinstance(group, Elsewhere) or not _is_group(group[0]):
                continue
            members: Any = group[0]
            inside = [as_text(item) for item in members]
            matches = [part] if part in inside else sorted(filter(_matcher(part), inside), key=_natural)
            found += [f"{name}/{match}" if name else match for match in matches]
        names = found
    arrays = [name for name in names if not _leads_to_group(file, name)]
    if not arrays:
        raise RefusedError(f"has no dataset that matches {pattern!r}{_others(file)}")
    _check_numbers(arrays, pattern)
    return arrays


def _matcher(part: str) -> Callable[[str], bool]:
    expression = re.compile(translate(part))
    return lambda name: expression.match(name) is not None


def _natural(name: str) -> tuple[list[int | str], str]:
    """Return a sort key by which numbers in a name compare as numbers."""
    return [int(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(name))], name


def _leads_to_group(file: H5File, name: str) -> bool:
    try:
        found = _find_object(file, name)
    except RefusedError:  # a link to nothing: whoever describes it says so
        return False
    return not isinstance(found, Elsewhere) and _is_group(found[0])


def _check_numbers(names: Sequence[str], pattern: str) -> None:
    """Raise RefusedError if one number tells the names apart and skips some."""
    split = [_NUMBER.split(name) for name in names]
    if len({len(parts) for parts in split}) > 1:
        return
    columns = [i for i, column in enumerate(zip(*split, strict=True)) if len(set(column)) > 1]
    if len(columns) != 1 or columns[0] % 2 == 0:
        return
    (column,) = columns
    numbers = {int(parts[column]) for parts in split}
    low, high = min(numbers), max(numbers)
    if len(numbers) < high - low + 1:
        missing = next(number for number in range(low, high) if number not in numbers)
        raise RefusedError(
            f"has a hole in the datasets that match {pattern!r}: number {missing} is missing of {low} to {high}; if "
            "that is how it should be, list the names: dataset=[...]"
        )


def _find_object(file: H5File, name: str) -> tuple[Any, str] | Elsewhere:
    """Return the group, dataset or type that a name leads to, with its plain name, or where an external link points.

    The library would follow external links without asking, so links are followed here, one by one.

    Raises
    ------
    RefusedError
        If there is no such name.
    """
    library = h5py()
    wanted = [part for part in name.split("/") if part not in ("", ".")]
    walked: list[str] = []
    found = library.h5g.open(file.id, b"/")
    links = 0
    while wanted:
        part = wanted.pop(0)
        if not isinstance(found, library.h5g.GroupID):
            raise RefusedError(f"has no {name!r}: {'/'.join(walked)!r} is no group")
        if not found.links.exists(encode(part)):
            raise RefusedError(f"has no dataset {name!r}{_others(file)}")
        kind = found.links.get_info(encode(part)).type
        if kind == library.h5l.TYPE_HARD:
            found = library.h5o.open(found, encode(part))
            walked.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise RefusedError(f"has no dataset {name!r}: its links go in a circle")
        if kind == library.h5l.TYPE_SOFT:
            target = as_text(found.links.get_val(encode(part)))
            wanted = [*([] if target.startswith("/") else walked), *target.split("/"), *wanted]
            wanted = [item for item in wanted if item not in ("", ".")]
            walked, found = [], library.h5g.open(file.id, b"/")
        elif kind == library.h5l.TYPE_EXTERNAL:
            other, target = map(as_text, found.links.get_val(encode(part)))
            return Elsewhere(other, "/".join([target, *wanted]))
        else:
            raise RefusedError(f"has a link of a kind of its own on the way to {name!r}, which is not followed")
    return found, "/".join(walked)


def _is_group(found: object) -> bool:
    """Return whether what was found is a group."""
    return isinstance(found, h5py().h5g.GroupID)


def find_dataset(file: H5File, name: str) -> tuple[Any, str] | Elsewhere:
    """Return the dataset that a name leads to, with its plain name, or where an external link on the way points.

    Raises
    ------
    RefusedError
        If there is nothing of that name, or no dataset.
    """
    found = _find_object(file, name)
    if isinstance(found, Elsewhere) or isinstance(found[0], h5py().h5d.DatasetID):
        return found
    what = "a group" if _is_group(found[0]) else "a named type"
    raise RefusedError(f"has {what} of the name {name!r}, expected a dataset{_others(file)}")


def _others(file: H5File) -> str:
    names = array_names(file)
    return f"; {describe_names(file, names)}" if names else "; the file holds no array"


def describe_names(file: H5File, names: Sequence[str]) -> str:
    """Return a list of arrays for a message."""
    shown = [_describe(file, name) for name in names[: _MOST_NAMES - 1]]
    return f"it holds {', '.join(shown)}{' and more' if len(names) == _MOST_NAMES else ''}"


def _describe(file: H5File, name: str) -> str:
    dataset = file.dataset(name)
    try:
        dtype = str(dataset.dtype)
    except (TypeError, ValueError):
        dtype = "of a type that NumPy does not have"
    return f"{name!r} {dataset.shape} {dtype}"
