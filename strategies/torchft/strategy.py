"""TorchFTStrategy: train replicas that may die and rejoin during a run."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError, TrainwrightError
from trainwright.core.process import variable
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes, length_of_time
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Engine, MakeOptimizers, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.gradients import stack_counts, weights_of_one_rank, without_loss
from trainwright.strategies.steps.step import AutomaticStep, Step, StepParts
from trainwright.strategies.strategy import Strategy, StrategyOutline
from trainwright.strategies.torchft.live_replicas import LiveReplicas, load_torchft


class TorchFTStrategy(Strategy):
    """Trains replicas that may die and rejoin during a run. Each replica is one process, started separately.

    Gradients are averaged over the replicas that are alive, in every step. A replica that is started again receives
    weights, optimizer states, schedules and progress from a live one, and continues with its next step. Replica r reads
    shard r of `max_replicas` of the data; the samples of a dead replica are not read. Replica 0 writes checkpoints and
    logs. The library torchft detects failures, with a `torchft_lighthouse` that all replicas can reach.

    Args:
        replica: Number of this replica, 0 to `max_replicas` - 1. Default: None, the variable `REPLICA_GROUP_ID`.
        max_replicas: Number of replicas if all are alive. Default: None, the variable `NUM_REPLICA_GROUPS`.
        lighthouse: Address of the lighthouse, `"http://host:29510"`. Default: None, the variable `TORCHFT_LIGHTHOUSE`.
        min_replicas: Number of live replicas below which training waits. Default: 1.
        timeout: Maximum duration of an exchange of gradients: seconds, a timedelta, a Duration or text such as
            `"1 min"`. Default: 60 seconds.
        host: Name or address of this machine for other replicas. Default: None, the name of the machine.

    Raises:
        ConfigurationError: A value is not valid.
    """

    capabilities = Capabilities(
        manual_optimization=False, independent_steps=False, closures=False, trials=False, converted_layers=False
    )

    def __init__(
        self,
        *,
        replica: int | None = None,
        max_replicas: int | None = None,
        lighthouse: str | None = None,
        min_replicas: int = 1,
        timeout: float | datetime.timedelta | Duration | str = 60.0,
        host: str | None = None,
    ) -> None:
        self.replica = _number("replica", replica, "REPLICA_GROUP_ID")
        self.max_replicas = _number("max_replicas", max_replicas, "NUM_REPLICA_GROUPS")
        self.lighthouse = lighthouse or variable("TORCHFT_LIGHTHOUSE")
        self.min_replicas = min_replicas
        self.timeout = length_of_time("timeout", timeout)
        self.host = host

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        self.place()
        if settings.precision.scaled:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} skips steps whose gradients overflow, which would differ "
                "between the replicas of TorchFTStrategy. Use precision='bf16-mixed'."
            )
        load_torchft()

    def place(self) -> tuple[int, int, str]:
        """Return the number of this replica, the number of replicas, and the address of the lighthouse.

        Raises:
            ConfigurationError: One of them is missing or not valid.
        """
        replica, num, lighthouse = self.replica, self.max_replicas, self.lighthouse
        if replica is None or num is None:
            raise ConfigurationError(
                f"{self!r}: replica={replica}, max_replicas={num}. Pass both, or set REPLICA_GROUP_ID and "
                "NUM_REPLICA_GROUPS."
            )
        if not 0 <= replica < num or not 1 <= self.min_replicas <= num:
            raise ConfigurationError(
                f"replica={replica}, max_replicas={num}, min_replicas={self.min_replicas}: expected "
                "0 ≤ replica < max_replicas and 1 ≤ min_replicas ≤ max_replicas."
            )
        if lighthouse is None:
            raise ConfigurationError(
                f"{self!r} has no lighthouse. Start `torchft_lighthouse --min_replicas {self.min_replicas}`, and pass "
                "lighthouse='http://host:29510' or set TORCHFT_LIGHTHOUSE."
            )
        return replica, num, lighthouse

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return replace(super().outline(task, settings), shards=1, peak="single")

    def engine(self, settings: EngineSettings) -> Engine:
        return TorchFTEngine(self, settings)


def _number(name: str, given: int | None, source: str) -> int | None:
    """Return the argument, or the value of its environment variable."""
    text = variable(source)
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ConfigurationError(f"{source}={text!r}: expected a whole number for {name}.")
    return int(text)


class TorchFTEngine(Engine):
    """Trains one replica, and averages its gradients with those of the other live replicas."""

    strategy: TorchFTStrategy
    replicas: LiveReplicas | None = None

    @property
    def is_main(self) -> bool:
        return self.strategy.replica == 0

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> list[Optimizer]:
        if make_optimizers is not None:  # other stages read all data
            replica, max_replicas, _ = self.strategy.place()
            # Every replica is a run of one process. What it would gather from other replicas is its own value.
            self.data_ranks = DataRanks(self.processes, replica, [0] * max_replicas)
        return super().prepare(task, make_optimizers, plan)

    def prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], plan: TrainingPlan
    ) -> list[Callable[..., Any]]:
        raise ConfigurationError(
            "strategy='torchft' is not supported in user-written training loops. Use Trainer, or strategy='ddp'."
        )

    def make_step(self, parts: StepParts) -> Step:
        parts = replace(parts, ranks=DataRanks.of(Processes()))  # gradients are first those of this replica
        step = TorchFTStep(parts, self)
        if self.optimizers and self.replicas is None:
            self._connect(step)
        return step

    def _connect(self, step: TorchFTStep) -> None:
        """Join the live replicas, and take over their progress before the first batch is read."""
        given, progress = self.strategy, step.run.state
        replica, _, lighthouse = given.place()
        self.replicas = LiveReplicas(
            step.state_to_send,
            step=progress.step,
            device=self.device,
            timeout=given.timeout,
            host=given.host,
            replica_id=f"replica_{replica}",
            min_replica_size=given.min_replicas,
            lighthouse_addr=lighthouse,
        )
        self.replicas.join()
        if self.replicas.received is not None:
            progress.load_dict(self.replicas.received["progress"])
            step.catch_up()

    def close(self) -> None:
        if self.replicas is not None:
            self.replicas.close()
            self.replicas = None
        super().close()


class TorchFTStep(AutomaticStep):
    """A step whose gradients are averaged over the live replicas. `parts.ranks` contains only this replica."""

    def __init__(self, parts: StepParts, engine: TorchFTEngine) -> None:
        super().__init__(parts)
        self._engine = engine
        self._weight = 0.0

    def state_to_send(self) -> dict[str, Any]:
        """Return the state that a rejoining replica receives."""
        return {
            "model": self._engine.state.model_state(),
            "optimizers": self._engine.state.optimizer_states(),
            "schedulers": [config.scheduler.state_dict() for config in self.run.lr_scheduler_configs],
            "progress": self.run.state.to_dict(),
        }

    def catch_up(self) -> bool:
        """Load a received state if this replica is at its position in the data. Return False until it is.

        Raises:
            TrainwrightError: This replica is at a later position.
        """
        replicas = self._engine.replicas
        assert replicas is not None  # only tasks with optimizers are trained
        received = replicas.received
        if received is None:
            return True
        here, there = self.run.state.batches, received["progress"]["batches"]
        if here < there:
            return False
        if here > there:
            raise TrainwrightError(
                f"replica {self._engine.strategy.replica} has consumed {here} batches, but a replica with more steps "
                f"only {there}. Start this replica again without a checkpoint."
            )
        state = self._engine.state
        state.load_model_state(received["model"])
        for optimizer, values in zip(self.optimizers, received["optimizers"], strict=True):
            state.load_optimizer_state(optimizer, values)
        for config, values in zip(self.run.lr_scheduler_configs, received["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        replicas.received = None
        return True

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        replicas = self._engine.replicas
        assert replicas is not None  # only tasks with optimizers are trained
        replicas.join()
        # A replica that has missed steps passes over their data, without training.
        self.stepped = not self.catch_up()
        if self.stepped:
            return None
        self._weight = float(len(group.batches))
        if group.weights is not None:
            self._weight = float(sum(weight > 0 for weight in group.weights))
            group.weights = weights_of_one_rank(group.weights)
        loss = super().forward_backward(group)
        while not replicas.average(self._engine.task.parameters(), self._weight):
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
        self._weight = float(counts.sum())
        return super()._weigh_items(group)

    def _skip_batches(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        raise without_loss(type(self.task).__name__, self._engine.strategy.replica or 0)
