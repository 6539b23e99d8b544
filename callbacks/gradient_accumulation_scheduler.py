"""Change the number of micro-batches per optimizer step during training."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule


class GradientAccumulationScheduler(Callback):
    """Callback that sets `accumulate_grad_batches` by epoch.

    Args:
        scheduling: dict from an epoch (0-based) to the micro-batches per optimizer step from this epoch on, such as
            `{0: 8, 4: 4, 8: 1}`. Epochs before the first entry do not accumulate.

    Raises:
        ConfigurationError: the dict is empty, an epoch is negative, or a number is below 1. In a run: the Trainer has
            its own accumulate_grad_batches, or the task uses manual optimization.
    """

    reads_only = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ConfigurationError(
                "GradientAccumulationScheduler(scheduling={}): write {epoch: factor}, e.g. {4: 2}."
            )
        for epoch, factor in scheduling.items():
            if not _is_count(epoch, 0) or not _is_count(factor, 1):
                raise ConfigurationError(
                    f"GradientAccumulationScheduler: scheduling has {epoch!r}: {factor!r}; an epoch must be an integer "
                    ">= 0, a factor an integer >= 1."
                )
        self._is_setting = False  # True from the `setup` of a fit to its `teardown`
        self.scheduling: dict[int, int] = {0: 1, **dict(sorted(scheduling.items()))}

    def factor(self, epoch: int) -> int:
        """Return the number of micro-batches per step in the 0-based `epoch`."""
        return self.scheduling[max(first for first in self.scheduling if first <= epoch)]

    @property
    def epochs(self) -> list[int]:
        """The 0-based epochs at which the number is set, in ascending order. The first is 0."""
        return list(self.scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the result of `factor`. This is Lightning's name."""
        return self.factor(epoch)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch has steps of several micro-batches."""
        return any(factor > 1 for factor in self.scheduling.values())

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit":
            return
        if not task.automatic_optimization:
            raise ConfigurationError(
                f"GradientAccumulationScheduler: {type(task).__name__} uses manual optimization "
                "(automatic_optimization=False) and decides itself when to step. Remove the callback."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} and GradientAccumulationScheduler "
                "contradict each other. Remove one of them."
            )
        self._is_setting = True

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        if trainer.state.batch_in_epoch:  # resumed in the middle of an epoch: its start event is not called
            self.on_train_epoch_start(trainer, task)

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        trainer.accumulate_grad_batches = self.factor(trainer.state.epoch)

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if self._is_setting:
            self._is_setting = False
            trainer.accumulate_grad_batches = 1  # the original value: `setup` has checked it


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
