"""Which ranks see which data: several of them may work on one batch together, and count once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainwright.loggers.metric_slot import is_metric_object
from trainwright.strategies.processes.process_group import Processes


class DataRanks:
    """What a strategy says of the data-parallel ranks; a part of `Strategy`.

    Here every process is one. A strategy that splits layers over processes overrides `dp_rank` and `data_ranks`: then
    what is summed or collected over the data must take one process of each group.
    """

    processes: Processes

    @property
    def dp_rank(self) -> int:
        """Rank along the data-parallel axes: ranks with different values see different data."""
        return self.processes.rank

    @property
    def data_ranks(self) -> Sequence[int]:
        """Global ranks that between them see all data once, by data-parallel rank; alike on every rank."""
        return range(self.processes.world_size)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.data_ranks)

    def gather_by_data_rank(self, value: Any) -> list[Any]:
        """Return one small picklable value for each data-parallel rank, on every rank. Collective, on the host."""
        return self.pick_by_data_rank(self.processes.gather_object(value))

    def gather_integers_by_data_rank(self, values: list[int]) -> list[list[int]]:
        """Return one list (all of one length) for each data-parallel rank, on every rank. Collective, on the host."""
        return self.pick_by_data_rank(self.processes.gather_integers(values))

    def pick_by_data_rank(self, of_ranks: Sequence[Any]) -> list[Any]:
        """Take from what was gathered of all ranks one entry for each data-parallel rank. Not collective."""
        return [of_ranks[rank] for rank in self.data_ranks]


@contextmanager
def metrics_over(task: nn.Module, data_group: Any) -> Iterator[None]:
    """Let a task's metric objects of torchmetrics meet over the ranks that see different data. Not collective.

    Args:
        task: those that sync in a way of their own are left to it.
        data_group: the process group of these ranks; None: this rank sees all data.
    """

    def gather(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        if data_group is None:
            return [result]
        from torchmetrics.utilities.distributed import gather_all_tensors

        found: list[torch.Tensor] = gather_all_tensors(result, data_group)
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
