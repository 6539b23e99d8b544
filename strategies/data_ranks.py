"""Which ranks see which data: several of them may work on one batch together, and count once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from trainwright.loggers.metric_slot import is_metric_object
from trainwright.processes.process_group import Processes

_CHUNK_BYTES = 25 * 2**20  # of tensors that are averaged in one exchange, as in DistributedDataParallel's buckets


@dataclass(frozen=True, slots=True)
class DataRanks:
    """The data-parallel ranks of a run, and what crosses between them.

    Attributes:
        processes: all that there are.
        rank: this process's along the data-parallel axes: ranks with different values see different data.
        members: global ranks that between them see all data once, by data-parallel rank; alike on every rank.
        group: the process group of this process and those that see other data; None: all processes.
        alone: every other rank is taken to hold what this one holds, and nothing is communicated.
        parts: ranks, next to each other, that read the same batches and see different parts of their sequences.
    """

    processes: Processes
    rank: int
    members: Sequence[int]
    group: Any = None
    alone: bool = False
    parts: int = 1

    @classmethod
    def of(cls, processes: Processes) -> Self:
        """Return the data-parallel ranks of processes that all see different data. See also `MeshShape.data_ranks`."""
        return cls(processes, processes.rank, range(processes.world_size))

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.members)

    @property
    def reader(self) -> int:
        """Which of the batches of a step this process reads."""
        return self.rank // self.parts

    @property
    def num_readers(self) -> int:
        """Number of batches that the ranks read at a time."""
        return self.size // self.parts

    def among(self, processes: Processes) -> DataRanks:
        """Return the same for those processes that are left of the run's: all of them, or this one alone."""
        all_left = processes.world_size == self.processes.world_size
        return replace(self, processes=processes) if all_left else type(self).of(processes)

    def pick(self, of_ranks: Sequence[Any]) -> list[Any]:
        """Take from what was gathered of all ranks one entry for each data-parallel rank. Not collective."""
        return [of_ranks[rank] for rank in self.members]

    def gather(self, value: Any) -> list[Any]:
        """Return one small picklable value for each data-parallel rank, on every rank. Collective, on the host."""
        return self.pick(self.processes.gather_object(value))

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        """Return one list (all of one length) for each data-parallel rank, on every rank. Collective, on the host."""
        return self.pick(self.processes.gather_integers(values))

    def gather_of_readers(self, values: list[int]) -> list[list[int]]:
        """Return one list for each that reads different batches; see `gather_integers`. Collective, on the host."""
        return self.gather_integers(values)[:: self.parts]

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the device over the data-parallel ranks, without reading it. Collective.

        Args:
            value: may be overwritten. Ranks that work on one batch together hold the same, or addends of it times
                their number.
        """
        if self.processes.world_size == 1:
            return value
        if self.alone:
            return value * self.size
        dist.all_reduce(value)
        copies = self.processes.world_size // self.size  # of each data-parallel rank's value
        return value if copies == 1 else value / copies

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace tensors by their mean over all ranks, in place. Collective."""
        for chunk in _take_tensors(tensors, _CHUNK_BYTES):  # type: ignore[no-untyped-call]  # torch has no types here
            flat = _flatten_dense_tensors(chunk)  # type: ignore[no-untyped-call]  # torch has no types here
            dist.all_reduce(flat)
            flat /= self.processes.world_size
            means = _unflatten_dense_tensors(flat, chunk)  # type: ignore[no-untyped-call]  # torch has no types here
            for tensor, mean in zip(chunk, means, strict=True):
                tensor.copy_(mean)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Return every data-parallel rank's tensor (all of one shape) along a new first dimension. Collective.

        Args:
            tensor: on the device.
            sync_grads: let gradients flow back to the rank that each came from.
        """
        if self.processes.world_size == 1:
            return tensor.unsqueeze(0)
        if self.alone or self.size == 1:
            return torch.stack([tensor if sync_grads else tensor.detach()] * self.size)
        if sync_grads:
            from torch.distributed.nn.functional import all_gather as all_gather_with_grad

            return torch.stack(all_gather_with_grad(tensor, self.group))  # type: ignore[no-untyped-call]  # torch has no types here
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor.contiguous(), group=self.group)
        return torch.stack(found)


@contextmanager
def metrics_over(task: nn.Module, ranks: DataRanks) -> Iterator[None]:
    """Let a task's metric objects of torchmetrics meet over the ranks that see different data. Not collective.

    Args:
        task: those that sync in a way of their own are left to it.
        ranks: of the run.
    """

    def gather(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        if ranks.size == 1:
            return [result]
        from torchmetrics.utilities.distributed import gather_all_tensors

        found: list[torch.Tensor] = gather_all_tensors(result, ranks.group)
        return found

    metrics: list[Any] = [module for module in task.modules() if is_metric_object(module)]
    changed = [metric for metric in metrics if getattr(metric, "dist_sync_fn", gather) is None]
    for metric in changed:
        metric.dist_sync_fn = gather
    try:
        yield
    finally:
        for metric in changed:
            metric.dist_sync_fn = None
