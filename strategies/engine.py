"""The Engine contract: everything that depends on hardware, processes or a library for training.

A `Strategy` describes an engine. The engine itself lives for one stage of a Trainer, or for one user-written loop, and
is dropped afterwards. It exposes its parts as values: the `step` runs every micro-batch of one optimizer step and
completes it, the `state` is the model as checkpoints see it, `data_ranks` are the ranks that see different data. The
loop knows nothing else about how a model is trained. `Engine` is the contract and also its plain form: one process,
full gradients, optimizers of `torch.optim`. Other engines override what they do differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.memory import keep_freed_memory
from trainwright.core.process import Topology
from trainwright.core.run import Run, SchedulerConfig
from trainwright.core.task import TaskModule
from trainwright.core.tree import move, move_module
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.processes.process_group import AbsentOthers, Processes
from trainwright.strategies.capabilities import REFUSALS, Capabilities
from trainwright.strategies.context.sequences import SplitSequences
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.lightning_members import LightningMembers
from trainwright.strategies.state import FullState
from trainwright.strategies.steps.binding import StepModule
from trainwright.strategies.steps.gradients import Gradients
from trainwright.strategies.steps.step import AutomaticStep, ManualStep, Step, StepParts
from trainwright.strategies.steps.transfer import move_task
from trainwright.strategies.units import is_compiled, repeated_blocks

MakeOptimizers = Callable[[], list[Optimizer]]


class Description(Protocol):
    """The attributes of a strategy that every engine reads."""

    capabilities: Capabilities


class TrainingPlan(Protocol):
    """What is known about a training before its engine starts; each is computed when it is read."""

    lr_scheduler_configs: list[SchedulerConfig]
    accumulate_grad_batches: int

    @property
    def train_batch_size(self) -> int | None:
        """Samples of one micro-batch on this rank; None if the loader does not tell."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the training; infinite when nothing bounds them."""


