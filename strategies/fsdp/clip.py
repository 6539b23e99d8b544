"""Gradients that lie in pieces, clipped by what they are together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from trainwright.strategies.gradients import GradientClip


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
