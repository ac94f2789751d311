"""The lazy dataset: sharded data on disk that slices like an array and is read when it is computed."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from lazyshards import catalog, display
from lazyshards.engines import Array, check_engine_name, choose_engine, find_engine
from lazyshards.errors import EngineError, LazyShardsError
from lazyshards.layout import Layout, Shard
from lazyshards.plan import ReadPlan, compile_plan
from lazyshards.selection import Selection, is_whole, select, select_all

__all__ = ["ShardedDataset", "open_shards"]

_ITERATION_NBYTES = 4 << 20
"""Bytes read at a time when a dataset is iterated row by row."""


def open_shards(
    path: object,
    *,
    format: str | None = None,
    engine: str | None = None,
    order: str = "natural",
    holes: str = "raise",
    on_change: str = "raise",
    storage_options: Mapping[str, object] | None = None,
    **options: object,
) -> "ShardedDataset":
    """Open sharded data as one lazy array. Reads the shards' headers, and nothing else.

    Parameters
    ----------
    path : str, path, or sequence of them
        A directory, a glob, one file, or a list of files. A path that exists is literal, even if it holds ``[`` or
        ``*``. Hidden files, markers such as ``_SUCCESS`` and temporary files are left out; subdirectories are not
        searched.
    format : str, optional
        Name of the format. By default told by suffix, then by the first bytes of the files.
    engine : {"auto", "numpy", "legate", "cupy"}, optional
        What computes this dataset, and so the type of the arrays. By default what :func:`set_engine` or the
        environment variable ``LAZYSHARDS_ENGINE`` says, else ``"auto"``: Legate where cuPyNumeric works, else NumPy.
    order : {"natural", "name"}
        Order of the shards: numbers in names compared as numbers (2 before 10), or names compared as text. A list
        keeps its own order.
    holes : {"raise", "ignore"}
        What to do if numbered names skip a number.
    on_change : {"raise", "warn", "ignore"}
        What to do if a shard is read that is no longer the file that was opened.
    storage_options : mapping, optional
        Options for fsspec, for URLs.
    **options
        Options of the format.

    Returns
    -------
    ShardedDataset
        Of shape (rows of all shards, *row shape), in native byte order.

    Raises
    ------
    ShardsNotFoundError
        If nothing is there.
    FormatError
        If the format cannot be told, or files of several are mixed.
    LayoutError
        If shards are damaged, differ in dtype or row shape, or a number is missing; the message lists all of them.
    ShardReadError
        If a shard's header cannot be read.

    Examples
    --------
    >>> import numpy as np, lazyshards
    >>> for i, rows in enumerate([3, 0, 4]):
    ...     np.save(f"shard_{i}.npy", np.arange(rows * 2, dtype="f4").reshape(rows, 2))
    >>> ds = lazyshards.open_shards("shard_*.npy", engine="numpy")
    >>> ds.shape, ds.dtype
    ((7, 2), dtype('float32'))
    >>> ds[2:5, 0].compute()
    array([4., 0., 2.], dtype=float32)
    """
    check_engine_name(engine)
    layout = catalog.scan(
        path,
        format=format,
        order=order,
        holes=holes,
        on_change=on_change,
        storage_options=storage_options,
        options=options,
    )
    return ShardedDataset(layout, select_all(layout.rows, layout.row_shape), engine)


class ShardedDataset:
    """Sharded data on disk as one lazy array: slicing reads nothing, :meth:`compute` reads what was sliced.

    Made by :func:`open_shards`. Immutable, picklable, hashable; equal to another that selects the same of the same
    shards.
    """

    __slots__ = ("__weakref__", "_engine", "_layout", "_selection")
    __array_priority__ = 1000

    def __init__(self, layout: Layout, selection: Selection, engine: str | None = None) -> None:
        self._layout = layout
        self._selection = selection
        self._engine = engine

    # What it is ------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that compute() returns."""
        return self._selection.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the elements, in native byte order."""
        return self._layout.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the array that compute() returns."""
        return self.size * self.dtype.itemsize

    @property
    def shards(self) -> Sequence[Shard]:
        """All shards that were opened, in order, whatever was sliced since."""
        return self._layout.shards

    @property
    def format(self) -> str:
        """Name of the format."""
        return self._layout.format

    @property
    def engine(self) -> str:
        """Name of the engine that compute() takes: ``"numpy"``, ``"legate"`` or ``"cupy"``."""
        return choose_engine(self._engine, self.dtype, self.ndim)

    @property
    def fingerprint(self) -> str:
        """Hex digest of what is selected of which shards; the same on every machine and mount point."""
        selection = self._selection
        if self._selects_all():
            return self._layout.fingerprint
        digest = blake2b(digest_size=16)
        digest.update(self._layout.fingerprint.encode())
        rows = selection.rows
        if isinstance(rows, range):
            digest.update(repr((rows.start, rows.step, len(rows)) if rows else ()).encode())
        else:
            digest.update(rows.astype("<i8").tobytes())
        cell = [(axis.start, axis.step, len(axis)) if isinstance(axis, range) else axis for axis in selection.cell]
        digest.update(repr((cell, selection.scalar)).encode())
        return digest.hexdigest()

    def _selects_all(self) -> bool:
        selection = self._selection
        return (
            not selection.scalar
            and isinstance(selection.rows, range)
            and selection.rows == range(self._layout.rows)
            and is_whole(selection.cell, self._layout.row_shape)
        )

    def __len__(self) -> int:
        """Return the length of the first axis."""
        shape = self.shape
        if not shape:
            raise TypeError("len() of a dataset without axes")
        return shape[0]

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` selects the same of the same shards; for elements, compare computed arrays."""
        if not isinstance(other, ShardedDataset):
            return NotImplemented
        return self._layout == other._layout and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        """Return the hash of the fingerprint."""
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        """Return one line and a table of shards."""
        return display.dataset_text(self._layout, self._selection, self._engine_label())

    def _repr_html_(self) -> str:
        return display.dataset_html(self._layout, self._selection, self._engine_label())

    def _engine_label(self) -> str:
        try:
            return self.engine
        except LazyShardsError as exc:
            return f"{self._engine} ({exc})"

    # What is wanted of it --------------------------------------------------------------------------------------

    def __getitem__(self, index: object) -> "ShardedDataset":
        """Return the part that NumPy indexing would give, lazily: nothing is read.

        Parameters
        ----------
        index : int, slice, Ellipsis, mask, integer array, or a tuple of them
            A boolean mask or an integer array may index the rows; the other axes take integers and slices.

        Raises
        ------
        SelectionError
            If NumPy would refuse the index, or it cannot be lazy.
        """
        return ShardedDataset(self._layout, select(self._selection, index), self._engine)

    # Reading it ------------------------------------------------------------------------------------------------

    def compute(
        self, engine: str | None = None, out: Array | None = None, *, tiles_per_processor: int | None = None
    ) -> Array:
        """Read what is selected, and nothing else, into an array of the engine's type.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default the dataset's own.
        out : array, optional
            An array of the engine's type to fill and return, of the dataset's shape and dtype. If reading fails, what
            it holds is undefined.
        tiles_per_processor : int, optional
            Tiles for each processor, to even out shards of unequal cost.

        Returns
        -------
        numpy.ndarray, cupynumeric.ndarray or cupy.ndarray
            Of shape :attr:`shape` and dtype :attr:`dtype`, complete.

        Raises
        ------
        ShardReadError
            If a shard cannot be read, is truncated, or is no longer the file that was opened.
        CapacityError
            If the result does not fit the engine's memory.
        EngineUnavailableError, EngineError, UnsupportedDtypeError
            If the engine cannot run here, on this thread, or for this dtype.
        """
        selection, layout = self._selection, self._layout
        name = choose_engine(engine or self._engine, layout.dtype, len(selection.shape), warn=True)
        runner = find_engine(name)
        plan = compile_plan(layout, selection, runner.capacity(self.nbytes), tiles_per_processor=tiles_per_processor)
        if not selection.scalar:
            return runner.execute(plan, out=out)
        if out is not None:
            if isinstance(out, np.generic) or not hasattr(out, "reshape"):
                raise EngineError(f"out is a {type(out).__name__}, expected an array of the {name} engine")
            runner.execute(plan, out=out[None])
            return out
        return runner.execute(plan).reshape(selection.shape)

    def to_numpy(self) -> npt.NDArray[np.generic]:
        """Read what is selected into a NumPy array, whatever the dataset's engine is."""
        result: npt.NDArray[np.generic] = self.compute(engine="numpy")
        return result

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.generic]:
        """Read what is selected into a NumPy array, for np.asarray()."""
        if copy is False:
            raise ValueError("reading a dataset always makes a new array: copy=False cannot be kept")
        result = self.to_numpy()
        return result if dtype is None else result.astype(dtype, copy=False)

    def __iter__(self) -> Iterator[npt.NDArray[np.generic]]:
        """Yield the rows as NumPy arrays, read in blocks of a few megabytes; for arrays of the engine, use batches."""
        if not self.shape:
            raise TypeError("iteration over a dataset without axes")
        count = len(self)
        step = max(1, _ITERATION_NBYTES * count // max(1, self.nbytes))
        for start in range(0, count, step):
            yield from self[start : start + step].to_numpy()

    def plan(self, engine: str | None = None, *, tiles_per_processor: int | None = None) -> ReadPlan:
        """Return what compute() would do, in numbers: shards, tiles, bytes wanted and read, requests, memory.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default the dataset's own.
        tiles_per_processor : int, optional
            As for :meth:`compute`.
        """
        name = choose_engine(engine or self._engine, self.dtype, self.ndim)
        capacity = find_engine(name).capacity(self.nbytes)
        return compile_plan(self._layout, self._selection, capacity, tiles_per_processor=tiles_per_processor)

    def explain(self, engine: str | None = None) -> None:
        """Print the plan for a person."""
        name = choose_engine(engine or self._engine, self.dtype, self.ndim)
        print(display.plan_text(self.plan(name), name, find_engine(name).capacity(), len(self._layout)))  # noqa: T201  # what it is for
