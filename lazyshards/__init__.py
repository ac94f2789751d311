"""lazyshards: sharded, on-disk data into arrays, lazily.

>>> import lazyshards
>>> ds = lazyshards.open_shards(path)        # doctest: +SKIP
>>> arr = ds[1_000:5_000].compute()          # doctest: +SKIP
"""

from lazyshards import formats
from lazyshards._version import __version__ as __version__
from lazyshards.dataset import ShardedDataset, open_shards
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
    SelectionError,
    ShardChangedError,
    ShardChangedWarning,
    ShardReadError,
    ShardsNotFoundError,
    StateError,
    UnsupportedDtypeError,
)
from lazyshards.formats import register_format
from lazyshards.layout import Shard
from lazyshards.plan import ReadPlan

SUPPORTED_FORMATS = formats.format_names()
"""Names of the formats that ``open_shards`` reads."""

__all__ = [
    "SUPPORTED_FORMATS",
    "CapacityError",
    "EngineError",
    "EngineFallbackWarning",
    "EngineUnavailableError",
    "FormatError",
    "LayoutError",
    "LazyShardsError",
    "LazyShardsWarning",
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
    "open_shards",
    "register_format",
    "set_engine",
]
