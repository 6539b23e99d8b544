"""End a stage after success or failure: report its error and release its resources."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from trainwright.callbacks.callback import log_through
from trainwright.core.errors import Preempted, TrainwrightWarning
from trainwright.core.signatures import method_of
from trainwright.core.task import log_into
from trainwright.loggers.logger import Status
from trainwright.trainer import profiling
from trainwright.trainer.checkpoints import step_end
from trainwright.trainer.recovery.failure import note_missing_weights, note_training_batch
from trainwright.trainer.run import StageRun

_MAX_TEXT = 2000  # characters of an error in the run's record


def report_error(run: StageRun, error: BaseException) -> Exception | None:
    """Write an error into the run's record, and call `on_exception` of every callback and of the data module.

    An error of a hook becomes a warning.

    Returns:
        An error of the engine that names the user's parameters, to raise from `error`. The hooks received it instead of
        `error`. None if the engine has nothing to add.
    """
    if not run.status.is_set_up:
        return None
    note_training_batch(run, error)
    note_missing_weights(run, error)
    explained = run.engine.explain_error(error, run.task)
    reported = explained or error
    if not isinstance(reported, (Preempted, KeyboardInterrupt)):  # neither is an error of the run
        run.note("error", type=type(reported).__name__, text=str(reported)[:_MAX_TEXT])
    listeners = run.components.hooks.on_exception
    hooks: list[Callable[[], Any]] = [partial(hook, run.trainer, run.task, reported) for hook in listeners]
    if run.data.datamodule is not None:
        hooks.append(partial(method_of(run.data.datamodule, "on_exception"), reported))
    for hook in hooks:
        try:
            hook()
        except Exception as second:  # noqa: BLE001  # reported; the first error is the one to raise
            warnings.warn(
                f"on_exception itself failed: {type(second).__name__}: {second}", TrainwrightWarning, stacklevel=2
            )
    return explained


def tear_down(run: StageRun, status: Status) -> None:
    """Tear down everything that a stage has set up. All steps run even if one fails or is interrupted.

    Args:
        run: the run whose stage ends.
        status: `"success"`, `"failed"` or `"interrupted"`, for the loggers. An error before the loggers finish makes a
            success `"failed"`.
    """
    stage = run.status.stage or "fit"

    def finish_logs(_kind: object, error: BaseException | None, _trace: object) -> None:
        final = "failed" if status == "success" and error is not None else status
        try:
            run.note("end", stage=stage, status=final)
        finally:
            if run.logs.group is not None:
                run.logs.group.finish(final)

    # The stack runs in reverse: data, saves, teardown hooks, loggers, profiler, message, engine.
    with ExitStack() as cleanup:
        cleanup.callback(partial(_close, run))
        if run.status.interrupted and stage == "fit" and run.saver is not None:
            cleanup.callback(partial(_say_where_to_resume, run))
        cleanup.callback(profiling.end, run)
        if run.logs.group is not None:
            cleanup.push(finish_logs)  # receives the error of an earlier step of the cleanup
        if run.status.is_set_up:
            cleanup.callback(method_of(run.task, "teardown"), stage)
            cleanup.callback(run.fire, "teardown", stage)
            if run.data.datamodule is not None:
                cleanup.callback(method_of(run.data.datamodule, "teardown"), stage)
        cleanup.callback(step_end.close, run)
        cleanup.callback(partial(run.data.close, keep_state=status != "failed"))


def _say_where_to_resume(run: StageRun) -> None:
    """Print this run's newest checkpoint after Ctrl-C. `step_end.close` has completed all saves."""
    if not run.is_main:
        return
    found = [entry for entry in run.folder.index.entries() if entry.kind == "full"]
    if found:
        newest = max(found, key=lambda entry: entry.created)
        text = f"the newest checkpoint is {run.checkpoint_dir / newest.name}, of step {newest.step}."
        text += " Resume with fit(ckpt_path='last')."
    else:
        text = f"{run.checkpoint_dir} has no checkpoint of this run that a fit can resume."
    run.print(f"trainwright: Ctrl-C at step {run.state.step}: {text}")


def _close(run: StageRun) -> None:
    log_into(run.task, None)
    log_through(None, run.components.callbacks)
    run.status.stage = None
    run.engine.close()
