"""Checks, setup and teardown of a stage.

A stage (`fit`, `validate`, `test`, `predict`) checks its arguments and starts other processes if necessary. Every
process then initializes communication, prepares data, builds the model and its optimizers, loads a checkpoint, runs
the loop of the stage and tears everything down.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.optim import Optimizer

from trainwright.callbacks.callback import log_through
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError, Preempted
from trainwright.core.process import describe, detect, started_by_trainer
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Stage
from trainwright.core.signatures import method_of
from trainwright.core.task import TaskModule, log_into
from trainwright.core.tree import too_deep
from trainwright.loggers.logger import Status
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.processes.devices import kernel_choice
from trainwright.trainer import evaluation, profiling
from trainwright.trainer.checkpoints import restore, step_end
from trainwright.trainer.checkpoints.auto_resume import this_attempt
from trainwright.trainer.checkpoints.default_folder import default_folder
from trainwright.trainer.checkpoints.load_request import LoadRequest, check_early, open_for
from trainwright.trainer.configuration.assembly import with_task_callbacks
from trainwright.trainer.configuration.checks import check_callbacks, check_datamodule, check_needs, check_task
from trainwright.trainer.configuration.settings import DEFAULT_MAX_EPOCHS, Settings
from trainwright.trainer.data import Sources, incomplete_validation
from trainwright.trainer.logger_start import begin_fit, start_loggers
from trainwright.trainer.optimization import Schedules, check_members, parse_optimizers, warn_of_joint_steps
from trainwright.trainer.recovery import ending
from trainwright.trainer.recovery.exit_on_signal import exit_on_signal
from trainwright.trainer.recovery.preemption import EvaluationWatch
from trainwright.trainer.run import ShownMetrics, StageRun
from trainwright.trainer.untrained_values import warn_of_other_hyperparameters, watch_trained_weights

_BEGINNING = threading.Lock()


def check_stage(settings: Settings, stage: Stage, task: TaskModule, sources: Sources, load: LoadRequest) -> LoadRequest:
    """Check the arguments of a stage before it uses devices, processes or files.

    Returns:
        The load request, with its checkpoint opened if a path names it.

    Raises:
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
        sources.make(kind, task)  # raises an error that says what to pass
    sources.check_lengths(stage)
    return check_early(load, stage)


