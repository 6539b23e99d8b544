"""Stages in processes that the Trainer starts on this machine or as actors of Ray.

On this machine the current process becomes rank 0. With Ray the current process sends the work to the actors and
receives the final state of rank 0.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from trainwright.core.process import STARTED_BY_TRAINER, is_ray, variable
from trainwright.core.rng import begin_alike
from trainwright.core.state import TrainState
from trainwright.core.task import TaskModule
from trainwright.processes.launcher import run_in_processes, serialize
from trainwright.processes.ray_actors import PARENT, WORK, RayJob, parse_launcher, run_on_ray, write_result


def run_in_new_processes(trainer: Any, work: Callable[[], Any], involved: Iterable[object]) -> Any:
    """Run a stage of a Trainer in new processes, and return its result on rank 0; see `run_in_processes`.

    Args:
        trainer: the Trainer, whose stage has begun.
        work: runs the stage in the process of a rank.
        involved: objects whose classes may be in modules that other processes cannot import. The first is the task.
    """
    settings = trainer.settings
    if is_ray(settings.arguments.launcher):
        return _run_on_ray(trainer, work, involved)
    return run_in_processes(work, len(settings.selection.settings.device_indices), involved, before=begin_alike())


def _run_on_ray(trainer: Any, work: Callable[[], Any], involved: Iterable[object]) -> Any:
    """Run a stage on Ray, then copy rank 0's weights, progress and metrics to this process.

    The attributes of rank 0's callbacks and loggers are copied too.
    """
    task = trainer.run.task
    settings = trainer.settings
    nodes = settings.selection.settings.num_nodes
    options = parse_launcher(settings.arguments.launcher)
    job = RayJob(
        [sys.executable, "-u", "-m", "trainwright.processes.worker", WORK, PARENT],
        settings.selection.settings.num_processes,
        nodes if nodes > 1 else None,
        gpus=0 if settings.selection.settings.device_type == "cpu" else 1,
        variables={STARTED_BY_TRAINER: "ray"},
        work=serialize((begin_alike(), _Work(trainer, work, task), sys.argv), [*involved, task]),
        **options,
    )
    pickled = run_on_ray(job)
    assert pickled is not None  # rank 0 has ended without an error
    unpickler = pickle.Unpickler(io.BytesIO(pickled))  # written by this user's own process
    unpickler.load()  # replaced libraries, for new processes; see `serialize`
    return _take(trainer, task, unpickler.load())


class _Work:
    """Function that each rank runs: the stage. Rank 0 then writes the result for the process that started the ranks."""

    def __init__(self, trainer: Any, work: Callable[[], Any], task: TaskModule) -> None:
        self._trainer = trainer
        self._work = work
        self._task = task

    def __call__(self) -> None:
        result = self._work()
        if variable("RANK") != "0":
            return
        trainer = self._trainer
        run = self._trainer.run
        state = TrainState()
        state.load_dict(trainer.state.to_dict())
        final_state = {
            "result": result,
            "weights": {name: value.detach().cpu() for name, value in _tensors(self._task)},
            "progress": replace(trainer.progress, state=state),
            "callbacks": [vars(callback) for callback in trainer.settings.callbacks],
            "loggers": [logger.__getstate__() for logger in trainer.settings.loggers],
            "shown": run.logs.shown,
            "interrupted": run.interrupted,
        }
        write_result(serialize((final_state,), [self._task, *trainer.settings.callbacks, *trainer.settings.loggers]))


def _tensors(task: TaskModule) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in task.state_dict().items() if isinstance(value, torch.Tensor))


def _take(trainer: Any, task: TaskModule, received: dict[str, Any]) -> Any:
    """Copy the final state of rank 0 to the Trainer and the task of this process. Return the result of the stage."""
    task.load_state_dict(received["weights"], strict=False)
    trainer.progress.take(received["progress"])
    run = trainer.run
    run.logs.shown = received["shown"]
    run.interrupted = received["interrupted"]
    # The objects that the user holds are changed in place.
    for callback, attributes in zip(trainer.settings.callbacks, received["callbacks"], strict=True):
        vars(callback).update(attributes)
    for logger, attributes in zip(trainer.settings.loggers, received["loggers"], strict=True):
        vars(logger).update(attributes)
    return received["result"]
