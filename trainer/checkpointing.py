"""Between a running Trainer and a checkpoint's parts: collect everything, put everything back, find the right one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint import Snapshot, newest_valid, read_checkpoint
from trainwright.checkpoint.model import load_plain_state
from trainwright.checkpoint.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.checkpoint.reader import read_manifest
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.trainer.facts import RunFacts

_OWN_KEYS = ("epoch", "global_step", "state_dict")  # what hooks find in a checkpoint besides their own entries


def capture(run: RunFacts, *, weights_only: bool = False, metrics: dict[str, float] | None = None) -> Snapshot:
    """Collect everything a resume needs. Collective: every rank's generators are gathered.

    Returns:
        The snapshot; its tensors are the live ones, so that it must be written or copied before training goes on.
    """
    everyones_rng = [] if weights_only else run.strategy.processes.gather_object(rng_state(run.strategy.device))
    return _collect(run, everyones_rng, weights_only=weights_only, metrics=metrics or dict(run.callback_metrics))


def capture_alone(run: RunFacts, metrics: dict[str, float]) -> Snapshot:
    """Collect what this rank has without asking the others, for use in an exception path.

    Raises:
        CheckpointError: there are other ranks, whose generators a resume would need: weights only.
    """
    alone = run.world_size == 1
    rng = [rng_state(run.strategy.device)] if alone else []
    return _collect(run, rng, weights_only=not alone, metrics=metrics)


def _collect(run: RunFacts, rng: list[Any], *, weights_only: bool, metrics: dict[str, float]) -> Snapshot:
    task, strategy = run.task, run.strategy
    shown: dict[str, Any] = {
        "epoch": run.state.epoch,
        "global_step": run.state.step,
        "state_dict": strategy.model_state(),
    }
    run.fire("on_save_checkpoint", shown)
    model = shown["state_dict"]
    trainer: dict[str, Any] = {
        "hyper_parameters": dict(task.hparams),
        "task": {key: value for key, value in shown.items() if key not in _OWN_KEYS},
    }
    if not weights_only:
        trainer |= {
            "callbacks": {c.state_key: state for c in run.callbacks if (state := c.state_dict())},
            "schedulers": run.schedules.state_dict(),
            "strategy": strategy.state_dict(),
            "data": run.data_state(),
            "loggers": run.logging.state_dict() if run.logging is not None else [],
            "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
            "seed": run.seed,
            "run_id": run.run_id,
            "precision": strategy.precision.name,
        }
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in task.named_parameters()}
    return Snapshot(
        state=run.state.to_dict(),
        model=model,
        optimizers=[] if weights_only else [named_optimizer_state(o, names) for o in run.optimizers],
        trainer=trainer,
        rng=rng,
        metrics=metrics,
        world_size=run.world_size,
        kind="weights" if weights_only else "full",
    )


def on_main_rank(run: RunFacts, work: Callable[[], None], what: str) -> None:
    """Do on rank 0 what writes checkpoints, and have every rank hear of an error. Collective.

    Args:
        run: the Trainer.
        work: called on rank 0 alone.
        what: completes "rank 0 could not ..." on the other ranks.

    Raises:
        OSError, CheckpointError: what `work` raised on rank 0; a CheckpointError that quotes it on the others.
    """
    problem: Exception | None = None
    if run.is_global_zero:
        try:
            work()
        except (OSError, CheckpointError) as error:
            problem = error
    told = run.strategy.processes.broadcast_object(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if told is not None:
        raise CheckpointError(f"rank 0 could not {what}: {told}")


def restore(run: RunFacts, path: Path) -> None:
    """Put a checkpoint's whole state into a prepared run. Every rank reads the same folder; nothing is communicated.

    Raises:
        CheckpointError: a part is missing, damaged, or does not fit this task.
    """
    snapshot = read_checkpoint(path, parts=_parts(path), copy_model=False)
    restore_weights(run, snapshot)
    if snapshot.kind == "weights":
        raise CheckpointError(
            f"{path} holds weights only, so that a run cannot be resumed from it. Start from its weights with "
            "TaskModule.load_from_checkpoint, or resume from a full checkpoint."
        )
    saved = snapshot.trainer
    run.state.load_dict(snapshot.state)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in run.task.named_parameters()}
    if len(snapshot.optimizers) != len(run.optimizers):
        raise CheckpointError(
            f"{path} holds {len(snapshot.optimizers)} optimizer(s), but configure_optimizers returned "
            f"{len(run.optimizers)}. Return as many, in the same order."
        )
    for optimizer, state in zip(run.optimizers, snapshot.optimizers, strict=True):
        load_named_optimizer_state(optimizer, state, names)
    if len(saved["schedulers"]) != len(run.lr_scheduler_configs):
        raise CheckpointError(
            f"{path} holds {len(saved['schedulers'])} learning-rate schedule(s), but configure_optimizers returned "
            f"{len(run.lr_scheduler_configs)}. Return as many, in the same order."
        )
    run.schedules.load_state_dict(saved["schedulers"])
    run.strategy.load_state_dict(saved["strategy"])
    if saved["data"]:  # a converted checkpoint stands at the start of an epoch and keeps no order of its own
        run.load_data_state(saved["data"], saved["seed"])
    run.run_id = saved["run_id"]
    _restore_callbacks(run, saved["callbacks"], path)
    if run.logging is not None:
        run.logging.load_state_dict(saved["loggers"])
    if run.datamodule is not None:
        run.datamodule.load_state_dict(saved["datamodule"])
    rank = run.global_rank
    if len(snapshot.rng) == run.world_size:
        run.restore_rng_later(lambda: set_rng_state(snapshot.rng[rank], run.strategy.device))
    else:
        moved = f"was written by {snapshot.world_size} process(es) and is resumed by {run.world_size}"
        warnings.warn(
            f"{path} {moved if snapshot.rng else 'holds no state of them'}: the random number generators start anew."
            f"{' The order of the data goes on exactly.' if saved['data'] else ''}",
            TrainwrightWarning,
            stacklevel=2,
        )


def _parts(path: Path) -> tuple[str, ...] | None:
    return ("trainer", "model") if read_manifest(path).kind == "weights" else None


def restore_weights(run: RunFacts, snapshot: Snapshot) -> None:
    """Load a snapshot's weights, and let the task and the callbacks read back what they added."""
    if snapshot.model is None:
        raise CheckpointError("the checkpoint holds no weights.")
    shown: dict[str, Any] = {
        **snapshot.trainer.get("task", {}),
        "epoch": snapshot.state.get("epoch", 0),
        "global_step": snapshot.state.get("step", 0),
        "state_dict": snapshot.model,
    }
    run.fire("on_load_checkpoint", shown)
    load_plain_state(run.task, shown["state_dict"], strict=run.task.strict_loading)


