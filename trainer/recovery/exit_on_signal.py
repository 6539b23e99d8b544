"""Write a checkpoint of a preempted run and end the process."""

from __future__ import annotations

import signal
from typing import Any, NoReturn

from trainwright.core.errors import CheckpointError, Preempted
from trainwright.core.run import SaveRequest
from trainwright.trainer.checkpoints import step_end
from trainwright.trainer.recovery.preemption import MARGIN_S, requeue_job
from trainwright.trainer.run import StageRun

CHECKPOINT_NAME = "preempted"  # one folder per run, replaced by each later preemption


def exit_on_signal(run: StageRun) -> NoReturn:
    """Write a checkpoint of the current step if there is time, and end the process. Collective.

    After SIGUSR1, Slurm's warning before the time limit, the job is requeued unless `auto_requeue=False`.

    Args:
        run: the run, at a step boundary, after all ranks have agreed on a signal.

    Raises:
        Preempted: always.
    """
    preemption = run.status.preemption
    name = signal.Signals(preemption.signal).name
    done = _save(run)
    if run.settings.arguments.auto_requeue and name == "SIGUSR1" and run.is_main:
        done += requeue_job()
    run.note("preemption", signal=name, text=done)
    run.print(f"trainwright: rank {preemption.receiver} received {name} at step {run.state.step}: {done}")
    raise Preempted(name)


def _save(run: StageRun) -> str:
    """Write the checkpoint unless one exists or time is short. Returns a message for the user."""
    if run.saver is None:
        return "no checkpoint was written, because checkpointing is disabled."
    try:
        step_end.finish(run)  # a save in progress needs less time than a new one
    except (OSError, CheckpointError) as error:
        run.print(f"trainwright: {error}")
    if run.state.step == 0:
        return "no checkpoint was written, because no step was completed."
    plan: Any = None
    if run.is_main:
        # A checkpoint written before the validation of this step lacks the validation's results.
        held = None if run.state.validation_owed else run.folder.find(run.state.step)
        name = run.folder.free_name(CHECKPOINT_NAME)
        plan = held, run.saves.longest_write_s, run.status.preemption.remaining_s(), name
    written, needed_s, left_s, name = run.broadcast(plan)
    if written is not None:
        return f"{written} already holds this step. Resume with fit(ckpt_path='last')."
    if left_s < needed_s + MARGIN_S:
        return (
            f"no checkpoint was written, because {left_s:.1f} s of preemption_grace are left and the slowest save took "
            f"{needed_s:.1f} s. Earlier checkpoints are complete. Resume with fit(ckpt_path='last')."
        )
    run.saves.raises = True  # otherwise the message below would report a checkpoint that was not written
    try:
        run.request_save(SaveRequest(name))
        step_end.execute_requests(run)
        step_end.finish(run)
    except (OSError, CheckpointError) as error:
        return f"the checkpoint could not be written: {error}. Earlier checkpoints are complete."
    return f"wrote {run.checkpoint_dir / name}. Resume with fit(ckpt_path='last')."
