"""The safe point of a step: what callbacks have asked for is done once every number of the step is known.

Checkpoints that callbacks ask for are written in a thread while the training goes on, of rank 0 alone or of each rank
(see `ShardedSaves`), and rank 0 enters them in the run's index; every rank raises an error at the next save or at the
end of the fit. Wishes and what is being written are the run's `saves` (see `SaveQueue`).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from trainwright.checkpoint import Snapshot, remote, write_checkpoint
from trainwright.checkpoint.disk.low_priority_thread import leaves_cores
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import alone_in, is_url
from trainwright.core.run import SaveRequest
from trainwright.strategies.sharded_saves import SaveTarget
from trainwright.trainer.checkpoints import capture, remote_saves
from trainwright.trainer.checkpoints.save_queue import SaveQueue
from trainwright.trainer.run import StageRun


def prepare(run: StageRun) -> None:
    """Have the writer follow the run's optimizers, and memory for the first save made ready where the fit will save.

    Memory is not made ready where the state lies on a device: pinned memory is given whole when it is asked for.
    """
    saves = run.saves
    if saves.writer is not None:
        saves.writer.optimizers = run.optimizers
        saves.writer.deadline_s = run.preemption.write_deadline_s
        on_host = run.saver is not None and run.engine.device.type == "cpu"
        saves.reserves = on_host and (run.is_main or run.engine.state.saves_pieces)


def reserve(run: StageRun) -> None:
    """Make memory for the first save ready while the fit goes on, after a step: before it optimizers have no state."""
    assert run.saves.writer is not None
    run.saves.reserves = False
    run.saves.writer.prepare(capture.num_bytes_here(run))


def settle(run: StageRun) -> None:
    """Do everything that was asked for: actions first, since they may still ask for checkpoints. Collective.

    Callbacks are shown this step's values first; the loggers get them at their interval.
    """
    saves = run.saves
    run.shown.show(run.metrics.peek())
    if saves.actions and saves.writer is not None:
        saves.writer.join()  # actions may look into the folder, and must find the same however slow the disk is
    report(run)
    if saves.actions:
        with _choosing_names(run):
            _act(run)
    for _, alike in groupby(saves.take_requests(), key=lambda request: request.weights_only):
        try:
            _write(run, list(alike))
        except (OSError, CheckpointError) as error:  # on every rank alike
            saves.tolerate(error)
            report(run)


def _act(run: StageRun) -> None:
    while run.saves.actions:
        actions, run.saves.actions = run.saves.actions, []
        for action in actions:
            action()
        run.engine.weights_changed()  # by an action, as far as anybody knows


@contextlib.contextmanager
def _choosing_names(run: StageRun) -> Iterator[None]:
    """Keep other processes that share a folder from using the names that callbacks choose meanwhile. Not collective."""
    if not run.is_main:
        yield
        return
    folders = {saver.local_dirpath for saver in run.savers if saver.local_dirpath is not None}
    with contextlib.ExitStack() as stack:
        for folder in sorted({_nearest(folder) for folder in folders}):
            stack.enter_context(alone_in(folder))
        run.saves.give_names_back()
        yield
        for request in run.saves.requests:
            for name in {request.name, request.link or request.name}:
                run.saves.take_name(_folder(run, request), name)


def remote_names(run: StageRun, url: str) -> list[str]:
    """Return the names of what lies below a remote folder. Collective; rank 0 asks the network."""
    return run.engine.processes.on_main_rank(partial(remote.remote_names, url), f"look into {url}")


def save_now(
    run: StageRun, place: str | Path, *, weights_only: bool, storage_options: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint that the index does not list, and return once it is published. Collective.

    Args:
        place: where; for a URL it is written on this machine and uploaded.
        weights_only: leave the optimizer, progress and generators out.
        storage_options: for fsspec, where `place` is a URL.

    Returns:
        Its folder on this machine.
    """
    _check_storage_options(place, storage_options)
    if run.is_trial:
        return Path(place)  # the steps that ask for it do not happen
    if not weights_only and not run.trains:
        weights_only = True
        if run.is_main:
            warnings.warn(
                f"{place} holds weights only: optimizers and progress belong to a fit, and another stage has been "
                "run since. Save before that stage if a run is to go on from it, or pass weights_only=True.",
                TrainwrightWarning,
                stacklevel=3,
            )
    path = remote_saves.twin(run, place) if is_url(place) else Path(place).expanduser()
    with run.engine.reunited():
        run.engine.processes.meet("save_checkpoint()")
        snapshot = capture.capture(run, weights_only=weights_only)

        def upload(path: Path) -> None:
            if is_url(place):
                remote_saves.upload_to(run, path, place, storage_options)

        def work() -> None:
            _wait(run)
            upload(write_checkpoint(path, snapshot))

        if snapshot.in_pieces:
            run.saves.joint.save(
                snapshot, [SaveTarget(path, snapshot.metrics, upload)], before=partial(_wait, run), at_once=True
            )
        else:
            run.engine.processes.on_main_rank(work, f"write {place}")
    return path


