"""Whole parameters and gradients by name, for whoever compares one strategy with another."""

from __future__ import annotations

import torch

from trainwright.checkpoint.model import plain_name
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.shards import whole


class Inspectable:
    """What a strategy shows of a model that may lie in pieces; a part of `Strategy`.

    An engine that keeps parameters or gradients elsewhere than in `p` and `p.grad` overrides both methods.
    """

    task: TaskModule
    device: torch.device
    capabilities: Capabilities

    def whole_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the parameters whole, by the task's own names; those of one tensor once.

        Args:
            keep: False: this rank wants shapes and dtypes only, and may get tensors on the device `meta`.

        Collective where they lie in pieces (copies on the host then); otherwise references, not to be changed.
        """
        found = self.task.named_parameters()
        return {plain_name(name): whole(p, self.device, keep=keep).detach() for name, p in found}

    def whole_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the gradients that there are, likewise; none of an engine that hides them.

        Called between `forward_backward` and `optimizer_step`: accumulated, averaged over ranks, unscaled.
        """
        if self.capabilities.gradients == "hidden":
            return {}
        found = [(name, p.grad) for name, p in self.task.named_parameters()]
        return {plain_name(name): whole(g, self.device, keep=keep).detach() for name, g in found if g is not None}
