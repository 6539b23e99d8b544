"""What a fit says once, where it does otherwise than its user may think."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import isfinite

from trainwright.core.errors import TrainwrightWarning
from trainwright.core.state import TrainState
from trainwright.strategies.engine import Engine
from trainwright.trainer.configuration.settings import Limits

_ENOUGH_BATCHES = 50  # without one loss, to say so before the end of a long epoch


class Notices:
    """Give each notice once in a fit, on the main rank.

    Args:
        engine: knows which rank this is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._given: set[str] = set()

    def stop_put_off(self, state: TrainState, limits: Limits, reason: str | None) -> None:
        """Say that a request to stop waits for `min_epochs` and `min_steps`."""
        missing = [f"min_epochs={limits.min_epochs}"] if state.epoch < limits.min_epochs else []
        missing += [f"min_steps={limits.min_steps}"] if state.step < limits.min_steps else []
        self._give(
            "stop",
            f"a stop was requested by epoch {state.epoch}, step {state.step}{f' ({reason})' if reason else ''}, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not reached: training continues until "
            "then.",
        )

    def nothing_trained(self, state: TrainState, task_name: str, *, epoch_is_over: bool) -> None:
        """Say that no batch of the present epoch has given a loss, once there have been enough of them."""
        if not epoch_is_over and state.batch_in_epoch < _ENOUGH_BATCHES:
            return
        self._give(
            "nothing trained",
            f"{task_name}.training_step returned None for each of the {state.batch_in_epoch} batches of epoch "
            f"{state.epoch}{'' if epoch_is_over else ' so far'}: no weight has changed. Return the loss; or, if the "
            "step calls optimizers itself, set self.automatic_optimization = False.",
        )

    def bad_loss(self, values: Mapping[str, float], step: int, *, manual: bool) -> None:
        """Say that a training loss is not finite, though nobody asked for a look at each step.

        Args:
            values: Metrics that have just been read, by name.
            step: Completed optimizer steps.
            manual: The task steps its optimizers itself.
        """
        name = next((name for name, value in values.items() if "loss" in name.lower() and not isfinite(value)), None)
        if name is None:
            return
        how = (
            "a task with manual optimization has to look before its optimizers step"
            if manual
            else "Trainer(on_nonfinite='raise'), 'skip' or 'rollback' looks before each optimizer step"
        )
        self._give("bad loss", f"{name} is {values[name]} at step {step}; the weights may be spoilt: {how}.")

    def _give(self, name: str, text: str) -> None:
        if name not in self._given and self._engine.is_main:
            warnings.warn(text, TrainwrightWarning, stacklevel=4)
        self._given.add(name)
