"""Find the largest batch size that fits into memory."""

from __future__ import annotations

import warnings
from typing import Literal

from trainwright.callbacks.callback import Callback, Order
from trainwright.callbacks.tuned_attribute import TunedAttribute
from trainwright.core.errors import BatchSizeError, ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.hyperparameters import HyperparametersMixin
from trainwright.core.run import Run, Stage, TrialSteps
from trainwright.core.task import TaskModule


class BatchSizeFinder(Callback):
    """Callback that finds the largest batch size that fits into memory before a stage begins, and sets it.

    A trial runs some steps with one size. It creates new loaders by the methods of the task or data module, which must
    read the size from the attribute. Trials are not logged or saved. All state except the attribute is restored
    afterwards. Each process runs its trials without the others. A size that is too large for one process is too
    large for all, so the result fits on every rank.

    `"power"` doubles the size until memory runs out or the data has no batch of that size on every rank. `"binsearch"`
    does the same, then bisects between the largest size that fitted and the smallest that did not.

    Args:
        mode: `"power"` or `"binsearch"`. Default: `"power"`.
        steps_per_trial: steps to try with each size; in `fit` also as many validation batches. Default: 3.
        init_val: the first size. Default: 2.
        max_trials: the search ends after this many sizes that fitted. Default: 25.
        batch_arg_name: name of the attribute. It is set on the task, on the data module, and in the `hparams` of both,
            wherever it exists. Default: `"batch_size"`.
        margin: fraction by which `"binsearch"` reduces the size at the end. Default: 0.05.
        max_val: the largest size to try. The operating system may kill a process that allocates too much host memory,
            instead of raising an error. Default: 8192.

    Attributes:
        optimal_batch_size: the result of the search; `init_val` before it, and None after a stage with `fast_dev_run`,
            which is not searched.

    Override `on_fit_start` to do nothing and call `scale_batch_size` from `on_train_epoch_start` to search at chosen
    epochs.

    Raises:
        ConfigurationError: an argument is out of range. In a run: the attribute does not exist, loaders were passed to
            the Trainer or do not depend on the attribute, or the strategy cannot run steps on a single process.
        BatchSizeError: in a run: not even one sample fits.
    """

    order = Order.FIRST
    needs = ("independent_steps",)
    SUPPORTED_MODES = ("power", "binsearch")

    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        name = mode.lower()
        if name not in self.SUPPORTED_MODES:
            raise ConfigurationError(
                f"BatchSizeFinder(mode={mode!r}): unknown.{nearest(mode, self.SUPPORTED_MODES)} Known: 'power', "
                "'binsearch'."
            )
        # With fractions or smaller numbers the search would not end, or would not try any size.
        counts = {
            "steps_per_trial": steps_per_trial,
            "init_val": init_val,
            "max_trials": max_trials,
            "max_val": max_val,
        }
        for argument, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"BatchSizeFinder({argument}={value!r}): write a whole number of at least 1.")
        if not 0.0 <= margin < 1.0:
            raise ConfigurationError(f"BatchSizeFinder(margin={margin!r}): write a fraction of at least 0 and below 1.")
        self.optimal_batch_size: int | None = init_val
        self._mode = name
        self._steps_per_trial = steps_per_trial
        self._init_val = init_val
        self._max_trials = max_trials
        self._batch_arg_name = batch_arg_name
        self._margin = margin
        self._max_val = max_val

    def attribute(self, task: HyperparametersMixin, datamodule: HyperparametersMixin | None) -> TunedAttribute:
        """Return the attribute that holds the batch size.

        Raises:
            ConfigurationError: the attribute does not exist. The message lists existing attributes.
        """
        return TunedAttribute(
            [self._batch_arg_name], task, datamodule, purpose="BatchSizeFinder(batch_arg_name=...)", kind=int
        )

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self.attribute(task, trainer.datamodule)

    def scale_batch_size(self, trainer: Run, task: TaskModule) -> None:
        """Search, and set the batch size and `optimal_batch_size`.

        Collective. Call it between two steps. With `fast_dev_run` it only warns.

        Raises:
            ConfigurationError, BatchSizeError: see the class. The attribute has its previous value.
        """
        if trainer.fast_dev_run:
            warnings.warn("fast_dev_run: the batch size is not searched for.", TrainwrightWarning, stacklevel=2)
            self.optimal_batch_size = None
            return
        attribute = self.attribute(task, trainer.datamodule)
        initial_size = attribute.get()
        found_size = initial_size
        try:
            with trainer.trial_steps(alone=True, remakes_loaders=True) as trials:
                try:
                    tries = _Tries(trials, attribute, self._steps_per_trial)
                    found_size = self._search(tries, trials.capacity(), trainer.world_size)
                finally:
                    # The end of the trial steps restores the state from before, with the loaders of this size.
                    attribute.set(initial_size)
                trials.at_end(lambda: attribute.set(found_size))
        except BaseException:
            attribute.set(initial_size)
            raise
        self.optimal_batch_size = found_size
        trainer.print(f"BatchSizeFinder: {attribute.name} = {found_size}")

    def _search(self, tries: _Tries, capacity: int | None, world_size: int) -> int:
        """Return the largest size that fitted, which `"binsearch"` reduces by the margin. The same on every rank."""
        limit = self._max_val if capacity is None else min(self._max_val, capacity)
        if limit < 1:
            raise ConfigurationError(
                f"BatchSizeFinder: there are fewer samples than processes ({world_size}). Use fewer processes or more "
                "samples."
            )
        high: int | None = None  # the smallest size that did not fit
        low = 0  # the largest size that fitted
        size = min(self._init_val, limit)
        num_fitted = 0
        while True:
            if tries.fits(size):
                low = size
                num_fitted += 1
            else:
                high = size
            if low == 0 and size == 1:  # the smallest size did not fit
                raise BatchSizeError(
                    f"BatchSizeFinder: not even one sample fits into memory: {tries.reason.rstrip('.')}. Use a smaller "
                    "model, smaller samples, or a lower precision."
                )
            size = self._next(low, high, limit)
            if size <= low or num_fitted >= self._max_trials:
                break
        if self._mode == "binsearch" and self._margin > 0:
            reduced = max(1, int(low * (1 - self._margin)))
            # A smaller size than one that fitted usually fits too, but the result must be a size that has run.
            return reduced if tries.fits(reduced) else low
        return low

    def _next(self, low: int, high: int | None, limit: int) -> int:
        """Return the size to try next. A size that is not above `low` ends the search."""
        if low == 0:
            assert high is not None  # the first size has been tried
            return high // 2
        bisects = self._mode == "binsearch"
        if high is not None:
            return (low + high) // 2 if bisects else low
        if 2 * low <= limit:
            return 2 * low
        # The next power of two is above the limit. `max_val` is tried itself. The number of samples is tried by a
        # binary search only, because "power" returns a power of two times `init_val`.
        return limit if bisects or limit == self._max_val else low

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        self.scale_batch_size(trainer, task)

    on_test_start = on_predict_start = on_fit_start

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        if trainer.stage == "validate":
            self.scale_batch_size(trainer, task)


class _Tries:
    """Trials of batch sizes, with their results."""

    def __init__(self, trials: TrialSteps, attribute: TunedAttribute, num_steps: int) -> None:
        self._trials = trials
        self._attribute = attribute
        self._num_steps = num_steps
        self._results: dict[int, bool] = {}  # size → whether it fitted
        self.reason = ""  # of the last trial that ran out of memory

    def fits(self, size: int) -> bool:
        """Return whether steps with this batch size fit into every rank's memory."""
        if size in self._results:
            return self._results[size]
        self._attribute.set(size)
        trial = self._trials.try_out(self._num_steps)
        if trial.batch_size is not None and trial.batch_size != size:
            raise ConfigurationError(
                f"BatchSizeFinder: {self._attribute.name} was set to {size}, but the loader makes batches of "
                f"{trial.batch_size}. Create the loader with batch_size=self.{self._attribute.name} in each call "
                "of the method that returns it."
            )
        self._results[size] = trial.fits
        if trial.reason:
            self.reason = trial.reason
        return trial.fits
