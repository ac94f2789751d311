"""Functions of a user's own, called with the blocks of a view."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from lazyshards import catalog
from lazyshards.display import title_text
from lazyshards.engines.ranks import is_first_rank
from lazyshards.layout import Layout
from lazyshards.progress import progress_bar
from lazyshards.reductions.blocks import Block, Blocks, View, fold, plan_blocks, stream
from lazyshards.reductions.running import settled

__all__ = ["map_blocks", "reduce_rows"]

T = TypeVar("T")

OWN_ELEMENTS = 1 << 19
"""Elements of a block that a function of the user's is given."""


def map_blocks(view: View, function: Callable[[Block], T], progress: bool) -> Iterator[T]:
    """Return an iterator of what ``function`` makes of each block, called where it is asked for, in order."""
    _check(view, "map_blocks", function)
    return _mapped(view, function, progress)


def _mapped(view: View, function: Callable[[Block], T], progress: bool) -> Iterator[T]:
    layout = view.layout if view.layout.storage.on_change != "refresh" else catalog.refreshed(view.layout)
    plan = plan_blocks(layout, view.selection, elements=OWN_ELEMENTS)
    with progress_bar(
        len(plan.read.rows), f"map_blocks of {title_text(layout, view.selection)}", shown=progress and is_first_rank()
    ) as bar:
        for blocks in stream(plan, lambda blocks: [block for block, _ in blocks], bar.update, keeps=True):
            for block in blocks:
                yield function(block)


def reduce_rows(view: View, function: Callable[[Block], T], combine: Callable[[T, T], T], progress: bool) -> T:
    """Return what ``combine`` makes of what ``function`` makes of each block."""
    _check(view, "reduce", function, combine)
    if not view.size:
        return function(np.empty(view.shape, view.dtype))

    def look(layout: Layout) -> T:
        plan = plan_blocks(layout, view.selection, elements=OWN_ELEMENTS)

        def reduced(blocks: Blocks) -> T:
            return fold((function(block) for block, _ in blocks), combine)

        with progress_bar(
            len(plan.read.rows), f"reduce of {title_text(layout, view.selection)}", shown=progress and is_first_rank()
        ) as bar:
            return fold(stream(plan, reduced, bar.update, keeps=True), combine)

    # What a user's function returns need not be the same bytes where it is the same.
    return settled(view, look, what=f"a reduction of {len(view.selection.rows):,} rows", facts=lambda _: {})


def _check(view: View, name: str, *functions: Callable[..., Any]) -> None:
    if view.selection.scalar:
        raise TypeError(f"{name} of a single row: index the row axis with a slice, such as ds[5:6]")
    for function in functions:
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called: expected a function")
