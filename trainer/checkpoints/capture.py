"""Collect the content of a run's checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from trainwright.checkpoint import Snapshot
from trainwright.checkpoint.format.codec import encode
from trainwright.checkpoint.task_objects import TASK_OBJECTS, describe
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.hyperparameters import DATAMODULE_HYPER_PARAMETERS, HYPER_PARAMETERS, copy_hparams
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.names.replacement import is_replaced
from trainwright.core.rng import rng_state
from trainwright.core.state import class_names
from trainwright.loggers.metric_values import objects_state
from trainwright.strategies.steps.phase import Phase
from trainwright.trainer.checkpoints.shown import ShownCheckpoint
from trainwright.trainer.run import StageRun


def _without_objects(entries: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries that a checkpoint can contain, and descriptions of the others. Warn about the others.

    Tasks of libraries add objects that Lightning pickles. Their users cannot change them. In a program of Trainwright,
    such an entry is an error.
    """
    kept = {}
    described = {}
    for name, value in entries.items():
        try:
            encode({name: value}, shards={})
        except CheckpointError as error:
            warnings.warn(
                f"on_save_checkpoint: the checkpoint is written without the entry {name!r}. {error}",
                TrainwrightWarning,
                stacklevel=2,
            )
            described[name] = describe(value)
        else:
            kept[name] = value
    return kept, described


def half_done(run: StageRun) -> str | None:
    """Return why the current state cannot be saved as the state after the last completed step; None if it can.

    It can also be saved within the next step, until an optimizer begins to step.
    """
    if run.engine.phase is Phase.BETWEEN_STEPS:
        return None
    if run.engine.phase is Phase.WEIGHTS or not run.engine.capabilities.state_rests:
        return "an optimizer was stepping, so some weights may be updated and others not"
    if run.data.made is not None and run.data.made.loader.stateful:
        return "its stateful loader had already read the batches of the next step, which was not completed"
    return None


def capture(run: StageRun, *, weights_only: bool = False, metrics: dict[str, float] | None = None) -> Snapshot:
    """Collect the state of the run. Collective: gathers the generator and loader states of all ranks.

    Args:
        run: the run.
        weights_only: exclude optimizers, progress and generators.
        metrics: metrics to store with the checkpoint. Default: None, the current `callback_metrics`.

    Returns:
        The snapshot. It references the live tensors, so write or copy it before training continues.
    """
    run.loop.check_finite()
    run.engine.begin_save()

    def gather() -> list[dict[str, Any]]:
        return [] if weights_only else run.engine.processes.gather_object(_own_state(run))

    return _collect(run, gather, weights_only=weights_only, metrics=metrics or dict(run.callback_metrics))


def num_bytes_here(run: StageRun) -> int:
    """Return the approximate size in bytes of a checkpoint's tensors in this rank's host memory. Not collective."""
    states = [state for optimizer in run.engine.optimizers for state in optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = {id(tensor): tensor for tensor in (*run.task.parameters(), *run.task.buffers(), *kept)}
    on_host = [tensor for tensor in tensors.values() if tensor.device.type == "cpu" and tensor.layout is torch.strided]
    # Counts this rank's shard of a DTensor, without importing its class.
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in on_host)


def capture_alone(run: StageRun, metrics: dict[str, float]) -> Snapshot:
    """Collect this rank's state without communication, for use in an exception path.

    With several ranks only weights are collected, because a resume would also need the random generators of the other
    ranks.

    Raises:
        CheckpointError: the weights are sharded across ranks, or a loss or gradient of this rank was not finite.
    """
    if run.loop.guard is not None and run.loop.guard.is_bad_here():
        raise CheckpointError(
            "a step was not finite (its loss or a gradient), and weights have changed since then. Earlier "
            "checkpoints are valid."
        )
    world_size = run.engine.processes.world_size
    if world_size > 1 and not run.engine.capabilities.full_weights:
        raise CheckpointError(
            f"the weights are sharded across {world_size} ranks and cannot be collected after an error, because "
            "other ranks may have failed. Earlier checkpoints are complete."
        )

    def own() -> list[dict[str, Any]]:
        return [_own_state(run)] if world_size == 1 else []

    return _collect(run, own, weights_only=world_size > 1, metrics=metrics)


def _own_state(run: StageRun) -> dict[str, Any]:
    """Return the state of this rank alone: random generators, stateful loader and metrics of the epoch."""
    return {"rng": rng_state(run.engine.device), "loader": run.data.loader_state(), "metrics": metrics_state(run)}


def metrics_state(run: StageRun) -> dict[str, Any]:
    """Return this rank's aggregated metrics of the current epoch. Waits for the device."""
    objects = objects_state(run.task, without=run.evaluation.own_objects)
    return {"logged": run.logs.metrics.state_dict(run.task), "objects": objects}


