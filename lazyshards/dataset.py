"""The lazy dataset: sharded data on disk that slices like an array and is read when it is computed."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshards import catalog, display, persistence
from lazyshards.batches import Batches
from lazyshards.engines import (
    Array,
    Engine,
    check_engine_name,
    choose_engine,
    draw_seed,
    find_engine,
    running_engine,
    wanted_engine,
)
from lazyshards.engines.ranks import is_first_rank, layout_facts, once, rank_note, together
from lazyshards.errors import (
    EngineError,
    LayoutError,
    LazyShardsError,
    SelectionError,
    ShardChangedError,
    UnsupportedDtypeError,
)
from lazyshards.functions import keep_function
from lazyshards.hints import hint_for
from lazyshards.layout import Shard, native_dtype
from lazyshards.looking import checked_count, sampled_rows
from lazyshards.plan import ReadPlan, compile_plan
from lazyshards.profiling import Profile, device_nbytes, make_profile
from lazyshards.progress import Progress, progress_bar
from lazyshards.recording import Recorder, stage
from lazyshards.selection import Selection, is_whole, select, select_all
from lazyshards.source import ViewSource
from lazyshards.where import true_rows
from lazyshards.workable import Workable

__all__ = ["ShardedDataset"]

_WATCHED_TILES = 16
"""Tiles for each processor where a progress bar follows them."""
_FEW_SHARDS = 20_000
"""Shards of which a repr finds in a moment those that an index array touches."""
_ITERATION_NBYTES = 4 << 20
"""Bytes read at a time when a dataset is iterated row by row."""


class ShardedDataset(Workable):
    """Sharded data on disk as one lazy array: slicing reads nothing, :meth:`compute` reads what was sliced.

    Made by :func:`open_shards`. Immutable, picklable, hashable; equal to another that selects the same of the same
    shards.
    """

    __slots__ = ("__weakref__",)

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
        """Return whether ``other`` selects the same of the same shards; ``np.equal(ds, other)`` compares elements."""
        if isinstance(other, np.ndarray | np.generic):  # which would compare elements
            return False
        if not isinstance(other, ShardedDataset):
            return NotImplemented
        return self._layout == other._layout and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        """Return the hash of the fingerprint."""
        return hash(self.fingerprint)

    def __bool__(self) -> bool:
        """Refuse, as NumPy does, since what is meant are the elements; a single one is read."""
        if self.size != 1:
            raise ValueError(
                "a dataset of several elements is neither true nor false: compute() it, then use any() or all()"
            )
        return bool(self.to_numpy())

    def __float__(self) -> float:
        """Read the only element of a dataset without axes, such as ``ds[5, 3]``."""
        return float(self._element())

    def __int__(self) -> int:
        """Read the only element of a dataset without axes, such as ``ds[5, 3]``."""
        return int(self._element())

    def _element(self) -> npt.NDArray[Any]:
        if self.shape:
            raise TypeError(
                f"a dataset of shape {self.shape} is not one number: index all of its axes, or compute() it"
            )
        return self.to_numpy()

    def __getattr__(self, name: str) -> Any:
        """Say what to do instead of what arrays have and a dataset has not."""
        hint = hint_for(name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{message}: {hint}" if hint else message, name=name, obj=self)

    def __contains__(self, value: object) -> bool:
        """Return whether some element equals ``value``, as NumPy does: blocks are read until one does."""
        return bool(np.equal(self, value).any())  # type: ignore[call-overload]  # it is this class that makes it

    def __repr__(self) -> str:
        """Return one line and a table of shards."""
        text = display.dataset_text(self._layout, self._selection, self._engine_label())
        layout = self._layout
        if not layout.cast_from and not layout.maps and not layout.manifest and not layout.note:
            return text
        first, newline, rest = text.partition("\n")
        more = [f"mapped by {layout.maps_text}"] * bool(layout.maps) + [layout.dtype_text] * bool(layout.cast_from)
        more += [layout.note] * bool(layout.note)
        more = [display.folded(each, 2) for each in more]
        more += [f"manifest: {display.hide_secrets(layout.manifest)}"] * bool(layout.manifest)
        return "\n  ".join([first, *more]) + newline + rest

    def _repr_html_(self) -> str:
        label = self._engine_label()
        return display.dataset_html(self._layout, self._selection, label, self._tile_rows(label))

    def _tile_rows(self, engine: str) -> int | None:
        """Return the rows of a tile; None if that is not known before the engine was started, or not in a moment."""
        runner = running_engine(engine)
        layout, selection = self._layout, self._selection
        if runner is None or not (isinstance(selection.rows, range) or len(layout) <= _FEW_SHARDS):
            return None
        try:
            return compile_plan(layout, selection, replace(runner.capacity(), result_nbytes=None)).tile_rows
        except LazyShardsError:  # another thread's engine
            return None

    def _engine_label(self) -> str:
        try:
            return self.engine
        except LazyShardsError as exc:
            return f"{self._engine} ({exc})"

    def save_manifest(self, *, content: bool = False) -> str:
        """Write what is known of all shards into one file beside them, so that opening them need not read headers.

        The file, ``_lazyshards.arrow``, is written at once or not at all. It holds names, rows, sizes, times and where
        rows lie, for all shards that were opened, whatever was sliced, cast or mapped since. Of several ranks, one
        writes it and the others wait.

        Parameters
        ----------
        content : bool
            Whether to read all files and save a hash of each one's content, for ``lazyshards verify --content``.

        Returns
        -------
        str
            Path of the file.

        Raises
        ------
        LayoutError
            If there can be none: the shards are read by a function, or joined of several datasets. If the one that is
            there lists shards that are there as well and that this dataset does not have.
        OSError
            If the directory cannot be written to.

        Examples
        --------
        >>> import numpy as np, lazyshards, os
        >>> os.mkdir("indexed")
        >>> np.save("indexed/shard_0.npy", np.arange(4))
        >>> path = lazyshards.open_shards("indexed", engine="numpy").save_manifest()
        >>> os.path.basename(path)
        '_lazyshards.arrow'
        >>> len(lazyshards.open_shards("indexed", engine="numpy", manifest="require"))
        4
        """
        if self._layout.format == "memory":
            raise LayoutError("a dataset that was persisted lies in memory and has no manifest: cache(path) writes one")
        return once(
            lambda _: catalog.save_manifest(self._layout, content=content),
            wanted_engine(self._engine),
            what="writing the manifest",
        )

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

    def where_rows(
        self, predicate: "Callable[[npt.NDArray[Any]], Any] | ShardedDataset", *, progress: bool = False
    ) -> "ShardedDataset":
        """Return the rows for which a predicate is true: a view of their numbers, for which all rows are read once.

        They are read and judged by the NumPy engine, whichever engine the dataset has, in blocks and on all
        processors; what is kept is a byte for each of 16 million rows at a time, and eight for each row that is found.
        With several ranks, each reads all.

        Parameters
        ----------
        predicate : callable or ShardedDataset
            A function that is given a block of rows, as that of :meth:`map`, and returns a boolean for each of them; or
            a lazy dataset of booleans, one for each row, such as ``ds[:, 3] > 0``, of which only the columns that it
            needs are read.
        progress : bool
            Show a progress bar; needs tqdm.

        Returns
        -------
        ShardedDataset
            A range of rows if those that are found follow each other evenly.

        Raises
        ------
        TypeError
            If it is neither, or the row axis was dropped.
        SelectionError
            If the dataset is of another length, or not of booleans.
        MapError
            If the function raises or returns something else.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("points_0.npy", np.array([[1, -1], [2, 5], [3, 7]]))
        >>> ds = lazyshards.open_shards("points_0.npy", engine="numpy")
        >>> ds.where_rows(ds[:, 1] > 0).compute().tolist()
        [[2, 5], [3, 7]]
        >>> ds.where_rows(lambda rows: rows.sum(axis=1) == 0).compute().tolist()
        [[1, -1]]
        """
        self._check_rows("where_rows")
        if isinstance(predicate, ShardedDataset):
            mask = predicate
            if mask.dtype != np.bool_ or mask.shape != self.shape[:1]:
                raise SelectionError(
                    f"where_rows() was given a dataset of {mask.dtype} and shape {mask.shape}, expected booleans, one "
                    f"for each of the {len(self):,} rows"
                )
        elif callable(predicate):
            mask = self.map(predicate, dtype=np.bool_, row_shape=())
        else:
            raise TypeError(
                f"where_rows() was given a {type(predicate).__name__}, expected a function of a block of rows, or a "
                "lazy dataset of booleans; a mask in memory is an index, ds[mask]"
            )
        title = f"where_rows of {display.title_text(self._layout, self._selection)}"
        with progress_bar(len(self), title, shown=progress and is_first_rank()) as bar:
            engine = wanted_engine(self._engine)
            return self[true_rows(len(self), lambda rows: mask[rows].to_numpy(), engine, bar.update)]

    def astype(self, dtype: object, casting: str = "safe") -> "ShardedDataset":
        """Return the same dataset with its elements cast to another dtype, lazily: in blocks, when they are read.

        Parameters
        ----------
        dtype : dtype
            What to cast to. The byte order is always this machine's.
        casting : {"safe", "same_kind", "unsafe"}
            What may be lost, as NumPy has it: nothing; precision within a kind, such as float64 to float32; anything.

        Raises
        ------
        UnsupportedDtypeError
            If the rule does not allow it, or a dataset cannot have that dtype.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("counts_0.npy", np.arange(4, dtype="i2"))
        >>> ds = lazyshards.open_shards("counts_0.npy", engine="numpy").astype("f4")
        >>> ds[1:3].compute()
        array([1., 2.], dtype=float32)
        """
        target = native_dtype(dtype)
        rules = ("safe", "same_kind", "unsafe")
        if casting not in rules:
            raise ValueError(f'casting={casting!r} is not a rule: use "safe", "same_kind" or "unsafe"')
        if not np.can_cast(self.dtype, target, casting):  # type: ignore[arg-type]  # one of the three
            enough = next((rule for rule in rules if np.can_cast(self.dtype, target, rule)), None)  # type: ignore[arg-type]
            do = f'pass casting="{enough}" if that is meant' if enough else "NumPy has no such cast"
            raise UnsupportedDtypeError(
                f'cannot cast {self.dtype} to {target} by the rule "{casting}", since values could be lost: {do}'
            )
        return ShardedDataset(self._layout.cast(target), self._selection, self._engine)

    def map(
        self,
        function: Callable[[npt.NDArray[Any]], Any],
        *,
        dtype: object = None,
        row_shape: Sequence[int] | int | None = None,
    ) -> "ShardedDataset":
        """Return the dataset of what a function makes of the rows, lazily: it is called when they are read.

        Parameters
        ----------
        function : callable
            Takes a block of rows, a NumPy array of its own of shape ``(n, *shape[1:])``, and returns ``n`` rows. It is
            called with any number of rows, on any thread, several at a time, wherever the rows are read; it must work
            row by row, and must not compute datasets itself. Where tasks run in other processes, it must be at the top
            level of a module. Its name, and nothing else of it, is part of the fingerprint.
        dtype : dtype, optional
            Type of what it returns; the dataset's own by default.
        row_shape : tuple of int, optional
            Shape of one row of what it returns; that of a row of the dataset by default.

        Raises
        ------
        TypeError
            If the row axis was dropped, the function cannot be called, or the row shape is none.
        UnsupportedDtypeError
            If a dataset cannot have the dtype. Computing raises MapError if the function raises, or returns something
            else; the message names the rows.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("pixels_0.npy", np.array([[0, 51], [102, 255]], "u1"))
        >>> ds = lazyshards.open_shards("pixels_0.npy", engine="numpy")
        >>> bright = ds.map(lambda rows: rows.mean(axis=1) / 255, dtype="f8", row_shape=())
        >>> bright[:].compute()
        array([0.1, 0.7])
        """
        selection = self._selection
        if selection.scalar:
            raise TypeError("map of a single row: index the row axis with a slice, such as ds[5:6]")
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called: expected a function of a block of rows")
        if row_shape is None:
            shape = selection.cell_shape
        else:
            sizes = (row_shape,) if isinstance(row_shape, int | np.integer) else tuple(row_shape)
            if not all(_is_size(size) for size in sizes):
                raise TypeError(f"row_shape={row_shape!r} is not a shape: expected a tuple of integers, 0 or more")
            shape = tuple(map(int, sizes))
        target = self.dtype if dtype is None else native_dtype(dtype)
        layout = self._layout.map(keep_function(function), selection.cell, target, shape)
        return ShardedDataset(layout, Selection(selection.rows, tuple(map(range, shape))), self._engine)

    # Keeping what was computed ---------------------------------------------------------------------------------

    def persist(self, engine: str | None = None, *, progress: bool = False) -> "ShardedDataset":
        """Compute what is selected once, and return it as a dataset that reads it from memory.

        It is read and worked on by the NumPy engine, whichever engine is to use it, and kept in host memory of this
        process as long as a dataset made of it lives, by slicing or as a copy of ``copy.copy`` or ``copy.deepcopy``;
        with several ranks, all of it on each. Nothing on disk is read again. It has a fingerprint of its own. A pickle
        of it holds no rows: loading it raises FormatError in another process, or when the dataset is gone, and what is
        loaded does not keep the rows. For other processes see :meth:`cache`.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            Engine of the dataset that is returned; by default that of this one.
        progress : bool
            Show a progress bar while it is computed; needs tqdm.

        Returns
        -------
        ShardedDataset
            Of the same shape and dtype.

        Raises
        ------
        ShardReadError
            If a shard cannot be read.

        Examples
        --------
        >>> import numpy as np, lazyshards, os
        >>> np.save("raw_0.npy", np.arange(6.0))
        >>> kept = (lazyshards.open_shards("raw_0.npy", engine="numpy") / 2).persist()
        >>> os.unlink("raw_0.npy")
        >>> kept[1:4].compute()
        array([0.5, 1. , 1.5])
        """
        check_engine_name(engine)
        selection = self._selection
        rows = ShardedDataset(self._layout, Selection(selection.rows, selection.cell), "numpy")
        array = together(
            lambda: rows.compute("numpy", progress=progress and is_first_rank()),
            lambda found: {"bytes": found.nbytes},
            wanted_engine(self._engine),
            what="persisting",
        )
        layout = persistence.kept_layout(array, rows.fingerprint, self._source_text())
        whole = select_all(layout.rows, layout.row_shape)
        return ShardedDataset(layout, replace(whole, scalar=selection.scalar), engine or self._engine)

    def cache(
        self,
        path: str | os.PathLike[str],
        format: str = "npy",
        *,
        overwrite: bool = False,
        progress: bool = False,
        **options: object,
    ) -> "ShardedDataset":
        """Write what is selected as shards, once, and return the dataset that they are.

        The first call computes and writes, in bounded memory; one that was interrupted goes on with what is there. A
        later call for the same dataset finds the shards and opens them: the same means the same fingerprint, shards of
        the same sizes and times, and the same format and options. The files that were written must have the sizes and
        times that they were left with, too.

        Parameters
        ----------
        path : str or path
            A directory of this machine, which is made.
        format : str
            As for :func:`write_shards`, as are the options.
        overwrite : bool
            Whether shards at ``path`` that hold something else are replaced.
        progress : bool
            Show a progress bar while they are written; needs tqdm.
        **options
            ``rows_per_shard`` or ``nbytes_per_shard``, and those of the format.

        Returns
        -------
        ShardedDataset
            Of the same shape and dtype, with the same engine.

        Raises
        ------
        FileExistsError
            If something else is at ``path``, such as the cache of another dataset, or files that changed.
        TypeError
            If the row axis was dropped.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("counts_0.npy", np.arange(6))
        >>> roots = np.sqrt(lazyshards.open_shards("counts_0.npy", engine="numpy"))
        >>> roots.cache("roots")[4].compute()
        array(2.)
        >>> roots.cache("roots").format
        'npy'
        """
        if self._selection.scalar:
            raise TypeError("cache of a single row: index the row axis with a slice, such as ds[5:6]")
        layout = persistence.cached_layout(
            self,
            path,
            format,
            wanted_engine(self._engine),
            self._source_text(),
            overwrite=overwrite,
            progress=progress,
            options=options,
        )
        return ShardedDataset(layout, select_all(layout.rows, layout.row_shape), self._engine)

    def _source_text(self) -> str:
        count = len(self._layout)
        return f"computed from {count:,} {self._layout.format} shard{'s' * (count != 1)}"

    # Reading it ------------------------------------------------------------------------------------------------

    def compute(
        self,
        engine: str | None = None,
        out: Array | None = None,
        *,
        tiles_per_processor: int | None = None,
        progress: bool = False,
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
        progress : bool
            Show a progress bar of the tiles, which then are more: by tqdm in a terminal and a notebook, else a line
            now and then. With several ranks it goes from none to all.

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
        if progress and tiles_per_processor is None:
            tiles_per_processor = _WATCHED_TILES
        plan = compile_plan(layout, selection, runner.capacity(self.nbytes), tiles_per_processor=tiles_per_processor)
        if progress:
            title = f"compute {display.title_text(layout, selection)} on {name}"
            with progress_bar(len(plan.rows), title, shown=is_first_rank()) as bar:
                return self._run(runner, plan, out, bar.update)
        return self._run(runner, plan, out, None)

    def _run(self, runner: Engine, plan: ReadPlan, out: Array | None, progress: Progress | None) -> Array:
        selection = self._selection
        if not selection.scalar:
            return _execute(runner, plan, out, progress)
        if out is not None:
            if isinstance(out, np.generic) or not hasattr(out, "reshape"):
                raise EngineError(f"out is a {type(out).__name__}, expected an array of the {runner.name} engine")
            _execute(runner, plan, out[None], progress)
            return out
        return _execute(runner, plan, None, progress).reshape(selection.shape)

    def profile(self, engine: str | None = None, *, limit: bool = False) -> Profile:
        """Compute, with collection on, and return where the time went: seconds and bytes of each stage, and the array.

        It takes the place of a compute, and tells nothing of one that was made before: no other compute collects
        anything, so that none pays for it. The result is ``profile.array``, and need not be computed again. What a
        stage takes includes waiting for the interpreter and for memory that is touched for the first time. Data that
        was not in memory is slower the first time: profile twice. With several ranks the stages are those of this rank.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default the dataset's own. Starting it is not counted.
        limit : bool
            Read the same bytes three times more afterwards, by plain positional reads on as many threads as ran leaves,
            and compare with the best time.

        Returns
        -------
        Profile
            Its text and HTML are tables; ``profile.array`` is the result.

        Raises
        ------
        LazyShardsError
            What compute() raises.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("shard_0.npy", np.arange(12.0).reshape(6, 2))
        >>> profile = lazyshards.open_shards("shard_0.npy", engine="numpy")[1:4].profile()
        >>> [stage.name for stage in profile.stages], profile.bytes_read
        (['plan', 'allocate', 'fill', 'engine'], 48)
        >>> profile.array[0]
        array([2., 3.])
        """
        selection, layout = self._selection, self._layout
        name = choose_engine(engine or self._engine, layout.dtype, len(selection.shape), warn=True)
        runner = find_engine(name)
        recorder = Recorder(keeps_ranges=limit)
        fetched, start = device_nbytes(), time.perf_counter()
        with recorder.recording():
            with stage("plan"):
                capacity = runner.capacity(self.nbytes)
                plan = compile_plan(layout, selection, capacity)
            array = self._run(runner, plan, None, None)
        seconds = time.perf_counter() - start
        return make_profile(
            recorder,
            array=array,
            seconds=seconds,
            engine=name,
            workers=capacity.workers,
            tiles=plan.tile_count,
            device_nbytes=device_nbytes() - fetched,
            note=rank_note(name),
        )

    def head(self, n: int = 5) -> npt.NDArray[np.generic]:
        """Read the first rows into a NumPy array, whatever the dataset's engine is.

        Parameters
        ----------
        n : int
            Rows; fewer are returned if there are fewer.

        Raises
        ------
        TypeError
            If the row axis was dropped.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("shard_0.npy", np.arange(12))
        >>> lazyshards.open_shards("shard_0.npy").head(3)
        array([0, 1, 2])
        """
        self._check_rows("head")
        return self[: checked_count(n, "head()")].to_numpy()

    def sample(self, n: int = 5, seed: int | None = None) -> npt.NDArray[np.generic]:
        """Read some rows, drawn at random, into a NumPy array, whatever the dataset's engine is.

        No row is drawn twice, and they come in the order in which they lie. Drawing takes time and memory for ``n``,
        not for all rows. The seed decides which rows are drawn of so many: datasets of one length give rows that
        belong together.

        Parameters
        ----------
        n : int
            Rows.
        seed : int, optional
            None draws one; of several ranks that use Legate, all must then call.

        Raises
        ------
        ValueError
            If there are fewer rows.
        TypeError
            If the row axis was dropped.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("shard_0.npy", np.arange(1_000))
        >>> lazyshards.open_shards("shard_0.npy").sample(3, seed=0).shape
        (3,)
        """
        self._check_rows("sample")
        count = checked_count(n, "sample()")
        if seed is None:
            seed = draw_seed(wanted_engine(self._engine))
        return self[sampled_rows(count, len(self), seed)].to_numpy()

    def _check_rows(self, what: str) -> None:
        """Raise TypeError if the row axis was dropped."""
        if self._selection.scalar:
            raise TypeError(f"{what} of a single row: index the row axis with a slice, such as ds[5:6]")

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

    def __dlpack__(self, **options: Any) -> Any:
        """Read what is selected, for ``torch.as_tensor()`` and others: of an array that nobody else has."""
        array: Any = self.to_numpy()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return that of a NumPy array."""
        return np.empty(0).__dlpack_device__()

    def __iter__(self) -> Iterator[npt.NDArray[np.generic]]:
        """Yield the rows as NumPy arrays, read in blocks of a few megabytes; for arrays of the engine, use batches."""
        if not self.shape:
            raise TypeError("iteration over a dataset without axes")
        count = len(self)
        step = max(1, _ITERATION_NBYTES * count // max(1, self.nbytes))
        for start in range(0, count, step):
            yield from self[start : start + step].to_numpy()

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        seed: int | None = None,
        epochs: int = 1,
        drop_last: bool = False,
        prefetch: int = 2,
        engine: str | None = None,
        block_rows: int = 1024,
        window_blocks: int = 16,
        transform: Callable[[Any], Any] | None = None,
        progress: bool = False,
    ) -> Batches:
        """Return the rows in batches, each of them once an epoch, in an order that can be resumed exactly.

        Parameters
        ----------
        batch_size : int
            Rows of a batch; the last of an epoch may be shorter.
        shuffle : bool or {"rows", "blocks", "shards"}
            False: as they come. True or ``"rows"``: a true permutation of all rows. ``"blocks"``: blocks of
            ``block_rows`` contiguous rows in permuted order, shuffled within windows of ``window_blocks`` blocks, for
            storage on which single rows are slow. ``"shards"``: shards in permuted order, rows shuffled within each.
        seed : int, optional
            The order is a function of seed, epoch, fingerprint and the arguments above. None draws one.
        epochs : int
            Epochs of one ``for``.
        drop_last : bool
            Leave out a last batch that is not full.
        prefetch : int
            Batches that are read ahead beside the next one; memory holds one more than that. Unless it is 0, small
            ones are read several at a time, up to 1 MiB, or 4 MiB by Legate.
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default the dataset's own.
        block_rows, window_blocks : int
            For ``shuffle="blocks"``.
        transform : callable, optional
            Called with each batch; what it returns is yielded instead.
        progress : bool
            Show a progress bar; needs tqdm.

        Returns
        -------
        Batches
            Yields arrays of shape ``(rows, *shape[1:])``. It knows its length, ``epoch`` and ``step``, and keeps
            ``state_dict()``.

        Examples
        --------
        >>> import numpy as np, lazyshards
        >>> np.save("numbers.npy", np.arange(7))
        >>> ds = lazyshards.open_shards("numbers.npy", engine="numpy")
        >>> [batch.tolist() for batch in ds.batches(3)]
        [[0, 1, 2], [3, 4, 5], [6]]
        >>> it = ds.batches(3, shuffle=True, seed=0)
        >>> sorted(int(row) for batch in it for row in batch)
        [0, 1, 2, 3, 4, 5, 6]
        """
        return Batches(
            self.batch_source(engine),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            drop_last=drop_last,
            prefetch=prefetch,
            block_rows=block_rows,
            window_blocks=window_blocks,
            transform=transform,
            progress=progress,
        )

    def batch_source(self, engine: str | None = None) -> ViewSource:
        """Return what batches are taken from, for what makes batches in its own way.

        Parameters
        ----------
        engine : {"auto", "numpy", "legate", "cupy"}, optional
            By default the dataset's own.

        Raises
        ------
        TypeError
            If the row axis was dropped.
        """
        if not self.shape:
            raise TypeError("batches of a dataset without axes")
        name = choose_engine(engine or self._engine, self.dtype, self.ndim, warn=True)
        if self._selection.scalar:
            raise TypeError("batches of a single row: index the row axis with a slice, such as ds[5:6]")
        return ViewSource(self._layout, self._selection, self.fingerprint, find_engine(name))

    def to_torch(self) -> Any:
        """Return a map-style torch Dataset of the rows, as tensors read by the NumPy engine; needs torch.

        A DataLoader reads all rows of a batch at once. Give it ``collate_fn=data.collate``, so that it does not copy
        them together again. For batches read ahead, and an order that is resumed exactly, see ``Batches.to_torch``.

        Raises
        ------
        UnsupportedDtypeError
            If torch has no such dtype.
        """
        from lazyshards.adapters.torch import TorchRows

        return TorchRows(self)

    def to_dask(self, *, block_nbytes: int = 128 << 20) -> Any:
        """Return a dask array of the dataset, each block of which is read by the NumPy engine; needs dask.

        Its name is made of the fingerprint, so that dask knows the same data again in every process.

        Parameters
        ----------
        block_nbytes : int
            Most bytes of a block, which otherwise is a tile of the plan; one row is always allowed.
        """
        from lazyshards.adapters.dask import to_dask

        if not self.shape:
            raise TypeError("to_dask of a dataset without axes")
        row_nbytes = max(1, self.nbytes // max(1, len(self)))
        rows = self.plan("numpy").tile_rows if not self._selection.scalar else len(self)
        return to_dask(self, max(1, min(rows, block_nbytes // row_nbytes)))

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "lazyshards", self.fingerprint

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
        # A result that does not fit has a plan all the same: its numbers say why.
        capacity = replace(find_engine(name).capacity(self.nbytes), result_nbytes=None, ships=True)
        return compile_plan(self._layout, self._selection, capacity, tiles_per_processor=tiles_per_processor)

    def explain(self, engine: str | None = None) -> None:
        """Print the plan for a person: its numbers, how much more is read than is wanted, and the stages of reading."""
        name = choose_engine(engine or self._engine, self.dtype, self.ndim)
        text = display.plan_text(self.plan(name), name, find_engine(name).capacity(), len(self._layout))
        if self._layout.maps:
            text += f"\n{'mapped by':16}{display.folded(self._layout.maps_text, 16)}"
        if self._layout.cast_from:
            text += f"\n{'elements':16}{self._layout.dtype_text}"
        if is_first_rank():
            print(text)  # noqa: T201  # what it is for


_REFRESHES = 3
"""Times that a compute begins again because a file was replaced while it was read."""


def _execute(runner: Engine, plan: ReadPlan, out: Array | None, progress: Progress | None) -> Array:
    """Run a plan; with ``on_change="refresh"``, on shards as they are now, from the start if one changes meanwhile."""
    if plan.layout.storage.on_change != "refresh":
        return runner.execute(plan, out=out, progress=progress)
    layout, rows = plan.layout.narrow(plan.rows)
    plan = replace(plan, layout=layout, rows=rows)
    for left in reversed(range(_REFRESHES)):
        layout = together(
            partial(catalog.refreshed, plan.layout), layout_facts, runner.name, what="looking at the shards again"
        )
        plan = replace(plan, layout=layout)
        try:
            return runner.execute(plan, out=out, progress=progress)
        except ShardChangedError:
            if not left:
                raise
    raise AssertionError("it returned or raised before")


def _is_size(value: object) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= 0)
