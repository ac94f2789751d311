"""Start Legate for a peer on the very configuration that lazyshards gives it, so that both run on the same machine."""

from __future__ import annotations

import importlib

__all__ = ["start"]


def start() -> None:
    """Prepare this process for ``import cupynumeric``; without lazyshards, the caller's environment has to do."""
    try:
        bringup = importlib.import_module("lazyshards.engines.bringup")
    except ImportError:
        return
    bringup.start()
