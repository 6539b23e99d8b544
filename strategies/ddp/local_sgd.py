"""Local SGD: every process trains its own replica, and the replicas are averaged after a number of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.ddp.replicas import (
    any_trained,
    average_replicas,
    broadcast_from_main,
    check_can_be_alone,
    frozen_parameters,
)
from trainwright.strategies.engine import Engine, Models, Optimizers, Prepared, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.gradients import GradientClip, parameters_of, weights_of_one_rank, without_loss
from trainwright.strategies.steps.manual_step import ManualStep
from trainwright.strategies.steps.step import AutomaticStep, Step, StepParts
from trainwright.strategies.strategy import DataParallel, ParallelEngine, StrategyOutline


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGDStrategy(DataParallel):
    """Strategy with one replica per process. Parameters are averaged after every `local_sgd_steps` optimizer steps.

    Between two averages, ranks do not communicate: gradients, their norm and the loss are those of one rank. Parameters
    are also averaged before an evaluation, a checkpoint and the end of a stage, and training continues from the
    average. A checkpoint also averages optimizer states, because a resumed run starts with the same states on all
    ranks. Each average copies rank 0's buffers to all ranks. (Zhang et al., Parallel SGD: When does averaging help?,
    2016.)

    In a user-written loop, the steps of each optimizer are counted, and the parameters of that optimizer are averaged.
    `Accelerator.save_state` and `get_state_dict` average parameters and optimizer states, too.

    Args:
        local_sgd_steps: Optimizer steps between two averages, ≥ 1, counted from the start of the run. Default: 8.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.

    Raises:
        ConfigurationError: `local_sgd_steps` is not a positive integer, or the precision is `"16-mixed"`.
    """

    capabilities = Capabilities(weight_averages=False)

    local_sgd_steps: int = field(default=8, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.local_sgd_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigurationError(f"local_sgd_steps={steps!r}: write a whole number of at least 1.")

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if settings.precision.scaled:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} skips steps whose gradients overflow, which would differ "
                "between the ranks of LocalSGDStrategy. Use precision='bf16-mixed', or strategy='ddp'."
            )

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return replace(super().outline(task, settings), shards=1)

    def engine(self, settings: EngineSettings) -> Engine:
        return LocalSGDEngine(self, settings)


class LocalSGDEngine(ParallelEngine):
    """Engine with one replica per process, which averages the replicas."""

    strategy: LocalSGDStrategy

    def __init__(self, strategy: LocalSGDStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        # True from a step to the next average: of all parameters, and of optimizer states (`begin_save`).
        self._parameters_differ = False
        self._states_differ = False
        # Parameters that have been frozen since `prepare`, and so are equal on all ranks and need no average.
        self._frozen: list[nn.Parameter] = []
        # The prepared models as an ordered set. Like `_num_steps`, it is in the order of preparation, which is the same
        # on every rank, because averages are collective.
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        # In user-written loops, the number of steps of each optimizer. Empty in a Trainer, which counts the steps.
        self._num_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # Handles of the hooks that count the steps.
        self._hooks: list[Any] = []

    def start(self, topology: Topology) -> None:
        super().start(topology)
        self.gradients.averaged = False

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Copy rank 0's weights and buffers to all ranks. Collective.

        In a user-written loop, the parameters of an optimizer are averaged after every `local_sgd_steps` of its steps.
        """
        prepared = super().prepare(models, optimizers, plan, roots)
        for model in models:
            self._equalize(model)
        is_user_written_loop = not roots
        if is_user_written_loop:
            for optimizer in prepared.optimizers:
                if optimizer not in self._num_steps:
                    self._num_steps[optimizer] = 0
                    self._hooks.append(optimizer.register_step_post_hook(self._count_step_of))
        return prepared

    def _equalize(self, model: nn.Module) -> None:
        """Copy rank 0's weights and buffers of a model to all ranks. Collective."""
        broadcast_from_main(model)
        self._models[model] = None
        self._frozen += frozen_parameters(model)  # parameters that are frozen later may already differ

    def _count_step_of(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count a step in a user-written loop. After every `local_sgd_steps` steps, average the optimizer's parameters.

        Collective then. Other parameters may still differ, so that `_parameters_differ` stays True.
        """
        self._record_step()
        self._num_steps[optimizer] += 1
        if self._num_steps[optimizer] % self.strategy.local_sgd_steps == 0:
            self._average(parameters_of([optimizer]))

    def make_step(self, parts: StepParts) -> Step:
        # One rank: losses and gradients are the means over this rank's micro-batches.
        parts = replace(parts, ranks=DataRanks.of(Processes()))
        if self.task.automatic_optimization:
            return LocalStep(parts, self)
        return LocalManualStep(parts, self)

    def _record_step(self) -> None:
        """Record that a step was taken, and that parameters that are trained now may differ."""
        self.mark_different()
        if any_trained(self._frozen):
            self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]

    def count_step(self) -> None:
        """Record a step of the task. After every `local_sgd_steps` steps, average the replicas. Collective then."""
        self._record_step()
        # The run's step count is restored by a resume and after a trial. It does not include the current step yet.
        if (self.step.run.state.step + 1) % self.strategy.local_sgd_steps == 0:
            self._average_parameters()

    def mark_different(self) -> None:
        """Record that parameters and optimizer states may differ between ranks. Not collective."""
        self._parameters_differ = True
        self._states_differ = True

    @contextmanager
    def _alone(self) -> Iterator[Engine]:
        check_can_be_alone(self.task)
        with super()._alone() as single:
            yield single

    # Averages

    def _average_parameters(self) -> None:
        """Average all parameters over ranks, and copy rank 0's buffers to all ranks. Collective."""
        self._average(parameter for model in list(self._models) for parameter in model.parameters())
        self._parameters_differ = False

    def _average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average parameters that are not frozen, and copy rank 0's buffers of all models to all ranks. Collective."""
        frozen = {id(parameter) for parameter in self._frozen}
        average_replicas(
            self.data_ranks,
            (parameter for parameter in parameters if id(parameter) not in frozen),
            (buffer for model in list(self._models) for buffer in model.buffers()),
        )

    def begin_evaluation(self) -> None:
        if self._parameters_differ:
            self._average_parameters()

    @torch.no_grad()
    def begin_save(self) -> None:
        self.begin_evaluation()
        if not self._states_differ:
            return
        # Tensors such as momentum, by (number of the optimizer, number of its parameter, name of the value). Counts of
        # steps have another shape, and are not averaged.
        states: dict[tuple[int, int, str], torch.Tensor] = {}
        optimizers = self.optimizers or list(self._num_steps)  # of a Trainer, or of a user-written loop
        for i, optimizer in enumerate(optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for j, parameter in enumerate(parameters):
                for name, value in optimizer.state.get(parameter, {}).items():
                    if _is_like(value, parameter):
                        states[i, j, name] = value
        # A parameter that only some ranks have used has no state on the others. Such a state is not averaged.
        keys_of_ranks = [set(keys) for keys in self.processes.gather_object(list(states))]
        common_keys = set.intersection(*keys_of_ranks)
        self.data_ranks.average(states[key] for key in sorted(common_keys))  # in the same order on every rank
        self._states_differ = False

    def unshard(self) -> None:
        self.begin_save()  # for saves after the stage, when the other processes may have ended

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().close()


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a value of an optimizer's state has an element for each element of its parameter."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape


class LocalStep(AutomaticStep):
    """A step with the gradients and loss of this rank only. `parts.ranks` contains only this rank."""

    def __init__(self, parts: StepParts, engine: LocalSGDEngine) -> None:
        super().__init__(parts)
        self._engine = engine

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        if group.weights is not None:  # replace the weights of the mean over all ranks; padding keeps weight 0
            group.weights = weights_of_one_rank(group.weights)
        return super().forward_backward(group)

    def _skip_batches(self, skipped: list[int], group: Group, weights: object, total: object) -> Any:
        if self._engine.data_ranks.size > 1:  # all ranks must count the same steps
            raise without_loss(type(self.task).__name__, self.parts.rank)
        return super()._skip_batches(skipped, group, weights, total)

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        norm = super().optimizer_step(clip)
        self._engine.count_step()
        return norm

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._engine.mark_different()  # a trial may have restored weights from before an average


class LocalManualStep(ManualStep):
    """A step with manual optimization and the gradients of this rank only.

    A call of `forward_backward` in which an optimizer steps, once or several times, counts as one step.
    """

    def __init__(self, parts: StepParts, engine: LocalSGDEngine) -> None:
        super().__init__(parts)
        self._engine = engine

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        super().forward_backward(group)
        if self.stepped:
            self._engine.count_step()
        return None

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._engine.mark_different()
