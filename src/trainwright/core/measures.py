"""Measures of a model: gradient norms, and the number of floating-point operations of a forward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import is_sharded


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient and the total norm, for logging. Never waits for the device.

    For sharded gradients the norms are those of full gradients, and the call is collective.

    Args:
        module: the model. Parameters without a gradient are skipped.
        norm_type: the p of the p-norm, above 0, or `"inf"` for the largest magnitude.
        group_separator: separator of `grad_2.0_norm` and the parameter's name. Default: `"/"`.

    Returns:
        0-dim tensors on the device by name: `grad_{p}_norm/{parameter}` and `grad_{p}_norm_total`. Empty without
        gradients.

    Raises:
        ConfigurationError: p is not above 0, or parameters are on the `meta` device, as those of other stages of a
            pipeline.
    """
    order = float(norm_type)
    if not order > 0:
        raise ConfigurationError(f"grad_norm(norm_type={norm_type!r}): write a number above 0, or 'inf'.")
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigurationError(
            "grad_norm: this rank has one stage of the model, and no gradients of other stages. Set "
            "gradient_clip_val: the norm over all stages is then `result.grad_norm` in on_train_step_end."
        )
    norms: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm: Any = torch.linalg.vector_norm(parameter.grad.detach(), order)  # of a DTensor, it is a DTensor
            norms[f"grad_{order}_norm{group_separator}{name}"] = norm.full_tensor() if is_sharded(norm) else norm
    if norms:
        # A model may be on several devices.
        first_device = next(iter(norms.values())).device
        stacked = torch.stack([norm.to(first_device) for norm in norms.values()])
        # The norm of the parameters' norms is the norm of all elements, for every p.
        total = stacked.max() if math.isinf(order) else torch.linalg.vector_norm(stacked, order)
        norms[f"grad_{order}_norm_total"] = total
    return norms


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode without gradients in the context, then restore the modes of all submodules."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training  # not `train(training)`, which also sets the mode of all children


def measure_flops(
    model: nn.Module,
    forward_fn: Callable[[], torch.Tensor],
    loss_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> int:
    """Count floating-point operations with torch's FlopCounterMode; on the `meta` device it computes nothing.

    Args:
        model: the model. It is not changed, except that `loss_fn` computes gradients.
        forward_fn: runs the forward and returns its output.
        loss_fn: computes a loss from the output. The backward of the loss is counted, too. Default: None.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()  # type: ignore[no-untyped-call]  # torch has no types here
    return int(counter.get_total_flops())
