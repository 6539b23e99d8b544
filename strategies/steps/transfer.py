"""Transfer of a task and its batches to the device, through the transfer hooks of the task or the data module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.signatures import arguments_of, bind, method_of, own_hook
from trainwright.core.task import TaskModule
from trainwright.core.tree import move, move_module, too_deep
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.binding import defines_itself


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model's parameters and buffers to a device.

    Raises:
        ConfigurationError: A parameter or buffer is on the device `meta`. Nothing has been moved.
    """
    try:
        tensors = [*model.named_parameters(), *model.named_buffers()]
    except RecursionError as error:
        raise too_deep(type(model).__name__) from error
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ConfigurationError(
            f"{type(model).__name__}: {empty[0]!r} and {len(empty) - 1} others are on the meta device and cannot be "
            f"moved to {device}. Load or initialize them first. A model of load_checkpoint_and_dispatch or "
            "dispatch_model cannot be trained: use the plain model, with strategy='offload', 'fsdp' or "
            "'deepspeed_stage_3' if it is larger than the memory."
        )
    move_module(model, device)


def make_transfer(
    task: TaskModule,
    datamodule: object,
    device: torch.device,
    precision: Precision,
    placed: Callable[[Any], Any] | None = None,
) -> Callable[..., Any] | None:
    """Return a function `transfer(batch, dataloader_idx=0)`.

    Return None on the CPU without transfer hooks, a cast of inputs and `placed`.

    Args:
        task: The task, whose transfer hooks have precedence.
        datamodule: The data module, whose transfer hooks are used if the task does not define them. May be None.
        device: Device to which batches are copied. Copies from pinned memory do not block.
        precision: The precision. Floating-point inputs are cast to its `param_dtype`.
        placed: Function that is called with each batch on the device, and returns the batch. Default: None.
    """

    def find(name: str) -> Any:
        """Return the hook of the task, or else of the data module, or None."""
        task_hook = own_hook(task, name, TaskModule)
        if task_hook is not None:
            return task_hook
        if datamodule is None or not defines_itself(datamodule, name):
            return None
        return bind(method_of(datamodule, name), name, arguments_of(TaskModule, name))

    # The order of a batch's functions: before → transfer (or move_batch) → after → placed.
    move_batch: Callable[[Any], Any] = partial(move, device=device, float_dtype=precision.param_dtype)
    before = find("on_before_batch_transfer")
    transfer = find("transfer_batch_to_device")
    after = find("on_after_batch_transfer")
    has_hooks = before is not None or transfer is not None or after is not None
    # Without hooks, each micro-batch costs no more calls than needed.
    if not has_hooks:
        if device.type == "cpu" and precision.param_dtype is None and placed is None:
            return None
        if placed is not None:
            return lambda batch, dataloader_idx=0: placed(move_batch(batch))
        return lambda batch, dataloader_idx=0: move_batch(batch)

    def transfer_with_hooks(batch: object, dataloader_idx: int = 0) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        if transfer is not None:
            batch = transfer(batch, device, dataloader_idx)
        else:
            batch = move_batch(batch)
        if after is not None:
            batch = after(batch, dataloader_idx)
        if placed is not None:
            batch = placed(batch)
        return batch

    return transfer_with_hooks
