"""What a preempted run does in the time that it is left: write a checkpoint, and end."""

from __future__ import annotations

import signal
from typing import Any, NoReturn

from trainwright.core.errors import CheckpointError, Preempted
from trainwright.core.run import SaveRequest
from trainwright.trainer.checkpoints import safe_point
from trainwright.trainer.recovery.preemption import MARGIN_S, requeue_job
from trainwright.trainer.run import StageRun

CHECKPOINT_NAME = "preempted"  # one folder a run, replaced each time, so that they do not pile up


def leave(run: StageRun) -> NoReturn:
    """Write a checkpoint of the present step if there is time for it, and end the process. Collective.

    Args:
        run: stands at a step boundary, and its ranks have agreed on a signal. Slurm runs the job again when it has sent
            SIGUSR1, its warning before the end of a job's time, unless `auto_requeue=False`.

    Raises:
        Preempted: always.
    """
    preemption = run.preemption
    name = signal.Signals(preemption.signal).name
    done = _save(run)
    if run.arguments.auto_requeue and name == "SIGUSR1" and run.is_main:
        done += requeue_job()
    run.print(f"trainwright: {name} came to rank {preemption.receiver} at step {run.state.step}: {done}")
    raise Preempted(name)


def _save(run: StageRun) -> str:
    """Write the checkpoint unless there is one already, or no time; returns what was done, for the user."""
    if run.saver is None:
        return "no checkpoint, since checkpointing is switched off."
    try:
        safe_point.finish(run)  # what is being written comes first: it is nearly done, and it is worth as much
    except (OSError, CheckpointError) as error:
        run.print(f"trainwright: {error}")
    if run.state.step == 0:
        return "nothing had been trained."
    plan: Any = None
    if run.is_main:
        # A checkpoint of this step that was written before its validation does not know what that came to.
        held = None if run.state.validation_owed else run.folder.find(run.state.step)
        name = run.folder.free_name(CHECKPOINT_NAME)
        plan = held, run.saves.longest_write_s, run.preemption.remaining_s(), name
    written, needed_s, left_s, name = run.broadcast(plan)
    if written is not None:
        return f"{written} holds this step already. Go on with fit(ckpt_path='last')."
    if left_s < needed_s + MARGIN_S:
        return (
            f"no checkpoint, since {left_s:.1f} s are left of preemption_grace and the longest one took {needed_s:.1f} "
            "s. The earlier ones are whole: go on with fit(ckpt_path='last')."
        )
    run.saves.raises = True  # or it would be said that there is a checkpoint
    try:
        run.request_save(SaveRequest(name))
        safe_point.settle(run)
        safe_point.finish(run)
    except (OSError, CheckpointError) as error:
        return f"the checkpoint failed: {error}. The earlier ones are whole."
    return f"wrote {run.checkpoint_dir / name}. Go on with fit(ckpt_path='last')."
