"""What strategies share that keep a whole replica of the task on every process: equal starts, frozen parameters."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule


def check_can_be_alone(task: nn.Module) -> None:
    """Check that a replica can run a step without the others.

    Raises:
        ConfigurationError: a layer of it is collective.
    """
    if any(isinstance(module, nn.SyncBatchNorm) for module in task.modules()):
        raise ConfigurationError(
            "sync_batchnorm=True makes every forward collective, so that no rank can try a batch size alone. "
            "Search with one process (devices=1)."
        )


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
