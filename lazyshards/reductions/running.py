"""How a view is reduced: NumPy says what the result must be, blocks are read once, ranks compare what they found."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lazyshards import catalog
from lazyshards.display import title_text
from lazyshards.engines import wanted_engine
from lazyshards.engines.ranks import (
    Facts,
    from_first,
    is_first_rank,
    is_shared,
    node_count,
    node_id,
    shared_out,
    together,
)
from lazyshards.errors import ShardChangedError
from lazyshards.layout import Layout
from lazyshards.progress import Progress, progress_bar
from lazyshards.reductions.blocks import BlockPlan, Blocks, View, fold, plan_blocks, stream
from lazyshards.reductions.reducers import Reducer, Values

__all__ = ["Axis", "blocks_of", "reduce_blocks", "reduce_state", "reduce_view", "settled", "told"]

S = TypeVar("S")
T = TypeVar("T")

Axis: TypeAlias = int | tuple[int, ...] | None
"""Axes that are reduced, as NumPy has them; None for all."""

SHARED_RUNS = 16
"""Runs of blocks from which ranks share them: fewer are read sooner than results are exchanged."""
_REFRESHES = 3
"""Times that a reduction begins again because a file was replaced while it was read."""


def reduce_view(
    view: View,
    name: str,
    make: Callable[[tuple[int, ...], np.dtype[np.generic]], Reducer[Any]],
    axis: Axis,
    *,
    keepdims: bool = False,
    out: npt.NDArray[Any] | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Return what the function of NumPy of that name would return of the view's array.

    Parameters
    ----------
    view : View
    name : str
        Of the function.
    make : callable
        Takes the axes of a block and the dtype of the result, and returns the reduction.
    axis : int, tuple of int or None
        Axes of the view.
    keepdims : bool
    out : ndarray, optional
        Where the result goes.
    progress : bool
        Whether to show a progress bar.
    **options
        Of the function.
    """
    function = getattr(np, name)
    shape = view.shape
    # What NumPy makes of one element: its dtype, and its errors for a dtype, an axis or an option that it refuses.
    usual = {key: value for key, value in options.items() if key != "ddof"}  # of one element, ddof=1 leaves nothing
    sample = np.asarray(function(np.zeros((1,) * len(shape), view.dtype), axis=axis, keepdims=keepdims, **usual))
    if not view.size:
        result = np.asarray(function(np.empty(shape, view.dtype), axis=axis, keepdims=keepdims, **options))
    else:
        axes = _positions(axis, len(shape))
        ends = tuple([1 if i in axes else size for i, size in enumerate(shape) if keepdims or i not in axes])
        # A block has a row axis, even if the view has none.
        within = tuple([i + view.selection.scalar for i in axes])
        reducer = make(within, sample.dtype)
        result = settled(
            view,
            lambda layout: _reduced(layout, view, reducer, within, sample.dtype, name, progress),
            what=f"the {name} of {len(view.selection.rows):,} rows",
        ).reshape(ends)
    return told(result, out)


