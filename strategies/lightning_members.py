"""Members of engines with the names of Lightning's strategies, because `trainer.strategy` is the engine."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trainwright.core.run import SchedulerConfig
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks


class LightningMembers:
    """Lightning's names of an engine's members."""

    device: torch.device
    processes: Processes
    data_ranks: DataRanks

    @property
    def root_device(self) -> torch.device:
        """Lightning's name for `device`."""
        return self.device

    @property
    def checkpoint_io(self) -> None:
        """None, because no plugin writes checkpoints."""
        return None

    @property
    def model(self) -> TaskModule | None:
        """The prepared task. Engines do not wrap tasks."""
        return vars(self).get("task")

    @property
    def lightning_module(self) -> TaskModule | None:
        """Lightning's name for `model`."""
        return self.model

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedules of the Trainer and when they step; empty before the first stage."""
        return [] if self.model is None else self.model.trainer.lr_scheduler_configs

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank. Collective. `name` has no effect."""
        self.processes.barrier()

    def broadcast(self, obj: object, src: int = 0) -> Any:
        """Broadcast a small picklable object from rank `src` to every rank. Collective, on the host."""
        return self.processes.broadcast_object(obj, src)

    def reduce(self, tensor: torch.Tensor, *, reduce_op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """Return the mean or sum of a tensor over all data-parallel ranks. Collective."""
        gathered = self.data_ranks.all_gather(tensor)
        return gathered.sum(0) if reduce_op == "sum" else gathered.mean(0)
