"""Loaders that only the first process reads. It sends each other process that process's part of the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from trainwright.accelerator.prepared.round_transfer import Round, RoundTransfer, rounds_of
from trainwright.core.errors import ConfigurationError, WorkerError
from trainwright.core.tree import batch_size, is_container, named_leaves, rebuild
from trainwright.data.loader import prepare_loader
from trainwright.data.loader_options import LoaderOptions, check_divisible
from trainwright.data.prepared import PreparedLoader
from trainwright.processes.collectives import concatenate
from trainwright.processes.process_group import Processes

T = TypeVar("T")
SliceFunction = Callable[..., Any]


class DispatchedLoader(PreparedLoader):
    """Prepared loader that only the first process reads.

    A round is one batch for each process: consecutive batches of the user's loader, or with `split_batches` the parts
    of a single batch. With `completes_rounds`, a short last round is completed with samples of the first round, or with
    its batches if they contain other values than tensors. Otherwise, a process without a batch receives the round's
    first batch as padding.

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
        super().__init__(raw, replace(options, agree=None))
        self._processes = processes
        self._slice_fn = slice_fn
        ranks = [row[0] for row in processes.gather_integers([options.rank])]
        self._transfer = RoundTransfer(processes, ranks)
        self._inner: PreparedLoader | None = None  # on the first process
        # The epoch's part that this number of processes reads begins at this round, and at this batch of the user's
        # loader. They differ from 0 after a resume, before which a round may have had another number of batches.
        self._anchor_round = 0
        self._anchor_batch = 0
        self._short_rounds: dict[int, int] = {}  # round: its number of processes with a batch
        self._real_rows: dict[int, int] = {}  # round that was completed: this process's number of real samples
        self._snapshot: Any = None
        self._can_seek, self._keeps_state, self._size = _from_first(self._prepare, processes, options)
        self.count_batches()

    def _prepare(self) -> tuple[bool, bool, int | None]:
        options = self.options
        self._inner = inner = prepare_loader(self.raw, self._alone)
        size = inner.batch_size
        if size is None and isinstance(self.raw, DataLoader):
            size = getattr(self.raw.batch_sampler, "batch_size", None)
        if options.split_batches and size is not None:
            check_divisible(size, options.world)
            size //= options.world
        return inner.can_seek, inner.stateful, size

    @property
    def batch_size(self) -> int | None:
        return self._size

    @property
    def stateful(self) -> bool:
        return self._keeps_state and self._inner is not None

    def use(self, options: LoaderOptions) -> None:
        super().use(options)
        if self._inner is not None:
            self._inner.use(self._alone)

    @property
    def _alone(self) -> LoaderOptions:
        """The options with which the first process reads the user's loader."""
        return replace(self.options, rank=0, world=1, split_batches=False)

    @property
    def order_needs_seed(self) -> bool:
        """True if the order depends on the seed. Collective."""
        return _from_first(lambda: self._on_first.order_needs_seed, self._processes, self.options)

    @property
    def can_seek(self) -> bool:
        return self._can_seek

    num_full_rounds = 0  # of short rounds, each process learns when it receives its share

    def has_batch(self, batch: int) -> bool:
        return self.options.rank < self.real_ranks(batch)

    def real_ranks(self, batch: int) -> int:
        return self._short_rounds.get(batch, self.options.world)

    def real_rows(self, batch: int) -> int | None:
        return self._real_rows.get(batch)

    def position(self, batch: int) -> dict[str, int]:
        return {"batch": batch, "micro_batches": self._batches_before(batch)}

    def check_resume(self, batch: int, *, has_state: bool) -> None:
        if self._inner is not None or not self._keeps_state:  # elsewhere the first process has the state
            super().check_resume(batch, has_state=has_state)

    def iterate(self, start_batch: int = 0) -> Iterator[Any]:
        self.release_state()
        self._short_rounds = short = {}
        self._real_rows = rows = {}
        self._is_restored = False
        received = self._open(start_batch)
        for index in itertools.count(start_batch):
            if index == self.num_batches:
                return
            delivery = next(received, None)
            if delivery is None:
                return
            batch, (num_real, rows_of_ranks) = delivery
            del delivery  # only the caller holds the batch after `yield`, and may free it
            if num_real < self.options.world:
                short[index] = num_real
            if rows_of_ranks is not None:
                rows[index] = rows_of_ranks[self.options.rank]
            yield batch
            del batch

    def _open(self, start_batch: int) -> Iterator[Any]:
        return self._transfer.iterate(lambda: self._read(start_batch))

    def _read(self, start_batch: int) -> Iterator[Round]:
        """Yield each round's list of one batch per process, and the number of real batches. First process only."""
        inner = self._on_first
        options = self.options
        batches = inner.iterate(self._batches_before(start_batch))
        groups = rounds_of(batches, self._per_round)
        beginning: list[Any] | None = None  # the first round
        while True:
            if inner.stateful:
                # Without the round that is read ahead now: the loop that saves has not received it.
                self._snapshot = inner.state_dict()
            group = next(groups, None)
            if group is None:
                return
            rows: list[int] | None = None
            if options.completes_rounds:
                if self._drops_last and len(group) < self._per_round:
                    return
                if beginning is None:
                    beginning = list(group)
                group, rows = self._completed(group, beginning)
            shares = group
            if options.split_batches or self._slice_fn is not None:
                shares = self._parts(group)
            num_real = len(shares)
            padding = shares[:1] * (options.world - num_real)
            yield [*shares, *padding], (num_real, rows)
            del group, shares, padding

    def _completed(self, group: list[Any], beginning: list[Any]) -> tuple[list[Any], list[int] | None]:
        """Complete a short round with samples of the first one. Return it, and each process's number of real samples.

        None if the round is not short, or has no known size.
        """
        world = self.options.world
        size = self._size
        if size is None:
            return group, None
        num_rows = sum(map(batch_size, group))
        if num_rows >= size * world:
            return group, None
        # 10 samples, 4 for each of 4 processes: 4, 4, 2, 0.
        rows = [min(size, max(0, num_rows - size * rank)) for rank in range(world)]
        if not all(map(_holds_rows, group)):
            return group, rows
        missing = [beginning[i % len(beginning)] for i in range(world)]
        while sum(map(batch_size, missing)) < size * world:
            missing = [*missing, *beginning]
        joined = concatenate([*group, *missing])
        whole = slice_batch(joined, slice(0, size * world), 0, world)
        if self.options.split_batches:
            return [whole], rows
        return [slice_batch(whole, slice(size * r, size * (r + 1)), r, world) for r in range(world)], rows

    def _parts(self, group: list[Any]) -> list[Any]:
        """Divide the concatenated batches of a round. Return one part for each process that has samples."""
        world = self.options.world
        batch = group[0] if self.options.split_batches else concatenate(group)
        rows = batch_size(batch)
        if self._size is not None:
            part = self._size
        elif self.options.split_batches:
            part = math.ceil(rows / world)
        else:
            part = batch_size(group[0])
        slices = [slice(start, start + part) for start in range(0, rows, part)]
        if len(slices) > world:
            raise ConfigurationError(
                f"{self.options.title} returned a batch of {rows} samples, more than {part} for each of {world} "
                "processes. Return batches of the DataLoader's batch size."
            )
        cut = self._slice_fn or slice_batch
        return [cut(batch, one, process_index=i, num_processes=world) for i, one in enumerate(slices)]

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
    description: str | None = None
    result: T | None = None
    if processes.rank == 0:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 -- it is raised on every process
            problem = error
            description = f"{type(error).__name__}: {error}"
    description, result = processes.broadcast_object((description, result))
    if problem is not None:
        raise problem
    if description is not None:
        raise WorkerError(f"the first process could not prepare {options.title}: {description}")
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
