"""The parser of `CLI`: jsonargparse's parser with groups of arguments for callbacks, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError

AUTOMATIC = "AUTOMATIC"  # value of `link_to`: CLI creates the task's configure_optimizers from the settings
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Type of an argument that makes an optimizer from parameters: `optimizer: OptimizerCallable = torch.optim.Adam`."""
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
"""Type of an argument that makes a learning-rate schedule from an optimizer."""


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's ReduceLROnPlateau with the monitored metric as an argument, which a configuration can set.

    Args:
        optimizer: the optimizer.
        monitor: name of the metric.
        args: positional arguments of torch's class.
        options: keyword arguments of torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **options: Any) -> None:
        super().__init__(optimizer, *args, **options)
        self.monitor = monitor


def class_of(cls: Callable[..., Any]) -> Any:
    """Return a class unchanged. For a function that returns an instance, return a class with its arguments."""
    if isinstance(cls, type):
        return cls
    from jsonargparse import class_from_function  # type: ignore[attr-defined]  # public, but not re-exported by name

    return class_from_function(cls)


class _Component(NamedTuple):
    """Arguments of an optimizer or a schedule in the parser."""

    key: str  # prefix of the arguments: `optimizer`
    cls: Any  # one class, or a tuple of base classes
    link_to: str  # the argument that receives the settings, or `AUTOMATIC`


class ComponentArguments:
    """Methods of the parser that add the arguments of a class as options. `CLI` builds and uses the instance.

    Attributes:
        callback_keys: keys of the callbacks, in the order in which they were added.
        optimizers: the added optimizers, with key, class and `link_to`.
        schedules: the added schedules, with key, class and `link_to`.
    """

    # Tuples, which the methods replace: a list would be shared by all parsers.
    callback_keys: tuple[str, ...] = ()
    optimizers: tuple[_Component, ...] = ()
    schedules: tuple[_Component, ...] = ()

    def add_lightning_class_args(
        self, lightning_class: Callable[..., Any], nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a class below a key. If it is a callback, the instance is added to the Trainer.

        Args:
            lightning_class: a class, or a function that returns an instance.
            nested_key: prefix of the arguments: `early_stopping` in `early_stopping.patience`.
            subclass_mode: the configuration may name a subclass, as `class_path` with `init_args`. Default: False.
            required: with `subclass_mode`: a class must be named. Default: True.

        Returns:
            The keys of the added arguments.
        """
        parser: Any = self
        cls = class_of(lightning_class)
        if isinstance(cls, type) and issubclass(cls, Callback):
            self.callback_keys = (*self.callback_keys, nested_key)
        if subclass_mode:
            added = parser.add_subclass_arguments(lightning_class, nested_key, required=required, fail_untyped=False)
            return list(added or [])
        return list(parser.add_class_arguments(cls, nested_key, fail_untyped=False, sub_configs=True))

    def add_optimizer_args(
        self, optimizer_class: object = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: one class, whose arguments are directly below the key, or a tuple of base classes. With a
                tuple, the configuration names a subclass. Default: `(Optimizer,)`.
            nested_key: prefix of the arguments. Default: `"optimizer"`.
            link_to: an argument that receives the settings, such as `model.optimizer_init`. Default: `"AUTOMATIC"`,
                with which `CLI` creates the task's `configure_optimizers` from the settings.
        """
        self._add_settings(optimizer_class, nested_key, {"params"})
        self.optimizers = (*self.optimizers, _Component(nested_key, optimizer_class, link_to))

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: object = (LRScheduler, ReduceLROnPlateau),
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning-rate schedule; see `add_optimizer_args`.

        For ReduceLROnPlateau, use `trainwright.cli.ReduceLROnPlateau`, which has an argument `monitor`.
        """
        self._add_settings(lr_scheduler_class, nested_key, {"optimizer"})
        self.schedules = (*self.schedules, _Component(nested_key, lr_scheduler_class, link_to))

    def _add_settings(self, cls: object, key: str, skip: set[str]) -> None:
        parser: Any = self
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": skip}
        if isinstance(cls, tuple):
            parser.add_subclass_arguments(cls, key, required=False, **options)
        else:
            parser.add_class_arguments(cls, key, sub_configs=True, **options)

    def link_settings(self) -> None:
        """Pass the settings of optimizers and schedules to the arguments that `link_to` names."""
        parser: Any = self
        for key, cls, link_to in (*self.optimizers, *self.schedules):
            if link_to == AUTOMATIC:
                continue
            if isinstance(cls, tuple):
                parser.link_arguments(key, link_to)
            else:
                parser.link_arguments(key, link_to, compute_fn=_WithClass(f"{cls.__module__}.{cls.__qualname__}"))

    def automatic(self) -> tuple[tuple[str, Any] | None, tuple[str, Any] | None]:
        """Return key and class of the optimizer (or None) and of the schedule (or None) for `configure_optimizers`.

        Raises:
            ConfigurationError: several optimizers or schedules have `link_to="AUTOMATIC"`.
        """
        return _automatic("optimizer", self.optimizers), _automatic("lr_scheduler", self.schedules)


def _automatic(kind: str, components: Iterable[_Component]) -> tuple[str, Any] | None:
    automatic = [component for component in components if component.link_to == AUTOMATIC]
    if len(automatic) > 1:
        keys = ", ".join(component.key for component in automatic)
        raise ConfigurationError(
            f"CLI creates configure_optimizers from one {kind}, and {keys} were added. Add them with link_to, such as "
            f"link_to='model.{kind}_init', and define configure_optimizers in the task."
        )
    return (automatic[0].key, automatic[0].cls) if automatic else None


class _WithClass:
    """Function that converts the settings of a fixed class to `class_path` and `init_args`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, settings: dict[str, Any] | Namespace) -> dict[str, Any]:
        values = settings if isinstance(settings, dict) else settings.as_dict()
        return {"class_path": self.path, "init_args": values}


if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    class CLIParser(ComponentArguments, ArgumentParser):
        """jsonargparse's parser with `ComponentArguments`."""


@cache
def _parser_class() -> type[Any]:
    """Create the class on first use. This imports jsonargparse."""
    from jsonargparse import ArgumentParser

    text = "jsonargparse's parser with the groups that CLI builds and uses."
    return type("CLIParser", (ComponentArguments, ArgumentParser), {"__doc__": text, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "CLIParser":
        return _parser_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
