"""Statistics of a lazy view, and reductions of one's own, as methods."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lazyshards.reductions.blocks import Block
from lazyshards.reductions.calls import map_blocks, reduce_rows
from lazyshards.reductions.histograms import Bins, find_histogram
from lazyshards.reductions.methods import Reducible
from lazyshards.reductions.products import find_covariance, find_gram
from lazyshards.reductions.quantiles import find_median, find_quantile
from lazyshards.reductions.tables import ColumnStats, find_stats

__all__ = ["Measurable"]

T = TypeVar("T")


class Measurable(Reducible):
    """A lazy view of which quantiles, histograms, matrices and tables are found without holding it in memory."""

    __slots__ = ()

    def quantile(
        self,
        q: float | Sequence[float] | npt.NDArray[np.floating[Any]],
        axis: int | None = None,
        keepdims: bool = False,
        *,
        progress: bool = False,
    ) -> Any:
        """Return exact quantiles, as ``numpy.quantile`` does by linear interpolation.

        What is larger than 32 MiB is read several times: each pass counts which bits elements begin with, and narrows
        down where the wanted ones are; the last collects what is left, of 32 MiB at most. That takes two or three
        passes for most data, and never more than one for each 16 bits of an element and one to collect. Counts take 4
        MiB: many columns or quantiles share them, and a pass looks at fewer bits then, but at 4 at least. Which ranks
        are wanted is worked out in float64, where NumPy uses float32 for elements of that type.

        Parameters
        ----------
        q : float or sequence of float
            Between 0 and 1.
        axis : {None, 0}
            All elements, or each column over the rows.
        keepdims : bool
            Whether reduced axes stay, with length 1.
        progress : bool
            Show a progress bar of all passes together; needs tqdm.

        Returns
        -------
        ndarray or scalar
            Of the shape of ``q``, then that of a row if ``axis=0``. NaN where there is a NaN.

        Raises
        ------
        ValueError
            If ``q`` is not between 0 and 1, or the axis is another one.
        UnsupportedDtypeError
            If elements are not numbers of 64 bits at most.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("waits_0.npy", np.array([3.0, 1.0, 2.0, 10.0]))
        >>> ds = lazyshards.open_shards("waits_0.npy", engine="numpy")
        >>> ds.quantile([0.25, 0.5]), float(ds.median())
        (array([1.75, 2.5 ]), 2.5)
        """
        return find_quantile(self._view(), q, axis, keepdims, progress)

    def median(self, axis: int | None = None, keepdims: bool = False, *, progress: bool = False) -> Any:
        """Return the exact median, as ``numpy.median`` does; parameters and passes as for :meth:`quantile`."""
        return find_median(self._view(), axis, keepdims, progress)

    def histogram(
        self, bins: Bins = 10, range: tuple[float, float] | None = None, *, progress: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return how many elements lie in each bin, and the edges, as ``numpy.histogram`` does.

        Parameters
        ----------
        bins : int or sequence of float
            How many bins of equal width, or their edges.
        range : (float, float), optional
            Where the first bin begins and the last one ends. Without it, and without edges, a pass before the one that
            counts finds the least and the greatest element.
        progress : bool
            Show a progress bar; needs tqdm.

        Raises
        ------
        ValueError
            If bins or range are none, or an element is not finite and the range must be found.
        TypeError
            If ``bins`` is the name of a rule.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("ages_0.npy", np.array([1, 5, 6, 9]))
        >>> lazyshards.open_shards("ages_0.npy", engine="numpy").histogram(2, (0, 10))
        (array([1, 3]), array([ 0.,  5., 10.]))
        """
        return find_histogram(self._view(), bins, range, progress)

    def cov(self, *, ddof: float = 1, progress: bool = False) -> Any:
        """Return the covariance of all pairs of columns, as ``numpy.cov(x, rowvar=False)`` does, in one pass.

        Every thread, and the merging of blocks, holds matrices of (columns, columns). The products are made by BLAS,
        whose rounding may depend on the machine and on the number of its own threads.

        Parameters
        ----------
        ddof : float
            What is taken from the number of rows before it divides.
        progress : bool
            Show a progress bar; needs tqdm.

        Raises
        ------
        ValueError
            If a row has more than one axis.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("pairs_0.npy", np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]))
        >>> lazyshards.open_shards("pairs_0.npy", engine="numpy").cov()
        array([[1., 2.],
               [2., 4.]])
        """
        return find_covariance(self._view(), ddof, progress)

    def gram(self, *, dtype: Any = None, progress: bool = False) -> Any:
        """Return the Gram matrix XᵀX of the columns, conjugated on the left if they are complex, in one pass.

        Floating elements are multiplied and added up in float64 at least, integers exactly until the result wraps, as
        sums do. BLAS makes the products, as for :meth:`cov`.

        Parameters
        ----------
        dtype : dtype, optional
            Of the result; by default that of a sum of the elements.
        progress : bool
            Show a progress bar; needs tqdm.

        Raises
        ------
        ValueError
            If a row has not exactly one axis.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("design_0.npy", np.array([[1, 2], [3, 4]], "i2"))
        >>> lazyshards.open_shards("design_0.npy", engine="numpy").gram()
        array([[10, 14],
               [14, 20]])
        """
        return find_gram(self._view(), dtype, progress)

    def stats(self, *, progress: bool = False) -> ColumnStats:
        """Return count, NaN, least, greatest, mean and standard deviation of every column, found in one pass.

        Parameters
        ----------
        progress : bool
            Show a progress bar; needs tqdm.

        Returns
        -------
        ColumnStats
            Shows itself as a table.

        Raises
        ------
        UnsupportedDtypeError
            If elements are not numbers.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("points_0.npy", np.array([[1.0, 2.0], [3.0, np.nan]]))
        >>> lazyshards.open_shards("points_0.npy", engine="numpy").stats()
        <ColumnStats of 2 rows, 2 columns>
        column  count  nan  min  max  mean  std
             0      2    0    1    3     2    1
             1      1    1    2    2     2    0
        """
        return find_stats(self._view(), progress)

    # One's own -------------------------------------------------------------------------------------------------

    def map_blocks(self, function: Callable[[Block], T], *, progress: bool = False) -> Iterator[T]:
        """Yield what a function makes of each block of rows, in order; the next ones are read meanwhile.

        For what gives one row for each row, and shall stay lazy, use :meth:`map`.

        Parameters
        ----------
        function : callable
            Takes a block, a NumPy array of its own of shape ``(n, *shape[1:])``, and returns anything. It is called on
            this thread, when the iterator is asked for the next result. A block has the rows of 524,288 elements, one
            row at least, and the last one what is left.
        progress : bool
            Show a progress bar; needs tqdm.

        Yields
        ------
        object
            What the function returned.

        Raises
        ------
        TypeError
            If the row axis was dropped, or the function cannot be called.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("log_0.npy", np.arange(5))
        >>> ds = lazyshards.open_shards("log_0.npy", engine="numpy")
        >>> [len(rows) for rows in ds.map_blocks(lambda block: block[block > 2])]
        [2]
        """
        return map_blocks(self._view(), function, progress)

    def reduce(self, function: Callable[[Block], T], combine: Callable[[T, T], T], *, progress: bool = False) -> T:
        """Return what a function makes of each block of rows, combined pair by pair.

        Parameters
        ----------
        function : callable
            Takes a block, a NumPy array of its own of shape ``(n, *shape[1:])``, and returns its part of the result.
            It runs on several threads at a time. A block has the rows of 524,288 elements, one row at least. Without
            elements it is called once, with an empty block.
        combine : callable
            Takes the parts of two neighbours, the left one first, and returns that of both. It must not matter in which
            order neighbours are combined; it is always the same, so that rounding is.
        progress : bool
            Show a progress bar; needs tqdm.

        Raises
        ------
        TypeError
            If the row axis was dropped, or a function cannot be called.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("words_0.npy", np.array([3, 1, 3, 2]))
        >>> ds = lazyshards.open_shards("words_0.npy", engine="numpy")
        >>> sorted(ds.reduce(lambda block: set(block.tolist()), set.union))
        [1, 2, 3]
        """
        return reduce_rows(self._view(), function, combine, progress)
