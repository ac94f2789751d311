"""The keyword arguments of ``open_shards`` that several formats take, checked."""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["check_options", "is_count", "name_option", "row_shape_option"]

_COMMON = ("dtype", "engine", "format", "holes", "manifest", "on_change", "order", "reader", "storage_options")
"""What ``open_shards`` takes for every format."""


def check_options(options: Mapping[str, object], format: str, known: Sequence[str]) -> None:
    """Raise TypeError for an option that a format does not take.

    Examples
    --------
    >>> check_options({"key": "a"}, "npz", ("member",))
    Traceback (most recent call last):
        ...
    TypeError: the npz format takes no option 'key': it takes member
    """
    for option in options:
        if option not in known:
            *others, last = known or ("none of its own",)
            taken = f"{', '.join(others)} and {last}" if others else last
            close = difflib.get_close_matches(option, (*known, *_COMMON), 1)
            meant = f"; did you mean {close[0]}=?" if close else ""
            raise TypeError(f"the {format} format takes no option {option!r}: it takes {taken}{meant}")


def name_option(options: Mapping[str, object], option: str) -> str | None:
    """Return an option that is a name, or None; TypeError if it is something else."""
    name = options.get(option)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{option}={name!r} is not a name: expected a text")
    return name


def row_shape_option(value: object) -> tuple[int, ...]:
    """Return the shape that ``row_shape=`` gives; one integer is a shape of one axis. TypeError if it gives none."""
    shape = (value,) if is_count(value) else value
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not all(is_count(size) for size in shape):
        raise TypeError(f"row_shape={value!r} is not a shape: expected a tuple of integers, 0 or more")
    return tuple(map(int, shape))


def is_count(value: object) -> bool:
    """Return whether a value is an integer, 0 or more."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)
