"""Memory and first values for the parts of a model, one part at a time, before each is cut."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.shard_units import replace_parameters


def names_on_meta(task: TaskModule) -> list[str]:
    """Return the names of the parameters and buffers that this rank has no memory for. Not collective."""
    return [name for name, tensor in [*task.named_parameters(), *task.named_buffers()] if tensor.is_meta]


def materialize(task: TaskModule, module: nn.Module, built: list[str], device: torch.device) -> None:
    """Give what is left whole in a module memory on the device and rank 0's values. Collective.

    Args:
        task: what the module is a part of; its tied parameters are replaced together.
        module: a unit, or what is around all units. What lies in pieces is left as it is.
        built: names of the tensors that no rank has values for: their modules' `reset_parameters` says how they begin.
        device: where they are trained.

    Raises:
        ConfigurationError: a module without `reset_parameters` holds one of `built`.
    """
    _allocate(task, module, built, device)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device).contiguous()  # torch 2.13 cuts no others
            dist.broadcast(tensor.detach(), src=0)


def _allocate(task: TaskModule, module: nn.Module, built: list[str], device: torch.device) -> None:
    names = {id(t): n for n, t in [*task.named_parameters(), *task.named_buffers()]}
    new: dict[int, nn.Parameter] = {}
    to_reset: list[tuple[nn.Module, str]] = []
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta and not isinstance(parameter, DTensor):
                made = torch.empty_like(parameter, device=device)
                new.setdefault(id(parameter), nn.Parameter(made, requires_grad=parameter.requires_grad))
            if names.get(id(parameter)) in built and not isinstance(parameter, DTensor):
                to_reset.append((owner, key))
        for key, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                owner._buffers[key] = torch.empty_like(buffer, device=device)
            if names.get(id(buffer)) in built:
                to_reset.append((owner, key))
    replace_parameters(task, new)
    for owner in {id(owner): owner for owner, _ in to_reset}.values():
        reset = getattr(owner, "reset_parameters", None)
        if reset is None:
            keys = ", ".join(key for holder, key in to_reset if holder is owner)
            raise ConfigurationError(
                f"{type(owner).__name__} was built on the device 'meta' and says nowhere how {keys} begin(s). "
                "Define reset_parameters(self) in it, or build it on the host."
            )
        with torch.no_grad():
            reset()
