"""Memory and first values for the parts of a model before each is sharded, and full tensors after a stage."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.quantized_state import build_quantized, flatten_quantized, is_quantized
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.processes.process_group import Processes
from trainwright.strategies.shards import whole
from trainwright.strategies.units import check_no_shards, replace_parameters

GIVEN_UP = "_weights_given_up"  # stands in a task whose weights only checkpoints have


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
    """Give the full tensors of a module, which is part of a task, memory on the device and rank 0's values. Collective.

    Modules that hold tensors in `built`, for which no rank has values, are initialized by their `reset_parameters`.
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


def end_pieces(
    task: TaskModule, optimizers: list[Optimizer], device: torch.device, *, weights: str, is_main: bool
) -> None:
    """Give a task and its optimizers tensors that are no pieces, on the host. Collective unless `weights` is `"none"`.

    Args:
        task, optimizers: changed in place; optimizer states are full on the main rank only.
        device: where pieces are exchanged, one tensor at a time.
        weights: which ranks get full weights: `"all"`, `"main"` or `"none"`. The others get tensors on `meta`.
        is_main: whether this rank is the main one.
    """

    def of_state(tensor: torch.Tensor) -> Any:
        if is_quantized(tensor):
            full = map_tensors(of_state, flatten_quantized(tensor))
            return build_quantized(full, full["codes"].device)
        return tensor.to("meta") if weights == "none" else whole(tensor, device, keep=is_main)

    # States first, and one after the other: when the weights are put together, their pieces are gone.
    states = [
        {p: map_tensors(of_state, optimizer.state.pop(p)) for p in list(optimizer.state)} for optimizer in optimizers
    ]
    old = list(task.parameters())  # or another object might get the id of one that is freed
    if weights == "none":
        give_up(task)
    else:
        keep = is_main or weights == "all"
        new = {id(p): nn.Parameter(whole(p, device, keep=keep).detach(), requires_grad=p.requires_grad) for p in old}
        replace_parameters(task, new)
    parameters: dict[Any, nn.Parameter] = dict(zip(old, task.parameters(), strict=True))
    task._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]  # buffers too
    for optimizer, found in zip(optimizers, states, strict=True):
        optimizer.state.update({parameters[p]: state for p, state in found.items()})
        for group in optimizer.param_groups:
            group["params"] = [parameters[p] for p in group["params"]]


def give_up(task: TaskModule) -> None:
    """Replace a task's pieces by tensors on the device `meta`, of their whole shapes. Not collective."""
    new = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
        for p in task.parameters()
    }
    replace_parameters(task, new)
    vars(task)[GIVEN_UP] = True


def check_not_given_up(task: nn.Module) -> None:
    """Check that there is something to save. Not collective."""
    if vars(task).get(GIVEN_UP):
        raise CheckpointError(
            f"{type(task).__name__} gave its weights up when its stage was over (weights_after_stage='none'). Save "
            "before the fit ends, with ModelCheckpoint, or use weights_after_stage='main'."
        )


def check_full(model: nn.Module) -> None:
    """Check that a model does not hold shards of an earlier run."""
    check_no_shards(model, lambda parameter: isinstance(parameter, DTensor))


def widen(parameters: Iterable[nn.Parameter]) -> None:
    """Make float32 of trained parameters in bfloat16 or float16, which optimizers step in a mixed precision."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
