"""Reductions of what does not fit in memory: blocks are read ahead, reduced on threads, and merged in order."""

from lazyshards.reductions.blocks import BlockPlan
from lazyshards.reductions.statistics import Measurable
from lazyshards.reductions.tables import ColumnStats

__all__ = ["BlockPlan", "ColumnStats", "Measurable"]
