"""Norms, clipping and the loss scale of gradients that lie in pieces."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import TaskError
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies.shards import local_piece
from trainwright.strategies.steps.gradients import GradientClip


def clip_pieces(
    pieces: list[tuple[torch.Tensor, bool]], clip: GradientClip, device: torch.device
) -> torch.Tensor | None:
    """Clip this rank's pieces of gradients in place. Collective, over all ranks; does not wait for the device.

    Called without gradients recorded.

    Args:
        pieces: each with whether it counts here: of the ranks that hold the same piece, one counts it.
        clip: how; by value nothing is collective.
        device: where ranks meet.

    Returns:
        The norm of the whole gradients before (0-dim, on the device); None if they are clipped by value.
    """
    if clip.algorithm == "value":
        for grad, _ in pieces:
            grad.clamp_(-clip.value, clip.value)
        return None
    norm = nn.utils.get_total_norm([grad for grad, counts in pieces if counts and grad.numel()]).to(device)
    square = norm.double().square()  # of this rank's pieces; float32 would overflow where the norm does not
    dist.all_reduce(square)
    norm = square.sqrt().to(pieces[0][0].dtype if pieces else torch.float32)
    factor = (clip.value / (norm + 1e-6)).clamp(max=1.0)
    for alike in _alike([grad for grad, _ in pieces]):
        torch._foreach_mul_(alike, factor.to(alike[0].device))
    return norm


def _alike(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()


class ShardScaler(torch.amp.GradScaler):
    """Leaves a step out on all ranks when a gradient has overflowed in the piece of any."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # Torch's own takes all gradients at once, which cannot be of several meshes, nor in pieces and whole.
        flags: dict[torch.device, torch.Tensor] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = local_piece(parameter.grad)
                    if grad.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in by_kind.items():
            flag = flags.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        return flags

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale this rank's pieces and agree on whether any overflowed. Collective.

        Waits for the device where gradients are on the host (`cpu_offload`): ranks meet on the device.
        """
        super().unscale_(optimizer)
        found: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert self._scale is not None  # torch has checked it
        for flag in found.values():
            shared = flag.to(self._scale.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            if shared is not flag:
                flag.copy_(shared)


_FIRST = 3  # steps that are all compared
_PERIOD = 64  # of those after them


class Usage:
    """Keeps one number of which parameters have had a gradient in each step, and compares it with the other ranks'.

    `fully_shard` sums the gradients of a unit as one vector of those that there are. A rank that has left one out adds
    the others to places where they do not belong, and torch 2.13 does not notice.

    Args:
        task: cut.
        processes: this rank among the others.
    """

    def __init__(self, task: TaskModule, processes: Processes) -> None:
        self._task, self._processes = task, processes
        self._parameters = dict(task.named_parameters())
        self._mark = self._steps = 0

    def note(self) -> None:
        """Take note of a step whose gradients are there. Collective, on the host, in some steps."""
        self._mark = zlib.crc32(bytes([p.grad is None for p in self._parameters.values()]), self._mark)
        self._steps += 1
        if self._steps <= _FIRST or self._steps % _PERIOD == 0:
            self.check()

    def check(self) -> None:
        """Compare with the other ranks. Collective, on the host.

        Raises:
            TaskError: on every rank, where some have used other parameters than this one, in this step or another since
                the last comparison.
        """
        marks = [mark for (mark,) in self._processes.gather_integers([self._mark])]
        if len(set(marks)) > 1:
            unused = self._processes.gather_object([n for n, p in self._parameters.items() if p.grad is None])
            raise TaskError(
                f"{type(self._task).__name__} has used other parameters on one rank than on another{_example(unused)}, "
                "so that their gradients were mixed up when the ranks were summed. Under FSDP each step must use the "
                "same ones on every rank: call the same units, and add 0 * parameter.sum() to the loss for what a "
                "batch has no use for; or use strategy='ddp_find_unused_parameters_true'."
            )


def _example(unused: list[Any]) -> str:
    everywhere = set.intersection(*map(set, unused))
    for rank, names in enumerate(unused):
        for name in names:
            if name not in everywhere:
                other = next(i for i, found in enumerate(unused) if name not in found)
                return f": in the last step rank {other} used {name}, and rank {rank} did not"
    return ""
