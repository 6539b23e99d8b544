"""Collect everything that a checkpoint of a run holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainwright.checkpoint import Snapshot
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.rng import rng_state
from trainwright.loggers.epoch_state import objects_state
from trainwright.trainer.checkpoints.shown import ShownCheckpoint
from trainwright.trainer.run import StageRun


def half_done(run: StageRun) -> str | None:
    """Return why the present state is not that of the last completed step, in words; None when it is.

    Within a step it is, as long as no optimizer has begun to step.
    """
    if run.loop.at_step_boundary:
        return None
    if run.loop.stepping or run.engine.has_begun or not run.engine.capabilities.state_rests:
        return "an optimizer was stepping, so that the weights may be half updated"
    if run.data.made is not None and run.data.made.loader.stateful:
        return "its loader, which keeps its own place, had read on for a step that was not completed"
    return None


def capture(run: StageRun, *, weights_only: bool = False, metrics: dict[str, float] | None = None) -> Snapshot:
    """Collect everything a resume needs. Collective: the generators and loaders of all ranks are gathered.

    Returns:
        The snapshot; its tensors are the live ones, so that it must be written or copied before training goes on.
    """
    run.loop.check_finite()
    run.engine.begin_save()
    of_ranks = [] if weights_only else run.engine.processes.gather_object(_own_state(run))
    return _collect(run, of_ranks, weights_only=weights_only, metrics=metrics or dict(run.callback_metrics))


def num_bytes_here(run: StageRun) -> int:
    """Return about how many bytes the tensors of a checkpoint have on this rank's host; not collective."""
    states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = {id(tensor): tensor for tensor in (*run.task.parameters(), *run.task.buffers(), *kept)}
    on_host = [tensor for tensor in tensors.values() if tensor.device.type == "cpu" and tensor.layout is torch.strided]
    # A DTensor counts with the rank's own piece; its class is not imported for the sake of those who have none.
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in on_host)


def capture_alone(run: StageRun, metrics: dict[str, float]) -> Snapshot:
    """Collect what this rank has without asking the others, for use in an exception path.

    With other ranks, whose generators a resume would need, that is the weights only.

    Raises:
        CheckpointError: the weights lie in pieces on several ranks.
    """
    if run.loop.guard is not None and run.loop.guard.is_bad_here():
        raise CheckpointError(
            "a step was not finite, and weights have changed since. The earlier checkpoints are valid."
        )
    alone = run.world_size == 1
    if not alone and not run.engine.capabilities.whole_weights:
        raise CheckpointError(
            f"the weights lie in pieces on {run.world_size} ranks, and a rank cannot collect them when another may "
            "have failed. The earlier checkpoints are whole."
        )
    return _collect(run, [_own_state(run)] if alone else [], weights_only=not alone, metrics=metrics)


def _own_state(run: StageRun) -> dict[str, Any]:
    """What a resume needs of each rank."""
    return {"rng": rng_state(run.engine.device), "loader": run.data.loader_state(), "metrics": metrics_state(run)}


def metrics_state(run: StageRun) -> dict[str, Any]:
    """Return this rank's aggregates of the current epoch; waits for the device."""
    return {"logged": run.metrics.state_dict(), "objects": objects_state(run.task)}


def _collect(
    run: StageRun, of_ranks: list[dict[str, Any]], *, weights_only: bool, metrics: dict[str, float]
) -> Snapshot:
    task, engine = run.task, run.engine
    if any(type(parameter).__module__.startswith("torchao.") for parameter in task.parameters()):
        raise CheckpointError(
            f"{type(task).__name__} has quantized layers, and a checkpoint of it cannot be written. Save before the "
            "fit ends, or pass QuantizationAwareTraining(convert=False); its path= writes the quantized weights."
        )
    by_data_rank = engine.data_ranks.pick(of_ranks) if of_ranks else []
    weights = engine.state.model_state()  # before the optimizers' states: shards of both share one table
    optimizers = [] if weights_only else engine.state.optimizer_states()
    shown = _shown(run, weights, None if weights_only else optimizers)
    with run.metrics.closed_in("on_save_checkpoint"):
        run.fire("on_save_checkpoint", shown)
    model = shown["state_dict"]
    trainer: dict[str, Any] = {
        **task.saved_hyperparameters(),
        "task": shown.own,
    }
    if not weights_only:
        trainer |= {
            "callbacks": _callback_states(run),
            "schedulers": run.schedules.state_dict(),
            "strategy": engine.state_dict(),
            "data": _place_in_data(run, by_data_rank),
            "loggers": run.logging.state_dict() if run.logging is not None else [],
            "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
            **(
                {}
                if (data := run.datamodule) is None
                else {"datamodule_hyper_parameters": data.saved_hyperparameters()}
            ),
            "left_out": run.history.left_out(),
            "metrics": [of_rank["metrics"] for of_rank in by_data_rank],
            "frozen": frozen_names(task),
            "seed": run.history.seed,
            "run_id": run.history.run_id,
            "job": run.attempt.key,
            "precision": engine.precision.name,
        }
        if engine.data_ranks.size != run.world_size:  # ranks that work on one batch together draw the same numbers
            trainer["data_ranks"] = list(engine.data_ranks.members)
        if not run.loop.at_step_boundary:
            trainer["within_step"] = True
    if engine.state.saves_pieces:
        model, optimizers = engine.state.in_pieces((model, optimizers))
    return Snapshot(
        state=run.progress(),
        model=model,
        optimizers=optimizers,
        trainer=trainer,
        rng=[of_rank["rng"] for of_rank in of_ranks],
        metrics=metrics,
        world_size=run.world_size,
        kind="weights" if weights_only else "full",
        in_pieces=engine.state.saves_pieces,
        overlaps=engine.capabilities.state_rests,
    )


def _shown(run: StageRun, weights: dict[str, Any], optimizers: list[dict[str, Any]] | None) -> ShownCheckpoint:
    """Return the checkpoint as hooks see it; `optimizers` is None for weights only."""
    read: dict[str, Callable[[], Any]] = {
        "epoch": lambda: run.state.epoch,
        "global_step": lambda: run.state.step,
        "hyper_parameters": lambda: run.task.saved_hyperparameters().get("hyper_parameters", {}),
    }
    if optimizers is not None:
        read |= {
            "callbacks": lambda: _callback_states(run),
            "lr_schedulers": run.schedules.state_dict,
            "optimizer_states": lambda: optimizers,
        }
    advice = "add entries under other names"
    return ShownCheckpoint("on_save_checkpoint", {}, weights, read, advice=advice)


def _callback_states(run: StageRun) -> dict[str, Any]:
    return {callback.state_key: state for callback in run.callbacks if (state := callback.state_dict())}


def frozen_names(task: torch.nn.Module) -> list[str]:
    """Return the plain names of the parameters that do not learn."""
    return sorted(plain_name(name) for name, parameter in task.named_parameters() if not parameter.requires_grad)


def _place_in_data(run: StageRun, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    place, loaders = run.data.state_dict(), [of_rank["loader"] for of_rank in of_ranks[:: run.engine.data_ranks.parts]]
    return place if None in loaders else {**place, "loaders": loaders}
