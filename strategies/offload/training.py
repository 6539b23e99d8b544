"""Training of a model that is larger than the memory of one device, with weights on the host."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from types import MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.process import Topology
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.engine import (
    Engine,
    Models,
    Optimizers,
    Prepared,
    PreparedModel,
    TrainingPlan,
    create_optimizers,
)
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.offload.advice import read_ahead
from trainwright.strategies.offload.host_storage import PLACES, HostStorage
from trainwright.strategies.offload.step import OffloadStep, can_be_split, portions_of, step_in_portions
from trainwright.strategies.offload.streamed_unit import Unit
from trainwright.strategies.offload.streaming import WeightStream
from trainwright.strategies.steps.gradients import HostGradients
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import Strategy, StrategyOutline
from trainwright.strategies.units import WrapPolicy, find_units

# By default, a unit has at least 1/16 of the parameters, so that the device holds about an eighth of the model: the
# current unit and one prefetched unit.
_DEFAULT_NUM_UNITS = 16


@dataclass(frozen=True, repr=False)
class OffloadStrategy(Strategy):
    """Strategy for one device, with weights, gradients and optimizer state on the host or on disk.

    The units of the model are copied to the device one after the other, in the forward and again in the backward.
    Gradients are copied to the host as soon as they are computed, and the optimizer steps on the host. The device holds
    the current unit, the prefetched units, parameters outside of units, and activations. Supports one process.

    Args:
        parameters: Storage of weights: `"cpu"`, `"disk"`, or `"device"`, which keeps a copy on the device and offloads
            only gradients and optimizer state. Default: `"cpu"`.
        optimizer_state: Storage of optimizer state and gradients: `"cpu"` or `"disk"`. With `"disk"` the optimizer
            steps unit by unit, so that the state of one unit is in memory at a time. Default: `"cpu"`.
        auto_wrap_policy: Modules that are units: classes, their names, or a function. Default: the result of
            `TaskModule.shard_units`, or else modules with a sixteenth of the parameters.
        min_num_params: Alternative to `auto_wrap_policy`. Modules with at least this number of parameters are units.
        offload_folder: Folder for `"disk"`. Default: the system's temporary folder. Files are deleted at the end of the
            run, also if it is killed.
        prefetch: Number of units that are copied before their use. Default: 1.
        stream: Copy units to the device for each use. False computes with the weights in host storage, where weights on
            disk are memory-mapped. Default: False on the CPU, and True on other devices.

    Raises:
        ConfigurationError: An argument has an unknown or invalid value.
    """

    capabilities = Capabilities(
        manual_optimization=False, state_rests=False, caches_casts=False, converted_layers=False
    )

    parameters: Literal["cpu", "disk", "device"] = "cpu"
    optimizer_state: Literal["cpu", "disk"] = "cpu"
    _: KW_ONLY
    auto_wrap_policy: WrapPolicy | None = None
    min_num_params: int | None = None
    offload_folder: str | os.PathLike[str] | None = None
    prefetch: int = 1
    stream: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_place("parameters", self.parameters, (*PLACES, "device"))
        _check_place("optimizer_state", self.optimizer_state, PLACES)
        if self.prefetch < 0:
            raise ConfigurationError(f"prefetch={self.prefetch}, expected 0 or more units.")

    def check(self, settings: EngineSettings) -> None:
        """Check that the engine supports the settings.

        Raises:
            ConfigurationError: The settings have `compile=`, a loss scale or several processes.
        """
        if settings.compile_options is not None:
            raise ConfigurationError(
                "compile= is not supported with OffloadStrategy, which moves weights between host and device within "
                "a step. Remove compile=."
            )
        if settings.precision.scaled:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} needs loss scaling, which OffloadStrategy does not support. "
                "Use 'bf16-mixed'."
            )
        super().check(settings)

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        units = () if task is None else tuple(self.units(task))
        return replace(super().outline(task, settings), units=units, peak="offload")

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are copied to the device one after the other."""
        units = find_units(model, self.auto_wrap_policy, self.min_num_params)
        is_default = self.auto_wrap_policy is None and self.min_num_params is None
        if not units and is_default:
            num_params = sum(parameter.numel() for parameter in model.parameters())
            units = find_units(model, None, max(1, num_params // _DEFAULT_NUM_UNITS))
        return units

    def engine(self, settings: EngineSettings) -> Engine:
        return OffloadEngine(self, settings)


class OffloadEngine(Engine):
    """Engine for one device, with weights, gradients and optimizer state on the host or on disk.

    Attributes:
        weight_stream: The stream of a Trainer's task, set by `prepare`. None without streaming, and in user-written
            loops.
    """

    strategy: OffloadStrategy

    def __init__(self, strategy: OffloadStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.weight_stream: WeightStream | None = None
        # In a user-written loop, the streams of its models. Weak: the hooks of a model refer to its stream, so that
        # the stream exists as long as the model.
        self._streams: WeakSet[WeightStream] = WeakSet()
        # In a user-written loop, the optimizers whose `step` was replaced. The value is the former attribute `step` of
        # the object, which a scheduler sets, or None if the object had only the method of its class.
        self._previous_steps: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()

    # Model and optimizers

    def start(self, topology: Topology) -> None:
        super().start(topology)
        self.gradients = HostGradients(self.device)

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Move models to host or disk, and stream their units to the device.

        In a user-written loop, optimizers with state on disk step unit by unit. Only one unit's state is in memory at a
        time.
        """
        is_user_written_loop = not roots
        for model in models:
            stream = self._offload(model)
            if not is_user_written_loop:
                self.weight_stream = stream  # `OffloadStep` calls its `begin` and `end`
            elif stream is not None:
                stream.follow_model(model)
                self._streams.add(stream)
        # After `_offload`: optimizers are created with the final parameters.
        prepared_optimizers = create_optimizers(optimizers)
        storage = self._state_storage
        for optimizer in prepared_optimizers:
            self._check_state(optimizer)
            # A loop passes all of its optimizers in each call. `OffloadStep` handles the optimizers of a task.
            is_new = optimizer not in self._previous_steps
            if is_user_written_loop and storage is not None and is_new:
                self._step_unit_by_unit(optimizer, storage)
        return Prepared([PreparedModel.unchanged(model) for model in models], prepared_optimizers)

    def _make_context(self) -> AbstractContextManager[Any] | None:
        if self.precision.autocast_dtype is None:
            return super()._make_context()
        # The autocast cache would keep a 16-bit copy of every weight on the device until the end of the step.
        return self.precision.autocast(self.device.type, cache_enabled=False)

    def _offload(self, model: nn.Module) -> WeightStream | None:
        """Move buffers to the device and parameters to host or disk. Return the stream, or None without streaming."""
        strategy = self.strategy
        has_accelerator = self.device.type != "cpu"
        # The optimizer updates the weights on the host, so that the device has a second copy of them.
        keeps_device_copy = strategy.parameters == "device"
        place = "cpu" if keeps_device_copy else strategy.parameters
        weights = HostStorage(place, strategy.offload_folder, pinned=has_accelerator)
        _move_buffers(model, self.device)
        is_streamed = has_accelerator if strategy.stream is None else strategy.stream
        if not is_streamed:
            if place == "disk":
                for parameter in model.parameters():
                    parameter.data = weights.like(parameter.data)
            return None
        return WeightStream(
            self._units(model),
            model.parameters(),
            self.device,
            weights,
            HostStorage(strategy.optimizer_state, strategy.offload_folder, pinned=has_accelerator),
            stays=keeps_device_copy,
            ahead=strategy.prefetch,
        )

    def _units(self, model: nn.Module) -> list[nn.Module]:
        units = self.strategy.units(model)
        if not units:
            warnings.warn(
                f"{type(model).__name__} has no units to stream, so that all of its parameters are on the device "
                f"during a step. Name units with auto_wrap_policy or {type(model).__name__}.shard_units.",
                TrainwrightWarning,
                stacklevel=2,
            )
        return units

    # The step

    def make_step(self, parts: StepParts) -> Step:
        return OffloadStep(parts, self.weight_stream, self._state_storage)

    @property
    def _state_storage(self) -> HostStorage | None:
        """Storage for optimizer state. None if the state stays where the optimizer creates it, in memory."""
        if self.strategy.optimizer_state != "disk":
            return None
        return HostStorage("disk", self.strategy.offload_folder)

    # User-written loops

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        try:
            super().backward(loss, **kwargs)
        except BaseException:
            # Autograd calls `end_and_wait` only after a complete backward.
            for stream in self._streams:
                stream.end_and_wait()
            raise

    def _step_unit_by_unit(self, optimizer: Optimizer, storage: HostStorage) -> None:
        """Replace the optimizer's `step`, so that only one unit's state is in memory at a time."""
        full_step = optimizer.step  # the bound method of the class, or the function that a scheduler has set
        storage.store_state(optimizer)  # of a loaded state

        @functools.wraps(full_step)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None:  # it may run forwards and backwards, and optimizers may call it several times
                result: Any = full_step(closure)
                storage.store_state(optimizer)
                return result
            if not can_be_split(optimizer):
                result = full_step()
                storage.store_state(optimizer)
                return result
            units: list[Unit] = []
            for stream in self._streams:
                units.extend(stream.in_order_of_gradients())
            # The gradients are on the host: `follow_model` waits for them at the end of each backward.
            return step_in_portions(
                optimizer,
                portions_of(optimizer, units),
                before=lambda portion, next_tensors: read_ahead(next_tensors),
                after=lambda portion: storage.store_state(optimizer, portion.parameters),
                step=full_step,
            )

        self._previous_steps[optimizer] = vars(optimizer).get("step")
        # A bound method as an attribute of the object, as torch's schedulers set it.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def _check_state(self, optimizer: Optimizer) -> None:
        """Check that the optimizer's state can be stored on disk, if the strategy stores it there."""
        is_of_torchao = any(kind.__module__.startswith("torchao.") for kind in type(optimizer).__mro__)
        if is_of_torchao and self._state_storage is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} of torchao has quantized states, which cannot be stored on disk. Use "
                "optimizer_state='cpu', or an optimizer of torch."
            )

    def weights_changed(self) -> None:
        """Mark device copies as outdated, because callbacks of evaluations and saves may write weights."""
        step = vars(self).get("step")  # missing before `attach`
        if isinstance(step, OffloadStep):
            step.weights_changed()

    begin_evaluation = begin_save = weights_changed

    def close(self) -> None:
        """Move the full task to the host."""
        for stream in (self.weight_stream, *self._streams):
            if stream is not None:
                stream.close()
        self.weight_stream = None
        self._streams.clear()
        for optimizer, previous_step in self._previous_steps.items():
            del optimizer.step  # the method of the class again
            if previous_step is not None:
                optimizer.step = previous_step  # type: ignore[method-assign]
        self._previous_steps.clear()
        task = getattr(self, "task", None)
        if task is not None:
            _move_buffers(task, torch.device("cpu"))
        super().close()


def _check_place(name: str, place: str, known: tuple[str, ...]) -> None:
    if place not in known:
        raise ConfigurationError(f"{name}={place!r}, expected one of {', '.join(map(repr, known))}.")


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Replace all buffers by copies on a device, also buffers that modules share."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = buffer.to(device)
