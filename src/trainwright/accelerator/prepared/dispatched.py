"""Loaders that only the first process reads. It sends each other process that process's part of the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from trainwright.accelerator.prepared.round_transfer import Delivery, Round, RoundTransfer, rounds_of
from trainwright.core.errors import ConfigurationError, WorkerError
from trainwright.core.tree import batch_size, is_container, named_leaves, rebuild
from trainwright.data.loader import prepare_loader
from trainwright.data.loader_options import LoaderOptions, check_divisible
from trainwright.data.prepared import PreparedLoader
from trainwright.processes.collectives import concatenate
from trainwright.processes.process_group import Processes

T = TypeVar("T")
SliceFunction = Callable[..., Any]


class _LoaderFacts(NamedTuple):
    """Properties of the user's loader, which the first process sends to the others once.

    Attributes:
        can_seek, stateful: See `PreparedLoader`.
        batch_size: Samples of one process's full batch. None if unknown.
    """

    can_seek: bool
    stateful: bool
    batch_size: int | None


class _RoundFacts(NamedTuple):
    """Facts of a round that every process receives with its batch.

    Attributes:
        num_real: Number of processes with a batch of their own. The batches of the others are padding.
        rows_of_processes: Number of samples of each process before padding, in a short round with `completes_rounds`.
            None otherwise, or if the batch size is unknown.
    """

    num_real: int
    rows_of_processes: list[int] | None


class DispatchedLoader(PreparedLoader):
    """Prepared loader that only the first process reads.

    A round is one batch for each process: consecutive batches of the user's loader, or with `split_batches` the parts
    of a single batch. With `completes_rounds`, a short last round is completed with samples of the first round. Other
    rounds, those with other values than tensors, and those of unknown batch size are not completed: a process without a
    batch receives the round's first batch as padding.

    Args:
        raw: The user's loader. Only the first process reads it.
        options: See `LoaderOptions`.
        processes: All processes of the script.
        slice_fn: `slice_fn(batch, slice, process_index=…, num_processes=…)` returns a process's part. Default:
            `slice_batch`.
    """

    ends_together = True

    def __init__(
        self, raw: Any, options: LoaderOptions, processes: Processes, slice_fn: SliceFunction | None = None
    ) -> None:
        # Without `agree`: the rounds of all processes end together, because each receives the end from the first one.
        super().__init__(raw, replace(options, agree=None))
        self._processes = processes
        self._slice_fn = slice_fn
        rank_of_each_process = [row[0] for row in processes.gather_integers([options.rank])]
        self._transfer = RoundTransfer(processes, rank_of_each_process)
        self._inner: PreparedLoader | None = None  # the loader of all data, on the first process only
        # The epoch's part that this number of processes reads begins at this round, and at this batch of the user's
        # loader. They differ from 0 after a resume, before which a round may have had another number of batches.
        # Resumed on 3 processes after 2 rounds of 2: round 2 begins at batch 4, round 3 at batch 4 + 3 = 7.
        self._anchor_round = 0
        self._anchor_batch = 0
        # Facts of the rounds of the present pass that were received, by the index of the round.
        self._short_rounds: dict[int, int] = {}  # `num_real` of rounds with padding
        self._real_rows: dict[int, int] = {}  # `real_rows` of short rounds with `completes_rounds`
        # State of the user's loader before the round that is read ahead. First process only. None before a pass reads.
        self._snapshot: Any = None
        self._facts = _from_first(self._prepare, processes, options)
        self.count_batches()

    def _prepare(self) -> _LoaderFacts:
        """Prepare the user's loader. First process only."""
        options = self.options
        inner = prepare_loader(self.raw, self._options_of_inner)
        self._inner = inner
        size = inner.batch_size
        if size is None and isinstance(self.raw, DataLoader):
            size = getattr(self.raw.batch_sampler, "batch_size", None)
        if options.split_batches and size is not None:
            check_divisible(size, options.world)
            size //= options.world
        return _LoaderFacts(inner.can_seek, inner.stateful, size)

    @property
    def batch_size(self) -> int | None:
        return self._facts.batch_size

    @property
    def stateful(self) -> bool:
        """True on the first process if the user's loader defines the position. False on the other processes."""
        return self._facts.stateful and self._inner is not None

    def use(self, options: LoaderOptions) -> None:
        super().use(options)
        if self._inner is not None:
            self._inner.use(self._options_of_inner)

    @property
    def _options_of_inner(self) -> LoaderOptions:
        """The options with which the first process reads the user's loader, as if it were the only process."""
        return replace(self.options, rank=0, world=1, split_batches=False)

    @property
    def order_needs_seed(self) -> bool:
        """True if the order depends on the seed. Collective."""
        return _from_first(lambda: self._on_first.order_needs_seed, self._processes, self.options)

    @property
    def can_seek(self) -> bool:
        return self._facts.can_seek

    num_full_rounds = 0  # unknown: a process receives the number of real batches with each round

    def has_batch(self, batch: int) -> bool:
        return self.options.rank < self.real_ranks(batch)

    def real_ranks(self, batch: int) -> int:
        return self._short_rounds.get(batch, self.options.world)

    def real_rows(self, batch: int) -> int | None:
        return self._real_rows.get(batch)

    def position(self, batch: int) -> dict[str, int]:
        return {"batch": batch, "micro_batches": self._batches_before(batch)}

    def check_resume(self, batch: int, *, has_state: bool) -> None:
        if self._inner is None and self._facts.stateful:
            return  # the first process has the state, and checks it
        super().check_resume(batch, has_state=has_state)

    def iterate(self, start_batch: int = 0) -> Iterator[Any]:
        self.release_state()
        # New dicts, which this pass fills: an earlier pass that is still open keeps its own.
        short_rounds: dict[int, int] = {}
        real_rows: dict[int, int] = {}
        self._short_rounds = short_rounds
        self._real_rows = real_rows
        self._is_restored = False
        deliveries = self._open(start_batch)
        for index in itertools.count(start_batch):
            if index == self.num_batches:
                return
            delivery = next(deliveries, None)
            if delivery is None:
                return
            batch = delivery.share
            facts: _RoundFacts = delivery.facts
            del delivery  # only the caller holds the batch after `yield`, and may free it
            if facts.num_real < self.options.world:
                short_rounds[index] = facts.num_real
            if facts.rows_of_processes is not None:
                real_rows[index] = facts.rows_of_processes[self.options.rank]
            yield batch
            del batch

    def _open(self, start_batch: int) -> Iterator[Delivery]:
        return self._transfer.iterate(lambda: self._read(start_batch))

    def _read(self, start_batch: int) -> Iterator[Round]:
        """Yield the rounds of a pass, each with `_RoundFacts`. First process only.

        The user's batches of a round become one share for each process: they are completed with samples of the first
        round if needed, divided if needed, and followed by padding if there are fewer than processes.
        """
        inner = self._on_first
        options = self.options
        rounds = rounds_of(inner.iterate(self._batches_before(start_batch)), self._per_round)
        first_round: list[Any] | None = None
        while True:
            if inner.stateful:
                # Without the round that is read ahead now: the loop that saves has not received it.
                self._snapshot = inner.state_dict()
            batches = next(rounds, None)
            if batches is None:
                return
            rows_of_processes: list[int] | None = None
            if options.completes_rounds:
                if self._drops_last and len(batches) < self._per_round:
                    return
                if first_round is None:
                    first_round = list(batches)
                rows_of_processes = self._rows_of_short_round(batches)
                # Batches without a sample cannot complete a round.
                has_samples = any(map(batch_size, first_round))
                if rows_of_processes is not None and has_samples and all(map(_holds_rows, batches)):
                    batches = self._completed(batches, first_round)
            shares = batches
            if options.split_batches or self._slice_fn is not None:
                shares = self._parts(batches)
            num_real = len(shares)
            padding = shares[:1] * (options.world - num_real)
            yield Round([*shares, *padding], _RoundFacts(num_real, rows_of_processes))
            del batches, shares, padding  # before the next round is read

    def _rows_of_short_round(self, batches: list[Any]) -> list[int] | None:
        """Return each process's number of samples in a short round. None if the round is full, or its size unknown."""
        world = self.options.world
        size = self._facts.batch_size
        if size is None:
            return None
        num_rows = sum(map(batch_size, batches))
        if num_rows >= size * world:
            return None
        # 10 samples, 4 for each of 4 processes: 4, 4, 2, 0.
        return [min(size, max(0, num_rows - size * rank)) for rank in range(world)]

    def _completed(self, batches: list[Any], first_round: list[Any]) -> list[Any]:
        """Return the batches of a short round, completed with samples of the first round.

        The result has one full batch for each process, or with `split_batches` one batch for all.
        """
        world = self.options.world
        size = self._facts.batch_size
        assert size is not None  # the round is known to be short
        # At least as many samples as a full round has. The data may be smaller than that, so that samples repeat.
        added: list[Any] = []
        while sum(map(batch_size, added)) < size * world:
            added += first_round
        joined = concatenate([*batches, *added])
        whole = slice_batch(joined, slice(0, size * world), 0, world)
        if self.options.split_batches:
            return [whole]
        return [slice_batch(whole, slice(size * r, size * (r + 1)), r, world) for r in range(world)]

    def _parts(self, batches: list[Any]) -> list[Any]:
        """Divide the concatenated batches of a round. Return one part for each process that has samples."""
        world = self.options.world
        whole = batches[0] if self.options.split_batches else concatenate(batches)
        num_rows = batch_size(whole)
        if self._facts.batch_size is not None:
            part_size = self._facts.batch_size
        elif self.options.split_batches:
            part_size = math.ceil(num_rows / world)
        else:
            part_size = batch_size(batches[0])
        slices = [slice(start, start + part_size) for start in range(0, num_rows, part_size)]
        if len(slices) > world:
            raise ConfigurationError(
                f"{self.options.title} returned a batch of {num_rows} samples, more than {part_size} for each of "
                f"{world} processes. Return batches of the DataLoader's batch size."
            )
        slice_fn = self._slice_fn or slice_batch
        return [slice_fn(whole, one, process_index=i, num_processes=world) for i, one in enumerate(slices)]

    def _batches_before(self, start_batch: int) -> int:
        """Return the number of the user's batches before a round."""
        return self._anchor_batch + (start_batch - self._anchor_round) * self._per_round

    @property
    def _per_round(self) -> int:
        """Number of the user's batches in a round."""
        return 1 if self.options.split_batches else self.options.world

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        self._anchor_round = 0
        self._anchor_batch = 0
        if resume:
            self._anchor_round = int(resume["batch"])
            self._anchor_batch = int(resume.get("micro_batches", self._anchor_round * self._per_round))

    def _count(self) -> list[int] | int | None:
        # Collective. The epoch of the user's loader is set here, because its number of batches may depend on it.
        def count() -> int | None:
            self._on_first.set_epoch(self.epoch)
            return self._on_first.num_batches

        num_batches = _from_first(count, self._processes, self.options)
        if num_batches is None:
            return None
        num_left = max(0, num_batches - self._anchor_batch)
        rounds, rest = divmod(num_left, self._per_round)
        if rest and not self._drops_last:
            rounds += 1
        return [self._anchor_round + rounds] * self.options.world

    @property
    def _drops_last(self) -> bool:
        """True if an incomplete last round is dropped."""
        return self.options.completes_rounds and bool(getattr(self.raw, "drop_last", False))

    def _own_state(self) -> Any:
        return self._on_first.state_dict() if self._snapshot is None else self._snapshot

    def _load_own(self, state: Any, *, at_epoch_start: bool) -> None:
        self._snapshot = None
        self._on_first.load_state_dict(state, at_epoch_start=at_epoch_start)

    @property
    def _on_first(self) -> PreparedLoader:
        """The loader of all data. Only the first process has it."""
        assert self._inner is not None
        return self._inner


