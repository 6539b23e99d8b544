"""One replica of a run under torchft: its connection to other replicas, its state, its step and its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.format.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import ConfigurationError, TrainwrightError
from trainwright.core.state import Group
from trainwright.core.tree import local_part, map_tensors
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Description, Engine, Models, Optimizers, Prepared, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.gradients import stack_counts, without_loss
from trainwright.strategies.steps.step import AutomaticStep, Step, StepParts
from trainwright.strategies.torchft.live_replicas import LiveReplicas
from trainwright.strategies.torchft.replica_settings import ReplicaSettings


def no_own_loops() -> ConfigurationError:
    """Return the error for a user-written loop."""
    return ConfigurationError(
        "strategy='torchft' is not supported in user-written training loops. Use Trainer, or strategy='ddp'."
    )


class Replica:
    """This process's replica, which is one of several replicas that train the same model together.

    Attributes:
        settings: Settings of the replica.
        live: Connection to the live replicas. None before the first step.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.live: LiveReplicas | None = None
        self._own_ranks: DataRanks | None = None

    def data_ranks(self, own: DataRanks) -> DataRanks:
        """Return the data-parallel ranks of all replicas, given those of this replica.

        Only the ranks of this replica can communicate. `gather` and `sum` use their values for all other replicas, too.
        `all_gather` returns only their tensors.
        """
        self._own_ranks = own
        rank = self.settings.number * own.size + own.rank
        return replace(own, rank=rank, members=list(own.members) * self.settings.max_replicas)

    def make_step(self, engine: Engine, parts: StepParts) -> TorchFTStep:
        """Return the step. For training, join the live replicas, and load their progress."""
        if self._own_ranks is not None:
            parts = replace(parts, ranks=self._own_ranks)  # gradients are first those of this replica
        step = TorchFTStep(parts, engine, self)
        if engine.optimizers and self.live is None:
            self._connect(engine, step)
        return step

    def _connect(self, engine: Engine, step: TorchFTStep) -> None:
        settings = self.settings
        progress = step.run.state
        self.live = LiveReplicas(
            step.state_to_send,
            step=progress.step,
            device=engine.device,
            processes=engine.processes,
            timeout=settings.timeout,
            host=settings.host,
            replica_id=f"replica_{settings.number}",
            min_replica_size=settings.min_replicas,
            lighthouse_addr=settings.lighthouse,
        )
        self.live.join()
        if self.live.received is not None:
            progress.load_dict(self.live.received["progress"])
            step.catch_up()

    def close(self) -> None:
        """Disconnect from the other replicas."""
        if self.live is not None:
            self.live.close()
            self.live = None


def _tensors_of(task: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from task.named_parameters()
    yield from task.named_buffers()


def _like(value: object, parameter: torch.Tensor) -> object:
    """Return a received shard of a parameter's size as a tensor that is sharded like the parameter."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != local_part(parameter).shape:
        return value
    like: Any = parameter
    if local_part(parameter) is parameter:
        return value
    options = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like.data).from_local(value.to(like.device), like.device_mesh, like.placements, **options)


class TorchFTStep(AutomaticStep):
    """A step whose gradients are averaged over the live replicas. `parts.ranks` contains only this replica."""

    def __init__(self, parts: StepParts, engine: Engine, replica: Replica) -> None:
        super().__init__(parts)
        self._engine = engine
        self._replica = replica
        self._weight = 0.0

    def state_to_send(self) -> dict[str, Any]:
        """Return the state that a rejoining replica receives: progress, and this rank's shards for its same rank."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.task.named_parameters()}
        return {
            "model": {name: local_part(tensor) for name, tensor in _tensors_of(self.task)},
            "optimizers": [map_tensors(local_part, named_optimizer_state(each, names)) for each in self.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self.run.lr_scheduler_configs],
            "progress": self.run.state.to_dict(),
        }

    def catch_up(self) -> bool:
        """Load a received state, if any. Return False if this replica is at an earlier position in the data than it.

        Raises:
            TrainwrightError: This replica is at a later position than the state.
        """
        replicas = self._replica.live
        assert replicas is not None  # only tasks with optimizers are trained
        received = replicas.received
        if received is None:
            return True
        here = self.run.state.batches
        there = received["progress"]["batches"]
        if here < there:
            return False
        if here > there:
            raise TrainwrightError(
                f"replica {self._replica.settings.number} has consumed {here} batches, but a replica with more steps "
                f"has consumed only {there}. Start this replica again without a checkpoint."
            )
        with torch.no_grad():
            for name, tensor in _tensors_of(self.task):
                local_part(tensor).copy_(received["model"][name])
        parameters = dict(self.task.named_parameters())
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        for optimizer, values in zip(self.optimizers, received["optimizers"], strict=True):
            states = {
                name: {key: _like(value, parameters[name]) for key, value in state.items()}
                for name, state in values["state"].items()
            }
            load_named_optimizer_state(optimizer, {**values, "state": states}, names)
        for config, values in zip(self.run.lr_scheduler_configs, received["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        replicas.received = None
        return True

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        replicas = self._replica.live
        assert replicas is not None  # only tasks with optimizers are trained
        replicas.join()
        # A replica that has missed steps passes over their data, without training.
        self.stepped = not self.catch_up()
        if self.stepped:
            return None
        self._weight = float(len(group.batches))
        if group.weights is not None:  # padding has no weight
            ranks = self.parts.ranks
            real = torch.tensor([float(weight > 0) for weight in group.weights], device=self.parts.device)
            self._weight = float(ranks.sum(real.sum()))
            group.weights = (real * ranks.size / max(self._weight, 1.0)).tolist()
        loss = super().forward_backward(group)
        while not replicas.average(self.task.parameters(), self._weight):
            replicas.join()
            self.stepped = not self.catch_up()
            if self.stepped:  # the others have completed this step
                self.discard_gradients()
                return None
        return loss

    def _weigh_items(self, group: Group) -> Sequence[Any]:
        assert self._items is not None  # checked by the caller
        counts = stack_counts([self._items(batch) for batch in group.batches], self.parts.device)
        if group.weights is not None:
            real = [float(weight > 0) for weight in group.weights]
            counts = counts * torch.tensor(real, dtype=counts.dtype, device=counts.device)
        self._weight = float(self.parts.ranks.sum(counts.sum()))
        return super()._weigh_items(group)

    def _skip_batches(self, skipped: list[int], group: Group, weights: object, total: object) -> Any:
        raise without_loss(type(self.task).__name__, self._replica.settings.number)


class TorchFTEngine(Engine):
    """Engine for a replica of one process. Gradients are averaged over the live replicas."""

    def __init__(self, strategy: Description, replica: ReplicaSettings, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.replica = Replica(replica)

    @property
    def is_main(self) -> bool:
        return self.replica.settings.number == 0

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        if not roots:
            raise no_own_loops()
        found = super().prepare(models, optimizers, plan, roots)
        if optimizers is not None:  # evaluations read all data
            self.data_ranks = self.replica.data_ranks(self.data_ranks)
        return found

    def make_step(self, parts: StepParts) -> Step:
        return self.replica.make_step(self, parts)

    def close(self) -> None:
        self.replica.close()
        super().close()
