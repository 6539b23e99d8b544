"""Parsing of the result of `configure_optimizers`, and stepping of learning-rate schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning, nearest
from trainwright.core.run import SchedulerConfig
from trainwright.core.signatures import method_of, overrides, parameters_taken_by
from trainwright.core.state import scheduler_state
from trainwright.core.task import TaskModule

_SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")


def check_members(task: TaskModule, optimizers: Sequence[Optimizer]) -> None:
    """Check that all parameters of the optimizers belong to the task.

    Raises:
        ConfigurationError: a parameter does not belong to the task, so it would not be moved, synchronized or saved.
    """
    own = {id(parameter) for parameter in task.parameters()}
    for optimizer in optimizers:
        others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
        if others:
            raise ConfigurationError(
                f"{type(task).__name__}.configure_optimizers returned {type(optimizer).__name__} with {len(others)} "
                f"parameter(s), the first of shape {tuple(others[0].shape)}, that do not belong to the task. Build "
                "the optimizer in configure_optimizers from self.parameters(), because a strategy may replace the "
                "parameters after __init__. Make every module that the optimizer trains an attribute of the task."
            )


def parse_optimizers(returned: object, origin: str) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Parse the result of `configure_optimizers` (see `TaskModule.configure_optimizers`).

    Args:
        returned: the result.
        origin: the task's class name, for messages.

    Raises:
        ConfigurationError: the result has an unknown type, key or interval, or lacks the optimizer of a schedule.
    """
    optimizers: list[Optimizer] = []
    schedules: list[SchedulerConfig] = []
    if returned is None:
        warnings.warn(
            f"{origin}.configure_optimizers returned None: training runs without an optimizer.",
            TrainwrightWarning,
            stacklevel=2,
        )
    elif isinstance(returned, Optimizer):
        optimizers = [returned]
    elif isinstance(returned, Mapping):
        _take_dict(returned, optimizers, schedules, origin)
    elif isinstance(returned, Sequence) and returned:
        first = returned[0]
        if len(returned) == 2 and isinstance(first, Sequence):
            _take_two_lists(returned[0], returned[1], optimizers, schedules, origin)
        elif all(isinstance(item, Optimizer) for item in returned):
            optimizers = list(returned)
        elif all(isinstance(item, Mapping) for item in returned):
            for item in returned:
                _take_dict(item, optimizers, schedules, origin)
        else:
            raise _unknown_form(returned, origin)
    else:
        raise _unknown_form(returned, origin)
    _check_owners(optimizers, schedules, origin)
    return optimizers, schedules


def _take_dict(
    entry: Mapping[str, Any], optimizers: list[Optimizer], schedules: list[SchedulerConfig], origin: str
) -> None:
    for key in entry:
        if key not in _OPTIMIZER_KEYS:
            raise ConfigurationError(
                f"{origin}.configure_optimizers: unknown key {key!r}.{nearest(str(key), _OPTIMIZER_KEYS)} "
                f"Known: {', '.join(_OPTIMIZER_KEYS)}."
            )
    optimizer = entry.get("optimizer")
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{origin}.configure_optimizers: the dict's 'optimizer' is {type(optimizer).__name__}, not an optimizer."
        )
    optimizers.append(optimizer)
    if entry.get("lr_scheduler") is not None:
        schedules.append(_schedule(entry["lr_scheduler"], entry.get("monitor"), origin))


def _take_two_lists(
    first: Iterable[Any], second: object, optimizers: list[Optimizer], schedules: list[SchedulerConfig], origin: str
) -> None:
    if not all(isinstance(item, Optimizer) for item in first):
        raise _unknown_form((first, second), origin)
    optimizers.extend(first)
    entries = second if isinstance(second, Sequence) else [second]
    schedules.extend(_schedule(entry, None, origin) for entry in entries if entry is not None)


def _schedule(given: object, monitor: str | None, origin: str) -> SchedulerConfig:
    entry: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    for key in entry:
        if key not in _SCHEDULER_KEYS:
            raise ConfigurationError(
                f"{origin}.configure_optimizers: unknown key {key!r} of a scheduler's dict."
                f"{nearest(str(key), _SCHEDULER_KEYS)} Known: {', '.join(_SCHEDULER_KEYS)}."
            )
    scheduler = entry.get("scheduler")
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise ConfigurationError(
            f"{origin}.configure_optimizers: {type(scheduler).__name__} is not a learning-rate scheduler (it needs "
            "step, state_dict and load_state_dict)."
        )
    interval = entry.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise ConfigurationError(
            f"{origin}.configure_optimizers: interval={interval!r} is unknown."
            f"{nearest(str(interval), ('step', 'epoch'))} Use 'step' or 'epoch'."
        )
    frequency = entry.get("frequency", 1)
    if not isinstance(frequency, int) or frequency < 1:
        raise ConfigurationError(f"{origin}.configure_optimizers: frequency={frequency!r} must be at least 1.")
    if "interval" not in entry and isinstance(scheduler, OneCycleLR):
        warnings.warn(
            f"{origin}.configure_optimizers: OneCycleLR steps once per epoch, because no interval is given. It usually "
            "counts optimizer steps: {'scheduler': …, 'interval': 'step'}. To silence this warning, set the interval.",
            TrainwrightWarning,
            stacklevel=2,
        )
    monitor = entry.get("monitor", monitor)
    reduces = isinstance(scheduler, ReduceLROnPlateau) or bool(entry.get("reduce_on_plateau"))
    return SchedulerConfig(
        scheduler=scheduler,
        interval=interval,
        frequency=frequency,
        monitor=monitor if reduces else None,
        strict=entry.get("strict", True),
        name=entry.get("name"),
        reduce_on_plateau=reduces,
    )


