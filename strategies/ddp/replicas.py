"""Functions for strategies with full replicas: broadcasts, averages, and checks of frozen and unused parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.task import TaskModule
from trainwright.core.tree import local_part
from trainwright.strategies.data_ranks import DataRanks


def check_can_be_alone(task: nn.Module) -> None:
    """Check that one rank can run a step without the others.

    Raises:
        ConfigurationError: The model has a collective layer.
    """
    if any(isinstance(module, nn.SyncBatchNorm) for module in task.modules()):
        raise ConfigurationError(
            "sync_batchnorm=True makes every forward collective, but a batch size search runs forwards on one rank "
            "alone. Search with one process (devices=1)."
        )


def broadcast_from_main(module: nn.Module) -> None:
    """Copy rank 0's weights and buffers to all ranks, like DistributedDataParallel's constructor. Collective."""
    for tensor in [*module.parameters(), *module.buffers()]:
        for part in _stored_tensors(tensor.detach()):
            dist.broadcast(part, src=0)


def _stored_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the inner tensors of a quantized torchao tensor, or a list with the tensor itself."""
    if not type(tensor).__module__.startswith("torchao."):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    stored = []
    for name in names:
        stored += _stored_tensors(getattr(tensor, name))
    return stored


@torch.no_grad()
def average_replicas(ranks: DataRanks, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
    """Average parameters over ranks in place, and copy rank 0's buffers to all ranks. Collective."""
    ranks.average(parameter.detach() for parameter in parameters)
    for buffer in buffers:
        dist.broadcast(buffer, src=0)


class FlatGradients:
    """Gradients of trained parameters of one dtype, concatenated for one all-reduce over replicas.

    Args:
        parameters: The parameters. A sharded parameter contributes this rank's shard of its gradient.
        weight: Factor of the gradients in `values`.

    Attributes:
        values: The concatenated gradients, which the caller sums over replicas in place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight: float) -> None:
        self._parameters = parameters
        self._grads: list[torch.Tensor] = []
        has_grad: list[float] = []
        for parameter in parameters:
            grad = parameter.grad
            has_grad.append(0.0 if grad is None else 1.0)
            self._grads.append(torch.zeros_like(parameter) if grad is None else grad)
        self._parts = [local_part(grad) for grad in self._grads]
        flat = [part.reshape(-1) for part in self._parts]
        if weight != 1:
            flat = [weight * values for values in flat]
        # The flags are summed in the same all-reduce: above 0 if any replica has a gradient of the parameter.
        flags = torch.tensor(has_grad, dtype=parameters[0].dtype).to(flat[0].device)
        self.values = torch.cat([*flat, flags])

    def write_mean(self, total_weight: float) -> None:
        """Divide the summed `values` by `total_weight`, and write the means to the parameters' gradients.

        A parameter without a gradient on any replica keeps none.
        """
        num = len(self._parameters)
        num_replicas_with_grad = self.values[-num:].tolist()
        means = _unflatten_dense_tensors(self.values[:-num] / total_weight, self._parts)  # type: ignore[no-untyped-call]  # torch has no types here
        gradients = zip(self._parameters, self._grads, self._parts, means, num_replicas_with_grad, strict=True)
        for parameter, grad, part, mean, count in gradients:
            if count > 0:
                part.copy_(mean)
                parameter.grad = grad


@torch.no_grad()
def flat_gradients(parameters: Iterable[nn.Parameter], weight: float = 1.0) -> list[FlatGradients]:
    """Return the gradients of all trained parameters, as one `FlatGradients` for each dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [FlatGradients(group, weight) for group in by_dtype.values()]


def frozen_parameters(task: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that do not require gradients."""
    return [parameter for parameter in task.parameters() if not parameter.requires_grad]


def any_trained(frozen: list[nn.Parameter]) -> bool:
    """Return whether any of the parameters requires gradients now. Called in each step."""
    for parameter in frozen:  # noqa: SIM110  # a generator is slower
        if parameter.requires_grad:
            return True
    return False


_MARK = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MOST_NAMES = 10


def unused_parameters(error: BaseException, model: nn.Module) -> TaskError | None:
    """Translate DistributedDataParallel's error about unused parameters into one that names them.

    Return None for any other error.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not text.startswith(_MARK):
        return None
    names = _names_of_indices(text, model)
    what = f": {', '.join(names[:_MOST_NAMES])}" if names else ""
    if len(names) > _MOST_NAMES:
        what += f" and {len(names) - _MOST_NAMES} more"
    if isinstance(model, TaskModule):
        option = "DDPStrategy(find_unused_parameters=True) or strategy='ddp_find_unused_parameters_true'"
    else:
        option = "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])"
    return TaskError(
        f"the loss of {type(model).__name__}'s last step does not depend on some of its parameters{what}. The "
        "processes average the gradients of all parameters. Use each parameter in every step, freeze the unused ones "
        f"(requires_grad_(False)) or remove them. If steps use different parameters, use {option}."
    )


def _names_of_indices(text: str, model: nn.Module) -> list[str]:
    """Return the names of the parameters whose indices torch's error lists. torch counts the trained parameters."""
    found = _INDICES.search(text)
    if found is None:
        return []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = []
    for index in map(int, found[1].split()):
        if index < len(trained):
            names.append(trained[index])
    return names
