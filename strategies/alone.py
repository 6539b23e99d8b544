"""A process that works alone for a while: who answers for the others, and the steps that count for nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.processes.process_group import Processes


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


class Rehearses(ABC):
    """What a strategy does so that steps can be tried out; a part of `Strategy`."""

    device: torch.device
    processes: Processes
    _scaler: torch.amp.GradScaler | None

    @abstractmethod
    def discard_gradients(self) -> None:
        """Forget the gradients of a group that will not be stepped."""

    @contextmanager
    def rehearsal(self, *, alone: bool) -> Iterator[None]:
        """Let steps inside it count for nothing: afterwards there are no gradients and the loss scale is as before.

        Weights, optimizers and generators are the caller's to put back. `attach` must be called inside, before the
        first step, and again afterwards.

        Args:
            alone: nothing crosses ranks in a step meanwhile: each rank trains its own replica, so that one whose step
                fails leaves no other waiting in a collective, and `processes` answers for the others. What the task
                communicates by itself, around the Trainer, is not held back.

        When alone, collective on entering and on leaving in order; on leaving with an exception nothing is communicated
        and the strategy can only be torn down.

        Raises:
            ConfigurationError: this strategy cannot run a step on one process alone.
        """
        scaler, processes = self._scaler, self.processes
        alone = alone and processes.world_size > 1
        if scaler is not None:
            self._scaler = type(scaler)(self.device.type)
            self._scaler.load_state_dict(scaler.state_dict())
        if alone:
            self._leave_others()
            self.processes = AbsentOthers(processes)
        try:
            yield
            self.discard_gradients()
        finally:
            self._scaler, self.processes = scaler, processes
        if alone:
            self._rejoin_others()

    def _leave_others(self) -> None:
        """Take apart whatever makes a step collective."""
        raise ConfigurationError(
            f"{type(self).__name__} cannot run a step on one of {self.processes.world_size} processes alone, which a "
            "search for the batch size needs. Search with one process, or another strategy."
        )

    def _rejoin_others(self) -> None:
        """Put together again what `_leave_others` took apart. Collective."""
        raise ConfigurationError(
            f"{type(self).__name__} overrides _leave_others but not _rejoin_others, which brings it back. Define both."
        )
