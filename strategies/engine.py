"""The Engine contract: everything that depends on hardware, processes or a library for training.

A `Strategy` describes an engine. The engine itself exists for one stage of a Trainer, or for one user-written training
loop. Its attributes are the interface to the loop: `step` runs the micro-batches of one optimizer step, `state` reads
and writes the model for checkpoints, and `data_ranks` are the ranks that see different data. `Engine` implements the
contract for one process, full gradients and `torch.optim`. Other engines override the methods that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.memory import keep_freed_memory
from trainwright.core.process import Topology
from trainwright.core.run import Run, SchedulerConfig
from trainwright.core.signatures import method_of
from trainwright.core.task import TaskModule
from trainwright.core.tree import move
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.processes.process_group import AbsentOthers, Processes
from trainwright.strategies.capabilities import REFUSALS, Capabilities
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.lightning_members import LightningMembers
from trainwright.strategies.state import FullState
from trainwright.strategies.steps.binding import StepModule
from trainwright.strategies.steps.gradients import Gradients
from trainwright.strategies.steps.manual_step import ManualStep
from trainwright.strategies.steps.phase import Phase
from trainwright.strategies.steps.step import AutomaticStep, Step, StepParts
from trainwright.strategies.steps.transfer import move_model
from trainwright.strategies.units import check_blocks, compile_blocks, is_compiled_module, repeated_blocks

if TYPE_CHECKING:
    from trainwright.strategies.context.sequences import SplitSequences  # imports much of torch

# Argument of `Engine.prepare`: existing optimizers, or a function that creates them once the parameters are final. None
# if nothing is trained.
MakeOptimizers = Callable[[], list[Optimizer]]
Models = Sequence[nn.Module]
Optimizers = Sequence[Optimizer] | MakeOptimizers | None


class Description(Protocol):
    """Attributes of a strategy that every engine reads."""

    capabilities: Capabilities


class TrainingPlan(Protocol):
    """Properties of a training that an engine may need to prepare the model. A Trainer computes them on access."""

    lr_scheduler_configs: list[SchedulerConfig]
    accumulate_grad_batches: int

    @property
    def train_batch_size(self) -> int | None:
        """Samples per micro-batch on this rank. None if unknown."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of optimizer steps of the training, or infinity."""


RunGroup = Callable[[Callable[[Any], torch.Tensor], Sequence[Any]], torch.Tensor]
"""`run_group(step, batches)` runs forward and backward of all micro-batches of an optimizer step. It returns the mean
loss over all ranks (0-dim)."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Objects that a loop uses instead of a model.

    Attributes:
        call: Callable of the training: the model, a wrapper of it, or a function.
        attributes: Object whose attributes a user reads: the model, or a library's wrapper of it.
        evaluate: Callable of a Trainer's evaluation. None selects the methods of the model itself.
        run_group: Runs the micro-batches of an optimizer step together. None if they run separately.
    """

    call: Callable[..., Any]
    attributes: object
    evaluate: Callable[..., Any] | None = None
    run_group: RunGroup | None = None

    @classmethod
    def unchanged(cls, model: nn.Module) -> PreparedModel:
        """Return the entry of a model that no engine wraps."""
        return cls(call=model, attributes=model)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Objects that a loop uses instead of its models and optimizers.

    Attributes:
        models: One entry for each model.
        optimizers: For each optimizer, the optimizer that the loop steps.
    """

    models: list[PreparedModel]
    optimizers: list[Optimizer]


def create_optimizers(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers that are passed to `Engine.prepare`. Create them if a function is passed.

    Called once the parameters are final, because optimizers keep references to them.
    """
    if optimizers is None:
        return []
    if callable(optimizers):
        return optimizers()
    return list(optimizers)