def _collect(
    run: StageRun, gather: Callable[[], list[dict[str, Any]]], *, weights_only: bool, metrics: dict[str, float]
) -> Snapshot:
    """Collect the state of the run. `gather` returns the `_own_state` of each rank."""
    task, engine = run.task, run.engine
    if any(type(parameter).__module__.startswith("torchao.") for parameter in task.parameters()):
        raise CheckpointError(
            f"{type(task).__name__} has quantized layers, which checkpoints do not support. Save before the fit ends, "
            "or pass QuantizationAwareTraining(convert=False). To save the quantized weights, pass its path=."
        )
    weights = engine.state.model_state()  # before the optimizer states, because shards of both share one table
    optimizers = [] if weights_only else engine.state.optimizer_states()
    shown = _shown(run, weights, None if weights_only else optimizers)
    with run.logs.metrics.closed_in("on_save_checkpoint"):
        run.fire("on_save_checkpoint", shown)
    # After the hooks, which may draw random numbers: the run continues with the numbers after them.
    of_ranks = gather()
    by_data_rank = engine.data_ranks.pick(of_ranks) if of_ranks else []
    model = shown["state_dict"]
    own = shown.own
    hparams = own.pop(HYPER_PARAMETERS, {})
    objects: dict[str, str] = {}
    if own and is_replaced("lightning"):
        own, objects = _without_objects(own)
    trainer: dict[str, Any] = {**task.saved_hyperparameters(hparams), "task": own}
    if objects:
        trainer[TASK_OBJECTS] = objects
    if not weights_only:
        trainer |= {
            "callbacks": _callback_states(run),
            "schedulers": run.loop.schedules.state_dict(),
            "schedule_classes": class_names(config.scheduler for config in run.loop.schedules.configs),
            "strategy": engine.state_dict(),
            "data": _place_in_data(run, by_data_rank),
            "loggers": run.logs.group.state_dict() if run.logs.group is not None else [],
            "datamodule": run.data.datamodule.state_dict() if run.data.datamodule is not None else {},
            **(
                {}
                if (data := run.data.datamodule) is None
                else {DATAMODULE_HYPER_PARAMETERS: data.saved_hyperparameters()}
            ),
            "left_out": run.history.skipped_data(),
            "metrics": [of_rank["metrics"] for of_rank in by_data_rank],
            "frozen": frozen_names(task),
            "seed": run.history.seed,
            "run_id": run.history.run_id,
            "job": run.resume.attempt.key,
            "precision": engine.precision.name,
        }
        if engine.data_ranks.size != engine.processes.world_size:  # ranks with the same data share random numbers
            trainer["data_ranks"] = list(engine.data_ranks.members)
        if run.engine.phase is not Phase.BETWEEN_STEPS:
            trainer["within_step"] = True
    if engine.state.saves_shards:
        model, optimizers = engine.state.shards_of((model, optimizers))
    return Snapshot(
        state=run.progress(),
        model=model,
        optimizers=optimizers,
        trainer=trainer,
        rng=[of_rank["rng"] for of_rank in of_ranks],
        metrics=metrics,
        world_size=run.engine.processes.world_size,
        kind="weights" if weights_only else "full",
        in_shards=engine.state.saves_shards,
        overlaps=engine.capabilities.state_rests,
    )


def _shown(run: StageRun, weights: dict[str, Any], optimizers: list[dict[str, Any]] | None) -> ShownCheckpoint:
    """Return the checkpoint for hooks. `optimizers` is None for a weights-only checkpoint."""
    read: dict[str, Callable[[], Any]] = {
        "epoch": lambda: run.state.epoch,
        "global_step": lambda: run.state.step,
    }
    if optimizers is not None:
        read |= {
            "callbacks": lambda: _callback_states(run),
            "lr_schedulers": run.loop.schedules.state_dict,
            "optimizer_states": lambda: optimizers,
        }
    advice = "add entries under other names"
    hparams = {HYPER_PARAMETERS: copy_hparams(run.task.hparams)}  # hooks may change them
    return ShownCheckpoint("on_save_checkpoint", hparams, weights, read, advice=advice)


def _callback_states(run: StageRun) -> dict[str, Any]:
    return {callback.state_key: state for callback in run.components.callbacks if (state := callback.state_dict())}


def frozen_names(task: torch.nn.Module) -> list[str]:
    """Return the names of parameters that do not require gradients."""
    return sorted(plain_name(name) for name, parameter in task.named_parameters() if not parameter.requires_grad)


def _place_in_data(run: StageRun, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    place, loaders = run.data.state_dict(), [of_rank["loader"] for of_rank in of_ranks[:: run.engine.data_ranks.parts]]
    return place if None in loaders else {**place, "loaders": loaders}
