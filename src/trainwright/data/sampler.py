"""Index batches of one rank from a data set in its own or in a shuffled order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from trainwright.core.errors import ConfigurationError
from trainwright.data.dealer import Dealer, Seeding
from trainwright.data.order import SampleOrder, SequentialOrder, ShuffledOrder

# Indices computed at once by a running sampler: enough to amortise numpy, few enough for a fast resume.
_CHUNK = 8192


class ShardedBatchSampler(Dealer):
    """Index batches of one rank, from an order that is a pure function of (seed, epoch).

    Micro-batch m is the slice [m·batch_size, (m + 1)·batch_size) of the order, counted from the position at which the
    epoch begins or resumes. Rank r takes m = r, r + world, r + 2·world, … A resume takes constant time.

    Args:
        num_samples: number of samples, or the data set, whose length is read at the beginning of each epoch.
        batch_size: samples in a micro-batch. The last micro-batch of the epoch may have fewer.
        shuffle: visit the samples in `ShuffledOrder(num_samples, seed, epoch)`. False visits them in sequence.
        seed: seed of the order; the same on every rank.
        drop_last: skip a short last micro-batch. Default: False.
        rank, world: this rank and the number of data-parallel ranks.
        single: yield single indices instead of lists of one; requires `batch_size=1`. Default: False.
        seeding: seeds for random augmentation: `"none"`, `"batch"` (one for each batch, set in the loader's worker),
            `"sample in worker"` or `"sample here"` (one for each sample). Default: `"none"`.
        completes: complete an incomplete last round with samples from the beginning of the order, so that all ranks
            have equal numbers of samples. `drop_last` then drops an incomplete last round. Default: False.

    Raises:
        ConfigurationError: a number is out of range.
    """

    batch_size: int

    def __init__(
        self,
        num_samples: int | Sized,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        single: bool = False,
        seeding: Seeding = "none",
        completes: bool = False,
    ) -> None:
        super().__init__(rank=rank, world=world, seed=seed, seeding=seeding)
        self._data = num_samples
        self.num_samples = num_samples if isinstance(num_samples, int) else len(num_samples)
        if self.num_samples < 0 or batch_size < 1 or (single and batch_size != 1):
            raise ConfigurationError(
                f"num_samples={self.num_samples}, batch_size={batch_size}: expected at least 0 and at least 1"
                f"{', exactly 1 for single indices' if single else ''}."
            )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.single = single
        self.completes = completes
        self._anchor_sample = 0

    @property
    def micro_batches_left(self) -> int:
        # 10 samples, batches of 2, 3 ranks: 5 micro-batches. If rounds are completed: 6, or 3 with `drop_last`.
        samples = self.num_samples - self._anchor_sample
        unit = self.world if self.completes else 1  # micro-batches that exist together or not at all
        size = self.batch_size * unit
        num_units = samples // size if self.drop_last else -(-samples // size)  # rounded up
        return num_units * unit

    def set_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Set `epoch`. `resume` contains the numbers `batch` and `samples` (over all ranks) consumed in it so far.

        Without `samples`, every batch counts as full, and `world` must not have changed. Loaders that are not divided
        pass only `batch`.
        """
        super().set_epoch(epoch, resume)
        if isinstance(self._data, Sized):
            self.num_samples = len(self._data)
        consumed = 0
        if resume:
            consumed = int(resume.get("samples", resume["batch"] * self.world * self.batch_size))
        self._anchor_sample = min(self.num_samples, consumed)

    def facts(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self.shuffle}

    def _rewind(self) -> None:
        self._anchor_sample = 0

    def samples_in_round(self, round_index: int) -> int:
        return self._samples_before(round_index + 1) - self._samples_before(round_index)

    def real_rows(self, round_index: int) -> int | None:
        rows = self.samples_in_round(round_index) - self.rank * self.batch_size
        return None if rows >= self.batch_size else max(0, rows)

    def position(self, batch: int) -> dict[str, int]:
        """Return `batch` and `samples`, the number of samples consumed by all ranks in `batch` rounds."""
        return {"batch": batch, "samples": self._samples_before(batch)}

    @property
    def order_needs_seed(self) -> bool:
        return self.shuffle

    def order(self) -> SampleOrder:
        """Return the current epoch's order."""
        if self.shuffle:
            return ShuffledOrder(self.num_samples, self.seed, self.epoch)
        return SequentialOrder(self.num_samples)

    def __iter__(self) -> Iterator[Any]:
        # Epoch and position are read now, not while iterating: `set_epoch` may be called before the iteration ends,
        # because loader workers prefetch.
        first = self._first_micro_batch(self._start_round) + self.rank
        batches = self._batches(self.order(), self._anchor_sample, first, self.micro_batches_left)
        drawn: Iterator[Any] = (batch[0] for batch in batches) if self.single else batches
        # `first` counts from the anchor, and seeds count from the beginning of the epoch.
        return self._seeded(drawn, self._anchor_sample // self.batch_size + first)

    def _batches(self, order: SampleOrder, anchor: int, first: int, stop: int) -> Iterator[list[int]]:
        """Yield the indices of this rank's micro-batches `first`, `first + world`, … before `stop`.

        Micro-batches count from the sample `anchor` of the order.
        """
        size = self.batch_size
        num_at_once = max(1, _CHUNK // size)
        offsets = np.arange(size, dtype=np.int64)
        micro_batches = range(first, stop, self.world)
        for chunk_start in range(0, len(micro_batches), num_at_once):
            chunk = micro_batches[chunk_start : chunk_start + num_at_once]
            # Row i contains the positions of the chunk's i-th micro-batch: with size 2, micro-batches 1 and 3 have the
            # positions 2, 3 and 6, 7 after the anchor.
            places = anchor + np.asarray(chunk, dtype=np.int64)[:, None] * size + offsets
            if places[-1, -1] < order.n:
                yield from order.take(places).tolist()
            elif self.completes:
                # Positions after the end of the order are those of its beginning.
                yield from order.take(places % order.n).tolist()
            else:
                # Only the last micro-batch of the epoch can be short.
                yield from order.take(places[:-1]).tolist()
                last = places[-1]
                yield order.take(last[last < order.n]).tolist()

    def _samples_before(self, round_index: int) -> int:
        """Return the number of samples that all ranks have consumed before a round."""
        micro_batches = min(max(0, self._first_micro_batch(round_index)), self.micro_batches_left)
        return min(self._anchor_sample + micro_batches * self.batch_size, self.num_samples)