class Engine(LightningMembers):
    """Trains models on some hardware.

    Life in a Trainer: constructed → `start` (device, processes) → `prepare` (model, optimizers) → `attach` → steps →
    `close`. In a user-written loop there is no task: `start` → `prepare_models` → `close`.

    Args:
        strategy: its description.
        settings: of the Trainer or Accelerator.

    Attributes:
        capabilities: what it can do; see `Capabilities`.
        autocasts: forwards run under autocast in mixed precision.
        device: the device that this process computes on.
        precision: the number formats.
        processes: this process and the others, and their communication on the host.
        data_ranks: the ranks that see different data.
        mesh: the `DeviceMesh` of a strategy whose ranks have named axes; None: all replicate the model.
        gradients: clips, scales and frees the gradients of its models.
        optimizers: the optimizers in the task's order.
        scaler: of the loss, with 16-bit mixed precision, once there are optimizers; None otherwise.
        state: the task's state by its own names, once it is prepared.
        step: runs its steps, once `attach` was called.
        conversions: undoes what the precision has converted.
        sequences: splits the sequences of batches over ranks; None: they are not split.
        run_group: runs micro-batches of a loop's optimizer step forward and backward, `run_group(step, batches)`, and
            returns their mean loss over all ranks (0-dim); None: they run one after the other.
        when_built: called in `prepare` after the task is built, before anything else.
    """

    autocasts: bool = True
    state: FullState
    step: Step

    def __init__(self, strategy: Description, settings: EngineSettings) -> None:
        self.strategy, self.settings = strategy, settings
        self.capabilities, self.precision = strategy.capabilities, settings.precision
        self.device = torch.device("cpu")
        self.processes = Processes()
        self.data_ranks = DataRanks.of(self.processes)
        self.mesh: Any = None
        self.gradients = Gradients(self.device)
        self.optimizers: list[Optimizer] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.sequences: SplitSequences | None = None
        self.when_built: Callable[[], None] | None = None
        self.run_group: Callable[[Callable[[Any], torch.Tensor], Sequence[Any]], torch.Tensor] | None = None
        # The engine's way to run a step, `call(name, *args)`; None: the task's own method is called.
        self._training_call: Callable[..., Any] | None = None
        self._eval_call: Callable[..., Any] | None = None
        self._context: AbstractContextManager[Any] | None = None
        self._had_begun = False
        self.conversions = ExitStack()

    # Where it runs

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.processes.rank == 0

    def start(self, topology: Topology) -> None:
        """Choose the device and join the other processes. Collective; blocks until all have joined."""
        self.processes = self._make_processes(topology)
        kind, indices = self.settings.device_type, self.settings.device_indices
        index = indices[topology.local_rank % len(indices)]
        self.device = torch.device("cpu") if kind == "cpu" else torch.device(kind, index)
        if kind == "cpu":
            keep_freed_memory(True)
        elif kind != "xla":  # which has no current device
            torch.accelerator.set_device_index(index)
        self.processes.open(self.device)
        self.data_ranks = DataRanks.of(self.processes)
        self.gradients = Gradients(self.device)

    def _make_processes(self, topology: Topology) -> Processes:
        return Processes(topology)

    # Model and optimizers

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> list[Optimizer]:
        """Build the model where it belongs and then its optimizers. Collective.

        Args:
            task: changed in place: built (`configure_model`), moved, converted.
            make_optimizers: called once the parameters are final; None if nothing is trained.
            plan: of the training.

        Returns:
            The optimizers, in the task's order.
        """
        self.task = task
        self._build(task)
        if self.when_built is not None:
            self.when_built()
        if self.precision.param_dtype is not None:
            task.to(self.precision.param_dtype)
        self.precision.convert([task], self.device, self.conversions)
        self._place(task)
        self.optimizers = make_optimizers() if make_optimizers is not None else []
        self._context = self.precision.forward_context(self.device.type)
        if self.precision.scaled and make_optimizers is not None:
            self.scaler = self.gradients.make_scaler()
        if self.settings.compile_options is not None:
            self._training_call = self._eval_call = self._compile(StepModule(task))
        self.state = FullState(task, self.optimizers, self.device, is_main=self.is_main)
        return self.optimizers

    def _build(self, task: TaskModule) -> None:
        """Have the task build what it builds in `configure_model`."""
        with self.precision.default_dtype():
            task.configure_model()

    def _place(self, task: TaskModule) -> None:
        """Bring the task's parameters and buffers to where they are trained."""
        move_task(task, self.device)

    def _compile(self, module: nn.Module) -> Callable[..., Any]:
        """Compile a step module; calls of `task.log` stay outside of the graph."""
        task = self.task
        if "log" not in vars(task):
            uncompiled = torch.compiler.disable(task.log)  # type: ignore[no-untyped-call]  # torch has no types here
            object.__setattr__(task, "log", uncompiled)
        compiled: Callable[..., Any] = torch.compile(module, **(self.settings.compile_options or {}))
        return compiled

    def attach(self, run: Run, hooks: HookTable, sink: MetricBuffer, *, counts_items: bool = True) -> None:
        """Create the step. Called after `prepare`, and again whenever the callbacks change.

        Args:
            run: passed to hooks.
            hooks: the hooks of the step's events.
            sink: receives what the task logs, and the current micro-batch.
            counts_items: weigh micro-batches by `TaskModule.num_items` if the task defines it.
        """
        self._drop_step()
        parts = StepParts(
            task=self.task,
            optimizers=self.optimizers,
            device=self.device,
            precision=self.precision,
            ranks=self.data_ranks,
            rank=self.processes.rank,
            context=self._context,
            scaler=self.scaler,
            training_call=self._training_call,
            eval_call=self._eval_call,
            inputs=self.precision,
            gradients=self.gradients,
            run=run,
            hooks=hooks,
            sink=sink,
            counts_items=counts_items,
        )
        self.step = self.make_step(parts)

    def make_step(self, parts: StepParts) -> Step:
        """Return the step of the task."""
        return AutomaticStep(parts) if self.task.automatic_optimization else ManualStep(parts)

    def _drop_step(self) -> None:
        step: Step | None = vars(self).pop("step", None)
        if step is not None:
            self._had_begun = step.begun
            step.close()

    @property
    def has_begun(self) -> bool:
        """Whether an optimizer has begun to step in the current or interrupted group, with manual optimization."""
        return self.step.begun if "step" in vars(self) else self._had_begun

    # Evaluation, saves, trials

    def begin_evaluation(self) -> None:
        """Make every rank evaluate the model that a checkpoint of this moment would hold. Collective."""

    def begin_save(self) -> None:
        """Make every rank hold what a checkpoint of this moment holds, so that a resumed run is equal. Collective."""

    def weights_changed(self) -> None:
        """Record that weights may have been written outside of a step. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's own state beside weights and optimizers (the loss scale)."""
        return {"scaler": self.scaler.state_dict()} if self.scaler is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    @contextmanager
    def reunited(self) -> Iterator[None]:
        """Communicate with the processes that are left, also after `close`, for a save at the end of a run."""
        processes, ranks = self.processes, self.data_ranks
        with processes.reunited(self.device) as left:
            self.processes, self.data_ranks = left, ranks.among(left)
            try:
                yield
            finally:
                self.processes, self.data_ranks = processes, ranks

    @contextmanager
    def trial(self, *, alone: bool) -> Iterator[Engine]:
        """Yield an engine for trial steps: afterwards there are no gradients, and the loss scale is as before.

        Weights, optimizers and generators are restored by the caller. `attach` must be called inside, before the first
        step, and again afterwards.

        Args:
            alone: The engine communicates with no other rank: each trains its own replica, so that a rank that runs out
                of memory leaves no other waiting, and its `processes` answer for the others. Collective on entering
                and on leaving in order; after an exception the engine can only be closed.

        Raises:
            ConfigurationError: This engine cannot undo steps, or cannot run one on one process alone.
        """
        if not self.capabilities.trials:
            raise ConfigurationError(f"a search {REFUSALS['trials'].format(strategy=type(self.strategy).__name__)}")
        scaler = copy = self.scaler
        if scaler is not None:
            copy = self.gradients.make_scaler()
            copy.load_state_dict(scaler.state_dict())
        if alone and self.processes.world_size > 1:
            with self._alone() as single:
                single.scaler = copy
                yield single
                single.step.discard_gradients()
            return
        self.scaler = copy
        try:
            yield self
            self.step.discard_gradients()
        finally:
            self.scaler = scaler

    @contextmanager
    def _alone(self) -> Iterator[Engine]:
        """Yield an engine of one process for the prepared task. Collective on leaving in order."""
        if not self.capabilities.lone_steps:
            raise ConfigurationError(f"a search {REFUSALS['lone_steps'].format(strategy=type(self.strategy).__name__)}")
        single = Engine(self.strategy, self.settings)
        single.device, single.processes = self.device, AbsentOthers(self.processes)
        single.gradients = Gradients(self.device)
        single.data_ranks = replace(self.data_ranks, processes=single.processes, alone=True)
        single.task, single.optimizers, single._context = self.task, self.optimizers, self._context
        single.state = FullState(self.task, self.optimizers, self.device, is_main=self.is_main)
        if self.settings.compile_options is not None:
            single._training_call = single._eval_call = single._compile(StepModule(self.task))
        yield single
        single._drop_step()

    def explain_error(self, error: BaseException, model: nn.Module) -> Exception | None:
        """Translate an error of a library into one that names the user's parameters. Not collective.

        Args:
            error: Raised in a stage or in a forward.
            model: The task, or the model of a user-written loop.

        Returns:
            None if there is nothing to add.
        """
        return None

    # For user-written training loops

    def use(self, strategy: Description) -> None:
        """Prepare the models that follow by another description of the same engine. Not collective.

        The models that are prepared already keep theirs.
        """
        self.strategy = strategy

    def prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], plan: TrainingPlan
    ) -> list[Callable[..., Any]]:
        """Return what a loop calls in place of each model. Collective.

        Args:
            models: Changed in place, and on the device afterwards.
            optimizers: All of the loop so far. If parameters are replaced, they hold the new ones, with their state.
            plan: Of the training, as far as it is known.

        Raises:
            ConfigurationError: The engine cannot train these models with these optimizers.
        """
        return [move_module(model, self.device) for model in models]

    def owner_of_attributes(self, model: nn.Module, prepared: Callable[..., Any]) -> object:
        """Return the object whose attributes a prepared model has: the model, or a library's engine around it."""
        del prepared
        return model

    def compile_model(self, model: nn.Module, prepared: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a loop calls in place of a model: compiled if the settings say so. Not collective.

        Args:
            model: the user's; a compiled module stays as it is.
            prepared: what `prepare_models` returned for it, or the model itself.
        """
        options = self.settings.compile_options
        if options is None or is_compiled(model) or not isinstance(prepared, nn.Module):
            return prepared
        blocks = repeated_blocks(model) if self.settings.compile_blocks else []
        for block in blocks:
            block.compile(**options)  # in place: names of parameters stay
        if blocks:
            return prepared
        compiled: Callable[..., Any] = torch.compile(prepared, **options)
        return compiled

    def adopt_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer of a loop, and return the one that the loop steps. Not collective.

        If `prepare_models` has replaced its parameters, it holds the new ones afterwards.

        Raises:
            ConfigurationError: The engine cannot step it.
        """
        return optimizer

    def loop_state(
        self, models: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str]
    ) -> FullState:
        """Return the state of a loop, for its checkpoints.

        Args:
            models: The model, or a module whose children are the models.
            optimizers: All optimizers of the loop.
            names: The names of parameters of optimizers that belong to no model.
        """
        return FullState(models, optimizers, self.device, is_main=self.is_main, names=names)

    def no_sync(self, prepared: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients of one prepared model on this rank. Not collective.

        The next backward outside of it averages the accumulated gradients. Every rank must use it for the same passes.

        Args:
            prepared: one of what `prepare_models` returned.
        """
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of a loss. Collective where gradients are averaged.

        Args:
            kwargs: arguments of `torch.Tensor.backward`.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch has no types here

    def sync_next_backward(self, prepared: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return a context whose backward averages gradients, although its forward ran within `no_sync`. Not
        collective.

        Args:
            prepared: one of what `prepare_models` returned.

        Raises:
            ConfigurationError: The engine determines in the forward what it averages.
        """
        return nullcontext()

    def join(self, prepared: Sequence[object]) -> AbstractContextManager[Any] | None:
        """Return a context in which ranks may run different numbers of steps; None if the engine has none. Collective
        at its end.

        Args:
            prepared: what `prepare_models` returned, or torch's `Joinable` objects.
        """
        return None

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """Return a function that copies a batch to the device without waiting; None if batches stay on the host."""
        return None if self.device.type == "cpu" else partial(move, device=self.device)

    # The end

    def unshard(self) -> None:
        """Give the task and the optimizers full tensors again where they were sharded. Collective.

        Called once a stage has succeeded, before the processes part; a stage that fails leaves them as they are.
        """

    def close(self) -> None:
        """Undo what wrapped the task and leave the other processes. Does not wait for them."""
        task = getattr(self, "task", None)
        if task is not None:
            vars(task).pop("log", None)
        self._drop_step()
        self._training_call = self._eval_call = None
        self.conversions.close()
        self.processes.close()
        if self.settings.device_type == "cpu":
            keep_freed_memory(False)
