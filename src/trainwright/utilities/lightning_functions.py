"""Small functions of Lightning's utilities that libraries import, for `trainwright.as_lightning()`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.core.host.memory import clear_device_cache
from trainwright.core.host.rank_zero import rank_zero_only
from trainwright.core.registry import import_object
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.data.datamodule import DataModule

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
"""Classes of learning-rate schedules, for `isinstance`."""


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return fsspec's file system of a path or URL.

    Args:
        path: The path or URL.
        kwargs: Options for the file system, such as credentials.
    """
    return import_object("fsspec.core:url_to_fs")(os.fspath(path), **kwargs)[0]


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of a call of an `__init__`, without the object itself.

    Args:
        frame: The frame of the call, as `inspect.currentframe()` returns it. The result is empty if the function does
            not use `super()` or `__class__`.
    """
    variables = inspect.getargvalues(frame).locals
    if "__class__" not in variables:
        return {}
    parameters = list(inspect.signature(variables["__class__"].__init__).parameters.values())
    arguments = {}
    for parameter in parameters[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(variables[parameter.name])
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            arguments[parameter.name] = variables[parameter.name]
    return arguments


def load_hparams_from_yaml(config_yaml: str | os.PathLike[str], use_omegaconf: bool = True) -> dict[str, Any]:
    """Return the hyper-parameters in a YAML file, or an empty dict if the file does not exist.

    Args:
        config_yaml: The file.
        use_omegaconf: Accepted without effect: the file is read as plain YAML. Default: True.
    """
    import yaml

    del use_omegaconf
    if not os.path.isfile(config_yaml):
        return {}
    with open(config_yaml, encoding="utf-8") as file:
        return yaml.safe_load(file) or {}


def save_hparams_to_yaml(
    config_yaml: str | os.PathLike[str], hparams: Mapping[str, Any], use_omegaconf: bool = True
) -> None:
    """Write hyper-parameters of plain types into a YAML file.

    Args:
        config_yaml: The file.
        hparams: Names and values.
        use_omegaconf: Accepted without effect: the file is written as plain YAML. Default: True.
    """
    import yaml

    del use_omegaconf
    with open(config_yaml, "w", encoding="utf-8") as file:
        yaml.safe_dump(dict(hparams), file)


def is_overridden(method_name: str, instance: object = None, parent: type | None = None) -> bool:
    """Return whether an object's class, or the object itself, overrides a method.

    Args:
        method_name: The method.
        instance: The object. None is never an override.
        parent: The class with the original method. Without this method in the class, nothing overrides it. Default:
            TaskModule or DataModule.

    Raises:
        ValueError: `instance` is neither a task nor a data module, and `parent` is None.
    """
    if instance is None:
        return False
    if parent is None:
        parent = next((base for base in (TaskModule, DataModule) if isinstance(instance, base)), None)
        if parent is None:
            raise ValueError(f"parent= is required for a {type(instance).__name__}.")
    return hasattr(parent, method_name) and overrides(instance, method_name, parent)


@contextlib.contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Return a context that restores the random number generators at its end.

    Args:
        include_cuda: Also restore the generator of the current accelerator. Default: True.
    """
    device = torch.accelerator.current_accelerator() if include_cuda else None
    saved = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(saved, device)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed the generators of Python and NumPy in a worker process of a DataLoader from torch's seed.

    Args:
        worker_id, rank: Accepted without effect: torch's seed differs between workers and, in loaders
            that the Trainer prepares, between ranks.
    """
    del worker_id, rank
    seed = torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed % 2**32)


def garbage_collection_cuda() -> None:
    """Collect garbage, and free unused memory of the accelerator."""
    clear_device_cache(garbage_collection=True)


def get_model_size_mb(model: nn.Module) -> float:
    """Return the size of a model's parameters and buffers in MB (10⁶ bytes)."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Return nested containers with their tensors detached.

    Args:
        in_dict: The containers.
        to_cpu: Also copy the tensors to the CPU. Default: False.
    """
    return map_tensors(lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach(), in_dict)


def rank_zero_debug(message: str, *args: object, **options: Any) -> None:
    """Log a message at level DEBUG to the logger `trainwright`, on the main process only."""
    if rank_zero_only.rank == 0:
        logging.getLogger("trainwright").debug(message, *args, stacklevel=2, **options)


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate the method that returns a logger's `experiment`. On other ranks than 0 its result accepts every call."""

    @functools.wraps(fn)
    def experiment(logger: Any) -> Any:
        if rank_zero_only.rank == 0:
            return fn(logger)
        return import_object("trainwright.loggers.logger:DummyExperiment")()

    return experiment


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Return whether a task, its hyper-parameters or its data module has an attribute."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return an attribute of a data module, or else of the hyper-parameters, or else of the task.

    Raises:
        AttributeError: None of them has it.
    """
    return getattr(_holder(model, attribute), attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute of the task, of its hyper-parameters and of its data module, where it exists.

    Raises:
        AttributeError: None of them has it.
    """
    _holder(model, attribute)
    for holder in _holders(model, attribute):
        setattr(holder, attribute, value)


def _holder(model: Any, attribute: str) -> Any:
    """Return the last of `_holders`. Raise an AttributeError if there are none."""
    holders = _holders(model, attribute)
    if not holders:
        raise AttributeError(
            f"Neither {type(model).__name__} nor its hyper-parameters nor its data module has {attribute!r}."
        )
    return holders[-1]


def _holders(model: Any, attribute: str) -> list[Any]:
    """Return those of the task, its hyper-parameters and its data module that have an attribute, in this order."""
    run = getattr(model, "_run", None)  # the property `trainer` raises outside of a run
    candidates = [model, getattr(model, "hparams", None), getattr(run, "datamodule", None)]
    return [holder for holder in candidates if holder is not None and hasattr(holder, attribute)]
