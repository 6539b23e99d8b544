"""Store a model's layers in a narrow dtype, and widen each for the time of its forward."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.model_hooks import ModelHook, add_hook_to_module

# Layers whose weights are most of a model and bear being rounded; norms and embeddings do not.
_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class LayerwiseCastingHook(ModelHook):
    """Keep a module's weights in one dtype and run it in another.

    Args:
        storage_dtype: between forwards; float8 types too.
        compute_dtype: during one.
        non_blocking: do not wait for the conversion.
    """

    runs_after_failure = True

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Narrow the weights."""
        return _cast(module, self.storage_dtype, self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Widen the weights."""
        _cast(module, self.compute_dtype, self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Narrow them again."""
        _cast(module, self.storage_dtype, self.non_blocking)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights wide; what narrowing lost stays lost."""
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
    """Have each linear and convolutional layer store its weights in one dtype and compute in another.

    For inference: weights are rounded after every forward.

    Args:
        module: is changed.
        storage_dtype: between forwards; `torch.float8_e4m3fn` halves what bfloat16 takes.
        compute_dtype: during one.
        skip_modules_pattern: regular expressions; modules whose dotted name one matches somewhere stay as they are,
            with all within.
        skip_modules_classes: classes that stay as they are, with all within.
        non_blocking: do not wait for the conversions.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    _attach(
        module, "", LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), patterns, skip_modules_classes
    )


def _attach(
    module: nn.Module,
    name: str,
    hook: LayerwiseCastingHook,
    patterns: tuple[str, ...],
    classes: tuple[type[nn.Module], ...] | None,
) -> None:
    if (classes and isinstance(module, classes)) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, _LAYERS):
        add_hook_to_module(module, hook, append=True)  # it keeps nothing of the module: one serves all
        return
    for child_name, child in module.named_children():
        _attach(child, f"{name}.{child_name}" if name else child_name, hook, patterns, classes)
