"""Settings of a Trainer, parsed from its arguments. Parsing uses no device, process or file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainwright.core.duration import Duration
from trainwright.core.process import check_address
from trainwright.loggers.logger import DummyLogger
from trainwright.loggers.registry import resolve_loggers
from trainwright.profilers.profiler import Profiler, resolve_profiler
from trainwright.strategies.precision_names import parse_precision
from trainwright.strategies.select import Selection, select
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.trainer.configuration.apply_defaults import with_launched
from trainwright.trainer.configuration.argument_checks import check_plain_arguments
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.configuration.assembly import default_callbacks, given_callbacks, savers_last
from trainwright.trainer.configuration.checks import check_callbacks, check_graphs, check_needs
from trainwright.trainer.configuration.lengths import Limits, limits_of, parse_grace, validation_interval_of


@dataclass(slots=True)
class Settings:
    """The checked settings of a Trainer.

    Attributes:
        given: the arguments, before environment variables, `fast_dev_run` and `barebones` change some of them.
        arguments: the arguments after these changes.
        selection: the strategy, its settings and its launcher.
        limits: limits of `fit`. The Trainer's `max_epochs` and `max_steps` replace them between fits.
        clip: gradient clipping, or None.
        val_check_interval: see `validation_interval_of`.
        limit_batches: batch limits by kind of data, `"train"`, `"validate"`, `"test"` or `"predict"`: a number, a
            fraction, or None for all batches. `overfit_batches` replaces the limit of
            validation here, and that of training in TrainData.
        callbacks: the user's and the default callbacks.
        loggers: the loggers.
        profiler: records actions.
        root: the absolute folder for the run's files.
        accumulate_grad_batches: micro-batches per optimizer step. A callback may change it before an epoch.
        log_every_n_steps: steps between two flushes of metrics.
        num_sanity_val_steps: validation batches before training; infinite for all.
        preemption_grace_s: seconds from a signal to the end of the process; None ignores signals.
    """

    given: TrainerArguments
    arguments: TrainerArguments
    selection: Selection
    limits: Limits
    clip: GradientClip | None
    val_check_interval: int | float | Duration
    limit_batches: dict[str, int | float | None]
    callbacks: list[Any]
    loggers: list[Any]
    profiler: Profiler
    root: Path
    accumulate_grad_batches: int
    log_every_n_steps: int
    num_sanity_val_steps: int | float
    preemption_grace_s: float | None = None

    @property
    def units(self) -> set[str]:
        """The units of limits and intervals that have one, such as `"samples"` and `"tokens"`."""
        lengths = (*self.limits.others, self.val_check_interval)
        return {length.unit for length in lengths if isinstance(length, Duration)}


def configure(arguments: TrainerArguments) -> Settings:
    """Parse and check all arguments of a Trainer.

    Raises:
        ConfigurationError: an argument is invalid.
    """
    check_plain_arguments(arguments)
    given = arguments
    arguments = with_launched(given)
    dev_batches = int(arguments.fast_dev_run)  # True is 1
    quiet = dev_batches > 0 or arguments.barebones  # without the default ModelCheckpoint
    if dev_batches > 0:
        arguments = _with_fast_dev_run(arguments, dev_batches)
    if arguments.barebones:
        arguments = _with_barebones(arguments)
    clip = GradientClip.parse(arguments.gradient_clip_val, arguments.gradient_clip_algorithm)
    selection = _select(arguments, clip)
    limits = limits_of(arguments)
    # TrainData replaces the limit of training by `overfit_batches` itself, because it also changes the order.
    limit_batches = {
        "train": arguments.limit_train_batches,
        "validate": arguments.overfit_batches or arguments.limit_val_batches,
        "test": arguments.limit_test_batches,
        "predict": arguments.limit_predict_batches,
    }
    callbacks = _callbacks(arguments, quiet)
    check_needs(callbacks, selection)
    root = Path(arguments.default_root_dir or ".").expanduser().absolute()
    loggers = resolve_loggers(arguments.logger if arguments.logger is not None else True, root)
    check_graphs(loggers, selection)
    return Settings(
        given=given,
        arguments=arguments,
        selection=selection,
        limits=limits,
        clip=clip,
        val_check_interval=validation_interval_of(arguments, limits),
        limit_batches=limit_batches,
        callbacks=callbacks,
        loggers=loggers,
        profiler=resolve_profiler(arguments.profiler),
        root=root,
        accumulate_grad_batches=arguments.accumulate_grad_batches,
        log_every_n_steps=arguments.log_every_n_steps or 50,
        num_sanity_val_steps=_sanity_steps(arguments.num_sanity_val_steps),
        preemption_grace_s=parse_grace(arguments.preemption_grace),
    )


def _sanity_steps(num_steps: int | None) -> int | float:
    if num_steps is None:
        return 2
    return math.inf if num_steps == -1 else num_steps


def _with_fast_dev_run(arguments: TrainerArguments, batches: int) -> TrainerArguments:
    """Return the arguments with the values that `fast_dev_run` sets."""
    has_logger = arguments.logger is not False and arguments.logger != []
    return replace(
        arguments,
        max_epochs=1,
        max_steps=batches,
        min_epochs=None,
        min_steps=None,
        max_time=None,
        max_samples=None,
        max_tokens=None,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=DummyLogger() if has_logger else False,
        limit_train_batches=batches,
        limit_val_batches=batches,
        limit_test_batches=batches,
        limit_predict_batches=batches,
    )


def _with_barebones(arguments: TrainerArguments) -> TrainerArguments:
    """Return the arguments with the values that `barebones` sets."""
    return replace(
        arguments,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if arguments.limit_val_batches is None else arguments.limit_val_batches,
    )


def _callbacks(arguments: TrainerArguments, quiet: bool) -> list[Any]:
    """Return the user's callbacks and the default ones."""
    given = given_callbacks(arguments.callbacks)
    check_callbacks(given)
    defaults = default_callbacks(
        given,
        enable_checkpointing=arguments.enable_checkpointing,
        enable_progress_bar=arguments.enable_progress_bar,
        enable_model_summary=arguments.enable_model_summary,
        quiet=quiet,
    )
    return savers_last(given + defaults)


def _select(arguments: TrainerArguments, clip: GradientClip | None) -> Selection:
    """Select the strategy, the devices and the launcher."""
    selection = select(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        precision=parse_precision(arguments.precision or "32-true"),
        compile=arguments.compile,
        launcher=arguments.launcher,
        sync_batchnorm=arguments.sync_batchnorm,
        accumulate_grad_batches=arguments.accumulate_grad_batches,
        clip=clip,
    )
    if not dist.is_initialized():  # the user's process group needs no address
        check_address(selection.topology)
    return selection
