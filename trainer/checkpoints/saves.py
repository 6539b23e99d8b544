"""The saves of a run: requests, the writer's thread, and the reports about published checkpoints.

A request is executed at the end of the current step. A thread then writes the checkpoint while training continues: on
rank 0, or on each rank for sharded saves (see `StateWriter`). Rank 0 adds the checkpoint to the run's index. All ranks
raise a write error at the next save or at the end of the fit.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.callbacks.roles import Saver
from trainwright.checkpoint import AsyncWriter, write_checkpoint
from trainwright.checkpoint.disk.low_priority_thread import leaves_cores
from trainwright.checkpoint.format.manifests import open_checkpoint
from trainwright.checkpoint.remote import remote_names
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import is_url, lock_folder, mark_in_use
from trainwright.core.run import SaveRequest
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.engine import Engine
from trainwright.strategies.state_writer import SaveTarget, StateWriter
from trainwright.trainer.checkpoints.contents import CheckpointContents
from trainwright.trainer.checkpoints.places import CheckpointPlaces
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.logs import Logs
from trainwright.trainer.loop_state import LoopState


class _Published(NamedTuple):
    """A checkpoint that is complete on the disk.

    Attributes:
        path: its folder.
        is_best: it was the best checkpoint when it was requested.
    """

    path: Path
    is_best: bool


class Saves:
    """Saves the checkpoints of a stage.

    A request goes this way: `request` stores it; `execute_requests` collects the state, copies it and gives it to the
    writer; the writer's thread writes the files, then publishes the checkpoint by `_add_to_index`; `_report` reports it
    on the main thread, at the next save or the end of the fit.

    Args:
        arguments: provides `async_save` and `on_save_error`.
        engine: provides the optimizers, and communicates with other ranks.
        places: the folders and URLs of checkpoints.
        contents: collects what is saved.
        hooks: provides each ModelCheckpoint.
        loop: its next check, after the current step, executes requests.
        logs: receives published checkpoints.
        profiler: records saves.
        is_trial: discard requests and actions, for trial steps.

    Attributes:
        writer: writes checkpoints in a thread. None with `async_save=False` and for trial steps.
        raises: raise an error if a checkpoint cannot be written; False warns. A save before a preemption sets it to
            True, because its message reports the result.
        longest_write_s: longest time of a save until its publication, on the main rank. 0 before the first.
        needs_memory: memory for the first save is to be reserved after the first step, when optimizers have a state.
            `prepare` sets it and `reserve_memory` clears it.
    """

    def __init__(
        self,
        arguments: TrainerArguments,
        engine: Engine,
        places: CheckpointPlaces,
        contents: CheckpointContents,
        hooks: StageHooks,
        loop: LoopState,
        logs: Logs,
        profiler: Profiler,
        *,
        is_trial: bool,
    ) -> None:
        self.writer = AsyncWriter() if arguments.async_save and not is_trial else None
        self.raises = arguments.on_save_error == "raise"
        self.longest_write_s = 0.0
        self.needs_memory = False
        self._engine = engine
        self._places = places
        self._contents = contents
        self._hooks = hooks
        self._loop = loop
        self._logs = logs
        self._profiler = profiler
        self._is_trial = is_trial
        self._states = StateWriter(engine, self.writer)
        # For the end of the current step. `execute_requests` and `forget_requests` empty both.
        self._actions: list[Callable[[], None]] = []
        self._requests: list[SaveRequest] = []
        self._reserved_names = contextlib.ExitStack()  # closing it frees the names
        # The writer's thread adds to these for the main thread, because loggers and warnings are not thread-safe.
        self._published: deque[_Published] = deque()
        self._warnings: deque[str] = deque()

    # Requests

    def at_step_end(self, action: Callable[[], None]) -> None:
        """Call `action` once at the end of the current step; see `Run.at_step_end`. Trial steps discard it."""
        if not self._is_trial:
            self._actions.append(action)
        self._loop.check_next_step()

    def request(self, request: SaveRequest) -> None:
        """Request a checkpoint at the end of the current step. Every rank makes the same request. Trials discard it."""
        if request.folder is None and request.remote is None:  # the run's own folder may mirror a remote one
            request.remote = self._places.remote
        if not self._is_trial:
            self._requests.append(request)
        self._loop.check_next_step()

    @property
    def is_requested(self) -> bool:
        """True if actions or save requests wait for the end of the step."""
        return bool(self._actions or self._requests)

    def forget_requests(self) -> None:
        """Discard all pending actions and requests."""
        self._actions = []
        self._requests = []

    def execute_requests(self) -> None:
        """Execute all requests: first actions, which may request checkpoints, then saves. Collective.

        `callback_metrics` is updated with this step's values first. Loggers receive them at their own interval.

        Raises:
            OSError, CheckpointError: this or an earlier checkpoint could not be written. Raised on every rank, unless
                `on_save_error="warn"`.
            NonFiniteError: see `CheckpointContents.collect`.
            RollBack, RollbackError: an action requested a rollback.
        """
        self._logs.show_pending()
        if self._actions and self.writer is not None:
            self.writer.join()  # actions may read the folder, whose content must not depend on the disk's speed
        self._report()
        if self._actions:
            with self._reserving_names():
                self._run_actions()
        requests = self._requests
        self._requests = []
        # Consecutive requests of one kind share a snapshot.
        for _, requests_of_kind in groupby(requests, key=lambda request: request.weights_only):
            try:
                self._write(list(requests_of_kind))
            except (OSError, CheckpointError) as error:  # raised on every rank
                self._tolerate(error)
                self._report()

    def _run_actions(self) -> None:
        """Call the actions in order. An action may raise `RollBack`; then the remaining ones are not called."""
        while self._actions:  # an action may add others
            actions = self._actions
            self._actions = []
            for action in actions:
                action()
            self._engine.weights_changed()  # actions may have changed them

    @contextlib.contextmanager
    def _reserving_names(self) -> Iterator[None]:
        """Reserve the names of the checkpoints that actions request within the context. Not collective.

        A callback reads the folder to choose a name that no other run has. The folders are locked until the names are
        reserved, because another run could choose the same name in between. The names stay reserved until the next
        call, or until the saves are finished. If an action raises an error, no name is reserved.
        """
        if not self._engine.is_main:
            yield
            return
        savers = self._hooks.all_of(Saver)  # type: ignore[type-abstract]  # a protocol serves as a role
        folders = {_nearest(saver.local_dirpath) for saver in savers if saver.local_dirpath is not None}
        with contextlib.ExitStack() as locks:
            for folder in sorted(folders):  # in the same order in all runs, so that they cannot block each other
                locks.enter_context(lock_folder(folder))
            self._reserved_names.close()  # of the last call; those checkpoints have been written
            yield
            for request in self._requests:
                folder = self._places.of_request(request).parent
                self._reserve_name(folder, request.name)
                if request.link is not None and request.link != request.name:
                    self._reserve_name(folder, request.link)

    def _reserve_name(self, folder: Path, name: str) -> None:
        """Reserve a name in a folder, so that other processes do not use it."""
        placeholder = RunFolder(folder).reserve(name)
        if placeholder is not None:  # None if it cannot be created; the save will report the problem
            self._reserved_names.callback(shutil.rmtree, placeholder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._reserved_names.enter_context(mark_in_use(placeholder))

    # Writing

    def prepare(self, write_deadline_s: Callable[[], float | None]) -> None:
        """Prepare the writer for a fit, before its first step or after a rollback.

        Args:
            write_deadline_s: returns the `time.monotonic()` value by which checkpoints must be written, or None.
        """
        if self.writer is None:
            return
        self.writer.optimizers = self._engine.optimizers
        self.writer.deadline_s = write_deadline_s
        # Memory is reserved in advance only if the state is in host memory.
        saves_from_host = self._hooks.saver is not None and self._engine.device.type == "cpu"
        writes_here = self._engine.is_main or self._engine.state.saves_shards
        self.needs_memory = saves_from_host and writes_here

    def reserve_memory(self) -> None:
        """Reserve memory for the first save. Called after the first step, when optimizers have their state."""
        assert self.writer is not None
        self.needs_memory = False
        self.writer.prepare(self._contents.num_bytes_here())

    def finish_copy(self) -> None:
        """Wait until the writer has copied the state to save. Until then no code may change it. Not collective."""
        if self.writer is not None:
            self.writer.finish_copy()

    def _write(self, requests: list[SaveRequest]) -> None:
        """Write the current state under all requested names. The state is collected and copied once. Collective.

        Args:
            requests: requests with the same `weights_only`.
        """
        with self._profiler.profile("save_checkpoint"):
            begun_s = time.monotonic()
            snapshot = self._contents.collect(weights_only=requests[0].weights_only)
            if self.writer is not None:
                local_world_size = self._engine.processes.topology.local_world_size
                self.writer.may_copy_later = leaves_cores(self._engine.device, local_world_size)
            targets = []
            for request in requests:
                path = self._places.of_request(request)
                is_best = self._places.is_best(path)
                publish = partial(self._add_to_index, request=request, is_best=is_best, begun_s=begun_s)
                targets.append(SaveTarget(path, request.metrics or snapshot.metrics, publish, request.must_be_new))
            # Waits for the previous save: loggers must be notified of it before this save may delete it.
            self._states.save(snapshot, targets, before=self._wait_and_report)
            self._report()

    def save_now(
        self, place: str | Path, *, weights_only: bool, storage_options: Mapping[str, Any] | None = None
    ) -> Path:
        """Write and publish a checkpoint that is not added to the index. Collective.

        Args:
            place: path or URL. For a URL the checkpoint is written locally and uploaded.
            weights_only: exclude optimizers, progress and generators.
            storage_options: options for fsspec if `place` is a URL.

        Returns:
            The local folder of the checkpoint. Trial steps write nothing and return `place`.

        Raises:
            ConfigurationError: `storage_options` was passed with a path.
            OSError, CheckpointError: this or an earlier checkpoint could not be written. Raised on every rank.
            NonFiniteError: see `CheckpointContents.collect`.
        """
        _check_storage_options(place, storage_options)
        if self._is_trial:
            return Path(place)
        if not weights_only and not self._loop.trains:
            weights_only = True
            if self._engine.is_main:
                warnings.warn(
                    f"{place} holds weights only, because no fit is current: none has run, or another stage has run "
                    "since. To resume from it, save in the fit or right after it. To silence this warning, pass "
                    "weights_only=True.",
                    TrainwrightWarning,
                    stacklevel=3,
                )
        path = self._places.local_path(str(place)) if is_url(place) else Path(place).expanduser()

        def upload(written: Path) -> None:
            if is_url(place):
                self._places.upload(written, str(place), storage_options)

        with self._engine.reunited():
            self._engine.processes.meet("save_checkpoint()")
            snapshot = self._contents.collect(weights_only=weights_only)
            target = SaveTarget(path, snapshot.metrics, upload)
            self._states.save(snapshot, [target], before=self._wait_and_report, at_once=True)
        return path

    def emergency_save(self, request: SaveRequest) -> None:
        """Write a checkpoint after an error, on the main rank. Not collective; errors of the save become warnings."""
        if not self._engine.is_main or self._is_trial:
            return
        why = self._contents.half_done()
        if why is not None:
            warnings.warn(
                f"no checkpoint {request.name!r} of the failed run was written: it stopped while {why}. Earlier "
                "checkpoints are complete.",
                TrainwrightWarning,
                stacklevel=2,
            )
            return
        self.close()  # complete earlier saves first; their errors do not prevent this one
        path = self._places.of_request(request)
        try:
            begun_s = time.monotonic()
            write_checkpoint(path, self._contents.collect_alone(request.metrics), must_be_new=request.must_be_new)
            self._add_to_index(path, request=request, is_best=self._places.is_best(path), begun_s=begun_s)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"no checkpoint {path} of the failed run was written: {error}", TrainwrightWarning, stacklevel=2
            )
        self._report()

    def _add_to_index(self, path: Path, *, request: SaveRequest, is_best: bool, begun_s: float) -> None:
        """Add a checkpoint to the index, update its link and delete replaced ones.

        Called on the writer's thread, if any, once the checkpoint is on the disk. Replaced checkpoints are deleted
        last, so that a crash leaves one too many and not one too few.
        """
        self.longest_write_s = max(self.longest_write_s, time.monotonic() - begun_s)
        folder = self._places.in_folder(path.parent)
        index = folder.index
        index.add(path)
        self._published.append(_Published(path, is_best))
        if request.remote is not None:
            self._warnings.extend(self._places.upload_requested(path, request))
        if request.link is not None:
            folder.link(request.link, path.name)
        for name in request.remove:
            replaced = path.parent / name
            if request.remote is not None and not replaced.exists():
                continue  # it was written on another machine before a resume
            if request.link is not None and replaced.is_symlink():
                replaced.unlink(missing_ok=True)  # the link that the new one replaces
                continue
            try:
                index.delete(name)
            except CheckpointError as error:
                self._warnings.append(f"an earlier checkpoint was not deleted: {error}")

    # Ends of saves

    def finish(self) -> None:
        """Wait until all checkpoints are published, and report them to the loggers. Collective.

        Raises:
            CheckpointError: the last checkpoint could not be written. Raised on every rank, unless
                `on_save_error="warn"`.
        """
        if self.writer is not None:
            self._engine.processes.on_main_rank(self._wait, "write its last checkpoint")
        self._reserved_names.close()
        self._report()

    def close(self) -> None:
        """Wait for all checkpoints at the end of a stage. Not collective; errors become warnings."""
        if self.writer is not None:
            self._states.hurry()  # has no effect after a successful stage
            try:
                self.writer.close()
            except CheckpointError as error:
                # The error that ended the stage is the one to raise.
                warnings.warn(str(error), TrainwrightWarning, stacklevel=2)
        self._reserved_names.close()
        self._report()

    def _wait_and_report(self) -> None:
        """Wait for the previous save on this rank and report it. Called before the next save writes files."""
        self._wait()
        self._report()

    def _wait(self) -> None:
        """Wait for the writer, on this rank. An error is raised or becomes a warning; see `_tolerate`."""
        try:
            if self.writer is not None:
                self.writer.wait()
        except CheckpointError as error:
            self._tolerate(error)

    def _tolerate(self, error: Exception) -> None:
        """Raise the error of a failed save, or store it as a warning.

        It becomes a warning with `on_save_error="warn"`, on the main rank only, or if the process is ending and has
        dropped other saves. `_report` issues the warnings.
        """
        if self.writer is not None and self.writer.has_dropped:
            self._warnings.append(str(error))
            return
        if self.raises:
            raise error
        if self._engine.is_main:
            self._warnings.append(f"{error} Training continues, because on_save_error='warn'.")

    def _report(self) -> None:
        """Report published checkpoints to the loggers, and problems as warnings. Called on the main thread only."""
        while self._published:
            published = self._published.popleft()
            if self._logs.group is not None:
                self._record(published)
                aliases = ("best",) if published.is_best else ()
                self._logs.group.log_checkpoint(published.path, aliases=aliases, saver=self._hooks.saver)
        while self._warnings:
            warnings.warn(self._warnings.popleft(), TrainwrightWarning, stacklevel=2)

    def _record(self, published: _Published) -> None:
        """Record a published checkpoint, unless it has been deleted since."""
        with contextlib.suppress(CheckpointError, OSError):
            manifest = open_checkpoint(published.path).manifest
            num_bytes = 0
            for part in manifest.parts.values():
                num_bytes += sum(entry.size for entry in part.files.values())
            self._logs.record_event(
                "save",
                name=published.path.name,
                of_step=manifest.step,
                bytes=num_bytes,
                metrics=manifest.metrics,
                is_best=published.is_best,
            )

    # Content of folders

    def wrote_into(self, folder: Path) -> bool:
        """Return whether the index in a folder lists existing checkpoints of this run. Not collective."""
        return bool(self._places.in_folder(folder).index.entries())

    def remote_names(self, url: str) -> list[str]:
        """Return the names of the entries in a remote folder, which rank 0 reads. Collective."""
        return self._engine.processes.on_main_rank(partial(remote_names, url), f"list {url}")


def _nearest(folder: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    for candidate in (folder, *folder.absolute().parents):
        if candidate.is_dir():
            return candidate
    return Path.cwd()


def _check_storage_options(filepath: str | Path, storage_options: Mapping[str, Any] | None) -> None:
    """Check that `storage_options` is used only with a URL.

    Raises:
        ConfigurationError: `filepath` is a local path.
    """
    if storage_options is not None and not is_url(filepath):
        raise ConfigurationError(
            f"save_checkpoint(storage_options=…) needs a URL, but {str(filepath)!r} is a local path. Remove "
            "storage_options, or pass a URL such as 's3://bucket/name'."
        )
