"""Around the loop: start the processes, set a stage up, run it, and tear it down whatever happened.

A stage (`fit`, `validate`, `test`, `predict`) is: check everything that can be checked; start other processes if that
is this Trainer's task; then, on every process: join the others, prepare data, build the model and its optimizers, load
a checkpoint, run the body, and undo it all.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback, log_through
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.duration import Duration, Interval
from trainwright.core.errors import ConfigurationError, Preempted
from trainwright.core.process import describe, detect, is_interactive, started_by_trainer
from trainwright.core.run import SaveRequest, SchedulerConfig, Stage
from trainwright.core.state import TrainState
from trainwright.core.task import TaskModule
from trainwright.data import DataModule
from trainwright.data.workers import Workers
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_ranks import Exchange
from trainwright.strategies.devices import kernel_choice
from trainwright.strategies.processes.launcher import run_in_processes
from trainwright.trainer import checkpointing, ending
from trainwright.trainer.agreement import Agreement
from trainwright.trainer.assembly import with_task_callbacks
from trainwright.trainer.checks import (
    check_callbacks,
    check_datamodule,
    check_needs,
    check_storage_options,
    check_task,
    has_step,
)
from trainwright.trainer.job import Attempt, this_attempt
from trainwright.trainer.load_request import LoadRequest, check_early
from trainwright.trainer.loaders import EvaluationData, Ranks, Sources, TrainData
from trainwright.trainer.logger_start import start_loggers
from trainwright.trainer.optimization import Schedules, parse_optimizers, warn_of_joint_steps
from trainwright.trainer.preemption import Preemption, listen
from trainwright.trainer.rollback import Rollbacks
from trainwright.trainer.run_state import RunState
from trainwright.trainer.safe_point import SafePoint
from trainwright.trainer.schedule import EndOfFit, ValidationSchedule
from trainwright.trainer.settings import Settings

Body = Callable[..., Any]
_KERNEL_ARGUMENTS = ("benchmark", "deterministic", "detect_anomaly")
_AGREE_EVERY_N_STEPS = 10  # at least so often ranks tell each other of their wishes


class StageRunner(Rollbacks):
    """Owns what a Trainer holds between and during stages (see `RunFacts`); `Trainer` adds the loop."""

    def __init__(self, settings: Settings) -> None:
        arguments = settings.arguments
        self.settings = settings
        self.state: TrainState = RunState(self)
        self.verb, self.status = None, "initializing"
        self.loggers: list[Any] = settings.loggers
        self.default_root_dir: Path = settings.root
        self.accumulate_grad_batches: int = arguments["accumulate_grad_batches"]
        self.log_every_n_steps: int = arguments["log_every_n_steps"] or 50
        self.num_sanity_val_steps: int = 2 if arguments["num_sanity_val_steps"] is None else arguments[
            "num_sanity_val_steps"
        ]  # fmt: skip
        self.max_epochs = settings.limits.max_epochs
        self.max_steps = settings.limits.max_steps
        self.inference_mode: bool = arguments["inference_mode"]
        self.fast_dev_run: bool | int = arguments["fast_dev_run"]
        self.barebones: bool = arguments["barebones"]
        self.clip = settings.clip
        self.run_id = secrets.token_hex(8)
        self.seed: int | None = arguments["seed"]
        self.interrupted = False
        self.on_nonfinite = arguments["on_nonfinite"]
        self._forget_rollbacks(arguments["max_rollbacks"], arguments["max_skipped"])
        self._task: TaskModule | None = None
        self._forget_metrics()
        self._forget_stage()
        if settings.preemption_grace_s is not None:
            listen(is_main=settings.selection.topology.rank == 0, requeue=arguments["auto_requeue"])

    def _forget_stage(self) -> None:
        """Drop what belongs to one stage."""
        self.strategy = copy.copy(self.settings.selection.strategy)
        self.callbacks: list[Callback] = list(self.settings.callbacks)
        self.hooks = HookTable()
        self._is_set_up = False
        self.metrics = MetricBuffer()
        self.schedules = Schedules([], self._task)  # no schedules, no task needed
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.datamodule: DataModule | None = None
        self.stage: Stage | None = None
        self.sanity_checking = self.should_stop = False
        self.trains = self.resumed = False
        self.epoch_closes = True
        self.count_tokens = self._samples_decide = False
        self.attempt = Attempt()
        self.last_result = self.stop_reason = None
        self.quiet_groups = 0
        self.at_step_boundary, self.stepping = True, False
        self.exchange: Exchange | None = None
        self.safe_point = SafePoint(self, self.settings.arguments)
        self.num_eval_batches: list[int | float] = []
        self.evaluating: str | None = None
        self.eval_batches_done = 0
        self._sources = Sources({})
        self._train_data: TrainData | None = None
        self._eval_data: dict[str, EvaluationData] = {}
        self.workers = Workers()
        self._validation: ValidationSchedule | None = None
        self._position: dict[str, Any] | None = None
        self._to_restore: list[Callable[[], None]] = []
        self.restore_after_fit_start = None
        self._origin: Path | None = None
        self.ckpt_path: str | None = None
        self._stop_agreed = False
        self._validated_at, self._group_end, self._group = -1, None, None
        self.preemption = Preemption(self.settings.preemption_grace_s)
        self._clock = time.perf_counter()
        self.logging: LoggerGroup | None = None

    def _forget_metrics(self) -> None:
        self._callback_metrics: dict[str, float] = {}
        self._logged_metrics: dict[str, float] = {}
        self._progress_bar_metrics: dict[str, float] = {}

    # Starting a stage

    def _start(self, stage: Stage, task: Any, sources: Sources, load: LoadRequest, body: Body) -> Any:
        """Check, start other processes if need be, run the stage; returns what the body returned on this process."""
        self._check(stage, task, sources, load)
        self._task = task
        self._forget_stage()
        self._forget_metrics()
        self.interrupted = False
        self.verb, self.status = stage, "running"
        work = partial(self._run_stage, stage, sources, load, body)
        selection = self.settings.selection
        try:
            if selection.starts_processes and not started_by_trainer():
                involved = [task, sources.datamodule, *sources.given.values(), *self.callbacks, *self.loggers]
                result = run_in_processes(work, self.strategy.num_processes, involved)
            else:
                result = work()
            self.status = "finished"
            return result
        except KeyboardInterrupt:
            self.interrupted = True
            if (self.settings.arguments["on_interrupt"] or ("return" if is_interactive() else "raise")) == "raise":
                raise
            return None
        finally:
            if self.status == "running":
                self.status = "interrupted"

    def _check(self, stage: Stage, task: Any, sources: Sources, load: LoadRequest) -> None:
        clips, policy, counts = self.clip is not None, self.on_nonfinite, "tokens" in self.settings.units
        check_task(task, stage, self.accumulate_grad_batches, clips=clips, on_nonfinite=policy, counts_tokens=counts)
        check_callbacks(self.settings.callbacks, stage)
        check_needs(self.settings.callbacks, self.strategy, task if stage == "fit" else None)
        if sources.datamodule is not None:
            check_datamodule(sources.datamodule, stage)
        kind = "train" if stage == "fit" else stage
        if not sources.has(kind, task):
            sources.make(kind, task)  # raises, saying what to pass
        sources.check_lengths(stage)
        check_early(load, stage)

    def _run_stage(self, stage: Stage, sources: Sources, load: LoadRequest, body: Body) -> Any:
        """One stage on one process."""
        self.stage, self._sources = stage, sources
        self.datamodule = sources.datamodule
        status = "failed"
        try:
            with kernel_choice(*(self.settings.arguments[name] for name in _KERNEL_ARGUMENTS)):
                self._join()
                with self.strategy.processes.watched(self.position):
                    self._set_up(stage, load)
                    with self.preemption.watching(self):
                        result = body(self)
                    self.strategy.make_whole()
                    self.strategy.processes.barrier()  # nobody leaves while another still talks to it
            status = "success"
            return result
        except BaseException as error:
            self.interrupted = isinstance(error, KeyboardInterrupt)
            if self.interrupted or isinstance(error, Preempted):
                status = "interrupted"
            clearer = ending.tell_about(self, error)
            if clearer is not None:
                raise clearer from error
            raise
        finally:
            ending.tear_down(self, stage, status)

    def _join(self) -> None:
        selection = self.settings.selection
        topology = detect("torchrun") if started_by_trainer() else selection.topology
        self.strategy.setup(topology)
        processes = self.strategy.processes
        if processes.world_size > 1:
            self.exchange = self.strategy.gather_by_data_rank
            self.run_id = processes.broadcast_object(self.run_id)
        if self.seed is None:
            self.seed = processes.broadcast_object(torch.initial_seed())
        if processes.world_size > 1 and self.is_global_zero:
            self.print(f"trainwright: {describe(topology)}")
        self.agreement = Agreement(processes, _AGREE_EVERY_N_STEPS)
        if self.stage == "fit":
            self.attempt = this_attempt(processes)

    # Setting up, in the order that hooks are promised

    def _set_up(self, stage: Stage, load: LoadRequest) -> None:
        task = self.task
        task._run = self
        self.callbacks = [] if self.rehearsing else with_task_callbacks(self.callbacks, task)
        log_through(task, self.callbacks)
        check_callbacks(self.callbacks, stage)
        check_needs(self.callbacks, self.strategy)  # those of the task too
        self.hooks = HookTable(self.callbacks, task)
        self._is_set_up = True
        self._prepare_data(stage)
        make = self._make_optimizers if stage == "fit" else None
        opened = checkpointing.open_for(self, stage, load)
        if opened is not None:
            self.strategy.when_built = partial(opened.show, self)
        self.optimizers = self.strategy.prepare(task, make)
        self.schedules = Schedules(self.lr_scheduler_configs, task)
        # A user may raise the bounds between two fits.
        self._end = EndOfFit(replace(self.settings.limits, max_epochs=self.max_epochs, max_steps=self.max_steps))
        self.count_tokens |= "tokens" in self.settings.units
        self._samples_decide = "samples" in self.settings.units
        self.logging = LoggerGroup(self.loggers, is_main=self.is_global_zero and not self.rehearsing)
        if opened is not None:
            self._load(stage, opened)
        start_loggers(self, stage, hyperparameters=self.settings.arguments["enable_autolog_hparams"])
        self.strategy.attach(self, self.hooks, self.metrics)
        task._sink = self.metrics
        if stage == "fit":
            self._begin_fit()

    def _prepare_data(self, stage: Stage) -> None:
        task, data = self.task, self.datamodule
        if data is not None:
            data.trainer = self
        owners = [owner for owner in (data, task) if owner is not None]
        for owner in owners:
            per_node = getattr(owner, "prepare_data_per_node", True)
            if self.strategy.processes.local_rank == 0 if per_node else self.is_global_zero:
                owner.prepare_data()
        self.strategy.processes.barrier()
        if data is not None:
            data.setup(stage)
        self.fire("setup", stage)
        task.setup(stage)

    def _make_optimizers(self) -> list[Optimizer]:
        optimizers, self.lr_scheduler_configs = parse_optimizers(
            self.task.configure_optimizers(), type(self.task).__name__
        )
        warn_of_joint_steps(self.task, len(optimizers))
        return optimizers

    def _load(self, stage: Stage, opened: checkpointing.Opened) -> None:
        self.ckpt_path = str(opened.path)
        if not opened.request.resumes(stage):
            load_weights = checkpointing.begin_from_weights if stage == "fit" else checkpointing.restore_weights
            return load_weights(self, opened)
        self.enter_checkpoint(opened)
        self.safe_point.adopt(opened.path)
        self.resumed = True
        self._origin = opened.path

    def _begin_fit(self) -> None:
        """Align every interval with where the run stands."""
        self.agreement.begin(self.state.step)
        self.log_every = Interval(Duration(self.log_every_n_steps, "steps"))
        self.log_every.align(self.state)
        self._validation = self._group_end = None
        self.trains = True
        self.safe_point.prepare()

    @property
    def validation(self) -> ValidationSchedule:
        """When to validate; known once the training data is."""
        if self._validation is None:
            self._validation = ValidationSchedule(
                self.settings.val_check_interval,
                self.settings.arguments["check_val_every_n_epoch"],
                self.train_data().num_batches,
            )
        return self._validation

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a stage, so that a Trainer can be sent to another process before one."""
        blank = object.__new__(type(self))
        vars(blank).update(vars(self))
        blank._forget_stage()
        blank.safe_point = None  # type: ignore[assignment]  # made anew by __setstate__
        return dict(vars(blank))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.state = RunState(self, self.state)
        self.safe_point = SafePoint(self, self.settings.arguments)

    # Data

    def _ranks(self) -> Ranks:
        assert self.seed is not None  # chosen when the processes joined
        return Ranks.of(self.settings.arguments, self.strategy, self.seed, self.workers)

    def train_data(self) -> TrainData:
        """The prepared training data; made at the first asking."""
        if self._train_data is None:
            arguments = self.settings.arguments
            self._train_data = TrainData(
                self._sources.make("train", self.task),
                self._ranks(),
                limit=self.settings.limit_batches["train"],
                overfit=arguments["overfit_batches"],
            )
            place = self._position
            if place is not None:
                self._train_data.check_resume(place, self.strategy.dp_size)
            self._train_data.begin_epoch(self.state.epoch, place and place["position"])
        return self._train_data

    def evaluation_data(self, kind: str) -> EvaluationData:
        data = self._eval_data.get(kind)
        if data is None:
            loaders = self._sources.make(kind, self.task)
            limit = self.settings.limit_batches[kind]
            data = self._eval_data[kind] = EvaluationData(loaders, kind, self._ranks(), limit=limit)
        return data

    @property
    def has_validation(self) -> bool:
        """Whether `fit` validates at all: a validation_step, a loader, and a limit above 0."""
        limit = self.settings.limit_batches["validate"]
        return (
            has_step(self.task, "validation_step")
            and self._sources.has("validate", self.task)
            and (limit is None or limit > 0)
        )

    def _reload_loaders(self) -> None:
        every = self.settings.arguments["reload_dataloaders_every_n_epochs"]
        if every and self.state.epoch % every == 0:
            self._train_data = None
            self._validation = None  # its interval may be a fraction of the new loader
            self._eval_data.clear()

    def _take_position(self) -> Mapping[str, int] | None:
        place, data = self._position, self.train_data()
        self._position = None
        if place is None:
            return None
        data.load_place(place, self.strategy.dp_rank, self.strategy.dp_size)
        found: Mapping[str, int] | None = place["position"]
        if found is not None:
            self.state.batch_in_epoch = found["batch"]
        return found

    def data_state(self) -> dict[str, Any]:
        """Return the place in the training data, for a checkpoint; the same on every rank."""
        return {} if self._train_data is None else self._train_data.state_dict(self.state)

    def loader_state(self) -> dict[str, Any] | None:
        """Return the state of this rank's training loader; None when it keeps none of its own."""
        data = self._train_data
        return None if data is None or not data.loader.stateful else data.loader.state_dict()

    def load_data_state(self, saved: dict[str, Any], seed: int | None) -> None:
        """Take back what `data_state` returned; used by the next epoch."""
        self.seed = seed
        self._train_data = None  # made anew with the run's own seed
        self._position = dict(saved) or None

    def _restore_last(self) -> None:
        to_restore, self._to_restore = self._to_restore, []
        for restore in to_restore:
            restore()

    # Wishes

    def at_safe_point(self, action: Callable[[], None]) -> None:
        """Call `action` once, at the end of the present step; see `Run.at_safe_point`."""
        self.safe_point.add_action(action)
        self.quiet_groups = 0

    def request_save(self, request: SaveRequest) -> None:
        """Ask for a checkpoint at the next safe point. Every rank must ask alike."""
        self.safe_point.add_save(request)
        self.quiet_groups = 0

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint now, or after a stage. Collective; not within a training step; returns once it stands.

        Optimizers and progress belong to `fit`: after another stage it holds weights only, with a warning. After a fit
        that has ended within a step it is one of the step before, unless weights were changing just then.

        Args:
            filepath: where; with a URL it is written below `default_root_dir/checkpoints` and uploaded from there.
            weights_only: leave the optimizer, progress and generators out. Default: False.
            storage_options: for fsspec, such as credentials, where `filepath` is a URL.

        Returns:
            Its folder on this machine.

        Raises:
            ConfigurationError: no task has been trained yet, a step is half done, or options for a path that is no URL.
            OSError, CheckpointError: it, or one before it, could not be written.
        """
        if not self._is_set_up or not (self.at_step_boundary or self.stage is None):
            raise ConfigurationError("save_checkpoint works between two steps of a fit, and after it.")
        if (why := checkpointing.half_done(self)) is not None:
            raise ConfigurationError(f"{filepath} cannot be written: the fit has ended while {why}.")
        check_storage_options(filepath, storage_options)
        return self.safe_point.save_now(filepath, weights_only=bool(weights_only), storage_options=storage_options)

    def remote_names(self, url: str) -> list[str]:
        """Return the names of what lies below a remote folder; see `Run.remote_names`."""
        return self.safe_point.remote_names(url)

    def emergency_save(self, request: SaveRequest) -> None:
        """Write a checkpoint from an exception path, as well as one process can; see `Run.emergency_save`."""
        self.safe_point.emergency_save(request)

    def request_stop(self, reason: str) -> None:
        """End the run after the present step (respecting min_epochs and min_steps). Every rank must ask alike."""
        self.stop_reason = reason
        self.should_stop = self._stop_agreed = True

    @property
    def should_stop(self) -> bool:
        """Set it to True to end `fit` after the present step; ranks agree on it within a few steps."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, wish: bool) -> None:
        self._should_stop = wish
        self.quiet_groups = 0
