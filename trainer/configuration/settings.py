"""Settings of a Trainer, parsed from its arguments. Parsing uses no device, process or file."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainwright.core.duration import Duration, parse_time
from trainwright.core.errors import ArgumentTypeError, ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.process import check_address, detect
from trainwright.loggers.logger import DummyLogger
from trainwright.loggers.registry import resolve_loggers
from trainwright.profilers.profiler import Profiler, resolve_profiler
from trainwright.strategies.precision_names import parse_precision
from trainwright.strategies.select import Selection, select
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.configuration.assembly import default_callbacks, given_callbacks, savers_last
from trainwright.trainer.configuration.checks import check_callbacks, check_graphs, check_needs
from trainwright.trainer.configuration.launcher_defaults import with_launched

DEFAULT_MAX_EPOCHS = 1000  # of a fit without any limit
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_POLICIES = ("raise", "skip", "rollback")  # of `on_nonfinite`
# Arguments of other trainers and their replacements.
_ELSEWHERE = {
    "gpus": "devices=…, accelerator='gpu'",
    "tpu_cores": "accelerator='tpu'",
    "num_processes": "devices=…, accelerator='cpu'",
    "distributed_backend": "strategy=…",
    "resume_from_checkpoint": "fit(ckpt_path=…)",
    "checkpoint_callback": "enable_checkpointing=… and callbacks=[ModelCheckpoint(…)]",
    "weights_summary": "enable_model_summary=… and callbacks=[ModelSummary(…)]",
    "progress_bar_refresh_rate": "callbacks=[TQDMProgressBar(refresh_rate=…)]",
    "track_grad_norm": "trainer.last_step.grad_norm",
    "auto_lr_find": "Tuner(trainer).lr_find(…), or callbacks=[LearningRateFinder()]",
    "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(…), or callbacks=[BatchSizeFinder()]",
    "terminate_on_nan": "on_nonfinite='raise'",
}
# Arguments of Lightning for which only the default is accepted, with advice about other values.
_NOT_SERVED = {
    "plugins": "plugins are not supported. Remove the argument. Use precision= for number formats, arguments of the "
    "strategy for the engine, launcher= for the cluster, and sync_batchnorm=True for BatchNorm.",
    "model_registry": "a model registry is not supported. Remove the argument and upload checkpoints with "
    "ModelCheckpoint(dirpath='s3://…').",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a fit.

    Attributes:
        max_epochs: maximum number of epochs; None for no limit.
        max_steps: maximum number of optimizer steps; -1 for no limit.
        others: further limits, in samples, tokens or seconds.
        min_epochs, min_steps: stop requests take effect once both are reached.
    """

    max_epochs: int | None
    max_steps: int
    others: tuple[Duration, ...]
    min_epochs: int
    min_steps: int

    def with_changed(self, name: str, value: int | None) -> Limits:
        """Return the limits with another value of `name`. None, and -1 for a maximum, mean no limit.

        Raises:
            ConfigurationError: The value is not a whole number, or is too small.
        """
        is_maximum = name in ("max_epochs", "max_steps")
        _whole(name, value, -1 if is_maximum else 0, "None for no bound")
        none = {"max_epochs": None, "max_steps": -1, "min_epochs": 0, "min_steps": 0}[name]
        changed: dict[str, Any] = {name: none if value in (None, -1) else value}
        return replace(self, **changed)


