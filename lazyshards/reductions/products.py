"""Gram and covariance matrices of the columns of blocks."""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lazyshards.display import title_text
from lazyshards.engines.ranks import is_first_rank
from lazyshards.errors import UnsupportedDtypeError
from lazyshards.layout import Layout
from lazyshards.progress import progress_bar
from lazyshards.reductions.blocks import View, plan_blocks
from lazyshards.reductions.reducers import Reducer, Unsettled, Values, accumulator
from lazyshards.reductions.running import reduce_blocks, settled, told

__all__ = ["Covariance", "Gram", "Spread", "find_covariance", "find_gram"]

_EXACT = 1 << 53
"""Integers up to which float64 has every one."""


@dataclass(frozen=True, slots=True)
class Gram(Unsettled[Values]):
    """The products of all pairs of columns, added up over the rows."""

    dtype: np.dtype[np.generic]
    """Of the result."""

    def partial(self, block: Values, first: int) -> Values:
        """Return those of a block."""
        if self.dtype.kind in "iu":
            return self._of_integers(block)
        rows = block.astype(accumulator(self.dtype), copy=False)
        product: Values = rows.conj().T @ rows if rows.dtype.kind == "c" else rows.T @ rows
        return product

    def _of_integers(self, block: Values) -> Values:
        """Return them exactly; in float64, which is many times as fast, where no sum can leave what it holds."""
        most = max(abs(int(block.max())), abs(int(block.min())))
        if most * most * len(block) <= _EXACT:
            real = block.astype(np.float64)
            return (real.T @ real).astype(self.dtype)
        rows = block.astype(self.dtype, copy=False)
        product: Values = rows.T @ rows
        return product

    def merge(self, left: Values, right: Values) -> Values:
        """Return those of both."""
        return np.asarray(left + right)

    def finish(self, state: Values) -> Values:
        """Return them in the type of the result."""
        return state.astype(self.dtype)


class Spread(NamedTuple):
    """What is known of rows: how many, the sum of each column, and the products of what they differ from the mean."""

    rows: int
    total: Values
    products: Values


@dataclass(frozen=True, slots=True)
class Covariance(Unsettled[Spread]):
    """The covariance of all pairs of columns, merged as variances are."""

    dtype: np.dtype[np.generic]
    """In which it is worked on: float64 at least."""
    ddof: float

    def partial(self, block: Values, first: int) -> Spread:
        """Return the spread of a block."""
        total = np.add.reduce(block, axis=0, dtype=self.dtype)
        rest = np.subtract(block, total / len(block), dtype=self.dtype)
        # As numpy.cov has it, the second of a pair is the conjugate one.
        return Spread(len(block), total, rest.T @ rest.conj() if self.dtype.kind == "c" else rest.T @ rest)

    def merge(self, left: Spread, right: Spread) -> Spread:
        """Return the spread of both."""
        rows = left.rows + right.rows
        apart = right.total / right.rows - left.total / left.rows
        between = np.multiply.outer(apart, apart.conj())
        between *= left.rows / rows * right.rows
        return Spread(rows, left.total + right.total, left.products + right.products + between)

    def finish(self, state: Spread) -> Values:
        """Return the covariances, with NumPy's warning if there are too few rows."""
        freedom = state.rows - self.ddof
        if freedom <= 0:
            warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
            freedom = 0.0
        return np.true_divide(state.products, freedom)


def find_covariance(view: View, ddof: float, progress: bool) -> Any:
    """Return what ``numpy.cov`` would, rows being observations."""
    if view.selection.scalar or len(view.shape) not in (1, 2):
        raise ValueError(f"cov of shape {view.shape}: expected rows of one axis, the columns, or of none")
    _check_numbers(view, "covariance")
    dtype = accumulator(np.result_type(view.dtype, np.float64))
    if not view.size:
        return told(np.asarray(np.cov(np.empty(view.shape, view.dtype), rowvar=False, ddof=ddof)))
    # Of one column, NumPy gives a number.
    return told(_find(view, Covariance(dtype, ddof), "cov", progress).squeeze())


def find_gram(view: View, dtype: Any, progress: bool) -> Any:
    """Return the product of the transposed, conjugated columns and the columns."""
    if view.selection.scalar or len(view.shape) != 2:
        raise ValueError(f"gram of shape {view.shape}: expected rows of one axis, the columns")
    _check_numbers(view, "Gram matrix")
    # Products are added up, as sums are, in NumPy's type of a sum.
    target = np.add.reduce(np.zeros(1, view.dtype), dtype=dtype).dtype
    if target.kind not in "iufc":
        raise TypeError(f"dtype={dtype!r} of a Gram matrix: expected numbers")
    if not view.size:
        return np.zeros((view.shape[1],) * 2, target)
    return told(_find(view, Gram(target), "gram", progress))


def _check_numbers(view: View, what: str) -> None:
    if view.dtype.kind not in "biufc":
        raise UnsupportedDtypeError(f"no {what} of {view.dtype} can be found: expected numbers or booleans")


def _find(view: View, reducer: Reducer[Any], name: str, progress: bool) -> Values:
    def look(layout: Layout) -> Values:
        plan = plan_blocks(layout, view.selection)
        with progress_bar(
            len(plan.read.rows), f"{name} of {title_text(layout, view.selection)}", shown=progress and is_first_rank()
        ) as bar:
            return reduce_blocks(plan, reducer, view.engine, bar.update)

    return settled(view, look, what=f"the {name} of {len(view.selection.rows):,} rows", is_exact=False)