def _from_first(work: Callable[[], T], processes: Processes, options: LoaderOptions) -> T:
    """Run `work` on the first process, and return its result on every process. Collective.

    An error is raised on the first process, and as a WorkerError on the other processes.
    """
    problem: Exception | None = None
    problem_text: str | None = None  # the text and not the error, which may not be picklable
    result: T | None = None
    if processes.rank == 0:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 -- it is raised on every process
            problem = error
            problem_text = f"{type(error).__name__}: {error}"
    problem_text, result = processes.broadcast_object((problem_text, result))
    if problem is not None:
        raise problem
    if problem_text is not None:
        raise WorkerError(f"an operation of the first process on {options.title} failed: {problem_text}")
    return cast(T, result)


def _holds_rows(batch: object) -> bool:
    """Return whether a batch consists of tensors with one row for each sample."""
    leaves = [leaf for _, leaf in named_leaves(batch)]
    rows = batch_size(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != rows:
            return False
    return bool(leaves)


def slice_batch(batch: object, tensor_slice: slice, process_index: int, num_processes: int) -> Any:
    """Return a part of a batch: rows of tensors, and entries of lists with as many entries as the batch has rows."""
    del process_index, num_processes
    rows = batch_size(batch)

    def visit(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part[tensor_slice] if part.dim() else part
        if isinstance(part, (list, tuple)) and len(part) == rows:
            holds_more = any(isinstance(entry, torch.Tensor) or is_container(entry) for entry in part)
            if not holds_more:  # one text for each sample, for example
                return part[tensor_slice]
        return rebuild(part, visit)

    return visit(batch)