def told(result: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> Any:
    """Return a result as NumPy does: one without axes as a scalar, or in ``out``."""
    if out is None:
        return result[()]
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is a {type(out).__name__}, expected a numpy.ndarray, as reductions return")
    if out.shape != result.shape:
        raise ValueError(f"out has shape {out.shape}, expected {result.shape}")
    np.copyto(out, result, casting="same_kind")
    return out


def _positions(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return axes that NumPy took, counted from the first."""
    if axis is None:
        return tuple(range(ndim))
    given: tuple[int, ...] = axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted([int(i) % ndim for i in given])) if ndim else ()


def _reduced(
    layout: Layout,
    view: View,
    reducer: Reducer[Any],
    axes: tuple[int, ...],
    dtype: np.dtype[np.generic],
    name: str,
    progress: bool,
) -> Values:
    """Return the result, reduced axes kept with length 1: one state of all blocks, or each block's own rows."""
    plan = plan_blocks(layout, view.selection, plain=reducer.is_plain)
    with progress_bar(
        len(plan.read.rows), f"{name} of {title_text(layout, view.selection)}", shown=progress and is_first_rank()
    ) as bar:
        if 0 in axes:
            return reduce_blocks(plan, reducer, view.engine, bar.update)
        kept = [1 if i in axes else size for i, size in enumerate(plan.read.shape)]
        result = np.empty(kept, dtype)

        def place(blocks: Blocks) -> None:
            for block, first in blocks:
                count = len(block)
                result[first : first + count] = reducer.finish(reducer.partial(block, first))

        for _ in stream(plan, place, bar.update, lends=True):
            pass
        return result


def reduce_blocks(plan: BlockPlan, reducer: Reducer[S], engine: str | None, progress: Progress | None = None) -> Values:
    """Return the result of all blocks."""
    return reducer.finish(reduce_state(plan, reducer, engine, progress))


def reduce_state(plan: BlockPlan, reducer: Reducer[S], engine: str | None, progress: Progress | None = None) -> S:
    """Return the state of all blocks: those of a run are merged on the thread that read them.

    Where several ranks use the engine, each reads a share of the blocks, and all merge the states of all.

    Parameters
    ----------
    plan : BlockPlan
    reducer : Reducer
    engine : str, optional
        Name of the engine that the dataset was opened with.
    progress : callable, optional
    """

    def reduced(blocks: Blocks) -> S:
        return fold((reducer.partial(block, first) for block, first in blocks), reducer.merge)

    def state_of(runs: range) -> S:
        states = stream(plan, reduced, progress, lends=True, runs=runs)
        return fold(_until_settled(states, reducer), reducer.merge)

    runs = range(plan.read.tile_count)
    # Of shards that may be replaced, each rank looks at all itself, and may begin again on its own.
    refreshes = plan.read.layout.storage.on_change == "refresh"
    if len(runs) < SHARED_RUNS or refreshes or not is_shared(wanted_engine(engine)):
        return state_of(runs)
    groups = _groups(runs, node_count())
    first, stop = [len(groups) * rank // node_count() for rank in (node_id(), node_id() + 1)]
    shares = shared_out(lambda: [state_of(group) for group in groups[first:stop]])
    if progress is not None:
        tiles = plan.read.tiles
        others = [tile for group in (*groups[:first], *groups[stop:]) for tile in tiles[group.start : group.stop]]
        progress(sum([tile.stop - tile.start for tile in others]))
    return fold([state for share in shares for state in share], reducer.merge)


def _groups(runs: range, ranks: int) -> list[range]:
    """Return runs in groups of a power of two, a few for each rank: then merging the groups changes no bits.

    Examples
    --------
    >>> _groups(range(11), 1)
    [range(0, 4), range(4, 8), range(8, 11)]
    """
    size = 1 << max(0, -(-len(runs) // (4 * ranks)) - 1).bit_length()
    return [runs[start : start + size] for start in range(0, len(runs), size)]


def _until_settled(states: Iterable[S], reducer: Reducer[S]) -> Iterator[S]:
    for state in states:
        yield state
        if reducer.is_settled(state):
            return


def settled(
    view: View,
    work: Callable[[Layout], T],
    *,
    what: str,
    facts: Callable[[T], Facts] | None = None,
    is_exact: bool = True,
) -> T:
    """Return what ``work`` finds in the shards as they are, the same on every rank, or raise on all of them.

    Where ``work`` deals nothing out, every rank of a Legate run reads all blocks itself.

    Parameters
    ----------
    view : View
    work : callable
        Takes the layout; called again, with ``on_change="refresh"``, if a file was replaced meanwhile.
    what : str
        What is found, for the error.
    facts : callable, optional
        Returns what must be the same of it; by default its bytes, if pickled.
    is_exact : bool
        Whether it has the same bits on every processor, as what BLAS gives has not. Where it has not, and where rows go
        through functions, whose code also differs from one processor to the next, the first rank's goes for all.
    """
    engine = wanted_engine(view.engine)
    if facts is None and (view.layout.maps or not is_exact):
        found = together(lambda: _fresh(view.layout, work), lambda _: {}, engine, what=what)
        return cast("T", from_first(found)) if is_shared(engine) else found
    return together(lambda: _fresh(view.layout, work), facts or _digest, engine, what=what)


def _fresh(layout: Layout, work: Callable[[Layout], T]) -> T:
    if layout.storage.on_change != "refresh":
        return work(layout)
    for left in reversed(range(_REFRESHES)):
        layout = catalog.refreshed(layout)
        try:
            return work(layout)
        except ShardChangedError:
            if not left:
                raise
    raise AssertionError("it returned or raised before")


def _digest(result: object) -> dict[str, object]:
    return {"result": blake2b(pickle.dumps(result, protocol=5), digest_size=16).hexdigest()}


def blocks_of(view: View) -> BlockPlan:
    """Return the blocks in which a view is reduced."""
    return plan_blocks(view.layout, view.selection)
