"""Steps that are tried out: on one process alone if need be, and without a trace in the strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.processes.process_group import Processes
from trainwright.strategies.capabilities import REFUSALS
from trainwright.strategies.strategy import Strategy


class AbsentOthers(Processes):
    """Stands in for the other processes: each of them is taken to say what this one says. Nothing is communicated.

    Args:
        real: the processes of the run; ranks and numbers are theirs.
    """

    def __init__(self, real: Processes) -> None:
        super().__init__(real.topology)

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        return [list(values) for _ in range(self.world_size)]


@contextmanager
def trial(strategy: Strategy, *, alone: bool) -> Iterator[None]:
    """Let steps inside it count for nothing: afterwards there are no gradients and the loss scale is as before.

    Weights, optimizers and generators are the caller's to put back. `attach` must be called inside, before the first
    step, and again afterwards.

    Args:
        strategy: at a step boundary.
        alone: nothing crosses ranks in a step meanwhile: each rank trains its own replica, so that one whose step fails
            leaves no other waiting in a collective, and `processes` answers for the others. What the task communicates
            by itself, around the Trainer, is not held back.

    When alone, collective on entering and on leaving in order; on leaving with an exception nothing is communicated and
    the strategy can only be torn down.

    Raises:
        ConfigurationError: this strategy cannot take steps back, or not run one on one process alone.
    """
    if not strategy.capabilities.trials:
        raise ConfigurationError(f"a search {REFUSALS['trials'].format(strategy=type(strategy).__name__)}")
    scaler, processes, ranks = strategy.scaler, strategy.processes, strategy.data_ranks
    alone = alone and processes.world_size > 1
    if scaler is not None:
        strategy.scaler = type(scaler)(strategy.device.type)
        strategy.scaler.load_state_dict(scaler.state_dict())
    if alone:
        strategy.leave_others()
        strategy.processes = others = AbsentOthers(processes)
        strategy.data_ranks = replace(ranks, processes=others, alone=True)
    try:
        yield
        strategy.step.discard_gradients()
    finally:
        strategy.scaler, strategy.processes, strategy.data_ranks = scaler, processes, ranks
    if alone:
        strategy.rejoin_others()
