"""The safe point at the end of a step, where the requests of callbacks are executed.

A thread writes checkpoints while training continues: on rank 0, or on each rank for sharded saves (see `StateWriter`).
Rank 0 adds the checkpoints to the run's index. All ranks raise a write error at the next save or at the end of the fit.
Requests and running saves are in the run's `saves` (see `SaveQueue`).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from trainwright.checkpoint import Snapshot, remote, write_checkpoint
from trainwright.checkpoint.disk.low_priority_thread import leaves_cores
from trainwright.checkpoint.format.manifests import open_checkpoint
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import is_url, lock_folder
from trainwright.core.run import SaveRequest
from trainwright.strategies.state_writer import SaveTarget
from trainwright.trainer.checkpoints import capture, remote_saves
from trainwright.trainer.checkpoints.save_queue import SaveQueue
from trainwright.trainer.run import StageRun


def prepare(run: StageRun) -> None:
    """Prepare the checkpoint writer for a fit.

    Memory for the first save is reserved in advance only if the state is in host memory.
    """
    saves = run.saves
    if saves.writer is not None:
        saves.writer.optimizers = run.engine.optimizers
        saves.writer.deadline_s = run.status.preemption.write_deadline_s
        on_host = run.saver is not None and run.engine.device.type == "cpu"
        saves.reserves = on_host and (run.is_main or run.engine.state.saves_shards)


def reserve(run: StageRun) -> None:
    """Reserve memory for the first save. Called after the first step, when optimizers have their state."""
    assert run.saves.writer is not None
    run.saves.reserves = False
    run.saves.writer.prepare(capture.num_bytes_here(run))


def execute_requests(run: StageRun) -> None:
    """Execute all requests: first actions, which may request checkpoints, then saves. Collective.

    `callback_metrics` is updated with this step's values first. Loggers receive them at their own interval.
    """
    saves = run.saves
    run.logs.shown.show(run.logs.metrics.peek())
    if saves.actions and saves.writer is not None:
        saves.writer.join()  # actions may read the folder, whose content must not depend on the disk's speed
    report(run)
    if saves.actions:
        with _choosing_names(run):
            _act(run)
    for _, alike in groupby(saves.take_requests(), key=lambda request: request.weights_only):
        try:
            _write(run, list(alike))
        except (OSError, CheckpointError) as error:  # raised on every rank
            saves.tolerate(error)
            report(run)


def _act(run: StageRun) -> None:
    while run.saves.actions:
        actions, run.saves.actions = run.saves.actions, []
        for action in actions:
            action()
        run.engine.weights_changed()  # actions may have changed them


@contextlib.contextmanager
def _choosing_names(run: StageRun) -> Iterator[None]:
    """Reserve the checkpoint names that callbacks choose within the context. Not collective."""
    if not run.is_main:
        yield
        return
    folders = {saver.local_dirpath for saver in run.savers if saver.local_dirpath is not None}
    with contextlib.ExitStack() as stack:
        for folder in sorted({_nearest(folder) for folder in folders}):
            stack.enter_context(lock_folder(folder))
        run.saves.give_names_back()
        yield
        for request in run.saves.requests:
            for name in {request.name, request.link or request.name}:
                run.saves.take_name(_folder(run, request), name)


def remote_names(run: StageRun, url: str) -> list[str]:
    """Return the names of the entries in a remote folder, which rank 0 reads. Collective."""
    return run.engine.processes.on_main_rank(partial(remote.remote_names, url), f"list {url}")


def save_now(
    run: StageRun, place: str | Path, *, weights_only: bool, storage_options: Mapping[str, Any] | None = None
) -> Path:
    """Write and publish a checkpoint that is not added to the index. Collective.

    Args:
        run: the run.
        place: path or URL. For a URL the checkpoint is written locally and uploaded.
        weights_only: exclude optimizers, progress and generators.
        storage_options: options for fsspec if `place` is a URL.

    Returns:
        The local folder of the checkpoint. Trial steps write nothing and return `place`.
    """
    _check_storage_options(place, storage_options)
    if run.status.is_trial:
        return Path(place)  # trials write nothing
    if not weights_only and not run.loop.trains:
        weights_only = True
        if run.is_main:
            warnings.warn(
                f"{place} holds weights only, because another stage has run since the fit. To resume from it, save "
                "before that stage. To silence this warning, pass weights_only=True.",
                TrainwrightWarning,
                stacklevel=3,
            )
    path = remote_saves.local_path(run, place) if is_url(place) else Path(place).expanduser()
    with run.engine.reunited():
        run.engine.processes.meet("save_checkpoint()")
        snapshot = capture.capture(run, weights_only=weights_only)

        def upload(path: Path) -> None:
            if is_url(place):
                remote_saves.upload_to(run, path, place, storage_options)

        target = SaveTarget(path, snapshot.metrics, upload)
        run.saves.states.save(snapshot, [target], before=partial(_wait, run), at_once=True)
    return path


def finish(run: StageRun) -> None:
    """Wait until all checkpoints are published, and report them to the loggers. Collective.

    Raises:
        CheckpointError: the last checkpoint could not be written. Raised on every rank.
    """
    if run.saves.writer is not None:
        run.engine.processes.on_main_rank(partial(_wait_for_writer, run.saves), "write its last checkpoint")
    run.saves.give_names_back()
    report(run)


def close(run: StageRun) -> None:
    """Wait for all checkpoints at the end of a stage. Not collective; errors become warnings."""
    saves = run.saves
    if saves.writer is not None:
        saves.states.hurry()  # has no effect after a successful stage
        try:
            saves.writer.close()
        except CheckpointError as error:
            # The error that ended the stage is the one to raise.
            warnings.warn(str(error), TrainwrightWarning, stacklevel=2)
    saves.give_names_back()
    report(run)


def _wait(run: StageRun) -> None:
    _wait_for_writer(run.saves)
    report(run)


def _wait_for_writer(saves: SaveQueue) -> None:
    try:
        if saves.writer is not None:
            saves.writer.wait()
    except CheckpointError as error:
        saves.tolerate(error)


def report(run: StageRun) -> None:
    """Report published checkpoints to the loggers, and problems as warnings. Called on the main thread only."""
    published, complaints = run.saves.published, run.saves.complaints
    while published:
        path, aliases = published.popleft()
        if run.logs.group is not None:
            _note_save(run, path, is_best="best" in aliases)
            run.logs.group.log_checkpoint(path, aliases=aliases, saver=run.saver)
    while complaints:
        warnings.warn(complaints.popleft(), TrainwrightWarning, stacklevel=2)


def _note_save(run: StageRun, path: Path, *, is_best: bool) -> None:
    with contextlib.suppress(CheckpointError, OSError):  # deleted since
        found = open_checkpoint(path).manifest
        num_bytes = sum(entry.size for part in found.parts.values() for entry in part.files.values())
        run.note("save", name=path.name, of_step=found.step, bytes=num_bytes, metrics=found.metrics, is_best=is_best)


def _folder(run: StageRun, request: SaveRequest) -> Path:
    return run.checkpoint_dir if request.folder is None else Path(request.folder)


def _write(run: StageRun, requests: list[SaveRequest]) -> None:
    """Write the current state under all requested names. The state is collected and copied once."""
    with run.components.profiler.profile("save_checkpoint"):
        _write_recorded(run, requests)


def _write_recorded(run: StageRun, requests: list[SaveRequest]) -> None:
    since = time.monotonic()
    snapshot = capture.capture(run, weights_only=requests[0].weights_only)
    if run.saves.writer is not None:
        snapshot.overlaps &= leaves_cores(run.engine.device, run.engine.processes.topology.local_world_size)
    targets = [_target(run, request, snapshot, since) for request in requests]
    # Waits for the previous save: loggers must be notified of it before this save may delete it.
    run.saves.states.save(snapshot, targets, before=partial(_wait, run))
    report(run)


def _target(run: StageRun, request: SaveRequest, snapshot: Snapshot, since: float) -> SaveTarget:
    path = _folder(run, request) / request.name
    then = partial(
        _keep_books,
        run.saves,
        request=request,
        run_id=run.history.run_id,
        aliases=_aliases(run, path),
        since=since,
    )
    return SaveTarget(path, request.metrics or snapshot.metrics, then, request.fresh)


def _keep_books(
    saves: SaveQueue, path: Path, *, request: SaveRequest, run_id: str, aliases: tuple[str, ...], since: float
) -> None:
    """Add a checkpoint to the index, update its link and delete replaced checkpoints. Runs on the writer's thread."""
    saves.longest_write_s = max(saves.longest_write_s, time.monotonic() - since)
    folder = RunFolder(path.parent, run=run_id)
    index = folder.index
    index.add(path)
    saves.published.append((path, aliases))
    if request.remote is not None:
        saves.complaints.extend(remote_saves.upload(path, request, run_id))
    if request.link is not None:
        folder.link(request.link, path.name)
    for name in request.remove:
        if request.remote is not None and not (path.parent / name).exists():
            continue  # written on another machine before a resume
        if request.link is not None and (path.parent / name).is_symlink():
            (path.parent / name).unlink(missing_ok=True)  # the link that the new one replaces
            continue
        try:
            index.delete(name)
        except CheckpointError as error:
            saves.complaints.append(f"an earlier checkpoint was not deleted: {error}")


