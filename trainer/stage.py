"""Around a stage: what is checked before it, how it is set up, and how it is torn down whatever has happened.

A stage (`fit`, `validate`, `test`, `predict`) is: check everything that can be checked; start other processes if that
is this Trainer's task; then, on every process: join the others, prepare data, build the model and its optimizers, load
a checkpoint, run its loop, and undo it all.
"""

from __future__ import annotations

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
from trainwright.core.task import TaskModule
from trainwright.loggers.logger import Status
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.processes.devices import kernel_choice
from trainwright.trainer import evaluation, profiling
from trainwright.trainer.checkpoints import restore, safe_point
from trainwright.trainer.checkpoints.job import this_attempt
from trainwright.trainer.checkpoints.load_request import LoadRequest, check_early, open_for
from trainwright.trainer.configuration.assembly import with_task_callbacks
from trainwright.trainer.configuration.checks import check_callbacks, check_datamodule, check_needs, check_task
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import Sources, incomplete_validation
from trainwright.trainer.logger_start import begin_fit, start_loggers
from trainwright.trainer.optimization import Schedules, check_members, parse_optimizers, warn_of_joint_steps
from trainwright.trainer.recovery import ending
from trainwright.trainer.recovery.leaving import leave
from trainwright.trainer.recovery.preemption import EvaluationWatch
from trainwright.trainer.run import ShownMetrics, StageRun

_BEGINNING = threading.Lock()


