"""Restore a run from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.checkpoint import Snapshot
from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.layout import order_after
from trainwright.checkpoint.format.manifests import FoundCheckpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.rng import set_rng_state
from trainwright.core.state import TrainState, compare_classes
from trainwright.loggers.metric_values import load_objects_state, merge
from trainwright.trainer.checkpoints import remote_saves
from trainwright.trainer.checkpoints.capture import frozen_names
from trainwright.trainer.checkpoints.load_request import (
    LoadRequest,
    Opened,
)
from trainwright.trainer.run import StageRun


def restore(run: StageRun, opened: Opened) -> None:
    """Restore the complete state of a run that has been set up. Every rank reads the same folder. Not collective.

    Callbacks are restored before optimizers. Optimizers whose parameter groups differ from the saved ones are restored
    after `on_fit_start`, where a callback may create the groups.

    Raises:
        CheckpointError: a part is missing or does not match this task.
    """
    snapshot, path, request = opened.snapshot, opened.path, opened.request
    saved = Entries(snapshot.trainer, path, request.allow_missing)
    restore_weights(run, opened)
    run.state.load_dict(snapshot.state)
    order_after(opened.found.manifest.created)
    run.logs.shown.load(snapshot.metrics)
    saved.restore_callbacks(run)
    _restore_optimizers_and_schedules(run, opened, saved)
    saved.restore_engine(run)
    data, seed = saved.take("data", {}), saved.take("seed", None)
    if data:  # a converted checkpoint is at the start of an epoch and has no data state
        run.history.seed = seed
        run.data.load_state_dict(data)
    run.history.add_skipped_data(snapshot.trainer.get("left_out", {}))  # a converted checkpoint has none
    run.history.run_id = saved.take("run_id", "")
    saved.restore_loggers(run)
    saved.restore_datamodule(run)
    if run.state.batch_in_epoch > 0 and not run.state.epoch_done:
        run.loop.to_restore.append(partial(restore_metrics, run, snapshot.trainer.get("metrics", []), path))
        run.loop.to_restore.append(partial(_compare_frozen, run, snapshot.trainer.get("frozen"), path))
    ranks = snapshot.trainer.get("data_ranks")  # present only if several ranks shared the same data
    states = [snapshot.rng[rank] for rank in ranks] if ranks and snapshot.rng else snapshot.rng
    if snapshot.trainer.get("within_step"):
        warnings.warn(
            f"{path} was written within the step after step {run.state.step}. That step runs again from its "
            "beginning, but the random numbers, buffer updates and logged values of its first part are kept.",
            TrainwrightWarning,
            stacklevel=2,
        )
    if len(states) == run.engine.data_ranks.size:
        run.loop.to_restore.append(
            partial(_set_generators, path, states[run.engine.data_ranks.rank], run.engine.device)
        )
    elif "rng" not in snapshot.missing:
        wrote = _processes_text(snapshot.world_size, len(ranks) if ranks else snapshot.world_size)
        resumes = _processes_text(run.engine.processes.world_size, run.engine.data_ranks.size)
        moved = f"was written by {wrote} and is resumed by {resumes}"
        warnings.warn(
            f"{path} {moved if snapshot.rng else 'holds no generator states'}. The random number generators start from "
            f"scratch.{' The order of the data is unchanged.' if data else ''}",
            TrainwrightWarning,
            stacklevel=2,
        )


def _compare_frozen(run: StageRun, before: list[str] | None, path: Path) -> None:
    """Warn if an epoch is resumed with a different set of parameters that require gradients."""
    names = {plain_name(name) for name, _ in run.task.named_parameters()}
    differ = [] if before is None else sorted({*before} & names ^ {*frozen_names(run.task)})
    if differ:
        kind = "was trained" if differ[0] not in (before or []) else "was frozen"
        warnings.warn(
            f"{path} was written in the middle of an epoch in which {differ[0]!r} {kind}. In this run, requires_grad "
            f"differs for {len(differ)} parameter(s). on_train_epoch_start is not called again in a resumed epoch. "
            "Set requires_grad also in on_train_start, depending on the epoch.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _set_generators(path: Path, states: dict[str, Any], device: torch.device) -> None:
    with reading(path, "holds invalid generator states"):
        set_rng_state(states, device)


def _processes_text(world_size: int, dp_size: int) -> str:
    """Return a text with the number of processes, and with the number of data ranks if it differs."""
    return f"{world_size} process(es)" + (f", {dp_size} for the data" if dp_size != world_size else "")


def restore_metrics(run: StageRun, of_ranks: list[dict[str, Any]], origin: object) -> None:
    """Restore the metrics of an unfinished epoch. Every rank calls it, after `MetricBuffer.begin`.

    `of_ranks` contains the `metrics_state` of each data rank, and `origin` names their source in the warning.
    """
    device, rank = run.engine.device, run.engine.data_ranks.rank
    if len(of_ranks) == run.engine.data_ranks.size:
        run.logs.metrics.load_state_dict(of_ranks[rank]["logged"], device, run.task)
        lost = load_objects_state(run.task, of_ranks[rank]["objects"], device)
    else:
        lost = sorted({name for of_rank in of_ranks for name in of_rank["objects"]})
        keys = {key: None for of_rank in of_ranks for key in of_rank["logged"]}
        held = {key: [of_rank["logged"][key] for of_rank in of_ranks if key in of_rank["logged"]] for key in keys}
        if rank == 0:  # one rank continues from the merged aggregates of all saved ranks
            run.logs.metrics.load_state_dict({key: merge(states) for key, states in held.items()}, device)
    if lost and run.is_main:
        warnings.warn(
            f"{origin}: the metric objects {', '.join(lost)} start from scratch in this epoch, because they are not in "
            "this task or the number of processes has changed.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _restore_optimizers_and_schedules(run: StageRun, opened: Opened, saved: Entries) -> None:
    """Restore optimizers and schedules now, or after `on_fit_start` if callbacks must first create parameter groups."""

    def load() -> None:
        fresh = _restore_optimizers(run, opened.snapshot, opened.path, opened.request)
        _restore_schedules(run, saved, fresh)

    snapshot, own = opened.snapshot, run.engine.optimizers
    if run.components.hooks.on_fit_start and len(snapshot.optimizers) == len(own):
        pairs = zip(snapshot.optimizers, own, strict=True)
        if any(len(state.get("param_groups", [])) != len(optimizer.param_groups) for state, optimizer in pairs):
            run.loop.restore_after_fit_start = load
            return
    load()


def _restore_optimizers(run: StageRun, snapshot: Snapshot, path: Path, request: LoadRequest) -> list[Optimizer]:
    """Restore the optimizers. Return those that start from scratch, which `allow_missing` must permit."""
    saved, own = snapshot.optimizers, run.engine.optimizers
    if "optimizer" in snapshot.missing:
        return own
    allowed = "optimizer" in request.allow_missing
    if len(saved) != len(own):
        text = f"{path} holds {len(saved)} optimizer(s), but configure_optimizers returned {len(own)}."
        if not allowed:
            raise CheckpointError(
                f"{text} Return as many, in the same order, or pass allow_missing=['optimizer'] to start them from "
                "scratch."
            )
        warnings.warn(f"{text} They start from scratch.", TrainwrightWarning, stacklevel=3)
        return own
    fresh = []
    for optimizer, state in zip(own, saved, strict=True):
        try:
            run.engine.state.load_optimizer_state(optimizer, state)
        except CheckpointError as error:
            if not allowed:
                raise
            fresh.append(optimizer)
            text = f"{path}: {error} {type(optimizer).__name__} starts from scratch."
            warnings.warn(text, TrainwrightWarning, stacklevel=3)
    return fresh


def _restore_schedules(run: StageRun, saved: Entries, fresh: list[Optimizer]) -> None:
    """Restore the learning-rate schedules. Set their rates on the optimizers in `fresh`, which were not restored."""
    states, configs = saved.take("schedulers", []), run.loop.schedules.configs
    if len(states) != len(configs):
        saved.lacks(
            "schedulers",
            f"holds {len(states)} learning-rate schedule(s), but configure_optimizers returned {len(configs)}",
            "return as many, in the same order",
        )
        return
    schedules = [config.scheduler for config in configs]
    compare_classes("learning-rate schedule", schedules, saved.optional("schedule_classes"), saved.path)
    run.loop.schedules.load_state_dict(states)
    for config in configs:
        optimizer = next((each for each in fresh if each is getattr(config.scheduler, "optimizer", None)), None)
        if optimizer is not None:
            # Most schedules compute the next rate from the optimizer's, which is the initial one in a new optimizer.
            for group, rate in zip(optimizer.param_groups, config.scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


def restore_weights(run: StageRun, opened: Opened) -> None:
    """Load the weights of a checkpoint, including changes by hooks."""
    shown, path, request = opened.shown, opened.path, opened.request
    strict = run.task.strict_loading if request.strict is None else request.strict
    missing, left_over = run.engine.state.load_model_state(shown["state_dict"], strict=strict)
    run.engine.weights_changed()
    # strict=False warns, because it is about this checkpoint. A task's strict_loading=False does not.
    if request.strict is False and (missing or left_over):
        texts = [
            f"{title}: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
            for title, names in (
                (f"{len(missing)} weights of the task are not in it", missing),
                (f"{len(left_over)} of its weights are not in the task", left_over),
            )
            if names
        ]
        warnings.warn(f"{path} was partially loaded. {'; '.join(texts)}.", TrainwrightWarning, stacklevel=2)


def begin_from_weights(run: StageRun, opened: Opened) -> None:
    """Load only the weights and reset the progress, to start a new run."""
    restore_weights(run, opened)
    run.state.load_dict(TrainState().to_dict())
    run.print(f"trainwright: a new run begins at step 0 from the weights of {opened.path}")


def enter_checkpoint(run: StageRun, opened: Opened) -> None:
    """Call `restore`, and begin the next epoch if the checkpoint was written after the last step of an epoch."""
    restore(run, opened)
    if run.state.epoch_done:
        run.state.begin_next_epoch()
        if run.data.place is not None:
            run.data.place["position"] = None


def add_to_index(run: StageRun, found: FoundCheckpoint) -> None:
    """Complete what a killed process may have left undone for the resumed checkpoint. Collective.

    Adds the checkpoint to the run's index, uploads it, and deletes unfinished uploads. Does nothing without a
    ModelCheckpoint.

    Args:
        run: the run.
        found: the resumed checkpoint. It is neither added nor uploaded if it is outside the run's folder.
    """
    true_path = found.path.resolve()  # not a link to it
    ours = true_path.parent == run.checkpoint_dir.resolve() and not true_path.name.startswith(".")
    if run.saver is None:
        return

    def work() -> None:
        remote_saves.tidy(run, true_path if ours else None)
        if ours:
            run.folder.enter(FoundCheckpoint(true_path, found.manifest))

    run.engine.processes.on_main_rank(work, f"enter {found.path} in its index")


def load(run: StageRun, opened: Opened) -> None:
    """Load an opened checkpoint into a run that has been set up: its full state or only its weights. Collective."""
    run.resume.ckpt_path = str(opened.path)
    if run.status.stage is None or not opened.request.resumes(run.status.stage):
        load_weights = begin_from_weights if run.status.stage == "fit" else restore_weights
        return load_weights(run, opened)
    enter_checkpoint(run, opened)
    add_to_index(run, opened.found)
    run.resume.origin = opened.path


class Entries:
    """The entries of a checkpoint's trainer part, with the rules for missing entries.

    An entry that the checkpoint should have is an error if missing, unless `allowed` names it. State of something that
    the user has added since (a callback, a logger, another precision) starts from scratch with a warning. State of
    something that the user has removed is ignored with a warning.

    Args:
        saved: the entries by name.
        path: the checkpoint's path, for messages.
        allowed: names that may be missing.
    """

    def __init__(self, saved: Mapping[str, Any], path: Path, allowed: Sequence[str]) -> None:
        self._saved = saved
        self.path = path
        self._allowed = allowed

    def take(self, name: str, otherwise: object) -> Any:
        """Return an entry, or `otherwise` if it may be missing.

        Raises:
            CheckpointError: the entry is missing and not in `allowed`.
        """
        if name not in self._saved:
            self.lacks(name, f"has no entry {name!r} in its trainer part", "use another checkpoint")
            return otherwise
        return self._saved[name]

    def optional(self, name: str) -> Any:
        """Return an entry that checkpoints of early versions lack, or None."""
        return self._saved.get(name)

    def lacks(self, name: str, what: str, advice: str) -> None:
        """Raise an error because the checkpoint lacks `name`, or warn if `allowed` contains `name`.

        Raises:
            CheckpointError: `allowed` does not contain `name`.
        """
        if name not in self._allowed:
            raise CheckpointError(
                f"{self.path} {what}: {advice}, or pass allow_missing=[{name!r}] to start it from scratch. The run "
                "will then differ."
            )
        self._warn(f"{what}; it starts from scratch, because allow_missing contains {name!r}.")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self.path} {text}", TrainwrightWarning, stacklevel=4)

    def _is_new(self, kind: str, name: str) -> None:
        """Warn about state that the checkpoint lacks because the user has added something, unless allowed."""
        if kind not in self._allowed:
            self._warn(f"holds no state of {name}, which this run has: it starts from scratch.")

    def restore_engine(self, run: StageRun) -> None:
        """Restore the engine's own state (the loss scale)."""
        # The key in the file is "strategy". Users name its parts in allow_missing, such as "scaler".
        saved: Mapping[str, Any] = self.take("strategy", {})
        precision, before = run.engine.precision.name, self._saved.get("precision")
        for key in run.engine.state_dict():
            if key in saved:
                continue
            if before == precision:
                self.lacks(
                    key, f"was written with precision={precision!r} and lacks its {key}", "use another checkpoint"
                )
            else:
                self._is_new(key, f"the {key} of precision={precision!r}")
        run.engine.load_state_dict(saved)

    def restore_callbacks(self, run: StageRun) -> None:
        """Restore the callbacks by their state keys."""
        saved: Mapping[str, Any] = self.take("callbacks", {})
        known = {callback.state_key: callback for callback in run.components.callbacks}
        for key in saved:
            if key not in known:
                self._warn(
                    f"holds the state of a callback {key!r} that this run does not have. Add it, or ignore this."
                )
        for key, callback in known.items():
            if key in saved:
                callback.load_state_dict(saved[key])
            elif callback.state_dict():
                self._is_new("callbacks", f"the callback {key!r}")

    def restore_loggers(self, run: StageRun) -> None:
        """Restore the loggers, which continue their logs."""
        saved: Sequence[Mapping[str, Any]] = self.take("loggers", [])
        if run.logs.group is None:
            return
        left = [state.get("logger") for state in saved]
        for own in run.logs.group.state_dict():
            if own["logger"] in left:
                left.remove(own["logger"])
            elif len(own) > 1:  # it has state besides its class name
                self._is_new("loggers", f"the {own['logger']}")
        run.logs.group.load_state_dict(saved)

    def restore_datamodule(self, run: StageRun) -> None:
        """Restore the data module."""
        saved: dict[str, Any] = self.take("datamodule", {})
        if run.data.datamodule is None:
            if saved:
                self._warn("holds the state of a data module, but this run has none. Pass it, or ignore this.")
        elif saved:
            run.data.datamodule.load_state_dict(saved)
        elif run.data.datamodule.state_dict():
            name = type(run.data.datamodule).__name__
            self.lacks("datamodule", f"holds no state of the data module, and {name} has one", "use another checkpoint")
