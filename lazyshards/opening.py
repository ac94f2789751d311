"""From a path to a dataset, or to a bundle of several."""

from collections.abc import Mapping
from typing import Any, overload

from lazyshards.bundle import Bundle, zip_shards
from lazyshards.dataset import ShardedDataset
from lazyshards.engines import check_engine_name, wanted_engine
from lazyshards.engines.handover import scan_together
from lazyshards.selection import select_all
from lazyshards.where import filtered_rows

__all__ = ["open_shards"]


@overload
def open_shards(path: object, *, columns: Mapping[str, object], **options: Any) -> Bundle: ...
@overload
def open_shards(path: object, *, dataset: Mapping[str, object], **options: Any) -> Bundle: ...
@overload
def open_shards(path: object, **options: Any) -> "ShardedDataset": ...
def open_shards(
    path: object,
    *,
    format: str | None = None,
    engine: str | None = None,
    order: str = "natural",
    holes: str = "raise",
    on_change: str = "raise",
    storage_options: Mapping[str, object] | None = None,
    dtype: object = None,
    manifest: str = "auto",
    **options: object,
) -> "ShardedDataset | Bundle":
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
    on_change : {"raise", "warn", "refresh", "ignore"}
        What to do if a shard is read that is no longer the file that was opened: raise an error; warn and read it all
        the same, old and new rows mixed or not; look at it again, and read the new file throughout if it holds as many
        rows of the same shape and dtype, else raise; or nothing.
    storage_options : mapping, optional
        Options for fsspec, for URLs.
    dtype : dtype, optional
        Type of the elements of the dataset. Shards of other types are cast to it when they are read, if that is safe;
        see :meth:`ShardedDataset.astype`. For a format that does not say it in its files (``raw``, ``reader=``), what
        the files hold.
    manifest : {"auto", "require", "refresh", "ignore"}
        What to do about the file that :meth:`ShardedDataset.save_manifest` left in a directory. It is used if one
        listing shows that no shard was added, removed or changed since; else ``"auto"`` reads the headers as if there
        were none, ``"require"`` raises an error that names what changed, and ``"refresh"`` reads them and writes it
        again, or for the first time. ``"ignore"`` does not look at it. Given as ``path``, the manifest itself says
        which shards there are, and nothing is listed.
    **options
        Options of the format. With ``reader=``, a function, that one reads the files, of any format: it is called as
        ``reader(path, start, stop)`` and returns those rows; ``rows=``, ``dtype=`` and ``row_shape=`` say the rest.
        With ``filters=``, such as ``[("label", "==", 3), ("age", ">", 20)]``, only the rows of Parquet files for which
        all conditions hold (or, of a list of such lists, those of one of them): an index view, for which row groups are
        skipped by their statistics, and of the others no more is read than the columns of the filters.
        A mapping as ``columns=`` or ``dataset=``, such as ``columns={"x": ["a", "b"], "y": "label"}``, opens each of
        its values and returns a :class:`Bundle` of them under its keys.

    Returns
    -------
    ShardedDataset
        Of shape ``(rows of all shards, *row shape)``, in native byte order.

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
    for name in ("columns", "dataset"):
        named = options.get(name)
        if isinstance(named, Mapping):
            alike = {
                "format": format,
                "engine": engine,
                "order": order,
                "holes": holes,
                "on_change": on_change,
                "storage_options": storage_options,
                "dtype": dtype,
                "manifest": manifest,
            }
            each = {key: {**alike, **options, name: one} for key, one in named.items()}
            return zip_shards(**{key: open_shards(path, **given) for key, given in each.items()})
    filters = options.pop("filters", None)
    layout = scan_together(
        path,
        engine=wanted_engine(engine),
        manifest=manifest,
        format=format,
        order=order,
        holes=holes,
        on_change=on_change,
        storage_options=storage_options,
        dtype=dtype,
        options=options,
    )
    opened = ShardedDataset(layout, select_all(layout.rows, layout.row_shape), engine)
    return opened if filters is None else opened[filtered_rows(layout, filters, wanted_engine(engine))]
