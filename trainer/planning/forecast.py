"""Numbers of parameters, memory and batches of a fit, computed before it."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.data.groups import resolve_limit
from trainwright.data.loader import prepare_loader
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.prepared import PreparedLoader
from trainwright.strategies.precision import Precision
from trainwright.strategies.strategy import StrategyOutline
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import Sources


def built_task(task: TaskModule, precision: Precision, notes: list[str]) -> TaskModule | None:
    """Return the task, or a copy on the device `meta` with its built model if the task defines `configure_model`.

    Return None, and append a note, if the model cannot be built on `meta`.
    """
    name = type(task).__name__
    tensors = [*task.parameters(), *task.buffers()]
    if overrides(task, "setup", TaskModule):
        notes.append(f"parameters: those that {name}.setup creates are not included")
    if any(is_lazy(tensor) for tensor in tensors):
        notes.append("parameters: the shapes of lazy modules follow from the first batch")
        return None
    if not overrides(task, "configure_model", TaskModule):
        return task
    # `deepcopy` takes copies from the memo, by the id of the original: tensors without values, and what is not copied.
    memo: dict[int, Any] = {}
    for tensor in tensors:
        memo[id(tensor)] = tensor.detach().to("meta")
    for parameter in task.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], requires_grad=parameter.requires_grad)
    for shared in (task._run, task._sink):
        memo[id(shared)] = shared
    from trainwright.bigmodels.weights.empty import init_empty_weights  # imports much of torch

    try:
        with init_empty_weights(), precision.default_dtype():
            built = copy.deepcopy(task, memo)
            built.configure_model()
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001 -- a method that needs values or `setup` works in the fit
        notes.append(f"parameters: {name}.configure_model failed on the device 'meta': {type(error).__name__}: {error}")
        return None
    return built


def parameter_counts(task: nn.Module | None, shards: int | None) -> dict[str, int | None]:
    """Return the numbers of elements of all, trainable and frozen parameters, and the same for the shards of rank 0.

    Args:
        task: the task. None gives None for all numbers.
        shards: number of shards of each parameter. None gives None for the numbers of rank 0.

    Returns:
        The numbers by name: `"total"`, `"trainable"` and `"frozen"`, and for rank 0 `"total_per_device"` and so on.
    """
    counts: dict[str, int | None] = {
        "total": None,
        "trainable": None,
        "frozen": None,
        "total_per_device": None,
        "trainable_per_device": None,
        "frozen_per_device": None,
    }
    if task is None:
        return counts
    parameters = list(task.parameters())
    by_kind = {
        "total": parameters,
        "trainable": [parameter for parameter in parameters if parameter.requires_grad],
        "frozen": [parameter for parameter in parameters if not parameter.requires_grad],
    }
    for kind, chosen in by_kind.items():
        counts[kind] = sum(parameter.numel() for parameter in chosen)
        if shards is not None:
            counts[f"{kind}_per_device"] = sum(_numel_on_first_rank(parameter, shards) for parameter in chosen)
    return counts


def _numel_on_first_rank(parameter: torch.Tensor, shards: int) -> int:
    """Return the number of elements in the first of `shards` chunks of a tensor along its first dimension."""
    if shards == 1 or not parameter.numel():
        return parameter.numel()
    rows = parameter.shape[0]
    return math.ceil(rows / shards) * (parameter.numel() // rows)


def data_types(
    task: nn.Module | None, precision: Precision, outline: StrategyOutline | None, num_data_ranks: int
) -> dict[str, str | None]:
    """Return the data types of parameters, computation, gradient reduction and optimizer state; None if unknown."""
    parameters = _parameter_types(task, precision)
    computation = parameters
    if precision.converts_layers:
        computation = f"{precision.name} in converted layers"
    elif precision.autocast_dtype is not None:
        computation = _name_of(precision.autocast_dtype)
    elif outline is not None and outline.param_dtype is not None:
        computation = _name_of(outline.param_dtype)
    reduction = None
    if num_data_ranks == 1:
        reduction = "none"
    elif outline is not None and outline.reduces:
        reduction = parameters if outline.reduce_dtype is None else _name_of(outline.reduce_dtype)
    shards_are_known = outline is not None and outline.shards is not None
    return {
        "name": precision.name,
        "parameters": parameters,
        "computation": computation,
        "reduction": reduction,
        "optimizer_state": parameters if shards_are_known else None,
    }


def _parameter_types(task: nn.Module | None, precision: Precision) -> str | None:
    """Return the names of the parameters' data types, such as `"bfloat16 and float32"`, or None without a task."""
    if task is None:
        return None
    if precision.param_dtype is not None:  # all are converted
        return _name_of(precision.param_dtype)
    names = {_name_of(parameter.dtype) for parameter in task.parameters() if parameter.is_floating_point()}
    if not names:
        return "none"
    return " and ".join(sorted(names))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def forecast_bytes(
    task: nn.Module | None, precision: Precision, outline: StrategyOutline, device_type: str, notes: list[str]
) -> int | None:
    """Return the peak bytes of one device in a step of Adam, without activations.

    If they are unknown, return None, and append the reason to `notes`.
    """
    reason = _why_no_forecast(task, precision, outline)
    if reason is not None or task is None:
        notes.append(f"forecast_bytes: {reason}")
        return None
    from trainwright.bigmodels.maps.rank_peaks import rank_peaks, training_shape  # imports much of torch

    # torch's optimizers step all parameters together on accelerators, which takes more memory.
    foreach = device_type != "cpu"
    shape = training_shape(task)
    peaks = rank_peaks(shape, world_size=outline.shards or 1, activation_bytes=0, foreach=foreach)
    element_bytes = _element_bytes(task, precision)[0]
    return peaks[str(outline.peak)] * element_bytes // torch.float32.itemsize  # peaks are of float32