def parse_limits(
    *,
    max_epochs: int | None,
    max_steps: int | None,
    max_time: str | datetime.timedelta | dict[str, int] | None,
    max_samples: int | None,
    max_tokens: int | None,
    min_epochs: int | None,
    min_steps: int | None,
) -> Limits:
    """Parse the limits of a fit. Default without any limit: 1,000 epochs.

    Raises:
        ConfigurationError: a limit is not a whole number, or a minimum is above its maximum.
    """
    max_steps = -1 if max_steps is None else max_steps
    for name, value, lowest in (("max_epochs", max_epochs, -1), ("max_steps", max_steps, -1)):
        _whole(name, value, lowest, "-1 for no bound")
    for name, value in (("max_samples", max_samples), ("max_tokens", max_tokens)):
        _whole(name, value, 1, "None for no bound")
    for name, value in (("min_epochs", min_epochs), ("min_steps", min_steps)):
        _whole(name, value, 0, "None for no bound")
    others: list[Duration] = []
    if max_samples is not None:
        others.append(Duration(max_samples, "samples"))
    if max_tokens is not None:
        others.append(Duration(max_tokens, "tokens"))
    if max_time is not None:
        others.append(parse_time(max_time, "max_time"))
    if max_epochs is None:
        epochs = None if max_steps != -1 or others else DEFAULT_MAX_EPOCHS
    else:
        epochs = None if max_epochs == -1 else max_epochs
    if epochs is not None and min_epochs is not None and min_epochs > epochs:
        raise ConfigurationError(f"min_epochs={min_epochs} is more than max_epochs={epochs}. Raise max_epochs.")
    if max_steps != -1 and min_steps is not None and min_steps > max_steps:
        raise ConfigurationError(f"min_steps={min_steps} is more than max_steps={max_steps}. Raise max_steps.")
    return Limits(epochs, max_steps, tuple(others), min_epochs or 0, min_steps or 0)


def parse_validation_interval(value: object) -> int | float | Duration:
    """Parse `val_check_interval`: a whole number of batches, a fraction of an epoch, or a Duration.

    Raises:
        ConfigurationError: the value is invalid.
    """
    if value is None:
        return 1.0
    if isinstance(value, (str, Duration, datetime.timedelta, dict)):
        try:
            duration = parse_time(value, "it") if isinstance(value, dict) else Duration(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"val_check_interval: {error}") from None
        if duration.value <= 0:
            raise ConfigurationError(f"val_check_interval={value!r} must be above 0.")
        return duration
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(
            f"val_check_interval={value!r}: write a whole number of batches, a fraction of an epoch such as 0.25, or a "
            "length with its unit such as '500 steps' or {'minutes': 5}."
        )
    if isinstance(value, float) and not 0.0 < value <= 1.0:
        raise ConfigurationError(
            f"val_check_interval={value!r}: a float is a fraction of an epoch, above 0 and up to 1.0. For a number of "
            f"batches write {max(int(value), 1)}."
        )
    if isinstance(value, int) and value < 1:
        raise ConfigurationError(f"val_check_interval={value!r} batches: must be at least 1.")
    return value


def _validation_interval(arguments: TrainerArguments, limits: Limits) -> int | float | Duration:
    # Libraries pass min(interval, max_steps). If nothing is trained, the interval has no effect.
    trains_nothing = 0 in (limits.max_steps, limits.max_epochs)
    if trains_nothing and arguments.val_check_interval == 0:
        return 1.0
    return parse_validation_interval(arguments.val_check_interval)


def check_plain_arguments(arguments: TrainerArguments) -> None:
    """Check the values of arguments, and pairs of arguments that contradict each other.

    Raises:
        ConfigurationError: an argument is invalid.
    """
    for name in ("accumulate_grad_batches", "log_every_n_steps", "num_nodes"):
        _whole(name, getattr(arguments, name), 1)
    for name in ("reload_dataloaders_every_n_epochs", "max_rollbacks"):
        _whole(name, getattr(arguments, name), 0)
    _whole("num_sanity_val_steps", arguments.num_sanity_val_steps, -1, "-1 for all batches")
    _whole("check_val_every_n_epoch", arguments.check_val_every_n_epoch, 1, "None to count batches over epochs")
    for name in (*_LIMITS, "overfit_batches"):
        _limit(name, getattr(arguments, name))
    if arguments.fast_dev_run is not True and arguments.fast_dev_run is not False:
        _whole("fast_dev_run", arguments.fast_dev_run, 0)
    if arguments.check_val_every_n_epoch is None and isinstance(arguments.val_check_interval, float):
        raise ConfigurationError(
            "check_val_every_n_epoch=None counts batches over epochs, so "
            f"val_check_interval={arguments.val_check_interval!r} cannot be a fraction of an epoch. Use a whole "
            "number of batches."
        )
    for name, instead in _NOT_SERVED.items():
        value = getattr(arguments, name)
        if name == "plugins" and value:
            value = _without_needless(value)
        if value is not None and value != []:
            raise ConfigurationError(f"{name}={value!r}: {instead}")
    if arguments.barebones:
        _check_barebones(arguments)
    if arguments.on_save_error not in ("raise", "warn"):
        raise ConfigurationError(f"on_save_error={arguments.on_save_error!r} is unknown. Write 'raise' or 'warn'.")
    if arguments.on_interrupt not in (None, "return", "raise"):
        raise ConfigurationError(f"on_interrupt={arguments.on_interrupt!r} is unknown. Write 'return' or 'raise'.")
    _whole("seed", arguments.seed, 0, "None for torch's initial seed")
    _whole("max_skipped", arguments.max_skipped, 1, "None for no bound")
    policy = arguments.on_nonfinite
    if policy not in (None, *_POLICIES):
        raise ConfigurationError(
            f"on_nonfinite={policy!r} is unknown.{nearest(str(policy), _POLICIES)} Write 'raise', 'skip' or "
            "'rollback', or None to disable the check."
        )
    if arguments.uneven_batches not in ("pad", "stop", "error"):
        raise ConfigurationError(
            f"uneven_batches={arguments.uneven_batches!r} is unknown."
            f"{nearest(str(arguments.uneven_batches), ('pad', 'stop', 'error'))} Known: 'pad', 'stop', 'error'."
        )