class Engine(LightningMembers):
    """Engine that trains models on one kind of hardware.

    Order of calls in a Trainer: constructor → `start` (device, processes) → `prepare_task`, which calls `prepare` →
    `attach` → steps → `close`. In a user-written loop, without a task: `start` → `prepare` → `close`.

    Args:
        strategy: Description of the engine.
        settings: Arguments of the Trainer or Accelerator.

    Attributes:
        capabilities: See `Capabilities`.
        autocasts: True if forwards run under autocast in mixed precision. False in engines whose library
            casts weights and inputs.
        device: Device that this process computes on. The CPU before `start`.
        precision: Number formats of weights and computation.
        processes: All processes, and their communication on the host. One process before `start`.
        data_ranks: Ranks that see different data.
        mesh: `DeviceMesh` of a strategy whose ranks have named axes, set by `start`. None means that all ranks
            replicate the model.
        gradients: Clips, scales and frees the gradients of the models.
        task: The task of a Trainer, set by `prepare_task`. Missing in user-written loops.
        optimizers: A Trainer's optimizers, in the task's order. Empty in user-written loops.
        scaler: Loss scaler for float16 mixed precision. None in other precisions, and before optimizers are created.
        state: Reads and writes the task's state by the task's names. Set by `prepare_task`.
        step: Runs the optimizer steps. Set by `attach`.
        phase: Where a Trainer is in its optimizer step. Set by the training loop, and by manual optimization.
        conversions: Callbacks that `close` calls to undo converted layers, compiled blocks and a replaced `task.log`.
        sequences: Splits the sequences of batches over ranks. None means that sequences are not split.
        when_configured: Called after the task's `configure_model`, in the context in which it builds the model (on the
            device `meta` with FSDP, in shards with DeepSpeed). None calls nothing.
        when_built: Called after that context, before weights are moved or sharded. None calls nothing.
    """

    autocasts: bool = True
    # Missing until they are set, so that a use before that is an AttributeError.
    task: TaskModule
    state: FullState
    step: Step

    def __init__(self, strategy: Description, settings: EngineSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        self.capabilities = strategy.capabilities
        self.precision = settings.precision
        self.device = torch.device("cpu")
        self.processes = Processes()
        self.data_ranks = DataRanks.of(self.processes)
        self.mesh: Any = None
        self.gradients = Gradients(self.device)
        self.optimizers: list[Optimizer] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.sequences: SplitSequences | None = None
        self.when_configured: Callable[[], None] | None = None
        self.when_built: Callable[[], None] | None = None
        # `call(name, *args)` runs a step in the engine. None calls the task's method. Set by `_set_calls`.
        self._training_call: Callable[..., Any] | None = None
        self._eval_call: Callable[..., Any] | None = None
        # Context of each forward, set by `prepare_task`.
        self._context: AbstractContextManager[Any] | None = None
        self.phase = Phase.BETWEEN_STEPS
        self.conversions = ExitStack()

    # Where it runs

    @property
    def evaluation_ranks(self) -> DataRanks:
        """Ranks that see different data in evaluations: `data_ranks`, unless other runs train on a part of the data."""
        return self.data_ranks

    @property
    def is_main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.processes.rank == 0

    @property
    def is_global_zero(self) -> bool:
        """Lightning's name for `is_main`."""
        return self.is_main

    def start(self, topology: Topology) -> None:
        """Choose the device and join the other processes. Collective; blocks until all have joined."""
        self.processes = self._make_processes(topology)
        kind = self.settings.device_type
        if kind == "cpu":
            self.device = torch.device("cpu")
            keep_freed_memory(True)  # until `close`
        elif kind == "xla":
            self.device = torch.device("xla", 0)  # a process sees one XLA device, and there is no current device
        else:
            indices = self.settings.device_indices
            index = indices[topology.local_rank % len(indices)]
            self.device = torch.device(kind, index)
            torch.accelerator.set_device_index(index)
        self.processes.open(self.device)
        self.data_ranks = DataRanks.of(self.processes)
        self.gradients = Gradients(self.device)

    def _make_processes(self, topology: Topology) -> Processes:
        return Processes(topology)

    # Model and optimizers

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Prepare models and optimizers, and return the objects that a loop uses instead of them. Collective.

        A user-written loop may prepare its models and optimizers in several calls.

        Args:
            models: Models that were not prepared before. They are changed in place and moved to the device.
            optimizers: All optimizers of the loop so far, or a function that creates them once the parameters are
                final. None if nothing is trained. If a parameter is replaced, the optimizers and their states refer
                to the new parameter.
            plan: Properties of the training, as far as they are known.
            roots: For a Trainer: modules around the models, which its steps call. Default: none, for a user-written
                loop, which calls the models.

        Raises:
            ConfigurationError: The engine cannot train these models with these optimizers.
        """
        for model in models:
            self._place(model)
        return Prepared([PreparedModel.unchanged(model) for model in models], create_optimizers(optimizers))

    def prepare_task(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> None:
        """Build a Trainer's model, prepare it, and set the attributes that the steps use. Collective.

        Args:
            task: The task. Its `configure_model` is called. It is converted in place and moved to the device.
            make_optimizers: See `prepare`.
            plan: Properties of the training.
        """
        self.task = task
        self._build(task)
        if self.when_built is not None:
            self.when_built()
        # Before the conversion, which reads the dtype of the layers.
        if self.precision.param_dtype is not None:
            task.to(self.precision.param_dtype)
        # Before `prepare`, which may shard the converted layers and create the optimizers of their parameters.
        self.precision.convert([task], self.device, self.conversions)
        root = StepModule(task)
        prepared = self.prepare([task], make_optimizers, plan, [root])
        self.optimizers = prepared.optimizers
        self._context = self._make_context()
        self.scaler = None if make_optimizers is None else self._make_scaler()
        self._set_calls(prepared.models[0], root)
        self.state = self.make_state(task, self.optimizers)  # last: it reads the final parameters

    def _build(self, task: TaskModule) -> None:
        """Call the task's `configure_model`."""
        with self.precision.default_dtype():
            method_of(task, "configure_model")()
        if self.when_configured is not None:
            self.when_configured()

    def _place(self, model: nn.Module) -> None:
        """Move a model's parameters and buffers to the device."""
        move_model(model, self.device)

    def _make_context(self) -> AbstractContextManager[Any] | None:
        """Return the context of each forward of a Trainer, or None."""
        return self.precision.forward_context(self.device.type)

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        """Return the loss scaler of a Trainer, or None."""
        if not self.precision.scaled:
            return None
        return self.gradients.make_scaler()

    def _set_calls(self, model: PreparedModel, root: StepModule) -> None:
        """Set the functions that a Trainer's steps call, and compile them if the settings request it."""
        self._training_call = None if model.call is self.task else model.call
        self._eval_call = model.evaluate
        if self.settings.compile_options is None:
            return
        # Evaluation calls the root without the wrapper of the training, such as DistributedDataParallel, so that both
        # are compiled. With `compile_blocks`, the first call compiles the blocks in place, which root and wrapper
        # contain, and both calls return their argument.
        compiled_root = self._compile(root)
        if self._training_call is None:
            self._training_call = compiled_root
        else:
            self._training_call = self._compile(self._training_call)
        if self._eval_call is None:
            self._eval_call = compiled_root

    def make_state(
        self, models: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str] | None = None
    ) -> FullState:
        """Return the state of prepared models and optimizers for checkpoints.

        Args:
            models: The model, or a module whose children are the models.
            optimizers: All optimizers that the loop steps.
            names: Names of the optimizers' parameters that belong to no model. Default: None, no such parameters.
        """
        return FullState(models, optimizers, self.device, is_main=self.is_main, names=names)

    def _compile(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a callable of a Trainer's steps, and return the callable to use instead.

        By default, the result is a compiled function, in which `task.log` runs outside of the graph. With
        `compile_blocks`, the task's repeated blocks are compiled in place, and the result is `module` itself. `close`
        undoes both. User-written loops call `compile_model` instead, which has no task.

        Raises:
            ConfigurationError: With `compile_blocks`, the task has no repeated blocks.
        """
        task = self.task
        options = self.settings.compile_options or {}
        if self.settings.compile_blocks:
            blocks = repeated_blocks(task)
            check_blocks(task, blocks)
            for block in compile_blocks(blocks, options):
                self.conversions.callback(vars(block).pop, "_compiled_call_impl", None)
            return module
        if "log" not in vars(task):  # neither replaced here before, nor by the user
            uncompiled_log = torch.compiler.disable(task.log)  # type: ignore[no-untyped-call]  # torch has no types here
            object.__setattr__(task, "log", uncompiled_log)
            self.conversions.callback(vars(task).pop, "log", None)
        compiled: Callable[..., Any] = torch.compile(module, **options)
        return compiled

    def attach(self, trainer: Run, hooks: HookTable, sink: MetricBuffer, *, counts_items: bool = True) -> None:
        """Create the step, and close the previous one. Called after `prepare_task`, and again when callbacks change.

        Args:
            trainer: The run that is passed to hooks.
            hooks: Hooks that the step calls.
            sink: Receives the logged values and the current micro-batch.
            counts_items: Weigh micro-batches by `TaskModule.num_items` if the task defines it.
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
            run=trainer,
            hooks=hooks,
            sink=sink,
            counts_items=counts_items,
            enter=self._enter,
        )
        self.step = self.make_step(parts)

    def make_step(self, parts: StepParts) -> Step:
        """Return the step of the task."""
        if self.task.automatic_optimization:
            return AutomaticStep(parts)
        return ManualStep(parts)

    def _drop_step(self) -> None:
        """Close the step, and remove the attribute `step`."""
        step: Step | None = vars(self).pop("step", None)
        if step is not None:
            step.close()

    def _enter(self, phase: Phase) -> None:
        """Set the phase. Called by steps with manual optimization."""
        self.phase = phase

    # Evaluation, saves, trials

    def begin_evaluation(self) -> None:
        """Before an evaluation, give all ranks the weights and buffers that a checkpoint would have. Collective."""

    def begin_save(self) -> None:
        """Give all ranks the same model and optimizer states before a save, if they may differ. Collective."""

    def weights_changed(self) -> None:
        """Record that weights may have been written outside of a step. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's own state, besides `state`: here the loss scale. Empty without a scaler."""
        if self.scaler is None:
            return {}
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. An entry that is missing is not restored."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    @contextmanager
    def reunited(self) -> Iterator[None]:
        """Return a context in which the processes communicate for a final save, even after `close`. Collective.

        After `close`, processes of a launcher connect again. Processes that the Trainer has started have ended, so only
        this process takes part.
        """
        processes = self.processes
        ranks = self.data_ranks
        with processes.reunited(self.device) as remaining:
            self.processes = remaining
            self.data_ranks = ranks.among(remaining)
            try:
                yield
            finally:
                self.processes = processes
                self.data_ranks = ranks

    @contextmanager
    def trial(self, *, alone: bool) -> Iterator[Engine]:
        """Yield an engine for trial steps. On exit, free gradients and restore the loss scale.

        The caller restores weights, optimizers and generators. The caller must call `attach` in the context before the
        first step, and again after the context.

        Args:
            alone: Each rank trains its own replica, without communication in steps. A rank that runs out of memory then
                does not block the others. Collective at the end. After an exception, only `close` may be called. False
                yields this engine itself.

        Raises:
            ConfigurationError: This engine cannot undo steps, or cannot run a step on one process.
        """
        if not self.capabilities.trials:
            raise ConfigurationError(f"a search {REFUSALS['trials'].format(strategy=type(self.strategy).__name__)}")
        scaler = self.scaler
        # A copy, because trial steps change the scale.
        trial_scaler = None
        if scaler is not None:
            trial_scaler = self.gradients.make_scaler()
            trial_scaler.load_state_dict(scaler.state_dict())
        if alone and self.processes.world_size > 1:
            with self._alone() as single:
                single.scaler = trial_scaler
                yield single
                single.step.discard_gradients()
            return
        self.scaler = trial_scaler
        try:
            yield self
            self.step.discard_gradients()
        finally:
            self.scaler = scaler
            self.phase = Phase.BETWEEN_STEPS  # also if a trial step has failed

    @contextmanager
    def _alone(self) -> Iterator[Engine]:
        """Yield an engine of one process for the prepared task. Collective at the end.

        The engine is not started or closed: it uses the device, the task and the optimizers of this one.
        """
        if not self.capabilities.independent_steps:
            raise ConfigurationError(
                f"a search {REFUSALS['independent_steps'].format(strategy=type(self.strategy).__name__)}"
            )
        single = Engine(self.strategy, self.settings)
        single.device = self.device
        single.processes = AbsentOthers(self.processes)
        single.gradients = Gradients(self.device)
        single.data_ranks = replace(self.data_ranks, processes=single.processes, alone=True)
        single.task = self.task
        single.optimizers = self.optimizers
        single._context = self._context
        single.state = FullState(self.task, self.optimizers, self.device, is_main=self.is_main)
        if self.settings.compile_options is not None:
            # A root without the wrapper, whose backward communicates. Blocks and `task.log` are compiled already.
            compiled_root = single._compile(StepModule(self.task))
            single._training_call = compiled_root
            single._eval_call = compiled_root
        yield single
        single._drop_step()

    def explain_error(self, error: BaseException, model: nn.Module) -> Exception | None:
        """Translate an error of a library into an error that names the user's parameters. Not collective.

        Args:
            error: An error from a stage or a forward.
            model: The task, or the model of a user-written loop.

        Returns:
            None if there is nothing to add.
        """
        return None

    # For user-written training loops

    def use(self, strategy: Description) -> None:
        """Use another strategy, of the same class, for models that are prepared later. Not collective."""
        self.strategy = strategy

    def compile_model(self, model: nn.Module, prepared: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a model of a user-written loop if the settings request it, and return the callable. Not collective.

        With `compile_blocks`, the model's repeated blocks are compiled in place, and `prepared` is returned. They stay
        compiled after `close`. A model without repeated blocks is compiled as a whole.

        Args:
            model: The user's model. A compiled module is not compiled again.
            prepared: `PreparedModel.call` of the model. If it is not a module, it is returned unchanged.
        """
        options = self.settings.compile_options
        if options is None:
            return prepared
        if is_compiled_module(model) or not isinstance(prepared, nn.Module):
            return prepared
        if self.settings.compile_blocks:
            blocks = repeated_blocks(model)
            compile_blocks(blocks, options)
            if blocks:
                return prepared  # it contains the blocks
        compiled: Callable[..., Any] = torch.compile(prepared, **options)
        return compiled

    def no_sync(self, prepared: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward does not average gradients of a prepared model. Not collective.

        The next backward outside of the context averages the accumulated gradients. Every rank must run the same
        backward passes in the context.

        Args:
            prepared: `PreparedModel.call` of a model.
        """
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of a loss. Collective where gradients are averaged.

        Args:
            kwargs: Arguments of `torch.Tensor.backward`.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch has no types here

    def sync_next_backward(self, prepared: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward averages gradients, although the forward ran within `no_sync`. Not
        collective.

        Args:
            prepared: `PreparedModel.call` of a model.

        Raises:
            ConfigurationError: The engine determines in the forward whether the backward averages gradients.
        """
        return nullcontext()

    def join(self, prepared: Sequence[object]) -> AbstractContextManager[Any] | None:
        """Return a context in which ranks may run different numbers of steps. Collective at its end.

        Return None if there is nothing to join or the engine does not support it.

        Args:
            prepared: `PreparedModel.call` of models, or torch's `Joinable` objects.
        """
        return None

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """Return a function that copies a batch to the device asynchronously. None if batches stay on the host."""
        if self.device.type == "cpu":
            return None
        return partial(move, device=self.device)

    # The end

    def unshard(self) -> None:
        """Replace the shards in the task and the optimizers by full tensors. Collective.

        Called after a stage has succeeded, before `close`. After a failed stage, shards remain.
        """

    def close(self) -> None:
        """Undo converted layers, compiled blocks and a replaced `task.log`, and close the step and communication.

        Does not wait for other processes. The weights keep their device and dtype.
        """
        self._drop_step()
        self._training_call = None
        self._eval_call = None
        self.conversions.close()
        self.processes.close()
        if self.settings.device_type == "cpu":
            keep_freed_memory(False)
