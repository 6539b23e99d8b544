"""A strategy that cuts a model into two stages and hands a whole step to one of torch's pipeline schedules.

It is as small as a proof allows: two ranks, micro-batches of one shape, a task that says what its stages and its loss
are. Everything else is the Trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from trainwright.checkpoint.format.optimizer import load_named_optimizer_state
from trainwright.core.process import Topology
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies import Capabilities
from trainwright.strategies.engine import Engine, MakeOptimizers, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.state import FullState
from trainwright.strategies.steps.gradients import GradientClip, Gradients
from trainwright.strategies.steps.step import AutomaticStep, StepParts
from trainwright.strategies.strategy import DataParallel, ParallelEngine

_LAST = 1


class StagedTask(TaskModule):
    """A task that a pipeline can train: its forward is one stage after the other.

    Attributes:
        stages: two modules.
    """

    stages: nn.ModuleList

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run all stages."""
        for stage in self.stages:
            inputs = stage(inputs)
        return inputs

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over a micro-batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """What the schedule does for a micro-batch, in one process."""
        return self.loss(self(batch[0]), batch[1])


class TwoStages(DataParallel):
    """Trains the first stage on rank 0 and the second on rank 1; both see the same data.

    Args:
        schedule: one of torch's schedules for one stage on each rank.
    """

    capabilities = Capabilities(
        gradients="sharded", manual_optimization=False, lockstep_evaluation=True, whole_weights=False
    )

    def __init__(self, schedule: Callable[..., Any]) -> None:
        super().__init__()
        self.make_schedule = schedule

    def engine(self, settings: EngineSettings) -> Engine:
        return TwoStagesEngine(self, settings)


class TwoStagesEngine(ParallelEngine):
    """Computes one stage on each rank."""

    strategy: TwoStages

    def __init__(self, strategy: TwoStages, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.make_schedule, self.num_schedule_steps = strategy.make_schedule, 0

    def start(self, topology: Topology) -> None:
        super().start(topology)
        # One data-parallel rank, made of two processes: rank 0 sees all data.
        self.data_ranks = MeshShape(pp=2).data_ranks(self.processes)
        self.gradients = StagedGradients(self.device)

    def _place(self, task: TaskModule) -> None:
        super()._place(task)
        for tensor in [*task.parameters(), *task.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        task.stages[1 - self.processes.rank].to("meta")  # its names and shapes stay

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> list[Optimizer]:
        optimizers = super().prepare(task, make_optimizers, plan)
        self.state = StagedState(task, optimizers, self.processes)
        return optimizers

    def make_step(self, parts: StepParts) -> PipelineStep:
        return PipelineStep(parts, self)

    def unshard(self) -> None:
        states, values = self.state.optimizer_states(), self.state.full_parameters()
        for name, parameter in list(self.task.named_parameters()):
            if parameter.is_meta:
                torch.utils.swap_tensors(parameter, nn.Parameter(values[name], requires_grad=parameter.requires_grad))
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.task.named_parameters()}
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_named_optimizer_state(optimizer, state, names)


class StagedGradients(Gradients):
    """Gradients of one stage on each rank."""

    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square)
        for grad in grads:
            grad.mul_((clip.value / (square.sqrt() + 1e-6)).clamp(max=1.0))
        return square.sqrt()


class PipelineStep(AutomaticStep):
    """Hands all micro-batches of a group to a schedule."""

    def __init__(self, parts: StepParts, engine: TwoStagesEngine) -> None:
        super().__init__(parts)
        self._engine, self._mine = engine, parts.rank
        self._schedules: dict[int, Any] = {}
        self._weights: list[Any] = []

    def forward_backward(self, group: Group) -> torch.Tensor:
        """Run one step of the schedule over all micro-batches of the group."""
        batches = [self.to_device(batch) for batch in group.batches]
        for i, batch in enumerate(batches):
            group.index, self.sink.batch = i, batch
            for hook in self.hooks.on_train_batch_start:
                hook(self.run, self.task, batch, group.first_idx + i)
        weights = group.weights if self._items is None else self._weigh_items(group)
        self._weights = list(weights) if weights is not None else [1 / len(batches)] * len(batches)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        schedule = self._schedule(len(batches))
        losses: list[torch.Tensor] = []
        if self._mine == _LAST:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(inputs)
        self._engine.num_schedule_steps += 1
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.broadcast(total, src=_LAST)
        if self.hooks.on_train_batch_end:
            group.last_batch = batches[-1]
        self.sink.batch = None
        self._loss, self._zeroed = total, False
        return total

    def _schedule(self, num_micro_batches: int) -> Any:
        if num_micro_batches not in self._schedules:
            stage = PipelineStage(self.task.stages[self._mine], self._mine, 2, self.parts.device)
            self._schedules[num_micro_batches] = self._engine.make_schedule(
                stage, num_micro_batches, loss_fn=self._weighted_loss, scale_grads=False
            )
        return self._schedules[num_micro_batches]

    def _weighted_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        place = targets.storage_offset() // targets.numel()  # torch cuts the step's targets, and calls once more before
        loss: torch.Tensor = self.task.loss(outputs, targets) * self._weights[place]
        return loss

    # Evaluation: every stage's outputs go to both ranks

    def evaluate(self, name: str | Callable[..., Any], batch: Any, idx: int, dataloader_idx: int | None = None) -> Any:
        with self._stages_across():
            return super().evaluate(name, batch, idx, dataloader_idx)

    @contextmanager
    def _stages_across(self) -> Iterator[None]:
        stages = list(self.task.stages)
        for i, stage in enumerate(stages):
            vars(stage)["forward"] = self._across(i, stage.forward)
        try:
            yield
        finally:
            for stage in stages:
                del vars(stage)["forward"]

    def _across(self, owner: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(inputs: torch.Tensor) -> torch.Tensor:
            outputs = forward(inputs) if self._mine == owner else None
            found: torch.Tensor = self._engine.processes.broadcast_object(outputs, src=owner)
            return found

        return run


class StagedState(FullState):
    """Of each stage, its rank has the values; every rank is given all of them."""

    def __init__(self, task: TaskModule, optimizers: list[Optimizer], processes: Processes) -> None:
        super().__init__(task, optimizers, torch.device("cpu"), is_main=processes.rank == 0)
        self._processes = processes

    def _is_mine(self, name: str) -> bool:
        return _owner(name) == self._processes.rank

    def _everyones(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Give every rank what another has. Collective."""
        everyone = self._processes.gather_object({k: v for k, v in tensors.items() if self._is_mine(k)})
        return {name: everyone[_owner(name)][name] for name in tensors}

    def full_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        return self._everyones({name: parameter.detach() for name, parameter in self._task.named_parameters()})

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        return self._everyones({name: parameter.grad for name, parameter in self._task.named_parameters()})

    def model_state(self) -> dict[str, Any]:
        return self._everyones(super().model_state())

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        mine = {name: value for name, value in state.items() if self._is_mine(name)}
        missing, unexpected = super().load_model_state(mine, strict=False)
        return [name for name in missing if name not in state], unexpected

    def optimizer_states(self) -> list[dict[str, Any]]:
        return [{**state, "state": self._everyones(state["state"])} for state in super().optimizer_states()]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        mine = {name: found if self._is_mine(name) else {} for name, found in state["state"].items()}
        super().load_optimizer_state(optimizer, {**state, "state": mine})


def _owner(name: str) -> int:
    return 1 if name.startswith("stages.1.") else 0
