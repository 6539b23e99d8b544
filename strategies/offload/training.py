"""Train a model that is larger than the device on one device: everything is at home on the host, and parts visit it."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.engine import Engine, MakeOptimizers, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.offload.advice import read_ahead
from trainwright.strategies.offload.homes import PLACES, Home
from trainwright.strategies.offload.step import OffloadStep, can_be_split, portions_of, step_in_portions
from trainwright.strategies.offload.streaming import WeightStream
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import Strategy
from trainwright.strategies.units import WrapPolicy, find_units

_PARTS = 16  # a unit has at least this part of the parameters, where nobody says what a unit is


class OffloadStrategy(Strategy):
    """Trains on one device with weights, gradients and the optimizer's state at home on the host or on disk.

    The units of the model come to the device one after the other, in the forward and again in the backward; their
    gradients go home as they come, and the optimizer steps there. On the device there are a unit and those that are
    copied ahead, what lies in no unit, and activations. In one process.

    Args:
        parameters: where weights are at home: `"cpu"`, `"disk"`, or `"device"`, which leaves a copy on the device and
            offloads gradients and the optimizer's state alone.
        optimizer_state: where it is, and gradients: `"cpu"` or `"disk"`. From the disk the optimizer steps unit by
            unit, so that one unit's state is in memory at a time.
        auto_wrap_policy: which modules are units: classes, their names, or a function; unless given, what
            `TaskModule.shard_units` returns, else modules with a sixteenth of the parameters.
        min_num_params: modules with so many parameters are units, instead.
        offload_folder: for the disk; the system's temporary folder unless given. Its files have no names, and are gone
            when the run is, however it ends.
        prefetch: how many units are copied ahead of their use.
        stream: bring units in and out although they could be computed where they are. Unless told, only to a device
            with memory of its own: on the CPU weights in a file are used there, and the system reads and drops them.

    Raises:
        ConfigurationError: a place that there is not.
    """

    capabilities = Capabilities(
        manual_optimization=False, state_rests=False, caches_casts=False, converted_layers=False
    )

    def __init__(
        self,
        parameters: Literal["cpu", "disk", "device"] = "cpu",
        optimizer_state: Literal["cpu", "disk"] = "cpu",
        *,
        auto_wrap_policy: WrapPolicy | None = None,
        min_num_params: int | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        prefetch: int = 1,
        stream: bool | None = None,
    ) -> None:
        for name, value, known in (
            ("parameters", parameters, (*PLACES, "device")),
            ("optimizer_state", optimizer_state, PLACES),
        ):
            if value not in known:
                raise ConfigurationError(f"{name}={value!r}, expected one of {', '.join(map(repr, known))}.")
        if prefetch < 0:
            raise ConfigurationError(f"prefetch={prefetch}, expected 0 or more units.")
        self.parameters, self.optimizer_state = parameters, optimizer_state
        self.auto_wrap_policy, self.min_num_params = auto_wrap_policy, min_num_params
        self.offload_folder = Path(offload_folder) if offload_folder is not None else None
        self.prefetch, self.stream = prefetch, stream

    def check(self, settings: EngineSettings) -> None:
        """Check that the engine supports the settings.

        Raises:
            ConfigurationError: `compile=`, a loss scale, or several processes.
        """
        if settings.compile_options is not None:
            raise ConfigurationError(
                "compile= and OffloadStrategy exclude each other: weights come and go between the parts of what would "
                "be one graph. Leave compile= out."
            )
        if settings.precision.scaled:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} scales the loss, which OffloadStrategy cannot: its gradients "
                "are not on the device. Use 'bf16-mixed'."
            )
        super().check(settings)

    def engine(self, settings: EngineSettings) -> Engine:
        return OffloadEngine(self, settings)


class OffloadEngine(Engine):
    """Trains on one device a model whose weights, gradients and optimizer state are on the host or on disk."""

    strategy: OffloadStrategy

    def __init__(self, strategy: OffloadStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.weight_stream: WeightStream | None = None  # of the task
        self._streams: WeakSet[WeightStream] = WeakSet()  # of the models of a loop
        self._own_steps: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # of the optimizers of a loop

    # Model and optimizers

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> list[Optimizer]:
        """Build the model on the host, and have its units visit the device."""
        optimizers = super().prepare(task, make_optimizers, plan)
        for optimizer in optimizers:
            self._check_state(optimizer)
        if self.precision.autocast_dtype is not None:
            # Without a cache, which would keep a narrow copy of every weight on the device until the step is over.
            self._context = self.precision.autocast(self.device.type, cache_enabled=False)
        return optimizers

    def _place(self, task: TaskModule) -> None:
        self.weight_stream = self._offload(task)

    def _offload(self, model: nn.Module) -> WeightStream | None:
        """Move buffers to the device and parameters to the host or the disk; returns what streams them, if it does."""
        pinned = self.device.type != "cpu"
        weights = Home(
            "cpu" if self.strategy.parameters == "device" else self.strategy.parameters,
            self.strategy.offload_folder,
            pinned=pinned,
        )
        for (owner, leaf), buffer in list(_buffers(model)):
            owner._buffers[leaf] = buffer.to(self.device)
        if not (self.device.type != "cpu" if self.strategy.stream is None else self.strategy.stream):
            if weights.place == "disk":
                for parameter in model.parameters():
                    parameter.data = weights.like(parameter.data)
            return None
        gradients = Home(self.strategy.optimizer_state, self.strategy.offload_folder, pinned=pinned)
        return WeightStream(
            self._units(model), model.parameters(), self.device, weights, gradients,
            stays=self.strategy.parameters == "device", ahead=self.strategy.prefetch,
        )  # fmt: skip

    def _units(self, model: nn.Module) -> list[nn.Module]:
        units = find_units(model, self.strategy.auto_wrap_policy, self.strategy.min_num_params)
        if not units and self.strategy.auto_wrap_policy is None and self.strategy.min_num_params is None:
            total = sum(parameter.numel() for parameter in model.parameters())
            units = find_units(model, None, max(1, total // _PARTS))
        if not units:
            warnings.warn(
                f"no part of {type(model).__name__} comes and goes by itself: all of it is on the device during a "
                f"step. Name units with auto_wrap_policy or {type(model).__name__}.shard_units.",
                TrainwrightWarning,
                stacklevel=2,
            )
        return units

    # The step

    def make_step(self, parts: StepParts) -> Step:
        return OffloadStep(parts, self.weight_stream, self._state_home)

    @property
    def _state_home(self) -> Home | None:
        """Where the state of optimizers is moved to; None: it stays in memory."""
        place, folder = self.strategy.optimizer_state, self.strategy.offload_folder
        return Home(place, folder) if place == "disk" else None

    # User-written loops

    def prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], plan: TrainingPlan
    ) -> list[Callable[..., Any]]:
        """Move models to the host or the disk, and have their units visit the device."""
        for model in models:
            stream = self._offload(model)
            if stream is not None:
                stream.follow(model)
                self._streams.add(stream)
        return list(models)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        try:
            super().backward(loss, **kwargs)
        except BaseException:
            for stream in self._streams:  # otherwise they end by themselves
                stream.end_and_wait()
            raise

    def adopt_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let the optimizer step unit by unit if its state is on the disk: one unit's state is in memory at a time."""
        home, own = self._state_home, optimizer.step
        if home is None or optimizer in self._own_steps:
            return optimizer
        self._check_state(optimizer)
        home.take_state(optimizer)

        @functools.wraps(own)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is None and can_be_split(optimizer):
                units = [unit for stream in self._streams for unit in stream.in_order_of_gradients()]
                return step_in_portions(
                    optimizer,
                    portions_of(optimizer, units),
                    before=lambda portion, following: read_ahead(following),
                    after=lambda portion: home.take_state(optimizer, portion.parameters),
                    step=own,
                )
            found = own() if closure is None else own(closure)
            home.take_state(optimizer)
            return found

        self._own_steps[optimizer] = vars(optimizer).get("step")
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # which schedulers wrap, too
        return optimizer

    def _check_state(self, optimizer: Optimizer) -> None:
        """Check that the optimizer's state can be stored where it is to be."""
        quantizes = any(kind.__module__.startswith("torchao.") for kind in type(optimizer).__mro__)
        if quantizes and self._state_home is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} of torchao has quantized states, which cannot be stored on the disk. Use "
                "optimizer_state='cpu', or an optimizer of torch."
            )

    def weights_changed(self) -> None:
        """Record that copies on the device may be out of date; callbacks of evaluations and saves may write weights."""
        step = vars(self).get("step")
        if isinstance(step, OffloadStep):
            step.weights_changed()

    begin_evaluation = begin_save = weights_changed

    def close(self) -> None:
        """Leave the task whole on the host."""
        for stream in (self.weight_stream, *self._streams):
            if stream is not None:
                stream.close()
        self.weight_stream = None
        self._streams.clear()
        for optimizer, own in self._own_steps.items():
            del optimizer.step
            if own is not None:  # a schedule had wrapped it
                optimizer.step = own  # type: ignore[method-assign]  # as it was
        self._own_steps.clear()
        task = getattr(self, "task", None)
        if task is not None:
            for (owner, leaf), buffer in list(_buffers(task)):
                owner._buffers[leaf] = buffer.to("cpu")
        super().close()


def _buffers(task: nn.Module) -> Any:
    """Yield (module, name) and the buffer, each once."""
    for module in task.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer
