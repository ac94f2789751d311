"""The version: what the build wrote beside this file, from the tag in Git, or 0.0.0.dev0 where nothing was built."""

import os

__all__ = ["__version__"]

try:
    with open(os.path.join(os.path.dirname(__file__), "_version.txt"), encoding="ascii") as _file:
        __version__ = _file.read().strip()
except FileNotFoundError:
    __version__ = "0.0.0.dev0"