def check_stage(settings: Settings, stage: Stage, task: TaskModule, sources: Sources, load: LoadRequest) -> LoadRequest:
    """Check a stage before anything is touched.

    Returns:
        The request, with the checkpoint that it names opened.

    Raises:
        ConfigurationError, CheckpointError: the first thing that is wrong.
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
        sources.make(kind, task)  # raises, saying what to pass
    sources.check_lengths(stage)
    return check_early(load, stage)


@contextmanager
def nothing_else_runs(stage: Stage, last: StageRun, task: TaskModule) -> Iterator[None]:
    """Let one stage begin at a time.

    Raises:
        ConfigurationError: a stage of the same Trainer (`last`) or of the same task runs.
    """
    with _BEGINNING:
        if (running := last.stage or (task._run and task._run.stage)) is not None:
            raise ConfigurationError(
                f"trainer.{stage}() was called while {running}() runs with this Trainer or task. Call it afterwards, "
                "or use another Trainer with a copy of the task. A fit validates by itself, see val_check_interval."
            )
        yield


@contextmanager
def on_this_process(run: StageRun, load: LoadRequest) -> Iterator[None]:
    """Set a stage up for what runs inside, and tear it down however that ends. Collective.

    Raises:
        Exception: what has failed, or the engine's clearer error for it.
    """
    given = run.arguments
    status: Status = "failed"
    with ExitStack() as watch:
        try:
            with kernel_choice(given.benchmark, given.deterministic, given.detect_anomaly):
                _join(run)
                profiling.begin(run)
                processes = run.engine.processes
                if run.stage == "fit":
                    watch.enter_context(run.preemption.watching(run))
                with processes.watched(run.position):
                    _set_up(run, load)
                    if run.trains and not run.is_trial:
                        begin_fit(run)
                        _sanity_check(run)
                    yield
                    if run.trains and not run.is_trial:
                        _end_fit(run)
                    run.profiler.close()
                    run.engine.unshard()
                    processes.barrier()  # nobody leaves while another still talks to it
            status = "success"
        except BaseException as error:
            run.interrupted = isinstance(error, KeyboardInterrupt)
            if run.interrupted or isinstance(error, Preempted):
                status = "interrupted"
            clearer = ending.report_error(run, error)
            if clearer is not None:
                raise clearer from error
            raise
        finally:
            ending.tear_down(run, status)


def _join(run: StageRun) -> None:
    topology = detect("torchrun") if started_by_trainer() else run.settings.selection.topology
    run.engine.start(topology)
    processes, history = run.engine.processes, run.history
    if processes.world_size > 1:
        run.exchange = lambda value: run.engine.data_ranks.gather(value)
        history.run_id = processes.broadcast_object(history.run_id)
    if history.seed is None:
        history.seed = processes.broadcast_object(torch.initial_seed())
    if processes.world_size > 1 and run.is_main:
        run.print(f"trainwright: {describe(topology)}")
    if run.stage == "fit":
        run.attempt = this_attempt(processes)


# Setting up, in the order that hooks are promised


def _set_up(run: StageRun, load: LoadRequest) -> None:
    task, stage = run.task, run.stage
    assert stage is not None
    task._run = run.trainer
    if not run.is_trial:
        run.callbacks = with_task_callbacks(run.callbacks, task)
    log_through(task, run.callbacks)
    check_callbacks(run.callbacks, stage)
    check_needs(run.callbacks, run.settings.selection)  # those of the task too
    run.hooks = HookTable(run.callbacks, task)
    profiling.wrap_hooks(run)
    run.is_set_up = True
    _prepare_data(run)
    opened = open_for(run, stage, load)
    if opened is not None:
        run.engine.when_built = partial(opened.show, run)
    run.optimizers = run.engine.prepare(task, partial(_make_optimizers, run) if stage == "fit" else None, run.trainer)
    profiling.watch_modules(run)
    run.schedules = Schedules(run.lr_scheduler_configs, task)
    run.count_tokens |= "tokens" in run.settings.units
    run.logging = LoggerGroup(run.loggers, is_main=run.is_main and not run.is_trial)
    if opened is not None:
        restore.load(run, opened)
    start_loggers(run, stage)
    run.engine.attach(run.trainer, run.hooks, run.metrics)
    task._sink = run.metrics
    if stage != "fit":
        return
    lacks = incomplete_validation(run.data.sources, task, run.settings.limit_batches["validate"])
    if lacks is not None and not (run.arguments.barebones or run.is_trial):
        run.print(f"trainwright: {lacks}")
    run.trains = True


def _prepare_data(run: StageRun) -> None:
    task, data, stage = run.task, run.datamodule, run.stage or "fit"
    if data is not None:
        data.trainer = run.trainer
    owners = [owner for owner in (data, task) if owner is not None]
    for owner in owners:
        per_node = getattr(owner, "prepare_data_per_node", True)
        if run.engine.processes.local_rank == 0 if per_node else run.is_main:
            with run.profiler.profile(f"[{_kind(owner)}]{type(owner).__name__}.prepare_data"):
                owner.prepare_data()
    run.barrier()
    if data is not None:
        data.setup(stage)
    run.fire("setup", stage)
    with run.profiler.profile(f"[TaskModule]{type(task).__name__}.setup"):
        task.setup(stage)


def _kind(owner: object) -> str:
    return "TaskModule" if isinstance(owner, TaskModule) else "DataModule"


def _make_optimizers(run: StageRun) -> list[Optimizer]:
    name = type(run.task).__name__
    with run.profiler.profile(f"[TaskModule]{name}.configure_optimizers"):
        returned = run.task.configure_optimizers()
    optimizers, run.lr_scheduler_configs = parse_optimizers(returned, name)
    check_members(run.task, optimizers)
    warn_of_joint_steps(run.task, len(optimizers))
    return optimizers


# The first and the last of a fit


def _sanity_check(run: StageRun) -> None:
    """Try some validation batches, leaving no trace in metrics or generators; not after a resume."""
    limit = run.settings.num_sanity_val_steps
    if limit == 0 or not run.data.has_validation or run.resumed:
        return
    with isolate_rng(run.engine.device):
        run.sanity_checking = True
        try:
            run.fire("on_sanity_check_start")
            watch = EvaluationWatch(run.preemption, run.engine.processes, run.data.evaluation("validate"))
            evaluation.evaluate(run, "validate", max_batches=None if limit == -1 else limit, abandon=watch)
            run.fire("on_sanity_check_end")
        except evaluation.Abandoned:
            leave(run)
        finally:
            run.sanity_checking = False
            run.shown = ShownMetrics()


def _end_fit(run: StageRun) -> None:
    safe_point.settle(run)
    safe_point.finish(run)  # every checkpoint is on the disk, or this raises
    run.metrics.close("on_fit_end")
    run.fire("on_fit_end")
