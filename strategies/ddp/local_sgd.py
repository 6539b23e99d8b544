"""Local SGD: every process trains a replica of its own, and the replicas are averaged every so many steps."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_parallel import DataParallel, ParallelEngine
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.ddp.replicas import (
    any_trained,
    broadcast_from_main,
    check_can_be_alone,
    frozen_parameters,
)
from trainwright.strategies.engine import Engine, MakeOptimizers, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.gradients import GradientClip, without_loss
from trainwright.strategies.steps.step import AutomaticStep, ManualStep, Step, StepParts

_CHUNK_BYTES = 25 * 2**20  # of weights that are averaged in one exchange, as in DistributedDataParallel's buckets


class LocalSGDStrategy(DataParallel):
    """Trains a replica on every process and averages their parameters after every so many optimizer steps.

    Between two averages nothing crosses ranks in a step: gradients, their norm, clipping and the loss are a rank's own.
    Parameters are averaged, too, before an evaluation, a checkpoint and the end of a stage, so that what is evaluated,
    saved and left in the task is what training goes on from. A checkpoint moreover averages the optimizers' states, or
    a resume, which gives all ranks the same ones, would go on differently from the run that wrote it. Buffers are
    rank 0's whenever there is an average. (Zhang et al., Parallel SGD: When does averaging help?, 2016.)

    Args:
        local_sgd_steps: optimizer steps from one average to the next, ≥ 1; counted from the start of the run.
        timeout, hang_timeout, process_group_backend: see `DDPStrategy`.

    Raises:
        ConfigurationError: a number of steps that is none; with the precision `"16-mixed"`.
    """

    capabilities = Capabilities(weight_averages=False)

    def __init__(
        self,
        local_sgd_steps: int = 8,
        *,
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(timeout=timeout, hang_timeout=hang_timeout, process_group_backend=process_group_backend)
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigurationError(f"local_sgd_steps={local_sgd_steps!r}: write a whole number of at least 1.")
        self.local_sgd_steps = local_sgd_steps

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if settings.precision.scaled:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} leaves out steps whose gradients overflow, which are others on "
                "each rank under LocalSGDStrategy. Use precision='bf16-mixed', or strategy='ddp'."
            )

    def engine(self, settings: EngineSettings) -> Engine:
        return LocalSGDEngine(self, settings)


class LocalSGDEngine(ParallelEngine):
    """Trains a replica on every process, and averages them from time to time."""

    strategy: LocalSGDStrategy

    def __init__(self, strategy: LocalSGDStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self._apart = self._states_apart = False
        self._frozen: list[nn.Parameter] = []

    def prepare(
        self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan
    ) -> list[torch.optim.Optimizer]:
        optimizers = super().prepare(task, make_optimizers, plan)
        broadcast_from_main(task)
        self._frozen = frozen_parameters(task)  # since the beginning: those that are frozen later have come apart
        return optimizers

    def prepare_models(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> NoReturn:
        raise ConfigurationError(
            "LocalSGDStrategy runs the steps of a Trainer, and cannot serve a loop of your own yet. Use "
            "strategy='single' or 'ddp', or write the step as a TaskModule for Trainer(strategy=…)."
        )

    def make_step(self, parts: StepParts) -> Step:
        # Gradients are the mean over what this rank consumed.
        parts = replace(parts, ranks=DataRanks.of(Processes()))
        if self.task.automatic_optimization:
            return LocalStep(parts, self.data_ranks.size, self._count_step, self._come_apart)
        return LocalManualStep(parts, self._count_step, self._come_apart)

    def _count_step(self) -> None:
        self._come_apart()
        if any_trained(self._frozen):
            self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        # Counted by the run's own clock, which a resume and a rehearsal put back: the step is not in it yet.
        if (self.step.run.state.step + 1) % self.strategy.local_sgd_steps == 0:
            self._average_parameters()

    def _come_apart(self) -> None:
        self._apart = self._states_apart = True

    @contextmanager
    def _alone(self) -> Iterator[Engine]:
        check_can_be_alone(self.task)
        with super()._alone() as single:
            yield single

    # Averages

    @torch.no_grad()
    def _average_parameters(self) -> None:
        """Give every rank the mean of all ranks' parameters, and rank 0's buffers. Collective."""
        alike = {id(parameter) for parameter in self._frozen}
        self._average(parameter.detach() for parameter in self.task.parameters() if id(parameter) not in alike)
        for buffer in self.task.buffers():
            dist.broadcast(buffer, src=0)
        self._apart = False

    def _average(self, tensors: Iterable[torch.Tensor]) -> None:
        for chunk in _chunks(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
            dist.all_reduce(flat)
            flat /= self.data_ranks.size
            offset = 0
            for tensor in chunk:
                tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
                offset += tensor.numel()

    def begin_evaluation(self) -> None:
        if self._apart:
            self._average_parameters()

    @torch.no_grad()
    def begin_save(self) -> None:
        self.begin_evaluation()
        if not self._states_apart:
            return
        states = {}
        for i, optimizer in enumerate(self.optimizers):
            for j, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                        states[i, j, key] = value
        # A parameter that only some ranks have used so far has no state on the others.
        everywhere = set.intersection(*(set(keys) for keys in self.processes.gather_object([*states])))
        self._average(states[key] for key in sorted(everywhere))
        self._states_apart = False

    def unshard(self) -> None:
        self.begin_save()  # also one that is written after the stage, when the others may be gone


class LocalStep(AutomaticStep):
    """A step whose gradients and loss are this rank's own.

    Args:
        parts: what it is made of; its `ranks` are this one alone.
        num_ranks: how many there are.
        done: called after each optimizer step.
        left: called when gradients are discarded: a trial may put weights back that were either alike or not.
    """

    def __init__(self, parts: StepParts, num_ranks: int, done: Callable[[], None], left: Callable[[], None]) -> None:
        super().__init__(parts)
        self._num_ranks, self._done, self._left = num_ranks, done, left

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        if group.weights is not None:  # they make the mean over all ranks; padding still counts for nothing
            real = [weight > 0 for weight in group.weights]
            group.weights = [is_real / max(sum(real), 1) for is_real in real]
        return super().forward_backward(group)

    def _leave_out(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        if self._num_ranks > 1:  # they count steps, and exchange weights after so many
            raise without_loss(type(self.task).__name__, self.parts.rank)
        return super()._leave_out(skipped, group, weights, total)

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        norm = super().optimizer_step(clip)
        self._done()
        return norm

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._left()


class LocalManualStep(ManualStep):
    """Likewise, of a task that optimizes by hand.

    Args:
        parts: what it is made of.
        done: called after each group in which an optimizer has stepped.
        left: called when gradients are discarded.
    """

    def __init__(self, parts: StepParts, done: Callable[[], None], left: Callable[[], None]) -> None:
        super().__init__(parts)
        self._done, self._left = done, left

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        super().forward_backward(group)
        if self.stepped:
            self._done()
        return None

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._left()


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut tensors into runs of one dtype and of a bounded size, in their order."""
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (tensor.dtype is not chunk[0].dtype or size + tensor.nbytes > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk
