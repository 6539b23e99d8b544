"""Trainer: the loop on one page, and the stages around it.

Read `_fit`, `_train_epoch` and `_end_step` for what happens in a run and in which order. What they are made of lies
beside this file: `settings` (arguments), `checks` (of the task), `stage` (setting up and tearing down), `loaders` (the
data), `schedule` (when to validate and to end), `optimization` (optimizers and learning rates), `evaluation`,
`checkpointing`, `non_finite` (losses that are no numbers), `rollback`, `safe_point` (what callbacks ask for),
`agreement` and `preemption` (what ranks tell each other, signals), `facts` (what callbacks may know). How a step is
computed is the strategy's.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback
from trainwright.checkpoint.newest import OnDamaged
from trainwright.core.duration import Duration
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.task import TaskModule
from trainwright.core.tree import batch_size
from trainwright.data import DataModule
from trainwright.loggers.logger import Logger
from trainwright.strategies.strategy import Strategy
from trainwright.trainer.checks import one_task
from trainwright.trainer.counting import count_samples, count_tokens
from trainwright.trainer.lightning_names import LightningNames
from trainwright.trainer.load_request import CkptPath, Default, LoadRequest
from trainwright.trainer.loaders import Sources
from trainwright.trainer.non_finite import step_function
from trainwright.trainer.notices import Notices
from trainwright.trainer.settings import configure


class Trainer(LightningNames):
    """Trains, evaluates and predicts with a task.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"` or a vendor's name.
        strategy: `"auto"`, a name (see `trainwright.strategies.STRATEGIES`) or a Strategy object.
        devices: how many processes on this node, one device each: a count, indices, `-1` or `"auto"`. More than one
            without a launcher: the Trainer starts the others.
        num_nodes: nodes of the run; more than one needs a launcher.
        precision: `"32-true"` (default), `"64-true"`, `"16-true"`, `"bf16-true"`, `"16-mixed"`, `"bf16-mixed"`.
        logger: True (TensorBoard), False, a name, a Logger or several.
        callbacks: a callback or several.
        fast_dev_run: run this many batches (True: 1) of everything once, without loggers and checkpoints.
        max_epochs, max_steps, max_time, max_samples, max_tokens: whichever is reached first ends `fit`. Steps are
            optimizer steps; samples and tokens are counted over all ranks. 1,000 epochs when none is given.
        min_epochs, min_steps: a wish to stop early waits for both.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number of batches, or a
            fraction of them (1.0: all).
        overfit_batches: train and validate on this much of the data, unshuffled.
        val_check_interval: validate after every so many batches (int), fraction of an epoch (float), or length with a
            unit (`"500 steps"`, a Duration, `{"minutes": 5}`).
        check_val_every_n_epoch: validate in every so many epochs; None: `val_check_interval` counts over epochs.
        num_sanity_val_steps: validation batches tried before training; -1: all. 2 unless told.
        log_every_n_steps: metrics are read from the device and handed to loggers after every so many steps.
        enable_checkpointing, enable_progress_bar, enable_model_summary: switch a default callback off (or on).
        accumulate_grad_batches: micro-batches in one optimizer step.
        gradient_clip_val, gradient_clip_algorithm: clip by total `"norm"` (default) or by `"value"`.
        deterministic: True: only repeatable kernels; `"warn"`: warn where there is none.
        benchmark: let the device's library time its kernels first.
        inference_mode: evaluate under `torch.inference_mode` rather than `torch.no_grad`.
        use_distributed_sampler: deal the data to ranks; False: your loaders do it themselves.
        per_sample_rng: what a data set draws for a sample depends on (seed, epoch, its index) alone, whatever the
            number of ranks and loader workers; costs some 20 µs a sample.
        detect_anomaly: find the operation behind a NaN in backward; slow.
        barebones: leave out everything that is not training, for measuring.
        sync_batchnorm: BatchNorm statistics over all processes.
        reload_dataloaders_every_n_epochs: ask for the loaders anew after every so many epochs; 0: never.
        default_root_dir: where a run's files go; the present folder unless told.
        enable_autolog_hparams: hand hyper-parameters to the loggers when a fit starts. Default: True.
        profiler, plugins, model_registry: accepted as Lightning has them by default, None (for `plugins` also an empty
            list); anything else is an error that says what does the same.
        compile: True, a mode, or a dict of `torch.compile`'s arguments: compile the step.
        launcher: `"auto"`, `"torchrun"`, `"slurm"`, `"mpi"` or `"none"`: whose variables say which rank this is.
        uneven_batches: what happens when ranks have different numbers of batches: `"pad"`, `"stop"` or `"error"`.
        on_nonfinite: what to do when a loss or gradient is NaN or infinite on any rank, before weights change:
            `"raise"`, `"skip"` the group, or `"rollback"` to the newest checkpoint and leave it out. None: nothing is
            looked at; the others read one flag from the device in each step.
        max_rollbacks: how often a run may go back to a checkpoint.
        max_skipped: how many groups may be skipped one after the other; None: any number. Default: 100.
        seed: of the order of the data; torch's initial seed unless told.
        async_save: checkpoints that callbacks ask for are copied to host memory and written while training goes on, at
            the cost of one copy of the state in memory; False: training waits until they are on the disk.
        on_save_error: what to do when one of them cannot be written (a full disk): `"raise"`, at the next save or at
            the end of the fit; or `"warn"` and train on. The earlier ones are whole in any case.
        preemption_grace: how long (seconds, or `"2 min"`) the machine leaves a process that it has sent SIGTERM or
            SIGUSR1. A `fit` then saves after the present step, if a save is known to take less, and every rank exits
            with 143. None: signals are left alone.
        auto_requeue: have Slurm run the job again when it sent SIGUSR1, as `sbatch --signal=USR1@120` makes it do.
        on_interrupt: what follows once Ctrl-C has ended a stage in order, with `trainer.interrupted` set: `"return"`
            (default at a prompt or in a notebook) or `"raise"` (default in a script).

    Raises:
        ConfigurationError: an argument is unknown, impossible, or contradicts another. Nothing has been touched then.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Logger | Iterable[Logger] | bool | str | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | datetime.timedelta | dict[str, int] | None = None,
        max_samples: int | None = None,
        max_tokens: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | Duration | datetime.timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        per_sample_rng: bool = False,
        profiler: str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: list[Any] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        compile: bool | str | dict[str, Any] = False,
        launcher: str = "auto",
        uneven_batches: Literal["pad", "stop", "error"] = "pad",
        on_nonfinite: Literal["raise", "skip", "rollback"] | None = None,
        max_rollbacks: int = 3,
        max_skipped: int | None = 100,
        seed: int | None = None,
        async_save: bool = True,
        on_save_error: Literal["raise", "warn"] = "raise",
        preemption_grace: float | str | None = 30.0,
        auto_requeue: bool = True,
        on_interrupt: Literal["return", "raise"] | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(configure(locals()))

    # The four stages

    def fit(
        self,
        task: TaskModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
        load_weights_only: bool = False,
        strict: bool | None = None,
        allow_missing: Iterable[str] = (),
        on_damaged: OnDamaged | None = None,
    ) -> None:
        """Train a task. Collective: every process of the run calls it.

        Args:
            task, model: what to train; two names of one argument.
            train_dataloaders: a loader, several in a list or dict (combined), or a data module.
            val_dataloaders: one validation loader or several.
            datamodule: instead of loaders.
            ckpt_path: a checkpoint to resume from: its path, `"last"` or `"best"`.
            weights_only: accepted for compatibility: Lightning's word about unpickling, and nothing is unpickled here.
            load_weights_only: take its weights alone, and begin at step 0 with new optimizers. Default: False.
            strict: whether weights that are missing or left over are an error; the task's `strict_loading` unless told.
            allow_missing: what the checkpoint may lack; it starts anew, with a warning: `"optimizer"`, `"rng"`,
                `"schedulers"`, `"scaler"`, `"datamodule"`, `"callbacks"`, `"loggers"`.
            on_damaged: `"error"`, or `"fall_back"` to the newest valid one before it, with a warning. Unless told,
                `"last"` falls back and everything else is an error.

        Raises:
            ConfigurationError: the task or its data cannot be trained.
            FileNotFoundError, CheckpointError: the checkpoint is not there, or does not fit.
        """
        task = one_task("fit", task, model)
        sources = Sources.of("fit", datamodule, train=train_dataloaders, validate=val_dataloaders)
        load = LoadRequest.checked(
            ckpt_path, weights_only=load_weights_only, strict=strict, allow_missing=allow_missing, on_damaged=on_damaged
        )
        self._start("fit", task, sources, load, partial(Trainer._fit))

    def validate(
        self,
        task: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: CkptPath = Default.BEST,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
    ) -> list[dict[str, float]]:
        """Validate a task (the last one unless given) and return its metrics, one dict per loader. Collective.

        `ckpt_path`: a checkpoint to take weights from (a path, `"last"`, `"best"`), or None: those that the task has.
        Default: if no task is given and a ModelCheckpoint has a `monitor`, its best one, which a line says; else None.
        `model` is another name of `task`; `weights_only` is accepted for compatibility and changes nothing.
        """
        return self._evaluate(
            "validate", one_task("validate", task, model), dataloaders, ckpt_path, verbose, datamodule
        )

    def test(
        self,
        task: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: CkptPath = Default.BEST,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
    ) -> list[dict[str, float]]:
        """Test a task (the last one unless given) and return its metrics, one dict per loader. Collective.

        The arguments are those of `validate`.
        """
        return self._evaluate("test", one_task("test", task, model), dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        task: TaskModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: CkptPath = Default.BEST,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
    ) -> list[Any] | None:
        """Predict with a task (the last one unless given). Collective. The arguments are those of `validate`.

        Returns:
            What `predict_step` returned for each batch, over all ranks and in the data's order; for several loaders a
            list of such lists. None unless `return_predictions`: then nothing is kept.
        """
        task = one_task("predict", task, model)
        load = LoadRequest.for_evaluation(ckpt_path, task_given=task is not None)
        task = task if task is not None else self.task
        sources = Sources.of("predict", datamodule, predict=dataloaders)
        found: list[Any] | None = self._start(
            "predict", task, sources, load, partial(Trainer._predict, keep=return_predictions)
        )
        return found

    def _evaluate(
        self, kind: Literal["validate", "test"], task: Any, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        load = LoadRequest.for_evaluation(ckpt_path, task_given=task is not None)
        task = task if task is not None else self.task
        sources = Sources.of(kind, datamodule, **{kind: loaders})
        found = self._start(kind, task, sources, load, partial(Trainer._run_evaluation, kind=kind, verbose=verbose))
        return found or []

    # The loop

    def _fit(self) -> None:
        """A whole run: sanity check, epochs until a bound, a wish or a signal ends it."""
        self.notices = Notices(is_main=self.is_global_zero)
        self.fire("on_fit_start")
        self.finish_restoring()
        self._sanity_check()
        self.train_data()
        self.fire("on_train_start")
        self._clock = time.perf_counter()
        if self.state.batch_in_epoch == 0:
            self._restore_last()
        self._agree()
        if self._end.reached(self.state):
            self.print(f"trainwright: nothing is left to train: {self._end.reached_by(self.state)}. Raise it to go on.")
        while not self._is_over():
            self.with_rollbacks(self._train_epoch)
        self.fire("on_train_end")
        if self.log_every.left(self.state) < self.log_every_n_steps:
            self._flush_step()  # what steps have logged since the last interval; a skipped group is none
        self._settle()
        self.safe_point.finish()  # every checkpoint is on the disk, or this raises
        self.fire("on_fit_end")

    def _train_epoch(self) -> None:
        """One epoch, or what is left of it: a group of micro-batches after the other, each one optimizer step."""
        state, hooks, strategy, task = self.state, self.hooks, self.strategy, self.task
        groups = self._begin_epoch()
        if state.validation_owed:
            self._validate()
        forward_backward = step_function(self)  # the strategy's own, unless something is to be checked or left out
        closed = True
        try:
            for group in groups:
                self._group, self.at_step_boundary = group, False
                for hook in hooks.on_train_step_start:
                    hook(self, task, group)
                loss = forward_backward(group)  # move, autocast, weigh, accumulate, sync
                for hook in hooks.on_before_optimizer_step:
                    for optimizer in self._optimizers_of(loss):
                        hook(self, task, optimizer)
                self.stepping = True
                norm = None if loss is None else strategy.optimizer_step(self.clip)  # clip, step, free gradients
                self._advance(group, loss is not None or strategy.stepped_by_hand)
                self.at_step_boundary, self.stepping = True, False  # from here on the step is done
                self.last_result = loss, norm
                for hook in hooks.on_train_batch_end:
                    hook(self, task, group.last_output, group.last_batch, state.batch_in_epoch - 1)
                for hook in hooks.on_train_step_end:
                    hook(self, task, self.last_step)
                closed = group.is_last
                self.quiet_groups -= 1
                if (closed or self.quiet_groups < 0) and self._end_step(group):
                    break
        except SkipRestOfEpoch:
            self.metrics.batch = None
            strategy.discard_gradients()
            self.schedules.after_epoch(state.epoch)
            self.at_step_boundary = closed = True
        self._end_epoch(closed)
        self._group = None

    def _end_step(self, group: Group) -> bool:
        """What may follow a step: validation, a flush of metrics, checkpoints. Returns whether the epoch ends here."""
        state = self.state
        self._read_clock()
        if self._validates and self.validation.due(state, len(group.batches), group.is_last):
            self._validate()
        if self.log_every.due(state):
            self._flush_step()  # the only host sync
        if not state.step_in_epoch and self.task.automatic_optimization and not self.skipped_batches:
            self.notices.nothing_trained(state, type(self.task).__name__, epoch_is_over=group.is_last)
        ends = group.is_last or self._must_stop()
        if not ends and self.safe_point.waiting:
            self._settle()
            ends = self._must_stop() if self.exchange is None else self._heeds_wish()  # an action may have asked for it
        if self.preemption.agreed and not ends:
            self._leave()
        self.quiet_groups = self._groups_until_something_is_due() - 1
        if self.preemption.signal:  # it may have come meanwhile
            self.quiet_groups = 0
        return ends

    def _groups_until_something_is_due(self) -> int:
        """Return after how many groups `_end_step` must look again; a wish sets `quiet_groups` to 0 before that."""
        state = self.state
        if self.should_stop or self._end.asks_every_step:
            return 1
        nearest = min(self.log_every.left(state), self._end.steps_left(state))
        if self._validates:
            nearest = min(nearest, self.validation.groups_left(state, self.accumulate_grad_batches))
        if self.exchange is not None:
            nearest = min(nearest, self.agreement.left(state.step))
        return int(nearest)

    def _begin_epoch(self) -> Iterable[Group]:
        data, state = self.train_data(), self.state
        self._group_end = None
        data.begin_epoch(state.epoch, self._take_position())
        self.metrics.begin("train")
        self.safe_point.finish_copy()  # callbacks may give optimizers a new start here
        if not state.batch_in_epoch:  # not again in an epoch that is resumed in its middle
            self.fire("on_train_epoch_start")
        data = self.train_data()  # a callback may have had it made anew
        self.validation.align(self)
        self._validates = self.has_validation
        self.quiet_groups = 0
        groups = data.groups(state, self.accumulate_grad_batches)
        self._restore_last()
        self.metrics.in_step = True
        return groups

    def _end_epoch(self, closed: bool) -> None:
        """Close the epoch, or leave it open for a later `fit` when a bound was reached in its middle.

        Args:
            closed: its last batch has been consumed. A wish to stop closes it too.
        """
        state = self.state
        self._read_clock()
        self.metrics.in_step = False
        if not closed and self._heeds_wish():
            closed = True
            self.schedules.after_epoch(state.epoch)
            if self._validated_at != state.step and self.validation.in_epoch(state.epoch):
                self._validate()
        self.epoch_closes = closed
        self.fire("on_train_epoch_end")
        self.take_metrics(self.metrics.flush_epoch(self.exchange), "train")
        self.show_metrics(self.metrics.peek())
        if closed:
            self.schedules.after_epoch_metrics(state.epoch, self._callback_metrics)
        state.epoch_done = closed
        self._settle()
        self._agree()
        if self.preemption.agreed:
            self._leave()
        if closed:
            self._group_end = None
            state.begin_next_epoch()
            self._reload_loaders()

    def _advance(self, group: Group, stepped: bool) -> None:
        """Count a group, and step the schedules whose unit has passed."""
        state, n = self.state, len(group.batches)
        if stepped:
            state.step += 1
            state.step_in_epoch += 1
        state.batches += n
        state.batch_in_epoch += n
        samples = group.num_samples
        if samples is None:
            samples = (
                batch_size(group.batches[0])
                if n == 1 and not self.exchange
                else count_samples(group, self.strategy, exact=self._samples_decide)
            )
        state.samples += samples
        state.samples_in_epoch += samples
        if self.count_tokens:
            state.tokens += count_tokens(group, self.task, self.strategy)
        if stepped and self.schedules.steps_often:
            self.schedules.after_step(state.step, self._metrics_of_step() if self.schedules.watch_steps else {})
        if group.is_last:
            self.schedules.after_epoch(state.epoch)
        self._group_end = n, group.is_last

    def _metrics_of_step(self) -> Mapping[str, float]:
        """Read what the step has logged, for a schedule that watches it; rank 0's, so that all ranks' rates agree."""
        self.show_metrics(self.metrics.peek())
        found = dict(self._callback_metrics)
        return found if self.exchange is None else dict(self.broadcast(found))

    def _read_clock(self) -> None:
        now = time.perf_counter()
        self.state.seconds += now - self._clock
        self._clock = now

    def _optimizers_of(self, loss: Any) -> list[Optimizer]:
        """The optimizers that are about to step; none after a skipped group or in a task that steps them itself."""
        return [] if loss is None else self.optimizers

    # When to stop

    def _must_stop(self) -> bool:
        if self._end.reached(self.state):
            return True
        if self.exchange is None or self.agreement.due(self.state.step):
            self._agree()
        return self._stop_agreed and self._heeds_wish()

    def _is_over(self) -> bool:
        return self._end.reached(self.state) or self._heeds_wish() or self.train_data().num_batches == 0

    def _agree(self) -> None:
        """Learn whether any rank wishes to stop, is out of time, or has had a signal. Collective, on the host."""
        mine = [int(self.should_stop or self._end.out_of_time(self.state)), *self.preemption.note()]
        everyone = [mine] if self.exchange is None else self.agreement.hold(self.state.step, mine)
        self._stop_agreed |= any(wish for wish, *_ in everyone)
        self.preemption.hear([told for _, *told in everyone])

    def _heeds_wish(self) -> bool:
        if not self._stop_agreed:
            return False
        if not (may_stop := self._end.may_stop_early(self.state)):
            self.notices.stop_put_off(self.state, self.settings.limits, self.stop_reason)
        return may_stop

    # Metrics

    def _settle(self) -> None:
        """Do what callbacks asked for, showing them this step's values, which the loggers get at their interval."""
        self.show_metrics(self.metrics.peek())
        self.safe_point.settle()
