"""What becomes of a model's pieces when a stage is over."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import CheckpointError
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.strategies.shards import whole
from trainwright.strategies.units import replace_parameters

GIVEN_UP = "_weights_given_up"  # stands in a task whose weights only checkpoints have


def end_pieces(
    task: TaskModule, optimizers: list[Optimizer], device: torch.device, *, weights: str, is_main: bool
) -> None:
    """Give a task and its optimizers tensors that are no pieces, on the host. Collective unless `weights` is `"none"`.

    Args:
        task: changed in place.
        optimizers: theirs; the states are whole on the main rank alone.
        device: where pieces are exchanged, one tensor at a time.
        weights: which ranks get the weights whole: `"all"`, `"main"` or `"none"`. The others get tensors of the same
            shapes on the device `meta`.
        is_main: whether this rank is the main one.
    """

    def of_state(tensor: torch.Tensor) -> torch.Tensor:
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
