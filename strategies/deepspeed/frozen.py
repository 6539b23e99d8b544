"""Frozen modules in an engine of their own: a teacher in pieces (stage 3) beside a student that is whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.units import matching

_NOT_THEIRS = ("optimizer", "scheduler")


class FrozenEngines:
    """Cuts frozen modules into pieces, which each of them gathers when it is called."""

    def __init__(self, task: nn.Module, names: tuple[str, ...]) -> None:
        self._task = task
        self._modules = matching(task, names, "frozen_modules") if names else []
        self._engines: list[Any] = []
        for module in self._modules:
            trained = next((name for name, p in module.named_parameters() if p.requires_grad), None)
            if trained is not None:
                raise ConfigurationError(
                    f"frozen_modules={names!r}: {trained!r} of {type(module).__name__} is trained. Call "
                    "requires_grad_(False) on the module in configure_model, or leave it out."
                )
            if any(other is not module and other in self._modules for other in module.modules()):
                raise ConfigurationError(
                    f"frozen_modules={names!r}: {type(module).__name__} holds another of them. Name the outer one only."
                )

    def start(self, library: Any, config: Mapping[str, Any]) -> None:
        """Make an engine of each. Collective."""
        own = copy.deepcopy({key: value for key, value in config.items() if key not in _NOT_THEIRS})
        zero = own.get("zero_optimization", {})
        own["zero_optimization"] = {**{k: v for k, v in zero.items() if k.startswith("stage3_")}, "stage": 3}
        for module in self._modules:
            engine, *_ = library.initialize(model=module, config=own, dist_init_required=False)
            self._engines.append(engine)

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Have the task without them meanwhile, so that the run's engine leaves them alone."""
        places = [
            (parent, name, child)
            for parent in self._task.modules()
            for name, child in parent.named_children()
            if any(child is module for module in self._modules)
        ]
        kept: list[tuple[nn.Module, dict[str, nn.Module | None]]] = [
            (parent, dict(parent._modules)) for parent, _, _ in places
        ]
        for parent, name, _ in places:
            del parent._modules[name]
        try:
            yield
        finally:
            for parent, modules in kept:
                parent._modules.clear()
                parent._modules.update(modules)

    def destroy(self) -> None:
        """Let go of the engines. Not collective."""
        for engine in self._engines:
            engine.destroy()
            engine.optimizer = engine.basic_optimizer = None  # it would be taken apart once more when it is freed
        self._engines = []
