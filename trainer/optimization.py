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
# Lightning's "frequency" of an optimizer is accepted without effect.
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")


def check_members(task: TaskModule, optimizers: Sequence[Optimizer]) -> None:
    """Check that all parameters of the optimizers belong to the task.

    Raises:
        ConfigurationError: a parameter does not belong to the task, so it would not be moved, synchronized or saved.
    """
    ids_of_task = {id(parameter) for parameter in task.parameters()}  # `==` of tensors compares their values
    for optimizer in optimizers:
        foreign = []  # parameters that do not belong to the task
        for group in optimizer.param_groups:
            foreign += [parameter for parameter in group["params"] if id(parameter) not in ids_of_task]
        if foreign:
            raise ConfigurationError(
                f"{type(task).__name__}.configure_optimizers returned {type(optimizer).__name__} with {len(foreign)} "
                f"parameter(s), the first of shape {tuple(foreign[0].shape)}, that do not belong to the task. Build "
                "the optimizer in configure_optimizers from self.parameters(), because a strategy may replace the "
                "parameters after __init__. Make every module that the optimizer trains an attribute of the task."
            )


def parse_optimizers(returned: object, origin: str) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Parse the result of `configure_optimizers` (see `TaskModule.configure_optimizers`).

    Args:
        returned: the result.
        origin: the task's class name, for messages.

    Returns:
        The optimizers and the schedules, in the order in which `returned` contains them. Both are empty for None.

    Raises:
        ConfigurationError: the result has an unknown type or key, is an empty list, has an invalid interval or
            frequency, a scheduler without the methods of one, or lacks the optimizer of a schedule.
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
        if len(returned) == 2 and isinstance(first, Sequence):  # ([optimizers], [schedules])
            _take_two_lists(first, returned[1], optimizers, schedules, origin)
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
    """Add the optimizer and the schedule of `{"optimizer": …, "lr_scheduler": …}` to the lists."""
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
    """Add the optimizers of `first` and the schedules of `second`, a list or one schedule, to the lists."""
    if not all(isinstance(item, Optimizer) for item in first):
        raise _unknown_form((first, second), origin)
    optimizers.extend(first)
    entries = second if isinstance(second, Sequence) else [second]
    schedules.extend(_schedule(entry, None, origin) for entry in entries if entry is not None)


def _schedule(scheduler_or_dict: object, monitor_of_optimizer: str | None, origin: str) -> SchedulerConfig:
    """Parse a scheduler, or a dict with one and its options.

    `monitor_of_optimizer` is the `"monitor"` of the optimizer's dict. It is used if the scheduler's dict has none.
    """
    entry: Mapping[str, Any]
    if isinstance(scheduler_or_dict, Mapping):
        entry = scheduler_or_dict
    else:
        entry = {"scheduler": scheduler_or_dict}
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
    monitor = entry.get("monitor", monitor_of_optimizer)
    takes_metric = isinstance(scheduler, ReduceLROnPlateau) or bool(entry.get("reduce_on_plateau"))
    return SchedulerConfig(
        scheduler=scheduler,
        interval=interval,
        frequency=frequency,
        monitor=monitor if takes_metric else None,  # as in Lightning, others ignore the optimizer's `monitor`
        strict=entry.get("strict", True),
        name=entry.get("name"),
        reduce_on_plateau=takes_metric,
    )


def _check_owners(optimizers: list[Optimizer], schedules: list[SchedulerConfig], origin: str) -> None:
    """Check that the optimizer of each schedule was returned. Schedules without an `optimizer` are not checked."""
    for config in schedules:
        optimizer = getattr(config.scheduler, "optimizer", None)
        was_returned = any(optimizer is returned for returned in optimizers)
        if optimizer is not None and not was_returned:
            raise ConfigurationError(
                f"{origin}.configure_optimizers: {type(config.scheduler).__name__} belongs to an optimizer "
                f"({type(optimizer).__name__}) that was not returned. Return that optimizer too."
            )


def _check_step(config: SchedulerConfig, origin: str) -> None:
    """Check that `TaskModule.lr_scheduler_step` can call a schedule's `step`.

    It cannot for schedules of timm, for example, whose `step` requires an epoch.
    """
    names = () if config.monitor is None else ("metric",)  # the arguments that `lr_scheduler_step` passes to `step`
    taken = parameters_taken_by(config.scheduler.step)
    num_required = sum(is_required for _, is_required in taken.positional)
    requires_keyword = any(is_required for _, is_required in taken.keyword_only)
    if num_required > len(names) or requires_keyword:
        kind = type(config.scheduler).__name__
        raise ConfigurationError(
            f"{origin}.configure_optimizers: {kind}.step requires other arguments than ({', '.join(names)}). Define "
            "lr_scheduler_step(self, scheduler, metric), which calls it, for example: "
            "scheduler.step(epoch=self.current_epoch)."
        )


def _unknown_form(returned: object, origin: str) -> ConfigurationError:
    """Return the error for a result of `configure_optimizers` in an unknown form."""
    return ConfigurationError(
        f"{origin}.configure_optimizers returned {_forms(returned)}. Return an optimizer, a list of them, "
        "([optimizers], [schedulers]) with a list for each, a dict {'optimizer', 'lr_scheduler'}, a list of such "
        "dicts, or None."
    )


def _forms(returned: object) -> str:
    """Return the type of the result and those of its items, such as `a list of SGD, int`."""
    text = f"a {type(returned).__name__}"
    if isinstance(returned, Sequence) and returned:
        text += f" of {', '.join(type(item).__name__ for item in returned)}"
    return text


