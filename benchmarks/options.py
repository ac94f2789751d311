"""What the command line chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """How large and how often to measure."""

    cache_dir: Path
    """Where the data is written and found again."""
    quick: bool
    """Small data and few turns: does everything run? Not for figures to quote."""
    full: bool
    """The slow sizes too."""
    repeat: int
    """Turns of each peer; 0 leaves it to the benchmark."""

    @property
    def load_nbytes(self) -> int:
        """Return the size of the dataset that is loaded and sliced."""
        return 256_000_000 if self.quick else 2_000_000_000

    def turns(self, usual: int) -> int:
        """Return how many turns to take where ``usual`` is the benchmark's own choice."""
        return self.repeat or (3 if self.quick else usual)