def _why_no_forecast(task: nn.Module | None, precision: Precision, outline: StrategyOutline) -> str | None:
    """Return the reason why memory cannot be estimated, or None if it can."""
    if outline.peak is None:
        return "memory is not estimated for this strategy with these options"
    if task is None:
        return "the model could not be built"
    if precision.converts_layers:
        return f"memory is not estimated for precision={precision.name!r}"
    if any(not parameter.requires_grad for parameter in task.parameters()):
        return "memory is not estimated for models with frozen parameters"
    sizes = _element_bytes(task, precision)
    if not sizes:
        return "the model has no parameters"
    if len(sizes) > 1:
        return "the parameters have different data types"
    return None


def _element_bytes(task: nn.Module, precision: Precision) -> list[int]:
    """Return the different sizes of the parameters' elements."""
    if precision.param_dtype is not None:
        return [precision.param_dtype.itemsize]
    return sorted({parameter.element_size() for parameter in task.parameters()})


def batch_counts(
    settings: Settings, task: TaskModule, sources: Sources, num_readers: int, notes: list[str], *, is_set_up: bool
) -> dict[str, Any]:
    """Return the sizes of batches and the numbers of steps, for `Plan.data`.

    Unknown values are None. If the data needs `prepare_data` or `setup`, it is not read, and `notes` says so. From a
    data module that is set up, a batch is read to count its tokens.
    """
    accumulate = settings.accumulate_grad_batches
    limits = settings.limits
    counts: dict[str, Any] = {
        "micro_batch": None,
        "accumulate_grad_batches": accumulate,
        "global_batch": None,
        "tokens_per_step": None,
        "batches_per_epoch": None,
        "samples_per_epoch": None,
        "steps_per_epoch": None,
        "total_steps": _total_steps(None, limits.max_epochs, limits.max_steps),
        "other_limits": [str(limit) for limit in limits.others],
    }
    reason = _why_not_read(sources, task, is_set_up=is_set_up)
    if reason is not None:
        notes.append(f"data: {reason}")
        return counts

    options = LoaderOptions(
        world=num_readers,
        seed=settings.arguments.seed or 0,
        use_distributed_sampler=settings.arguments.use_distributed_sampler,
        uneven=settings.arguments.uneven_batches,
        per_sample_rng=settings.arguments.per_sample_rng,
    )
    loader = prepare_loader(sources.make("train", task), options)
    if settings.arguments.overfit_batches:
        num_batches = resolve_limit(settings.arguments.overfit_batches, loader.num_batches, "overfit_batches")
    else:
        num_batches = resolve_limit(settings.limit_batches["train"], loader.num_batches, "limit_train_batches")
    if loader.batch_size is None:
        notes.append("micro_batch: the loader has no batch_size")
    else:
        counts["micro_batch"] = loader.batch_size
        counts["global_batch"] = loader.batch_size * num_readers * accumulate
    if loader.num_batches is not None:
        counts["samples_per_epoch"] = _samples(loader, num_batches or 0)
    if num_batches is None:
        notes.append("steps_per_epoch: the loader has no length")
    else:
        steps_per_epoch = math.ceil(num_batches / accumulate)
        counts["batches_per_epoch"] = num_batches
        counts["steps_per_epoch"] = steps_per_epoch
        counts["total_steps"] = _total_steps(steps_per_epoch, limits.max_epochs, limits.max_steps)
    if is_set_up:
        tokens = _tokens_of_first_batch(loader, task)
        counts["tokens_per_step"] = None if tokens is None else tokens * num_readers * accumulate
    loader.close()
    return counts


