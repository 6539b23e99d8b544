"""Assignment of micro-batches to ranks, and resuming within an epoch without reading earlier samples.

Micro-batch m of an epoch goes to rank m mod world. In each step `world` ranks without accumulation therefore process
the same samples as one rank with `world` accumulation steps. The last micro-batch may be short. No sample is visited
twice, except samples from the beginning of the epoch that complete an incomplete last round (see `Dealer.completes`).

A *round* is one batch of every rank: round i consists of the i-th batch of every rank in the epoch. A resumed epoch has
an *anchor*: the round, and the position in the data, at which this process group resumed. Earlier processes, possibly
with another world size, have processed the rounds before the anchor. Samples after the anchor are divided over the
current ranks.
"""

from __future__ import annotations

import copy
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch.utils.data import Sampler

from trainwright.core.errors import ConfigurationError
from trainwright.data.order import derive_key
from trainwright.data.seeding import (
    batch_key,
    sample_key,
    seed_each_sample,
    seeded,
)

# Seeds that are sent with the indices:
# - "none": no seeds.
# - "batch": one seed for each batch, set in the loader worker that fetches the batch.
# - "sample in worker": one seed for each sample, set in the loader worker.
# - "sample here": one seed for each sample, set in this process, which fetches the data itself.
Seeding = Literal["none", "batch", "sample in worker", "sample here"]


