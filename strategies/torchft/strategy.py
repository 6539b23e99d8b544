"""TorchFTStrategy: train replicas that may die and rejoin during a run."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import variable
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import length_of_time
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.strategy import Strategy, StrategyOutline
from trainwright.strategies.torchft.live_replicas import load_torchft
from trainwright.strategies.torchft.replica import TorchFTEngine
from trainwright.strategies.torchft.replica_settings import ReplicaSettings

if TYPE_CHECKING:
    from trainwright.strategies.fsdp.strategy import FSDPStrategy


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchFTStrategy(Strategy):
    """Strategy with replicas that may die and rejoin during a run. Each replica is started separately.

    Every step averages gradients over the replicas that are alive. A restarted replica receives weights,
    optimizer states, schedules and progress from a live replica, and continues with the next step of that replica.
    Replica r reads shard r of `max_replicas` of the data; the samples of a dead replica are not read. Replica 0 writes
    checkpoints and logs. The library torchft detects failures. It needs a running `torchft_lighthouse` that all
    replicas can reach.

    Args:
        replica: Number of this replica, 0 to `max_replicas` - 1. Default: None, which uses the variable
            `REPLICA_GROUP_ID`.
        max_replicas: Number of replicas if all are alive. Default: None, which uses the variable `NUM_REPLICA_GROUPS`.
        lighthouse: Address of the lighthouse, such as `"http://host:29510"`. Default: None, which uses the variable
            `TORCHFT_LIGHTHOUSE`.
        min_replicas: Number of live replicas below which training waits. Default: 1.
        timeout: Maximum duration of an exchange of gradients: seconds, a timedelta, a Duration or text such as
            `"1 min"`. Default: 60 seconds.
        host: Name or address of this machine for other replicas. Default: None, which uses the machine's host name.
        within: `"fsdp"` or an `FSDPStrategy` shards the model over the processes of a replica. All processes of a
            replica are started together. If one process dies, the replica ends and must be restarted with all
            processes. Its checkpoints are full, whatever its `state_dict_type` is. Default: None, which means replicas
            of one process.

    Raises:
        ConfigurationError: A value is not valid. At the start of a run: a number or the lighthouse is missing.
    """

    capabilities = Capabilities(
        manual_optimization=False, independent_steps=False, closures=False, trials=False, converted_layers=False
    )

    replica: int | None = None
    max_replicas: int | None = None
    lighthouse: str | None = None
    min_replicas: int = 1
    timeout: float | datetime.timedelta | Duration | str = 60.0
    host: str | None = None
    within: FSDPStrategy | Literal["fsdp"] | None = None
    inner: FSDPStrategy | None = field(init=False, compare=False)  # shards the model of a replica

    def __post_init__(self) -> None:
        super().__post_init__()
        length_of_time("timeout", self.timeout)  # checks it
        self._set(
            replica=_number("replica", self.replica, "REPLICA_GROUP_ID"),
            max_replicas=_number("max_replicas", self.max_replicas, "NUM_REPLICA_GROUPS"),
            lighthouse=self.lighthouse or variable("TORCHFT_LIGHTHOUSE"),
            inner=self._sharding(self.within),
        )

    @property
    def is_distributed(self) -> bool:
        return self.within is not None

    @staticmethod
    def _sharding(within: FSDPStrategy | Literal["fsdp"] | None) -> FSDPStrategy | None:
        """Return the strategy of the processes of a replica. None for replicas of one process."""
        if within is None:
            return None
        from trainwright.strategies.fsdp.strategy import FSDPStrategy  # imports much of torch

        strategy = FSDPStrategy() if within == "fsdp" else within
        if type(strategy) is not FSDPStrategy or max(strategy.tp, strategy.cp, strategy.sp, strategy.ep) > 1:
            raise ConfigurationError(
                f"within={within!r}: TorchFTStrategy supports 'fsdp', or FSDPStrategy without tp, cp, sp and ep."
            )
        return strategy.with_options(state_dict_type="full")

    def check(self, settings: EngineSettings) -> None:
        if self.inner is not None:
            self.inner.check(settings)
        elif settings.num_processes > 1:
            raise ConfigurationError(
                f"devices={len(settings.device_indices)}, num_nodes={settings.num_nodes}: a replica of TorchFTStrategy "
                "runs one process. Start each replica with devices=1, or use TorchFTStrategy(within='fsdp')."
            )
        else:
            super().check(settings)
        self.replica_settings()
        if settings.precision.scaled:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} skips steps whose gradients overflow, which would differ "
                "between the replicas of TorchFTStrategy. Use precision='bf16-mixed'."
            )
        load_torchft()

    def replica_settings(self) -> ReplicaSettings:
        """Return the checked settings of this replica.

        Raises:
            ConfigurationError: One of the values is missing or not valid.
        """
        replica = self.replica
        num = self.max_replicas
        lighthouse = self.lighthouse
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
        return ReplicaSettings(
            number=replica,
            max_replicas=num,
            min_replicas=self.min_replicas,
            lighthouse=lighthouse,
            timeout=length_of_time("timeout", self.timeout),
            host=self.host,
        )

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        if self.inner is not None:
            return self.inner.outline(task, settings)
        return replace(super().outline(task, settings), shards=1, peak="single")

    def check_task(self, task: TaskModule, settings: EngineSettings) -> None:
        check = super().check_task if self.inner is None else self.inner.check_task
        check(task, settings)

    def engine(self, settings: EngineSettings) -> Engine:
        replica = self.replica_settings()
        if self.inner is None:
            return TorchFTEngine(self, replica, settings)
        from trainwright.strategies.torchft.sharded import ShardedReplicaEngine  # imports much of torch

        return ShardedReplicaEngine(self, replica, self.inner, settings)


def _number(name: str, argument: int | None, variable_name: str) -> int | None:
    """Return the argument, or else the value of its environment variable. None if neither is set."""
    if argument is not None:
        return argument
    text = variable(variable_name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"{variable_name}={text!r}: expected a whole number for {name}.")
    return int(text)
