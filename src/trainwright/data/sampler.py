"""Assignment of micro-batches to ranks, and resuming within an epoch without reading earlier samples.

Micro-batch m of an epoch goes to rank m mod world. In each step `world` ranks without accumulation therefore process
the same samples as one rank with `world` accumulation steps. No sample is visited twice. The last micro-batch may be
short.

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
from typing import Any, Literal

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

# Seeds sent with the indices: none; one per batch of a worker; one per sample, fetched in a worker or in this process.
Seeding = Literal["none", "batch", "sample in worker", "sample here"]


class Dealer(Sampler[Any], ABC):
    """Base class of the samplers: assignment of micro-batches to ranks, and the arithmetic of rounds."""

    batch_size: int | None = None

    def __init__(self, *, rank: int, world: int, seed: int, seeding: Seeding = "none") -> None:
        if not 0 <= rank < world:
            raise ConfigurationError(f"rank={rank} is not in [0, world={world}).")
        self.rank = rank
        self.world = world
        self.seed = seed
        self.seeding: Seeding = seeding
        # Separates the batch seeds of ranks with independent loaders: each of them has a micro-batch 0.
        self.stream = 0
        self.epoch = 0
        self.completes = False  # an incomplete last round is completed with samples from the beginning
        self._anchor_round = 0
        self._start_round = 0

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
        # 5 micro-batches on 2 ranks: rank 0 gets 3 of them (0, 2, 4), and rank 1 gets 2 (1, 3).
        return [self._anchor_round + max(0, -((rank - left) // self.world)) for rank in range(self.world)]

    @property
    def num_rounds(self) -> int | None:
        """The maximal number of batches of a rank in this epoch; None if unknown."""
        left = self.micro_batches_left
        if left is None:
            return None
        return self._anchor_round + -(-left // self.world)

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
        """Return the number of samples in this rank's batch that do not only complete the last round.

        None if all samples are such, or if the round has not been drawn.
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
        """Return the indices of the epoch's first batch, on any rank. The epoch must not be empty."""
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
        """Yield this rank's batches with their seeds. `first` is the first batch's micro-batch index in the epoch."""
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
        num_units = samples // size if self.drop_last else -(-samples // size)
        return num_units * unit

    def set_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Set `epoch`. `resume` contains the numbers `batch` and `samples` (over all ranks) consumed in it so far."""
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
        # All values are read now, not while iterating: loader workers prefetch, and set_epoch may be called meanwhile.
        first = self._first_micro_batch(self._start_round) + self.rank
        batches = self._batches(self.order(), self._anchor_sample, first, self.micro_batches_left)
        drawn: Iterator[Any] = (batch[0] for batch in batches) if self.single else batches
        # `first` counts from the anchor, and seeds count from the beginning of the epoch.
        return self._seeded(drawn, self._anchor_sample // self.batch_size + first)

    def _batches(self, order: SampleOrder, anchor: int, first: int, stop: int) -> Iterator[list[int]]:
        size = self.batch_size
        rows_at_once = max(1, _CHUNK // size)
        within = np.arange(size, dtype=np.int64)
        micro_batches = range(first, stop, self.world)
        for chunk in range(0, len(micro_batches), rows_at_once):
            rows = micro_batches[chunk : chunk + rows_at_once]
            # Row i contains the positions of the i-th micro-batch: with size 2, micro-batches 1 and 3 are at 2, 3 and
            # 6, 7 after the anchor.
            places = anchor + np.asarray(rows, dtype=np.int64)[:, None] * size + within
            if places[-1, -1] < order.n:
                yield from order.take(places).tolist()
            elif self.completes:
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


class BatchShard(Dealer):
    """Index batches of a user's sampler, divided over the ranks: micro-batch m belongs to rank m mod world.

    To skip batches, indices are drawn and discarded, and no data is fetched. Every rank and a resumed run must draw the
    same indices. The global CPU generators are therefore seeded by (seed, epoch) until the sampler has returned its
    first batch, and then restored. Generators in the sampler's attributes (of torch, NumPy or Python) are seeded, too,
    and the sampler's `set_epoch` is called.

    Args:
        batch_sampler: an iterable of index batches, or of single indices. May have a length.
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
        self._real_rows: dict[int, int] = {}  # of rounds that were completed
        # torch's BatchSampler draws indices from its `sampler`. Either of the two may have a generator and set_epoch.
        inner = getattr(batch_sampler, "sampler", None)
        self._parts: list[Any] = [batch_sampler] if inner is None else [batch_sampler, inner]
        self._torch_generators: list[tuple[torch.Generator, int]] = []  # with their initial seeds
        self._other_generators: list[HeldGenerator] = []
        for part in self._parts:
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                # Read only now: seeding the generator for an epoch changes its initial seed.
                self._torch_generators.append((generator, generator.initial_seed()))
            self._other_generators.extend(held_generators(part))
        self._anchor_micro_batch = 0
        # The contents of the batches of torch's own BatchSampler are known, unless a subclass changes them.
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
        rounds = left // self.world if self._drop_last else -(-left // self.world)
        return rounds * self.world

    @property
    def order_needs_seed(self) -> bool:
        """True if the user's sampler draws random numbers. Starts a copy of the sampler. True for an iterator."""
        if self._torch_generators or self._other_generators or isinstance(self.batch_sampler, Iterator):
            return True
        # A sampler that has used a global generator leaves it in another state, so its next number differs.
        twin = self._twin()
        with isolate_rng():
            seed_global_generators(0)
            unused = numbers_of_global_generators()
            seed_global_generators(0)
            next(iter(twin.batch_sampler), None)
            return numbers_of_global_generators() != unused

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
        torch_states = [generator.get_state() for generator, _ in self._torch_generators]
        other_states = [generator.state for generator in self._other_generators]
        try:
            return super().indices_in(round_index)
        finally:
            # A running iteration draws from the same generators.
            for (torch_generator, _), torch_state in zip(self._torch_generators, torch_states, strict=True):
                torch_generator.set_state(torch_state)
            for other_generator, other_state in zip(self._other_generators, other_states, strict=True):
                other_generator.state = other_state

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
        has_last_batch = first < stop == left
        if has_last_batch and isinstance(sampler.sampler, Sized) and not sampler.drop_last:
            # 7 samples in batches of 3: the three batches have room for 9, so the last one lacks 2.
            samples -= len(sampler) * sampler.batch_size - len(sampler.sampler)
        return samples

    def position(self, batch: int) -> dict[str, int]:
        """Return `batch` and `micro_batches`, the number of micro-batches consumed by all ranks in `batch` rounds."""
        return {"batch": batch, "micro_batches": self._anchor_micro_batch + max(0, self._first_micro_batch(batch))}

    def __iter__(self) -> Iterator[Any]:
        first = self._anchor_micro_batch + self._first_micro_batch(self._start_round) + self.rank
        key = epoch_key(self.seed, self.epoch)
        for generator, initial_seed in self._torch_generators:
            seed = derive_key(mix_seeds(initial_seed, key), self.epoch)
            generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
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
        rows_of_rounds = self._real_rows
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
            return -(-int(resume["samples"]) // self.batch_size)
        return int(resume["batch"]) * self.world


class _Single(list[Any]):
    """The entry of a sampler that yields single indices."""


class SplitBatchShard(BatchShard):
    """Batch sampler that divides each batch of a user's batch sampler over the ranks. Round i is the sampler's batch i.

    A rank's part has `batch_size // world` indices. If the batch size is unknown, each batch is divided evenly. If a
    short batch has no index for a rank, the rank gets the batch's first index as padding.

    Args:
        batch_sampler: an iterable of lists of indices, the same on every rank.
        rank, world: this rank and the number of data-parallel ranks.
        seed: seed of the run. Default: 0.
        seeding: see `ShardedBatchSampler`. Default: `"none"`.
        completes: complete a short batch with samples of the first batch, or without a batch size let a rank without a
            part use the batch's first index as a sample. Default: False.
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
        # Every rank draws every batch, so the rounds are those of one rank of one.
        super().__init__(batch_sampler, seed=seed, seeding=seeding)
        self.completes = completes
        self._part = rank
        self._num_parts = world
        size = getattr(batch_sampler, "batch_size", None)
        self._part_size = None if size is None else size // world
        self.batch_size = None if self._plain is None else self._part_size
        self._short_rounds: dict[int, int] = {}
        if seeding == "batch":
            self.stream = rank  # the parts of a batch have one micro-batch index, and would have one seed

    def counts(self) -> list[int] | None:
        """Return a list with the number of batches of each rank, which are equal; None if unknown."""
        counts = super().counts()
        return None if counts is None else counts * self._num_parts

    def has_batch(self, round_index: int) -> bool:
        """Return whether this rank's part of a round is not padding. The round must have been read."""
        return self._part < self.real_ranks(round_index)

    def real_ranks(self, round_index: int) -> int:
        """Return the number of ranks whose part of a round is not padding. The round must have been read."""
        return self._short_rounds.get(round_index, self._num_parts)

    def start(self, batch: int) -> None:
        """Let the next iteration begin at round `batch`; see `Dealer.start`."""
        super().start(batch)
        self._short_rounds = {}

    def facts(self) -> dict[str, Any]:
        return {"num_batches": self._num_batches()}

    def _of_rank(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        short_rounds = self._short_rounds
        rows_of_rounds = self._real_rows
        round_index = self._start_round
        first_batch: Any = None
        for number, batch in enumerate(batches):
            if first_batch is None:
                first_batch = batch
            if number < first:
                continue
            # A short batch of 5 indices on 4 ranks with parts of 2: the ranks get 2, 2, 1 and none. If rounds are
            # completed, 3 indices of the first batch follow.
            size = self._part_size or -(-len(batch) // self._num_parts)
            start = self._part * size
            indices = batch
            if self.completes:
                num_rows = min(size, max(0, len(batch) - start))
                if num_rows < size:
                    rows_of_rounds[round_index] = num_rows
                if self._part_size:
                    indices = completed(batch, first_batch, size * self._num_parts)
            else:
                num_ranks = min(self._num_parts, -(-len(batch) // size))
                if num_ranks < self._num_parts:
                    short_rounds[round_index] = num_ranks
            part = list(indices[start : start + size])
            round_index += 1
            yield part or list(batch[:1])


def _plain_index(index: object) -> int | str:
    """Return an index in a JSON-compatible form."""
    return operator.index(index) if hasattr(index, "__index__") else str(index)


def mix_seeds(a: int, b: int) -> int:
    """Return a 64-bit word that depends on both integers."""
    return derive_key(a ^ derive_key(b, 0), 0)
