"""Store the weights of a model's layers in a smaller dtype, and convert those of each layer for its forward."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.model_hooks import ModelHook, add_hook_to_module

# Layers with most of a model's weights, for which rounding is harmless. It is not for norms and embeddings.
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class LayerwiseCastingHook(ModelHook):
    """Store a module's weights in one dtype and compute in another.

    Args:
        storage_dtype: Dtype between forwards, such as a float8 type.
        compute_dtype: Dtype during a forward.
        non_blocking: Do not wait for the conversion.
    """

    runs_after_failure = True

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the storage dtype."""
        return _cast(module, self.storage_dtype, self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the weights to the compute dtype."""
        _cast(module, self.compute_dtype, self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights back to the storage dtype."""
        _cast(module, self.storage_dtype, self.non_blocking)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the compute dtype. They remain rounded."""
        return _cast(module, self.compute_dtype, self.non_blocking)


def _cast(module: nn.Module, dtype: torch.dtype, non_blocking: bool) -> nn.Module:
    return module.to(dtype=dtype, non_blocking=non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolutional layers in one dtype and compute in another, for inference.

    Args:
        module: The module, which is changed.
        storage_dtype: Dtype between forwards. `torch.float8_e4m3fn` takes half the memory of bfloat16.
        compute_dtype: Dtype during a forward.
        skip_modules_pattern: Regular expressions. Modules whose dotted name contains a match are not changed, nor are
            their submodules.
        skip_modules_classes: Classes whose modules and their submodules are not changed.
        non_blocking: Do not wait for the conversions.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)  # without state, so all layers share it

    def attach(part: nn.Module, name: str) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, _LAYERS):
            add_hook_to_module(part, hook, append=True)
            return
        for own, child in part.named_children():
            attach(child, f"{name}.{own}" if name else own)

    attach(module, "")
