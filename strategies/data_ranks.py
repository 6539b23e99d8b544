"""Data-parallel ranks: the ranks that see different data, and their communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from trainwright.processes.process_group import Processes

_CHUNK_BYTES = 25 * 2**20  # size of tensors per all-reduce, like DistributedDataParallel's buckets


@dataclass(frozen=True, slots=True)
class DataRanks:
    """The data-parallel ranks of a run, and their communication.

    Several processes may share one data-parallel rank and process its data together.

    Attributes:
        processes: All processes.
        rank: Data-parallel rank of this process. Processes with different ranks see different data.
        members: For each data-parallel rank, the global rank of one of its processes. The same on every process. With
            torchft, the data-parallel ranks of other replicas are not among `processes`. The rank of this replica in
            the same position represents them: members [0, 1, 0, 1] for 2 replicas of 2 ranks (see
            `Replica.data_ranks`).
        group: Process group of this process and one process of each other data-parallel rank. None is the group of all
            processes.
        alone: True if `sum` and `all_gather` do not communicate. Their results are as if all ranks had passed the
            values of this rank.
        parts: Number of consecutive ranks that read the same batches and see different parts of their sequences.
    """

    processes: Processes
    rank: int
    members: Sequence[int]
    group: Any = None
    alone: bool = False
    parts: int = 1

    @classmethod
    def of(cls, processes: Processes) -> Self:
        """Create the data-parallel ranks for processes that all see different data; see `MeshShape.data_ranks`."""
        return cls(processes, processes.rank, range(processes.world_size))

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.members)

    @property
    def reader(self) -> int:
        """Index of this process's batch among the `num_readers` batches that are read at a time."""
        return self.rank // self.parts

    @property
    def num_readers(self) -> int:
        """Number of different batches that the ranks read at a time."""
        return self.size // self.parts

    def among(self, processes: Processes) -> DataRanks:
        """Return the data-parallel ranks of `processes`, which are all processes of the run or only this one."""
        if processes.world_size == self.processes.world_size:
            return replace(self, processes=processes)
        return type(self).of(processes)

    def pick(self, of_ranks: Sequence[Any]) -> list[Any]:
        """Select one entry for each data-parallel rank from a list of one entry for each process. Not collective."""
        return [of_ranks[rank] for rank in self.members]

    def gather(self, value: object) -> list[Any]:
        """Return one small picklable value for each data-parallel rank, on every rank. Collective, on the host."""
        return self.pick(self.processes.gather_object(value))

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        """Return one list (of equal lengths) for each data-parallel rank, on every rank. Collective, on the host."""
        return self.pick(self.processes.gather_integers(values))

    def gather_of_readers(self, values: list[int]) -> list[list[int]]:
        """Return one list for each of the `num_readers` batches; see `gather_integers`. Collective, on the host."""
        return self.gather_integers(values)[:: self.parts]

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the data-parallel ranks. Collective; the host does not wait for the result.

        Args:
            value: A tensor on the device, which may be overwritten. Processes that share a data-parallel rank pass
                equal values, or values whose mean is the value of the data-parallel rank.
        """
        if self.processes.world_size == 1:
            return value if self.size == 1 else value * self.size
        if self.alone:
            return value * self.size
        dist.all_reduce(value)
        # 4 processes of 2 data-parallel ranks: the sum contains each value twice. 2 processes that represent 4
        # data-parallel ranks (see `members`): half of the values, so it is doubled.
        copies = self.processes.world_size / self.size
        return value if copies == 1 else value / copies

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Average tensors over all processes, in place. Collective."""
        for chunk in _take_tensors(tensors, _CHUNK_BYTES):  # type: ignore[no-untyped-call]  # torch has no types here
            flat = _flatten_dense_tensors(chunk)  # type: ignore[no-untyped-call]  # torch has no types here
            dist.all_reduce(flat)
            flat /= self.processes.world_size
            means = _unflatten_dense_tensors(flat, chunk)  # type: ignore[no-untyped-call]  # torch has no types here
            for tensor, mean in zip(chunk, means, strict=True):
                tensor.copy_(mean)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Stack the tensors of all data-parallel ranks along a new first dimension. Collective.

        Args:
            tensor: A tensor on the device, with the same shape on every rank.
            sync_grads: The result supports backward, which passes gradients back to the ranks of the tensors.

        Returns:
            A tensor of shape (number of data-parallel ranks, *tensor.shape). With torchft, it has only the tensors of
            this replica.
        """
        if self.processes.world_size == 1:
            return tensor.unsqueeze(0)
        if self.alone or self.size == 1:
            if not sync_grads:
                tensor = tensor.detach()
            return torch.stack([tensor] * self.size)
        if sync_grads:
            gathered: torch.Tensor = _DifferentiableGather.apply(tensor, self)  # type: ignore[no-untyped-call]  # torch has no types here
            return gathered
        return self._gather(tensor)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        num_gathered = len(set(self.members))  # a rank may represent ranks of other replicas
        gathered = [torch.empty_like(tensor) for _ in range(num_gathered)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return torch.stack(gathered)


class _DifferentiableGather(torch.autograd.Function):
    """Gather of a tensor over ranks. The gradient of each rank's tensor is the sum of the gradients from all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks._gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.ranks.group)
        # Rank 3 of 2 replicas of 2 ranks: its tensor is the second of the two that were gathered.
        return total[ctx.ranks.rank % len(total)], None


@contextmanager
def metrics_over(metrics: Iterable[nn.Module], ranks: DataRanks) -> Iterator[None]:
    """Return a context in which torchmetrics objects synchronize over data-parallel ranks. Not collective.

    Args:
        metrics: The metric objects. Those with their own `dist_sync_fn` are not changed.
        ranks: Data-parallel ranks of the run.
    """

    def gather(result: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        if ranks.size == 1:
            return [result]
        from torchmetrics.utilities.distributed import gather_all_tensors

        of_ranks: list[torch.Tensor] = gather_all_tensors(result, ranks.group)
        return of_ranks

    # A metric without the attribute is not of torchmetrics.
    changed: list[Any] = [metric for metric in metrics if getattr(metric, "dist_sync_fn", gather) is None]
    for metric in changed:
        metric.dist_sync_fn = gather
    try:
        yield
    finally:
        for metric in changed:
            metric.dist_sync_fn = None
