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
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from trainwright.core.errors import ConfigurationError
from trainwright.core.rng import isolate_rng
from trainwright.data.iterable import sets_epoch
from trainwright.data.order import SampleOrder, SequentialOrder, ShuffledOrder, derive_key, epoch_key
from trainwright.data.rounds import completed, real_rows, rounds_of_batches
from trainwright.data.seeding import (
    HeldGenerator,
    batch_key,
    held_generators,
    numbers_of_global_generators,
    sample_key,
    seed_each_sample,
    seed_global_generators,
    seeded,
)

_END: Any = object()
# Indices computed at once by a running sampler: enough to amortise numpy, few enough for a fast resume.
_CHUNK = 8192

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
            num_of_rank = max(0, _divide_up(left - rank, self.world))
            counts.append(self._anchor_round + num_of_rank)
        return counts

    @property
    def num_rounds(self) -> int | None:
        """The maximal number of batches of a rank in this epoch; None if unknown."""
        left = self.micro_batches_left
        if left is None:
            return None
        return self._anchor_round + _divide_up(left, self.world)

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
        return [_plain_index(index) for index in indices]

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


class _TorchGenerator(NamedTuple):
    """Generator of a user's sampler, with its seed before any epoch."""

    generator: torch.Generator
    initial_seed: int


