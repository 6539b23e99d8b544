"""Index batches of a user's sampler, divided over the ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from trainwright.core.rng import isolate_rng
from trainwright.data.dealer import Dealer, Seeding, divide_up
from trainwright.data.iterable import sets_epoch
from trainwright.data.order import derive_key, epoch_key
from trainwright.data.rounds import completed, real_rows, rounds_of_batches
from trainwright.data.seeding import (
    HeldGenerator,
    held_generators,
    numbers_of_global_generators,
    seed_global_generators,
)

_END: Any = object()


class _TorchGenerator(NamedTuple):
    """Generator of a user's sampler, with its seed before any epoch."""

    generator: torch.Generator
    initial_seed: int


class BatchShard(Dealer):
    """Index batches of a user's sampler, divided over the ranks: micro-batch m belongs to rank m mod world.

    To skip batches, indices are drawn and discarded, and no data is fetched. Every rank and a resumed run must draw the
    same indices. The global CPU generators are therefore seeded by (seed, epoch) until the sampler has returned its
    first batch, and then restored. Generators in attributes of the sampler, or of the `sampler` inside a batch sampler
    (of torch, NumPy or Python), are seeded, too, and `set_epoch` of both is called.

    Positions are counted in micro-batches of all ranks, see `Dealer`: round i of the epoch consists of the `world`
    micro-batches from `_anchor_micro_batch + (i - _anchor_round) * world` on, one for each rank.

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
            for generator in _torch_generators_of(part):
                # Read only now: seeding the generator for an epoch changes its initial seed.
                self._torch_generators.append(_TorchGenerator(generator, generator.initial_seed()))
            self._other_generators.extend(held_generators(part))
        self._anchor_micro_batch = 0  # micro-batches of all ranks before the anchor; `set_epoch` sets it
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
        rounds = left // self.world if self._drop_last else divide_up(left, self.world)
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
        sampler = self._plain
        left = self.micro_batches_left
        if left is None or sampler is None:
            return None
        # Micro-batches of the sampler that are not dropped. `left` has more if the last round is completed.
        num_of_sampler = left
        if self.completes and not self._drop_last:
            num_of_sampler = max(0, len(sampler) - self._anchor_micro_batch)
        first = min(self._first_micro_batch(round_index), num_of_sampler)
        stop = min(self._first_micro_batch(round_index + 1), num_of_sampler)
        samples = (stop - first) * sampler.batch_size
        has_last_batch = first < stop and stop == num_of_sampler
        if not has_last_batch or sampler.drop_last or not isinstance(sampler.sampler, Sized):
            return samples
        # 7 samples in batches of 3: the three batches have room for 9, so the last one lacks 2.
        num_lacking = len(sampler) * sampler.batch_size - len(sampler.sampler)
        return samples - num_lacking

    def position(self, batch: int) -> dict[str, int]:
        """Return `batch` and `micro_batches`, the number of micro-batches consumed by all ranks in `batch` rounds."""
        # A batch before the anchor gets the anchor's position, because the number of ranks that read it is unknown.
        num_since_anchor = max(0, self._first_micro_batch(batch))
        return {"batch": batch, "micro_batches": self._anchor_micro_batch + num_since_anchor}

    def __iter__(self) -> Iterator[Any]:
        first = self._anchor_micro_batch + self._first_micro_batch(self._start_round) + self.rank
        key = epoch_key(self.seed, self.epoch)
        for held in self._torch_generators:
            # `key` already depends on the epoch, but the orders of existing checkpoints depend on this formula.
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
        # `rounds_of_batches` reads lists of samples.
        lists = (batch if isinstance(batch, (list, tuple)) else _Single([batch]) for batch in batches)
        rounds = rounds_of_batches(lists, self.world, size, drop_last=self._drop_last, completes=True, first=first)
        for of_ranks, num_samples in rounds:
            batch = of_ranks[self.rank]
            rows = real_rows(num_samples, of_ranks, self.rank)  # the function, not the method
            if rows < len(batch):
                rows_of_rounds[round_index] = rows
            round_index += 1
            yield batch[0] if isinstance(batch, _Single) else batch

    def _consumed_micro_batches(self, resume: Mapping[str, int]) -> int:
        if "micro_batches" in resume:
            return int(resume["micro_batches"])
        # The position of a ShardedBatchSampler: 10 samples are 3 micro-batches of 4, the last of which was short.
        if self.batch_size is not None and "samples" in resume:
            return divide_up(int(resume["samples"]), self.batch_size)
        return int(resume["batch"]) * self.world


class _Single(list[Any]):
    """List of one index from a sampler that yields single indices. The caller receives the index itself."""


class SplitBatchShard(BatchShard):
    """Batch sampler that divides each batch of a user's batch sampler over the ranks. Round i is the sampler's batch i.

    A rank's part has `batch_size // world` indices; the caller checks that the division has no remainder (see
    `check_divisible`). If the batch size is unknown, each batch is divided into equal parts, of which the last ones may
    be short. If a batch has no index for a rank, the rank gets the batch's first index as padding.

    The attributes `rank` and `world` are always 0 and 1: every rank draws every batch. For the arithmetic of `Dealer`,
    micro-batch i is therefore the whole batch of round i.

    Args:
        batch_sampler: an iterable of lists of indices, the same on every rank.
        rank, world: this rank and the number of data-parallel ranks.
        seed: seed of the run. Default: 0.
        seeding: see `ShardedBatchSampler`. Default: `"none"`.
        completes: complete a short batch with samples of the first batch. If the batch size is unknown, parts stay
            short. `has_batch` is then always True, and `real_rows` is the number of a rank's indices that are not
            added: 0 for a rank that gets the batch's first index. Default: False.
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
        super().__init__(batch_sampler, seed=seed, seeding=seeding)  # rank 0 of 1, see above
        self.completes = completes
        self._part_index = rank
        self._num_parts = world
        size = getattr(batch_sampler, "batch_size", None)
        self._part_size = None if size is None else size // world  # indices of a rank; None if unknown
        self.batch_size = None if self._plain is None else self._part_size
        # {round: `real_ranks`} of the read rounds in which some rank's part is padding. Iterations fill it, unless
        # `completes` is True; they then fill `_real_rows`.
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
            size = self._part_size or divide_up(len(batch), self._num_parts)
            start = self._part_index * size
            indices = batch
            if self.completes:
                num_rows = min(size, max(0, len(batch) - start))
                if num_rows < size:
                    rows_of_rounds[round_index] = num_rows
                if self._part_size:
                    indices = completed(batch, first_batch, size * self._num_parts)
            else:
                num_ranks = min(self._num_parts, divide_up(len(batch), size))
                if num_ranks < self._num_parts:
                    short_rounds[round_index] = num_ranks
            part = list(indices[start : start + size])
            round_index += 1
            yield part or list(batch[:1])


def _torch_generators_of(owner: object) -> list[torch.Generator]:
    """Return torch's generators among an object's attributes: first `generator`, which may be a property."""
    candidates = [getattr(owner, "generator", None), *getattr(owner, "__dict__", {}).values()]
    generators: list[torch.Generator] = []
    for value in candidates:
        is_known = any(value is generator for generator in generators)
        if isinstance(value, torch.Generator) and not is_known:
            generators.append(value)
    return generators


def mix_seeds(a: int, b: int) -> int:
    """Return a 64-bit word that depends on both integers."""
    return derive_key(a ^ derive_key(b, 0), 0)
