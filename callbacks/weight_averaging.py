"""Averages of the weights during training, for evaluation and checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainwright.callbacks.averaged_weights import AveragedWeights
from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.run import Run, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule

_FUNCTIONS = ("avg_fn", "multi_avg_fn")


class WeightAveraging(Callback):
    """Callback that averages the weights after each step, validates with the average, and finally copies it to the
    task.

    The first update copies the weights; before it this callback has no effect. Afterwards validation runs on the
    average, which is swapped with the weights exactly. The weights in a checkpoint are the average. The training
    weights are in the state of this callback, so that a resume is exact, but not in checkpoints with weights only. At
    the end of a complete fit the task contains the average. Every rank averages its own weights or shards, without
    communication. A checkpoint gathers the shards and copies the full training weights to rank 0's host.

    A second fit with the same callback starts a new average, unless it resumes a checkpoint.

    Override `should_update` to choose the updates. The average has the dtype of the weights. In bfloat16, small changes
    of an average over many steps are lost to rounding.

    Args:
        device: device of the average. If the weights are on another device, the average needs no memory there, but each
            update blocks on a copy. Default: None, the device of the weights.
        use_buffers: average floating-point buffers too, such as the statistics of batch normalization. False uses the
            current buffers. Default: True.
        kwargs: `avg_fn` or `multi_avg_fn` as for `torch.optim.swa_utils.AveragedModel`; the number of updates so far is
            passed as an int. By default all updates have equal weight.

    Raises:
        ConfigurationError: other keyword arguments, or both functions, are passed. In a Trainer: the strategy's ranks
            have different parameters.
    """

    needs = ("weight_averages",)
    order = Order.FIRST  # the others see the average during a complete validation, and never a partial update

    def __init__(
        self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: object
    ) -> None:
        for name in kwargs:
            if name not in _FUNCTIONS:
                raise ConfigurationError(
                    f"{type(self).__name__}({name}=...): unknown argument.{nearest(name, _FUNCTIONS)} It takes device, "
                    f"use_buffers, {', '.join(_FUNCTIONS)}."
                )
        if all(kwargs.get(name) is not None for name in _FUNCTIONS):
            raise ConfigurationError(f"{type(self).__name__}: give avg_fn or multi_avg_fn, not both.")
        self._device = torch.device(device) if isinstance(device, str) else device
        self._use_buffers = use_buffers
        self._kwargs = kwargs
        self._weights: AveragedWeights | None = None  # created by `on_fit_start`
        self._latest_update_step = 0  # completed steps at the latest update after a step
        self._latest_update_epoch = -1  # 0-based epoch of the latest update at an epoch's end; -1 before it
        self._validating = False  # True while a validation of a fit uses the average
        # The state of a checkpoint, from `load_state_dict` to `on_fit_start`, which creates the average.
        self._loaded: dict[str, Any] | None = None

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now; by default after every step.

        Args:
            step_idx: 0-based index of the completed optimizer step. Default: None, at the end of an epoch.
            epoch_idx: 0-based index of the completed epoch. An epoch that `max_steps` or another limit interrupts is
                not completed. Default: None, after a step.
        """
        return step_idx is not None

    def average_functions(self) -> dict[str, Any]:
        """Return a dict with `avg_fn` or `multi_avg_fn`, or an empty dict. Called when a fit starts."""
        return self._kwargs

    # The weights

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage == "fit":
            self._weights = None
            self._loaded = None
            self._validating = False

    def __getstate__(self) -> dict[str, Any]:
        # Only the state is copied into another process. The task and functions of torch are not.
        return {**vars(self), "_weights": None, "_loaded": self.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        # Not in `setup`: only now are the weights on their final device, equal on all ranks, and loaded from the
        # checkpoint.
        options = {"device": self._device, "use_buffers": self._use_buffers, **self.average_functions()}
        weights = AveragedWeights(task, trainer, **options)
        loaded = self._loaded
        self._loaded = None
        if loaded is not None:
            self._latest_update_step = loaded["latest_update_step"]
            self._latest_update_epoch = loaded["latest_update_epoch"]
            if loaded["num_averaged"]:
                weights.restore(loaded["num_averaged"], current=loaded["current_model_state"])
        else:  # a new run, or one resumed from a checkpoint without an average, of which the Trainer warns
            # A later fit of the same callback may begin at an earlier step: without the limit, no update would happen
            # until the former step.
            self._latest_update_step = min(self._latest_update_step, trainer.state.step)
            self._latest_update_epoch = min(self._latest_update_epoch, trainer.state.epoch - 1)
        self._weights = weights

    # Updates

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        step = trainer.state.step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update()
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        epoch = trainer.state.epoch
        if trainer.epoch_closes and epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update()
            self._latest_update_epoch = epoch

    def _update(self) -> None:
        assert self._weights is not None  # created when the fit started
        self._weights.update()

    # The average in the task

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        if self._weights is not None and trainer.stage == "fit":
            self._validating = True
            self._weights.swap()

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        self._swap_back()

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        self._swap_back()

    def _swap_back(self) -> None:
        if self._validating and self._weights is not None:
            self._validating = False
            self._weights.swap()

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        if self._weights is None:
            return
        # Swapped rather than copied: a checkpoint that is saved from now on can still be resumed exactly.
        self._weights.swap()
        if self._weights.num_averaged == 0 and trainer.is_global_zero:
            warnings.warn(
                f"{type(self).__name__} did not average anything: should_update returned False after each of the "
                f"{trainer.state.step} steps. The task has the weights of its last step.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def on_fit_end(self, trainer: Run, task: TaskModule) -> None:
        if self._weights is not None:
            self._weights.make_whole()

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if self._weights is not None and self._weights.in_shards:
            self._weights = None  # of a run that failed: they can no longer be gathered

    # Checkpoints

    def on_save_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        if self._weights is not None:
            checkpoint["state_dict"] = self._weights.put_average_into(checkpoint["state_dict"])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, the step and epoch of the last one, and the training weights.

        The average is in the weights of the checkpoint.
        """
        if self._loaded is not None:
            return self._loaded
        weights = self._weights
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
            "num_averaged": 0 if weights is None else weights.num_averaged,
            "current_model_state": {} if weights is None else weights.current(),
        }


class EMAWeightAveraging(WeightAveraging):
    """Exponential moving average of the weights: `average = decay × average + (1 - decay) × weights`.

    Args:
        device: see `WeightAveraging`. Default: None.
        use_buffers: see `WeightAveraging`. Default: True.
        decay: 0 (only the current weights) to 1 (only the first weights). Default: 0.999.
        update_every_n_steps: update after steps whose 0-based index is a multiple of this number. 0 disables these
            updates. Default: 1.
        update_starting_at_step: 0-based index of the first step to update after. Default: None, for all steps.
        update_starting_at_epoch: also update at the end of every epoch from this 0-based epoch on. Default: None.
        kwargs: must be empty.

    Raises:
        ConfigurationError: a value is out of range, or another argument is passed.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: object,
    ) -> None:
        if kwargs:
            raise ConfigurationError(
                f"EMAWeightAveraging({', '.join(kwargs)}): unknown argument(s). EMAWeightAveraging always computes an "
                "exponential moving average. Use WeightAveraging for another average."
            )
        if not 0 <= decay <= 1:
            raise ConfigurationError(f"EMAWeightAveraging(decay={decay}): write a number from 0 to 1, such as 0.999.")
        if update_every_n_steps < 0:
            raise ConfigurationError(
                f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps}): write 0 (never) or more."
            )
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def average_functions(self) -> dict[str, Any]:
        # Created here, because a closure cannot be pickled.
        return {"multi_avg_fn": get_ema_multi_avg_fn(decay=self.decay)}  # type: ignore[no-untyped-call]  # torch's own

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None and self.update_every_n_steps:
            has_started = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return has_started and step_idx % self.update_every_n_steps == 0
        if epoch_idx is None or self.update_starting_at_epoch is None:
            return False
        return epoch_idx >= self.update_starting_at_epoch
