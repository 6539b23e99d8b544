"""Functions of Hugging Face Accelerate that need no Accelerator."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainwright.accelerator.accelerator_state import AcceleratorState
from trainwright.accelerator.handlers import AutocastKwargs
from trainwright.accelerator.prepared.accelerated_model import unwrapped
from trainwright.core.names.constants import PrecisionType


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model without its wrappers; see `Accelerator.unwrap_model`.

    Args:
        model: What `prepare` returned, or a replica of torch.
        keep_fp32_wrapper: Makes no difference: the model's own forward was never changed. Default: True.
        keep_torch_compile: Return a compiled module if one wraps the model. Default: True.
        recursive: Unwrap the modules within the model too, in place. Default: False.
    """
    found = unwrapped(model, keep_torch_compile=keep_torch_compile)
    for name, child in list(found.named_children()) if recursive else ():
        setattr(found, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive))
    return found


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the context of a forward in mixed precision, or one that does nothing.

    Args:
        native_amp: Autocast in the precision of the process's Accelerator. Default: False.
        autocast_kwargs: Further options. Default: None.
    """
    state = AcceleratorState()
    dtypes = {PrecisionType.FP16: torch.float16, PrecisionType.BF16: torch.bfloat16}
    dtype = dtypes.get(PrecisionType(state.mixed_precision))
    if dtype is None or not native_amp:
        return nullcontext()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_dict()
    return torch.autocast(state.device.type, dtype=dtype, **options)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the first class with a name among those of a module and its parts; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of some modules of a model, after moving these to a device.

    Args:
        modules: The modules, or a regular expression for their full names; None or empty selects none.
        model: Contains them.
        device: Receives them.
    """
    if not modules:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}
