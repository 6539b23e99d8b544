"""Collect Python's garbage at the same step on every rank."""

from __future__ import annotations

import gc

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule


class GarbageCollection(Callback):
    """Callback that collects Python's garbage at the same steps on every rank, and at no others.

    By default Python collects when enough objects have been created, which is at a different step on each rank.
    Each collection then delays all ranks. Collecting at the same step delays them once.

    Args:
        every_n_steps: steps between two collections. Default: 1000.
        generation: the oldest generation to collect; see `gc.collect`. All generations are collected at the start and
            end of the fit, and after each validation. Default: 1.

    Raises:
        ConfigurationError: the number of steps is below 1, or the generation is unknown.
    """

    reads_only = True

    def __init__(self, every_n_steps: int = 1000, generation: int = 1) -> None:
        if every_n_steps < 1 or generation not in (0, 1, 2):
            raise ConfigurationError(
                f"GarbageCollection(every_n_steps={every_n_steps}, generation={generation}): expected at least 1 "
                "step, and generation 0, 1 or 2."
            )
        self.every_n_steps = every_n_steps
        self.generation = generation
        self._was_enabled = False  # True while this callback has disabled Python's own collection

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if trainer.state.step % self.every_n_steps == 0:
            gc.collect(self.generation)

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        gc.collect()

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()
            gc.collect()