def _check_owners(optimizers: list[Optimizer], schedules: list[SchedulerConfig], origin: str) -> None:
    owned = {id(optimizer) for optimizer in optimizers}
    for config in schedules:
        optimizer = getattr(config.scheduler, "optimizer", None)
        if optimizer is not None and id(optimizer) not in owned:
            raise ConfigurationError(
                f"{origin}.configure_optimizers: {type(config.scheduler).__name__} belongs to an optimizer "
                f"({type(optimizer).__name__}) that was not returned. Return that optimizer too."
            )


def _check_step(config: SchedulerConfig, origin: str) -> None:
    """Check that `TaskModule.lr_scheduler_step` can call a schedule's `step`, which timm's require an epoch for."""
    names = () if config.monitor is None else ("metric",)
    taken = parameters_taken_by(config.scheduler.step)
    num_required = sum(required for _, required in taken.positional)
    if num_required > len(names) or any(required for _, required in taken.keyword_only):
        kind = type(config.scheduler).__name__
        raise ConfigurationError(
            f"{origin}.configure_optimizers: {kind}.step requires other arguments than ({', '.join(names)}). Define "
            "lr_scheduler_step(self, scheduler, metric), which calls it, for example: "
            "scheduler.step(epoch=self.current_epoch)."
        )


def _forms(returned: object) -> str:
    inner = ", ".join(type(item).__name__ for item in returned) if isinstance(returned, Sequence) else ""
    return f"a {type(returned).__name__}{f' of {inner}' if inner else ''}"


def _unknown_form(returned: object, origin: str) -> ConfigurationError:
    return ConfigurationError(
        f"{origin}.configure_optimizers returned {_forms(returned)}. Return an optimizer, a list of them, "
        "([optimizers], [schedulers]) with a list for each, a dict {'optimizer', 'lr_scheduler'}, a list of such "
        "dicts, or None."
    )


def warn_of_joint_steps(task: TaskModule, num_optimizers: int) -> None:
    """Warn once about several optimizers for one loss, unless the task sets `automatic_optimization = True`."""
    own = [task, *(cls for cls in type(task).__mro__ if cls is not TaskModule)]
    said = any("automatic_optimization" in vars(owner) for owner in own)
    if num_optimizers > 1 and not said and "_said_joint" not in vars(task):
        object.__setattr__(task, "_said_joint", True)
        warnings.warn(
            f"{type(task).__name__}.configure_optimizers returned {num_optimizers} optimizers. Automatic optimization "
            "steps all of them with the one loss that training_step returns. If each optimizer has its own loss (a "
            "GAN), set self.automatic_optimization = False in __init__ and step the optimizers in training_step. To "
            "silence this warning, set self.automatic_optimization = True.",
            TrainwrightWarning,
            stacklevel=2,
        )


