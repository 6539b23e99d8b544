"""Checkpoints of one model or one optimizer of a loop, with the function names of Accelerate's FSDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from trainwright.accelerator.loop_checkpoints import LoopCheckpoints, LoopObjects
from trainwright.accelerator.project import ProjectConfiguration, StateFolders
from trainwright.core.names.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

if TYPE_CHECKING:
    from trainwright.accelerator.accelerator import Accelerator

_Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: object,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: _Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a prepared model as a checkpoint in a folder of `output_dir`. Collective.

    With a sharded strategy, every rank writes its shards. `load_fsdp_model` reads the checkpoint with any strategy. It
    also restores each rank's random generators if the number of ranks is the same.

    Args:
        fsdp_plugin, use_dcp: Accepted without effect: sharded states have one format.
        accelerator: The Accelerator that prepared the model.
        model: The prepared model.
        output_dir: Receives the folder `pytorch_model_fsdp_<model_index>`.
        model_index: Number in the name of the folder. Default: 0.
        adapter_only: Accepted without effect: the base model of an adapter is always saved, too. Default: False.
    """
    del fsdp_plugin, adapter_only, use_dcp
    _save(accelerator, os.path.join(output_dir, f"{FSDP_MODEL_NAME}_{model_index}"), model)


def load_fsdp_model(
    fsdp_plugin: object,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: _Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a checkpoint of `save_fsdp_model`, with the same arguments. Every rank reads the folder.

    Raises:
        CheckpointError: The checkpoint is damaged, or belongs to another model.
        FileNotFoundError: The checkpoint does not exist.
    """
    del fsdp_plugin, adapter_only, use_dcp
    _load(accelerator, os.path.join(input_dir, f"{FSDP_MODEL_NAME}_{model_index}"), model)


def save_fsdp_optimizer(
    fsdp_plugin: object,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: _Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write a prepared optimizer's state, by parameter names, into a folder of `output_dir`. Collective.

    Args:
        fsdp_plugin, use_dcp: Accepted without effect: sharded states have one format.
        accelerator: The Accelerator that prepared the optimizer.
        optimizer: The prepared optimizer.
        model: The prepared model whose parameters the optimizer updates.
        output_dir: Receives the folder `optimizer_<optimizer_index>`.
        optimizer_index: Number in the name of the folder. Default: 0.
    """
    del fsdp_plugin, use_dcp
    _save(accelerator, os.path.join(output_dir, f"{OPTIMIZER_NAME}_{optimizer_index}"), model, optimizer)


def load_fsdp_optimizer(
    fsdp_plugin: object,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: _Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a checkpoint of `save_fsdp_optimizer`, with the same arguments. Every rank reads the folder.

    Raises:
        CheckpointError: The checkpoint is damaged, or belongs to another optimizer.
        FileNotFoundError: The checkpoint does not exist.
    """
    del fsdp_plugin, adapter_only, use_dcp
    _load(accelerator, os.path.join(input_dir, f"{OPTIMIZER_NAME}_{optimizer_index}"), model, optimizer)


def _save(accelerator: Accelerator, folder: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    _checkpoints(accelerator).save(folder, _objects(accelerator, model, optimizer))


def _load(accelerator: Accelerator, folder: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    _checkpoints(accelerator).load(Path(folder), _objects(accelerator, model, optimizer))


def _checkpoints(accelerator: Accelerator) -> LoopCheckpoints:
    """Return checkpoints without the project's folders and hooks: the callers name the folders."""
    return LoopCheckpoints(accelerator.engine, StateFolders(ProjectConfiguration()))


def _objects(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer | None) -> LoopObjects:
    """Return the optimizer without the model's weights, or the model alone without an optimizer."""
    optimizers = [] if optimizer is None else [accelerator.prepare_optimizer(optimizer)]
    models = [accelerator.unwrap_model(model, keep_torch_compile=False)]
    return LoopObjects(models, optimizers, with_weights=optimizer is None)
