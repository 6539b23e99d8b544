"""Whole parameters and gradients by name, for whoever compares one strategy with another."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.core.hidden_names import plain_name
from trainwright.core.task import TaskModule
from trainwright.core.tree import is_cut
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.processes.process_group import Processes


class Inspectable:
    """What a strategy shows of a model that may lie in pieces; a part of `Strategy`.

    An engine that keeps parameters or gradients elsewhere than in `p` and `p.grad` overrides both methods.
    """

    task: TaskModule
    device: torch.device
    processes: Processes
    capabilities: Capabilities

    def clearer(self, error: BaseException, task: TaskModule) -> Exception | None:
        """Return an error that says in words of the task what an engine's own means; None: it is as clear as can be.

        Asked when a stage has failed. Not collective.
        """
        return None

    def whole_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the task's tensors, or one that is cut alike, whole.

        As it is where it lies whole. Otherwise collective: a copy on the host; on other ranks than the main one it has
        a shape and no values (device `meta`).
        """
        return _whole(tensor, self.device, keep=self.processes.rank == 0)

    def cut_like(self, value: Any, like: Any) -> Any:
        """Cut a whole tensor as `like` is cut; what is not to be cut, or does not fit, stays as it is. Not collective.

        Args:
            value: of a checkpoint: any shape, on the host.
            like: one of the task's tensors.
        """
        if isinstance(value, torch.Tensor) and is_cut(like) and value.shape == like.shape and like.dim():
            from trainwright.strategies.shards import piece_of

            return piece_of(value, like)
        return value

    def whole_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the parameters whole, by the task's own names; those of one tensor once.

        Args:
            keep: False: this rank wants shapes and dtypes only, and may get tensors on the device `meta`.

        Collective where they lie in pieces (copies on the host then); otherwise references, not to be changed.
        """
        found = self.task.named_parameters()
        return {plain_name(name): _whole(p, self.device, keep=keep).detach() for name, p in found}

    def whole_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the gradients that there are, likewise; none of an engine that hides them.

        Called between `forward_backward` and `optimizer_step`: accumulated, averaged over ranks, unscaled.
        """
        if self.capabilities.gradients == "hidden":
            return {}
        found = [(name, p.grad) for name, p in self.task.named_parameters()]
        return {plain_name(name): _whole(g, self.device, keep=keep).detach() for name, g in found if g is not None}


def _whole(tensor: torch.Tensor, device: torch.device, *, keep: bool) -> torch.Tensor:
    if not is_cut(tensor):
        return tensor
    from trainwright.strategies.shards import whole

    return whole(tensor, device, keep=keep)
