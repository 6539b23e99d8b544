"""Memory and first values for the parts of a model, one part at a time, before each is cut."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.core.errors import ConfigurationError
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies.fsdp.make_whole import GIVEN_UP, give_up
from trainwright.strategies.units import replace_parameters


class MetaBuilding:
    """Builds a task's model without memory where that is wished, and knows what still has to be loaded."""

    def __init__(self, *, everywhere: bool, others: bool) -> None:
        self._everywhere, self._others = everywhere, others
        self.awaited: set[str] = set()

    def context(self, task: TaskModule, processes: Processes) -> AbstractContextManager[object]:
        """Return the context of `configure_model` on this rank. Not collective."""
        if (self._everywhere or self._others) and not overrides(task, "configure_model", TaskModule):
            name = "meta_init" if self._everywhere else "cpu_ram_efficient_loading"
            raise ConfigurationError(
                f"{name}=True says where {type(task).__name__}.configure_model builds the model, and it has none. "
                "Move the layers there from __init__, or leave the argument out."
            )
        meta = self._everywhere or (self._others and processes.rank > 0)
        return torch.device("meta") if meta else nullcontext()

    def names_to_reset(self, task: nn.Module, processes: Processes) -> list[str]:
        """Return the parameters and buffers that no rank has values for, without what is to be loaded. Collective."""
        tensors = [*task.named_parameters(), *task.named_buffers()]
        names: list[str] = processes.broadcast_object([name for name, tensor in tensors if tensor.is_meta])
        self.awaited = set(names) if vars(task).get(GIVEN_UP) else set()
        return [] if self.awaited else names

    def check(self, task: TaskModule) -> None:
        """Check that every weight has a value by now. Not collective."""
        if self.awaited:
            give_up(task)  # what stands in its pieces now is no value, and a checkpoint may still come
            raise ConfigurationError(
                f"{type(task).__name__} gave its weights up when its last stage was over "
                "(weights_after_stage='none'). Pass ckpt_path, for example ckpt_path='last', or build the task anew."
            )
        vars(task).pop(GIVEN_UP, None)


def materialize(task: nn.Module, module: nn.Module, built: list[str], device: torch.device) -> None:
    """Give what is left whole in a module memory on the device and rank 0's values. Collective.

    Args:
        task: what the module is a part of; its tied parameters are replaced together.
        module: a unit, or what is around all units. What lies in pieces is left as it is.
        built: names of the tensors that no rank has values for: their modules' `reset_parameters` says how they begin.
        device: where they are trained.
    """
    _allocate(task, module, built, device)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device).contiguous()  # torch 2.13 cuts no others
            dist.broadcast(tensor.detach(), src=0)


def _allocate(task: nn.Module, module: nn.Module, built: list[str], device: torch.device) -> None:
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
