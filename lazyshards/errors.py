"""Every exception and warning of the package.

::

    LazyShardsError
    ├── ShardsNotFoundError      FileNotFoundError  nothing at that path, or nothing that can be opened
    ├── FormatError              ValueError         which format it is cannot be told, or none of that name
    ├── LayoutError              ValueError         shards that cannot be one dataset: all faults at once
    ├── SelectionError           IndexError         an index that NumPy would refuse, or that cannot be lazy
    ├── ShardReadError           OSError            a shard could not be read
    │   └── ShardChangedError                       a shard is not the file that was opened
    ├── MapError                 RuntimeError       a function given to map() failed, or made something else
    ├── CapacityError            MemoryError        a result that does not fit, refused before anything is read
    ├── EngineError              RuntimeError       an engine used in a way that it cannot serve
    ├── RankMismatchError        RuntimeError       ranks that see different data, or ask for different things
    ├── EngineUnavailableError   ImportError        an engine that cannot run here, and what would install it
    ├── UnsupportedDtypeError    TypeError          a dtype or a number of axes that an engine or format lacks
    └── StateError               ValueError         an iterator state that does not belong to this dataset

    LazyShardsWarning            UserWarning
    ├── ShardChangedWarning                         a changed shard was read because ``on_change="warn"``
    └── EngineFallbackWarning                       ``auto`` took NumPy where it would have taken Legate

Each takes one positional message, so that all of them pickle.
"""

__all__ = [
    "CapacityError",
    "EngineError",
    "EngineFallbackWarning",
    "EngineUnavailableError",
    "FormatError",
    "LayoutError",
    "LazyShardsError",
    "LazyShardsWarning",
    "MapError",
    "RankMismatchError",
    "SelectionError",
    "ShardChangedError",
    "ShardChangedWarning",
    "ShardReadError",
    "ShardsNotFoundError",
    "StateError",
    "UnsupportedDtypeError",
]


class LazyShardsError(Exception):
    """Base of every error that the package raises on purpose."""


class ShardsNotFoundError(LazyShardsError, FileNotFoundError):
    """Nothing at the path, or nothing there that could be opened."""


class FormatError(LazyShardsError, ValueError):
    """The format cannot be told, is mixed, or has no such name."""


class LayoutError(LazyShardsError, ValueError):
    """Shards that cannot form one dataset; the message lists all faults."""


class SelectionError(LazyShardsError, IndexError):
    """An index that NumPy would refuse, or that cannot be applied lazily."""


class ShardReadError(LazyShardsError, OSError):
    """A shard could not be read; the message names it."""


class ShardChangedError(ShardReadError):
    """A shard is not the file that was opened: it was changed, shrunk or replaced."""


class MapError(LazyShardsError, RuntimeError):
    """A function given to ``map`` failed, or made something else than was promised; the message names the rows."""


class CapacityError(LazyShardsError, MemoryError):
    """A result that does not fit the engine's memory, refused before anything is read."""


class EngineError(LazyShardsError, RuntimeError):
    """An engine used in a way that it cannot serve: another thread, inside a task, a wrong ``out``."""


class RankMismatchError(LazyShardsError, RuntimeError):
    """Ranks of one Legate run that see different data, or ask for different things: raised on all of them."""


class EngineUnavailableError(LazyShardsError, ImportError):
    """An engine that cannot run here; the message says what would install it."""


class UnsupportedDtypeError(LazyShardsError, TypeError):
    """A dtype, or a number of axes, that the engine or the format cannot hold."""


class StateError(LazyShardsError, ValueError):
    """A saved iterator state that does not belong to this dataset or iterator."""


class LazyShardsWarning(UserWarning):
    """Base of every warning of the package."""


class ShardChangedWarning(LazyShardsWarning):
    """A shard that changed since it was opened was read, because ``on_change="warn"``."""


class EngineFallbackWarning(LazyShardsWarning):
    """The ``auto`` engine took NumPy for a dataset or thread that Legate cannot serve."""