class BatchShard(Dealer):
    """Index batches of a user's sampler, divided over the ranks: micro-batch m belongs to rank m mod world.

    To skip batches, indices are drawn and discarded, and no data is fetched. Every rank and a resumed run must draw the
    same indices. The global CPU generators are therefore seeded by (seed, epoch) until the sampler has returned its
    first batch, and then restored. Generators in the sampler's attributes (of torch, NumPy or Python) are seeded, too,
    and the sampler's `set_epoch` is called.

    Args:
        batch_sampler: an iterable of index batches, or of single indices. Its length is optional.
        rank, world: this rank and the number of data-parallel ranks. With `0, 1` all batches belong to this rank.
        seed: seed of the run. Default: 0.
        seeding: see `ShardedBatchSampler`. Default: `"none"`.
        completes: complete an incomplete last round; see `rounds_of_batches`. Default: False.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        *,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        seeding: Seeding = "none",
        completes: bool = False,
    ) -> None:
        super().__init__(rank=rank, world=world, seed=seed, seeding=seeding)
        self.batch_sampler = batch_sampler
        self.completes = completes
        self._drop_last = bool(getattr(batch_sampler, "drop_last", False))
        # {round: `real_rows`} of the drawn rounds in which this rank's batch has repeated samples. Iterations fill it.
        self._real_rows: dict[int, int] = {}
        # torch's BatchSampler draws indices from its `sampler`. Either of the two may have a generator and set_epoch.
        inner = getattr(batch_sampler, "sampler", None)
        self._parts: list[Any] = [batch_sampler] if inner is None else [batch_sampler, inner]
        self._torch_generators: list[_TorchGenerator] = []
        self._other_generators: list[HeldGenerator] = []
        for part in self._parts:
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                # Read only now: seeding the generator for an epoch changes its initial seed.
                self._torch_generators.append(_TorchGenerator(generator, generator.initial_seed()))
            self._other_generators.extend(held_generators(part))
        self._anchor_micro_batch = 0  # micro-batches of all ranks before the anchor
        # torch's own BatchSampler: batches have `batch_size` indices, except the last one. None for other samplers and
        # for subclasses, whose batches may differ in size.
        self._plain = batch_sampler if type(batch_sampler) is BatchSampler else None
        self.batch_size: int | None = None if self._plain is None else self._plain.batch_size

    @property
    def micro_batches_left(self) -> int | None:
        total = self._num_batches()
        if total is None:
            return None
        left = max(0, total - self._anchor_micro_batch)
        if not self.completes:
            return left
        # 5 batches on 2 ranks are 3 complete rounds of 6 micro-batches, or with `drop_last` 2 rounds of 4.
        rounds = left // self.world if self._drop_last else _divide_up(left, self.world)
        return rounds * self.world

    @property
    def order_needs_seed(self) -> bool:
        """True if the user's sampler has a generator, or draws random numbers for its first batch.

        Reads the first batch of a copy of the sampler. True for an iterator, which cannot restart.
        """
        if self._torch_generators or self._other_generators or isinstance(self.batch_sampler, Iterator):
            return True
        # A sampler that has used a global generator leaves it in another state, so its next number differs.
        twin = self._twin()
        with isolate_rng():
            seed_global_generators(0)
            numbers_if_unused = numbers_of_global_generators()
            seed_global_generators(0)
            next(iter(twin.batch_sampler), None)
            return numbers_of_global_generators() != numbers_if_unused

    def _num_batches(self) -> int | None:
        try:
            return len(self.batch_sampler) if isinstance(self.batch_sampler, Sized) else None
        except TypeError:  # a BatchSampler has a length only when its sampler has one
            return None

    def set_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Set `epoch`, also in the user's sampler if it has `set_epoch`. `resume` is a result of `position`."""
        super().set_epoch(epoch, resume)
        for part in self._parts:
            if sets_epoch(part):
                part.set_epoch(epoch)
        self._anchor_micro_batch = self._consumed_micro_batches(resume) if resume else 0

    def indices_in(self, round_index: int) -> list[int | str] | None:
        """Draw and return the indices in this rank's batch of a round. None for an iterator, which cannot restart."""
        if isinstance(self.batch_sampler, Iterator):
            return None
        torch_states = [held.generator.get_state() for held in self._torch_generators]
        other_states = [other.state for other in self._other_generators]
        try:
            return super().indices_in(round_index)
        finally:
            # A running iteration draws from the same generators.
            for held, torch_state in zip(self._torch_generators, torch_states, strict=True):
                held.generator.set_state(torch_state)
            for other, other_state in zip(self._other_generators, other_states, strict=True):
                other.state = other_state

    def _twin(self) -> BatchShard:
        """Return a copy of this object and of the user's sampler, because the sampler may have a state."""
        twin = copy.copy(self)
        twin.batch_sampler = copy.copy(self.batch_sampler)
        attributes = getattr(twin.batch_sampler, "__dict__", {})
        if "sampler" in attributes:
            attributes["sampler"] = copy.copy(attributes["sampler"])
        return twin

    def facts(self) -> dict[str, Any]:
        return {"num_batches": self._num_batches()}

    def _rewind(self) -> None:
        self._anchor_micro_batch = 0

    def samples_in_round(self, round_index: int) -> int | None:
        left = self.micro_batches_left
        sampler = self._plain
        if left is None or sampler is None:
            return None
        if self.completes and not self._drop_last:
            left = len(sampler) - self._anchor_micro_batch  # without the batches that complete the last round
        first = min(self._first_micro_batch(round_index), left)
        stop = min(self._first_micro_batch(round_index + 1), left)
        samples = (stop - first) * sampler.batch_size
        has_last_batch = first < stop and stop == left
        if not has_last_batch or sampler.drop_last or not isinstance(sampler.sampler, Sized):
            return samples
        # 7 samples in batches of 3: the three batches have room for 9, so the last one lacks 2.
        num_lacking = len(sampler) * sampler.batch_size - len(sampler.sampler)
        return samples - num_lacking

    def position(self, batch: int) -> dict[str, int]:
        """Return `batch` and `micro_batches`, the number of micro-batches consumed by all ranks in `batch` rounds."""
        return {"batch": batch, "micro_batches": self._anchor_micro_batch + max(0, self._first_micro_batch(batch))}

    def __iter__(self) -> Iterator[Any]:
        first = self._anchor_micro_batch + self._first_micro_batch(self._start_round) + self.rank
        key = epoch_key(self.seed, self.epoch)
        for held in self._torch_generators:
            seed = derive_key(mix_seeds(held.initial_seed, key), self.epoch)
            held.generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)  # an int64 that is not negative
        for number, other in enumerate(self._other_generators):
            other.seed(derive_key(key, number))
        with isolate_rng():
            seed_global_generators(key)
            batches = iter(self.batch_sampler)
            # A sampler that is a generator function draws its order when the first batch is requested.
            first_batch = next(batches, _END)
        if first_batch is _END:
            return iter(())
        of_rank = self._of_rank(itertools.chain((first_batch,), batches), first)
        return self._seeded(of_rank, first)

    def start(self, batch: int) -> None:
        """Let the next iteration begin at round `batch`; see `Dealer.start`."""
        super().start(batch)
        self._real_rows = {}  # a new dict: an earlier iteration may still write to its own

    def real_rows(self, round_index: int) -> int | None:
        return self._real_rows.get(round_index)

    def _of_rank(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Return this rank's batches, from micro-batch `first` on."""
        if not self.completes:
            return itertools.islice(batches, first, None, self.world)
        return self._of_completed_rounds(batches, first - self.rank)

    def _of_completed_rounds(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Yield this rank's batches from the round of micro-batch `first` on, and fill `_real_rows`."""
        rows_of_rounds = self._real_rows  # this iteration's dict: `start` sets a new one for the next
        round_index = self._start_round
        size = getattr(self.batch_sampler, "batch_size", None)
        lists = (batch if isinstance(batch, (list, tuple)) else _Single([batch]) for batch in batches)
        rounds = rounds_of_batches(lists, self.world, size, drop_last=self._drop_last, completes=True, first=first)
        for of_ranks, num_samples in rounds:
            batch = of_ranks[self.rank]
            rows = real_rows(num_samples, of_ranks, self.rank)
            if rows < len(batch):
                rows_of_rounds[round_index] = rows
            round_index += 1
            yield batch[0] if isinstance(batch, _Single) else batch

    def _consumed_micro_batches(self, resume: Mapping[str, int]) -> int:
        if "micro_batches" in resume:
            return int(resume["micro_batches"])
        # The position of a ShardedBatchSampler: 10 samples are 3 micro-batches of 4, the last of which was short.
        if self.batch_size is not None and "samples" in resume:
            return _divide_up(int(resume["samples"]), self.batch_size)
        return int(resume["batch"]) * self.world


class _Single(list[Any]):
    """List of one index from a sampler that yields single indices. The caller receives the index itself."""


class SplitBatchShard(BatchShard):
    """Batch sampler that divides each batch of a user's batch sampler over the ranks. Round i is the sampler's batch i.

    A rank's part has `batch_size // world` indices. If the batch size is unknown, each batch is divided into equal
    parts, of which the last ones may be short. If a batch has no index for a rank, the rank gets the batch's first
    index as padding.

    Args:
        batch_sampler: an iterable of lists of indices, the same on every rank.
        rank, world: this rank and the number of data-parallel ranks.
        seed: seed of the run. Default: 0.
        seeding: see `ShardedBatchSampler`. Default: `"none"`.
        completes: complete a short batch with samples of the first batch, or without a batch size let a rank without a
            part use the batch's first index as a sample rather than as padding. Default: False.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        *,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        seeding: Seeding = "none",
        completes: bool = False,
    ) -> None:
        # Every rank draws every batch. In the base class, `rank` is therefore 0 and `world` is 1, so that micro-batch i
        # is round i.
        super().__init__(batch_sampler, seed=seed, seeding=seeding)
        self.completes = completes
        self._part_index = rank
        self._num_parts = world
        size = getattr(batch_sampler, "batch_size", None)
        self._part_size = None if size is None else size // world
        self.batch_size = None if self._plain is None else self._part_size
        # {round: `real_ranks`} of the read rounds in which some rank's part is padding. Iterations fill it.
        self._short_rounds: dict[int, int] = {}
        if seeding == "batch":
            self.stream = rank  # the parts of a batch have one micro-batch index, and would have one seed

    def counts(self) -> list[int] | None:
        """Return a list with the number of batches of each rank, which are equal; None if unknown."""
        counts = super().counts()
        if counts is None:
            return None
        return [counts[0]] * self._num_parts

    def has_batch(self, round_index: int) -> bool:
        """Return whether this rank's part of a round is not padding. The round must have been read."""
        return self._part_index < self.real_ranks(round_index)

    def real_ranks(self, round_index: int) -> int:
        """Return the number of ranks whose part of a round is not padding. The round must have been read."""
        return self._short_rounds.get(round_index, self._num_parts)

    def start(self, batch: int) -> None:
        """Let the next iteration begin at round `batch`; see `Dealer.start`."""
        super().start(batch)
        self._short_rounds = {}

    def _of_rank(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        # This iteration's dicts: `start` sets new ones for the next.
        short_rounds = self._short_rounds
        rows_of_rounds = self._real_rows
        round_index = self._start_round
        first_batch: Any = None
        for number, batch in enumerate(batches):
            if first_batch is None:
                first_batch = batch
            if number < first:
                continue  # only after the first batch is stored, which completes short batches
            # A short batch of 5 indices on 4 ranks with parts of 2: the ranks get 2, 2, 1 and none. If rounds are
            # completed, 3 indices of the first batch follow.
            size = self._part_size or _divide_up(len(batch), self._num_parts)
            start = self._part_index * size
            indices = batch
            if self.completes:
                num_rows = min(size, max(0, len(batch) - start))
                if num_rows < size:
                    rows_of_rounds[round_index] = num_rows
                if self._part_size:
                    indices = completed(batch, first_batch, size * self._num_parts)
            else:
                num_ranks = min(self._num_parts, _divide_up(len(batch), size))
                if num_ranks < self._num_parts:
                    short_rounds[round_index] = num_ranks
            part = list(indices[start : start + size])
            round_index += 1
            yield part or list(batch[:1])


def _divide_up(number: int, divisor: int) -> int:
    """Return the quotient, rounded up: 3 for 5 and 2."""
    return -(-number // divisor)


def _plain_index(index: object) -> int | str:
    """Return an index in a JSON-compatible form."""
    return operator.index(index) if hasattr(index, "__index__") else str(index)


def mix_seeds(a: int, b: int) -> int:
    """Return a 64-bit word that depends on both integers."""
    return derive_key(a ^ derive_key(b, 0), 0)
