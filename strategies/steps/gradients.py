"""What happens to gradients between backward and the optimizer: weights of micro-batches, norms and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError, nearest
from trainwright.core.host.device_types import properties


@dataclass(frozen=True, slots=True)
class GradientClip:
    """How gradients are clipped once per optimizer step.

    Attributes:
        value: largest total norm (`"norm"`) or largest absolute element (`"value"`), > 0.
        algorithm: which of the two.
        norm_type: p of the p-norm; infinity: the largest absolute element.
    """

    value: float
    algorithm: Literal["norm", "value"] = "norm"
    norm_type: float = 2.0

    @classmethod
    def parse(cls, value: float | int | None, algorithm: str | None) -> GradientClip | None:
        """Read `gradient_clip_val` and `gradient_clip_algorithm`; None when nothing is clipped.

        Raises:
            ConfigurationError: a value that is no positive number, or an unknown algorithm.
        """
        if algorithm is not None and algorithm not in ("norm", "value"):
            raise ConfigurationError(
                f"gradient_clip_algorithm={algorithm!r} is unknown.{nearest(str(algorithm), ('norm', 'value'))} "
                "Known: 'norm', 'value'."
            )
        if value is None or value == 0:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigurationError(f"gradient_clip_val={value!r} is not a positive number. Use None for no clipping.")
        return cls(float(value), "value" if algorithm == "value" else "norm")


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that the optimizers hold, each once, in their order."""
    found = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return list(found.values())


