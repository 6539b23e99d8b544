"""Where the loop stands, within a step and between steps: `FitLoop` moves it, everything else in a run reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trainwright.core.state import Group, TrainState
from trainwright.core.task import TaskModule
from trainwright.core.tree import batch_size
from trainwright.strategies.engine import Engine
from trainwright.trainer.schedule import Stop, ValidationSchedule


class Guard(Protocol):
    """Looks at losses and gradients (see `recovery.non_finite`)."""

    def look(self) -> None:
        """Raise if a step since the last look was not finite. Collective."""

    def is_bad_here(self) -> bool:
        """Tell whether this rank saw such a step. Not collective."""


@dataclass(slots=True)
class LoopState:
    """The loop of one stage; at rest unless that is a fit.

    Attributes:
        group: the micro-batches that are being trained on, or were last; None outside of an epoch.
        ended_on_last_batch: the epoch that was trained last ended with its last micro-batch.
        at_step_boundary: no training step is half done.
        stepping: optimizers step just now, or what they did is being counted.
        last_result: loss and gradient norm of the last optimizer step.
        group_end: of the group that was counted last: its length, and whether it is the epoch's last.
        validated_at: completed steps at the last whole validation; -1: none yet.
        validation: when to validate; None until the training data is known.
        clock: `time.perf_counter()` when `state.seconds` was counted last.
        quiet_groups: so many groups of micro-batches need no look at what is due; 0 makes the next one look.
        stop: what this rank was asked for.
        stop_agreed: what all ranks know of.
        stop_reason: why a stop was asked for last, or None.
        epoch_closes: the epoch that ends is over; False when a later fit may go on with it.
        to_restore: what is put back as the last act before training goes on.
        guard: looks at losses and gradients in the present epoch (`on_nonfinite`); None: nothing does.
        restore_after_fit_start: what is put back once callbacks have made parameter groups in `on_fit_start`.
    """

    group: Group | None = None
    ended_on_last_batch: bool = False
    at_step_boundary: bool = True
    stepping: bool = False
    last_result: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
    group_end: tuple[int, bool] | None = None
    validated_at: int = -1
    validation: ValidationSchedule | None = None
    clock: float = 0.0
    quiet_groups: int = 0
    stop: Stop = Stop.NOT
    stop_agreed: Stop = Stop.NOT
    stop_reason: str | None = None
    epoch_closes: bool = True
    to_restore: list[Callable[[], None]] = field(default_factory=list)
    restore_after_fit_start: Callable[[], None] | None = None
    guard: Guard | None = None

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch that runs, or ran last, is its epoch's last."""
        group = self.group
        return self.ended_on_last_batch if group is None else group.is_last and group.index == len(group.batches) - 1

    def check_finite(self) -> None:
        """Raise if a step since the last look was not finite. Collective; waits for the device.

        Raises:
            NonFiniteError: on every rank.
        """
        if self.guard is not None:
            self.guard.look()

    def look(self) -> None:
        """Have the loop look at what is due after the present step."""
        self.quiet_groups = 0

    def read_clock(self, state: TrainState) -> None:
        """Count the seconds that have passed since the last time."""
        now = time.perf_counter()
        state.seconds += now - self.clock
        self.clock = now

    def ask_to_stop(self, reason: str, wish: Stop) -> None:
        """Take a wish to stop that every rank has alike."""
        self.stop_reason = reason
        self.stop, self.stop_agreed = max(self.stop, wish), max(self.stop_agreed, wish)
        self.look()

    def owes_validation(self, state: TrainState) -> bool:
        """Tell whether a validation is due after the present step and has not been done."""
        end, schedule = self.group_end, self.validation
        if end is None or schedule is None or self.validated_at == state.step:
            return False
        return schedule.outstanding(state, *end)

    def note_validation(self, state: TrainState) -> None:
        """Note that the validation of the present step is done."""
        state.validation_owed = False
        self.validated_at = state.step

    def restore_last(self) -> None:
        """Put back what was to be put back last."""
        to_restore, self.to_restore = self.to_restore, []
        for restore in to_restore:
            restore()


def count_samples(group: Group, engine: Engine, *, exact: bool) -> int:
    """Return the samples of a group whose loader does not tell. With several data ranks and `exact`, collective.

    Args:
        group: this rank's.
        engine: knows the other ranks.
        exact: something is decided by the number, so that ranks must agree on it; only then is it worth an exchange.
    """
    mine = sum(batch_size(batch) for batch in group.batches)
    if engine.processes.world_size == 1:
        return mine
    return _sum(mine, engine) // engine.data_ranks.parts if exact else mine * engine.data_ranks.num_readers


def count_tokens(group: Group, task: TaskModule, engine: Engine) -> int:
    """Return the tokens of a group, as the task counts them. Collective with several data ranks."""
    return _sum(sum(task.num_tokens(batch) for batch in group.batches), engine)


def _sum(value: int, engine: Engine) -> int:
    return sum(of_rank[0] for of_rank in engine.data_ranks.gather_integers([value]))
