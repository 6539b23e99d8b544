"""The Strategy contract: everything that depends on hardware, processes or an engine.

A strategy lives from `configure` to `teardown`, and what it does in between it holds as values: the `step` runs every
micro-batch of one optimizer step and ends it, the `state` is the model as checkpoints see it, `data_ranks` says who
sees which data. The loop knows nothing else about how a model is trained. This class is the contract and, at the same
time, the plain form of it: one process, whole gradients, `torch.optim` optimizers. An engine overrides what it does
differently, and makes a step and a state of its own where these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.memory import keep_freed_memory
from trainwright.core.process import Topology
from trainwright.core.run import Run
from trainwright.core.task import TaskModule
from trainwright.core.tree import move
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.processes.process_group import Processes
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision import Precision
from trainwright.strategies.state import FullState
from trainwright.strategies.steps.binding import StepModule
from trainwright.strategies.steps.gradients import GradientClip, clip_gradients
from trainwright.strategies.steps.step import AutomaticStep, ManualStep, Step, StepParts
from trainwright.strategies.steps.transfer import move_task

MakeOptimizers = Callable[[], list[Optimizer]]


class Strategy:
    """How a task is trained on some hardware.

    Life: constructed → `configure` (facts from the Trainer; nothing is touched) → `setup` (device, processes) →
    `prepare` (model, optimizers) → `attach` → steps → `teardown`. In a loop of somebody else's there is no task:
    `configure` → `setup` → `prepare_model` for each model → `teardown`.

    Attributes:
        capabilities: see `Capabilities`.
        is_distributed: whether this strategy can run more than one process.
        sync_each_batch: whether gradients cross ranks in every micro-batch of a step.
        device: the device that this process computes on.
        precision: the number formats.
        processes: this process's place among the others, and what they say to each other on the host.
        data_ranks: which ranks see which data.
        optimizers: the optimizers in the task's order.
        scaler: of the loss, with 16-bit mixed precision, once there are optimizers; None otherwise.
        state: the task's state by its own names, once it is prepared.
        step: runs its steps, once listeners are attached.
        when_built: called in `prepare` when the task is built, before all else.
    """

    capabilities = Capabilities()
    is_distributed = False
    sync_each_batch = False
    state: FullState
    step: Step

    def __init__(self) -> None:
        self.precision = Precision.parse("32-true")
        self.device = torch.device("cpu")
        self.processes = Processes()
        self.data_ranks = DataRanks.of(self.processes)
        self.optimizers: list[Optimizer] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.device_type = "cpu"
        self.device_indices: list[int] = [0]
        self.num_nodes = 1
        self.compile_options: dict[str, Any] | None = None
        self.when_built: Callable[[], None] | None = None
        # The engine's way to run a step, `call(name, *args)`; None: the task's own method is called.
        self._training_call: Callable[..., Any] | None = None
        self._eval_call: Callable[..., Any] | None = None
        self._context: AbstractContextManager[Any] | None = None
        self._had_begun = False

    # Where it runs

    @property
    def num_processes(self) -> int:
        """Processes on this node; more than one without a launcher: the Trainer starts them."""
        return len(self.device_indices)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.processes.rank == 0

    @property
    def root_device(self) -> torch.device:
        """Lightning's name of `device`."""
        return self.device

    @property
    def is_global_zero(self) -> bool:
        """Lightning's name of `is_main`."""
        return self.is_main

    @property
    def model(self) -> TaskModule | None:
        """The task, once it is prepared; no strategy wraps it."""
        return vars(self).get("task")

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank. Collective; the name says where to a reader."""
        self.processes.barrier()

    def broadcast(self, obj: object, src: int = 0) -> Any:
        """Return `obj` of rank `src` on every rank. Collective; small picklable objects, on the host."""
        return self.processes.broadcast_object(obj, src)

    def reduce(self, tensor: torch.Tensor, *, reduce_op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """Return the mean or the sum of all data ranks' tensors, of one shape, on every rank. Collective."""
        gathered = self.data_ranks.all_gather(tensor)
        return gathered.sum(0) if reduce_op == "sum" else gathered.mean(0)

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

    def setup(self, topology: Topology) -> None:
        """Choose the device and join the other processes. Collective; blocks until all have come."""
        self.processes = self._make_processes(topology)
        index = self.device_indices[topology.local_rank % len(self.device_indices)]
        self.device = torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, index)
        if self.device.type == "cpu":
            keep_freed_memory(True)
        else:
            torch.accelerator.set_device_index(index)
        self.processes.open(self.device)
        self.data_ranks = DataRanks.of(self.processes)

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
            self.scaler = torch.amp.GradScaler(self.device.type)
        if self.compile_options is not None:
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
        """Compile a step module; what the task logs stays outside of the graph."""
        task = self.task
        if "log" not in vars(task):
            uncompiled = torch.compiler.disable(task.log)  # type: ignore[no-untyped-call]  # torch has no types here
            object.__setattr__(task, "log", uncompiled)
        compiled: Callable[..., Any] = torch.compile(module, **(self.compile_options or {}))
        return compiled

    def attach(self, run: Run, hooks: HookTable, sink: MetricBuffer, *, counts_items: bool = True) -> None:
        """Make the step, with those who listen to it. Called after `prepare`, again whenever the listeners change.

        Args:
            run: handed to listeners.
            hooks: who listens.
            sink: takes what the task logs; it is told the present micro-batch.
            counts_items: weigh micro-batches by `TaskModule.num_items` when the task defines it.
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
            clip=self.clip_parameters,
            run=run,
            hooks=hooks,
            sink=sink,
            counts_items=counts_items,
        )
        self.step = self.make_step(parts)

    def make_step(self, parts: StepParts) -> Step:
        """Return what runs the task's steps."""
        return AutomaticStep(parts) if self.task.automatic_optimization else ManualStep(parts)

    def _drop_step(self) -> None:
        step: Step | None = vars(self).pop("step", None)
        if step is not None:
            self._had_begun = step.begun
            step.close()

    @property
    def has_begun(self) -> bool:
        """Whether an optimizer has begun to step in the group that runs or was left, of a task that does so by hand."""
        return self.step.begun if "step" in vars(self) else self._had_begun

    def clip_parameters(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        """Clip the gradients of some parameters in place; returns their norm before (None for `"value"`)."""
        return clip_gradients(parameters, clip)

    # What others than the step do with the model

    def begin_evaluation(self) -> None:
        """Make every rank evaluate the model that a checkpoint of this moment would hold. Collective."""

    def begin_save(self) -> None:
        """Make every rank hold what a checkpoint of this moment will: a resumed run goes on alike. Collective."""

    def weights_changed(self) -> None:
        """Take note that somebody else than a step may have written weights just now. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's own state beside weights and optimizers (the loss scale)."""
        return {"scaler": self.scaler.state_dict()} if self.scaler is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def leave_others(self) -> None:
        """Take apart whatever makes a step collective, so that one can be tried out on this process alone.

        Raises:
            ConfigurationError: this strategy cannot run a step on one process.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot run a step on one of {self.processes.world_size} processes alone, which a "
            "search for the batch size needs. Search with one process, or another strategy."
        )

    def rejoin_others(self) -> None:
        """Put together again what `leave_others` took apart. Collective."""
        raise ConfigurationError(
            f"{type(self).__name__} overrides leave_others but not rejoin_others, which brings it back. Define both."
        )

    def clearer(self, error: BaseException, model: nn.Module) -> Exception | None:
        """Return an error that says in words of the model what an engine's own means; None: it is as clear as can be.

        The model is the task, or that of an own loop. Asked when a stage or a forward has failed. Not collective.
        """
        return None

    # For a loop of somebody else's, which runs forward, backward and the optimizers

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return what a loop calls in the place of `model`, which is on the device afterwards. Collective.

        Any number of models may be prepared.

        Args:
            model: changed in place; its parameters stay the same objects, so that optimizers may hold them already.

        Raises:
            ConfigurationError: this strategy has steps of its own and cannot serve loops.
        """
        raise ConfigurationError(
            f"{type(self).__name__} runs the steps of a Trainer, and cannot serve a loop of your own yet. Use "
            "strategy='single' or 'ddp', or write the step as a TaskModule for Trainer(strategy=…)."
        )

    def no_sync(self, prepared: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients of one prepared model on this rank. Not collective.

        The next backward outside of it exchanges what has been added up. Every rank must hold back the same passes.

        Args:
            prepared: what `prepare_model` returned.
        """
        return nullcontext()

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """Return what brings a batch to the device, without waiting for the copy; None where batches are in place."""
        return None if self.device.type == "cpu" else partial(move, device=self.device)

    # The end

    def make_whole(self) -> None:
        """Give the task and the optimizers whole tensors again where they were cut. Collective.

        Called once a stage has succeeded, before the processes part; a stage that fails leaves them as they are.
        """

    def teardown(self) -> None:
        """Undo what wrapped the task and leave the other processes. Does not wait for them."""
        task = getattr(self, "task", None)
        if task is not None:
            vars(task).pop("log", None)
        self._drop_step()
        self._training_call = self._eval_call = None
        self.processes.close()
        if self.device_type == "cpu":
            keep_freed_memory(False)
