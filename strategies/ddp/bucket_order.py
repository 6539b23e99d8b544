"""Have a resumed run add gradients in the order of the uninterrupted one.

After the first step, DistributedDataParallel lays its buckets out anew, in the order in which gradients came. Where a
gradient lies in a bucket decides in which order three or more ranks are added up, and so its last bits. A resumed run
would begin with the first layout again. So the order goes into the checkpoint, and before its first step a resumed run
lets gradients of zero come in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainwright.core.task import TaskModule


class BucketOrder:
    """The order in which a replica's gradients came in its first synchronizing backward.

    Attributes:
        names: of parameters; complete after the first step.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._handles: list[Any] = []

    def record(self, replica: DistributedDataParallel, task: TaskModule) -> None:
        """Write down the order in the next backward that synchronizes; later ones cost nothing."""
        self.stop()
        self.names = []
        for name, parameter in task.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook  # type: ignore[attr-defined]  # of leaves only
                self._handles.append(hook(partial(self._note, replica, name)))

    def _note(self, replica: DistributedDataParallel, name: str, parameter: torch.Tensor) -> None:
        if replica.require_backward_grad_sync:
            self.names.append(name)
            if len(self.names) == len(self._handles):
                self.stop()

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def replay(self, replica: DistributedDataParallel, task: TaskModule, names: Sequence[str]) -> None:
        """Let gradients of zero come in an order, so that the next forward lays buckets out accordingly. Collective.

        Nothing happens unless the names are those of the parameters that are trained.
        """
        trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
        if set(names) != set(trained):
            return
        self.stop()
        self.names = list(names)
        replica("named_parameters")  # a forward, after which the replica waits for a backward
        for name in names:
            torch.autograd.backward(trained[name], torch.zeros_like(trained[name]))
        for parameter in trained.values():
            parameter.grad = None
