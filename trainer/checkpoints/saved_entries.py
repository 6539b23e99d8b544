"""What a checkpoint keeps beside weights and optimizers, given back to its owners; what it lacks is told."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.trainer.run import StageRun


class Entries:
    """The entries of a checkpoint's trainer part, and what a resume does about those that are not there.

    The rule: what a run had when it was saved and the checkpoint has not is an error, unless the user allowed it by
    name. What a user may add between two runs (a callback, a logger, another precision) starts anew, with a warning,
    and so does what one may take away.

    Args:
        saved: name → tree.
        path: of the checkpoint, for messages.
        allowed: what the user said may be missing.
    """

    def __init__(self, saved: Mapping[str, Any], path: Path, allowed: Sequence[str]) -> None:
        self._saved = saved
        self._path = path
        self._allowed = allowed

    def take(self, name: str, otherwise: object) -> Any:
        """Return an entry; `otherwise` if it is not there and may be.

        Raises:
            CheckpointError: it is not there, and every checkpoint that this version reads has it.
        """
        if name not in self._saved:
            self.lacks(name, f"has no entry {name!r} in its trainer part", "use another checkpoint")
            return otherwise
        return self._saved[name]

    def lacks(self, name: str, what: str, advice: str) -> None:
        """Raise, or warn if the user has allowed it, because the checkpoint lacks `name`.

        Raises:
            CheckpointError: it was not allowed; says `what` and what to do.
        """
        if name not in self._allowed:
            raise CheckpointError(
                f"{self._path} {what}: {advice}, or pass allow_missing=[{name!r}] to go on without, knowing that the "
                "run will differ."
            )
        self._warn(f"{what}; it starts anew, as allow_missing says.")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self._path} {text}", TrainwrightWarning, stacklevel=4)

    def _is_new(self, kind: str, name: str) -> None:
        """Warn of what the user has added; allowing it by name silences that."""
        if kind not in self._allowed:
            self._warn(f"holds no state of {name}, which this run has: it starts anew.")

    def restore_strategy(self, run: StageRun) -> None:
        """Give the strategy its own state back (the loss scale)."""
        # Under the strategy's key in old and new files, under its parts' names for users: "scaler".
        saved: Mapping[str, Any] = self.take("strategy", {})
        precision, before = run.strategy.precision.name, self._saved.get("precision")
        for key in run.strategy.state_dict():
            if key in saved:
                continue
            if before == precision:
                self.lacks(
                    key, f"was written with precision={precision!r} and lacks its {key}", "use another checkpoint"
                )
            else:
                self._is_new(key, f"the {key} of precision={precision!r}")
        run.strategy.load_state_dict(saved)

    def restore_callbacks(self, run: StageRun) -> None:
        """Give the callbacks their states back, by their keys."""
        saved: Mapping[str, Any] = self.take("callbacks", {})
        known = {callback.state_key: callback for callback in run.callbacks}
        for key in saved:
            if key not in known:
                self._warn(
                    f"holds the state of a callback {key!r} that this run does not have. Add it, or ignore this."
                )
        for key, callback in known.items():
            if key in saved:
                callback.load_state_dict(saved[key])
            elif callback.state_dict():
                self._is_new("callbacks", f"the callback {key!r}")

    def restore_loggers(self, run: StageRun) -> None:
        """Have the loggers continue their logs."""
        saved: Sequence[Mapping[str, Any]] = self.take("loggers", [])
        if run.logging is None:
            return
        left = [state.get("logger") for state in saved]
        for own in run.logging.state_dict():
            if own["logger"] in left:
                left.remove(own["logger"])
            elif len(own) > 1:  # it has more to tell than its class
                self._is_new("loggers", f"the {own['logger']}")
        run.logging.load_state_dict(saved)

    def restore_datamodule(self, run: StageRun) -> None:
        """Give the data module its state back."""
        saved: dict[str, Any] = self.take("datamodule", {})
        if run.datamodule is None:
            if saved:
                self._warn("holds the state of a data module, and this run has none. Pass it, or ignore this.")
        elif saved:
            run.datamodule.load_state_dict(saved)
        elif run.datamodule.state_dict():
            name = type(run.datamodule).__name__
            self.lacks("datamodule", f"holds no state of the data module, and {name} has one", "use another checkpoint")
