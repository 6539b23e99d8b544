"""Trial steps within a run. All state is restored afterwards, and callbacks and loggers are not called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError, TrainwrightError
from trainwright.core.host.memory import clear_device_cache, is_out_of_memory
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Run, Trial
from trainwright.core.state import Group, StepResult, TrainState
from trainwright.core.task import TaskModule, log_into, logging_into
from trainwright.data.combined import leaves_of
from trainwright.data.loader_options import LOADER_METHODS, Stage
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_values import without_ranks
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.phase import Phase
from trainwright.trainer import evaluation
from trainwright.trainer.configuration.lengths import Limits
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import TrainData
from trainwright.trainer.loop import FitLoop
from trainwright.trainer.run import StageRun
from trainwright.trainer.search.state_snapshot import StateSnapshot


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Outcome of a trial on one rank, for the exchange with the other ranks.

    Attributes:
        kind: `"fits"`, `"out of memory"`, or `"failed"` for any other error.
        reason: type and text of the error. Empty if the trial fits.
    """

    kind: Literal["fits", "out of memory", "failed"]
    reason: str = ""


class StageTrialSteps:
    """Implementation of trial steps within a run; see `Run.trial_steps` and `core.run.TrialSteps`.

    Each trial is a separate stage with the run's task and optimizers, without callbacks, loggers and saves. Weights,
    optimizers, generators and the task's attributes are copied to the host before it and restored after it, so that
    every trial starts from the same state.

    Args:
        run: the run, at a step boundary.
        show: sets the run that the Trainer's attributes describe.
        new_state: receives the training progress and returns a copy for a trial, as the Trainer's `state`.
        alone: run steps without the other ranks.
        remakes_loaders: create the run's loaders again after trials without errors.

    Attributes:
        _kind: kind of the loaders that the trials read.
        _engine: engine of the trials. `__enter__` sets it; with `alone`, it is an engine of one process. Before that,
            the run's own.
        _processes: the run's processes. The engine of a trial on a single rank has none.
        _stack: restores everything that `__enter__` has changed.
        _snapshot, _datamodule_attributes: state before the trials. `__enter__` takes them, and each trial ends by
            restoring them. `_datamodule_attributes` is None without a data module.
        _at_end: functions that `at_end` has received.
    """

    def __init__(
        self,
        run: StageRun,
        show: Callable[[StageRun], None],
        new_state: Callable[[TrainState], TrainState],
        *,
        alone: bool,
        remakes_loaders: bool,
    ) -> None:
        self._run = run
        self._show = show
        self._new_state = new_state
        self._alone = alone
        self._processes = run.engine.processes
        self._engine = run.engine
        self._remakes_loaders = remakes_loaders
        stage = run.running_stage
        self._kind: Stage = "train" if stage is None or stage == "fit" else stage
        self._stack = ExitStack()
        self._at_end: list[Callable[[], None]] = []
        self._snapshot = StateSnapshot()
        self._datamodule_attributes: dict[str, Any] | None = None

    def __enter__(self) -> StageTrialSteps:
        run = self._run
        if run.engine.phase is not Phase.BETWEEN_STEPS:
            raise ConfigurationError(
                "trial steps cannot run within a training step. Start them between two steps, for example in "
                "on_train_step_end."
            )
        if self._remakes_loaders and self._kind in run.data.sources.loaders:
            raise ConfigurationError(
                f"the {self._kind} loader was passed to the Trainer as an object, so its batch size cannot change. "
                f"Define {LOADER_METHODS[self._kind]}(self) in the task or in a data module, and create the loader "
                "with the attribute that holds the batch size."
            )
        with ExitStack() as stack:  # restores the state if a later line raises
            stack.enter_context(isolate_rng(run.engine.device))
            self._save_state(stack)
            self._engine = stack.enter_context(run.engine.trial(alone=self._alone))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        clear_device_cache(garbage_collection=True)
        self._attach(self._run)
        if kind is not None:
            return
        for action in self._at_end:
            action()
        if self._remakes_loaders:
            self._renew_loaders()

    @staticmethod
    def _attach(run: StageRun) -> None:
        """Make the steps of the run's engine call its hooks, and the task log into its metrics."""
        run.engine.attach(run.trainer, run.hooks.table, run.logs.metrics)
        log_into(run.task, run.logs.metrics)

    def _save_state(self, stack: ExitStack) -> None:
        """Take a snapshot of the state that steps change in place; `stack` restores it."""
        run = self._run
        schedulers = [config.scheduler for config in run.loop.schedules.configs]
        generators = _generators_of(run.data.sources.loaders)
        if run.data.datamodule is not None:
            self._datamodule_attributes = dict(vars(run.data.datamodule))
        self._snapshot = StateSnapshot(run.task, run.engine.optimizers, schedulers, generators)
        stack.callback(self._restore)
        for logger in run.settings.loggers:
            stack.callback(setattr, logger, "muted", logger.muted)
            logger.muted = True

    def _restore(self) -> None:
        """Restore the state that `_save_state` has copied. Called after each trial and at the end of the context."""
        self._snapshot.restore()
        if self._datamodule_attributes is not None:
            vars(self._run.data.datamodule).clear()
            vars(self._run.data.datamodule).update(self._datamodule_attributes)

    def _renew_loaders(self) -> None:
        """Create the run's loaders again, at the same position in the data. Collective if creating a loader is."""
        run = self._run
        state = run.state
        train_data = run.data.train_data
        run.data.forget()
        run.loop.validation = None
        if train_data is not None and run.running_stage == "fit":
            place = train_data.loader.position(state.batch_in_epoch) if state.batch_in_epoch else None
            run.data.train().begin_epoch(state.epoch, place)

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` after all state is restored, unless an error ended the trials; see `core.run.TrialSteps`."""
        self._at_end.append(action)

    def capacity(self) -> int | None:
        """Return the largest batch that the data can fill on every rank; see `core.run.TrialSteps`."""
        run = self._run
        kinds = [self._kind]
        if self._kind == "train" and run.data.has_validation:
            kinds.append("validate")
        num_samples_of_loaders = []
        for kind in kinds:
            loaders = run.data.sources.make(kind, run.task)
            for loader in leaves_of(getattr(loaders, "iterables", loaders)):  # those of a CombinedLoader
                # A validation set may be smaller than a batch, unless incomplete batches are dropped.
                limits_batch = kind == self._kind or getattr(loader, "drop_last", False)
                num_samples = _num_samples(loader)
                if limits_batch and num_samples is not None:
                    num_samples_of_loaders.append(num_samples)
        capacity_here = None
        if num_samples_of_loaders:
            capacity_here = min(num_samples_of_loaders) // run.engine.data_ranks.num_readers
        capacities = self._processes.gather_object(capacity_here)
        known_capacities = [capacity for capacity in capacities if capacity is not None]
        return min(known_capacities, default=None)

    def try_out(self, num_steps: int) -> Trial:
        """Run some steps of the current stage and return the outcome; see `core.run.TrialSteps`."""
        clear_device_cache(garbage_collection=True)
        failure: Exception | None = None
        batch_size: int | None = None
        try:
            with ExitStack() as cleanup:
                trial = self._begin(cleanup)
                batch_size = self._batch_size(trial)
                with without_ranks(trial.task):
                    self._run_steps(trial, num_steps)
            outcome = _Outcome("fits")
        except Exception as error:  # noqa: BLE001  # raised below, after the exchange that the other ranks wait for
            reason = f"{type(error).__name__}: {error}"
            if is_out_of_memory(error):
                outcome = _Outcome("out of memory", reason)
            else:
                outcome = _Outcome("failed", reason)
                failure = error
        self._forget()
        outcomes: list[_Outcome] = self._processes.gather_object(outcome)
        if failure is not None:
            raise failure
        for rank, outcome_of_rank in enumerate(outcomes):
            if outcome_of_rank.kind == "failed":
                raise TrainwrightError(f"rank {rank} failed during trial steps: {outcome_of_rank.reason}")
        for outcome_of_rank in outcomes:
            if outcome_of_rank.kind == "out of memory":
                return Trial(fits=False, batch_size=batch_size, reason=outcome_of_rank.reason)
        return Trial(fits=True, batch_size=batch_size, reason="")

    def _batch_size(self, trial: StageRun) -> int | None:
        """Return the batch size of a trial's new loader, None if unknown."""
        if self._kind == "train":
            return trial.data.train().loader.batch_size
        return trial.data.evaluation(self._kind).loaders[0].batch_size

    def _run_steps(self, trial: StageRun, num_steps: int) -> None:
        """Run training steps with validation, or the batches of another stage."""
        if self._kind == "train":
            self._train(trial, _Probe(num_steps, trial, validates=True))
        else:
            evaluation.evaluate(trial, self._kind, max_batches=num_steps)

    def train(self, num_steps: int, *, before_step: Callable[[int], None], after_step: Callable[[float], bool]) -> int:
        """Run training steps and read the loss of each; see `core.run.TrialSteps`."""

        def call_after_step(loss: float | torch.Tensor | None) -> bool:
            # The loss of a rank is weighted such that the mean over ranks is the mean over all data.
            loss_here = float("nan") if loss is None else float(loss)
            losses = self._processes.gather_object(loss_here)
            return after_step(sum(losses) / len(losses))

        try:
            with ExitStack() as cleanup:
                trial = self._begin(cleanup)
                probe = _Probe(num_steps, trial, before_step=before_step, after_step=call_after_step)
                self._train(trial, probe)
        finally:
            self._forget()
        return probe.done

    def _begin(self, cleanup: ExitStack) -> StageRun:
        """Set up and return a trial stage; `cleanup` tears it down."""
        run = self._run
        # The trial begins at the start of the current epoch.
        state = self._new_state(run.state)
        state.batch_in_epoch = 0
        state.step_in_epoch = 0
        state.samples_in_epoch = 0
        state.validation_owed = False
        state.epoch_done = False
        stage = run.running_stage
        sources = run.data.sources
        progress = run.progress.for_trial(state)
        trial = StageRun(
            run.trainer, _for_trial(run.settings), progress, stage, run.task, sources, self._engine, is_trial=True
        )
        trial.logs.exchange = None if self._alone else run.logs.exchange
        trial.hooks.table = HookTable((), run.task)
        cleanup.callback(partial(trial.data.close, keep_state=False))
        self._show(trial)
        cleanup.callback(self._show, run)
        self._attach(trial)
        return trial

    def _train(self, trial: StageRun, probe: _Probe) -> None:
        """Run training steps until the probe ends them."""
        trial.hooks.table = HookTable((probe,), trial.task)
        self._attach(trial)
        FitLoop(trial).run()

    def _forget(self) -> None:
        """Discard gradients and restore all state for the next trial."""
        self._engine.step.discard_gradients()
        self._restore()
        clear_device_cache(garbage_collection=True)


class _Probe(Callback):
    """Callback of a trial that calls functions before and after each step, and ends the trial after `num_steps`.

    Args:
        num_steps: maximum number of steps.
        trial: the stage.
        before_step: called with the 0-based index of each step.
        after_step: called with each loss; True ends the trial.
        validates: run `num_steps` validation batches after the steps.

    Attributes:
        done: number of completed steps of the trial.
        _done_at_epoch_start: value of `done` at the start of the current epoch.
    """

    def __init__(
        self,
        num_steps: int,
        trial: StageRun,
        *,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[Any], bool] | None = None,
        validates: bool = False,
    ) -> None:
        self._num_steps = num_steps
        self._trial = trial
        self._before = before_step
        self._after = after_step
        self._validates = validates and trial.data.has_validation
        self._done_at_epoch_start = 0
        self.done = 0

    def on_train_epoch_start(self, trainer: Run, task: object) -> None:
        self._done_at_epoch_start = self.done

    def on_train_step_start(self, trainer: Run, task: object, group: Group) -> None:
        if self._before is not None:
            self._before(self.done)

    def on_train_step_end(self, trainer: Run, task: object, result: StepResult) -> None:
        self.done += 1
        ends = self._after is not None and self._after(result.loss)
        if ends or self.done == self._num_steps:
            self._end()

    def on_train_epoch_end(self, trainer: Run, task: object) -> None:
        epoch_had_no_step = self.done == self._done_at_epoch_start
        if epoch_had_no_step:  # no later epoch would have a step either
            self._end()
        if self._validates and trainer.should_stop:
            evaluation.evaluate(self._trial, "validate", max_batches=self._num_steps)

    def _end(self) -> None:
        self._trial.request_stop("all trial steps have run", closes_epoch=False)


def _for_trial(settings: Settings) -> Settings:
    """Return settings without limits, validation, reloading of loaders and checks for finite values."""
    return replace(
        settings,
        arguments=replace(settings.arguments, on_nonfinite=None, reload_dataloaders_every_n_epochs=0),
        limits=Limits(max_epochs=None, max_steps=-1, others=(), min_epochs=0, min_steps=0),
        val_check_interval=Duration(sys.maxsize, "steps"),  # never due
    )


def _num_samples(loader: object) -> int | None:
    """Return the number of samples in a loader's data set; None if unknown."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        return None
    return len(dataset)


def _generators_of(loaders_by_kind: dict[str, Any]) -> list[Any]:
    """Return the random number generators of user-created loaders. Reading an epoch draws from them."""
    generators = []
    for loaders in loaders_by_kind.values():
        for loader in leaves_of(getattr(loaders, "iterables", loaders)):
            for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                inner_sampler = getattr(part, "sampler", None)  # for example the sampler of a BatchSampler
                for owner in (part, inner_sampler):
                    generator = getattr(owner, "generator", None)
                    if generator is not None:
                        generators.append(generator)
    return generators


def pass_training_data(task: TaskModule, engine: Engine, data: TrainData, state: TrainState) -> None:
    """Run `training_step` on this rank's batches of one epoch; see `Run.pass_training_data`.

    Args:
        task: the task.
        engine: computes the steps.
        data: the training data, between two epochs or after the last one. The next epoch calls `begin_epoch` again.
        state: the training progress.
    """
    unread = MetricBuffer()  # receives values that the task logs here, which are discarded
    unread.begin("train")
    unread.in_step = True
    with logging_into(task, unread), isolate_rng(engine.device), torch.no_grad():
        data.begin_epoch(state.epoch)
        for group in data.groups(state, 1):
            for idx, batch in enumerate(group.batches, start=group.first_idx):
                unread.batch = engine.step.to_device(batch)
                engine.step.evaluate("training_step", unread.batch, idx)