@contextmanager
def nothing_else_runs(stage: Stage, last: StageRun, task: TaskModule) -> Iterator[None]:
    """Check that no stage of the same Trainer or task is running.

    Raises:
        ConfigurationError: a stage is running.
    """
    with _BEGINNING:
        if (running := last.status.stage or (task._run and task._run.stage)) is not None:
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
    given = run.settings.arguments
    status: Status = "failed"
    with ExitStack() as watch:
        try:
            with kernel_choice(given.benchmark, given.deterministic, given.detect_anomaly):
                _join(run)
                profiling.begin(run)
                processes = run.engine.processes
                if run.status.stage == "fit":
                    watch.enter_context(run.status.preemption.watching(run.loop))
                with processes.watched(run.position):
                    _set_up(run, load)
                    if run.loop.trains and not run.status.is_trial:
                        begin_fit(run)
                        _sanity_check(run)
                    yield
                    if run.loop.trains and not run.status.is_trial:
                        _end_fit(run)
                    run.components.profiler.close()
                    run.engine.unshard()
                    processes.barrier()  # no rank ends while another still communicates with it
            status = "success"
        except BaseException as error:
            run.status.interrupted = isinstance(error, KeyboardInterrupt)
            if run.status.interrupted or isinstance(error, Preempted):
                status = "interrupted"
            explained = ending.report_error(run, error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            ending.tear_down(run, status)


def _join(run: StageRun) -> None:
    topology = detect("torchrun") if started_by_trainer() else run.settings.selection.topology
    run.engine.start(topology)
    processes, history = run.engine.processes, run.history
    if processes.world_size > 1:
        run.logs.exchange = lambda value: run.engine.data_ranks.gather(value)
        history.run_id = processes.broadcast_object(history.run_id)
    if history.seed is None:
        history.seed = processes.broadcast_object(torch.initial_seed())
    if processes.world_size > 1 and run.is_main:
        run.print(f"trainwright: {describe(topology)}")
    if run.status.stage == "fit":
        run.resume.attempt = this_attempt(processes)


# Setup, in the documented order of hooks


def _set_up(run: StageRun, load: LoadRequest) -> None:
    task, stage = run.task, run.status.stage
    assert stage is not None
    is_trained = task.global_step > 0  # by this Trainer or an earlier one
    task.trainer = run.trainer
    if not run.status.is_trial:
        run.components.callbacks = with_task_callbacks(run.components.callbacks, task)
    log_through(task, run.components.callbacks)
    check_callbacks(run.components.callbacks, stage)
    check_needs(run.components.callbacks, run.settings.selection)  # includes the task's callbacks
    run.components.hooks = HookTable(run.components.callbacks, task)
    profiling.wrap_hooks(run)
    if not run.status.is_trial:
        run.default_folder = run.broadcast(default_folder(run, load) if run.is_main else None)
    run.status.is_set_up = True
    _prepare_data(run, is_trained=is_trained)
    _check_depth(task)
    opened = open_for(run, stage, load)
    if opened is not None:
        run.engine.when_configured = None  # trained weights are loaded
        run.engine.when_built = partial(opened.show, run)
        if stage != "fit":
            warn_of_other_hyperparameters(run, opened)
    run.engine.prepare_task(task, partial(_make_optimizers, run) if stage == "fit" else None, run.trainer)
    run.loop.schedules = Schedules(run.loop.schedules.configs, task)  # the engine may have changed their intervals
    profiling.watch_modules(run)
    run.loop.count_tokens |= "tokens" in run.settings.units
    run.logs.group = LoggerGroup(run.settings.loggers, is_main=run.is_main and not run.status.is_trial)
    if opened is not None:
        restore.load(run, opened)
    start_loggers(run, stage)
    run.engine.attach(run.trainer, run.components.hooks, run.logs.metrics)
    task.trainer = run.trainer  # also of tasks that `setup` and `configure_model` created
    log_into(task, run.logs.metrics)
    if stage != "fit":
        return
    if not (run.settings.arguments.barebones or run.status.is_trial):
        _print_notes(run)
    run.loop.trains = True


def _print_notes(run: StageRun) -> None:
    """Print what a fit does by default and its user may not expect."""
    settings = run.settings
    if settings.arguments.max_epochs is None and settings.limits.max_epochs == DEFAULT_MAX_EPOCHS:
        run.print(
            f"trainwright: training ends after {DEFAULT_MAX_EPOCHS} epochs, because no limit is set. Set max_epochs; "
            "-1 is no limit."
        )
    warning = incomplete_validation(run.data.sources, run.task, settings.limit_batches["validate"])
    if warning is not None:
        run.print(f"trainwright: {warning}")


def _check_depth(task: TaskModule) -> None:
    """Check that torch can visit all modules of the task, before the engine does, which would fail again at its end."""
    try:
        for _ in task.modules():
            pass
    except RecursionError as error:
        raise too_deep(type(task).__name__) from error


def _prepare_data(run: StageRun, *, is_trained: bool) -> None:
    task, data, stage = run.task, run.data.datamodule, run.status.stage or "fit"
    if data is not None:
        data.trainer = run.trainer
    owners = [owner for owner in (data, task) if owner is not None]
    for owner in owners:
        per_node = getattr(owner, "prepare_data_per_node", True)
        if run.engine.processes.local_rank == 0 if per_node else run.is_main:
            with run.components.profiler.profile(f"[{_kind(owner)}]{type(owner).__name__}.prepare_data"):
                method_of(owner, "prepare_data")()
    run.barrier()
    if data is not None:
        method_of(data, "setup")(stage)
    run.fire("setup", stage)
    if is_trained:
        run.engine.when_configured = watch_trained_weights(run)
    with run.components.profiler.profile(f"[TaskModule]{type(task).__name__}.setup"):
        method_of(task, "setup")(stage)


def _kind(owner: object) -> str:
    return "TaskModule" if isinstance(owner, TaskModule) else "DataModule"


def _make_optimizers(run: StageRun) -> list[Optimizer]:
    name = type(run.task).__name__
    run.task.trainer = run.trainer  # see _set_up
    with run.components.profiler.profile(f"[TaskModule]{name}.configure_optimizers"):
        returned = run.task.configure_optimizers()
    optimizers, configs = parse_optimizers(returned, name)
    run.loop.schedules = Schedules(configs, run.task)
    check_members(run.task, optimizers)
    warn_of_joint_steps(run.task, len(optimizers))
    return optimizers


# Start and end of a fit


def _sanity_check(run: StageRun) -> None:
    """Run some validation batches before training, except after a resume. Discards metrics and restores generators."""
    limit = run.settings.num_sanity_val_steps
    if limit == 0 or not run.data.has_validation or run.resume.origin is not None:
        return
    with isolate_rng(run.engine.device):
        run.evaluation.sanity_checking = True
        try:
            run.fire("on_sanity_check_start")
            watch = EvaluationWatch(run.status.preemption, run.engine.processes, run.data.evaluation("validate"))
            evaluation.evaluate(run, "validate", max_batches=None if math.isinf(limit) else int(limit), abandon=watch)
            run.fire("on_sanity_check_end")
        except evaluation.Abandoned:
            exit_on_signal(run)
        finally:
            run.evaluation.sanity_checking = False
            run.logs.shown = ShownMetrics()


def _end_fit(run: StageRun) -> None:
    step_end.execute_requests(run)
    step_end.finish(run)  # all checkpoints are on disk, or this raises an error
    run.logs.metrics.close("on_fit_end")
    run.fire("on_fit_end")
