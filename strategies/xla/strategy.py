"""XLAStrategy: compile each optimizer step to one device program with XLA."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, unknown
from trainwright.core.host.xla_library import XLALibrary, check_versions
from trainwright.core.process import Topology
from trainwright.core.task import TaskModule
from trainwright.core.tree import iterate_tensors, map_tensors, move, move_module, named_leaves
from trainwright.processes.devices import DistributedType
from trainwright.processes.launcher import set_variable
from trainwright.processes.process_group import Processes
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.ddp.replicas import broadcast_from_main
from trainwright.strategies.engine import Engine, Models, Optimizers, Prepared, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.state import FullState
from trainwright.strategies.steps.gradients import Gradients
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import DataParallel, ParallelEngine, StrategyOutline

# Training steps, and evaluation steps, whose compilations are expected: the first training step creates the optimizer's
# state.
_WARM_UP = 2
_MOST_WARNINGS = 5
_MOST_REPEATED = 5  # compilations for known shapes without a warning: the first step of an epoch logs other values
_SPMD = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True, repr=False)
class XLAStrategy(DataParallel):
    """Strategy that trains with the XLA compiler (torch_xla), on TPUs or other XLA devices.

    XLA records the operations of a step. At the end of the step, it compiles and runs them as one program. Each shape
    of batches needs a separate program. Use `drop_last=True` in the loader, and pad samples to few lengths. Up to 5
    warnings name the batches of later compilations. `.item()` or `print` in a step splits the step into two programs.
    Use `self.log` instead.

    With `devices=N`, or with processes of a launcher, each process trains a replica on one device, and gradients are
    averaged. With `spmd`, one process uses all devices of its machine.

    Args:
        spmd: `"ddp"`: one process uses all devices of this machine, and batches are divided over the devices along the
            first dimension. Tensors whose first dimension the number of devices does not divide stay whole. `"fsdp"`:
            parameters, gradients and optimizer states are divided, too. Losses and metrics are those of the full batch.
            Later runs of the process cannot use None. Default: None, which uses one device per process.
        downcast_bf16: Store float32 and float64 tensors as bfloat16 on the device. This affects all later runs of the
            process. Default: False.
        timeout, hang_timeout: See `DataParallel`.

    Raises:
        ConfigurationError: `spmd` is unknown.
    """

    capabilities = Capabilities(
        inference_mode=False, state_rests=False, converted_layers=False, independent_steps=False
    )
    distributed_type = DistributedType.XLA
    runs_on: ClassVar[str | None] = "xla"

    process_group_backend: None = field(default=None, init=False)  # not an option
    spmd: Literal["ddp", "fsdp"] | None = None
    downcast_bf16: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spmd is not None and self.spmd not in _SPMD:
            raise unknown("spmd", self.spmd, _SPMD)

    @property
    def is_distributed(self) -> bool:
        return self.spmd is None

    def check(self, settings: EngineSettings) -> None:
        check_versions()
        if settings.num_processes > 1 and self.spmd is not None:
            raise ConfigurationError(
                f"{self!r} uses all XLA devices of one machine in one process, but {settings.num_processes} processes "
                "were started or requested. Remove spmd, or devices= and num_nodes= and the launcher's processes."
            )
        super().check(settings)
        if settings.compile_options is not None:
            raise ConfigurationError("XLAStrategy always compiles every step. Remove compile.")
        if torch.float16 in (settings.precision.param_dtype, settings.precision.autocast_dtype):
            raise ConfigurationError(
                f"precision={settings.precision.name!r} is not supported by {self!r}: XLA devices compute in bfloat16. "
                "Use precision='bf16-mixed' or 'bf16-true'."
            )

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return replace(super().outline(task, settings), shards=1 if self.spmd is None else None)

    def engine(self, settings: EngineSettings) -> Engine:
        return XLAEngine(self, settings)


class XLAEngine(ParallelEngine):
    """Engine that records steps for the XLA device of this process, or for all devices of this machine."""

    strategy: XLAStrategy
    library: XLALibrary

    def start(self, topology: Topology) -> None:
        if self.strategy.downcast_bf16:
            set_variable("XLA_DOWNCAST_BF16", "1")
        super().start(topology)
        size = self.processes.world_size
        self.library = XLALibrary(spmd=self.strategy.spmd is not None, num_processes=size)
        if size > 1:
            self.gradients = AveragedGradients(self.device, self.processes, self.library)
        self._models: list[nn.Module] = []  # of a user-written loop
        self._synced: WeakSet[Optimizer] = WeakSet()  # optimizers whose steps start the computation on the device
        # Shapes of the batches of the current step. For example, two micro-batches: [{"x": (8, 3)}, {"x": (8, 3)}].
        self._shapes: list[dict[str, tuple[int, ...]]] = []
        # The different shapes of steps so far.
        self._shapes_of_training: list[Any] = []
        self._shapes_of_evaluation: list[Any] = []
        self._num_repeated = 0  # compilations for known shapes
        self._num_warnings = 0

    def _make_processes(self, topology: Topology) -> Processes:
        return super()._make_processes(topology) if topology.world_size > 1 else Processes(topology)

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        prepared = super().prepare(models, optimizers, plan, roots)
        for model in models:
            self._equalize(model)
        if not roots:  # of a user-written loop, where no Step runs the recorded operations
            self._models += models
            for optimizer in prepared.optimizers:
                if optimizer not in self._synced:
                    self._synced.add(optimizer)
                    optimizer.register_step_post_hook(lambda *_: self.library.sync())
        return prepared

    def _equalize(self, model: nn.Module) -> None:
        """Copy rank 0's weights to all ranks, and register the parameters whose gradients are averaged."""
        if isinstance(self.gradients, AveragedGradients):
            broadcast_from_main(model)
            self.gradients.parameters += model.parameters()

    def begin_evaluation(self) -> None:
        if self.processes.world_size > 1:
            for buffer in self.task.buffers():
                dist.broadcast(buffer, src=0)

    def _place(self, model: nn.Module) -> None:
        super()._place(model)
        self._divide_parameters(model)

    def _divide_parameters(self, model: nn.Module) -> None:
        """Shard each parameter along its first dimension that the number of devices divides."""
        if self.strategy.spmd != "fsdp":
            return
        for parameter in model.parameters():
            sizes = parameter.shape
            dim = next((i for i in range(len(sizes)) if sizes[i] % self.library.num_devices == 0), None)
            if dim is not None:
                self.library.shard(parameter, dim)

    def make_step(self, parts: StepParts) -> Step:
        return super().make_step(replace(parts, placed=self._divide_batch, finish=self._finish))

    def _divide_batch(self, batch: object) -> Any:
        """Record the shapes of a batch, and divide its tensors over the devices of this machine.

        Tensors whose first dimension the number of devices does not divide stay whole.
        """
        self._shapes.append({name: tuple(x.shape) for name, x in named_leaves(batch) if isinstance(x, torch.Tensor)})
        if self.strategy.spmd is not None:
            for tensor in iterate_tensors(batch):
                if tensor.device.type == "xla" and tensor.dim() and tensor.shape[0] % self.library.num_devices == 0:
                    self.library.shard(tensor, 0)
        return batch

    def _finish(self, batch_idx: int, trains: bool) -> None:
        """Run the recorded operations of a step. Warn if this compiles a new program after the first steps."""
        shapes = self._shapes
        self._shapes = []
        seen = self._shapes_of_training if trains else self._shapes_of_evaluation
        num_earlier = self.library.num_compilations()
        self.library.sync()
        compiled = len(seen) >= _WARM_UP and self.library.num_compilations() > num_earlier
        is_repeated = shapes in seen
        if compiled and is_repeated:
            self._num_repeated += 1
        is_unexpected = compiled and (not is_repeated or self._num_repeated > _MOST_REPEATED)
        if is_unexpected and self._num_warnings < _MOST_WARNINGS:
            self._num_warnings += 1
            if is_repeated:
                reason = "its operations changed (a branch or a number in Python)"
            else:
                reason = (
                    f"its shapes are new: {_text(shapes)}, after {_text(seen[-1])}. Pad samples to few lengths, and "
                    "use drop_last=True in the loader"
                )
            kind = "training_step" if trains else "evaluation step"
            warnings.warn(f"XLA compiled the {kind} of batch {batch_idx} again: {reason}.", TrainwrightWarning, 2)
        if len(seen) < _WARM_UP or not is_repeated:  # the first steps count, even with equal shapes
            seen.append(shapes)

    def make_state(
        self, models: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str] | None = None
    ) -> FullState:
        return XLAState(models, optimizers, self.device, is_main=self.is_main, names=names)

    def batch_mover(self) -> Callable[[Any], Any] | None:
        return self._move

    def _move(self, batch: object) -> Any:
        """Move a batch of a user-written loop to the device."""
        if not any(model.training for model in self._models):  # evaluation steps do not end with an optimizer step
            self.library.sync()
        moved = self._divide_batch(move(batch, self.device))
        self._shapes.clear()  # only `_finish` reads the shapes, which a user-written loop does not call
        return moved

    def explain_error(self, error: BaseException, model: nn.Module) -> Exception | None:
        if "device_ready_queues_" not in str(error):
            return None
        return ConfigurationError(
            "torch cannot run backward on an XLA device in this process, because a backward on another device ran "
            "before the XLA device was first used. Train on the XLA device first, or in a separate process."
        )

    def unshard(self) -> None:
        """Move the task and the optimizer states to the host."""
        move_module(self.task, torch.device("cpu"))
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                optimizer.state[parameter] = map_tensors(torch.Tensor.cpu, state)


