"""One stage of a Trainer: fit, validate, test or predict. Its parts, its setup and its end."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback, log_through
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.hyperparameters import kept_and_left_out
from trainwright.core.process import describe, detect, started_by_trainer
from trainwright.core.run import Run, Stage
from trainwright.core.signatures import method_of
from trainwright.core.state import TrainState
from trainwright.core.task import TaskModule, log_into
from trainwright.core.tree import full_numel, map_tensors, too_deep
from trainwright.loggers.logger import Status
from trainwright.loggers.run_record import code_version, package_versions
from trainwright.processes.rank_position import Position
from trainwright.profilers.profiler import PassThroughProfiler, Profiler
from trainwright.strategies.engine import Engine
from trainwright.trainer.checkpoints.auto_resume import this_attempt
from trainwright.trainer.checkpoints.contents import CheckpointContents
from trainwright.trainer.checkpoints.default_folder import default_folder
from trainwright.trainer.checkpoints.load_request import LoadRequest
from trainwright.trainer.checkpoints.loads import Loads
from trainwright.trainer.checkpoints.places import CheckpointPlaces
from trainwright.trainer.checkpoints.saves import Saves
from trainwright.trainer.configuration.assembly import with_task_callbacks
from trainwright.trainer.configuration.checks import check_callbacks, check_needs
from trainwright.trainer.configuration.lengths import DEFAULT_MAX_EPOCHS
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import Sources, StageData, incomplete_validation
from trainwright.trainer.evaluation_state import EvaluationState
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.logs import Logs
from trainwright.trainer.loop_state import LoopState
from trainwright.trainer.manual import ManualOptimization
from trainwright.trainer.optimization import Schedules, check_members, parse_optimizers, warn_of_joint_steps
from trainwright.trainer.profiling import StageProfiler
from trainwright.trainer.recovery.recovery import Recovery
from trainwright.trainer.run_state import RunProgress
from trainwright.trainer.schedule import Stop
from trainwright.trainer.untrained_values import warn_of_other_hyperparameters, watch_trained_weights


class StageRun:
    """One stage. Each of its parts owns its state and receives the other parts that it needs.

    Args:
        trainer: the Trainer, which hooks receive. It forwards the members of `Run` to this object and its parts.
        settings: the Trainer's settings.
        progress: the progress of training, which the stage continues.
        stage: the stage. Default: None, for a run that executes nothing and only provides the Trainer's attributes.
        task: the user's task. Default: None.
        sources: data sources. Default: none.
        engine: prepared engine of another stage, for a trial. Default: None, which creates one.
        is_trial: run trial steps only, without callbacks, loggers and saves.

    Attributes:
        is_running: the stage has begun and not ended. Never True without a stage.
        is_set_up: calls of `prepare_data` and `setup` have begun, so `teardown` must be called at the end.
        interrupted: Ctrl-C ended the stage. Set by `stage.on_this_process` before `tear_down`.
        engine: computes steps, steps the optimizers and communicates with other ranks.
        hooks: the task and the callbacks.
        data: the loaders, and the position in the training data.
        loop: the state of the training loop.
        evaluation: progress of an evaluation.
        logs: logged values and their receivers.
        manual: gradients and steps of tasks with manual optimization.
        profiler: records actions of the stage.
        places, contents, saves, loads: folders, content, saving and loading of checkpoints.
        recovery: signals, rollbacks and errors.
    """

    def __init__(
        self,
        trainer: Run,
        settings: Settings,
        progress: RunProgress,
        stage: Stage | None = None,
        task: TaskModule | None = None,
        sources: Sources | None = None,
        engine: Engine | None = None,
        *,
        is_trial: bool = False,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.progress = progress
        self.stage = stage
        self.is_trial = is_trial
        self.is_running = stage is not None
        self.is_set_up = False
        self.interrupted = False
        if engine is None:
            engine = settings.selection.engine()
        if sources is None:
            sources = Sources({})
        arguments = settings.arguments
        callbacks: list[Callback] = [] if is_trial else settings.callbacks
        profiler: Profiler = PassThroughProfiler() if is_trial else settings.profiler
        # In the order in which the parts need each other.
        hooks = StageHooks(trainer, engine, task, callbacks)
        data = StageData(sources, task, engine, settings, progress)
        loop = LoopState(Schedules([], task))
        evaluation = EvaluationState()
        logs = Logs(settings, engine, hooks, progress, loop, evaluation, stage, is_trial=is_trial)
        places = CheckpointPlaces(settings.root, hooks, progress)
        contents = CheckpointContents(engine, hooks, progress, data, loop, logs, evaluation)
        saves = Saves(arguments, engine, places, contents, hooks, loop, logs, profiler, is_trial=is_trial)
        loads = Loads(settings, engine, places, contents, hooks, progress, data, loop, logs, stage)
        self.engine = engine
        self.hooks = hooks
        self.data = data
        self.loop = loop
        self.evaluation = evaluation
        self.logs = logs
        self.manual = ManualOptimization(arguments, engine, hooks)
        self.profiler = StageProfiler(profiler, stage, engine, data)
        self.places = places
        self.contents = contents
        self.saves = saves
        self.loads = loads
        self.recovery = Recovery(settings, engine, hooks, progress, data, loop, logs, places, saves, loads)

    @property
    def running_stage(self) -> Stage | None:
        """The stage while it runs, or None."""
        return self.stage if self.is_running else None

    @property
    def state(self) -> TrainState:
        """Training progress."""
        return self.progress.state

    @property
    def task(self) -> TaskModule:
        """The user's task; see `StageHooks.task`."""
        return self.hooks.task

    def position(self) -> Position:
        """Return this rank's progress. Called from another thread, also while the main thread is blocked."""
        state = self.state
        activity = self.evaluation.kind or self.running_stage or "ending"
        return Position(state.step, state.batches, self.evaluation.batches_done, activity)

    # Setup, in the documented order of hooks

    def join(self) -> None:
        """Start the engine's communication with other ranks, and agree on the run's identity and seed. Collective."""
        topology = self.settings.selection.topology
        if started_by_trainer():  # the settings were made in the parent process; torchrun's variables name this rank
            topology = detect("torchrun")
        self.engine.start(topology)
        processes = self.engine.processes
        progress = self.progress
        if processes.world_size > 1:
            # A lambda, because some engines replace `data_ranks` later, in `prepare_task`.
            self.logs.exchange = lambda value: self.engine.data_ranks.gather(value)
            progress.run_id = processes.broadcast_object(progress.run_id)
        if progress.seed is None:  # the user has passed none; each process has another initial seed
            progress.seed = processes.broadcast_object(torch.initial_seed())
        if processes.world_size > 1:
            self.hooks.print(f"trainwright: {describe(topology)}")
        if self.stage == "fit":
            self.contents.attempt = this_attempt(processes)

    def set_up(self, request: LoadRequest) -> None:
        """Prepare the data, build the task and its optimizers, load a checkpoint and start the loggers. Collective."""
        task = self.task
        stage = self.stage
        hooks = self.hooks
        engine = self.engine
        assert stage is not None
        # `global_step` is read from the task's last Trainer, which the next line replaces.
        is_trained = task.global_step > 0
        task.trainer = self.trainer
        if not self.is_trial:
            hooks.callbacks = with_task_callbacks(hooks.callbacks, task)
        log_through(task, hooks.callbacks)
        # Checked again, because only here the task's own callbacks are known.
        check_callbacks(hooks.callbacks, stage)
        check_needs(hooks.callbacks, self.settings.selection)
        hooks.table = HookTable(hooks.callbacks, task)
        self.profiler.wrap_hooks(hooks.table)
        if not self.is_trial:
            self._choose_default_folder(stage, request)
        self.is_set_up = True
        self._prepare_data_and_set_up(stage, is_trained=is_trained)
        _check_depth(task)
        # The checkpoint is read before the engine prepares the task, so that `on_load_checkpoint` (`opened.show`) is
        # called once the modules exist. Its content is loaded after the optimizers exist, below.
        opened = self.loads.open(request, is_trial=self.is_trial)
        if opened is not None:
            engine.when_configured = None  # the checkpoint replaces the trained weights: nothing to warn of
            engine.when_built = partial(opened.show, hooks)
            if stage != "fit":
                warn_of_other_hyperparameters(hooks, stage, opened)
        engine.prepare_task(task, self._make_optimizers if stage == "fit" else None, self.trainer)
        # Sort the schedules again, because the engine may have changed their intervals.
        self.loop.schedules = Schedules(self.loop.schedules.configs, task)
        self.profiler.watch_modules(task)
        if "tokens" in self.settings.units:  # a callback may have set it already, so it is never set to False
            self.loop.count_tokens = True
        self.logs.make_group()
        if opened is not None:
            self.loads.load(opened)
        self.start_loggers()
        engine.attach(self.trainer, hooks.table, self.logs.metrics)
        task.trainer = self.trainer  # also of tasks that `setup` and `configure_model` created
        log_into(task, self.logs.metrics)
        if stage == "fit":
            if not (self.settings.arguments.barebones or self.is_trial):
                self._print_notes()
            self.loop.trains = True

    def _choose_default_folder(self, stage: Stage, request: LoadRequest) -> None:
        """Set the folder of checkpoints without a folder of their own. Collective: rank 0 chooses it."""
        folder = None
        if self.engine.is_main:
            folder = default_folder(self.settings.root, self.settings.loggers, stage, request, self.contents.attempt)
        self.places.default_folder = self.engine.processes.broadcast_object(folder)

    def _prepare_data_and_set_up(self, stage: Stage, *, is_trained: bool) -> None:
        """Call `prepare_data` on one rank per node or on rank 0, then `setup` on every rank. Collective.

        `setup` is called in Lightning's order: the data module, the callbacks, the task. `is_trained` says whether the
        task has been trained before this stage.
        """
        task = self.task
        datamodule = self.data.datamodule
        processes = self.engine.processes
        profile = self.profiler.profiler.profile
        owners_of_data: list[Any] = [task]
        if datamodule is not None:
            datamodule.trainer = self.trainer
            owners_of_data = [datamodule, task]
        for owner in owners_of_data:
            per_node = getattr(owner, "prepare_data_per_node", True)
            prepares_here = processes.local_rank == 0 if per_node else self.engine.is_main
            if prepares_here:
                kind = "TaskModule" if isinstance(owner, TaskModule) else "DataModule"
                with profile(f"[{kind}]{type(owner).__name__}.prepare_data"):
                    method_of(owner, "prepare_data")()
        processes.barrier()  # `setup` may read what another rank has prepared
        if datamodule is not None:
            method_of(datamodule, "setup")(stage)
        self.hooks.fire("setup", stage)
        # The task's `setup` and `configure_model` may replace trained weights. `prepare_task` of the engine calls the
        # function after both.
        if is_trained:
            self.engine.when_configured = watch_trained_weights(self.hooks, stage)
        with profile(f"[TaskModule]{type(task).__name__}.setup"):
            method_of(task, "setup")(stage)

    def _make_optimizers(self) -> list[Optimizer]:
        """Call `configure_optimizers`. Called by the engine once the task's parameters are final."""
        task = self.task
        name = type(task).__name__
        task.trainer = self.trainer  # `setup` or `configure_model` may have replaced it
        with self.profiler.profiler.profile(f"[TaskModule]{name}.configure_optimizers"):
            returned = task.configure_optimizers()
        optimizers, configs = parse_optimizers(returned, name)
        self.loop.schedules = Schedules(configs, task)
        check_members(task, optimizers)
        warn_of_joint_steps(task, len(optimizers))
        return optimizers

    def _print_notes(self) -> None:
        """Print what a fit does by default and its user may not expect."""
        settings = self.settings
        if settings.arguments.max_epochs is None and settings.limits.max_epochs == DEFAULT_MAX_EPOCHS:
            self.hooks.print(
                f"trainwright: training ends after {DEFAULT_MAX_EPOCHS} epochs, because no limit is set. Set "
                "max_epochs; -1 is no limit."
            )
        warning = incomplete_validation(self.data.sources, self.task, settings.limit_batches["validate"])
        if warning is not None:
            self.hooks.print(f"trainwright: {warning}")

    def start_loggers(self) -> None:
        """Start the loggers and record the facts of the run. Call it after a checkpoint is loaded."""
        self.logs.start(self._facts)

    def _facts(self, folder: Path) -> dict[str, Any]:
        """Return the facts of the run for its record, with paths relative to the record's folder."""
        # Only runs that write a record need these imports.
        from trainwright.trainer.planning.forecast import data_types
        from trainwright.trainer.planning.setting_sources import as_data, planned_settings

        selection = self.settings.selection
        outline = selection.strategy.outline(None, selection.settings)
        settings = planned_settings(self.settings)
        log_dirs = [logger.log_dir for logger in self.settings.loggers if logger.log_dir is not None]
        script = Path(sys.argv[0] or ".").absolute()
        is_users_script = script.suffix == ".py" and script.name != "__main__.py"  # not `python -m package`
        code_folder = script.parent if is_users_script and script.is_file() else Path.cwd()
        hyperparameters: dict[str, Any] = {}
        for owner in (self.data.datamodule, self.task):  # the task's replace those of the data module
            if owner is not None:
                serializable, _ = kept_and_left_out(owner.hparams)
                hyperparameters.update(serializable)
        return {
            "run_id": self.progress.run_id,
            "resumed_from": None if self.loads.origin is None else str(self.loads.origin),
            "task": type(self.task).__qualname__,
            "parameters": sum(full_numel(parameter) for parameter in self.task.parameters()),
            "settings": {name: [setting.value, setting.source] for name, setting in settings.items()},
            "hyperparameters": hyperparameters,
            "strategy": type(selection.strategy).__name__,
            "options": as_data(selection.strategy.changed_options),
            "mesh": {name: length for name, length in outline.mesh.lengths.items() if length > 1},
            "precision": data_types(self.task, selection.settings.precision, outline, self.engine.processes.world_size),
            "device": str(self.engine.device),
            "processes": self.engine.processes.world_size,
            "seed": self.progress.seed,
            "callbacks": [type(callback).__name__ for callback in self.hooks.callbacks],
            "loggers": [type(logger).__name__ for logger in self.settings.loggers],
            "folders": {
                "logs": [os.path.relpath(log_dir, folder) for log_dir in log_dirs],
                "checkpoints": os.path.relpath(self.places.folder, folder),
            },
            "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
            "code": code_version(code_folder),
            "python": platform.python_version(),
            "host": platform.node(),
            "platform": platform.platform(),
            "packages": package_versions(),
        }

    def begin_fit(self) -> None:
        """Call `on_fit_start`, restore optimizers that wait for it, and log hyper-parameters and the graph."""
        self.hooks.fire("on_fit_start")
        restore = self.loop.restore_after_fit_start
        self.loop.restore_after_fit_start = None
        if restore is not None:
            restore()
        self.logs.describe_task(self.data.datamodule)

    # End

    def end_fit(self) -> None:
        """Execute the last requests, and call `on_fit_end` when all checkpoints are on disk. Collective.

        Raises:
            CheckpointError: see `Saves.finish`.
        """
        self.saves.execute_requests()
        self.saves.finish()
        self.logs.metrics.close("on_fit_end")
        self.hooks.fire("on_fit_end")

    def tear_down(self, status: Status) -> None:
        """Tear down everything that the stage has set up. All steps run even if one fails or is interrupted.

        Args:
            status: `"success"`, `"failed"` or `"interrupted"`, for the loggers. An error before the loggers finish
                makes a success `"failed"`.
        """
        stage = self.stage or "fit"
        hooks = self.hooks

        def finish_logs(_kind: object, error: BaseException | None, _trace: object) -> None:
            status_of_logs = status
            if status == "success" and error is not None:
                status_of_logs = "failed"
            self.logs.finish(status_of_logs)

        # The stack runs in reverse: data, saves, teardown hooks of the data module, callbacks and task, loggers,
        # profiler, message, engine. Saves end before the loggers, which receive the last checkpoints, and before the
        # message, which names the newest one.
        with ExitStack() as cleanup:
            cleanup.callback(self._close)
            if self.interrupted and stage == "fit" and hooks.saver is not None:
                cleanup.callback(self.recovery.print_where_to_resume)
            cleanup.callback(self.profiler.end, hooks.print)
            if self.logs.group is not None:
                cleanup.push(finish_logs)  # receives the error of an earlier step of the cleanup
            if self.is_set_up:
                cleanup.callback(method_of(self.task, "teardown"), stage)
                cleanup.callback(hooks.fire, "teardown", stage)
                if self.data.datamodule is not None:
                    cleanup.callback(method_of(self.data.datamodule, "teardown"), stage)
            cleanup.callback(self.saves.close)
            cleanup.callback(partial(self.data.close, keep_state=status != "failed"))

    def _close(self) -> None:
        """Disconnect the task and the callbacks from this stage, and end the engine's communication."""
        log_into(self.task, None)
        log_through(None, self.hooks.callbacks)
        self.is_running = False
        self.engine.close()

    # Numbers of batches and steps

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of one training epoch on one rank, after `limit_train_batches`. Infinite if unknown.

        Creates the training loader if necessary.
        """
        num_batches = self.data.train().num_batches
        return math.inf if num_batches is None else num_batches

    def num_batches(self, kind: str) -> list[int | float]:
        """Return the number of batches of each loader of an evaluation on this rank; infinite if unknown.

        The list is empty before the loaders are created. `kind` is `"validate"`, `"test"` or `"predict"`.
        """
        data = self.data.evaluations.get(kind)
        return [] if data is None else data.num_batches

    def batch_indices(self, dataloader_idx: int) -> Iterator[list[int]] | None:
        """Return the data set indices of this rank's batches in the current evaluation; see `Run`.

        None if no evaluation runs, or if the user's own sampler or data set determines the indices.
        """
        data = self.data.evaluations.get(self.evaluation.kind or "")
        return None if data is None else data.loaders[dataloader_idx].indices()

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total number of optimizer steps of `fit` by `max_epochs` and `max_steps`.

        Infinite without `max_steps` if `max_epochs` is None or the length of an epoch is unknown. Learning-rate
        schedules in `configure_optimizers` may need it. Creates the training loader if necessary.
        """
        limits = self.settings.limits
        max_steps = math.inf if limits.max_steps == -1 else limits.max_steps
        if limits.max_epochs is None:
            return max_steps
        batches_per_epoch = self.num_training_batches
        if not math.isfinite(batches_per_epoch):
            return max_steps
        # The last group of an epoch may be smaller: 10 micro-batches in groups of 4 are 3 steps.
        steps_per_epoch = math.ceil(batches_per_epoch / self.settings.accumulate_grad_batches)
        return min(steps_per_epoch * limits.max_epochs, max_steps)

    def request_stop(self, reason: str, *, closes_epoch: bool = True) -> None:
        """End the run after the current step; see `Run.request_stop`."""
        self.loop.request_stop(reason, Stop.AND_CLOSE_EPOCH if closes_epoch else Stop.WITHIN_EPOCH)

    # Other ranks

    def broadcast(self, value: object, src: int = 0) -> Any:
        """Return the `value` of rank `src` on every rank. For small picklable objects on the host. Collective."""
        return self.engine.processes.broadcast_object(value, src)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self.engine.processes.barrier()

    def all_gather(self, data: object, sync_grads: bool = False) -> Any:
        """Gather tensors (in any containers) of all data-parallel ranks along a new first dimension. Collective."""
        self.engine.processes.meet("all_gather()")
        return map_tensors(lambda tensor: self.engine.data_ranks.all_gather(tensor, sync_grads), data)

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a task's tensor or of one sharded like it; see `Run.gather_tensor`."""
        return self.engine.state.gather_tensor(tensor)

    def cut_like(self, value: object, like: torch.Tensor) -> Any:
        """Return this rank's shard of a full `value`, sharded like the task's tensor `like`. Not collective."""
        return self.engine.state.shard_like(value, like)


def _check_depth(task: TaskModule) -> None:
    """Raise an error if the task's modules are nested too deeply for torch to visit them.

    Called before the engine visits them: an engine that fails there also fails when it closes.
    """
    try:
        for _ in task.modules():
            pass
    except RecursionError as error:
        raise too_deep(type(task).__name__) from error