def _samples(loader: PreparedLoader, num_rounds: int) -> int | None:
    """Return the number of samples of all ranks in the first rounds of an epoch, or None if unknown."""
    # A round is one batch on each rank. All full rounds but the last one have equal sizes, so that nothing is computed
    # for them. Example: of 4 rounds, the first 3 are full. Rounds 0 and 1 are equal, and rounds 2 and 3 are read.
    num_equal = max(0, min(num_rounds, loader.num_full_rounds) - 1)
    sizes = [loader.samples_in_round(i) for i in range(num_equal, num_rounds)]
    size_of_first = loader.samples_in_round(0)
    known = [size for size in sizes if size is not None]
    if size_of_first is None or len(known) < len(sizes):
        return None
    return num_equal * size_of_first + sum(known)


def _tokens_of_first_batch(loader: PreparedLoader, task: TaskModule) -> int | None:
    """Return the number of tokens in the first micro-batch of rank 0, or None if the task cannot count them."""
    loader.set_epoch(0)
    for batch in loader.iterate():
        try:
            return task.num_tokens(batch)
        except TaskError:  # the batch has no `input_ids`, and the task does not define num_tokens
            return None
    return None


def _why_not_read(sources: Sources, task: TaskModule, *, is_set_up: bool) -> str | None:
    """Return the reason why the training data cannot be read before the fit, or None."""
    if "train" in sources.loaders:
        return None
    data = sources.datamodule
    owner: DataModule | TaskModule = task
    base: type = TaskModule
    advice = "pass loaders to `trainer.plan`"
    if data is not None and overrides(data, "train_dataloader", DataModule):
        if is_set_up:
            return None
        owner = data
        base = DataModule
        advice = "pass setup_data=True (`trainwright plan --setup-data`)"
    for hook in ("prepare_data", "setup"):
        if overrides(owner, hook, base):
            return (
                f"{type(owner).__name__}.{hook} is not called by a plan, because it may download or write files; "
                f"{advice} to count the batches"
            )
    return None


def _total_steps(steps_per_epoch: int | None, max_epochs: int | None, max_steps: int) -> int | str | None:
    """Return the number of steps under both limits; `"unlimited"` without a limit, None if unknown."""
    if max_epochs is None:
        return "unlimited" if max_steps == -1 else max_steps
    if steps_per_epoch is None:
        return None
    by_epochs = steps_per_epoch * max_epochs
    return by_epochs if max_steps == -1 else min(by_epochs, max_steps)
