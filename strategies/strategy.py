"""The Strategy contract: everything that depends on hardware, processes or an engine, behind two verbs.

`forward_backward(group)` runs every micro-batch of one optimizer step; `optimizer_step(clip)` ends the step. The loop
knows nothing else about how a model is trained. This class is the contract and, at the same time, the plain form of
it: one process, whole gradients, `torch.optim` optimizers. An engine overrides what it does differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.checkpoint.model import load_plain_state
from trainwright.checkpoint.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.core.run import Run
from trainwright.core.signatures import overrides, own_hook
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.task import TaskModule
from trainwright.strategies.alone import Rehearses
from trainwright.strategies.binding import ScaledOptimizer, StepWatch, bind_step, need_closure
from trainwright.strategies.by_hand import StepByHand
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.gradients import (
    GradientClip,
    clip_gradients,
    free_gradients,
    growth_without,
    loss_of,
    parameters_of,
    scale_gradients,
    stack_counts,
    without_loss,
)
from trainwright.strategies.inspection import Inspectable
from trainwright.strategies.non_finite import FiniteCheck
from trainwright.strategies.own_loop import OwnLoop
from trainwright.strategies.precision import Precision
from trainwright.strategies.processes.process_group import Processes
from trainwright.strategies.saves_pieces import SavesPieces
from trainwright.strategies.step_module import StepModule
from trainwright.strategies.step_outputs import outputs_of
from trainwright.strategies.transfer import make_transfer

MakeOptimizers = Callable[[], list[Optimizer]]


class Strategy(DataRanks, StepByHand, OwnLoop, FiniteCheck, Inspectable, Rehearses, SavesPieces):
    """How a task is trained on some hardware.

    Life: constructed → `configure` (facts from the Trainer; nothing is touched) → `setup` (device, processes) →
    `prepare` (model, optimizers) → `attach` → steps → `teardown`.

    Attributes:
        capabilities: see `Capabilities`.
        num_processes: how many processes this node shall run; more than one without a launcher means that the
            Trainer starts them.
        device: the device that this process computes on.
        precision: the number formats.
        processes: this process's place among the others, and what they say to each other on the host.
        optimizers: the optimizers in the task's order.
    """

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.precision = Precision.parse("32-true")
        self.device = torch.device("cpu")
        self.processes = Processes()
        self.optimizers: list[Optimizer] = []
        self.device_type = "cpu"
        self.device_indices: list[int] = [0]
        self.num_nodes = 1
        self.compile_options: dict[str, Any] | None = None
        # The engine's way to run a step, `step(name, *args)`; None: the task's own method is called.
        self._step: Callable[..., Any] | None = None
        self._eval_step: Callable[..., Any] | None = None
        self._context: Any | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._group: Group | None = None
        self._loss: torch.Tensor | None = None
        self._watch = StepWatch()
        self._zeroed = True
        self._last_idx = 0
        self.when_built: Callable[[], None] | None = None  # called in `prepare` when the task is built, before all else

    # Where it runs

    @property
    def num_processes(self) -> int:
        """Processes on this node; more than one without a launcher: the Trainer starts them."""
        return len(self.device_indices)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.processes.rank == 0

    def configure(self, settings: EngineSettings) -> None:
        """Take the Trainer's settings. Touches no device and no process.

        Raises:
            ConfigurationError: settings that this strategy cannot serve.
        """
        settings.precision.check_device(settings.device_type)
        self.device_type = settings.device_type
        self.device_indices = settings.device_indices
        self.num_nodes = settings.num_nodes
        self.precision = settings.precision
        self.compile_options = settings.compile_options
        if settings.num_processes > 1 and not self.is_distributed:
            raise ConfigurationError(
                f"devices={len(self.device_indices)}, num_nodes={self.num_nodes} with {type(self).__name__}, which "
                "runs one process. Use strategy='ddp', or devices=1."
            )

    def check_run(self, *, accumulate_grad_batches: int, clip: GradientClip | None) -> None:
        """Compare the Trainer's arguments with what this strategy was told; raises a ConfigurationError."""

    def check_task(self, task: TaskModule) -> None:
        """Check a task to be trained before a process starts, as far as it is built; raises a ConfigurationError."""

    @property
    def is_distributed(self) -> bool:
        """Whether this strategy can run more than one process."""
        return False

    def setup(self, topology: Topology) -> None:
        """Choose the device and join the other processes. Collective; blocks until all have come."""
        self.processes = self._make_processes(topology)
        index = self.device_indices[topology.local_rank % len(self.device_indices)]
        self.device = torch.device(self.device_type) if self.device_type == "cpu" else torch.device(
            self.device_type, index
        )  # fmt: skip
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(index)
        self.processes.open(self.device)

    def _make_processes(self, topology: Topology) -> Processes:
        return Processes(topology)

    # Model and optimizers

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None) -> list[Optimizer]:
        """Build the model where it belongs and then its optimizers. Collective.

        Args:
            task: changed in place: built (`configure_model`), moved, converted.
            make_optimizers: called once the parameters are final; None when nothing is trained.

        Returns:
            The optimizers, in the task's order.
        """
        self.task = task
        self._build(task)
        if self.when_built is not None:
            self.when_built()
        if self.precision.param_dtype is not None:
            task.to(self.precision.param_dtype)
        self._place(task)
        self.optimizers = make_optimizers() if make_optimizers is not None else []
        self._context = self.precision.forward_context(self.device.type)
        if self.precision.scaled and make_optimizers is not None:
            self._scaler = torch.amp.GradScaler(self.device.type)
        self._eval_step = self._step = self._compile(StepModule(task)) if self.compile_options is not None else None
        return self.optimizers

    def _build(self, task: TaskModule) -> None:
        """Have the task build what it builds in `configure_model`."""
        with self.precision.default_dtype():
            task.configure_model()

    def _place(self, task: TaskModule) -> None:
        """Bring the task's parameters and buffers to where they are trained."""
        task.to(self.device)

    def _compile(self, module: nn.Module) -> Callable[..., Any]:
        """Compile a step module; what the task logs stays outside of the graph."""
        task = self.task
        if "log" not in vars(task):
            uncompiled = torch.compiler.disable(task.log)  # type: ignore[no-untyped-call]  # torch has no types here
            object.__setattr__(task, "log", uncompiled)
        compiled: Callable[..., Any] = torch.compile(module, **(self.compile_options or {}))
        return compiled

    def attach(self, run: Run, hooks: HookTable, sink: Any, *, counts_items: bool = True) -> None:
        """Bind the events of a run to the step. Called after `prepare`, again whenever the listeners change.

        Args:
            run: handed to listeners.
            hooks: who listens.
            sink: takes what the task logs; it is told the present micro-batch.
            counts_items: weigh micro-batches by `TaskModule.num_items` when the task defines it.
        """
        task = self.task
        self.run, self.hooks, self.sink = run, hooks, sink
        self._items = own_hook(task, "num_items", TaskModule) if counts_items else None
        self._transfer = make_transfer(task, getattr(run, "datamodule", None), self.device, self.precision)
        self._backward = task.backward if overrides(task, "backward", TaskModule) else None
        self._own_step = own_hook(task, "optimizer_step", TaskModule)
        self._own_zero = own_hook(task, "optimizer_zero_grad", TaskModule)
        self._own_clip = own_hook(task, "configure_gradient_clipping", TaskModule)
        self._automatic = task.automatic_optimization
        self._needs_closure = need_closure(self.optimizers, self.precision)
        self._plain_step = self._own_step is None and self._scaler is None and not self._needs_closure
        # Gradients are freed right after the step, which saves their memory during the next forward. Whoever listens
        # gets them in Lightning's place instead: after the group's first training_step, before its backward.
        own = self._own_zero is not None or any(overrides(o, "zero_grad", Optimizer) for o in self.optimizers)
        self._zero_late = bool(hooks.on_before_zero_grad) or own
        self._zeroed = not self._zero_late and all(p.grad is None for p in parameters_of(self.optimizers))
        self._watch.begin([] if task.automatic_optimization else self.optimizers)
        wrapped = self._step if task.automatic_optimization else None  # by hand, backward runs inside the step
        self._training_step = bind_step(task, "training_step", wrapped)
        self._eval_steps: dict[str, Callable[..., Any]] = {}

    def begin_evaluation(self) -> None:
        """Make every rank evaluate the model that a checkpoint of this moment would hold. Collective."""

    def begin_save(self) -> None:
        """Make every rank hold what a checkpoint of this moment will: a resumed run goes on alike. Collective."""

    def weights_changed(self) -> None:
        """Take note that somebody else than a step may have written weights just now. Not collective."""

    # The step

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        """Run every micro-batch of one optimizer step forward and backward.

        Afterwards the gradients are the mean over everything the group consumed, over micro-batches and ranks
        (see `TaskModule.num_items`), unscaled. Collective under strategies that join several processes.

        Returns:
            The group's weighted loss on the device (0-dim, detached, not reduced): its mean over ranks is the mean
            over everything consumed. None when the task optimizes by hand or skipped every micro-batch.

        Raises:
            TaskError: the loss cannot be trained on.
            SkipRestOfEpoch: a listener ended the epoch.
        """
        if not self._automatic:
            self._run_by_hand(group)
            return None
        weights = group.weights if self._items is None else self._weigh_items(group)
        if len(group.batches) == 1:
            weight = None if weights is None else weights[0]
            output, total = self._run_batch(group.batches[0], group.first_idx, weight, 1)
            if total is None:
                total = self._leave_out([0], group, weights, total)
        else:
            output, total = self._run_batches(group, weights)
        if self.hooks.on_train_batch_end:
            group.last_output, group.last_batch = outputs_of(output), self.sink.batch
        self.sink.batch = None
        if self._scaler is not None and total is not None:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
        if self._needs_closure:
            self._group = group
        self._loss, self._last_idx, self._zeroed = total, group.first_idx + len(group.batches) - 1, False
        return total

    def _run_batches(self, group: Group, weights: Sequence[Any] | None) -> tuple[Any, torch.Tensor | None]:
        """Run a group of several micro-batches; returns the last one's output and the group's weighted loss."""
        num = len(group.batches)
        output: Any = None
        total: torch.Tensor | None = None
        skipped: list[int] = []
        for i, batch in enumerate(group.batches):
            group.index, idx, last = i, group.first_idx + i, i == num - 1
            output = None  # what a micro-batch gave must not outlive it into the next one's forward
            with self._synchronizing(last):  # gradients cross ranks in the last one only
                output, loss = self._run_batch(batch, idx, None if weights is None else weights[i], num)
            if loss is None:
                skipped.append(i)
            else:
                total = loss if total is None else total + loss
            if not last and self.hooks.on_train_batch_end:
                outputs = outputs_of(output)
                for hook in self.hooks.on_train_batch_end:
                    hook(self.run, self.task, outputs, self.sink.batch, idx)
        return output, self._leave_out(skipped, group, weights, total) if skipped else total

    def _run_batch(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        """Run one of a group's `num` micro-batches; returns the step's output and its weighted loss, detached."""
        if self._transfer is not None:
            batch = self._transfer(batch)
        self.sink.batch = batch
        for hook in self.hooks.on_train_batch_start:
            if hook(self.run, self.task, batch, idx) == -1:
                raise SkipRestOfEpoch
        if self._context is None:
            output = self._training_step(batch, idx)
        else:
            with self._context:
                output = self._training_step(batch, idx)
        if not self._zeroed:
            self._zero_gradients(idx)
        plain = type(output) is torch.Tensor and output.requires_grad and not output.dim()
        loss = output if plain else loss_of(output, type(self.task).__name__)
        if loss is None:
            return output, None
        if weight is not None:
            loss = loss * weight
        elif num > 1:
            loss = loss / num
        scaled: torch.Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        for hook in self.hooks.on_before_backward:
            hook(self.run, self.task, scaled)
        if self._backward is None:
            scaled.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            self._backward(scaled)
        for hook in self.hooks.on_after_backward:
            hook(self.run, self.task)
        return output, loss.detach()

    def _weigh_items(self, group: Group) -> Sequence[Any]:
        """Return the weight of each micro-batch of a task that counts its items."""
        assert self._items is not None  # asked before
        counts = stack_counts([self._items(batch) for batch in group.batches], self.device)
        if group.weights is not None:  # padding counts for nothing
            counts = counts * torch.tensor([float(w > 0) for w in group.weights], dtype=counts.dtype).to(self.device)
        total = self._sum_over_ranks(counts.sum())
        # A step without a single item has a gradient of zero, not of NaN.
        dtype = torch.float64 if self.precision.param_dtype is torch.float64 else torch.float32
        return (counts * self.dp_size / total.clamp(min=1)).to(dtype).unbind()

    def _synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch's forward and backward; gradients cross ranks in the last one only."""
        return _NOTHING

    def _leave_out(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        """Scale gradients and loss as if the micro-batches that the task skipped had not been in the group."""
        if self.dp_size > 1:
            raise without_loss(type(self.task).__name__, self.processes.rank)
        if total is None:
            return None
        factor = growth_without(skipped, len(group.batches), weights)
        scale_gradients(parameters_of(self.optimizers), factor)
        return total * factor

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip, step every optimizer and free the gradients.

        Returns:
            The total gradient norm before clipping (0-dim, on the device), or None when it was not computed.
        """
        norm = None if clip is None and self._own_clip is None else self._clip(clip)
        for optimizer in self.optimizers:
            if self._plain_step:
                optimizer.step()
            elif self._own_step is not None:
                stepped: Any = optimizer if self._scaler is None else ScaledOptimizer(optimizer, self._scaler)
                self._own_step(self.run.state.epoch, self._last_idx, stepped, self._closure())
            elif self._scaler is not None:
                self._scaler.step(optimizer)
            else:
                optimizer.step(self._closure())
        if self._scaler is not None:
            self._scaler.update()
        self._group = self._loss = None
        if not self._zero_late:
            for optimizer in self.optimizers:
                free_gradients(optimizer)
            self._zeroed = True
        return norm

    def _clip(self, clip: GradientClip | None) -> torch.Tensor | None:
        if self._own_clip is None:
            return None if clip is None else self.clip_parameters(parameters_of(self.optimizers), clip)
        for optimizer in self.optimizers:
            self._own_clip(optimizer, None if clip is None else clip.value, None if clip is None else clip.algorithm)
        return None

    def _closure(self) -> Callable[[], Any]:
        """Return a closure for `Optimizer.step`: its first call gives the loss at hand, later ones recompute it."""
        group, loss, calls = self._group, self._loss, 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            if calls == 1 or group is None:
                return loss
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self._zeroed = True
            with torch.enable_grad():
                return self.forward_backward(group)

        return closure

    def _zero_gradients(self, idx: int) -> None:
        epoch = self.run.state.epoch
        for optimizer in self.optimizers:
            for hook in self.hooks.on_before_zero_grad:
                hook(self.run, self.task, optimizer)
            if self._own_zero is not None:
                self._own_zero(epoch, idx, optimizer)
            else:
                optimizer.zero_grad()
        self._zeroed = True

    # Evaluation

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return a batch on this process's device, through the task's or data module's transfer hooks."""
        return batch if self._transfer is None else self._transfer(batch, dataloader_idx)

    def eval_step(self, name: str, batch: Any, idx: int, dataloader_idx: int | None = None) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on one batch, which is on the device.

        `dataloader_idx` is handed on to steps that take it; None where there is only one loader.
        """
        step = self._eval_steps.get(name)
        if step is None:
            step = self._eval_steps[name] = bind_step(self.task, name, self._eval_step)
        with self._context or _NOTHING:
            return step(batch, idx) if dataloader_idx is None else step(batch, idx, dataloader_idx)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's own state beside weights and optimizers (the loss scale)."""
        return {"scaler": self._scaler.state_dict()} if self._scaler is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def model_state(self) -> dict[str, Any]:
        """Return the task's whole weights and buffers by their own names, not to be changed.

        References where this process holds them whole or `saves_pieces`, copies on the host otherwise: then collective,
        and on other ranks than the main one the tensors have a shape and no values (device `meta`).
        """
        return dict(self.task.state_dict())

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load whole weights and buffers by their own names into the prepared task, on every rank. Not collective.

        Returns:
            The task's names that are not in `state`, and those of `state` that are not in the task.

        Raises:
            CheckpointError: shapes differ, or names do and `strict`.
        """
        return load_plain_state(self.task, state, strict=strict)

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return each optimizer's whole state by parameter name (see `named_optimizer_state`); as `model_state`."""
        names = self._parameter_names()
        return [named_optimizer_state(optimizer, names) for optimizer in self.optimizers]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load one of what `optimizer_states` returned, on every rank. Not collective.

        Raises:
            CheckpointError: it does not fit (see `load_named_optimizer_state`); the optimizer is left as it was.
        """
        load_named_optimizer_state(optimizer, state, self._parameter_names())

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self.task.named_parameters()}

    def make_whole(self) -> None:
        """Give the task and the optimizers whole tensors again where they were cut. Collective.

        Called once a stage has succeeded, before the processes part; a stage that fails leaves them as they are.
        """

    def clip_parameters(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        """Clip the gradients of some parameters in place; returns their norm before (None for `"value"`)."""
        return clip_gradients(parameters, clip)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Return every rank's tensor (all of one shape) along a new first dimension. Collective."""
        return tensor.unsqueeze(0)

    def teardown(self) -> None:
        """Undo what wrapped the task and leave the other processes. Does not wait for them."""
        task = getattr(self, "task", None)
        if task is not None:
            vars(task).pop("log", None)
        self._watch.end()
        self._step = self._eval_step = None
        self.processes.close()


_NOTHING: AbstractContextManager[Any] = nullcontext()
