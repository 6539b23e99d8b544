"""Train a model that is larger than the device on one device: everything is at home on the host, and parts visit it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import Run
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.gradients import GradientClip
from trainwright.strategies.offload.advice import read_ahead
from trainwright.strategies.offload.homes import PLACES, Home
from trainwright.strategies.offload.streaming import WeightStream
from trainwright.strategies.shard_units import WrapPolicy, find_units
from trainwright.strategies.strategy import MakeOptimizers, Strategy

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

    capabilities = Capabilities(manual_optimization=False, state_rests=False)

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
        super().__init__()
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
        self.weight_stream: WeightStream | None = None

    def configure(self, settings: EngineSettings) -> None:
        """Take the Trainer's settings.

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
        super().configure(settings)

    # Model and optimizers

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None) -> list[Optimizer]:
        """Build the model on the host, and have its units visit the device."""
        optimizers = super().prepare(task, make_optimizers)
        if self.precision.autocast_dtype is not None:
            # Without a cache, which would keep a narrow copy of every weight on the device until the step is over.
            self._context = torch.autocast(self.device.type, dtype=self.precision.autocast_dtype, cache_enabled=False)
        return optimizers

    def _place(self, task: TaskModule) -> None:
        pinned = self.device.type != "cpu"
        weights = Home("cpu" if self.parameters == "device" else self.parameters, self.offload_folder, pinned=pinned)
        self._state_home = Home(self.optimizer_state, self.offload_folder)
        for (owner, leaf), buffer in list(_buffers(task)):
            owner._buffers[leaf] = buffer.to(self.device)
        if not (self.device.type != "cpu" if self.stream is None else self.stream):
            if weights.place == "disk":
                for parameter in task.parameters():
                    parameter.data = weights.like(parameter.data)
            return
        gradients = Home(self.optimizer_state, self.offload_folder, pinned=pinned)
        self.weight_stream = WeightStream(
            self._units(task), task.parameters(), self.device, weights, gradients,
            stays=self.parameters == "device", ahead=self.prefetch,
        )  # fmt: skip

    def _units(self, task: TaskModule) -> list[nn.Module]:
        units = find_units(task, self.auto_wrap_policy, self.min_num_params)
        if not units and self.auto_wrap_policy is None and self.min_num_params is None:
            total = sum(parameter.numel() for parameter in task.parameters())
            units = find_units(task, None, max(1, total // _PARTS))
        if not units:
            warnings.warn(
                f"no part of {type(task).__name__} comes and goes by itself: all of it is on the device during a step. "
                f"Name units with auto_wrap_policy or {type(task).__name__}.shard_units.",
                TrainwrightWarning,
                stacklevel=2,
            )
        return units

    # The step

    def attach(self, run: Run, hooks: HookTable, sink: Any, *, counts_items: bool = True) -> None:
        """Bind the events of a run to the step."""
        super().attach(run, hooks, sink, counts_items=counts_items)
        if self.weight_stream is not None:
            own = self._backward
            self._backward = lambda loss: self._run_backward(own, loss)
        self._in_portions = (
            self.optimizer_state == "disk" and self._plain_step and not any(map(_is_listened_to, self.optimizers))
        )
        if self.optimizer_state == "disk":
            for optimizer in self.optimizers:
                self._send_home(optimizer)
        if self._in_portions:
            own_step: Any = self._step_in_portions
            self._plain_step, self._own_step = False, own_step

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        """Run every micro-batch of one step, with the units coming one after the other."""
        if self.weight_stream is not None:
            self.weight_stream.weights_changed()  # by the last step, or by whoever averages or loads weights
        return super().forward_backward(group)

    def _run_backward(self, own: Any, loss: torch.Tensor) -> None:
        if own is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            own(loss)
        assert self.weight_stream is not None
        self.weight_stream.end()  # whoever listens after the backward finds the gradients

    def _run_batch(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        if self.weight_stream is None:
            return super()._run_batch(batch, idx, weight, num)
        self.weight_stream.begin()
        try:
            return super()._run_batch(batch, idx, weight, num)
        finally:
            self.weight_stream.end()

    def _zero_gradients(self, idx: int) -> None:
        if self.weight_stream is None:
            super()._zero_gradients(idx)
        else:  # between forward and backward, when gradients of what is on the device are put aside
            self.weight_stream.end()
            super()._zero_gradients(idx)
            self.weight_stream.root.come()

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip and step where the weights are at home."""
        norm = super().optimizer_step(clip)
        if self.optimizer_state == "disk" and not self._in_portions:
            for optimizer in self.optimizers:
                self._send_home(optimizer)
        return norm

    def _step_in_portions(self, epoch: int, idx: int, optimizer: Any, closure: Any) -> None:
        """Step one unit after the other, with its state alone in memory: an optimizer skips what has no gradient.

        Meanwhile the next one's is read from the disk.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = None
        portions = self._portions(parameters)
        for portion, following in zip(portions, [*portions[1:], []], strict=True):
            read_ahead(_touched(optimizer, following, gradients))
            for parameter in portion:
                parameter.grad = gradients[parameter]
            optimizer.step()
            self._send_home(optimizer, portion)
            for parameter in portion:
                parameter.grad = None
        for parameter in parameters:
            parameter.grad = gradients[parameter]

    def _portions(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return parameters as they lie in units, those whose gradients came first before others."""
        if self.weight_stream is None:
            return [[parameter] for parameter in parameters]
        wanted = set(parameters)
        units = [[p for p in unit.parameters if p in wanted] for unit in reversed(self.weight_stream.all_units)]
        return [unit for unit in units if unit]

    def _send_home(self, optimizer: Optimizer, parameters: list[nn.Parameter] | None = None) -> None:
        """Move state that an optimizer has made in memory to the disk."""
        for parameter in list(optimizer.state) if parameters is None else parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and not hasattr(value, "_trainwright_at_home"):
                    at_home = self._state_home.like(value)
                    at_home._trainwright_at_home = True  # type: ignore[attr-defined]
                    optimizer.state[parameter][name] = at_home

    # Evaluation and state

    def eval_step(self, name: str, batch: Any, idx: int, dataloader_idx: int = 0) -> Any:
        """Run an evaluation step, with the units coming one after the other."""
        if self.weight_stream is None:
            return super().eval_step(name, batch, idx, dataloader_idx)
        if idx == 0:
            self.weight_stream.weights_changed()
        self.weight_stream.begin()
        try:
            return super().eval_step(name, batch, idx, dataloader_idx)
        finally:
            self.weight_stream.end()

    def teardown(self) -> None:
        """Leave the task whole on the host."""
        if self.weight_stream is not None:
            self.weight_stream.close()
            self.weight_stream = None
        task = getattr(self, "task", None)
        if task is not None:
            for (owner, leaf), buffer in list(_buffers(task)):
                owner._buffers[leaf] = buffer.to("cpu")
        super().teardown()


def _buffers(task: nn.Module) -> Any:
    """Yield (module, name) and the buffer, each once."""
    for module in task.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer


def _touched(optimizer: Optimizer, parameters: list[nn.Parameter], gradients: Any) -> Iterator[torch.Tensor]:
    """Yield what a step of the parameters reads: them, their gradients and their state."""
    for parameter in parameters:
        yield parameter.data
        yield gradients[parameter]
        yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor))


def _is_listened_to(optimizer: Optimizer) -> bool:
    """Say whether somebody would notice that one step is several."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
