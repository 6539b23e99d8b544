"""Searches for a batch size and a learning rate before training."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from trainwright.callbacks.batch_size_finder import BatchSizeFinder
from trainwright.callbacks.lr_finder import LearningRateFinder, LRFinder
from trainwright.core.errors import ConfigurationError, unknown
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Stage
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.trainer.checkpoints.load_request import LoadRequest
from trainwright.trainer.data import Sources
from trainwright.trainer.run import StageRun
from trainwright.trainer.trainer import Trainer

Finder = BatchSizeFinder | LearningRateFinder
_KINDS: dict[str, Stage] = {"fit": "fit", "validate": "validate", "test": "test", "predict": "predict"}


class Tuner:
    """Search for a batch size or learning rate with a Trainer's settings. Sets the result on the task or data module.

    A search sets up a stage like the Trainer, without callbacks and loggers. Afterwards only the attribute has changed,
    not the Trainer's progress and settings, the task's weights, the generators or the files. After a search with a new
    Trainer, `trainer.model`, `trainer.datamodule` and the loaders, such as `trainer.train_dataloader`, are those of the
    search, and `task.trainer` is the Trainer. Arguments and defaults are those of Lightning 2.6.

    Args:
        trainer: provides the settings: device, strategy, precision, accumulation and limits.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def scale_batch_size(
        self,
        model: TaskModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        dataloaders: object = None,
        datamodule: DataModule | None = None,
        method: Literal["fit", "validate", "test", "predict"] = "fit",
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Search for the largest batch size that fits into memory and set it; see `BatchSizeFinder`. Collective.

        Args:
            model: the task.
            train_dataloaders: a data module. Loaders are not accepted, as their batch size cannot be changed.
            val_dataloaders: validation loaders for `"fit"`. Default: those of the task or data module.
            dataloaders: a data module for the other methods.
            datamodule: a data module to use instead of `train_dataloaders` or `dataloaders`.
            method: the stage whose steps are tried.
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val: see `BatchSizeFinder`.

        Returns:
            The size; None with `fast_dev_run`.

        Raises:
            ConfigurationError: the Trainer already has a `BatchSizeFinder`.
            ConfigurationError, TrainwrightError: see `BatchSizeFinder`.
        """
        self._refuse_second(BatchSizeFinder)
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        sources = _sources(method, datamodule, train_dataloaders, val_dataloaders, dataloaders)
        attribute = finder.attribute(model, sources.datamodule)
        size: int | None = self._search(method, model, sources, finder)
        if size is not None:
            attribute.set(size)
        return size

    def lr_find(
        self,
        model: TaskModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        dataloaders: object = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Test a range of learning rates and set the suggested one; see `LearningRateFinder`. Collective.

        Args:
            model: the task.
            train_dataloaders: a training loader, or a data module.
            datamodule: a data module to use instead of a loader.
            val_dataloaders, dataloaders: not needed; accepted as in `fit`.
            method: `"fit"`.
            min_lr, max_lr, mode, early_stop_threshold, update_attr, attr_name: see `LearningRateFinder`.
            num_training: number of learning rates to try, one optimizer step each.

        Returns:
            The test's results; None with `fast_dev_run`.

        Raises:
            ConfigurationError: the Trainer already has a `LearningRateFinder`, or `method` is not `"fit"`. See also
                `LearningRateFinder`.
        """
        if method != "fit":
            raise ConfigurationError(f"lr_find(method={method!r}) is not supported. Use method='fit'.")
        self._refuse_second(LearningRateFinder)
        finder = LearningRateFinder(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        sources = _sources(method, datamodule, train_dataloaders, val_dataloaders, dataloaders)
        attribute = finder.attribute(model, sources.datamodule)
        results: LRFinder | None = self._search(method, model, sources, finder)
        if results is not None and attribute is not None:
            suggestion = results.examine()[0]  # `suggestion()` would repeat the search's warnings
            if suggestion is not None:
                attribute.set(suggestion)
        return results

    def _refuse_second(self, kind: type) -> None:
        if any(isinstance(callback, kind) for callback in self._trainer.callbacks):
            raise ConfigurationError(
                f"the Trainer's callbacks already contain a {kind.__name__}. Remove it to search with a Tuner."
            )

    def _search(self, method: str, task: TaskModule, sources: Sources, finder: Finder) -> Any:
        """Run the search as a stage of the Trainer and return the result of the finder."""
        make_loop = partial(_Search, finder=finder)
        stage = _KINDS[method]
        old_trainer = vars(task).get("_run")  # not `task.trainer`, which raises an error without a Trainer
        try:
            with isolate_rng():
                result = self._trainer._start(stage, task, sources, LoadRequest(None), make_loop, is_trial=True)
        finally:
            if vars(task).get("_run") is not old_trainer:
                task.trainer = old_trainer
        if old_trainer is None:
            task.trainer = self._trainer
        return result


class _Search:
    """The loop of a stage that only searches.

    Args:
        run: the run, set up.
        finder: runs the search.
    """

    def __init__(self, run: StageRun, *, finder: Finder) -> None:
        self._run = run
        self._finder = finder

    def run(self) -> Any:
        """Return the result of the search."""
        run = self._run
        finder = self._finder
        stage = run.stage or "fit"
        finder.setup(run.trainer, run.task, stage)
        if isinstance(finder, BatchSizeFinder):
            finder.scale_batch_size(run.trainer, run.task)
        else:
            finder.lr_find(run.trainer, run.task)
        run.data.show("train" if stage == "fit" else stage)
        if stage == "fit" and run.data.has_validation:
            run.data.show("validate")
        return finder.optimal_batch_size if isinstance(finder, BatchSizeFinder) else finder.optimal_lr


def _sources(method: str, datamodule: object, train: object, validate: object, others: object) -> Sources:
    """Return the data sources for `method`.

    Raises:
        ConfigurationError: the method is unknown, or the loaders are for another method.
    """
    if method not in _KINDS:
        raise unknown("method", method, _KINDS)
    if method == "fit":
        if others is not None:
            raise ConfigurationError("method='fit' takes train_dataloaders and val_dataloaders, not dataloaders.")
        return Sources.of("fit", datamodule, train=train, validate=validate)
    if train is not None or validate is not None:
        raise ConfigurationError(f"method={method!r} takes dataloaders, not train_dataloaders or val_dataloaders.")
    return Sources.of(method, datamodule, **{method: others})
