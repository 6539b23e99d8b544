"""Stochastic weight averaging: the mean of the weights over the last epochs, at a separate learning rate."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from trainwright.callbacks.averaged_weights import AveragedWeights, AverageFunction
from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import Run, Stage
from trainwright.core.state import scheduler_state
from trainwright.core.task import TaskModule


class StochasticWeightAveraging(Callback):
    """Callback that replaces the weights at the end of a fit by their mean over epochs (SWA).

    From `swa_epoch_start` on, the start of each epoch adds the weights to the mean, the task's own schedule is paused,
    and the learning rate is annealed to `swa_lrs` epoch by epoch. Training, validation and checkpoints use the current
    weights. The mean is saved in this callback's state, so that a resume is exact. At the end of training the mean is
    copied into the task's parameters. Batch normalization statistics are then recomputed in one pass over the training
    data, without gradients, and averaged over ranks. (Izmailov et al., Averaging Weights Leads to Wider Optima and
    Better Generalization, UAI 2018.)

    Args:
        swa_lrs: the learning rate to anneal to, or a list with one rate per parameter group.
        swa_epoch_start: the first epoch of the average, counted from 1, or a fraction of `max_epochs` (float). Default:
            0.8.
        annealing_epochs: number of epochs over which the learning rate changes. Default: 10.
        annealing_strategy: `"cos"` or `"linear"`. Default: `"cos"`.
        avg_fn: `(average, current, num_averaged) -> new average`. Default: None, which weights all epochs equally.
        device: device of the mean. None uses the device of the weights. Default: `"cpu"`.

    Raises:
        ConfigurationError: a value is out of range. In a Trainer: the strategy's ranks have different parameters. In a
            run: the task has several optimizers or schedules, or batch normalization with manual optimization; or a
            fraction is used without `max_epochs`.
    """

    needs = ("weight_averages",)
    order = Order.FIRST  # the others see the learning rate of the epoch, and in `on_train_end` the mean

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageFunction | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        lrs = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not all(lr > 0 for lr in lrs):
            raise ConfigurationError(f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}): write numbers above 0.")
        # The type chooses the meaning: 1 is the first epoch, 1.0 the last one.
        if isinstance(swa_epoch_start, int):
            is_valid = swa_epoch_start >= 1
        else:
            is_valid = 0 <= swa_epoch_start <= 1
        if not is_valid:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_epoch_start={swa_epoch_start}): write an integer >= 1, or a fraction "
                "of max_epochs as a float from 0.0 to 1.0."
            )
        if annealing_epochs < 0 or annealing_strategy not in ("cos", "linear"):
            raise ConfigurationError(
                f"StochasticWeightAveraging(annealing_epochs={annealing_epochs}, annealing_strategy="
                f"{annealing_strategy!r}): write 0 or more epochs, and 'cos' or 'linear'."
            )
        self._swa_lrs = swa_lrs
        self._swa_epoch_start = swa_epoch_start
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        self._avg_fn = avg_fn
        self._device = device
        self._first_epoch = 0  # 0-based; `on_fit_start` computes it
        # The average and the schedule of the learning rate. None until the first epoch of the average.
        self._weights: AveragedWeights | None = None
        self._schedule: SWALR | None = None
        self._latest_update_epoch = -1  # 0-based epoch at whose start the average was updated last; -1 before it
        # The state of a checkpoint, from `load_state_dict` to `on_fit_start`.
        self._loaded: dict[str, Any] | None = None

    @property
    def swa_start(self) -> int:
        """The 0-based epoch in which averaging begins; known once a fit has started."""
        return self._first_epoch

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage == "fit":
            self._weights = None
            self._schedule = None
            self._loaded = None
            self._latest_update_epoch = -1

    def __getstate__(self) -> dict[str, Any]:
        # Only the state is copied into another process. The task and functions of torch are not.
        return {**vars(self), "_weights": None, "_loaded": self.state_dict(), "_schedule": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        state: dict[str, Any] = {
            "num_averaged": 0,
            "latest_update_epoch": self._latest_update_epoch,
            "scheduler_state": None if self._schedule is None else scheduler_state(self._schedule),
            "average_model_state": {},
            "current_model_state": {},
        }
        weights = self._weights
        if weights is not None:
            state["num_averaged"] = weights.num_averaged
            state["average_model_state"] = weights.average()
            if weights.swapped:
                # At the end of the fit the task's weights are the average, so the checkpoint lacks these.
                state["current_model_state"] = weights.current()
        return state

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            raise ConfigurationError(
                f"StochasticWeightAveraging needs one optimizer and at most one schedule; {type(task).__name__}."
                f"configure_optimizers returned {len(trainer.optimizers)} and {len(trainer.lr_scheduler_configs)}."
            )
        if not task.automatic_optimization and _norms(task):
            raise ConfigurationError(
                f"StochasticWeightAveraging cannot recompute batch normalization statistics in {type(task).__name__}, "
                "whose training_step also steps its optimizers (automatic_optimization=False). Use WeightAveraging."
            )
        self._first_epoch = self._first_averaged_epoch(trainer)
        loaded = self._loaded
        self._loaded = None
        if loaded is None:
            return
        self._latest_update_epoch = loaded["latest_update_epoch"]
        if loaded["scheduler_state"] is not None:
            self._start(trainer, task, loaded["scheduler_state"])
            assert self._weights is not None  # created by `_start`
            current = loaded["current_model_state"] or None
            self._weights.restore(loaded["num_averaged"], average=loaded["average_model_state"], current=current)

    def _first_averaged_epoch(self, trainer: Run) -> int:
        """Return the 0-based epoch of `swa_epoch_start`."""
        start = self._swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs == -1:
                raise ConfigurationError(
                    f"StochasticWeightAveraging(swa_epoch_start={start}) is a fraction of max_epochs, but the Trainer "
                    "has no max_epochs. Pass max_epochs, or use an integer."
                )
            start = int(trainer.max_epochs * start)
        return max(start - 1, 0)

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        epoch = trainer.state.epoch
        if epoch < self._first_epoch:
            return
        if epoch <= self._latest_update_epoch:
            return  # resumed in the middle of the epoch
        if self._schedule is None:
            self._start(trainer, task, None)
        else:
            with warnings.catch_warnings():
                # After an epoch whose steps were all skipped, torch warns of a wrong order of calls.
                warnings.simplefilter("ignore", UserWarning)
                self._schedule.step()
        assert self._weights is not None  # created with the schedule
        self._weights.update()
        self._latest_update_epoch = epoch

    def _start(self, trainer: Run, task: TaskModule, saved: dict[str, Any] | None) -> None:
        """Pause the task's schedule, and start or resume this callback's schedule and the average."""
        optimizer = trainer.optimizers[0]
        rates = [group["lr"] for group in optimizer.param_groups]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # creating a schedule after steps is intended
            self._schedule = SWALR(
                optimizer,
                swa_lr=self._swa_lrs,  # type: ignore[arg-type]  # a list is documented, but not in torch's annotation
                anneal_epochs=self._annealing_epochs,
                anneal_strategy=self._annealing_strategy,
            )
        if saved is not None:
            self._schedule.load_state_dict(copy.deepcopy(saved))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # creating a schedule sets it
        for config in trainer.lr_scheduler_configs:
            config.paused = True
        self._weights = AveragedWeights(task, trainer, device=self._device, use_buffers=False, avg_fn=self._avg_fn)

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        if self._weights is None:
            if trainer.is_global_zero:
                warnings.warn(
                    "StochasticWeightAveraging did not average anything: the fit ended before epoch "
                    f"{self._first_epoch} (0-based). The task has the weights of its last step.",
                    TrainwrightWarning,
                    stacklevel=2,
                )
            return
        self._weights.swap()
        if _norms(task):
            _recompute_statistics(trainer, task)

    def on_fit_end(self, trainer: Run, task: TaskModule) -> None:
        if self._weights is not None:
            self._weights.make_whole()

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if self._weights is not None and self._weights.in_shards:
            self._weights = None  # of a run that failed: they can no longer be gathered


def _norms(task: TaskModule) -> list[_BatchNorm]:
    return [module for module in task.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


@torch.no_grad()
def _recompute_statistics(trainer: Run, task: TaskModule) -> None:
    """Recompute batch normalization statistics over the training data, and average them over ranks. Collective."""
    norms = _norms(task)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch then computes the plain mean over all batches
    try:
        trainer.pass_training_data()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if trainer.world_size > 1:
        for norm in norms:
            for statistic in (norm.running_mean, norm.running_var):
                if statistic is not None:
                    statistic.copy_(trainer.all_gather(statistic).mean(dim=0))
