"""Checks of a stage's arguments, and the course of a stage on one process.

A stage (`fit`, `validate`, `test`, `predict`) checks its arguments and starts other processes if necessary. Every
process then sets up a `StageRun`, runs the loop of the stage and tears everything down.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trainwright.core.errors import ConfigurationError, Preempted
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Stage
from trainwright.core.task import TaskModule
from trainwright.loggers.logger import Status
from trainwright.processes.devices import kernel_choice
from trainwright.trainer.checkpoints.load_request import LoadRequest, check_early
from trainwright.trainer.configuration.checks import check_callbacks, check_datamodule, check_needs, check_task
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import Sources
from trainwright.trainer.evaluation import Abandoned, evaluate
from trainwright.trainer.logs import ShownMetrics
from trainwright.trainer.recovery.preemption import EvaluationWatch
from trainwright.trainer.run import StageRun

_BEGINNING = threading.Lock()  # held while a stage begins: two threads could both find that no stage is running


def check_stage(settings: Settings, stage: Stage, task: TaskModule, sources: Sources, load: LoadRequest) -> LoadRequest:
    """Check the arguments of a stage before it uses devices, processes or files.

    Returns:
        The load request, with its checkpoint opened if a path names it.

    Raises:
        ArgumentTypeError: `task` is not a TaskModule.
        FileNotFoundError: the path has no checkpoint.
        ConfigurationError, CheckpointError: an argument or the checkpoint is invalid.
    """
    check_task(
        task,
        stage,
        settings.accumulate_grad_batches,
        clips=settings.clip is not None,
        on_nonfinite=settings.arguments.on_nonfinite,
        counts_tokens="tokens" in settings.units,
    )
    check_callbacks(settings.callbacks, stage)
    check_needs(settings.callbacks, settings.selection, task if stage == "fit" else None)
    if sources.datamodule is not None:
        check_datamodule(sources.datamodule, stage)
    kind = "train" if stage == "fit" else stage
    if not sources.has(kind, task):
        sources.make(kind, task)  # always raises here, with an error that says what to pass
    sources.check_lengths(stage)
    return check_early(load, stage)


@contextmanager
def nothing_else_runs(stage: Stage, last: StageRun, task: TaskModule) -> Iterator[None]:
    """Check that no stage of the same Trainer or task is running. No other stage of this process begins in the context.

    Args:
        stage: the stage that begins, for the message.
        last: the Trainer's current or last run.
        task: the task, which another Trainer may be running.

    Raises:
        ConfigurationError: a stage is running.
    """
    with _BEGINNING:
        running = last.running_stage
        if running is None and task._run is not None:
            running = task._run.stage
        if running is not None:
            raise ConfigurationError(
                f"trainer.{stage}() was called while {running}() runs with this Trainer or task. Call it afterwards, "
                "or use another Trainer with a copy of the task. To validate during fit, set val_check_interval."
            )
        yield


@contextmanager
def on_this_process(run: StageRun, load: LoadRequest) -> Iterator[None]:
    """Set up a stage on this process and tear it down after the context, also after an error. Collective.

    Raises:
        Exception: the error of the stage, or for an error of the engine one that names the user's parameters.
    """
    arguments = run.settings.arguments
    status: Status = "failed"
    with ExitStack() as signals:  # signals are also watched during the teardown, in which saves complete
        try:
            with kernel_choice(arguments.benchmark, arguments.deterministic, arguments.detect_anomaly):
                run.join()
                run.profiler.begin(run.settings.root)
                processes = run.engine.processes
                if run.stage == "fit":
                    signals.enter_context(run.recovery.preemption.watching(run.loop))
                with processes.watched(run.position):
                    run.set_up(load)
                    trains = run.loop.trains and not run.is_trial
                    if trains:
                        run.begin_fit()
                        _sanity_check(run)
                    yield
                    if trains:
                        run.end_fit()
                    run.profiler.profiler.close()
                    run.engine.unshard()
                    processes.barrier()  # no rank ends while another still communicates with it
            status = "success"
        except BaseException as error:
            run.interrupted = isinstance(error, KeyboardInterrupt)
            if run.interrupted or isinstance(error, Preempted):
                status = "interrupted"
            explained = None
            if run.is_set_up:  # before that, callbacks have had no `setup`, so they receive no `on_exception`
                explained = run.recovery.report_error(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            run.tear_down(status)


def _sanity_check(run: StageRun) -> None:
    """Run some validation batches before training, except after a resume. Discards metrics and restores generators.

    Raises:
        Preempted: a signal arrived.
    """
    limit = run.settings.num_sanity_val_steps
    is_resumed = run.loads.origin is not None
    if limit == 0 or is_resumed or not run.data.has_validation:
        return
    with isolate_rng(run.engine.device):
        run.evaluation.sanity_checking = True
        try:
            run.hooks.fire("on_sanity_check_start")
            watch = EvaluationWatch(run.recovery.preemption, run.engine.processes, run.data.evaluation("validate"))
            max_batches = None if math.isinf(limit) else int(limit)
            evaluate(run, "validate", max_batches=max_batches, abandon=watch)
            run.hooks.fire("on_sanity_check_end")
        except Abandoned:
            run.recovery.exit_on_signal()
        finally:
            run.evaluation.sanity_checking = False
            run.logs.shown = ShownMetrics()
