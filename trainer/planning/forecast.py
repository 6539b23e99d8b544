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
    if overrides(task, "setup", TaskModule):
        notes.append(f"parameters: those that {name}.setup creates are not included")
    if any(map(is_lazy, [*task.parameters(), *task.buffers()])):
        notes.append("parameters: the shapes of lazy modules follow from the first batch")
        return None
    if not overrides(task, "configure_model", TaskModule):
        return task
    tensors = [*task.parameters(), *task.buffers()]
    memo: dict[int, Any] = {id(each): each.detach().to("meta") for each in tensors}
    memo |= {id(p): nn.Parameter(memo[id(p)], requires_grad=p.requires_grad) for p in task.parameters()}
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
    """Return the numbers of all, trainable and frozen parameters, and the same for the shards of rank 0.

    The names for rank 0 end in `_per_device`. All numbers are None without `task`. Those of rank 0 are None without
    `shards`, the number of shards of each parameter.
    """
    names = ("total", "trainable", "frozen")
    found: dict[str, int | None] = dict.fromkeys((*names, *(f"{name}_per_device" for name in names)))
    if task is None:
        return found
    parameters = list(task.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    frozen = [p for p in parameters if not p.requires_grad]
    for name, chosen in zip(names, (parameters, trainable, frozen), strict=True):
        found[name] = sum(p.numel() for p in chosen)
        if shards is not None:
            found[f"{name}_per_device"] = sum(_of_first_rank(p, shards) for p in chosen)
    return found


def _of_first_rank(parameter: torch.Tensor, shards: int) -> int:
    """Return the number of elements in the first of `shards` chunks of a tensor along its first dimension."""
    if shards == 1 or not parameter.numel():
        return parameter.numel()
    rows = parameter.shape[0]
    return math.ceil(rows / shards) * (parameter.numel() // rows)


def data_types(
    task: nn.Module | None, precision: Precision, outline: StrategyOutline | None, num_data_ranks: int
) -> dict[str, str | None]:
    """Return the data types of parameters, computation, gradient reduction and optimizer state; None if unknown."""
    stored = None if task is None else {p.dtype for p in task.parameters() if p.is_floating_point()}
    if stored is not None and precision.param_dtype is not None:
        stored = {precision.param_dtype}
    names = None if stored is None else " and ".join(sorted(map(_name_of, stored))) or "none"
    known = outline is not None and outline.shards is not None
    computed = precision.autocast_dtype or (outline.param_dtype if outline is not None else None)
    reduction = None
    if num_data_ranks == 1:
        reduction = "none"
    elif outline is not None and outline.reduces:
        reduction = names if outline.reduce_dtype is None else _name_of(outline.reduce_dtype)
    computation = names if computed is None else _name_of(computed)
    return {
        "name": precision.name,
        "parameters": names,
        "computation": f"{precision.name} in converted layers" if precision.converts_layers else computation,
        "reduction": reduction,
        "optimizer_state": names if known else None,
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def forecast_bytes(
    task: nn.Module | None, precision: Precision, outline: StrategyOutline, device_type: str, notes: list[str]
) -> int | None:
    """Return the peak bytes of one device in a step of Adam, without activations. If unknown, append to `notes`."""
    reason = None
    if outline.peak is None:
        reason = "memory is not estimated for this strategy with these options"
    elif task is None:
        reason = "the model could not be built"
    elif precision.converts_layers:
        reason = f"memory is not estimated for precision={precision.name!r}"
    elif any(not parameter.requires_grad for parameter in task.parameters()):
        reason = "memory is not estimated for models with frozen parameters"
    if reason is None and task is not None:
        sizes = {parameter.element_size() for parameter in task.parameters()}
        size = precision.param_dtype.itemsize if precision.param_dtype is not None else max(sizes, default=0)
        if precision.param_dtype is not None or len(sizes) == 1:
            ranks = outline.shards or 1
            from trainwright.bigmodels.maps.rank_peaks import rank_peaks, training_shape  # as above

            by_all = device_type != "cpu"  # torch's default
            peaks = rank_peaks(training_shape(task), world_size=ranks, activation_bytes=0, foreach=by_all)
            return peaks[str(outline.peak)] * size // torch.float32.itemsize
        reason = "the parameters have different data types" if sizes else "the model has no parameters"
    notes.append(f"forecast_bytes: {reason}")
    return None


def batch_counts(
    settings: Settings, task: TaskModule, sources: Sources, num_readers: int, notes: list[str], *, is_set_up: bool
) -> dict[str, Any]:
    """Return the sizes of batches and the numbers of steps.

    Unknown values are None. If the data needs `prepare_data` or `setup`, it is not read, and `notes` says so. From a
    data module that is set up, a batch is read to count its tokens.
    """
    accumulate = settings.accumulate_grad_batches
    limits = settings.limits
    micro = num_batches = per_epoch = samples = tokens = None
    if (reason := _why_not_read(sources, task, is_set_up=is_set_up)) is None:
        options = LoaderOptions(
            world=num_readers,
            seed=settings.arguments.seed or 0,
            use_distributed_sampler=settings.arguments.use_distributed_sampler,
            uneven=settings.arguments.uneven_batches,
            per_sample_rng=settings.arguments.per_sample_rng,
        )
        overfit = settings.arguments.overfit_batches
        limit = overfit or settings.limit_batches["train"]
        name = "overfit_batches" if overfit else "limit_train_batches"
        loader = prepare_loader(sources.make("train", task), options)
        micro = loader.batch_size
        num_batches = resolve_limit(limit, loader.num_batches, name)
        samples = None if loader.num_batches is None else _samples(loader, num_batches or 0)
        tokens = _tokens_of_first_batch(loader, task) if is_set_up else None
        loader.close()
        if micro is None:
            notes.append("micro_batch: the loader has no batch_size")
        if num_batches is None:
            notes.append("steps_per_epoch: the loader has no length")
    else:
        notes.append(f"data: {reason}")
    if num_batches is not None:
        per_epoch = math.ceil(num_batches / accumulate)
    return {
        "micro_batch": micro,
        "accumulate_grad_batches": accumulate,
        "global_batch": None if micro is None else micro * num_readers * accumulate,
        "tokens_per_step": None if tokens is None else tokens * num_readers * accumulate,
        "batches_per_epoch": num_batches,
        "samples_per_epoch": samples,
        "steps_per_epoch": per_epoch,
        "total_steps": _total(per_epoch, limits.max_epochs, limits.max_steps),
        "other_limits": [str(limit) for limit in limits.others],
    }


def _samples(loader: PreparedLoader, num_rounds: int) -> int | None:
    """Return the number of samples of all ranks in the first rounds of an epoch, or None if unknown."""
    # All full rounds but the last one have equal sizes, so that nothing is computed for them.
    num_equal = max(0, min(num_rounds, loader.num_full_rounds) - 1)
    sizes = [loader.samples_in_round(i) for i in range(num_equal, num_rounds)]
    of_first = loader.samples_in_round(0)
    known = [size for size in sizes if size is not None]
    if of_first is None or len(known) < len(sizes):
        return None
    return num_equal * of_first + sum(known)


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
    if "train" in sources.given:
        return None
    data = sources.datamodule
    from_data = data is not None and overrides(data, "train_dataloader", DataModule)
    if from_data and is_set_up:
        return None
    owner, base = (data, DataModule) if from_data else (task, TaskModule)
    hook = next((name for name in ("prepare_data", "setup") if overrides(owner, name, base)), None)
    if hook is None:
        return None
    advice = "pass setup_data=True (`trainwright plan --setup-data`)" if from_data else "pass loaders to `trainer.plan`"
    return (
        f"{type(owner).__name__}.{hook} is not called by a plan, because it may download or write files; {advice} to "
        "count the batches"
    )


def _total(per_epoch: int | None, max_epochs: int | None, max_steps: int) -> int | str | None:
    """Return the number of steps under both limits; `"unlimited"` without a limit, None if unknown."""
    by_epochs = math.inf if max_epochs is None else None if per_epoch is None else per_epoch * max_epochs
    by_steps = math.inf if max_steps == -1 else max_steps
    if by_epochs is None:
        return None
    total = min(by_epochs, by_steps)
    return "unlimited" if math.isinf(total) else int(total)
