"""What callbacks ask of a run, and the checkpoints that are being written for it."""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

from trainwright.checkpoint import AsyncWriter
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.host.folders import held
from trainwright.core.run import SaveRequest
from trainwright.strategies.engine import Engine
from trainwright.strategies.sharded_saves import ShardedSaves
from trainwright.trainer.configuration.arguments import TrainerArguments


class SaveQueue:
    """Wishes that wait for the safe point of a step (see `safe_point`), and the writer of checkpoints.

    Args:
        engine: holds the processes.
        arguments: the Trainer's. With `async_save=False` there is no writer: a save returns once it is published.
        muted: wishes are dropped, since the steps that have them do not happen.

    Attributes:
        actions, requests: what was asked for and not been done.
        writer: writes in a thread; None: nothing does.
        joint: writes what lies in pieces on several ranks.
        raises: a checkpoint that could not be written is an error; False: a warning (`on_save_error`).
        published: what loggers have not been told of, with its other names; left by the writer's thread for the main
            one: loggers and warnings are not made for several threads.
        complaints: likewise, for the user.
        longest_write_s: from its collection until it was published; on the main rank.
        reserves: memory for the first save is to be made ready after the first step.
    """

    def __init__(self, engine: Engine, arguments: TrainerArguments, *, muted: bool = False) -> None:
        self._engine = engine
        self.actions: list[Callable[[], None]] = []
        self.requests: list[SaveRequest] = []
        self.writer = AsyncWriter() if arguments.async_save and not muted else None
        self.joint = ShardedSaves(engine, self.writer)
        self.raises = arguments.on_save_error == "raise"
        self._muted = muted
        self.published: deque[tuple[Path, tuple[str, ...]]] = deque()
        self.complaints: deque[str] = deque()
        self._names = contextlib.ExitStack()
        self.longest_write_s = 0.0
        self.reserves = False

    @property
    def waiting(self) -> bool:
        """Whether anything has been asked for."""
        return bool(self.actions or self.requests)

    def add_action(self, action: Callable[[], None]) -> None:
        """Keep an action for the safe point."""
        if not self._muted:
            self.actions.append(action)

    def add_save(self, request: SaveRequest) -> None:
        """Keep a request for a checkpoint for the safe point."""
        if not self._muted:
            self.requests.append(request)

    def forget(self) -> None:
        """Drop everything that was asked for."""
        self.actions, self.requests = [], []

    def take_requests(self) -> list[SaveRequest]:
        """Return the checkpoints that were asked for, which are asked for no more."""
        requests, self.requests = self.requests, []
        return requests

    def take_name(self, folder: Path, name: str) -> None:
        """Keep other processes that share a folder from using a name until this one chooses again."""
        placeholder = RunFolder(folder).reserve(name)
        if placeholder is not None:
            self._names.callback(shutil.rmtree, placeholder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._names.enter_context(held(placeholder))

    def give_names_back(self) -> None:
        """Let others take the names."""
        self._names.close()

    def finish_copy(self) -> None:
        """Wait until what is saved is copied, before others than optimizers may change it; not collective."""
        if self.writer is not None:
            self.writer.finish_copy()

    def tolerate(self, error: Exception) -> None:
        """Raise what has kept a checkpoint from being written, or have it told."""
        if self.writer is not None and self.writer.has_dropped:  # the process is about to end
            self.complaints.append(str(error))
            return
        if self.raises:
            raise error
        if self._engine.is_main:
            self.complaints.append(f"{error} Training goes on, as on_save_error='warn' says.")
