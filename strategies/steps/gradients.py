"""Gradients between backward and optimizer step: weights of micro-batches, norms and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ArgumentTypeError, ConfigurationError, TaskError, nearest
from trainwright.core.host.device_types import properties

# Number of gradient elements on the host from which several threads compute the norm. Fewer take less time than threads
# need to start.
_MIN_THREADED_NUMEL = 2**20


@dataclass(frozen=True, slots=True)
class GradientClip:
    """Gradient clipping, applied once per optimizer step.

    Attributes:
        value: Maximum total norm (`"norm"`) or maximum absolute element (`"value"`), > 0.
        algorithm: `"norm"` or `"value"`. Default: None, which is `"norm"`.
        norm_type: p of the p-norm. Infinity means the maximum absolute element. Default: 2.
    """

    value: float
    algorithm: Literal["norm", "value"] | None = None
    norm_type: float = 2.0

    @classmethod
    def parse(cls, value: float | int | None, algorithm: str | None) -> GradientClip | None:
        """Parse `gradient_clip_val` and `gradient_clip_algorithm`. Return None if the value is None or 0.

        Raises:
            ArgumentTypeError: The value is not a number.
            ConfigurationError: The value is negative or NaN, or the algorithm is unknown.
        """
        if algorithm not in (None, "norm", "value"):
            raise ConfigurationError(
                f"gradient_clip_algorithm={algorithm!r} is unknown.{nearest(str(algorithm), ('norm', 'value'))} "
                "Known: 'norm', 'value'."
            )
        if value is None or value == 0:
            return None
        text = f"gradient_clip_val={value!r} is not a positive number. Use None for no clipping."
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ArgumentTypeError(text)
        if not value > 0:
            raise ConfigurationError(text)
        return cls(float(value), cast(Literal["norm", "value"] | None, algorithm))


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of the optimizers in order, each once, even if several optimizers have it."""
    by_id: dict[int, nn.Parameter] = {}  # the == of tensors compares their values
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                by_id[id(parameter)] = parameter
    return list(by_id.values())