def finish(run: StageRun) -> None:
    """Wait until every checkpoint is published, and report it. Collective.

    Raises:
        CheckpointError: the last one could not be written, on every rank.
    """
    if run.saves.writer is not None:
        run.engine.processes.on_main_rank(partial(_wait_for_writer, run.saves), "write its last checkpoint")
    run.saves.give_names_back()
    report(run)


def close(run: StageRun) -> None:
    """Wait likewise at the end of a stage, whatever ended it: nothing is communicated, errors are warned of."""
    saves = run.saves
    if saves.writer is not None:
        saves.joint.hurry()  # after a stage that went well nothing is left to wait for
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
    """Tell loggers of what has been published, and the user of what was not deleted; not from another thread."""
    published, complaints = run.saves.published, run.saves.complaints
    while published:
        path, aliases = published.popleft()
        if run.logging is not None:
            run.logging.log_checkpoint(path, aliases=aliases, saver=run.saver)
    while complaints:
        warnings.warn(complaints.popleft(), TrainwrightWarning, stacklevel=2)


def _folder(run: StageRun, request: SaveRequest) -> Path:
    return run.checkpoint_dir if request.folder is None else Path(request.folder)


def _write(run: StageRun, requests: list[SaveRequest]) -> None:
    """Write one moment under several names: it is collected, and copied, once."""
    with run.profiler.profile("save_checkpoint"):
        _write_recorded(run, requests)


def _write_recorded(run: StageRun, requests: list[SaveRequest]) -> None:
    since = time.monotonic()
    snapshot = capture.capture(run, weights_only=requests[0].weights_only)
    if run.saves.writer is not None:
        snapshot.overlaps &= leaves_cores(run.engine.device, run.engine.processes.topology.local_world_size)
    targets = [_target(run, request, snapshot, since) for request in requests]
    # It waits for the save before, which the next may delete: loggers must have been told of it.
    if snapshot.in_pieces:
        run.saves.joint.save(snapshot, targets, before=partial(_wait, run))
        report(run)
        return
    names = ", ".join(str(target.path) for target in targets)
    run.engine.processes.on_main_rank(partial(_write_alone, run, snapshot, targets), f"write {names}")


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


def _write_alone(run: StageRun, snapshot: Snapshot, targets: list[SaveTarget]) -> None:
    saves = run.saves
    _wait(run)
    for number, target in enumerate(targets):
        path, metrics, then, fresh = target.path, target.metrics, target.then, target.fresh
        if saves.writer is None:
            then(write_checkpoint(path, replace(snapshot, metrics=metrics), fresh=fresh))
            report(run)
        elif number:
            saves.writer.submit_again(path, metrics=metrics, then=then, fresh=fresh)
        else:
            saves.writer.submit(path, replace(snapshot, metrics=metrics), then=then, fresh=fresh)


def _keep_books(
    saves: SaveQueue, path: Path, *, request: SaveRequest, run_id: str, aliases: tuple[str, ...], since: float
) -> None:
    """Enter the checkpoint in the run's index, move its link, delete what it replaces; in the writer's thread."""
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
            continue  # written by an earlier session on another machine
        try:
            index.delete(name)
        except CheckpointError as error:
            saves.complaints.append(f"an earlier checkpoint was not deleted: {error}")


def _aliases(run: StageRun, path: Path) -> tuple[str, ...]:
    best = run.saver.best_model_path if run.saver is not None else ""
    return ("best",) if path.name == Path(best).name else ()


def emergency_save(run: StageRun, request: SaveRequest) -> None:
    """Write a checkpoint from an exception path: main rank only, nothing is communicated, errors are reported."""
    if not run.is_main or run.is_trial:
        return
    if (why := capture.half_done(run)) is not None:
        warnings.warn(
            f"no checkpoint {request.name!r} of the failed run: it stopped while {why}. The earlier "
            "checkpoints are whole.",
            TrainwrightWarning,
            stacklevel=2,
        )
        return
    close(run)  # what is still being written comes first, and an error of it does not keep this from being tried
    path = _folder(run, request) / request.name
    try:
        since = time.monotonic()
        snapshot = capture.capture_alone(run, request.metrics)
        write_checkpoint(path, snapshot, fresh=request.fresh)
        _keep_books(
            run.saves, path, request=request, run_id=run.history.run_id, aliases=_aliases(run, path), since=since
        )
    except (OSError, CheckpointError) as error:
        warnings.warn(f"no checkpoint {path} of the failed run: {error}", TrainwrightWarning, stacklevel=2)
    report(run)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the one above it that exists."""
    return next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path.cwd())


def _check_storage_options(filepath: str | Path, storage_options: Mapping[str, Any] | None) -> None:
    """Check that options for a storage service come with a URL.

    Raises:
        ConfigurationError: they come with a path of this machine.
    """
    if storage_options is not None and not is_url(filepath):
        raise ConfigurationError(
            f"save_checkpoint(storage_options=…) is for a URL, which fsspec opens, and {str(filepath)!r} is a path of "
            "this machine. Leave storage_options out, or give a URL such as 's3://bucket/name'."
        )