def clip_gradients(parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
    """Clip in place and return the total norm before clipping (a 0-dim device tensor; None for `"value"`).

    Neither reads the device.
    """
    if clip.algorithm == "value":
        nn.utils.clip_grad_value_(parameters, clip.value)
        return None
    return nn.utils.clip_grad_norm_(parameters, clip.value, clip.norm_type)


def clip_shards(
    shards: list[tuple[torch.Tensor, bool]], clip: GradientClip, device: torch.device
) -> torch.Tensor | None:
    """Clip this rank's shards of gradients in place. Collective, over all ranks; does not wait for the device.

    Called without gradients recorded.

    Args:
        shards: Each with whether it is counted here: of the ranks that hold the same shard, one counts it.
        clip: how; by value nothing is collective.
        device: where ranks meet.

    Returns:
        The norm of the whole gradients before (0-dim, on the device); None if they are clipped by value.
    """
    if clip.algorithm == "value":
        for grad, _ in shards:
            grad.clamp_(-clip.value, clip.value)
        return None
    counted, p = [grad for grad, counts in shards if counts and grad.numel()], clip.norm_type
    norm = nn.utils.get_total_norm(counted, p).to(device).double()  # float32 would overflow where the norm does not
    if math.isinf(p):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    else:
        norm = norm.pow(p)
        dist.all_reduce(norm)
        norm = norm.pow(1 / p)
    norm = norm.to(shards[0][0].dtype if shards else torch.float32)
    factor = (clip.value / (norm + 1e-6)).clamp(max=1.0)
    for group in _by_kind([grad for grad, _ in shards]):
        torch._foreach_mul_(group, factor.to(group[0].device))
    return norm


def _by_kind(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()


class Gradients:
    """The gradients of the models of one engine, which every rank holds in full in `p.grad`.

    Engines that hold them elsewhere have a sub-class.

    Args:
        device: Where they are.

    Attributes:
        averaged: The ranks average them in the last backward of an optimizer step. Default: True.
        scales_sums: `scale` works before that backward, on the sums of earlier ones; otherwise only after it.
    """

    scales_sums: bool = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.averaged = True

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """Return a loss scaler for float16.

        Args:
            options: those of `torch.amp.GradScaler`.
        """
        return torch.amp.GradScaler(self.device.type, **options)

    def complete(self) -> None:
        """Complete the gradients of an optimizer step after its last backward. Collective where ranks hold shards."""

    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        """Clip the gradients of parameters in place; returns their norm before (None for `"value"`).

        Collective where ranks hold shards.
        """
        return clip_gradients(parameters, clip)

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the accumulated gradients of parameters in place."""
        scale_gradients(parameters, factor)

    def free(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Free the accumulated gradients of parameters; returns whether there were any."""
        return free_gradients(parameters)


def loss_of(output: Any, origin: str) -> torch.Tensor | None:
    """Take the loss out of what a training step returned, and check that it can be trained on.

    Args:
        output: a tensor, a mapping with the key `"loss"`, or None (the micro-batch is skipped).
        origin: the task's class name, for messages.

    Raises:
        TaskError: no loss in it, not a scalar, or not connected to any parameter.
    """
    loss = output
    if not isinstance(loss, torch.Tensor):
        if loss is None:
            return None
        try:
            loss = output["loss"]
        except (TypeError, KeyError, IndexError):
            loss = output
        if not isinstance(loss, torch.Tensor):
            raise TaskError(
                f"{origin}.training_step returned {type(output).__name__}"
                f"{' without a loss tensor' if isinstance(output, dict) else ''}. Return the loss as a scalar tensor, "
                "a dict with the key 'loss', or None to skip the batch."
            )
    num_dims = loss.dim()
    if num_dims and (num_dims > 1 or loss.numel() != 1):
        raise TaskError(
            f"{origin}.training_step returned a loss of shape {tuple(loss.shape)}; it must be a scalar. "
            "Return loss.mean()."
        )
    if not loss.requires_grad:
        raise TaskError(
            f"{origin}.training_step returned a loss without a graph (requires_grad is False): nothing could be "
            "learned from it. Compute it from the model's outputs, without detach(), .item() or torch.no_grad(); "
            "if every parameter is frozen, unfreeze some."
        )
    return loss.squeeze(0) if num_dims else loss


def stack_counts(counts: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return the item counts of a group's micro-batches as one float tensor on `device`, without reading it.

    float64 where the device has it, so that counts stay exact beyond 2²⁴.
    """
    dtype = torch.float64 if properties(device.type).has_float64 else torch.float32
    beside = properties(device.type).copies_beside
    if any(isinstance(count, torch.Tensor) and count.device.type == device.type for count in counts):
        parts = [torch.as_tensor(count).to(device=device, dtype=dtype, non_blocking=beside) for count in counts]
        return torch.stack([part.reshape(()) for part in parts])
    return torch.tensor([float(count) for count in counts], dtype=dtype).to(device, non_blocking=beside)


def growth_without(skipped: Sequence[int], size: int, weights: Sequence[Any] | None) -> float | torch.Tensor:
    """Return by what factor a group's mean grows when some of its micro-batches are left out of it.

    Args:
        skipped: indices of micro-batches that gave no loss; not all of them.
        size: micro-batches in the group.
        weights: their weights, numbers or 0-dim device tensors that sum to 1, without reading them; None: all alike.
    """
    if weights is None:
        return size / (size - len(skipped))
    used = sum(weight for i, weight in enumerate(weights) if i not in skipped)
    return 1 / torch.as_tensor(used).clamp(min=1e-12)  # without any item the gradient is zero, whatever the factor


def weights_of_one_rank(weights: Sequence[Any]) -> list[float]:
    """Return weights whose sum is the mean over the real micro-batches of this rank.

    Args:
        weights: of the mean over those of all ranks; 0 for padding.
    """
    real = [weight > 0 for weight in weights]
    return [is_real / max(sum(real), 1) for is_real in real]


def without_loss(origin: str, rank: int) -> TaskError:
    """Return the error for a step without loss where other processes wait for its gradient."""
    return TaskError(
        f"{origin}.training_step returned None on rank {rank}: with several processes the others would wait for its "
        "gradient. Return a loss of zero that is connected to the parameters instead, for example 0 * output.sum()."
    )


def scale_gradients(parameters: Iterable[torch.Tensor], factor: Any) -> None:
    """Multiply the gradients that there are, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device) if isinstance(factor, torch.Tensor) else factor)


def zero_gradients(optimizer: Optimizer) -> None:
    """Do what `optimizer.zero_grad()` does, without the profiler's record around it: a tenth of a small step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def free_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Free the gradients of parameters; returns whether there were any."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        parameter.grad = None
    return bool(held)
