"""A range test of learning rates: train with increasing rates, and suggest one from the losses."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from trainwright.callbacks.callback import Callback, Order
from trainwright.callbacks.tuned_attribute import TunedAttribute
from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest, require_package
from trainwright.core.hyperparameters import HyperparametersMixin
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODES = ("exponential", "linear")
_SMOOTHING = 0.98  # of the running mean of losses
_CERTAIN = 4.0  # standard errors by which a slope must be below 0; of some 80 slopes of noise the steepest has about 3


class LRFinder:
    """Result of a range test.

    Args:
        mode: `"exponential"` or `"linear"`: growth of the learning rates.
        lr_min: the first learning rate.
        lr_max: the last learning rate.
        num_training: number of learning rates to try.

    Attributes:
        results: lists with one value per step: `"lr"`, the learning rate; `"step_loss"`, the loss over all ranks; and
            `"loss"`, its running mean with bias correction.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": [], "step_loss": []}
        self._optimal_idx: int | None = None

    def lr_of(self, step: int) -> float:
        """Return the learning rate of a 0-based step, from `lr_min` to `lr_max`."""
        share = step / max(self.num_training - 1, 1)
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls most steeply over the logarithm of the rate.

        The slope at a rate is that of a line fitted to the losses around it. The line uses an eighth of all steps on
        each side, to reduce the noise of single batches.

        Args:
            skip_begin: Number of points to skip at the beginning. Default: 10.
            skip_end: Number of points to skip at the end. Default: 1.

        Returns:
            None, with a warning, if fewer than two points with a finite loss remain, or the loss never falls.

        Warns:
            TrainwrightWarning: the rate is at an edge of the range, or the slope there is not larger than the noise.
        """
        lr, problem = self.examine(skip_begin, skip_end)
        if problem:
            warnings.warn(problem, TrainwrightWarning, stacklevel=2)
        return lr

    def examine(self, skip_begin: int = 10, skip_end: int = 1) -> tuple[float | None, str]:
        """Return the rate of `suggestion` and the text of its warning. The text is empty without a warning."""
        lrs = self.results["lr"]
        losses = self.results.get("step_loss") or self.results["loss"]
        points = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        self._optimal_idx = None
        if len(points) < 2:
            return None, (
                f"no learning rate can be suggested: {len(points)} of {len(losses)} points remain (skip_begin="
                f"{skip_begin}, skip_end={skip_end}). Increase num_training, or skip fewer points."
            )
        reach = min(max(1, len(points) // 8), (len(points) - 1) // 2)
        ends = len(points) - reach if reach else 1  # two points have one slope
        lines = [_fit(points[c - reach : c + reach + 1] if reach else points, lrs, losses) for c in range(reach, ends)]
        steepest = min(range(len(lines)), key=lambda i: lines[i].slope)
        if lines[steepest].slope >= 0:
            return None, (
                f"no learning rate can be suggested: the loss does not fall between {lrs[points[0]]:.3g} and "
                f"{lrs[points[-1]]:.3g}. Check the task and its loss, or test another range (min_lr, max_lr)."
            )
        self._optimal_idx = points[reach + steepest]
        lr = lrs[self._optimal_idx]
        where = f"the suggested learning rate {lr:.3g} is"
        if len(lines) < 3:
            return (
                lr,
                f"{where} one of {len(points)} points, too few for a curve. Increase num_training, or skip fewer "
                "points.",
            )
        if steepest == 0:
            return lr, f"{where} at the beginning of the tested range. Decrease min_lr, and check plot()."
        if steepest == len(lines) - 1:
            return lr, f"{where} at the end of the tested range. Increase max_lr, and check plot()."
        if lines[steepest].slope > -_CERTAIN * lines[steepest].error:
            return lr, (
                f"{where} where the loss falls most, but the slope there is not larger than the noise between batches. "
                "Increase max_lr if the loss has not fallen yet, or num_training, or the batch size, and check plot()."
            )
        return lr, ""

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Draw losses over learning rates and return the matplotlib figure.

        Args:
            suggest: mark the suggested learning rate. Default: False.
            show: also show it on the screen. Default: False.
            ax: Axes to draw on. Default: those of a new figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        plt: Any = require_package("matplotlib.pyplot", purpose="LRFinder.plot")
        figure, axes = plt.subplots() if ax is None else (ax.figure, ax)
        axes.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            axes.set_xscale("log")
        axes.set_xlabel("Learning rate")
        axes.set_ylabel("Loss")
        if suggest and (lr := self.suggestion()) is not None and self._optimal_idx is not None:
            axes.plot(lr, self.results["loss"][self._optimal_idx], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure


class _FittedLine(NamedTuple):
    slope: float
    error: float  # of the slope: one standard deviation


def _fit(points: list[int], lrs: list[float], losses: list[float]) -> _FittedLine:
    """Fit a line to some losses over the logarithms of their learning rates, by least squares."""
    x = torch.tensor([lrs[i] for i in points], dtype=torch.float64).log()
    y = torch.tensor([losses[i] for i in points], dtype=torch.float64)
    x = x - x.mean()
    y = y - y.mean()
    slope = float((x * y).sum() / x.square().sum())
    if len(points) < 5:
        return _FittedLine(slope, 0.0)  # too few to separate noise from a curve
    return _FittedLine(slope, float(((y - slope * x).square().sum() / (len(points) - 2) / x.square().sum()).sqrt()))


class LearningRateFinder(Callback):
    """Callback that tests a range of learning rates before training and sets the best one.

    The test runs training steps, which are not logged or saved, and undoes all their changes. There is no test in a fit
    that resumes from a checkpoint or continues an earlier fit: the fit keeps its learning rates.

    Args:
        min_lr: the smallest learning rate. Default: 1e-8.
        max_lr: the largest learning rate. Default: 1.
        num_training_steps: number of learning rates, with one optimizer step each. Default: 100.
        mode: `"exponential"` or `"linear"`: growth of the rates. Default: `"exponential"`.
        early_stop_threshold: end the test when the smoothed loss exceeds `best + (early_stop_threshold - 1) × |best|`,
            where `best` is the lowest smoothed loss so far. None disables the check. Default: 4.0.
        update_attr: set the attribute, and the running optimizer, to the suggestion. Default: True.
        attr_name: an attribute of the task, of the data module, or of the `hparams` of either. Default: `"lr"` or
            `"learning_rate"`.

    Attributes:
        optimal_lr: the test's result, an `LRFinder`; None before the test.

    Override `on_fit_start` to do nothing and call `lr_find` from `on_train_epoch_start` to test at chosen epochs.

    Raises:
        ConfigurationError: an argument is out of range. In a run: the attribute does not exist, there is not exactly
            one optimizer, or the task uses manual optimization.
    """

    order = Order.FIRST
    SUPPORTED_MODES = _MODES

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        name = mode.lower()
        if name not in _MODES:
            raise ConfigurationError(
                f"LearningRateFinder(mode={mode!r}): unknown.{nearest(mode, _MODES)} Known: 'exponential', 'linear'."
            )
        if not 0 < min_lr < max_lr:
            raise ConfigurationError(
                f"LearningRateFinder(min_lr={min_lr!r}, max_lr={max_lr!r}): write 0 < min_lr < max_lr."
            )
        if isinstance(num_training_steps, bool) or not isinstance(num_training_steps, int) or num_training_steps < 1:
            raise ConfigurationError(
                f"LearningRateFinder(num_training_steps={num_training_steps!r}): write a whole number of at least 1."
            )
        self.optimal_lr: LRFinder | None = None
        self._found_lr: float | None = None
        self._result = (name, float(min_lr), float(max_lr), num_training_steps)
        self._early_stop_threshold = early_stop_threshold
        self._update_attr = update_attr
        self._attr_name = attr_name

    def attribute(self, task: HyperparametersMixin, datamodule: HyperparametersMixin | None) -> TunedAttribute | None:
        """Return the attribute that holds the learning rate, or None without `update_attr`.

        Raises:
            ConfigurationError: the attribute does not exist. The message lists existing attributes.
        """
        if not self._update_attr:
            return None
        names = [self._attr_name] if self._attr_name else ["lr", "learning_rate"]
        return TunedAttribute(names, task, datamodule, purpose="LearningRateFinder(attr_name=...)", kind=float)

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit":
            return
        self.attribute(task, trainer.datamodule)
        if not task.automatic_optimization:
            raise ConfigurationError(
                f"LearningRateFinder: {type(task).__name__} uses manual optimization (automatic_optimization=False), "
                "so that the loss of a step is not known. Search for the learning rate yourself."
            )

    def lr_find(self, trainer: Run, task: TaskModule) -> None:
        """Run the test now. Set `optimal_lr` and, with `update_attr`, the learning rate. Collective. Call it at a step
        boundary.
        """
        if trainer.fast_dev_run:
            warnings.warn("fast_dev_run: the learning rate is not searched for.", TrainwrightWarning, stacklevel=2)
            return
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"LearningRateFinder: configure_optimizers returned {len(trainer.optimizers)} optimizers; a range test "
                "needs exactly one."
            )
        attribute = self.attribute(task, trainer.datamodule)
        found = LRFinder(*self._result)
        with trainer.trial_steps(alone=False) as trials:
            watch = _Watch(found, trainer.optimizers[0], self._early_stop_threshold)
            trials.train(found.num_training, before_step=watch.before_step, after_step=watch.after_step)
        self.optimal_lr = found
        if attribute is None:
            return
        lr, problem = found.examine()
        if problem and trainer.is_global_zero:
            advice = "" if lr is not None else f" {attribute.name} is unchanged."
            warnings.warn(f"LearningRateFinder: {problem}{advice}", TrainwrightWarning, stacklevel=2)
        if lr is not None:
            attribute.set(lr)
            self._found_lr = lr
            self.apply(trainer, lr)
            trainer.print(f"LearningRateFinder: {attribute.name} = {lr:.3g}")

    def apply(self, trainer: Run, lr: float) -> None:
        """Make the running optimizer and its schedules continue from `lr`. A warm-up continues at its current step."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                base = group.get("initial_lr")
                rate = lr * group["lr"] / base if base else lr
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
                if base is not None:
                    group["initial_lr"] = lr
        for config in trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [lr] * len(config.scheduler.base_lrs)

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        if trainer.state.step == 0:
            return self.lr_find(trainer, task)
        attribute = self.attribute(task, trainer.datamodule)
        if attribute is not None and self._found_lr is not None:
            attribute.set(self._found_lr)  # the optimizer's own state has it already

    def state_dict(self) -> dict[str, Any]:
        return {} if self._found_lr is None else {"lr": self._found_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found_lr = state_dict.get("lr")


class _Watch:
    """Set the learning rate of each step of a test and record its loss. End the test if the loss diverges."""

    def __init__(self, found: LRFinder, optimizer: torch.optim.Optimizer, threshold: float | None) -> None:
        self._found = found
        self._optimizer = optimizer
        self._threshold = threshold
        self._mean = 0.0
        self._best = math.inf
        self._lr = 0.0

    def before_step(self, step: int) -> None:
        self._lr = self._found.lr_of(step)
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self._lr)
            else:
                group["lr"] = self._lr

    def after_step(self, loss: float) -> bool:
        losses = self._found.results["loss"]
        self._found.results["lr"].append(self._lr)
        self._found.results["step_loss"].append(loss)
        if math.isnan(loss):  # a skipped step, or a NaN loss
            losses.append(loss)
            return False
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        smoothed = self._mean / (1 - _SMOOTHING ** (1 + sum(map(math.isfinite, losses))))
        rise = math.inf if self._threshold is None else (self._threshold - 1) * abs(self._best)
        diverges = bool(losses) and smoothed > self._best + rise
        self._best = min(self._best, smoothed)
        losses.append(smoothed)
        return diverges
