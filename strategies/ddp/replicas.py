"""What strategies share that keep a whole replica of the task on every process: equal starts, and steps alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.data_parallel import DataParallel


class Replicas(DataParallel):
    """Keeps a whole replica of the task on every process; any of them can run a step without the others.

    Args:
        arguments: see `DataParallel`.
    """

    _is_alone = False

    def _start_equal(self, task: TaskModule) -> None:
        broadcast_from_main(task)

    def _leave_others(self) -> None:
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.task.modules()):
            raise ConfigurationError(
                "sync_batchnorm=True makes every forward collective, so that no rank can try a batch size alone. "
                "Search with one process (devices=1)."
            )
        self._is_alone = True

    def _rejoin_others(self) -> None:
        self._is_alone = False

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        if self._is_alone:
            return value * self.dp_size
        return super()._sum_over_ranks(value)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        if self._is_alone:
            return torch.stack([tensor if sync_grads else tensor.detach()] * self.dp_size)
        return super().all_gather(tensor, sync_grads)


def broadcast_from_main(module: nn.Module) -> None:
    """Copy rank 0's weights and buffers to the others, as DistributedDataParallel's constructor does. Collective."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def frozen_parameters(task: TaskModule) -> list[nn.Parameter]:
    """Return the parameters that are not trained now."""
    return [parameter for parameter in task.parameters() if not parameter.requires_grad]


def any_trained(frozen: list[nn.Parameter]) -> bool:
    """Tell whether one of what `frozen_parameters` has returned is trained by now; asked in each step."""
    for parameter in frozen:  # noqa: SIM110  # a generator would be a call for each
        if parameter.requires_grad:
            return True
    return False
