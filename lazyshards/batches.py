"""Epochs: batches of rows in a known order, read ahead, resumed exactly. Knows no dataset class."""

import operator
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from lazyshards.ahead import Batch, ReadAhead, Source, most_together
from lazyshards.engines.ranks import is_first_rank
from lazyshards.errors import StateError
from lazyshards.progress import Bar, progress_bar
from lazyshards.quality import ShuffleQuality, measure_quality
from lazyshards.samplers import ORDER_VERSION, Order, Shuffle

__all__ = ["BatchOptions", "Batches"]

_SHUFFLES = ("rows", "blocks", "shards")
_STATE_VERSION = 1


class BatchOptions(TypedDict, total=False):
    """The options of ``batches``, as ShardedDataset.batches describes them."""

    shuffle: bool | str
    seed: int | None
    epochs: int
    drop_last: bool
    prefetch: int
    block_rows: int
    window_blocks: int
    transform: Callable[[Any], Any] | None
    progress: bool


class Batches:
    """Batches of an epoch, made by ``ShardedDataset.batches``.

    A ``for`` over it takes up at its position: the very next batch after :meth:`load_state_dict` or after a ``break``.
    Once an epoch is finished, the next ``for`` starts the following one, in its own order.

    Parameters
    ----------
    source : Source
    batch_size : int
        Rows of a batch.
    shuffle : bool or {"rows", "blocks", "shards"}
        False takes the rows as they come; True is ``"rows"``.
    seed : int, optional
        Of the shuffle; None draws one, which ``seed`` shows and the state keeps.
    epochs : int
        Epochs of one ``for``.
    drop_last : bool
        Whether a last batch that is not full is left out.
    prefetch : int
        Batches that are read ahead beside the next one; small ones are read several at a time, unless it is 0.
    block_rows : int
        Rows of a block, for ``shuffle="blocks"``.
    window_blocks : int
        Blocks that are shuffled together.
    transform : callable, optional
        Called with each batch as it is handed out; what it returns is handed out instead.
    progress : bool
        Whether to show a progress bar (tqdm).
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        seed: int | None = None,
        epochs: int = 1,
        drop_last: bool = False,
        prefetch: int = 2,
        block_rows: int = 1024,
        window_blocks: int = 16,
        transform: Callable[[Any], Any] | None = None,
        progress: bool = False,
    ) -> None:
        self._source = source
        self._batch_size = _count(batch_size, "batch_size", 1)
        name = _shuffle_name(shuffle)
        self._epochs = _count(epochs, "epochs", 1)
        self._prefetch = _count(prefetch, "prefetch", 0)
        blocks = _count(block_rows, "block_rows", 1), _count(window_blocks, "window_blocks", 1)
        self._drop_last = bool(drop_last)
        self._transform = transform
        self._progress = progress
        if seed is not None:
            number = _count(seed, "seed", None)
        else:
            number = source.draw_seed() if name else 0
        self._shuffle = Shuffle(name, number, *(blocks if name == "blocks" else (0, 0)))
        self._first_epoch = 0
        self._epoch = 0
        self._position = 0
        # Weak: an iteration that is dropped ends at once, and leaves nothing behind.
        self._pass: weakref.ref[Generator[Batch, None, None]] | None = None

    # Where it is -----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Rows of a full batch."""
        return self._batch_size

    @property
    def seed(self) -> int:
        """Seed of the shuffle: the one given, drawn, or loaded."""
        return self._shuffle.seed

    @property
    def epoch(self) -> int:
        """Number of the epoch that the position is in, from 0."""
        return self._epoch

    @property
    def step(self) -> int:
        """Batches of this epoch that were handed out."""
        return -(-self._position // self._batch_size)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch."""
        size = self._source.size
        return size // self._batch_size if self._drop_last else -(-size // self._batch_size)

    @property
    def ahead_nbytes(self) -> int:
        """Most bytes of the batches that are being read, or were read and not handed out yet."""
        together = most_together(self._batch_size, self._source) if self._prefetch else 1
        return min((self._prefetch + together) * self._batch_size, self._source.size) * self._source.row_nbytes

    def __len__(self) -> int:
        """Return the batches of one ``for`` from the start of an epoch."""
        return self.batches_per_epoch * self._epochs

    def __repr__(self) -> str:
        shuffle = self._shuffle
        order = f"shuffle={shuffle.name!r}, seed={shuffle.seed}" if shuffle.name else "in file order"
        return (
            f"<Batches of {self._batch_size:,} rows from {self._source.size:,}, {order}: epoch {self._epoch}, "
            f"step {self.step} of {self.batches_per_epoch}>"
        )

    def _stop_row(self) -> int:
        """Return the position at which this epoch ends: from a changed batch size on, full batches count from there."""
        size = self._source.size
        return size - max(0, size - self._position) % self._batch_size if self._drop_last else size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the next ``for`` begins there.

        Parameters
        ----------
        epoch : int
            From 0.
        """
        self._stop()
        self._first_epoch = self._epoch = _count(epoch, "epoch", 0)
        self._position = 0

    def reset(self) -> None:
        """Go back to the start of the first epoch."""
        self.set_epoch(0)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the batch handed out last, as integers and strings that JSON can hold.

        What was read ahead is not part of it. ``load_state_dict`` continues with the very next batch, with any
        prefetch, batch size, engine, or number of processors.
        """
        shuffle = self._shuffle
        return {
            "version": _STATE_VERSION,
            "order_version": ORDER_VERSION,
            "fingerprint": self._source.fingerprint,
            "dataset": self._source.description,
            "shuffle": shuffle.name,
            "block_rows": shuffle.block_rows,
            "window_blocks": shuffle.window_blocks,
            "seed": shuffle.seed,
            "first_epoch": self._first_epoch,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where ``state`` was taken; its seed replaces this iterator's.

        Parameters
        ----------
        state : mapping
            What :meth:`state_dict` returned.
        strict : bool
            Whether to refuse the state of a dataset that is not this one. False goes on by position: rows of a changed
            dataset may then repeat or be left out.

        Raises
        ------
        StateError
            If the state is not one, or belongs to another dataset, order, or version.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping):
            raise StateError(f"the state is a {type(state).__name__}, expected the mapping that state_dict() returned")
        missing = [key for key in own if key not in state]
        if missing:
            raise StateError(f"the state has no {', '.join(missing)}: it was not made by state_dict()")
        for key in ("version", "order_version"):
            if state[key] != own[key]:
                raise StateError(f"the state has {key} {state[key]!r}, this version of lazyshards reads {own[key]!r}")
        for key in ("shuffle", "block_rows", "window_blocks"):
            if state[key] != own[key]:
                was, now = (value or False if key == "shuffle" else value for value in (state[key], own[key]))
                raise StateError(
                    f"the state was taken with {key}={was!r}, this iterator has {now!r}: the orders differ"
                )
        if strict and state["fingerprint"] != own["fingerprint"]:
            what = (
                "files were renamed, resized or reordered, or other rows selected"
                if state["dataset"] == own["dataset"]
                else f"it had {state['dataset']}, now there are {own['dataset']}"
            )
            raise StateError(
                f"the dataset is not the one that the state was taken of: {what}; pass strict=False to go on by "
                "position all the same"
            )
        try:
            first, epoch, position = [_count(state[key], key, 0) for key in ("first_epoch", "epoch", "position")]
            seed = _count(state["seed"], "seed", None)
        except (TypeError, ValueError) as exc:
            raise StateError(f"the state was not made by state_dict(): {exc}") from exc
        if position > self._source.size and strict:
            raise StateError(f"the state's position {position:,} is beyond the {self._source.size:,} rows")
        self._stop()
        self._shuffle = replace(self._shuffle, seed=seed)
        self._first_epoch, self._epoch, self._position = min(first, epoch), epoch, position

    # Going through ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the position on; an iteration begun earlier ends."""
        self._stop()
        if self._position and self._position >= self._stop_row():
            self._epoch, self._position = self._epoch + 1, 0
        if self._epoch >= self._first_epoch + self._epochs:
            self._first_epoch = self._epoch
        running = self._run()
        self._pass = weakref.ref(running)
        return running

    def _stop(self) -> None:
        """End the iteration under way, and with it all reading ahead."""
        running = self._pass() if self._pass is not None else None
        self._pass = None
        if running is not None:
            running.close()

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch: a function of seed, epoch, fingerprint and the shuffle's arguments.

        Parameters
        ----------
        epoch : int
            From 0.
        """
        return self._source.order(self._shuffle, epoch)

    def _run(self) -> Generator[Batch, None, None]:
        last_epoch = self._first_epoch + self._epochs - 1
        if not self.batches_per_epoch and not self._position:
            self._epoch = last_epoch
        with self._source.reading(self._scattered()), self._bar(last_epoch) as bar:
            while self._epoch <= last_epoch:
                yield from self._run_epoch(bar)
                # Only now: until the next batch is asked for, the position is that of this epoch's end.
                self._epoch, self._position = self._epoch + 1, 0

    def _scattered(self) -> int:
        """Return how many rows, in no order, one ``for`` from here on reads ahead."""
        if not self._shuffle.name or not self._prefetch:
            return 0
        epochs = max(0, self._first_epoch + self._epochs - self._epoch)
        return max(0, epochs * self._source.size - self._position)

    def _run_epoch(self, bar: Bar) -> Generator[Batch, None, None]:
        stop = self._stop_row()
        ahead = ReadAhead(self._source, self.order(self._epoch), self._position, stop, self._batch_size, self._prefetch)
        try:
            while self._position < stop:
                yield self._hand_out(ahead, bar)
        finally:
            ahead.close()

    def _hand_out(self, ahead: ReadAhead, bar: Bar) -> Batch:
        """Return the next batch; nothing of it is kept here while the user works with it."""
        end, batch = ahead.take()
        if self._transform is not None:
            batch = self._transform(batch)
        bar.update(end - self._position)
        self._position = end
        return batch

    def to_torch(self) -> Any:
        """Return the batches as a torch IterableDataset, whose state is this one's; needs torch.

        For a DataLoader, or torchdata's StatefulDataLoader, with ``batch_size=None``.
        """
        from lazyshards.adapters.torch import TorchBatches

        return TorchBatches(self)

    def _bar(self, last_epoch: int) -> AbstractContextManager[Bar]:
        epoch_rows = self.batches_per_epoch * self._batch_size if self._drop_last else self._source.size
        total = (last_epoch - self._epoch) * epoch_rows + max(0, self._stop_row() - self._position)
        shown = self._progress and is_first_rank()
        return progress_bar(total, f"batches of {self._source.title}" if shown else "", shown=shown)

    def quality(self) -> ShuffleQuality:
        """Return how well this epoch is shuffled and what its batches cost, from a sample of them; reads no row."""
        order, count = self.order(self._epoch), self.batches_per_epoch
        return measure_quality(self._source, order, self._batch_size, count, self._scattered())


def _count(value: object, name: str, least: int | None) -> int:
    """Return ``value`` as an int of at least ``least``, or raise what a user would expect."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={value!r} must be an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what it raises is the answer
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be {least} or more")
    return number


def _shuffle_name(shuffle: object) -> str:
    """Return the name of a shuffle, empty for none."""
    if shuffle is True:
        return "rows"
    if shuffle is False or shuffle is None:
        return ""
    if not isinstance(shuffle, str) or shuffle not in _SHUFFLES:
        raise ValueError(f"shuffle={shuffle!r} is not an order: use False, True, {', '.join(map(repr, _SHUFFLES))}")
    return str(shuffle)