class Dealer(Sampler[Any], ABC):
    """Base class of the samplers: assignment of micro-batches to ranks, and the arithmetic of rounds.

    Attributes:
        batch_size: samples of one rank's full micro-batch. None if unknown.
        rank, world: this rank and the number of ranks that share the micro-batches. `0, 1` if the data is not divided.
        seed: seed of the order and of the seeds for augmentation.
        seeding: the kind of seeds that are sent with the indices.
        stream: distinguishes the seeds of ranks whose micro-batches have equal indices, such as ranks with independent
            loaders, which each have a micro-batch 0. The rank in these cases, otherwise 0.
        epoch: the epoch of the last `set_epoch`.
        completes: an incomplete last round is completed with samples from the beginning of the epoch.
    """

    batch_size: int | None = None

    def __init__(self, *, rank: int, world: int, seed: int, seeding: Seeding = "none") -> None:
        if not 0 <= rank < world:
            raise ConfigurationError(f"rank={rank} is not in [0, world={world}).")
        self.rank = rank
        self.world = world
        self.seed = seed
        self.seeding: Seeding = seeding
        self.stream = 0
        self.epoch = 0
        self.completes = False
        self._anchor_round = 0  # the round at which `set_epoch` resumed the epoch; 0 for a new epoch
        self._start_round = 0  # the round at which the next iteration begins, at least the anchor

    @property
    @abstractmethod
    def micro_batches_left(self) -> int | None:
        """Micro-batches of this epoch after the anchor, over all ranks; None if unknown."""

    @property
    @abstractmethod
    def order_needs_seed(self) -> bool:
        """True if the order depends on `seed`."""

    def set_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Set `epoch` (0-based). `resume` is the `position` at which the epoch was interrupted, or None."""
        self.epoch = epoch
        self._anchor_round = int(resume["batch"]) if resume else 0
        self._start_round = self._anchor_round

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the JSON-compatible values on which the epoch's order depends, except the seed.

        A position is only valid for equal values.
        """

    def start(self, batch: int) -> None:
        """Set the first round of the next iteration to round `batch` of the epoch.

        Raises:
            ConfigurationError: the round is before the round at which `set_epoch` resumed the epoch.
        """
        if batch < self._anchor_round:
            raise ConfigurationError(
                f"start batch {batch} is before batch {self._anchor_round}, where this epoch was resumed."
            )
        self._start_round = batch

    def counts(self) -> list[int] | None:
        """Return the number of batches of each rank in this epoch, also before the anchor; None if unknown."""
        left = self.micro_batches_left
        if left is None:
            return None
        counts = []
        for rank in range(self.world):
            # 5 micro-batches on 2 ranks: rank 0 gets 3 of them (0, 2, 4), and rank 1 gets 2 (1, 3).
            num_of_rank = max(0, divide_up(left - rank, self.world))
            counts.append(self._anchor_round + num_of_rank)
        return counts

    @property
    def num_rounds(self) -> int | None:
        """The maximal number of batches of a rank in this epoch; None if unknown."""
        left = self.micro_batches_left
        if left is None:
            return None
        return self._anchor_round + divide_up(left, self.world)

    def has_batch(self, round_index: int) -> bool:
        """Return whether this rank has its own batch in the round; True if the number is unknown."""
        left = self.micro_batches_left
        if left is None:
            return True
        return self._first_micro_batch(round_index) + self.rank < left

    def real_ranks(self, round_index: int) -> int:
        """Return the number of ranks with their own batch in the round; all of them if the number is unknown."""
        left = self.micro_batches_left
        if left is None:
            return self.world
        return min(self.world, max(0, left - self._first_micro_batch(round_index)))

    def samples_in_round(self, round_index: int) -> int | None:
        """Return the number of samples in the round over all ranks, or None if it cannot be computed.

        Samples that complete the last round are not counted.
        """
        return None

    def real_rows(self, round_index: int) -> int | None:
        """Return the number of samples in this rank's batch that are not repeated to complete the last round.

        None if no sample is repeated, or if the round has not been drawn.
        """
        return None

    @abstractmethod
    def position(self, batch: int) -> dict[str, int]:
        """Return the JSON-compatible position in the data after `batch` rounds, for `set_epoch(resume=...)`."""

    def indices_in(self, round_index: int) -> list[int | str] | None:
        """Return the indices in this rank's batch of a round, or None if unknown. A running iteration is unaffected."""
        twin = self._twin()
        twin.seeding = "none"
        twin.start(round_index)
        batch = next(iter(twin), ())
        indices = batch if isinstance(batch, (list, tuple)) else [batch]
        return [plain_index(index) for index in indices]

    def _twin(self) -> Dealer:
        return copy.copy(self)

    def first(self) -> Any:
        """Return the indices of micro-batch 0 of the epoch, whatever this rank is. The epoch must not be empty."""
        alone = copy.copy(self)
        alone.rank = 0
        alone.world = 1
        alone.seeding = "none"
        # Not the method of the sub-class, which would call set_epoch of the user's sampler and read the data's length.
        Dealer.set_epoch(alone, self.epoch)
        alone._rewind()
        return next(iter(alone))

    def _rewind(self) -> None:
        """Set the anchor's position in the data to 0."""

    def __len__(self) -> int:
        """Return the number of batches of the next iteration on this rank. Raises TypeError if unknown."""
        counts = self.counts()
        if counts is None:
            raise TypeError("The number of batches is unknown.")
        return max(0, counts[self.rank] - self._start_round)

    def _first_micro_batch(self, round_index: int) -> int:
        """Return the first micro-batch of a round, counted from the anchor."""
        return (round_index - self._anchor_round) * self.world

    def _seeded(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Return this rank's batches with their seeds. `first` is the first batch's micro-batch index in the epoch."""
        if self.seeding == "none":
            return batches
        if self.seeding != "batch":
            key = sample_key(self.seed, self.epoch, self.stream)
            return seed_each_sample(batches, key, here=self.seeding == "sample here")
        key = batch_key(self.seed, self.epoch, self.stream)
        micro_batches = itertools.count(first, self.world)
        seeds = (derive_key(key, micro_batch) for micro_batch in micro_batches)
        return map(seeded, batches, seeds)


def divide_up(number: int, divisor: int) -> int:
    """Return the quotient, rounded up: 3 for 5 and 2."""
    return -(-number // divisor)


def plain_index(index: object) -> int | str:
    """Return an index in a JSON-compatible form."""
    return operator.index(index) if hasattr(index, "__index__") else str(index)
