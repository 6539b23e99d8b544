"""Train a model that is larger than the device on one device: everything is at home on the host, and parts visit it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import Run
from trainwright.core.signatures import overrides
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.gradients import GradientClip
from trainwright.strategies.non_finite import NonFinite
from trainwright.strategies.offload.advice import read_ahead
from trainwright.strategies.offload.homes import PLACES, Home
from trainwright.strategies.offload.portions import Portion, can_be_split, portions_of, step_in_portions
from trainwright.strategies.offload.streaming import WeightStream
from trainwright.strategies.strategy import MakeOptimizers, Strategy
from trainwright.strategies.units import WrapPolicy, find_units

# What may run between a step of the optimizer and the next forward without the strategy being told.
_BETWEEN_STEPS = (
    "on_train_batch_end",
    "on_train_step_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_step_start",
    "on_train_batch_start",
)
_MOVING = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
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
        self._is_early = False  # copies on the device are of the present weights, though a step has been made
        self._last_of_group = 0

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
        self._is_early = False
        self._in_portions = (
            self.weight_stream is not None or self.optimizer_state == "disk"
        ) and self._plain_step  # unless an optimizer cannot be split, which may change
        # Who listens to gradients must find all of them; otherwise a unit's are waited for when it steps.
        self._waits_late = (
            self._in_portions
            and self._backward is None
            and not (hooks.on_after_backward or hooks.on_before_optimizer_step)
        )
        moves = any(overrides(self.task, name, TaskModule) for name in _MOVING)
        quiet = hooks.only_read(_BETWEEN_STEPS) and _only_schedule(run, self.task) and not moves
        self._copies_early = self._in_portions and quiet
        self._rewritten = moves or not hooks.only_read(("on_train_batch_start", "on_train_batch_end"))
        if self.weight_stream is not None:
            own, own_step = self._backward, self._training_step
            self._backward = lambda loss: self._run_backward(own, loss)
            self._training_step = lambda batch, idx: self._run_training_step(own_step, batch, idx)
        if self.optimizer_state == "disk":
            for optimizer in self.optimizers:
                self._send_home(optimizer)
        if self._in_portions:
            own_optimizer_step: Any = self._step_in_portions
            self._plain_step, self._own_step = False, own_optimizer_step

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        """Run every micro-batch of one step, with the units coming one after the other."""
        if self.weight_stream is not None:
            if not self._is_early:
                self.weight_stream.weights_changed()  # by the last step, or by whoever averages or loads weights
            self._is_early = False
            self._last_of_group = group.first_idx + len(group.batches) - 1
        return super().forward_backward(group)

    def _run_training_step(self, own: Any, batch: Any, idx: int) -> Any:
        assert self.weight_stream is not None
        if self._rewritten:  # maybe, by those who were just told of the batch
            self.weight_stream.weights_changed()
        self.weight_stream.begin()
        return own(batch, idx)

    def _run_backward(self, own: Any, loss: torch.Tensor) -> None:
        if own is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            own(loss)
        assert self.weight_stream is not None
        self.weight_stream.end()
        if not self._waits_late:
            self.weight_stream.wait()  # whoever listens after the backward finds the gradients

    def _run_batch(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        stream = self.weight_stream
        if stream is None:
            return super()._run_batch(batch, idx, weight, num)
        complete = False
        try:
            found = super()._run_batch(batch, idx, weight, num)
            complete = True
        finally:
            stream.end()
            if not (complete and self._waits_late and idx == self._last_of_group):
                stream.wait()  # what comes next may look at gradients, or adds to them
        return found

    def _zero_gradients(self, idx: int) -> None:
        if self.weight_stream is None:
            super()._zero_gradients(idx)
        else:  # between forward and backward, when gradients of what is on the device are put aside
            self.weight_stream.end()
            super()._zero_gradients(idx)
            self.weight_stream.root.come()

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip and step where the weights are at home, while gradients still come and weights already go."""
        stream = self.weight_stream
        if clip is not None or self._own_clip is not None or not self._in_portions:
            self._wait_for_gradients()
        if stream is not None:
            stream.weights_changed()  # also frozen ones maybe, by the task's own step
        try:
            norm = super().optimizer_step(clip)
        finally:
            self._wait_for_gradients()  # also those that nobody steps
        if self.optimizer_state == "disk" and not self._in_portions:
            for optimizer in self.optimizers:
                self._send_home(optimizer)
        if stream is not None and self._copies_early:
            stream.copy_rest_early()
            self._is_early = True
        return norm

    def _step_in_portions(self, epoch: int, idx: int, optimizer: Any, closure: Any) -> None:
        """Step one unit after the other, each when its gradients are at home, with its state alone in memory.

        Meanwhile the gradients of those that follow come from the device, their state is read from the disk, and the
        weights of those before go to the device.
        """
        stream = self.weight_stream
        if not can_be_split(optimizer):
            self._wait_for_gradients()
            optimizer.step()
            if stream is not None:
                stream.weights_changed()
            if self.optimizer_state == "disk":
                self._send_home(optimizer)
            return
        last = optimizer is self.optimizers[-1]  # others may hold parameters of the same unit

        def before(portion: Portion, following: Iterator[torch.Tensor]) -> None:
            if self.optimizer_state == "disk":
                read_ahead(following)
            if portion.unit is not None:
                portion.unit.wait_for_gradients()

        def after(portion: Portion) -> None:
            if self.optimizer_state == "disk":
                self._send_home(optimizer, portion.parameters)
            if stream is not None and portion.unit is not None:
                portion.unit.weights_changed()
                if last and self._copies_early:
                    stream.copy_early(portion.unit)

        portions = portions_of(optimizer, None if stream is None else stream.in_order_of_gradients())
        step_in_portions(optimizer, portions, before=before, after=after)

    def _send_home(self, optimizer: Optimizer, parameters: list[nn.Parameter] | None = None) -> None:
        """Move state that an optimizer has made in memory to the disk."""
        for parameter in list(optimizer.state) if parameters is None else parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and not hasattr(value, "_trainwright_at_home"):
                    at_home = self._state_home.like(value)
                    at_home._trainwright_at_home = True  # type: ignore[attr-defined]
                    optimizer.state[parameter][name] = at_home

    # Whoever looks at gradients, or writes weights, between two steps

    def _wait_for_gradients(self) -> None:
        if self.weight_stream is not None:
            self.weight_stream.wait_for_gradients()

    def _leave_out(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        self._wait_for_gradients()
        return super()._leave_out(skipped, group, weights, total)

    def is_finite(self, loss: torch.Tensor) -> bool:
        """Tell whether loss and gradients are finite; waits for all of them."""
        self._wait_for_gradients()
        return super().is_finite(loss)

    def explain_non_finite(self, loss: torch.Tensor) -> NonFinite:
        """Say what is not finite; waits for all gradients."""
        self._wait_for_gradients()
        return super().explain_non_finite(loss)

    def discard_gradients(self) -> None:
        """Forget the gradients of a group that will not be stepped, when they are at home."""
        self._wait_for_gradients()
        super().discard_gradients()

    def weights_changed(self) -> None:
        """Take note that copies on the device may be out of date."""
        self._is_early = False

    def begin_evaluation(self) -> None:
        """Bring the present weights for evaluation, and again afterwards: listeners may change them."""
        self._is_early = False
        super().begin_evaluation()

    def begin_save(self) -> None:
        """Bring the present weights again afterwards: listeners may change them."""
        self._is_early = False
        super().begin_save()

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load whole weights and buffers where they are at home; copies on the device are out of date."""
        self._is_early = False
        return super().load_model_state(state, strict)

    # Evaluation and state

    def eval_step(self, name: str, batch: Any, idx: int, dataloader_idx: int | None = None) -> Any:
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
            self.weight_stream.wait()  # whoever listens may write weights

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


def _only_schedule(run: Run, task: TaskModule) -> bool:
    """Tell whether what is called in a step's schedules is torch's, which changes optimizers and no weights."""
    return not overrides(task, "lr_scheduler_step", TaskModule) and all(
        type(config.scheduler).__module__.startswith("torch.optim.") for config in run.lr_scheduler_configs
    )