def warn_of_joint_steps(task: TaskModule, num_optimizers: int) -> None:
    """Warn once about several optimizers for one loss, unless the task or its class sets `automatic_optimization`."""
    places = [task, *(cls for cls in type(task).__mro__ if cls is not TaskModule)]
    is_set_by_user = any("automatic_optimization" in vars(place) for place in places)
    was_warned = "_warned_of_joint_steps" in vars(task)
    if num_optimizers > 1 and not is_set_by_user and not was_warned:
        object.__setattr__(task, "_warned_of_joint_steps", True)
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
        task: the task, whose `lr_scheduler_step` is called. None if the stage has no task, and so no schedules.

    Attributes:
        configs: see above. Also contains the schedules that the task steps itself.
        count_steps: True if `after_step` has schedules to step.
        monitor_steps: True if `after_step_metrics` has schedules to step.

    Raises:
        ConfigurationError: a ReduceLROnPlateau monitors no metric, or a schedule's `step` requires other arguments.
    """

    def __init__(self, configs: list[SchedulerConfig], task: TaskModule | None) -> None:
        self.configs = configs
        self._task = task
        # The schedules that the loop steps.
        automatic = configs if task is not None and task.automatic_optimization else []
        if any(isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None for config in automatic):
            raise ConfigurationError(
                f"{type(task).__name__}.configure_optimizers: ReduceLROnPlateau needs a metric to watch. Return "
                "{'optimizer': …, 'lr_scheduler': {'scheduler': …, 'monitor': 'val_loss'}}."
            )
        if task is not None and not overrides(task, "lr_scheduler_step", TaskModule):
            for config in automatic:
                _check_step(config, type(task).__name__)
        self._per_step: list[SchedulerConfig] = []
        self._per_epoch: list[SchedulerConfig] = []
        self._monitored_per_step: list[SchedulerConfig] = []
        self._monitored_per_epoch: list[SchedulerConfig] = []
        for config in automatic:
            if config.monitor is None:
                group = self._per_step if config.interval == "step" else self._per_epoch
            else:
                group = self._monitored_per_step if config.interval == "step" else self._monitored_per_epoch
            group.append(config)
        self.count_steps = bool(self._per_step)
        self.monitor_steps = bool(self._monitored_per_step)

    def after_step(self, step: int) -> None:
        """Step the schedules with `interval="step"` that monitor no metric. `step` is the number of completed steps."""
        for config in self._per_step:
            if step % config.frequency == 0:
                self._step(config, {})

    def metrics_are_due(self, step: int) -> bool:
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
                self._step(config, metrics)

    def after_epoch(self, epoch: int) -> None:
        """Step the schedules with `interval="epoch"` that monitor no metric. Called after the last step of an epoch.

        `epoch` is the 0-based index of the epoch that ends.
        """
        for config in self._per_epoch:
            if (epoch + 1) % config.frequency == 0:
                self._step(config, {})

    def after_epoch_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Step the schedules with `interval="epoch"` that monitor a metric. Called with the metrics of the epoch.

        `epoch` is the 0-based index of the epoch that ends.

        Raises:
            ConfigurationError: see `after_step_metrics`.
        """
        for config in self._monitored_per_epoch:
            if (epoch + 1) % config.frequency == 0:
                self._step(config, metrics)

    def _step(self, config: SchedulerConfig, metrics: Mapping[str, float]) -> None:
        """Step a schedule through the task's `lr_scheduler_step`, unless a callback has paused it.

        Raises:
            ConfigurationError: the schedule is shorter than the run, or see `after_step_metrics`.
        """
        assert self._task is not None  # schedules come from a task
        if config.paused:
            return
        if config.monitor is None:
            try:
                method_of(self._task, "lr_scheduler_step")(config.scheduler, None)
            except ValueError as error:
                # OneCycleLR counts its own steps: "Tried to step 11 times. … total steps is 10".
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
        """Load the result of `state_dict`, which must have as many states as there are schedules."""
        for config, state in zip(self.configs, states, strict=True):
            config.scheduler.load_state_dict(state)


class ManualOptimizer:
    """Wrapper of an optimizer for tasks with manual optimization. `step` calls the engine.

    All other attributes (`param_groups`, `zero_grad`, `state_dict`, …) are the optimizer's. `isinstance` treats the
    wrapper as an instance of the optimizer's class.
    """

    def __init__(self, optimizer: Optimizer, engine: object) -> None:
        # Not by assignment, which `__setattr__` passes to the optimizer.
        vars(self).update(_optimizer=optimizer, _engine=engine)

    @property
    def __class__(self) -> Any:  # torch's schedulers accept only instances of Optimizer
        return type(self._optimizer)

    @__class__.setter
    def __class__(self, value: object) -> None:
        raise AttributeError("the class of a wrapped optimizer cannot be changed")

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped torch optimizer."""
        optimizer: Optimizer = self._optimizer
        return optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: object) -> Any:
        """Unscale the gradients, call the hooks and step.

        Args:
            closure: computes the loss and runs `manual_backward`; hooks are called after it.
            **options: further arguments of the optimizer's `step`.

        Returns:
            The closure's loss, or the result of the optimizer's `step`.

        Raises:
            TaskError: `closure` is not callable.
        """
        if closure is not None and not callable(closure):
            raise TaskError(
                f"step(closure={type(closure).__name__}): the closure must be a function that returns the loss."
            )
        return self._engine.step.step_optimizer(self._optimizer, closure, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Return a context in which only this optimizer's parameters require gradients.

        Args:
            sync_grad: False keeps the gradients of its backward passes on this rank, see `TaskModule.no_sync`.
        """
        synchronization = nullcontext() if sync_grad else self._engine.step.no_sync()
        with self._engine.task.toggled_optimizer(self), synchronization:
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