def refuse_unknown(name: str, _: object, known: Iterable[str]) -> None:
    """Raise an error for an unknown argument of the Trainer. The message names the most similar argument.

    Raises:
        ArgumentTypeError: always.
    """
    hint = f" Use {_ELSEWHERE[name]} instead." if name in _ELSEWHERE else nearest(name, known)
    raise ArgumentTypeError(f"Trainer has no argument {name!r}.{hint}")


_OLD_NAMES = {
    "train_dataloader": "train_dataloaders",
    "train_loader": "train_dataloaders",
    "test_dataloaders": "dataloaders",
}


def refuse_of_verb(verb: str, name: str, _: object, known: Iterable[str]) -> None:
    """Raise an error for an unknown argument of `fit`, `validate`, `test` or `predict`, with the most similar argument.

    Raises:
        ArgumentTypeError: always.
    """
    own = [each for each in known if each != "self"]
    new = _OLD_NAMES.get(name)
    hint = f" Use {new} instead." if new in own else nearest(name, own)
    raise ArgumentTypeError(f"{verb}() has no argument {name!r}.{hint} It takes: {', '.join(own)}.")


def _check_barebones(arguments: TrainerArguments) -> None:
    names = ("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary", "detect_anomaly")
    for name in (*names, "profiler", "log_every_n_steps", "num_sanity_val_steps"):
        if value := getattr(arguments, name):
            raise ConfigurationError(f"barebones=True contradicts {name}={value!r}. Remove one of them.")
    if arguments.fast_dev_run:
        raise ConfigurationError("barebones=True and fast_dev_run contradict each other. Remove one of them.")


