"""The entries of a checkpoint's trainer part, with the rules for missing entries."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.data import DataModule
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.strategies.engine import Engine


class Entries:
    """The entries of a checkpoint's trainer part, with the rules for missing entries.

    An entry that the checkpoint should have is an error if missing, unless `allowed` names it. State of something that
    the user has added since (a callback, a logger, another precision) starts from scratch with a warning. State of
    something that the user has removed is ignored with a warning.

    Args:
        saved: the entries by name.
        path: the checkpoint's path, for messages.
        allowed: names that may be missing.
    """

    def __init__(self, saved: Mapping[str, Any], path: Path, allowed: Sequence[str]) -> None:
        self._saved = saved
        self.path = path
        self._allowed = allowed

    def take(self, name: str, otherwise: object) -> Any:
        """Return an entry, or `otherwise` if it may be missing.

        Raises:
            CheckpointError: the entry is missing and not in `allowed`.
        """
        if name not in self._saved:
            self.lacks(name, f"has no entry {name!r} in its trainer part", "use another checkpoint")
            return otherwise
        return self._saved[name]

    def optional(self, name: str) -> Any:
        """Return an entry that checkpoints of early versions lack, or None."""
        return self._saved.get(name)

    def lacks(self, name: str, what: str, advice: str) -> None:
        """Raise an error because the checkpoint lacks `name`, or warn if `allowed` contains `name`.

        Raises:
            CheckpointError: `allowed` does not contain `name`.
        """
        if name not in self._allowed:
            raise CheckpointError(
                f"{self.path} {what}: {advice}, or pass allow_missing=[{name!r}] to start it from scratch. The run "
                "will then differ."
            )
        self._warn(f"{what}; it starts from scratch, because allow_missing contains {name!r}.")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self.path} {text}", TrainwrightWarning, stacklevel=4)

    def _is_new(self, kind: str, name: str) -> None:
        """Warn about state that the checkpoint lacks because the user has added something, unless allowed."""
        if kind not in self._allowed:
            self._warn(f"holds no state of {name}, which this run has: it starts from scratch.")

    def restore_engine(self, engine: Engine) -> None:
        """Restore the engine's own state (the loss scale)."""
        # The key in the file is "strategy". Users name its parts in allow_missing, such as "scaler".
        saved: Mapping[str, Any] = self.take("strategy", {})
        precision = engine.precision.name
        before = self._saved.get("precision")
        for key in engine.state_dict():
            if key in saved:
                continue
            if before == precision:
                self.lacks(
                    key, f"was written with precision={precision!r} and lacks its {key}", "use another checkpoint"
                )
            else:
                self._is_new(key, f"the {key} of precision={precision!r}")
        engine.load_state_dict(saved)

    def restore_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Restore the callbacks by their state keys."""
        saved: Mapping[str, Any] = self.take("callbacks", {})
        known = {callback.state_key: callback for callback in callbacks}
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

    def restore_loggers(self, loggers: LoggerGroup | None) -> None:
        """Restore the loggers, which continue their logs."""
        saved: Sequence[Mapping[str, Any]] = self.take("loggers", [])
        if loggers is None:
            return
        left = [state.get("logger") for state in saved]
        for own in loggers.state_dict():
            if own["logger"] in left:
                left.remove(own["logger"])
            elif len(own) > 1:  # it has state besides its class name
                self._is_new("loggers", f"the {own['logger']}")
        loggers.load_state_dict(saved)

    def restore_datamodule(self, datamodule: DataModule | None) -> None:
        """Restore the data module."""
        saved: dict[str, Any] = self.take("datamodule", {})
        if datamodule is None:
            if saved:
                self._warn("holds the state of a data module, but this run has none. Pass it, or ignore this.")
        elif saved:
            datamodule.load_state_dict(saved)
        elif datamodule.state_dict():
            name = type(datamodule).__name__
            self.lacks("datamodule", f"holds no state of the data module, and {name} has one", "use another checkpoint")