class Schedules:
    """Learning-rate schedules. Their intervals count optimizer steps or epochs.

    Args:
        configs: the schedules. With manual optimization the task steps them itself.
        task: the task, whose `lr_scheduler_step` is called; None if there are no schedules.
    """

    def __init__(self, configs: list[SchedulerConfig], task: TaskModule | None) -> None:
        self.configs = configs
        self._task = task
        ours = configs if task is not None and task.automatic_optimization else []
        if any(isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None for config in ours):
            raise ConfigurationError(
                f"{type(task).__name__}.configure_optimizers: ReduceLROnPlateau needs a metric to watch. Return "
                "{'optimizer': …, 'lr_scheduler': {'scheduler': …, 'monitor': 'val_loss'}}."
            )
        if task is not None and not overrides(task, "lr_scheduler_step", TaskModule):
            for config in ours:
                _check_step(config, type(task).__name__)
        plain = [c for c in ours if c.monitor is None]
        monitored = [c for c in ours if c.monitor is not None]
        self._per_step = [c for c in plain if c.interval == "step"]
        self._per_epoch = [c for c in plain if c.interval == "epoch"]
        self._monitored_per_step = [c for c in monitored if c.interval == "step"]
        self._monitored = [c for c in monitored if c.interval == "epoch"]
        self.steps_often = bool(self._per_step)
        self.watch_steps = bool(self._monitored_per_step)

    def after_step(self, step: int) -> None:
        """Step the schedules with `interval="step"` that monitor no metric. `step` is the number of completed steps."""
        for config in self._per_step:
            if step % config.frequency == 0:
                self._do(config, {})

    def watches(self, step: int) -> bool:
        """Return whether a schedule with `interval="step"` that monitors a metric is due after step `step`."""
        return any(step % config.frequency == 0 for config in self._monitored_per_step)

    def after_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step the schedules with `interval="step"` that monitor a metric. Called after the validation of a step.

        Args:
            step: number of completed optimizer steps.
            metrics: the latest metrics.

        Raises:
            ConfigurationError: a monitored metric is missing and the schedule has `strict=True`.
        """
        for config in self._monitored_per_step:
            if step % config.frequency == 0:
                self._do(config, metrics)

    def after_epoch(self, epoch: int) -> None:
        """Step the schedules with `interval="epoch"` that monitor no metric. Called after the last step of an epoch."""
        for config in self._per_epoch:
            if (epoch + 1) % config.frequency == 0:
                self._do(config, {})

    def after_epoch_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Step the schedules with `interval="epoch"` that monitor a metric. Called with the metrics of the epoch."""
        for config in self._monitored:
            if (epoch + 1) % config.frequency == 0:
                self._do(config, metrics)

    def _do(self, config: SchedulerConfig, metrics: Mapping[str, float]) -> None:
        assert self._task is not None  # schedules come from a task
        if config.paused:
            return
        if config.monitor is None:
            try:
                method_of(self._task, "lr_scheduler_step")(config.scheduler, None)
            except ValueError as error:  # OneCycleLR counts its own steps
                if "total steps is" not in str(error):
                    raise
                raise ConfigurationError(
                    f"{type(config.scheduler).__name__} is shorter than the run: {error}. Set "
                    "total_steps=self.trainer.estimated_stepping_batches with interval='step'. After a resume the "
                    "schedule has the length of the checkpoint's run: continue with the same max_epochs or max_steps."
                ) from error
        elif config.monitor in metrics:
            method_of(self._task, "lr_scheduler_step")(config.scheduler, metrics[config.monitor])
        else:
            text = (
                f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged."
                f"{nearest(config.monitor, metrics)} Logged: {', '.join(sorted(metrics)) or 'nothing'}."
            )
            if config.strict:
                raise ConfigurationError(
                    f"{text} Log it, or set 'strict': False to skip the schedule when it is absent."
                )
            warnings.warn(text, TrainwrightWarning, stacklevel=2)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return every schedule's state, in order."""
        return [scheduler_state(config.scheduler) for config in self.configs]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the result of `state_dict`."""
        for config, state in zip(self.configs, states, strict=True):
            config.scheduler.load_state_dict(state)


class ManualOptimizer:
    """Wrapper of an optimizer for tasks with manual optimization. `step` calls the engine.

    All other attributes (`param_groups`, `zero_grad`, `state_dict`, …) are the optimizer's. `isinstance` treats the
    wrapper as an instance of the optimizer's class.
    """

    def __init__(self, optimizer: Optimizer, engine: object) -> None:
        vars(self).update(_optimizer=optimizer, _engine=engine)

    @property
    def __class__(self) -> Any:
        return type(self._optimizer)

    @__class__.setter
    def __class__(self, value: object) -> None:
        raise AttributeError("the class of a wrapped optimizer cannot be changed")

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped torch optimizer."""
        found: Optimizer = self._optimizer
        return found

    def step(self, closure: Callable[[], Any] | None = None, **own: object) -> Any:
        """Unscale the gradients, call the hooks and step.

        Args:
            closure: computes the loss and runs `manual_backward`; hooks are called after it.
            **own: further arguments of the optimizer's `step`.

        Returns:
            The closure's loss, or what the optimizer's `step` returns.

        Raises:
            TaskError: `closure` is not callable.
        """
        if closure is not None and not callable(closure):
            raise TaskError(
                f"step(closure={type(closure).__name__}): the closure must be a function that returns the loss."
            )
        return self._engine.step.step_optimizer(self._optimizer, closure, **own)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients in a `with` block.

        Args:
            sync_grad: False keeps the gradients of its backward passes on this rank, see `TaskModule.no_sync`.
        """
        with self._engine.task.toggled_optimizer(self), nullcontext() if sync_grad else self._engine.step.no_sync():
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step":  # for example a scheduler wraps it; stored here, so that the optimizer's own is unchanged
            vars(self)[name] = value
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return repr(self._optimizer)