def clip_gradients(parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
    """Clip gradients in place. Return the norm before clipping (0-dim, on the device), or None for `"value"`.

    Does not wait for the device.
    """
    if clip.algorithm == "value":
        nn.utils.clip_grad_value_(parameters, clip.value)
        return None
    return nn.utils.clip_grad_norm_(parameters, clip.value, clip.norm_type)


def clip_shards(
    shards: list[tuple[torch.Tensor, bool]], clip: GradientClip, device: torch.device
) -> torch.Tensor | None:
    """Clip this rank's shards of gradients in place. Collective over all ranks; does not wait for the device.

    Must be called in `torch.no_grad()`.

    Args:
        shards: Shards, each with True if the norm includes this rank's copy. If several ranks hold the same shard,
            exactly one rank passes True.
        clip: Options of clipping. Clipping by value is not collective.
        device: Device of the collectives.

    Returns:
        The norm of the full gradients before clipping (0-dim, on the device). None for clipping by value.
    """
    if clip.algorithm == "value":
        for grad, _ in shards:
            grad.clamp_(-clip.value, clip.value)
        return None
    p = clip.norm_type
    counted = [grad for grad, counts in shards if counts and grad.numel()]
    norm = total_norm(counted, p).to(device).double()  # powers may overflow in float32
    if math.isinf(p):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    else:
        # The p-th powers of the ranks' norms add up: two ranks with the 2-norms 3 and 4 have the norm 5.
        norm = norm.pow(p)
        dist.all_reduce(norm)
        norm = norm.pow(1 / p)
    norm = norm.to(shards[0][0].dtype if shards else torch.float32)
    factor = (clip.value / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_
    for group in _by_device_and_dtype([grad for grad, _ in shards]):
        factor_on_device = factor.to(group[0].device)
        # For shards on the host, the factor was copied to the host: reading it does not wait, and a factor of 1 makes
        # the multiplication unnecessary.
        was_copied = factor_on_device.device != factor.device
        if was_copied and factor_on_device == 1:
            continue
        torch._foreach_mul_(group, factor_on_device)
    return norm


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients, bitwise equal to `nn.utils.get_total_norm`.

    For large gradients on the host, several threads compute it. Torch computes the norm of a CPU tensor in one thread.
    """
    threads = min(len(gradients), torch.get_num_threads())
    num_on_host = sum(grad.numel() for grad in gradients if grad.device.type == "cpu")
    if threads < 2 or num_on_host < _MIN_THREADED_NUMEL:
        return nn.utils.get_total_norm(gradients, norm_type)

    def norm(grad: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # the caller's setting does not apply to other threads
            result: torch.Tensor = torch.linalg.vector_norm(grad, norm_type)
            return result

    with ThreadPoolExecutor(threads) as pool:
        norms = [each.to(gradients[0].device) for each in pool.map(norm, gradients)]
    # Torch also computes the norm of the tensors' norms. Its last bits may differ from the norm of all elements.
    return norm(torch.stack(norms))


def _by_device_and_dtype(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()


class Gradients:
    """Access to the gradients of an engine's models. Here, every rank holds full gradients in `p.grad`.

    Engines that store gradients in another way use a subclass.

    Args:
        device: Device of the gradients.

    Attributes:
        averaged: The last backward of an optimizer step averages gradients over ranks. Default: True.
        scales_sums: True if `scale` also works on accumulated gradients before the last backward.
        accumulates_elsewhere: Gradients before the last backward are not in `p.grad`.
    """

    scales_sums: bool = True
    accumulates_elsewhere: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.averaged = True

    def stored(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters of models as optimizers hold them, also while a model is being computed."""
        return list(parameters)

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """Return a loss scaler for float16.

        Args:
            options: Options of `torch.amp.GradScaler`.
        """
        return torch.amp.GradScaler(self.device.type, **options)

    def complete(self) -> None:
        """Reduce gradients that the last backward of an optimizer step has not reduced. Collective in subclasses."""

    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        """Clip the gradients of parameters in place. Return their norm before clipping, or None for `"value"`.

        Collective where ranks hold shards.
        """
        return clip_gradients(parameters, clip)

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the accumulated gradients of parameters in place."""
        scale_gradients(parameters, factor)

    def free(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Free the accumulated gradients of parameters. Return whether there were any."""
        return free_gradients(parameters)


class HostGradients(Gradients):
    """Full gradients in host memory, whose norm is computed by all threads."""

    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        """Clip like `nn.utils.clip_grad_norm_`, but without a multiplication if the norm is at most the maximum.

        On the host, reading the norm does not wait.
        """
        if clip.algorithm == "value":
            return clip_gradients(parameters, clip)
        with_gradients = []
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None:
                with_gradients.append(parameter)
                gradients.append(parameter.grad)
        norm = total_norm(gradients, clip.norm_type)
        is_within_maximum = clip.value / (norm + 1e-6) >= 1  # False for NaN, which is then clipped as in torch
        if not is_within_maximum:
            nn.utils.clip_grads_with_norm_(with_gradients, clip.value, norm)
        return norm


def loss_of(output: Any, origin: str) -> torch.Tensor | None:
    """Return the loss in the result of a training step, after checking that it is a scalar with a graph.

    Args:
        output: A tensor, a mapping with the key `"loss"`, or None (the micro-batch is skipped).
        origin: The task's class name for messages.

    Returns:
        The loss (0-dim). None if the micro-batch is skipped.

    Raises:
        TaskError: The loss is missing, not a scalar or has no graph.
    """
    if output is None:
        return None
    loss = output
    if not isinstance(loss, torch.Tensor):
        try:
            loss = output["loss"]
        except (TypeError, KeyError, IndexError):
            loss = output
        if not isinstance(loss, torch.Tensor):
            without = " without a loss tensor" if isinstance(output, dict) else ""
            raise TaskError(
                f"{origin}.training_step returned {type(output).__name__}{without}. Return the loss as a scalar "
                "tensor, a dict with the key 'loss', or None to skip the batch."
            )
    num_dims = loss.dim()
    is_scalar = num_dims == 0 or (num_dims == 1 and loss.numel() == 1)
    if not is_scalar:
        raise TaskError(
            f"{origin}.training_step returned a loss of shape {tuple(loss.shape)}; it must be a scalar. "
            "Return loss.mean()."
        )
    if not loss.requires_grad:
        raise TaskError(
            f"{origin}.training_step returned a loss without a graph (requires_grad is False). Compute it from the "
            "model's outputs, without detach(), .item() or torch.no_grad(). If every parameter is frozen, unfreeze "
            "some."
        )
    return loss.squeeze(0) if num_dims else loss


def stack_counts(counts: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return the item counts of the micro-batches as one float tensor on `device`. Does not block.

    The dtype is float64 if the device supports it, so that counts are exact beyond 2²⁴.
    """
    dtype = torch.float64 if properties(device.type).has_float64 else torch.float32
    is_asynchronous = properties(device.type).copies_beside
    are_on_device = any(isinstance(count, torch.Tensor) and count.device.type == device.type for count in counts)
    if not are_on_device:  # one copy for all counts
        return torch.tensor([float(count) for count in counts], dtype=dtype).to(device, non_blocking=is_asynchronous)
    moved = []
    for count in counts:
        tensor = torch.as_tensor(count).to(device=device, dtype=dtype, non_blocking=is_asynchronous)
        moved.append(tensor.reshape(()))
    return torch.stack(moved)


def item_weights(
    counts: float | torch.Tensor, total: torch.Tensor, num_averaged: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of losses in the mean over all items of an optimizer step.

    Args:
        counts: Number of items that each loss is the mean over.
        total: Number of items of the step, over all micro-batches and ranks. Without items, all weights are 0.
        num_averaged: Number of ranks over which the gradients are averaged afterwards.
        dtype: Data type of the weights.
    """
    return (counts * num_averaged / total.clamp(min=1)).to(dtype)


def growth_without(skipped: Sequence[int], size: int, weights: Sequence[Any] | None) -> float | torch.Tensor:
    """Return the factor that corrects the mean over micro-batches if some of them were skipped.

    Args:
        skipped: Indices of micro-batches without a loss. At least one micro-batch must have a loss.
        size: Number of micro-batches.
        weights: Weights of the micro-batches, numbers or 0-dim device tensors with the sum 1. None means equal weights.
    """
    if weights is None:
        return size / (size - len(skipped))
    used = sum(weight for i, weight in enumerate(weights) if i not in skipped)  # sum of the remaining weights
    return 1 / torch.as_tensor(used).clamp(min=1e-12)  # without items the gradient is zero for any factor


def weights_of_one_rank(weights: Sequence[Any]) -> list[float]:
    """Return the weights of the mean over this rank's micro-batches, without padding.

    Args:
        weights: Weights of the mean over the micro-batches of all ranks; 0 for padding.
    """
    num_real = sum(weight > 0 for weight in weights)
    return [1 / num_real if weight > 0 else 0.0 for weight in weights]


def without_loss(origin: str, rank: int) -> TaskError:
    """Return the error for a step in which this process has no loss, in a run with several processes."""
    return TaskError(
        f"{origin}.training_step returned None on rank {rank}, but with several processes every rank must compute "
        "gradients. Return a zero loss that is connected to the parameters, for example 0 * output.sum()."
    )


def scale_gradients(parameters: Iterable[torch.Tensor], factor: Any) -> None:
    """Multiply the gradients of parameters in place. Parameters without a gradient are skipped."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if isinstance(factor, torch.Tensor):
            grad.mul_(factor.to(grad.device))
        else:
            grad.mul_(factor)


def zero_gradients(optimizer: Optimizer) -> None:
    """Zero gradients like `optimizer.zero_grad()`. Skips the profiler record, which takes a tenth of a small step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def free_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Free the gradients of parameters. Return whether there were any."""
    were_any = False
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = None
            were_any = True
    return were_any
