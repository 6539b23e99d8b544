"""Replicas that shard their model over several processes."""

from __future__ import annotations

from dataclasses import replace

from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Description, Models, Optimizers, Prepared, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.torchft.replica import Replica, no_own_loops
from trainwright.strategies.torchft.replica_settings import ReplicaSettings


class ShardedReplicaEngine(FSDPEngine):
    """Engine for a replica that FSDP shards. Gradients are averaged over the live replicas."""

    def __init__(
        self, description: Description, replica: ReplicaSettings, within: FSDPStrategy, settings: EngineSettings
    ) -> None:
        super().__init__(within, settings)
        self.replica = Replica(replica)
        self.capabilities = description.capabilities  # of TorchFTStrategy, not of FSDPStrategy

    @property
    def is_main(self) -> bool:
        return self.replica.settings.number == 0 and super().is_main

    @property
    def evaluation_ranks(self) -> DataRanks:
        return self.replica.own_ranks or self.data_ranks

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        if not roots:
            raise no_own_loops()
        prepared = super().prepare(models, optimizers, plan, roots)
        if optimizers is not None:  # each replica evaluates on all data
            self.data_ranks = self.replica.data_ranks(self.data_ranks)
        return prepared

    def make_step(self, parts: StepParts) -> Step:
        # As in FSDPEngine, whose method would create another step.
        if not self.strategy.sync_each_batch:
            parts = replace(parts, synchronize=self.gradients.models[0].synchronize)
        return self.replica.make_step(self, parts)

    def close(self) -> None:
        self.replica.close()
        super().close()
