"""State of the training loop. `FitLoop` updates it; other parts of a run read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainwright.core.state import Group, StepResult, TrainState
from trainwright.core.task import TaskModule
from trainwright.core.tree import batch_size
from trainwright.processes.devices import peak_memory
from trainwright.strategies.engine import Engine
from trainwright.trainer.optimization import Schedules
from trainwright.trainer.schedule import Stop, ValidationSchedule


class Guard(Protocol):
    """Protocol of the check of losses and gradients in `recovery.non_finite`."""

    def check(self) -> None:
        """Raise if a loss or gradient since the last check was not finite. Collective."""

    def is_bad_here(self) -> bool:
        """Return whether this rank had a loss or gradient that was not finite. Not collective."""


@dataclass(slots=True)
class LoopState:
    """State of the training loop of one stage. Unused by evaluations.

    Attributes:
        schedules: steps the learning-rate schedules. Empty until `configure_optimizers` has returned.
        trains: True once the setup of a `fit` is complete, also after its end. Optimizers and progress can be saved
            then.
        count_tokens: update `state.tokens` after each step. Set by the setup, and by callbacks that need the count.
        group: micro-batches of the current or last step; None outside an epoch.
        ended_on_last_batch: the last epoch ended with its last micro-batch.
        last_result: loss and gradient norm of the last group; None before the first and after a rollback. A tuple,
            which is cheaper to create at each step than the `StepResult` that `last_step` creates from it.
        last_group_size: number of micro-batches of the epoch's last group that is counted in the progress; 0 before the
            first, and after the epoch.
        last_group_ended_epoch: that group was the last of its epoch.
        validated_at: completed steps at the last completed validation; -1 before the first, and after a rollback.
        validation: validation schedule. None until its first use, and when the length of the training data may have
            changed: the loop then creates it again.
        clock: `time.perf_counter()` at the last update of `state.seconds`.
        steps_until_check: number of coming steps without a check of what is due; 0 makes the current or next step
            check.
        stop: stop request of this rank. `trainer.should_stop = False` withdraws it.
        stop_agreed: strongest stop request that all ranks know, by an exchange or by `request_stop`. It never
            decreases.
        stop_reason: reason of the last stop request; None without a request or a reason.
        epoch_closes: the ending epoch is complete; False if a later fit may continue it. Set before
            `on_train_epoch_end`.
        to_restore: functions that restore metrics and generators of a checkpoint. `Loads` adds them. The loop calls
            them last before training continues, because hooks before that may draw random numbers.
        restore_after_fit_start: restores optimizers after callbacks have created parameter groups in `on_fit_start`;
            None if they need not wait.
        guard: checks losses and gradients in the current epoch (`on_nonfinite`), or None.
    """

    schedules: Schedules
    trains: bool = False
    count_tokens: bool = False
    group: Group | None = None
    ended_on_last_batch: bool = False
    last_result: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
    last_group_size: int = 0
    last_group_ended_epoch: bool = False
    validated_at: int = -1
    validation: ValidationSchedule | None = None
    clock: float = 0.0
    steps_until_check: int = 0
    stop: Stop = Stop.NOT
    stop_agreed: Stop = Stop.NOT
    stop_reason: str | None = None
    epoch_closes: bool = True
    to_restore: list[Callable[[], None]] = field(default_factory=list)
    restore_after_fit_start: Callable[[], None] | None = None
    guard: Guard | None = None

    @property
    def last_step(self) -> StepResult | None:
        """The result of the last group; None before the first."""
        if self.last_result is None:
            return None
        loss, grad_norm = self.last_result
        return StepResult(loss, grad_norm)

    @property
    def is_last_batch(self) -> bool:
        """True if the current or last micro-batch is the last of its epoch."""
        group = self.group
        if group is None:  # between two epochs
            return self.ended_on_last_batch
        return group.is_last and group.index == len(group.batches) - 1

    def check_finite(self) -> None:
        """Raise if a loss or gradient since the last check was not finite. Collective; waits for the device.

        Raises:
            NonFiniteError: on every rank.
        """
        if self.guard is not None:
            self.guard.check()

    def check_next_step(self) -> None:
        """Make the loop check after the current step whether a validation, flush, save or stop is due.

        Between two steps, it applies to the next step. Signal handlers call it too.
        """
        self.steps_until_check = 0

    def read_clock(self, state: TrainState) -> None:
        """Add the seconds since the last call to `state.seconds`."""
        now = time.perf_counter()
        state.seconds += now - self.clock
        self.clock = now

    def request_stop(self, reason: str, request: Stop) -> None:
        """Store a stop request. Every rank calls it in the same step with the same `request`.

        It is therefore agreed at once, without an exchange. A request of one rank only sets `stop`.
        """
        self.stop_reason = reason
        self.stop = max(self.stop, request)
        self.stop_agreed = max(self.stop_agreed, request)
        self.check_next_step()

    def owes_validation(self, state: TrainState) -> bool:
        """Return whether a validation is due after the current step and has not been run."""
        if self.last_group_size == 0 or self.validation is None:
            return False
        if self.validated_at == state.step:
            return False
        return self.validation.outstanding(state, self.last_group_size, self.last_group_ended_epoch)

    def note_validation(self, state: TrainState) -> None:
        """Record that the validation of the current step is complete."""
        state.validation_owed = False
        self.validated_at = state.step

    def run_deferred_restores(self) -> None:
        """Call and clear the functions in `to_restore`."""
        to_restore = self.to_restore
        self.to_restore = []
        for restore in to_restore:
            restore()


def progress_facts(state: TrainState, engine: Engine) -> dict[str, Any]:
    """Return the progress of a fit for the run's record. Does not wait for the device.

    `memory` is the peak of the main process in bytes: of the device's allocator, or of the host's memory on the CPU.
    """
    rates: list[Any] = []
    for optimizer in engine.optimizers:
        for group in optimizer.param_groups:
            rate = group["lr"]
            # A rate in a tensor on a device (`capturable` optimizers) is omitted, because reading it would wait.
            if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu":
                rates.append(rate)
    return {
        "epoch": state.epoch,
        "samples": state.samples,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "lr": rates,
        "memory": peak_memory(engine.device),
    }


def count_samples(group: Group, engine: Engine, *, exact: bool) -> int:
    """Return the number of samples in a step, over all ranks, if the loader does not provide it.

    Args:
        group: this rank's micro-batches.
        engine: provides the data ranks.
        exact: sum the numbers of all ranks, which is collective. False multiplies this rank's number, as if all ranks
            had batches of the same size.
    """
    of_rank = sum(batch_size(batch) for batch in group.batches)
    if engine.data_ranks.size == 1:
        return of_rank
    if exact:
        # If sequences are split, each sample is on `parts` ranks.
        return _sum(of_rank, engine) // engine.data_ranks.parts
    return of_rank * engine.data_ranks.num_readers


def count_tokens(group: Group, task: TaskModule, engine: Engine) -> int:
    """Return the number of tokens in a step over all ranks, counted by the task. Collective with several data ranks."""
    of_rank = sum(task.num_tokens(batch) for batch in group.batches)
    return _sum(of_rank, engine)


def _sum(value: int, engine: Engine) -> int:
    """Return the sum of a number over the data ranks. Collective, on the host."""
    numbers_by_rank = engine.data_ranks.gather_integers([value])
    return sum(numbers[0] for numbers in numbers_by_rank)
