"""One replica of a run under torchft: its connection to other replicas, and the engine of a replica of one process."""

from __future__ import annotations

from dataclasses import replace

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Description, Engine, Models, Optimizers, Prepared, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.torchft.live_replicas import LiveReplicas
from trainwright.strategies.torchft.replica_settings import ReplicaSettings
from trainwright.strategies.torchft.step import TorchFTStep


def no_own_loops() -> ConfigurationError:
    """Return the error for a user-written loop."""
    return ConfigurationError(
        "strategy='torchft' is not supported in user-written training loops. Use Trainer, or strategy='ddp'."
    )


class Replica:
    """This process's replica, which is one of several replicas that train the same model together.

    Attributes:
        settings: Settings of the replica.
        live: Connection to the live replicas. Set when the first training step is made, and None before it and after
            `close`.
        own_ranks: Data-parallel ranks of this replica alone. Set by `data_ranks`, which the engine calls for training
            only, and None before.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.live: LiveReplicas | None = None
        self.own_ranks: DataRanks | None = None

    def data_ranks(self, own: DataRanks) -> DataRanks:
        """Return the data-parallel ranks of all replicas, given those of this replica.

        They determine which samples this replica reads. Example: replica 1 of 3 with 2 processes has ranks 2 and 3
        of 6. Only the ranks of this replica can communicate. `gather` and `sum` use their values for all other
        replicas, too. `all_gather` returns only their tensors.
        """
        self.own_ranks = own
        rank = self.settings.number * own.size + own.rank
        return replace(own, rank=rank, members=list(own.members) * self.settings.max_replicas)

    def make_step(self, engine: Engine, parts: StepParts) -> TorchFTStep:
        """Return the step. Before the first training step, join the live replicas, and load their progress."""
        if self.own_ranks is not None:
            # The inherited step averages over this replica's ranks. `LiveReplicas.average` does the rest.
            parts = replace(parts, ranks=self.own_ranks)
        step = TorchFTStep(parts, self.settings.number)
        if not engine.optimizers:  # an evaluation
            return step
        is_first = self.live is None
        if self.live is None:
            self.live = self._connect(engine, step)
        step.live = self.live
        if is_first and self.live.received is not None:
            # The loop continues at the position of the other replicas, so that `catch_up` can load their state.
            step.run.state.load_dict(self.live.received["progress"])
            step.catch_up()
        return step

    def _connect(self, engine: Engine, step: TorchFTStep) -> LiveReplicas:
        """Join the live replicas. `received` of the result is their state if they have completed more steps."""
        settings = self.settings
        live = LiveReplicas(
            step.state_to_send,
            step=step.run.state.step,
            device=engine.device,
            processes=engine.processes,
            timeout=settings.timeout,
            host=settings.host,
            replica_id=f"replica_{settings.number}",
            min_replica_size=settings.min_replicas,
            lighthouse_addr=settings.lighthouse,
        )
        live.join()
        return live

    def close(self) -> None:
        """Disconnect from the other replicas."""
        if self.live is not None:
            self.live.close()
            self.live = None


class TorchFTEngine(Engine):
    """Engine for a replica of one process. Gradients are averaged over the live replicas."""

    def __init__(self, strategy: Description, replica: ReplicaSettings, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.replica = Replica(replica)

    @property
    def is_main(self) -> bool:
        return self.replica.settings.number == 0

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
        return self.replica.make_step(self, parts)

    def close(self) -> None:
        self.replica.close()
        super().close()
