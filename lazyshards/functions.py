"""Functions that a dataset holds, travelling by their names.

A dataset carries names and numbers, since its plans travel to the tasks that read. So a function travels by its name:
where it is at the top level of a module, any process can import it. Any other function (a lambda, one made within a
function, a bound method) is known in the process in which the dataset was made, as long as the dataset lives; there
the tasks of Legate find it as well, but another process does not, and says so.
"""

import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

from lazyshards.errors import FormatError

__all__ = ["NamedFunction", "keep_function"]


class NamedFunction:
    """A function, pickled by its name. Made by :func:`keep_function`."""

    __slots__ = ("__weakref__", "function", "module", "number", "qualname")

    def __init__(self, function: Callable[..., Any], module: str, qualname: str, number: int) -> None:
        self.function = function
        self.module = module
        self.qualname = qualname
        self.number = number
        """0 if it can be imported by its name, else which of the functions of that name in this process it is."""

    def __reduce__(self) -> tuple[Callable[..., "NamedFunction"], tuple[str, str, int]]:
        return _find, (self.module, self.qualname, self.number)

    def __repr__(self) -> str:
        return f"{self.module}.{self.qualname}"


_UFUNC_HOMES = ("numpy", "numpy.strings", "scipy.special")
"""Where ufuncs are looked for, if they are loaded."""
_functions: "WeakValueDictionary[tuple[str, str, int], NamedFunction]" = WeakValueDictionary()
"""Functions in use, by name and number."""
_last = 0
"""Number that was last given."""
_lock = RLock()


def keep_function(function: Callable[..., Any]) -> NamedFunction:
    """Return a function with its name; what can only be found in this process is found as long as that lives."""
    global _last
    kind = type(function)
    module = str(getattr(function, "__module__", None) or kind.__module__)
    qualname = str(getattr(function, "__qualname__", None) or kind.__qualname__)
    if kind.__name__ == "ufunc":  # which have a name, and do not say where it can be imported
        qualname = str(function.__name__)
        homes = [home for home in _UFUNC_HOMES if getattr(sys.modules.get(home), qualname, None) is function]
        module = homes[0] if homes else module
    with _lock:
        for named in list(_functions.values()):
            if named.function == function:
                return named
        if _import(module, qualname) is function:
            number = 0
        else:
            _last += 1
            number = _last
        named = _functions[module, qualname, number] = NamedFunction(function, module, qualname, number)
        return named


def _import(module: str, qualname: str) -> object:
    """Return what a name means, or None."""
    try:
        return reduce(getattr, qualname.split("."), sys.modules.get(module) or import_module(module))
    except (ImportError, AttributeError, ValueError):
        return None


def _find(module: str, qualname: str, number: int) -> NamedFunction:
    """Return the function of that name, in whatever process this is."""
    named = _functions.get((module, qualname, number))
    if named is not None:
        return named
    function = None if number else _import(module, qualname)
    if not callable(function):
        raise FormatError(
            f"the function {module}.{qualname} that reads this dataset is not known in this process: put it at the top "
            "level of a module that every process can import, instead of into a lambda, a method or another function"
        )
    with _lock:
        return _functions.setdefault((module, qualname, 0), NamedFunction(function, module, qualname, 0))
