"""What callbacks ask of a run, and the point of a step at which it is done."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.callbacks.checkpoint_moment import names_in
from trainwright.checkpoint import AsyncWriter, RunIndex, Snapshot, write_checkpoint
from trainwright.checkpoint.durable import alone_in, hidden, make_folder
from trainwright.checkpoint.manifests import read_manifest
from trainwright.checkpoint.remote import remote_names
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.run import SaveRequest
from trainwright.core.urls import is_url
from trainwright.trainer import checkpointing, remote_saves
from trainwright.trainer.facts import RunFacts
from trainwright.trainer.joint_saves import JointSaves, Target


class SafePoint:
    """Wishes of callbacks, kept until every number of the present step is known.

    Checkpoints that callbacks ask for are written in a thread while the training goes on, of rank 0 alone or of each
    rank (see `JointSaves`), and rank 0 enters them in the run's index; every rank hears of an error at the next save
    or at the end of the fit.

    Args:
        run: whose wishes these are.
        arguments: the Trainer's. With `async_save=False` `settle` returns once they are published.

    Attributes:
        raises: a checkpoint that could not be written is an error; False: a warning (`on_save_error`).
    """

    def __init__(self, run: RunFacts, arguments: Mapping[str, Any]) -> None:
        self._run = run
        self.raises = arguments["on_save_error"] == "raise"
        self._writer = AsyncWriter() if arguments["async_save"] else None
        self._joint = JointSaves(run, self._writer)
        self._first_step: Any = None  # the handle of what waits for it
        # Left by the writer's thread for the main one: loggers and warnings are not made for several threads.
        self._published: deque[tuple[Path, tuple[str, ...]]] = deque()
        self._complaints: deque[str] = deque()
        self._placeholders: list[Path] = []  # of names that are taken and not written yet, for other runs to see
        self._actions: list[Callable[[], None]] = []
        self._saves: list[SaveRequest] = []
        self.longest_write_s = 0.0  # from its collection until it was published; on the main rank

    def prepare(self) -> None:
        """Have memory for the first save made ready while the fit goes on from its first step, where it will save.

        Nothing is done where the state lies on a device: pinned memory is given whole when it is asked for.
        """
        writer = self._writer
        if writer is None or self._run.checkpoint_callback is None or self._run.strategy.device.type != "cpu":
            return
        if not (self._run.is_global_zero or self._run.strategy.saves_pieces):
            return

        def at_first_step(*_: Any) -> None:
            self._forget_first_step()
            writer.prepare(checkpointing.num_bytes_here(self._run))

        self._first_step = register_optimizer_step_post_hook(at_first_step)  # before it, optimizers have no state

    def _forget_first_step(self) -> None:
        if self._first_step is not None:
            self._first_step.remove()
            self._first_step = None

    @property
    def waiting(self) -> bool:
        """Whether anything has been asked for."""
        return bool(self._actions or self._saves)

    def add_action(self, action: Callable[[], None]) -> None:
        """Keep an action for the safe point."""
        self._actions.append(action)

    def add_save(self, request: SaveRequest) -> None:
        """Keep a request for a checkpoint for the safe point; the run's own folder may stand for one elsewhere."""
        if request.folder is None and request.remote is None:
            request.remote = getattr(self._run.checkpoint_callback, "remote", None)
        self._saves.append(request)

    def forget(self) -> None:
        """Drop everything that was asked for."""
        self._actions, self._saves = [], []

    def settle(self) -> None:
        """Do everything that was asked for: actions first, since they may still ask for checkpoints. Collective."""
        if self._actions and self._writer is not None:
            self._writer.join()  # actions may look into the folder, and must find the same however slow the disk is
        self._report()
        if self._actions:
            with self._choosing_names():
                self._act()
        saves, self._saves = self._saves, []
        for _, alike in groupby(saves, key=lambda request: request.weights_only):
            try:
                self._write(list(alike))
            except (OSError, CheckpointError) as error:  # on every rank alike
                self._tolerate(error)
                self._report()

    def _act(self) -> None:
        while self._actions:
            actions, self._actions = self._actions, []
            for action in actions:
                action()
            self._run.strategy.weights_changed()  # by an action, as far as anybody knows

    @contextlib.contextmanager
    def _choosing_names(self) -> Iterator[None]:
        """Keep other runs that share a folder from taking the names that callbacks choose meanwhile; not collective."""
        self._give_names_back()
        if not self._run.is_global_zero:
            yield
            return
        folders = {folder for callback in self._run.callbacks if (folder := getattr(callback, "local_dirpath", None))}
        with contextlib.ExitStack() as stack:
            for folder in sorted({_nearest(folder) for folder in folders}):
                stack.enter_context(alone_in(folder))
            yield
            for request in self._saves:
                if request.fresh:
                    self._take_name(self._folder(request) / request.name)

    def _take_name(self, path: Path) -> None:
        placeholder = hidden(path, "tmp")
        with contextlib.suppress(OSError):  # the save itself will say what is wrong with the folder
            make_folder(path.parent)
            placeholder.mkdir()
            self._placeholders.append(placeholder)

    def _give_names_back(self) -> None:
        while self._placeholders:
            with contextlib.suppress(OSError):  # another run has tidied up
                self._placeholders.pop().rmdir()

    def finish_copy(self) -> None:
        """Wait until what is saved is copied, before others than optimizers may change it; not collective."""
        if self._writer is not None:
            self._writer.finish_copy()

    def adopt(self, path: Path) -> None:
        """Enter a checkpoint of this run that it was killed before it could enter. Collective.

        Args:
            path: the checkpoint that is resumed from; one that lies elsewhere than the run's own is left alone.
        """
        run, folder = self._run, self._run.checkpoint_dir
        true_path = path.resolve()  # not a link to it
        ours = true_path.parent == folder.resolve() and not true_path.name.startswith(".")
        if run.checkpoint_callback is None:
            return

        def work() -> None:
            remote_saves.tidy(run, true_path if ours else None)
            if not ours:
                return
            index, created = RunIndex(folder, run=run.run_id), read_manifest(true_path).created
            if all((entry.name, entry.created) != (true_path.name, created) for entry in index.entries()):
                index.add(folder / true_path.name)

        checkpointing.on_main_rank(run.strategy.processes, work, f"enter {path} in its index")

    def remote_names(self, url: str) -> list[str]:
        """Return the names of what lies below a remote folder. Collective; rank 0 asks the network."""
        return checkpointing.on_main_rank(self._run.strategy.processes, partial(remote_names, url), f"look into {url}")

    def save_now(
        self, place: str | Path, *, weights_only: bool, storage_options: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint that the index does not list, and return once it is published. Collective.

        Args:
            place: where; for a URL it is written on this machine and uploaded.
            weights_only: leave the optimizer, progress and generators out.
            storage_options: for fsspec, where `place` is a URL.

        Returns:
            Its folder on this machine.
        """
        if not weights_only and not self._run.trains:
            weights_only = True
            if self._run.is_global_zero:
                warnings.warn(
                    f"{place} holds weights only: optimizers and progress belong to a fit, and another stage has been "
                    "run since. Save before that stage if a run is to go on from it, or pass weights_only=True.",
                    TrainwrightWarning,
                    stacklevel=3,
                )
        path = remote_saves.twin(self._run, place) if is_url(place) else Path(place).expanduser()
        with self._reunited():
            snapshot = checkpointing.capture(self._run, weights_only=weights_only)

            def upload(path: Path) -> None:
                if is_url(place):
                    remote_saves.upload_to(self._run, path, place, storage_options)

            def work() -> None:
                self._wait()
                upload(write_checkpoint(path, snapshot))

            if snapshot.in_pieces:
                self._joint.save(snapshot, [Target(path, snapshot.metrics, upload)], before=self._wait, at_once=True)
            else:
                checkpointing.on_main_rank(self._run.strategy.processes, work, f"write {place}")
        return path

    @contextlib.contextmanager
    def _reunited(self) -> Iterator[None]:
        """Have the run's strategy speak to whoever is left of its processes, also after a stage."""
        strategy = self._run.strategy
        before = strategy.processes
        with before.reunited(strategy.device) as left:
            strategy.processes = left
            try:
                yield
            finally:
                strategy.processes = before

    def find(self, step: int) -> Path | None:
        """Return the full checkpoint of `step` that this run has published in its folder, if any; main rank only."""
        folder = self._run.checkpoint_dir
        entries = RunIndex(folder, run=self._run.run_id).entries()
        names = [entry.name for entry in entries if entry.step == step and entry.kind == "full"]
        return folder / names[-1] if names else None

    def free_name(self, name: str) -> str:
        """Return `name`, or with a version where another run's checkpoint is called so; main rank only."""
        folder = self._run.checkpoint_dir
        taken = names_in(folder) - {entry.name for entry in RunIndex(folder, run=self._run.run_id).entries()}
        versions = (f"{name}-v{number}" for number in itertools.count(1))
        return next(free for free in itertools.chain((name,), versions) if free not in taken)

    def finish(self) -> None:
        """Wait until every checkpoint is published. Collective.

        Raises:
            CheckpointError: the last one could not be written, on every rank.
        """
        if self._writer is not None:
            checkpointing.on_main_rank(self._run.strategy.processes, self._wait, "write its last checkpoint")
        self._give_names_back()

    def close(self) -> None:
        """Wait likewise at the end of a stage, whatever ended it: nothing is communicated, errors are reported."""
        self._forget_first_step()
        if self._writer is None:
            self._give_names_back()
            return
        self._joint.hurry()  # after a stage that went well nothing is left to wait for
        try:
            self._writer.close()
        except CheckpointError as error:
            # The error that ended the stage is the one to raise.
            warnings.warn(str(error), TrainwrightWarning, stacklevel=2)
        self._give_names_back()
        self._report()

    def _wait(self) -> None:
        try:
            if self._writer is not None:
                self._writer.wait()
        except CheckpointError as error:
            self._tolerate(error)
        self._report()

    def _tolerate(self, error: Exception) -> None:
        """Raise what has kept a checkpoint from being written, or have it told."""
        if self.raises:
            raise error
        if self._run.is_global_zero:
            self._complaints.append(f"{error} Training goes on, as on_save_error='warn' says.")

    def _report(self) -> None:
        """Tell loggers of what has been published, and the user of what was not deleted; not from another thread."""
        while self._published:
            path, aliases = self._published.popleft()
            if self._run.logging is not None:
                self._run.logging.log_checkpoint(path, aliases=aliases, saver=self._run.checkpoint_callback)
        while self._complaints:
            warnings.warn(self._complaints.popleft(), TrainwrightWarning, stacklevel=2)

    def _folder(self, request: SaveRequest) -> Path:
        return self._run.checkpoint_dir if request.folder is None else Path(request.folder)

    def _write(self, requests: list[SaveRequest]) -> None:
        """Write one moment under several names: it is collected, and copied, once."""
        run, since = self._run, time.monotonic()
        snapshot = checkpointing.capture(run, weights_only=requests[0].weights_only)
        targets = [self._target(request, snapshot, since) for request in requests]
        # It waits for the save before, which the next may delete: loggers must have been told of it.
        if snapshot.in_pieces:
            self._joint.save(snapshot, targets, before=self._wait)
            self._report()
            return
        names = ", ".join(str(target.path) for target in targets)
        checkpointing.on_main_rank(
            run.strategy.processes, partial(self._write_alone, snapshot, targets), f"write {names}"
        )

    def _target(self, request: SaveRequest, snapshot: Snapshot, since: float) -> Target:
        path = self._folder(request) / request.name
        then = partial(self._keep_books, request=request, run_id=self._run.run_id, aliases=self._aliases(path),
                       since=since)  # fmt: skip
        return Target(path, request.metrics or snapshot.metrics, then, request.fresh)

    def _write_alone(self, snapshot: Snapshot, targets: list[Target]) -> None:
        self._wait()
        for number, target in enumerate(targets):
            path, metrics, then, fresh = target.path, target.metrics, target.then, target.fresh
            if self._writer is None:
                then(write_checkpoint(path, replace(snapshot, metrics=metrics), fresh=fresh))
                self._report()
            elif number:
                self._writer.submit_again(path, metrics=metrics, then=then, fresh=fresh)
            else:
                self._writer.submit(path, replace(snapshot, metrics=metrics), then=then, fresh=fresh)

    def _keep_books(
        self, path: Path, *, request: SaveRequest, run_id: str, aliases: tuple[str, ...], since: float
    ) -> None:
        """Enter the checkpoint in the run's index, move its link, delete what it replaces; in the writer's thread."""
        self.longest_write_s = max(self.longest_write_s, time.monotonic() - since)
        index = RunIndex(path.parent, run=run_id)
        index.add(path)
        self._published.append((path, aliases))
        if request.remote is not None:
            self._complaints.extend(remote_saves.upload(path, request, run_id))
        if request.link is not None:
            _link(path.parent / request.link, path.name)
        for name in request.remove:
            if request.remote is not None and not (path.parent / name).exists():
                continue  # written by an earlier session on another machine
            try:
                index.delete(name)
            except CheckpointError as error:
                self._complaints.append(f"an earlier checkpoint was not deleted: {error}")

    def _aliases(self, path: Path) -> tuple[str, ...]:
        best = getattr(self._run.checkpoint_callback, "best_model_path", "") or ""
        return ("best",) if path.name == Path(best).name else ()

    def emergency_save(self, request: SaveRequest) -> None:
        """Write a checkpoint from an exception path: main rank only, nothing is communicated, errors are reported."""
        run = self._run
        if not run.is_global_zero:
            return
        if (why := checkpointing.half_done(run)) is not None:
            warnings.warn(
                f"no checkpoint {request.name!r} of the failed run: it stopped while {why}. The earlier "
                "checkpoints are whole.",
                TrainwrightWarning,
                stacklevel=2,
            )
            return
        self.close()  # what is still being written comes first, and an error of it does not keep this from being tried
        path = self._folder(request) / request.name
        try:
            since = time.monotonic()
            snapshot = checkpointing.capture_alone(run, request.metrics)
            write_checkpoint(path, snapshot, fresh=request.fresh)
            self._keep_books(path, request=request, run_id=run.run_id, aliases=self._aliases(path), since=since)
        except (OSError, CheckpointError) as error:
            warnings.warn(f"no checkpoint {path} of the failed run: {error}", TrainwrightWarning, stacklevel=2)
        self._report()


def _nearest(folder: Path) -> Path:
    """Return the folder, or the one above it that exists."""
    return next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path.cwd())


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