def load_weights(run: RunFacts, path: Path) -> None:
    """Load a checkpoint's weights alone, for an evaluation."""
    restore_weights(run, read_checkpoint(path, parts=("trainer", "model"), copy_model=False))


def _restore_callbacks(run: RunFacts, states: dict[str, Any], path: Path) -> None:
    known = {callback.state_key: callback for callback in run.callbacks}
    for key, state in states.items():
        if key in known:
            known[key].load_state_dict(state)
        else:
            warnings.warn(
                f"{path} holds the state of a callback {key!r} that this run does not have. Add it, or ignore this.",
                TrainwrightWarning,
                stacklevel=3,
            )


def resolve(run: RunFacts, ckpt_path: str | Path | None, stage: str) -> Path | None:
    """Turn a `ckpt_path=` argument into a checkpoint's folder; nothing is touched.

    Args:
        run: the Trainer.
        ckpt_path: a path, `"last"` (the newest valid one of this run's folder), `"best"` (of this Trainer's
            ModelCheckpoint), or None.
        stage: what it is for, for messages.

    Raises:
        FileNotFoundError: there is none.
        ConfigurationError: `"best"` without a ModelCheckpoint that has one.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        found = newest_valid(run.checkpoint_dir, kind="full" if stage == "fit" else None)
        if found is None:
            raise FileNotFoundError(
                f"{stage}(ckpt_path='last'): no valid checkpoint in {run.checkpoint_dir}. Pass its path, or leave "
                "ckpt_path out to start anew."
            )
        return found
    if ckpt_path == "best":
        best = getattr(run.checkpoint_callback, "best_model_path", "")
        if not best:
            raise ConfigurationError(
                f"{stage}(ckpt_path='best'): no ModelCheckpoint of this Trainer has a best checkpoint yet. Pass a path."
            )
        return Path(best)
    path = Path(ckpt_path)
    read_manifest(path)  # raises, with what lies nearby
    return path


def check_fits(run: RunFacts, path: Path) -> None:
    """Check that a resumed run has something left to do or nothing; a bound behind the checkpoint is an error.

    Raises:
        ConfigurationError: `max_epochs` is below the epochs that the checkpoint has finished.
    """
    manifest = read_manifest(path)
    if run.max_epochs is not None and manifest.epoch > run.max_epochs:
        raise ConfigurationError(
            f"{path} stands in epoch {manifest.epoch}, but max_epochs={run.max_epochs}. Raise max_epochs."
        )
