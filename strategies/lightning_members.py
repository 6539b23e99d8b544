"""Members of an engine under the names that Lightning's strategies have; `trainer.strategy` is the engine."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks


class LightningMembers:
    """Lightning's names of what an engine has."""

    device: torch.device
    processes: Processes
    data_ranks: DataRanks

    @property
    def root_device(self) -> torch.device:
        """Lightning's name of `device`."""
        return self.device

    @property
    def is_global_zero(self) -> bool:
        """Lightning's name of `is_main`."""
        return self.processes.rank == 0

    @property
    def model(self) -> TaskModule | None:
        """The task, once it is prepared; no engine wraps it."""
        return vars(self).get("task")

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank. Collective; the name is for readers only."""
        self.processes.barrier()

    def broadcast(self, obj: object, src: int = 0) -> Any:
        """Return `obj` of rank `src` on every rank. Collective; small picklable objects, on the host."""
        return self.processes.broadcast_object(obj, src)

    def reduce(self, tensor: torch.Tensor, *, reduce_op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """Return the mean or the sum of all data ranks' tensors, of one shape, on every rank. Collective."""
        gathered = self.data_ranks.all_gather(tensor)
        return gathered.sum(0) if reduce_op == "sum" else gathered.mean(0)