def _aliases(run: StageRun, path: Path) -> tuple[str, ...]:
    best = run.saver.best_model_path if run.saver is not None else ""
    return ("best",) if path.name == Path(best).name else ()


def emergency_save(run: StageRun, request: SaveRequest) -> None:
    """Write a checkpoint after an error, on the main rank. Not collective; errors of the save become warnings."""
    if not run.is_main or run.status.is_trial:
        return
    if (why := capture.half_done(run)) is not None:
        warnings.warn(
            f"no checkpoint {request.name!r} of the failed run was written: it stopped while {why}. Earlier "
            "checkpoints are complete.",
            TrainwrightWarning,
            stacklevel=2,
        )
        return
    close(run)  # complete earlier saves first; their errors do not prevent this one
    path = _folder(run, request) / request.name
    try:
        since = time.monotonic()
        snapshot = capture.capture_alone(run, request.metrics)
        write_checkpoint(path, snapshot, fresh=request.fresh)
        _keep_books(
            run.saves, path, request=request, run_id=run.history.run_id, aliases=_aliases(run, path), since=since
        )
    except (OSError, CheckpointError) as error:
        warnings.warn(f"no checkpoint {path} of the failed run was written: {error}", TrainwrightWarning, stacklevel=2)
    report(run)


def _nearest(folder: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    return next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path.cwd())


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
