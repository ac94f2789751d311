"""lazyshards: sharded, on-disk data into arrays, lazily.

>>> import lazyshards
>>> ds = lazyshards.open_shards(path)        # doctest: +SKIP
>>> arr = ds[1_000:5_000].compute()          # doctest: +SKIP
"""

from lazyshards import formats
from lazyshards._version import __version__ as __version__
from lazyshards.bundle import Bundle, zip_shards
from lazyshards.dataset import ShardedDataset
from lazyshards.engines import set_engine
from lazyshards.errors import (
    CapacityError,
    EngineError,
    EngineFallbackWarning,
    EngineUnavailableError,
    FormatError,
    LayoutError,
    LazyShardsError,
    LazyShardsWarning,
    MapError,
    RankMismatchError,
    SelectionError,
    ShardChangedError,
    ShardChangedWarning,
    ShardReadError,
    ShardsNotFoundError,
    StateError,
    UnsupportedDtypeError,
)
from lazyshards.formats import register_format
from lazyshards.joined import concat
from lazyshards.layout import Shard
from lazyshards.mixture import Mixture, mix
from lazyshards.opening import open_shards
from lazyshards.plan import ReadPlan
from lazyshards.writing import write_shards

SUPPORTED_FORMATS = formats.format_names()
"""Names of the formats that ``open_shards`` reads."""

__all__ = [
    "SUPPORTED_FORMATS",
    "Bundle",
    "CapacityError",
    "EngineError",
    "EngineFallbackWarning",
    "EngineUnavailableError",
    "FormatError",
    "LayoutError",
    "LazyShardsError",
    "LazyShardsWarning",
    "MapError",
    "Mixture",
    "RankMismatchError",
    "ReadPlan",
    "SelectionError",
    "Shard",
    "ShardChangedError",
    "ShardChangedWarning",
    "ShardReadError",
    "ShardedDataset",
    "ShardsNotFoundError",
    "StateError",
    "UnsupportedDtypeError",
    "concat",
    "mix",
    "open_shards",
    "register_format",
    "set_engine",
    "write_shards",
    "zip_shards",
]
