"""The reductions as methods of a lazy view: what NumPy's arrays have under the same names."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshards.layout import Layout
from lazyshards.reductions import running
from lazyshards.reductions.blocks import BlockPlan, View
from lazyshards.reductions.extremes import Extreme, PlaceOfExtreme
from lazyshards.reductions.running import Axis
from lazyshards.reductions.sums import Mean, Sum, Variance
from lazyshards.reductions.truths import Nonzero, Truth
from lazyshards.selection import Selection

__all__ = ["Reducible"]

Out: TypeAlias = npt.NDArray[Any] | None


class Reducible:
    """A lazy view that is reduced without holding it in memory.

    Rows are read ahead on threads, reduced there block by block, and forgotten. Every reduction reads each row once,
    unless it says otherwise. How many rows a block has depends on the shape of a row only, and what blocks give is
    merged in their order, so that results have the same bits whatever the number of processors. Results are NumPy's
    arrays and scalars, of NumPy's shape and dtype, whatever the engine; floating ones are added up in float64 at least.
    Every rank of a Legate run finds the same.
    """

    __slots__ = ()

    _layout: Layout
    _selection: Selection
    _engine: str | None

    def _view(self) -> View:
        return View(self._layout, self._selection, self._engine)

    def block_plan(self) -> BlockPlan:
        """Return the blocks that reductions read, in numbers: how many, of how many rows, and the memory they take.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("wide_0.npy", np.zeros((1_000, 2_048)))
        >>> plan = lazyshards.open_shards("wide_0.npy", engine="numpy").block_plan()
        >>> plan.block_count, plan.block_rows, plan.block_nbytes
        (32, 32, 524288)
        """
        return running.blocks_of(self._view())

    # Sums ------------------------------------------------------------------------------------------------------

    def sum(
        self, axis: Axis = None, dtype: Any = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return the sum over axes, as ``numpy.sum`` does.

        Floating elements are added up in float64 at least: the error is at most that of NumPy's sum of one block in
        float64, and one rounding more for each doubling of the number of blocks. Integers wrap as NumPy's do.

        Parameters
        ----------
        axis : int, tuple of int, or None
            Axes that are reduced: 0 is the rows; None all.
        dtype : dtype, optional
            Of the result; NumPy's choice by default.
        out : ndarray, optional
            Where the result goes.
        keepdims : bool
            Whether reduced axes stay, with length 1.
        progress : bool
            Show a progress bar; needs tqdm. With several ranks, the first one shows it.

        Returns
        -------
        ndarray or scalar

        Raises
        ------
        numpy.exceptions.AxisError
            If there is no such axis.
        TypeError
            If NumPy has no sum of that dtype.
        ShardReadError
            If a shard cannot be read.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("steps_0.npy", np.arange(6.0).reshape(3, 2))
        >>> ds = lazyshards.open_shards("steps_0.npy", engine="numpy")
        >>> float(ds.sum()), ds.sum(axis=0), ds[1:].mean(axis=1)
        (15.0, array([6., 9.]), array([2.5, 4.5]))
        """
        return self._sum("sum", Sum, False, axis, dtype, out, keepdims, progress)

    def mean(
        self, axis: Axis = None, dtype: Any = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return the mean over axes, as ``numpy.mean`` does; parameters as for :meth:`sum`."""
        return self._sum("mean", Mean, False, axis, dtype, out, keepdims, progress)

    def nansum(
        self, axis: Axis = None, dtype: Any = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return the sum over axes, NaN counted as zero, as ``numpy.nansum`` does; parameters as for :meth:`sum`."""
        return self._sum("nansum", Sum, True, axis, dtype, out, keepdims, progress)

    def nanmean(
        self, axis: Axis = None, dtype: Any = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return the mean over axes of what is not NaN, as ``numpy.nanmean`` does; parameters as for :meth:`sum`."""
        return self._sum("nanmean", Mean, True, axis, dtype, out, keepdims, progress)

    def _sum(
        self,
        name: str,
        kind: type[Sum],
        skip: bool,
        axis: Axis,
        dtype: Any,
        out: Out,
        keepdims: bool,
        progress: bool,
    ) -> Any:
        return running.reduce_view(
            self._view(),
            name,
            lambda axes, result: kind(axes, result, skip),
            axis,
            keepdims=keepdims,
            out=out,
            progress=progress,
            dtype=dtype,
        )

    # Variances -------------------------------------------------------------------------------------------------

    def var(
        self,
        axis: Axis = None,
        dtype: Any = None,
        out: Out = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        progress: bool = False,
    ) -> Any:
        """Return the variance over axes, as ``numpy.var`` does, in one pass over the data.

        Each block's deviations are from its own mean, and blocks are merged by the formula of Chan, Golub and LeVeque,
        so that a large mean costs no digits.

        Parameters
        ----------
        axis, dtype, out, keepdims, progress
            As for :meth:`sum`.
        ddof : float
            What is taken from the number of elements before it divides.

        Raises
        ------
        TypeError
            If the dtype is not a floating one.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("far_0.npy", 1e9 + np.arange(4.0))
        >>> float(lazyshards.open_shards("far_0.npy", engine="numpy").var())
        1.25
        """
        return self._variance("var", False, False, axis, dtype, out, ddof, keepdims, progress)

    def std(
        self,
        axis: Axis = None,
        dtype: Any = None,
        out: Out = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        progress: bool = False,
    ) -> Any:
        """Return the standard deviation over axes, as ``numpy.std`` does; parameters as for :meth:`var`."""
        return self._variance("std", True, False, axis, dtype, out, ddof, keepdims, progress)

    def nanvar(
        self,
        axis: Axis = None,
        dtype: Any = None,
        out: Out = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        progress: bool = False,
    ) -> Any:
        """Return the variance of what is not NaN, as ``numpy.nanvar`` does; parameters as for :meth:`var`."""
        return self._variance("nanvar", False, True, axis, dtype, out, ddof, keepdims, progress)

    def nanstd(
        self,
        axis: Axis = None,
        dtype: Any = None,
        out: Out = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        progress: bool = False,
    ) -> Any:
        """Return the standard deviation of what is not NaN, as ``numpy.nanstd`` does; parameters as for :meth:`var`."""
        return self._variance("nanstd", True, True, axis, dtype, out, ddof, keepdims, progress)

    def _variance(
        self,
        name: str,
        root: bool,
        skip: bool,
        axis: Axis,
        dtype: Any,
        out: Out,
        ddof: float,
        keepdims: bool,
        progress: bool,
    ) -> Any:
        if dtype is not None and np.dtype(dtype).kind not in "fc":
            raise TypeError(f"dtype={dtype!r} of a variance: expected a floating or complex one")
        return running.reduce_view(
            self._view(),
            name,
            lambda axes, result: Variance(axes, result, skip, ddof, root),
            axis,
            keepdims=keepdims,
            out=out,
            progress=progress,
            dtype=dtype,
            ddof=ddof,
        )

    # Extremes --------------------------------------------------------------------------------------------------

    def min(self, axis: Axis = None, out: Out = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return the least element over axes, as ``numpy.min`` does: NaN if there is one.

        Parameters as for :meth:`sum`.

        Raises
        ------
        ValueError
            If there is nothing.
        """
        return self._extreme("min", False, False, axis, out, keepdims, progress)

    def max(self, axis: Axis = None, out: Out = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return the greatest element over axes, as ``numpy.max`` does; otherwise as :meth:`min`."""
        return self._extreme("max", True, False, axis, out, keepdims, progress)

    def nanmin(self, axis: Axis = None, out: Out = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return the least element that is not NaN, as ``numpy.nanmin`` does; otherwise as :meth:`min`."""
        return self._extreme("nanmin", False, True, axis, out, keepdims, progress)

    def nanmax(self, axis: Axis = None, out: Out = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return the greatest element that is not NaN, as ``numpy.nanmax`` does; otherwise as :meth:`min`."""
        return self._extreme("nanmax", True, True, axis, out, keepdims, progress)

    def _extreme(
        self, name: str, greatest: bool, skip: bool, axis: Axis, out: Out, keepdims: bool, progress: bool
    ) -> Any:
        return running.reduce_view(
            self._view(),
            name,
            lambda axes, _: Extreme(axes, greatest, skip),
            axis,
            keepdims=keepdims,
            out=out,
            progress=progress,
        )

    def argmin(
        self, axis: int | None = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return where the first least element is, as ``numpy.argmin`` does: the first NaN if there is one.

        Parameters
        ----------
        axis : int or None
            Axis that is searched; None searches all elements, and counts them in C order.
        out, keepdims, progress
            As for :meth:`sum`.

        Raises
        ------
        ValueError
            If there is nothing.
        """
        return self._place("argmin", False, False, axis, out, keepdims, progress)

    def argmax(
        self, axis: int | None = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return where the first greatest element is, as ``numpy.argmax`` does; otherwise as :meth:`argmin`."""
        return self._place("argmax", True, False, axis, out, keepdims, progress)

    def nanargmin(
        self, axis: int | None = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return where the first least element but NaN is, as ``numpy.nanargmin`` does; otherwise as :meth:`argmin`.

        Raises
        ------
        ValueError
            If everything is NaN somewhere.
        """
        return self._place("nanargmin", False, True, axis, out, keepdims, progress)

    def nanargmax(
        self, axis: int | None = None, out: Out = None, keepdims: bool = False, *, progress: bool = False
    ) -> Any:
        """Return where the first greatest element but NaN is, as ``numpy.nanargmax`` does; as :meth:`nanargmin`."""
        return self._place("nanargmax", True, True, axis, out, keepdims, progress)

    def _place(
        self, name: str, greatest: bool, skip: bool, axis: int | None, out: Out, keepdims: bool, progress: bool
    ) -> Any:
        return running.reduce_view(
            self._view(),
            name,
            lambda axes, _: PlaceOfExtreme(None if axis is None else axes[0], greatest, skip),
            axis,
            keepdims=keepdims,
            out=out,
            progress=progress,
        )

    # Truths ----------------------------------------------------------------------------------------------------

    def any(self, axis: Axis = None, out: Out = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return whether any element is true over axes, as ``numpy.any`` does; reads no further than it must.

        Parameters as for :meth:`sum`.
        """
        return self._truth("any", False, axis, out, keepdims, progress)

    def all(self, axis: Axis = None, out: Out = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return whether all elements are true over axes, as ``numpy.all`` does; otherwise as :meth:`any`."""
        return self._truth("all", True, axis, out, keepdims, progress)

    def _truth(self, name: str, every: bool, axis: Axis, out: Out, keepdims: bool, progress: bool) -> Any:
        return running.reduce_view(
            self._view(),
            name,
            lambda axes, _: Truth(axes, every),
            axis,
            keepdims=keepdims,
            out=out,
            progress=progress,
        )

    def count_nonzero(self, axis: Axis = None, *, keepdims: bool = False, progress: bool = False) -> Any:
        """Return how many elements are not zero over axes, as ``numpy.count_nonzero`` does; NaN are not zero.

        Parameters as for :meth:`sum`.
        """
        return running.reduce_view(
            self._view(),
            "count_nonzero",
            lambda axes, _: Nonzero(axes),
            axis,
            keepdims=keepdims,
            progress=progress,
        )
