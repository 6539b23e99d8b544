"""What a strategy does for a loop that somebody else owns: it places models, and holds gradients back on request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import move


class OwnLoop:
    """The side of a strategy that `Accelerator` uses; a part of `Strategy`.

    There is no task, and no group of micro-batches: the caller runs forward, backward and the optimizers, so that a
    strategy serves such loops only where these are torch's own. Any number of models may be prepared.
    """

    device: torch.device
    sync_each_batch: bool = False
    """Whether gradients cross ranks in every micro-batch of a step."""

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """Return what brings a batch to the device, without waiting for the copy; None where batches are in place."""
        return None if self.device.type == "cpu" else partial(move, device=self.device)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return what a loop calls in the place of `model`, which is on the device afterwards. Collective.

        Args:
            model: changed in place; its parameters stay the same objects, so that optimizers may hold them already.

        Raises:
            ConfigurationError: this strategy has steps of its own and cannot serve loops.
        """
        raise ConfigurationError(
            f"{type(self).__name__} runs the steps of a Trainer, and cannot serve a loop of your own yet. Use "
            "strategy='single' or 'ddp', or write the step as a TaskModule for Trainer(strategy=…)."
        )

    def hold_back(self, prepared: Any) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients of one prepared model on this rank. Not collective.

        The next backward outside of it exchanges what has been added up. Every rank must hold back the same passes.

        Args:
            prepared: what `prepare_model` returned.
        """
        return nullcontext()

    def sum_over_data_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a 0-dim tensor on the device over the ranks that see different data. Collective.

        Args:
            value: may be overwritten. It is not read on the host.
        """
        return value
