"""How well an order is shuffled, and what it costs to read in it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lazyshards import display
from lazyshards.ahead import Source
from lazyshards.samplers import Order

__all__ = ["ShuffleQuality", "measure_quality"]

_SAMPLED_BATCHES = 32
"""Batches of an epoch that are looked at."""


@dataclass(frozen=True, slots=True, repr=False)
class ShuffleQuality:
    """How well an order is shuffled, beside what it costs; means over a sample of batches."""

    rank_correlation: float
    """Spearman's correlation of position and row: 1 in file order, about 0 where well shuffled."""
    shards_per_batch: float
    """Distinct shards that a batch touches."""
    requests_per_batch: float
    """Reads that a batch takes."""
    bytes_per_batch: float
    """Bytes that a batch reads."""
    read_amplification: float
    """Bytes read for each byte wanted."""
    warmed_nbytes: int
    """Bytes of files that are read front to back beside the batches, as they are not in memory, would fit there, and
    so come cheaper than row by row; 0 if that is not done."""
    batches: int
    """How many batches were looked at."""

    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("rank correlation", f"{self.rank_correlation:+.3f}"),
            ("shards a batch", f"{self.shards_per_batch:,.1f}"),
            ("requests a batch", f"{self.requests_per_batch:,.1f}"),
            ("bytes a batch", display.size_text(round(self.bytes_per_batch))),
            ("amplification", f"{self.read_amplification:.2f} bytes read for each wanted"),
        ]
        if self.warmed_nbytes:
            facts.append(("read beside", f"{display.size_text(self.warmed_nbytes)}, front to back"))
        return facts

    def __repr__(self) -> str:
        lines = [f"  {name:16}  {text}" for name, text in self._facts()]
        return "\n".join([f"<ShuffleQuality, by {self.batches:,} batch{'es' * (self.batches != 1)}>", *lines])

    def _repr_html_(self) -> str:
        looked = ("looked at", f"{self.batches:,} batch{'es' * (self.batches != 1)}")
        return display.panel("ShuffleQuality", [looked, *self._facts()])

    def __str__(self) -> str:
        warmed = f", {self.warmed_nbytes:,} bytes read front to back beside them" if self.warmed_nbytes else ""
        return (
            f"rank correlation {self.rank_correlation:+.3f}, {self.shards_per_batch:,.1f} shards, "
            f"{self.requests_per_batch:,.1f} requests and {self.bytes_per_batch:,.0f} bytes a batch, "
            f"{self.read_amplification:.2f} bytes read for each wanted{warmed} ({self.batches} batches looked at)"
        )


def measure_quality(source: Source, order: Order, batch_size: int, count: int, scattered: int) -> ShuffleQuality:
    """Return how well an order is shuffled and what its batches cost; reads no row.

    Parameters
    ----------
    source : Source
    order : Order
    batch_size : int
        Rows of a batch.
    count : int
        Batches of the epoch.
    scattered : int
        Rows that are read ahead in no order, if any.
    """
    numbers = np.unique(np.linspace(0, max(0, count - 1), min(count, _SAMPLED_BATCHES)).astype(int)).tolist()
    drawn, costs = [], []
    for number in numbers:
        start = number * batch_size
        rows = order.rows(start, min(start + batch_size, source.size))
        drawn.append(np.asarray(rows, np.int64))
        costs.append(source.cost(rows))
    if not drawn:
        return ShuffleQuality(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    rows = np.concatenate(drawn)
    shards, requests, nbytes = np.mean(costs, axis=0).tolist()
    wanted = len(rows) * source.row_nbytes
    return ShuffleQuality(
        rank_correlation=_correlation(rows),
        shards_per_batch=shards,
        requests_per_batch=requests,
        bytes_per_batch=nbytes,
        read_amplification=nbytes * len(drawn) / wanted if wanted else 0.0,
        warmed_nbytes=source.warmed_nbytes(scattered),
        batches=len(drawn),
    )


def _correlation(rows: npt.NDArray[np.int64]) -> float:
    """Return Spearman's rank correlation of rows and the order in which they come."""
    if len(rows) < 2:
        return 0.0
    ranks = np.empty(len(rows))
    ranks[np.argsort(rows, kind="stable")] = np.arange(len(rows))
    return float(np.corrcoef(ranks, np.arange(len(rows)))[0, 1])
