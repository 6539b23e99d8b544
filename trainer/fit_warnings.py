"""Warnings that a fit issues at most once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import isfinite

from trainwright.core.errors import TrainwrightWarning
from trainwright.core.state import TrainState
from trainwright.strategies.engine import Engine
from trainwright.trainer.configuration.lengths import Limits

_ENOUGH_BATCHES = 50  # batches without a loss after which to warn before the end of an epoch


class FitWarnings:
    """Warnings that are issued at most once per fit, on the main rank.

    Args:
        engine: provides the rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._given: set[str] = set()

    def stop_delayed(self, state: TrainState, limits: Limits, reason: str | None) -> None:
        """Warn that a stop request waits for `min_epochs` and `min_steps`."""
        missing = []
        if state.epoch < limits.min_epochs:
            missing.append(f"min_epochs={limits.min_epochs}")
        if state.step < limits.min_steps:
            missing.append(f"min_steps={limits.min_steps}")
        cause = f" ({reason})" if reason else ""
        verb = "is" if len(missing) == 1 else "are"
        self._give(
            "stop",
            f"a stop was requested by epoch {state.epoch}, step {state.step}{cause}. Training continues until "
            f"{' and '.join(missing)} {verb} reached.",
        )

    def nothing_trained(self, state: TrainState, task_name: str, *, epoch_is_over: bool) -> None:
        """Warn that no batch of the current epoch has returned a loss, at its end or after 50 batches."""
        if not epoch_is_over and state.batch_in_epoch < _ENOUGH_BATCHES:
            return
        self._give(
            "nothing trained",
            f"{task_name}.training_step returned None for each of the {state.batch_in_epoch} batches of epoch "
            f"{state.epoch}{'' if epoch_is_over else ' so far'}, so no weight has changed. Return the loss. If the "
            "step calls optimizers itself, set self.automatic_optimization = False.",
        )

    def bad_loss(self, values: Mapping[str, float], step: int, *, manual: bool) -> None:
        """Warn that a logged training loss is not finite, for fits without `on_nonfinite`.

        Args:
            values: new metrics by name.
            step: completed optimizer steps.
            manual: the task uses manual optimization.
        """
        how = "To check each step, set Trainer(on_nonfinite='raise'), or 'skip' or 'rollback'"
        if manual:
            how = "With manual optimization, check the loss in training_step before the optimizers step"
        for name, value in values.items():
            if "loss" in name.lower() and not isfinite(value):
                self._give("bad loss", f"{name} is {value} at step {step}, so the weights may be corrupted. {how}.")
                return

    def _give(self, name: str, text: str) -> None:
        if name not in self._given and self._engine.is_main:
            warnings.warn(text, TrainwrightWarning, stacklevel=4)
        self._given.add(name)
