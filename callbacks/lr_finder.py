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
# Standard errors by which a slope must be below 0. Of some 80 slopes of noise the steepest has about 3.
_MIN_STANDARD_ERRORS = 4.0


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
        self._optimal_idx: int | None = None  # the step of the rate that `examine` has returned last, if any

    def lr_of(self, step: int) -> float:
        """Return the learning rate of a 0-based step, from `lr_min` to `lr_max`."""
        progress = step / max(self.num_training - 1, 1)  # from 0 to 1
        if self.mode == "linear":
            return self.lr_min + progress * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** progress)

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
        """Return the rate of `suggestion` and the text of its warning. The text is empty without a warning.

        Sets the point that `plot` marks.
        """
        lrs = self.results["lr"]
        losses = self.results.get("step_loss") or self.results["loss"]
        points = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        self._optimal_idx = None
        if len(points) < 2:
            return None, (
                f"no learning rate can be suggested: {len(points)} of {len(losses)} points remain (skip_begin="
                f"{skip_begin}, skip_end={skip_end}). Increase num_training, or skip fewer points."
            )
        # A line is fitted to `reach` points on each side of its center. With 100 points reach is 12: the centers are
        # the points 12 to 87. Two points have no inner one: one line is fitted to both, and its center is the first.
        max_reach = (len(points) - 1) // 2
        reach = min(max(1, len(points) // 8), max_reach)
        if reach == 0:
            lines = [_fit(points, lrs, losses)]
        else:
            centers = range(reach, len(points) - reach)
            lines = [_fit(points[center - reach : center + reach + 1], lrs, losses) for center in centers]
        steepest = min(range(len(lines)), key=lambda i: lines[i].slope)
        line = lines[steepest]
        if line.slope >= 0:
            return None, (
                f"no learning rate can be suggested: the loss does not fall between {lrs[points[0]]:.3g} and "
                f"{lrs[points[-1]]:.3g}. Check the task and its loss, or test another range (min_lr, max_lr)."
            )
        self._optimal_idx = points[reach + steepest]
        lr = lrs[self._optimal_idx]
        subject = f"the suggested learning rate {lr:.3g} is"
        if len(lines) < 3:
            return lr, (
                f"{subject} one of {len(points)} points, too few for a curve. Increase num_training, or skip fewer "
                "points."
            )
        if steepest == 0:
            return lr, f"{subject} at the beginning of the tested range. Decrease min_lr, and check plot()."
        if steepest == len(lines) - 1:
            return lr, f"{subject} at the end of the tested range. Increase max_lr, and check plot()."
        if line.slope > -_MIN_STANDARD_ERRORS * line.error:
            return lr, (
                f"{subject} where the loss falls most, but the slope there is not larger than the noise between "
                "batches. Increase max_lr if the loss has not fallen yet, or num_training, or the batch size, and "
                "check plot()."
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
        if ax is None:
            figure, axes = plt.subplots()
        else:
            figure = ax.figure
            axes = ax
        axes.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            axes.set_xscale("log")
        axes.set_xlabel("Learning rate")
        axes.set_ylabel("Loss")
        if suggest:
            lr = self.suggestion()
            if lr is not None and self._optimal_idx is not None:
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
    spread = x.square().sum()
    slope = float((x * y).sum() / spread)
    if len(points) < 5:
        return _FittedLine(slope, 0.0)  # too few to separate noise from a curve
    # The line has two parameters, which are subtracted from the number of points.
    variance = (y - slope * x).square().sum() / (len(points) - 2)
    return _FittedLine(slope, float((variance / spread).sqrt()))


class LearningRateFinder(Callback):
    """Callback that tests a range of learning rates before training and sets the best one.

    The test runs training steps, which are not logged or saved, and undoes all their changes. A fit that resumes from a
    checkpoint or continues an earlier fit runs no test and keeps its learning rates.

    Args:
        min_lr: the smallest learning rate. Default: 1e-8.
        max_lr: the largest learning rate. Default: 1.
        num_training_steps: number of learning rates, with one optimizer step each. Default: 100.
        mode: `"exponential"` or `"linear"`: growth of the rates. Default: `"exponential"`.
        early_stop_threshold: end the test when the smoothed loss exceeds `best + (early_stop_threshold - 1) × |best|`,
            where `best` is the lowest smoothed loss so far. None disables the check. Default: 4.0.
        update_attr: set the attribute, and the running optimizer, to the suggestion. Default: True.
        attr_name: an attribute of the task, of the data module, or of the `hparams` of either. Default: `""`, which is
            `"lr"` or, if it does not exist, `"learning_rate"`.

    Attributes:
        optimal_lr: the test's result, an `LRFinder`; None before the test.

    Override `on_fit_start` to do nothing and call `lr_find` from `on_train_epoch_start` to test at chosen epochs.

    Raises:
        ConfigurationError: the mode or the range is not valid. In a run: the attribute does not exist, there is not
            exactly one optimizer, or the task uses manual optimization.
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
        self.optimal_lr: LRFinder | None = None
        # The rate that a test has set, in this session or before a resume. None before it and without `update_attr`.
        self._found_lr: float | None = None
        self._mode = name
        self._min_lr = float(min_lr)
        self._max_lr = float(max_lr)
        self._num_training_steps = num_training_steps
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
        """Run the test now. Set `optimal_lr` and, with `update_attr`, the learning rate.

        Collective. Call it between two steps. With `fast_dev_run` it only warns.

        Raises:
            ConfigurationError: the task has no optimizer, or several.
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
        finder = LRFinder(self._mode, self._min_lr, self._max_lr, self._num_training_steps)
        with trainer.trial_steps(alone=False) as trials:
            test = _RangeTest(finder, trainer.optimizers[0], self._early_stop_threshold)
            trials.train(finder.num_training, before_step=test.before_step, after_step=test.after_step)
        self.optimal_lr = finder
        if attribute is None:
            return
        lr, problem = finder.examine()
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
                base_lr = group.get("initial_lr")  # set by a schedule
                if base_lr:
                    # A warm-up that is at a tenth of its base rate stays at a tenth of the new one.
                    _set_lr(group, lr * group["lr"] / base_lr)
                else:
                    _set_lr(group, lr)
                if base_lr is not None:
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


def _set_lr(group: dict[str, Any], lr: Any) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)  # in place, because a compiled or captured step reads this tensor
    else:
        group["lr"] = lr


class _RangeTest:
    """Set the learning rate of each step of a test and record its loss. End the test if the loss diverges.

    A threshold of None disables this check.
    """

    def __init__(self, finder: LRFinder, optimizer: torch.optim.Optimizer, threshold: float | None) -> None:
        self._finder = finder
        self._optimizer = optimizer
        self._threshold = threshold
        self._mean = 0.0  # running mean of the losses, without bias correction
        self._best = math.inf  # the lowest corrected mean so far
        self._lr = 0.0  # of the current step

    def before_step(self, step: int) -> None:
        self._lr = self._finder.lr_of(step)
        for group in self._optimizer.param_groups:
            _set_lr(group, self._lr)

    def after_step(self, loss: float) -> bool:
        """Record a step's loss, and return whether the loss diverges."""
        results = self._finder.results
        losses = results["loss"]
        results["lr"].append(self._lr)
        results["step_loss"].append(loss)
        if math.isnan(loss):  # a skipped step, or a NaN loss
            losses.append(loss)
            return False
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        # The running mean starts at 0: the divisor, 1 - 0.98 ** n after n losses, corrects this bias, as in Adam.
        num_losses = 1 + sum(map(math.isfinite, losses))
        smoothed = self._mean / (1 - _SMOOTHING**num_losses)
        diverges = False
        if losses and self._threshold is not None:
            max_rise = (self._threshold - 1) * abs(self._best)
            diverges = smoothed > self._best + max_rise
        self._best = min(self._best, smoothed)
        losses.append(smoothed)
        return diverges