def _limit(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value:
        raise ConfigurationError(
            f"{name}={value!r}: write a whole number of batches, or a fraction between 0.0 and 1.0."
        )
    if 1.0 < value < float("inf") and value != int(value):
        raise ConfigurationError(
            f"{name}={value!r}: write a fraction of at most 1.0, or a whole number of batches such as {int(value)}."
        )


def _whole(name: str, value: object, lowest: int, otherwise: str = "") -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        hint = f" ({otherwise})" if otherwise else ""
        raise ConfigurationError(f"{name}={value!r}: write a whole number of at least {lowest}{hint}.")


def parse_grace(value: float | str | datetime.timedelta | Duration | None) -> float | None:
    """Parse `preemption_grace`. Return seconds, or None if signals are not handled.

    Raises:
        ConfigurationError: the value is not a positive duration.
    """
    if value is None:
        return None
    try:
        length = Duration(value, "seconds") if isinstance(value, (int, float)) else Duration(value)
    except (ConfigurationError, TypeError) as error:
        raise ConfigurationError(f"preemption_grace={value!r} is not a duration in time. {error}") from None
    if length.unit != "seconds" or not length.value > 0:
        raise ConfigurationError(
            f"preemption_grace={value!r} is not a duration in time. Write seconds, '2 min', or None to ignore signals."
        )
    return float(length.value)


@dataclass(slots=True)
class Settings:
    """The checked settings of a Trainer.

    Attributes:
        given: the arguments, before environment variables, `fast_dev_run` and `barebones` change some of them.
        arguments: the arguments after these changes.
        defaults: the values of arguments that are not passed.
        selection: the strategy, its settings and its launcher.
        limits: limits of `fit`.
        clip: gradient clipping, or None.
        val_check_interval: see `parse_validation_interval`.
        limit_batches: batch limits by stage.
        callbacks: the user's and the default callbacks.
        loggers: the loggers.
        profiler: records actions.
        root: the folder for the run's files.
        accumulate_grad_batches: micro-batches per optimizer step. A callback may change it before an epoch.
        log_every_n_steps: steps between two flushes of metrics.
        num_sanity_val_steps: validation batches before training; infinite for all.
        preemption_grace_s: seconds from a signal to the end of the process; None ignores signals.
    """

    given: TrainerArguments
    arguments: TrainerArguments
    defaults: dict[str, Any]
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
        """The units of limits and intervals, such as `"samples"` and `"tokens"`."""
        lengths = (*self.limits.others, self.val_check_interval)
        return {length.unit for length in lengths if isinstance(length, Duration)}


def configure(arguments: TrainerArguments, defaults: dict[str, Any]) -> Settings:
    """Parse and check all arguments of a Trainer.

    Args:
        arguments: the arguments.
        defaults: the values of arguments that are not passed.

    Raises:
        ConfigurationError: an argument is invalid.
    """
    check_plain_arguments(arguments)
    given = arguments
    arguments = with_launched(arguments)
    dev_batches = int(arguments.fast_dev_run)
    quiet = bool(dev_batches) or arguments.barebones
    if dev_batches:
        arguments = _with_fast_dev_run(arguments, dev_batches)
    if arguments.barebones:
        arguments = _with_barebones(arguments)
    clip = GradientClip.parse(arguments.gradient_clip_val, arguments.gradient_clip_algorithm)
    selection = _select(arguments, clip)
    limits = limits_of(arguments)
    interval = _validation_interval(arguments, limits)
    overfit = arguments.overfit_batches
    limit_batches = {
        "train": arguments.limit_train_batches,
        "validate": overfit or arguments.limit_val_batches,
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
        defaults=defaults,
        selection=selection,
        limits=limits,
        clip=clip,
        val_check_interval=interval,
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


def _sanity_steps(given: int | None) -> int | float:
    if given is None:
        return 2
    return math.inf if given == -1 else given


def limits_of(arguments: TrainerArguments) -> Limits:
    """Return the limits of a fit with these arguments."""
    dev_batches = int(arguments.fast_dev_run)
    return parse_limits(
        max_epochs=arguments.max_epochs,
        max_steps=dev_batches * arguments.accumulate_grad_batches if dev_batches else arguments.max_steps,
        max_time=arguments.max_time,
        max_samples=arguments.max_samples,
        max_tokens=arguments.max_tokens,
        min_epochs=arguments.min_epochs,
        min_steps=arguments.min_steps,
    )


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
    if not dist.is_initialized():
        check_address(selection.topology)
    return selection


def _without_needless(plugins: Any) -> Any:
    """Return the plugins without those of libraries that change nothing here.

    These are plugins that only load checkpoint files of Lightning, with a warning, and cluster environments that agree
    with the launcher's environment variables.

    Raises:
        ConfigurationError: a cluster environment has another world size or rank.
    """
    from trainwright.core.names.lightning_stand_in import is_cluster_environment, only_loads

    kept = []
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [plugins]:
        if only_loads(plugin):
            warnings.warn(
                f"plugins: {type(plugin).__name__}.load_checkpoint is not called, because checkpoints are folders of "
                "safetensors and JSON, which are loaded without unpickling.",
                TrainwrightWarning,
                stacklevel=4,
            )
        elif is_cluster_environment(plugin):
            _check_environment(plugin)
        else:
            kept.append(plugin)
    return kept


def _check_environment(plugin: Any) -> None:
    """Check that a cluster environment of Lightning names the process that the environment variables name."""
    found = detect()
    size, rank = plugin.world_size(), plugin.global_rank()
    if (size, rank) != (found.world_size, found.rank):
        raise ConfigurationError(
            f"plugins: {type(plugin).__name__} is rank {rank} of {size}, and the environment variables of this process "
            f"are those of rank {found.rank} of {found.world_size}. The Trainer uses the variables. Set RANK and "
            "WORLD_SIZE to the same values before the Trainer is created."
        )
