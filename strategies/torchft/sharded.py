"""Replicas that shard their model over several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from trainwright.core.task import TaskModule
from trainwright.strategies.engine import MakeOptimizers, PreparedLoop, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.torchft.replica import Replica, no_own_loops

if TYPE_CHECKING:
    from trainwright.strategies.torchft.strategy import TorchFTStrategy


class ShardedReplicaEngine(FSDPEngine):
    """Engine for a replica that FSDP shards. Gradients are averaged over the live replicas."""

    def __init__(self, given: TorchFTStrategy, within: FSDPStrategy, settings: EngineSettings) -> None:
        super().__init__(within, settings)
        self.replica = Replica(given)
        self.capabilities = given.capabilities

    @property
    def is_main(self) -> bool:
        return self.replica.number == 0 and super().is_main

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> None:
        super().prepare(task, make_optimizers, plan)
        if make_optimizers is not None:  # other stages read all data
            self.data_ranks = self.replica.data_ranks(self.data_ranks)

    def prepare_loop(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], plan: TrainingPlan
    ) -> PreparedLoop:
        raise no_own_loops()

    def make_step(self, parts: StepParts) -> Step:
        if not self.strategy.sync_each_batch:
            parts = replace(parts, synchronize=self.gradients.models[0].synchronize)
        return self.replica.make_step(self, parts)

    def close(self) -> None:
        self.replica.close()
        super().close()
