"""The training loop.

`run`, `_epoch` and `_after_step` show the order of events in a fit. The engine computes a step
(`strategies/steps/step.py`), `stage.py` sets up and tears down a stage, `schedule.py` decides when something is due,
`recovery/non_finite.py` handles a NaN loss, and `checkpoints/saves.py` executes the requests of callbacks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from trainwright.core.duration import Duration, Interval
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.tree import batch_size
from trainwright.loggers.metric_slot import reset_metric
from trainwright.loggers.metric_values import unused_objects
from trainwright.processes.agreement import Agreement
from trainwright.strategies.steps.phase import Phase
from trainwright.trainer import evaluation
from trainwright.trainer.loop_state import count_samples, count_tokens
from trainwright.trainer.recovery.preemption import EvaluationWatch
from trainwright.trainer.recovery.recovery import RollBack
from trainwright.trainer.run import StageRun
from trainwright.trainer.schedule import EndOfFit, Stop, ValidationSchedule

_AGREE_EVERY_N_STEPS = 10  # maximum number of steps between two exchanges of stop requests


class FitLoop:
    """Training loop over epochs. A limit, a stop request or a signal ends it. `run.loop` holds its state.

    Args:
        run: the run, set up and with its checkpoint restored.
    """

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._end = EndOfFit(run.settings.limits)
        # A limit or interval in samples must be reached in the same step on all ranks.
        self._needs_exact_samples = "samples" in run.settings.units
        self._agreement = Agreement(run.engine.processes, _AGREE_EVERY_N_STEPS)
        self._log_every = Interval(Duration(run.settings.log_every_n_steps, "steps"))
        self._has_one_data_rank = run.engine.data_ranks.size == 1
        self._validates = False  # `data.has_validation`, read at the start of each epoch
        self._metrics_are_begun = False  # `_start` has begun the metrics of the next epoch, so `_begin_epoch` does not
        self._align()

    def _align(self) -> None:
        """Align all intervals with the current progress, at the start and after a rollback."""
        run = self._run
        self._agreement.begin(run.state.step)
        self._log_every.align(run.state)
        run.loop.validation = None  # created again at its next use
        run.loop.last_group_size = 0
        run.saves.prepare(run.recovery.preemption.write_deadline_s)

    def run(self) -> None:
        """Train until a limit or a stop request. A rollback restores an earlier checkpoint and continues from there."""
        run = self._run
        run.data.train()
        self._start()
        run.loop.clock = time.perf_counter()
        self._agree()  # a limit in seconds, or a stop request of an earlier hook
        if self._is_over():
            reached_limits = self._end.reached_by(run.state, run.data.train().num_batches)
            if reached_limits:
                run.hooks.print(f"trainwright: nothing is left to train: {reached_limits}. Increase it to continue.")
        while not self._is_over():
            try:
                self._epoch()
                continue
            except RollBack as unwound:
                request = unwound.request
            # Outside the handler, because the traceback keeps the epoch's loader and its workers alive.
            run.recovery.roll_back(request)
            run.start_loggers()
            self._align()
            run.begin_fit()
            self._start()
        if run.loop.stop_reason is not None and not self._end.reached(run.state):
            run.hooks.print(
                f"trainwright: training stops after {run.state.epoch} epochs and {run.state.step} steps. "
                f"{run.loop.stop_reason}"
            )
        run.saves.finish_copy()  # callbacks may empty optimizers here
        run.logs.metrics.close("on_train_end")
        run.hooks.fire("on_train_end")
        # Right after a flush, the complete interval is left. Then no step has logged since.
        has_steps_to_flush = self._log_every.left(run.state) < run.settings.log_every_n_steps
        if has_steps_to_flush:
            run.logs.flush_step(run.state.epoch_of_last_batch)  # `state.epoch` may be the next epoch already

    def _start(self) -> None:
        """Begin the training, at its start or after a rollback."""
        run = self._run
        self._metrics_are_begun = True  # values logged in on_train_start belong to the next epoch
        run.logs.metrics.begin("train")
        run.hooks.fire("on_train_start")
        # A checkpoint from the end of an epoch was written before the hooks of the next epoch, so its generators are
        # restored before `on_train_epoch_start`. In the middle of an epoch, `_begin_epoch` restores later: the loader
        # and the metrics must be set up first, and `on_train_epoch_start` is not called again.
        if run.state.batch_in_epoch == 0:
            run.loop.run_deferred_restores()

    def _epoch(self) -> None:
        """Train the rest of the current epoch: one optimizer step per group of micro-batches.

        Raises:
            RollBack: the run rolls back to an earlier checkpoint. Raised on every rank.
            Preempted: the ranks have agreed on a signal.
        """
        run = self._run
        loop = self._run.loop
        trainer = run.trainer
        task = run.task
        state = run.state
        hooks = run.hooks.table
        engine = run.engine
        step = run.engine.step
        clip = run.settings.clip
        groups = self._begin_epoch()
        if state.validation_owed:  # a resume from a checkpoint that was written before the validation of its step
            self._validate()
            self._step_monitored()
        forward_backward = self._choose_forward_backward()
        epoch_is_complete = True  # also of an epoch without batches
        try:
            for group in groups:
                loop.group = group
                # A save after an error reads the phase: it is not possible while weights and progress disagree.
                engine.phase = Phase.GRADIENTS
                for hook in hooks.on_train_step_start:
                    hook(trainer, task, group)
                # Move, autocast, weigh, accumulate, sync. None if no micro-batch has a loss or the group is skipped.
                loss = forward_backward(group)
                if hooks.on_before_optimizer_step and loss is not None:
                    run.logs.metrics.batch = group.batches[-1]  # weight of the values logged in these hooks
                    for hook in hooks.on_before_optimizer_step:
                        for optimizer in engine.optimizers:
                            hook(trainer, task, optimizer)
                    run.logs.metrics.batch = None
                engine.phase = Phase.WEIGHTS
                norm = None if loss is None else step.optimizer_step(clip)  # clip, step, free gradients
                stepped = loss is not None or step.stepped
                self._advance(group, stepped)
                engine.phase = Phase.BETWEEN_STEPS
                loop.last_result = loss, norm
                if hooks.on_train_batch_end:
                    step.end_batch(group)  # of the last micro-batch; `forward_backward` has called it for the others
                for hook in hooks.on_train_step_end:
                    hook(trainer, task, loop.last_step)
                epoch_is_complete = group.is_last
                loop.steps_until_check -= 1  # negative if it was 0 before this step, which requests a check
                if (epoch_is_complete or loop.steps_until_check < 0) and self._after_step(group, stepped):
                    break
        except SkipRestOfEpoch:
            # Earlier micro-batches of the group have gradients, which are discarded without being counted.
            run.logs.metrics.batch = None
            step.discard_gradients()
            loop.schedules.after_epoch(state.epoch)  # `_advance` calls it after the last group only
            engine.phase = Phase.BETWEEN_STEPS
            epoch_is_complete = True
        self._end_epoch(epoch_is_complete)
        loop.ended_on_last_batch = loop.is_last_batch  # before the group is freed, from which it is computed
        loop.group = None

    def _after_step(self, group: Group, stepped: bool) -> bool:
        """Validate, flush metrics and save checkpoints if they are due. Return whether the epoch ends here.

        `stepped` is False if the group did not count as a step. The order is part of the behavior: schedules may
        monitor a metric of the validation, and a checkpoint contains the rates that they set.
        """
        run = self._run
        loop = self._run.loop
        state = self._run.progress.state
        loop.read_clock(state)
        if run.saves.needs_memory and state.step_in_epoch:  # the optimizers have their state
            run.saves.reserve_memory()
        if self._validates and self._validation.due(state, len(group.batches), group.is_last):
            self._validate()
        if stepped:
            self._step_monitored()
        if self._log_every.due(state):
            run.logs.flush_step()  # waits for the device, as does `check_finite`
            loop.check_finite()
        no_batch_had_a_loss = not state.step_in_epoch and not run.progress.skipped_batches
        if no_batch_had_a_loss and run.task.automatic_optimization:
            run.logs.warnings.nothing_trained(state, type(run.task).__name__, epoch_is_over=group.is_last)
        # If the epoch ends here, `_end_epoch` executes requests and handles signals, after the metrics of the epoch are
        # known.
        ends = group.is_last or self._must_stop()
        if not ends and run.saves.is_requested:
            run.saves.execute_requests()
            # An action may have requested a stop, with several ranks on all of them (see `LoopState.request_stop`).
            # A single process also responds to a signal that arrived during the save.
            if run.logs.exchange is None:
                ends = self._must_stop()
            else:
                ends = self._stops_early()
        if run.recovery.preemption.agreed and not ends:
            run.recovery.exit_on_signal()
        loop.steps_until_check = self._groups_until_due() - 1
        if run.recovery.preemption.signal:  # may have arrived in this method
            loop.check_next_step()
        return ends

    def _groups_until_due(self) -> int:
        """Return the number of groups until `_after_step` must run again, at least 1. A stop request shortens it."""
        run = self._run
        state = self._run.progress.state
        stop_is_pending = run.loop.stop != Stop.NOT  # until ranks exchange it, or until `min_epochs` is reached
        if stop_is_pending or self._end.is_checked_every_step or run.loop.schedules.monitor_steps:
            return 1
        nearest = min(self._log_every.left(state), self._end.steps_left(state))
        if self._validates:
            nearest = min(nearest, self._validation.groups_left(state, run.settings.accumulate_grad_batches))
        if run.logs.exchange is not None:
            nearest = min(nearest, self._agreement.steps_until_exchange(state.step))
        return int(nearest)  # finite, because log_every_n_steps is

    def _begin_epoch(self) -> Iterable[Group]:
        """Set the data to its position, call `on_train_epoch_start`, and return the groups of the epoch's rest.

        `data.train()` is read at each use, because a hook may replace the loader.
        """
        run = self._run
        data = self._run.data
        state = self._run.progress.state
        hooks = self._run.hooks.table
        run.loop.last_group_size = 0
        position = data.enter_saved_position()
        old_num_batches = data.train().num_batches
        data.train().begin_epoch(state.epoch, position)
        if not self._metrics_are_begun:
            run.logs.metrics.begin("train")
        self._metrics_are_begun = False
        run.saves.finish_copy()  # callbacks may reset optimizers here
        if not state.batch_in_epoch:  # not called again when an epoch is resumed in the middle
            run.hooks.fire("on_train_epoch_start")
            if hooks.on_train_epoch_start:  # a hook may have changed the length of the data
                data.train().begin_epoch(state.epoch, position)
        if data.train().num_batches != old_num_batches:
            run.loop.validation = None  # its interval may be a fraction of the epoch
        self._validation.align(run.trainer)
        self._validates = data.has_validation
        run.loop.steps_until_check = 0
        groups = data.train().groups(state, run.settings.accumulate_grad_batches)
        run.loop.run_deferred_restores()
        # A second `fit` of the Trainer continues an epoch that a limit has ended. After a resume from a checkpoint,
        # `run_deferred_restores` has restored the checkpoint's metrics.
        continues_previous_fit = state.batch_in_epoch > 0 and run.loads.origin is None
        if run.progress.open_metrics and continues_previous_fit:
            run.loads.restore_metrics(run.progress.open_metrics, "the previous fit")
        run.progress.open_metrics = []
        run.logs.metrics.in_step = True
        return groups

    def _choose_forward_backward(self) -> Callable[[Group], torch.Tensor | None]:
        """Return the function that runs a step's forward and backward in the current epoch.

        It is the engine's function, unless values are checked or data is skipped.
        """
        run = self._run
        if run.settings.arguments.on_nonfinite is None and not run.progress.skipped_batches:
            run.loop.guard = None
            return run.engine.step.forward_backward
        from trainwright.trainer.recovery.non_finite import step_function  # few runs use it

        return step_function(run)

    def _end_epoch(self, epoch_is_complete: bool) -> None:
        """End the epoch. If a limit ended it before its last batch, a later fit can continue it. Collective.

        The order is part of the behavior: `on_train_epoch_end` may log metrics of the epoch, schedules read them, and a
        checkpoint contains the state after both.
        """
        run = self._run
        loop = self._run.loop
        state = self._run.progress.state
        loop.read_clock(state)
        run.logs.metrics.in_step = False
        if not epoch_is_complete and loop.stop_agreed == Stop.AND_CLOSE_EPOCH and self._stops_early():
            epoch_is_complete = True
            loop.schedules.after_epoch(state.epoch)  # `_advance` calls it after the last group only
            if loop.validated_at != state.step and self._validation.in_epoch(state.epoch):
                self._validate()
        loop.epoch_closes = epoch_is_complete
        loop.check_finite()
        run.logs.show_pending()
        run.hooks.fire("on_train_epoch_end")
        # An incomplete epoch keeps its aggregates, because a later fit may continue it.
        flushed = run.logs.metrics.flush_epoch(run.logs.exchange, keep=not epoch_is_complete, owner=run.task)
        run.logs.take(flushed, "train")
        if epoch_is_complete:
            loop.schedules.after_epoch_metrics(state.epoch, run.logs.shown.callback)
        else:
            run.progress.open_metrics = run.engine.data_ranks.gather(run.contents.metrics_state())
        # A checkpoint of the complete epoch has its number. A resume begins the next one, because `epoch_done` is set.
        state.epoch_done = epoch_is_complete
        run.saves.execute_requests()
        self._agree()
        if run.recovery.preemption.agreed:
            run.recovery.exit_on_signal()
        if epoch_is_complete:
            loop.last_group_size = 0
            state.begin_next_epoch()
            reload_every = run.settings.arguments.reload_dataloaders_every_n_epochs
            reload_is_due = reload_every > 0 and state.epoch % reload_every == 0
            if reload_is_due and not self._is_over():
                run.data.forget()
                loop.validation = None  # its interval may be a fraction of the new loader

    def _advance(self, group: Group, stepped: bool) -> None:
        """Update the progress after a step, and step the learning-rate schedules that are due."""
        run = self._run
        state = self._run.progress.state
        num_batches = len(group.batches)
        if stepped:
            state.step += 1
            state.step_in_epoch += 1
        state.batches += num_batches
        state.batch_in_epoch += num_batches
        samples = group.num_samples
        if samples is None and num_batches == 1 and self._has_one_data_rank:  # a call fewer in the usual case
            samples = batch_size(group.batches[0])
        elif samples is None:
            samples = count_samples(group, run.engine, exact=self._needs_exact_samples)
        state.samples += samples
        state.samples_in_epoch += samples
        if run.loop.count_tokens:
            state.tokens += count_tokens(group, run.task, run.engine)
        if stepped and run.loop.schedules.count_steps:
            run.loop.schedules.after_step(state.step)
        if group.is_last:
            run.loop.schedules.after_epoch(state.epoch)
        run.loop.last_group_size = num_batches
        run.loop.last_group_ended_epoch = group.is_last

    def _step_monitored(self) -> None:
        """Step the schedules with `interval="step"` that monitor a metric, after the validation of their step."""
        schedules = self._run.loop.schedules
        step = self._run.state.step
        if schedules.metrics_are_due(step):
            schedules.after_step_metrics(step, _metrics_of_step(self._run))

    @property
    def _validation(self) -> ValidationSchedule:
        """The validation schedule, created when the training data is known."""
        run = self._run
        loop = self._run.loop
        if loop.validation is None:
            every = run.settings.arguments.check_val_every_n_epoch
            # Without validation, an interval that does not fit the epoch has no effect.
            interval = run.settings.val_check_interval if run.data.has_validation else 1.0
            loop.validation = ValidationSchedule(interval, every, run.data.train().num_batches)
        return loop.validation

    def _validate(self) -> None:
        """Run the validation of the current step. If a signal or an error ends it, a resume runs it from its start."""
        run = self._run
        if not run.data.has_validation:
            run.state.validation_owed = False
            return
        run.loop.check_finite()
        run.state.validation_owed = True  # for checkpoints written before the validation completes
        was_in_step = run.logs.metrics.in_step
        run.logs.metrics.in_step = False
        data = run.data.evaluation("validate")
        device = run.engine.device
        generators_before = rng_state(device)
        # Only this validation updates these metric objects. If it does not complete, they are reset.
        run.evaluation.own_objects = unused_objects(run.task)
        began_s = time.perf_counter()
        try:
            watch = EvaluationWatch(run.recovery.preemption, run.engine.processes, data)
            record_validation = partial(run.loop.note_validation, run.state)
            evaluation.evaluate(run, "validate", abandon=watch, when_metrics_known=record_validation)
        except evaluation.Abandoned:
            # A resume runs the complete validation with the same random numbers.
            set_rng_state(generators_before, device)
            self._discard_validation()
            if self._log_every.due(run.state):
                run.logs.flush_step()
            run.recovery.exit_on_signal()
        except BaseException:
            # For a save after the error. The device's generator is not restored, because the device may have failed.
            set_rng_state(generators_before)
            with contextlib.suppress(RuntimeError):  # of a failed device; a save omits these objects all the same
                self._discard_validation()
            raise
        run.evaluation.own_objects = []
        run.logs.metrics.in_step = was_in_step
        run.logs.record_event("validation", seconds=round(time.perf_counter() - began_s, 3))

    def _discard_validation(self) -> None:
        """Reset the metric objects that an unfinished validation has updated."""
        for metric in self._run.evaluation.own_objects:
            reset_metric(metric)

    # When to stop

    def _must_stop(self) -> bool:
        """Return whether the epoch ends after the current step. Collective in the steps that have an exchange."""
        run = self._run
        if self._end.reached(run.state):
            return True
        if run.logs.exchange is None or self._agreement.due(run.state.step):
            self._agree()
        return self._stops_early()

    def _is_over(self) -> bool:
        """Return whether no further epoch begins. The result is the same on every rank."""
        run = self._run
        return self._end.reached(run.state) or self._stops_early() or run.data.train().num_batches == 0

    def _agree(self) -> None:
        """Exchange stop requests, time limits and signals between ranks. Collective, on the host."""
        run = self._run
        loop = self._run.loop
        preemption = run.recovery.preemption
        request = self._end.stop_request(run.state, loop.stop)
        # Three numbers of each rank: its stop request, its signal, and the milliseconds until the system ends it.
        numbers_here = [int(request), *preemption.signal_and_remaining_ms()]
        numbers_by_rank = [numbers_here]
        if run.logs.exchange is not None:
            numbers_by_rank = self._agreement.exchange(run.state.step, numbers_here)
        for numbers in numbers_by_rank:
            loop.stop_agreed = max(loop.stop_agreed, Stop(numbers[0]))
        preemption.set_agreed([numbers[1:] for numbers in numbers_by_rank])

    def _stops_early(self) -> bool:
        """Return whether a stop request of any rank takes effect. If `min_epochs` or `min_steps` delays it, warn."""
        run = self._run
        if run.loop.stop_agreed == Stop.NOT:
            return False
        may_stop = self._end.may_stop_early(run.state)
        if not may_stop:
            run.logs.warnings.stop_delayed(run.state, run.settings.limits, run.loop.stop_reason)
        return may_stop


def _metrics_of_step(run: StageRun) -> Mapping[str, float]:
    """Return the latest metrics of rank 0, with which schedules set the same rate on all ranks. Collective."""
    run.logs.show_pending()
    metrics = dict(run.logs.shown.callback)
    if run.logs.exchange is None:
        return metrics
    return dict(run.broadcast(metrics))
