"""Text and HTML of a dataset, a layout and a plan."""

from lazyshards.layout import Layout
from lazyshards.plan import Capacity, ReadPlan
from lazyshards.selection import Selection

__all__ = ["dataset_html", "dataset_text", "plan_text"]


def dataset_text(layout: Layout, selection: Selection, engine: str) -> str:
    """Return one line for a dataset."""
    return f"<ShardedDataset {selection.shape} {layout.dtype}, {len(layout)} {layout.format} shards, engine {engine}>"


def dataset_html(layout: Layout, selection: Selection, engine: str) -> str:
    """Return a dataset for a notebook."""
    return dataset_text(layout, selection, engine)


def plan_text(plan: ReadPlan, engine: str, capacity: Capacity) -> str:
    """Return a plan for a person."""
    return f"{engine}: {plan.tile_count} tiles over {plan.shards} shards, {plan.nbytes} bytes"
