"""Lightning's registries of strategies and accelerators, for `trainwright.as_lightning()`.

Libraries register their classes when they are imported, whether or not these are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from trainwright.strategies.registry import STRATEGIES

_ClassT = TypeVar("_ClassT", bound=type)


class PluginRegistry:
    """Base class of both registries."""

    def register(
        self,
        name: str,
        cls: Callable[..., Any] | None = None,
        description: str | None = None,
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class. Without `cls`, return a decorator for the class.

        Args:
            name: Name for the argument of the Trainer.
            cls: The class. Default: None.
            description: Not used. Default: None.
            override: Replace a registered class. Default: False.
            init_params: Arguments for the class.

        Raises:
            ConfigurationError: The name is registered already.
        """
        if cls is not None:
            self._add(name, partial(cls, **init_params), override)
            return cls

        def decorate(decorated: _ClassT) -> _ClassT:
            self._add(name, partial(decorated, **init_params), override)
            return decorated

        return decorate

    def _add(self, name: str, make: Callable[[], Any], override: bool) -> None:
        raise NotImplementedError


class _Strategies(PluginRegistry):
    """Registry of strategies: `Trainer(strategy=name)` makes a registered one."""

    def _add(self, name: str, make: Callable[[], Any], override: bool) -> None:
        STRATEGIES.register(name, make, overwrite=override)

    def available_strategies(self) -> list[str]:
        """Return the registered names."""
        return sorted(STRATEGIES)


class _Accelerators(PluginRegistry):
    """Registry of accelerators. `Trainer(accelerator=name)` is an error: devices are those that torch has."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def _add(self, name: str, make: Callable[[], Any], override: bool) -> None:
        self._names.add(name)

    def available_accelerators(self) -> list[str]:
        """Return the registered names."""
        return sorted(self._names)


StrategyRegistry = _Strategies()
AcceleratorRegistry = _Accelerators()
