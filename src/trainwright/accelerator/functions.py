"""Functions of Hugging Face Accelerate that need no Accelerator."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from trainwright.accelerator.accelerator_state import AcceleratorState
from trainwright.accelerator.handlers import AutocastKwargs
from trainwright.accelerator.prepared.accelerated_model import unwrapped
from trainwright.bigmodels.saving import save_object
from trainwright.checkpoint.interop.sharded_folder import merge_weights
from trainwright.core.names.constants import PrecisionType
from trainwright.core.tree import move_module
from trainwright.processes.devices import DistributedType
from trainwright.processes.partial_state import PartialState


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model without wrappers, including torch's wrappers; see `Accelerator.unwrap_model`.

    Args:
        model: A prepared model, a compiled model, or a DistributedDataParallel or DataParallel module.
        keep_fp32_wrapper: Accepted without effect: `prepare` does not change the model's forward. Default: True.
        keep_torch_compile: Return a compiled module if one wraps the model. Default: True.
        recursive: Also unwrap the modules in the model, in place. Default: False.
    """
    user_model = unwrapped(model, keep_torch_compile=keep_torch_compile)
    if recursive:
        for name, child in list(user_model.named_children()):  # a list, because the children are replaced
            user_child = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive)
            setattr(user_model, name, user_child)
    return user_model


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object on the main process; see `Accelerator.save`. Not collective.

    Args:
        obj: An object without sharded tensors.
        f: A path or an open file. An existing file at the path is replaced.
        save_on_each_node: Write on the first process of each node. Default: False.
        safe_serialization: Write a dict of tensors as safetensors. Default: False.
    """
    state = PartialState()
    is_main = state.is_local_main_process if save_on_each_node else state.is_main_process
    save_object(obj, f, safe_serialization, is_main=is_main)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file of `torch.save` without executing its pickle.

    The arguments are those of `torch.load`. `weights_only=False` executes the pickle. Use it only for trusted files.
    """
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge weights that FSDP (`SHARDED_STATE_DICT`) or DeepSpeed saved in shards into one model.

    Every process must call this function. The main process writes, and the other processes wait. It holds one tensor
    in memory at a time. Pickles in the folder are parsed, never executed.

    Args:
        checkpoint_dir: `pytorch_model_fsdp_0`, the folder above it, or a folder of DeepSpeed's `save_checkpoint`.
        output_path: The folder for `model.safetensors`, or for shards and an index if the model has more than 10 GB. A
            previous model in the folder is replaced.
        safe_serialization: False writes `pytorch_model.bin`. Default: True.
        remove_checkpoint_dir: Delete `checkpoint_dir` afterwards. Default: False.

    Raises:
        FileNotFoundError: `checkpoint_dir` does not exist.
        CheckpointError: `checkpoint_dir` has no shards, a file is missing or damaged, or `output_path` cannot be
            written.
    """
    state = PartialState()
    try:
        if state.is_main_process:
            merge_weights(
                Path(checkpoint_dir),
                Path(output_path),
                safe=safe_serialization,
                max_shard_bytes=10 * 10**9,
                remove_source=remove_checkpoint_dir,
            )
    finally:  # also after an error, because the other processes wait here
        state.wait_for_everyone()


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context for a forward: autocast in the newest Accelerator's precision if `native_amp` is True.

    Without `native_amp` or 16-bit precision, the context has no effect.
    """
    state = AcceleratorState()
    dtypes = {PrecisionType.FP16: torch.float16, PrecisionType.BF16: torch.bfloat16}
    dtype = dtypes.get(PrecisionType(state.mixed_precision))
    if dtype is None or not native_amp:
        return nullcontext()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_dict()
    return torch.autocast(state.device.type, dtype=dtype, **options)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for float16.

    Args:
        distributed_type: `DistributedType.FSDP` returns a scaler that checks the gradient shards of all ranks. Default:
            None.
        kwargs: Arguments of torch's `GradScaler`.
    """
    device = PartialState().device
    if distributed_type != DistributedType.FSDP:
        return torch.amp.GradScaler(device.type, **kwargs)
    from trainwright.strategies.fsdp.sharded_gradients import ShardedGradients  # imports much of torch

    return ShardedGradients(device).make_scaler(**kwargs)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the first class with a name among the classes of a module and its submodules, or None."""
    for part in module.modules():
        if type(part).__name__ == name:
            return type(part)
    return None


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Move modules of a model to a device, and return their parameters.

    `modules` is a regular expression for full names of modules, or the modules. None or an empty value selects no
    module.
    """
    if not modules:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    parameters: set[nn.Parameter] = set()
    for module in modules:
        parameters.update(move_module(module, torch.device(device)).parameters())
    return parameters
