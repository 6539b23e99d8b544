"""Queue of requests by callbacks and of checkpoints that are being written."""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

from trainwright.checkpoint import AsyncWriter
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.host.folders import mark_in_use
from trainwright.core.run import SaveRequest
from trainwright.strategies.engine import Engine
from trainwright.strategies.state_writer import StateWriter
from trainwright.trainer.configuration.arguments import TrainerArguments


class SaveQueue:
    """Requests to execute at the end of a step (see `step_end`), and the writer of checkpoints.

    Args:
        engine: communicates with other ranks.
        arguments: the Trainer's arguments. With `async_save=False` there is no writer thread.
        muted: discard all requests, for trial steps.

    Attributes:
        actions: functions to call at the end of the step.
        requests: checkpoints to save after them.
        writer: writes checkpoints in a thread. None with `async_save=False` and for trial steps.
        states: writes the checkpoints, by way of `writer`.
        raises: raise an error if a checkpoint cannot be written; False warns (`on_save_error`).
        published: checkpoints, with their aliases, to report to the loggers. The writer's thread adds them for the main
            thread, because loggers and warnings are not thread-safe.
        complaints: warnings to issue on the main thread.
        longest_write_s: longest time of a save until its publication, on the main rank.
        reserves: after the first step, reserve memory for the first save.
    """

    def __init__(self, engine: Engine, arguments: TrainerArguments, *, muted: bool = False) -> None:
        self._engine = engine
        self.actions: list[Callable[[], None]] = []
        self.requests: list[SaveRequest] = []
        self.writer = AsyncWriter() if arguments.async_save and not muted else None
        self.states = StateWriter(engine, self.writer)
        self.raises = arguments.on_save_error == "raise"
        self._muted = muted
        self.published: deque[tuple[Path, tuple[str, ...]]] = deque()
        self.complaints: deque[str] = deque()
        self._names = contextlib.ExitStack()
        self.longest_write_s = 0.0
        self.reserves = False

    @property
    def waiting(self) -> bool:
        """True if actions or save requests wait for the end of the step."""
        return bool(self.actions or self.requests)

    def add_action(self, action: Callable[[], None]) -> None:
        """Add a function to call at the end of the step. Trial steps discard it."""
        if not self._muted:
            self.actions.append(action)

    def add_save(self, request: SaveRequest) -> None:
        """Add a save request for the end of the step. Trial steps discard it."""
        if not self._muted:
            self.requests.append(request)

    def forget(self) -> None:
        """Discard all pending actions and requests."""
        self.actions, self.requests = [], []

    def take_requests(self) -> list[SaveRequest]:
        """Return and clear the pending save requests."""
        requests, self.requests = self.requests, []
        return requests

    def take_name(self, folder: Path, name: str) -> None:
        """Reserve a name in a folder until `give_names_back`, so that other processes do not use it."""
        placeholder = RunFolder(folder).reserve(name)
        if placeholder is not None:
            self._names.callback(shutil.rmtree, placeholder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._names.enter_context(mark_in_use(placeholder))

    def give_names_back(self) -> None:
        """Release all reserved names."""
        self._names.close()

    def finish_copy(self) -> None:
        """Wait until the writer has copied the state to save. Until then no code may change it. Not collective."""
        if self.writer is not None:
            self.writer.finish_copy()

    def tolerate(self, error: Exception) -> None:
        """Raise the error of a failed save, or store it as a warning.

        It becomes a warning with `on_save_error="warn"`, or if the process is ending and has dropped other saves.
        """
        if self.writer is not None and self.writer.has_dropped:  # the process is about to end
            self.complaints.append(str(error))
            return
        if self.raises:
            raise error
        if self._engine.is_main:
            self.complaints.append(f"{error} Training continues, because on_save_error='warn'.")