class AveragedGradients(Gradients):
    """Full gradients. The processes average them after the last backward of a step."""

    def __init__(self, device: torch.device, processes: Processes, library: XLALibrary) -> None:
        super().__init__(device)
        self._processes = processes
        self._library = library
        self.parameters: list[nn.Parameter] = []

    def complete(self) -> None:
        """Average all gradients that exist on any process. Collective. Does not wait for the device."""
        has_gradient = [int(parameter.grad is not None) for parameter in self.parameters]
        by_rank = self._processes.gather_integers(has_gradient)
        by_parameter = zip(*by_rank, strict=True)  # the flags of all ranks for each parameter
        gradients = []
        for parameter, flags in zip(self.parameters, by_parameter, strict=True):
            if not any(flags):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # every process must pass the same gradients
            gradients.append(parameter.grad)
        if gradients:
            self._library.average(gradients)


class XLAState(FullState):
    """State of a task on XLA devices. Checkpoints receive copies on the host."""

    def model_state(self) -> dict[str, Any]:
        return dict(map_tensors(torch.Tensor.cpu, super().model_state()))

    def optimizer_states(self) -> list[dict[str, Any]]:
        return list(map_tensors(torch.Tensor.cpu, super().optimizer_states()))


def _text(shapes: list[dict[str, tuple[int, ...]]]) -> str:
    """Return the shapes of the last batch of a step as text."""
    return ", ".join(f"{name or 'batch'} {size}" for name, size in shapes[-1].items()) if shapes else "no tensors"
