"""Connect the Trainer's profiler with a stage. Hooks, steps and loaders are wrapped once when the stage begins, so that
a stage without a profiler has no additional cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainwright.callbacks.callback import Callback
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.steps.step import AutomaticStep, ManualStep, Step
from trainwright.trainer.data import EvaluationData, TrainData
from trainwright.trainer.run import StageRun


def begin(run: StageRun) -> None:
    """Set up the profiler after the processes of a stage have started. Not collective."""
    profiler, processes = run.components.profiler, run.engine.processes
    profiler.setup(run.status.stage or "fit", processes.rank, processes.world_size, run.settings.root)
    run.components.is_profiled = profiler.enabled
    if not profiler.enabled:
        return
    run.data.on_made = partial(_wrap_data, profiler)
    make_step, strategy = run.engine.make_step, f"[Strategy]{type(run.engine.strategy).__name__}"
    vars(run.engine)["make_step"] = lambda parts: _wrap_step(make_step(parts), profiler, strategy)


def wrap_hooks(run: StageRun) -> None:
    """Record the hooks of callbacks and of the task, and each step. Called once the hook table is made."""
    if not run.components.is_profiled:
        return
    run.components.hooks.wrap(run.components.profiler.wrap)
    regions = _Steps(run.components.profiler)
    hooks = vars(run.components.hooks)
    hooks["on_train_step_start"] = (regions.on_train_step_start, *run.components.hooks.on_train_step_start)
    hooks["on_train_step_end"] = (*run.components.hooks.on_train_step_end, regions.on_train_step_end)
    if run.status.stage != "fit":
        event = f"on_{'validation' if run.status.stage == 'validate' else run.status.stage}_batch_end"
        hooks[event] = (*hooks[event], regions.end_batch)


def watch_modules(run: StageRun) -> None:
    """Mark the modules of the prepared task in the profile, unless the task is compiled."""
    if run.components.is_profiled and run.engine.settings.compile_options is None:
        run.components.profiler.watch(run.task)


def end(run: StageRun) -> None:
    """Write the summary and release the profiler, also after an exception. Not collective."""
    if not run.components.is_profiled:
        return
    run.components.is_profiled = False
    vars(run.engine).pop("make_step", None)
    run.data.on_made = None
    run.components.profiler.close()
    run.components.profiler.describe(run.print)
    run.components.profiler.teardown(run.status.stage or "fit")


class _Steps(Callback):
    """Recorder of optimizer steps under the name `run_training_batch`. It reports the end of each step to the
    profiler.
    """

    reads_only = True

    def __init__(self, profiler: Profiler) -> None:
        self._profiler, self._is_open = profiler, False

    def on_train_step_start(self, *_: object) -> None:
        if self._is_open:  # an exception ended the previous step
            self._profiler.stop("run_training_batch")
        self._is_open = True
        self._profiler.start("run_training_batch")

    def on_train_step_end(self, *_: object) -> None:
        self._is_open = False
        self._profiler.stop("run_training_batch")
        self._profiler.end_step()

    def end_batch(self, *_: object) -> None:
        """End a batch of `validate`, `test` or `predict`."""
        self._profiler.end_step()


def _wrap_step(step: Step, profiler: Profiler, strategy: str) -> Step:
    """Record the parts of a step: transfer, forward, backward, optimizer."""
    own, task, wrap = vars(step), type(step.task).__name__, profiler.wrap
    if step._transfer is not None:
        step._transfer = wrap(f"{strategy}.batch_to_device", step._transfer)
    step._training_step = wrap(f"{strategy}.training_step", step._training_step)
    own["optimizer_step"] = wrap(f"[TaskModule]{task}.optimizer_step", step.optimizer_step)
    if isinstance(step, AutomaticStep):
        step._backward = wrap(f"{strategy}.backward", step._backward or torch.Tensor.backward)
    if isinstance(step, ManualStep):
        own["backward"] = wrap(f"{strategy}.backward", step.backward)
        own["optimizer_step"] = step.optimizer_step  # it does nothing here
        own["step_optimizer"] = wrap(f"[TaskModule]{task}.optimizer_step", step.step_optimizer)
    evaluate = step.evaluate

    def recorded(name: Any, *args: Any) -> Any:
        with profiler.profile(f"{strategy}.{name if isinstance(name, str) else 'evaluation_step'}"):
            return evaluate(name, *args)

    own["evaluate"] = recorded
    return step


def _wrap_data(profiler: Profiler, data: TrainData | EvaluationData) -> None:
    """Record the time that the loop waits for batches of new data."""
    if isinstance(data, TrainData):
        vars(data)["groups"] = _timed(data.groups, profiler, "[Loader]train_dataloader_next")
        return
    for loader in data.loaders:
        vars(loader)["iterate"] = _timed(loader.iterate, profiler, f"[Loader]{loader.options.title}_next")


def _timed(iterate: Callable[..., Iterator[Any]], profiler: Profiler, name: str) -> Callable[..., Iterator[Any]]:
    """Return a function like `iterate` that records the time of each item under `name`."""

    def timed(items: Iterator[Any]) -> Iterator[Any]:
        end = object()
        try:
            while True:
                with profiler.profile(name):
                    item = next(items, end)
                if item is end:
                    return
                yield item
                del item
        finally:
            if (close := getattr(items, "close", None)) is not None:
                close()

    return lambda *args: timed(iterate(*args))
