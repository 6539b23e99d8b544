"""Loading of checkpoints into a run: the complete state of a fit, or only the weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback
from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.layout import order_after
from trainwright.checkpoint.format.manifests import FoundCheckpoint
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.rng import set_rng_state
from trainwright.core.run import Stage
from trainwright.core.state import TrainState, compare_classes
from trainwright.data.datamodule import DataModule
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.loggers.metric_values import load_objects_state, merge
from trainwright.strategies.engine import Engine
from trainwright.trainer.checkpoints.contents import CheckpointContents, frozen_names
from trainwright.trainer.checkpoints.load_request import LoadRequest, Opened
from trainwright.trainer.checkpoints.places import CheckpointPlaces
from trainwright.trainer.checkpoints.search import CheckpointSearch, left_by_earlier
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import StageData
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.logs import Logs
from trainwright.trainer.loop_state import LoopState
from trainwright.trainer.run_state import RunProgress


class Loads:
    """Loads checkpoints into a stage.

    Args:
        settings: provides the limits of a fit, which a resumed checkpoint must not exceed.
        engine: receives weights, optimizers and the loss scale.
        places: the folders and URLs of checkpoints.
        contents: provides the attempt of the launcher that the fit belongs to.
        hooks: the task and the callbacks.
        progress: receives the training progress.
        data: receives the position in the training data.
        loop: receives the schedules, and the state to restore last.
        logs: receives metrics and the loggers' states.
        stage: the stage, or None.

    Attributes:
        origin: the checkpoint that this fit was resumed from. None for a new run, a start from weights alone and other
            stages. A rollback does not change it.
        ckpt_path: the checkpoint that was loaded, also for its weights alone, or None.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        places: CheckpointPlaces,
        contents: CheckpointContents,
        hooks: StageHooks,
        progress: RunProgress,
        data: StageData,
        loop: LoopState,
        logs: Logs,
        stage: Stage | None,
    ) -> None:
        self.origin: Path | None = None
        self.ckpt_path: str | None = None
        self._settings = settings
        self._engine = engine
        self._places = places
        self._contents = contents
        self._hooks = hooks
        self._progress = progress
        self._data = data
        self._loop = loop
        self._logs = logs
        self._stage = stage

    def open(self, request: LoadRequest, *, is_trial: bool) -> Opened | None:
        """Find and read the checkpoint that the stage starts from, on every rank. Collective.

        Returns:
            The checkpoint, or None if the stage starts without one.

        Raises:
            FileNotFoundError, ConfigurationError, CheckpointError: see `CheckpointSearch` and `Opened.read`.
            ConfigurationError: the checkpoint has completed more epochs than the fit may run.
        """
        stage = self._stage
        processes = self._engine.processes
        attempt = self._contents.attempt
        assert stage is not None
        folder = self._places.run_folder
        # A launcher that restarts the job runs the same `fit(…)` again. The checkpoint of the interrupted attempt has
        # priority over the `ckpt_path` that the script passes, from which the first attempt began.
        of_earlier_attempt: FoundCheckpoint | None = None
        if self._engine.is_main:
            if stage == "fit" and not is_trial and self._places.folder.is_dir():
                folder.prepare()
            of_earlier_attempt = left_by_earlier(attempt, folder)
        found = processes.broadcast_object(of_earlier_attempt)
        if found is not None:
            self._hooks.print(f"trainwright: start {attempt.number + 1} of this job resumes {found.path}.")
            request = replace(request, ckpt_path=found.path, weights_only=False)
        elif request.ckpt_path is not None:
            has_trained = self._progress.state.step > 0
            search = CheckpointSearch(request, stage, self._places, self._hooks, has_trained=has_trained)
            found = search.on_all_ranks(processes)
        if found is None:
            return None
        resumes = request.resumes(stage)
        if resumes:
            self._check_epochs(found)
        return Opened.read(found, request, full=resumes)

    def _check_epochs(self, found: FoundCheckpoint) -> None:
        epoch = found.manifest.epoch
        limit = self._settings.limits.max_epochs
        if limit is not None and epoch > limit:
            raise ConfigurationError(f"{found.path} is in epoch {epoch}, but max_epochs={limit}. Increase max_epochs.")

    def load(self, opened: Opened) -> None:
        """Load an opened checkpoint into the stage after its setup: the full state or only the weights. Collective.

        Raises:
            CheckpointError: see `resume`; or weights are missing, unexpected or have another shape.
        """
        self.ckpt_path = str(opened.path)
        if self._stage is not None and opened.request.resumes(self._stage):
            self.resume(opened)
            self._enter_in_index(opened.found)
            self.origin = opened.path
            return
        self._load_weights(opened)
        if self._stage == "fit":  # a new run, also after an earlier fit of this Trainer
            self._progress.state.load_dict(TrainState().to_dict())
            self._hooks.print(f"trainwright: a new run begins at step 0 from the weights of {opened.path}")

    def resume(self, opened: Opened) -> None:
        """Restore the complete state of a run. Every rank reads the same folder. Not collective.

        The next epoch begins if the checkpoint was written after the last step of an epoch.

        Raises:
            CheckpointError: a part is missing or does not match this task.
        """
        self._restore(opened)
        state = self._progress.state
        if state.epoch_done:
            state.begin_next_epoch()
            # None is the start of an epoch. The saved position is the end of the previous one.
            if self._data.place is not None:
                self._data.place["position"] = None

    def _enter_in_index(self, found: FoundCheckpoint) -> None:
        """Complete what a killed process may have left undone for the resumed checkpoint. Collective.

        Adds the checkpoint to the run's index, uploads it, and deletes unfinished uploads. A checkpoint outside the
        run's folder is neither added nor uploaded. Does nothing without a ModelCheckpoint.
        """
        if self._hooks.saver is None:
            return
        true_path = found.path.resolve()  # not a link to it
        is_in_folder = true_path.parent == self._places.folder.resolve() and not true_path.name.startswith(".")

        def finish_save() -> None:
            self._places.finish_uploads(true_path if is_in_folder else None)
            if is_in_folder:
                self._places.run_folder.enter(FoundCheckpoint(true_path, found.manifest))

        self._engine.processes.on_main_rank(finish_save, f"enter {found.path} in its index")

    # Weights

    def _load_weights(self, opened: Opened) -> None:
        """Load the weights of a checkpoint, including changes by hooks.

        Raises:
            CheckpointError: weights are missing, unexpected or have another shape, unless `strict` permits it.
        """
        request = opened.request
        strict = self._hooks.task.strict_loading if request.strict is None else request.strict
        missing, unexpected = self._engine.state.load_model_state(opened.shown["state_dict"], strict=strict)
        self._engine.weights_changed()
        # strict=False warns, because it is about this checkpoint. A task's strict_loading=False does not.
        if request.strict is not False:
            return
        problems = []
        if missing:
            problems.append(f"{len(missing)} weights of the task are not in it: {_first_names(missing)}")
        if unexpected:
            problems.append(f"{len(unexpected)} of its weights are not in the task: {_first_names(unexpected)}")
        if problems:
            text = f"{opened.path} was partially loaded. {'; '.join(problems)}."
            warnings.warn(text, TrainwrightWarning, stacklevel=2)

    # The complete state

    def _restore(self, opened: Opened) -> None:
        snapshot = opened.snapshot
        path = opened.path
        saved = Entries(snapshot.trainer, path, opened.request.allow_missing)
        self._load_weights(opened)
        self._progress.state.load_dict(snapshot.state)
        order_after(opened.found.manifest.created)  # later checkpoints are newer also if this clock is behind
        self._logs.shown.load(snapshot.metrics)
        # Callbacks before optimizers: a callback may have to create the saved parameter groups in `on_fit_start`.
        saved.restore_callbacks(self._hooks.callbacks)
        self._restore_optimizers_and_schedules(opened, saved)
        saved.restore_engine(self._engine)
        place_in_data = saved.required("data")
        seed = saved.required("seed")
        if place_in_data:  # a converted checkpoint is at the start of an epoch and has no data state
            self._progress.seed = seed
            self._data.load_state_dict(place_in_data)
        self._progress.add_skipped_data(snapshot.trainer.get("left_out", {}))  # a converted checkpoint has none
        self._progress.run_id = saved.required("run_id")
        saved.restore_loggers(self._logs.group)
        saved.restore_datamodule(self._data.datamodule)
        self._restore_last(opened, order_is_known=bool(place_in_data))

    def _restore_last(self, opened: Opened, *, order_is_known: bool) -> None:
        """Have the loop restore metrics and generators just before training continues, after all hooks.

        Args:
            opened: the checkpoint.
            order_is_known: the seed of the data order was restored, for the warning.
        """
        snapshot = opened.snapshot
        path = opened.path
        state = self._progress.state
        ranks = self._engine.data_ranks
        to_restore = self._loop.to_restore
        is_mid_epoch = state.batch_in_epoch > 0 and not state.epoch_done
        if is_mid_epoch:
            to_restore.append(partial(self.restore_metrics, snapshot.trainer.get("metrics", []), path))
            to_restore.append(partial(self._compare_frozen, snapshot.trainer.get("frozen"), path))
        if snapshot.trainer.get("within_step"):
            warnings.warn(
                f"{path} was written within the step after step {state.step}. That step runs again from its "
                "beginning, but the random numbers, buffer updates and logged values of its first part are kept.",
                TrainwrightWarning,
                stacklevel=2,
            )
        # `rng` has the generators of each rank. If several ranks shared the same data, `data_ranks` names one rank for
        # each data rank: [0, 2] if ranks 0 and 1, and ranks 2 and 3, had the same data.
        members = snapshot.trainer.get("data_ranks")
        generators = snapshot.rng
        if members and snapshot.rng:
            generators = [snapshot.rng[rank] for rank in members]
        if len(generators) == ranks.size:
            to_restore.append(partial(_set_generators, path, generators[ranks.rank], self._engine.device))
        elif "rng" not in snapshot.missing:  # otherwise, `allow_missing` has led to a warning already
            why = "holds no generator states"
            if snapshot.rng:
                num_data_ranks = len(members) if members else snapshot.world_size
                wrote = _processes_text(snapshot.world_size, num_data_ranks)
                resumes = _processes_text(self._engine.processes.world_size, ranks.size)
                why = f"was written by {wrote} and is resumed by {resumes}"
            order = " The order of the data is unchanged." if order_is_known else ""
            warnings.warn(
                f"{path} {why}. The random number generators start from scratch.{order}",
                TrainwrightWarning,
                stacklevel=2,
            )

    def _compare_frozen(self, saved_names: list[str] | None, path: Path) -> None:
        """Warn if an epoch is resumed with a different set of parameters that require gradients.

        Args:
            saved_names: the frozen parameters of the checkpoint; None for a checkpoint of an early version.
            path: the checkpoint, for the message.
        """
        if saved_names is None:
            return
        task = self._hooks.task
        names = {plain_name(name) for name, _ in task.named_parameters()}
        was_frozen = names.intersection(saved_names)
        is_frozen = set(frozen_names(task))
        changed = sorted(was_frozen ^ is_frozen)
        if changed:
            kind = "was frozen" if changed[0] in was_frozen else "was trained"
            warnings.warn(
                f"{path} was written in the middle of an epoch in which {changed[0]!r} {kind}. In this run, "
                f"requires_grad differs for {len(changed)} parameter(s). on_train_epoch_start is not called again in a "
                "resumed epoch. Set requires_grad also in on_train_start, depending on the epoch.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def restore_metrics(self, states_by_rank: list[dict[str, Any]], origin: object) -> None:
        """Restore the metrics of an unfinished epoch. Every rank calls it, after `MetricBuffer.begin`.

        Args:
            states_by_rank: the `CheckpointContents.metrics_state` of each data rank of the saved run.
            origin: their source, for the warning.
        """
        metrics = self._logs.metrics
        task = self._hooks.task
        device = self._engine.device
        ranks = self._engine.data_ranks
        lost: list[str]  # metric objects of the saved run that are not restored
        if len(states_by_rank) == ranks.size:
            state_of_this_rank = states_by_rank[ranks.rank]
            metrics.load_state_dict(state_of_this_rank["logged"], device, task)
            lost = load_objects_state(task, state_of_this_rank["objects"], device)
        else:  # another number of data ranks: logged values can be merged, metric objects cannot
            names: set[str] = set()
            for state in states_by_rank:
                names.update(state["objects"])
            lost = sorted(names)
            # Only one rank continues from the aggregates of all saved ranks. The end of the epoch merges all ranks, so
            # each aggregate counts once.
            if ranks.rank == 0:
                aggregates_by_key: dict[Any, list[Any]] = {}
                for state in states_by_rank:
                    for key, aggregate in state["logged"].items():
                        aggregates_by_key.setdefault(key, []).append(aggregate)
                merged = {key: merge(aggregates) for key, aggregates in aggregates_by_key.items()}
                metrics.load_state_dict(merged, device)
        if lost and self._engine.is_main:
            warnings.warn(
                f"{origin}: the metric objects {', '.join(lost)} start from scratch in this epoch, because they are "
                "not in this task or the number of processes has changed.",
                TrainwrightWarning,
                stacklevel=2,
            )

    # Optimizers and schedules

    def _restore_optimizers_and_schedules(self, opened: Opened, saved: Entries) -> None:
        """Restore optimizers and schedules now, or after `on_fit_start` if callbacks must first create their groups."""

        def restore() -> None:
            fresh_optimizers = self._restore_optimizers(opened)
            self._restore_schedules(saved, fresh_optimizers)

        states = opened.snapshot.optimizers
        optimizers = self._engine.optimizers
        if self._hooks.table.on_fit_start and len(states) == len(optimizers):
            for state, optimizer in zip(states, optimizers, strict=True):
                # Checkpoints of early versions contain torch's `param_groups`.
                saved_groups = state.get("groups", state.get("param_groups", []))
                if len(saved_groups) != len(optimizer.param_groups):
                    self._loop.restore_after_fit_start = restore
                    return
        restore()

    def _restore_optimizers(self, opened: Opened) -> list[Optimizer]:
        """Restore the optimizers. Return those that start from scratch, which `allow_missing` must permit.

        Raises:
            CheckpointError: the checkpoint has another number of optimizers, or a state does not match its optimizer.
        """
        path = opened.path
        states = opened.snapshot.optimizers
        optimizers = self._engine.optimizers
        if "optimizer" in opened.snapshot.missing:
            return optimizers
        may_miss = "optimizer" in opened.request.allow_missing
        if len(states) != len(optimizers):
            text = f"{path} holds {len(states)} optimizer(s), but configure_optimizers returned {len(optimizers)}."
            if not may_miss:
                raise CheckpointError(
                    f"{text} Return as many, in the same order, or pass allow_missing=['optimizer'] to start them from "
                    "scratch."
                )
            warnings.warn(f"{text} They start from scratch.", TrainwrightWarning, stacklevel=3)
            return optimizers
        fresh_optimizers: list[Optimizer] = []
        for optimizer, state in zip(optimizers, states, strict=True):
            try:
                self._engine.state.load_optimizer_state(optimizer, state)
            except CheckpointError as error:
                if not may_miss:
                    raise
                fresh_optimizers.append(optimizer)
                text = f"{path}: {error} {type(optimizer).__name__} starts from scratch."
                warnings.warn(text, TrainwrightWarning, stacklevel=3)
        return fresh_optimizers

    def _restore_schedules(self, saved: Entries, fresh_optimizers: Sequence[Optimizer]) -> None:
        """Restore the learning-rate schedules. Set their rates on the optimizers that start from scratch.

        Raises:
            CheckpointError: the checkpoint has no schedules, or another number of schedules, and `allow_missing` does
                not permit it.
        """
        states = saved.take("schedulers", None)
        if states is None:  # missing, which `allow_missing` permits: the schedules start from scratch
            return
        configs = self._loop.schedules.configs
        if len(states) != len(configs):
            saved.refuse_missing(
                "schedulers",
                f"holds {len(states)} learning-rate schedule(s), but configure_optimizers returned {len(configs)}",
                "return as many, in the same order",
            )
            return
        schedules = [config.scheduler for config in configs]
        compare_classes("learning-rate schedule", schedules, saved.optional("schedule_classes"), saved.path)
        self._loop.schedules.load_state_dict(states)
        for schedule in schedules:
            optimizer = getattr(schedule, "optimizer", None)
            # By identity, because an optimizer may define `==`.
            if any(optimizer is fresh for fresh in fresh_optimizers):
                _set_rates(optimizer, schedule)


def _set_rates(optimizer: Any, schedule: Any) -> None:
    """Set the current learning rates of a schedule on its optimizer, in place."""
    # Most schedules compute the next rate from the optimizer's, which is the initial one in a new optimizer.
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _set_generators(path: Path, states: dict[str, Any], device: torch.device) -> None:
    with reading(path, "holds invalid generator states"):
        set_rng_state(states, device)


def _processes_text(world_size: int, num_data_ranks: int) -> str:
    """Return a text with the number of processes, and with the number of data ranks if it differs."""
    text = f"{world_size} process(es)"
    return text if num_data_ranks == world_size else f"{text}, {num_data_ranks} for the data"


def _first_names(names: Sequence[str]) -> str:
    """Return the first 10 names as text."""
    more = ", …" if len(names) > 10 else ""
    return f"{', '.join(names[:10])}{more}"


class Entries:
    """The entries of a checkpoint's trainer part, with the rules for missing entries.

    - An entry without which no run can be resumed (see `required`): if it is missing, an error.
    - Another entry that every checkpoint has (see `take`): if it is missing, an error, unless `allowed` names it.
    - The state of a data module that the user has added since: the same as for `take`.
    - The state of something else that the user has added, such as a callback, a logger or another precision: it starts
      from scratch with a warning, or without one if `allowed` names its kind.
    - The state of something that the user has removed: ignored with a warning, for loggers without one.

    Args:
        saved: the entries by name.
        path: the checkpoint's path, for messages.
        allowed: names that may be missing.
    """

    def __init__(self, saved: Mapping[str, Any], path: Path, allowed: Sequence[str]) -> None:
        self._saved = saved
        self.path = path
        self._allowed = allowed

    def required(self, name: str) -> Any:
        """Return an entry without which no run can be resumed.

        Raises:
            CheckpointError: the entry is missing.
        """
        if name not in self._saved:
            raise CheckpointError(f"{self.path} has no entry {name!r} in its trainer part. Use another checkpoint.")
        return self._saved[name]

    def take(self, name: str, otherwise: object) -> Any:
        """Return an entry, or `otherwise` if it may be missing.

        Raises:
            CheckpointError: the entry is missing and not in `allowed`.
        """
        if name not in self._saved:
            self.refuse_missing(name, f"has no entry {name!r} in its trainer part", "use another checkpoint")
            return otherwise
        return self._saved[name]

    def optional(self, name: str) -> Any:
        """Return an entry that checkpoints of early versions lack, or None."""
        return self._saved.get(name)

    def refuse_missing(self, name: str, what: str, advice: str) -> None:
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

    def _warn_new(self, kind: str, name: str) -> None:
        """Warn about state that the checkpoint lacks because the user has added something, unless allowed."""
        if kind not in self._allowed:
            self._warn(f"holds no state of {name}, which this run has: it starts from scratch.")

    def restore_engine(self, engine: Engine) -> None:
        """Restore the engine's own state (the loss scale).

        Raises:
            CheckpointError: the checkpoint was written with the same precision and lacks a part of that state, which
                `allowed` does not contain.
        """
        # The entry is "strategy", for example {"scaler": {"scale": 65536.0, …}}. `allow_missing` names its keys.
        saved: Mapping[str, Any] = self.required("strategy")
        precision = engine.precision.name
        saved_precision = self._saved.get("precision")
        for key in engine.state_dict():
            if key in saved:
                continue
            if saved_precision == precision:
                self.refuse_missing(
                    key, f"was written with precision={precision!r} and lacks its {key}", "use another checkpoint"
                )
            else:
                self._warn_new(key, f"the {key} of precision={precision!r}")
        engine.load_state_dict(saved)

    def restore_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Restore the callbacks by their state keys."""
        saved: Mapping[str, Any] = self.take("callbacks", {})
        by_key = {callback.state_key: callback for callback in callbacks}
        for key in saved:
            if key not in by_key:
                self._warn(
                    f"holds the state of a callback {key!r} that this run does not have. Add it, or ignore this."
                )
        for key, callback in by_key.items():
            if key in saved:
                callback.load_state_dict(saved[key])
            elif callback.state_dict():
                self._warn_new("callbacks", f"the callback {key!r}")

    def restore_loggers(self, loggers: LoggerGroup | None) -> None:
        """Restore the loggers, which continue their logs."""
        saved: Sequence[Mapping[str, Any]] = self.take("loggers", [])
        if loggers is None:
            return
        # Each state has the name of its logger's class under "logger". A run may have several loggers of one class.
        saved_classes = [saved_state.get("logger") for saved_state in saved]
        for state in loggers.state_dict():
            class_name = state["logger"]
            if class_name in saved_classes:
                saved_classes.remove(class_name)
            elif len(state) > 1:  # it has state besides its class name
                self._warn_new("loggers", f"the {class_name}")
        loggers.load_state_dict(saved)

    def restore_datamodule(self, datamodule: DataModule | None) -> None:
        """Restore the data module."""
        saved: dict[str, Any] = self.take("datamodule", {})
        if datamodule is None:
            if saved:
                self._warn("holds the state of a data module, but this run has none. Pass it, or ignore this.")
        elif saved:
            datamodule.load_state_dict(saved)
        elif datamodule.state_dict():
            name = type(datamodule).__name__
            what = f"holds no state of the data module, and {name} has one"
            self.refuse_missing("datamodule", what, "use another checkpoint")
