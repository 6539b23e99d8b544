"""What callbacks ask of a run, and the point of a step at which it is done."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from trainwright.checkpoint import RunIndex, write_checkpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.run import SaveRequest
from trainwright.trainer import checkpointing
from trainwright.trainer.facts import RunFacts


class SafePoint:
    """Wishes of callbacks, kept until every number of the present step is known.

    Args:
        run: whose wishes these are.
    """

    def __init__(self, run: RunFacts) -> None:
        self._run = run
        self._actions: list[Callable[[], None]] = []
        self._saves: list[SaveRequest] = []

    @property
    def waiting(self) -> bool:
        """Whether anything has been asked for."""
        return bool(self._actions or self._saves)

    def add_action(self, action: Callable[[], None]) -> None:
        """Keep an action for the safe point."""
        self._actions.append(action)

    def add_save(self, request: SaveRequest) -> None:
        """Keep a request for a checkpoint for the safe point."""
        self._saves.append(request)

    def settle(self) -> None:
        """Do everything that was asked for: actions first, since they may still ask for checkpoints. Collective."""
        while self._actions:
            actions, self._actions = self._actions, []
            for action in actions:
                action()
        saves, self._saves = self._saves, []
        for request in saves:
            self._write(request)

    def _folder(self, request: SaveRequest) -> Path:
        return self._run.checkpoint_dir if request.folder is None else Path(request.folder)

    def _write(self, request: SaveRequest) -> None:
        run = self._run
        path = self._folder(request) / request.name
        checkpointing.save(run, path, weights_only=request.weights_only, metrics=request.metrics)
        if run.is_global_zero:
            self._keep_books(path, request)

    def _keep_books(self, path: Path, request: SaveRequest) -> None:
        """Enter the checkpoint in the run's index, move its link, delete what it replaces. Main rank only."""
        index = RunIndex(path.parent, run=self._run.run_id)
        index.add(path)
        if self._run.logging is not None:
            aliases = ("best",) if path.name == Path(self._best()).name else ()
            self._run.logging.log_checkpoint(path, aliases=aliases)
        if request.link is not None:
            _link(path.parent / request.link, path.name)
        for name in request.remove:
            try:
                index.delete(name)
            except CheckpointError as error:
                warnings.warn(f"an earlier checkpoint was not deleted: {error}", TrainwrightWarning, stacklevel=2)

    def _best(self) -> str:
        return getattr(self._run.checkpoint_callback, "best_model_path", "") or ""

    def emergency_save(self, request: SaveRequest) -> None:
        """Write a checkpoint from an exception path: main rank only, nothing is communicated, errors are reported."""
        run = self._run
        if not run.is_global_zero:
            return
        if not run.at_step_boundary:
            warnings.warn(
                f"no checkpoint {request.name!r} of the failed run: it stopped within an optimizer step, whose "
                "parameters may be half updated. The earlier checkpoints are whole.",
                TrainwrightWarning,
                stacklevel=2,
            )
            return
        path = self._folder(request) / request.name
        try:
            snapshot = checkpointing.capture_alone(run, request.metrics)
            write_checkpoint(path, snapshot)
            self._keep_books(path, request)
        except (OSError, CheckpointError) as error:
            warnings.warn(f"no checkpoint {path} of the failed run: {error}", TrainwrightWarning, stacklevel=2)


def _link(link: Path, target: str) -> None:
    """Point a relative symbolic link at a sibling, in one step."""
    if link.is_dir() and not link.is_symlink():
        raise CheckpointError(
            f"{link} is a checkpoint of its own, written when save_last was True. Move it away, or keep save_last=True."
        )
    partial = link.with_name(f".{link.name}.link")
    partial.unlink(missing_ok=True)
    os.symlink(target, partial, target_is_directory=True)
    os.replace(partial, link)
