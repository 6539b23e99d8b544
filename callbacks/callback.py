"""The base of every callback: one method per event, the order in which callbacks run, and their saved state.

The order of events in a run (an indented event occurs for each event above it):

    setup
    on_load_checkpoint                                         of a resumed run; then optimizers are created
    on_fit_start
    on_sanity_check_start … on_sanity_check_end                with validation events between them
    on_train_start
        on_train_epoch_start                                   not when the epoch is resumed in its middle
            on_train_step_start                                one optimizer step: a group of micro-batches
                on_train_batch_start                           one micro-batch
                on_before_zero_grad                            per optimizer, in the first micro-batch of the step
                on_before_backward, on_after_backward          one micro-batch
                on_before_optimizer_step                       per optimizer; then clipping and the step itself
                on_train_batch_end
            on_train_step_end                                  `trainer.state` already counts the step
            on_validation_start … on_validation_end            when a validation is due
            on_save_checkpoint                                 when requested checkpoints are written
        on_train_epoch_end
        on_save_checkpoint                                     if a checkpoint is requested at the epoch's end
    on_train_end
    on_fit_end
    teardown                                                   also after an exception

`on_validation_*`, `on_test_*` and `on_predict_*` each exist as `start, epoch_start, batch_start, batch_end,
epoch_end, end`. `on_exception` is called once, with the exception that ended the run, including Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from trainwright.callbacks.absent_attributes import ABSENT
from trainwright.core.errors import TaskError
from trainwright.core.hooks import StepOutput
from trainwright.core.run import Run, Stage
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch


class Order(IntEnum):
    """Priority of a callback at each event. Callbacks of equal priority run in the order of the list."""

    FIRST = 0
    NORMAL = 50
    LAST = 100


class Callback:
    """Base class of callbacks. Override the events that you need. Other events cost nothing.

    Attributes:
        order: priority among the callbacks; any integer.
        reads_only: True if no method of the callback writes weights. A strategy may then copy the weights to the device
            before it calls the callback. Sub-classes do not inherit the value.
        needs: fields of the strategy's `Capabilities` that the callback requires. They are checked before a run starts.
    """

    order: int = Order.NORMAL
    reads_only: bool = False
    needs: tuple[str, ...] = ()

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint. Override it if a run has several callbacks of the class."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: numbers, text, lists, dicts and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; called before `on_fit_start`."""

    if not TYPE_CHECKING:  # or type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            instead = ABSENT.get(name)
            advice = "" if instead is None else f". {instead}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def log(self, name: str, value: object, *args: Any, **options: Any) -> None:
        """Log one value, from a hook in which the task may log; see `TaskModule.log` for the arguments.

        Raises:
            TaskError: no stage runs with this callback.
        """
        self._logging_task("log").log(name, value, *args, **options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several values, or a MetricCollection; see `TaskModule.log_dict` for the arguments.

        Raises:
            TaskError: no stage runs with this callback.
        """
        self._logging_task("log_dict").log_dict(dictionary, *args, **options)

    def _logging_task(self, method: str) -> TaskModule:
        task: TaskModule | None = vars(self).get(_TASK)
        if task is None:
            raise TaskError(
                f"{type(self).__name__}.{method} can be called only in hooks, while a Trainer runs a stage."
            )
        return task

    # Stages, training and evaluations
    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        """Run when a stage is set up, before its `on_*_start`. A rollback sets the stage up again."""

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        """Run at the end of a stage, also after an exception."""

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        """Run when `fit` begins."""

    def on_fit_end(self, trainer: Run, task: TaskModule) -> None:
        """Run when `fit` ends."""

    def on_sanity_check_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before the validation batches that `fit` runs first."""

    def on_sanity_check_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after the validation batches that `fit` runs first."""

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before the first epoch."""

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after the last epoch."""

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before a validation."""

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after a validation; its metrics are in `trainer.callback_metrics`."""

    def on_test_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before testing."""

    def on_test_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after testing."""

    def on_predict_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before predicting."""

    def on_predict_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after predicting."""

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        """Run when an exception, including KeyboardInterrupt, ends the run. Must not communicate between ranks."""

    # Once per epoch
    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before a training epoch."""

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after a training epoch and its validation."""

    def on_validation_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after the last validation batch, before its metrics are aggregated."""

    def on_test_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before the first test batch."""

    def on_test_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after the last test batch."""

    def on_predict_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        """Run before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        """Run after the last prediction batch."""

    # Once per optimizer step
    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        """Run before an optimizer step. `group` holds its micro-batches, which are still on the host."""

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        """Run after an optimizer step. `result` is on the device, so reading it waits for the device."""

    def on_before_zero_grad(self, trainer: Run, task: TaskModule, optimizer: Optimizer) -> None:
        """Run before an optimizer's gradients are cleared: after the first `training_step` of each optimizer step."""

    def on_before_optimizer_step(self, trainer: Run, task: TaskModule, optimizer: Optimizer) -> None:
        """Run before each optimizer's step, with accumulated, unscaled gradients that are not clipped yet."""

    # Once per batch
    def on_train_batch_start(self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int) -> int | None:
        """Run before a training micro-batch, which is on the device. Return -1 to skip the rest of the epoch."""

    def on_before_backward(self, trainer: Run, task: TaskModule, loss: torch.Tensor) -> None:
        """Run before backward of a micro-batch.

        `loss` is multiplied by the micro-batch's weight in the step and, with float16, by the loss scale.
        """

    def on_after_backward(self, trainer: Run, task: TaskModule) -> None:
        """Run after backward of a micro-batch."""

    def on_train_batch_end(
        self, trainer: Run, task: TaskModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Run after a training micro-batch. For the last micro-batch of a step, run after the optimizer step."""

    def on_validation_batch_start(
        self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Run, task: TaskModule, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a validation batch."""

    def on_test_batch_start(
        self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a test batch."""

    def on_test_batch_end(
        self, trainer: Run, task: TaskModule, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a test batch."""

    def on_predict_batch_start(
        self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Run, task: TaskModule, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a prediction batch."""

    # Checkpoints
    def on_save_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add entries to `checkpoint` before it is written. Called on every rank.

        `checkpoint["state_dict"]` and `["hyper_parameters"]` may be changed. Other entries that Lightning also has are
        read-only.
        """

    def on_load_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Read the entries that `on_save_checkpoint` added. Called before optimizers are created.

        `checkpoint["state_dict"]` may be changed. All other entries are read-only.
        """


_TASK = "_task_of_stage"  # the attribute of a callback that holds the task it logs with, during a stage


def log_through(task: TaskModule | None, callbacks: Iterable[Callback]) -> None:
    """Set the task whose `log` the callbacks' `log` calls during a stage. None removes it at the end of the stage."""
    for callback in callbacks:
        if task is not None:
            object.__setattr__(callback, _TASK, task)  # also on a frozen dataclass
        else:
            vars(callback).pop(_TASK, None)


EVENTS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_")
)
