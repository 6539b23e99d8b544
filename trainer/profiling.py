"""Connection of the Trainer's profiler with a stage.

Hooks, steps and loaders are wrapped once when the stage begins, so that a stage without a profiler has no additional
cost. Methods are replaced in the dict of the instance (`vars(step)["evaluate"] = …`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.run import Stage
from trainwright.core.task import TaskModule
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.manual_step import ManualStep
from trainwright.strategies.steps.step import AutomaticStep, Step
from trainwright.trainer.data import EvaluationData, StageData, TrainData


class StageProfiler:
    """The Trainer's profiler within a stage.

    Args:
        profiler: records actions of the stage.
        stage: the stage, or None.
        engine: the engine, whose steps are recorded.
        data: the data, whose loaders are recorded.

    Attributes:
        profiler: see above. A PassThroughProfiler if the user has passed none.
    """

    def __init__(self, profiler: Profiler, stage: Stage | None, engine: Engine, data: StageData) -> None:
        self.profiler = profiler
        self._stage: Stage = stage or "fit"
        self._engine = engine
        self._data = data
        self._is_set_up = False  # between `begin` and `end`, and only if the profiler is enabled

    def begin(self, root: Path) -> None:
        """Set up the profiler after the processes of a stage have started. Not collective.

        Args:
            root: `default_root_dir`.
        """
        profiler = self.profiler
        processes = self._engine.processes
        profiler.setup(self._stage, processes.rank, processes.world_size, root)
        self._is_set_up = profiler.enabled
        if not profiler.enabled:
            return
        # Loaders and steps are created later, and again during the stage.
        self._data.on_created = partial(_wrap_data, profiler)
        make_step = self._engine.make_step
        strategy = f"[Strategy]{type(self._engine.strategy).__name__}"
        vars(self._engine)["make_step"] = lambda parts: _wrap_step(make_step(parts), profiler, strategy)

    def wrap_hooks(self, table: HookTable) -> None:
        """Record the hooks of callbacks and of the task, and each step. Called once the hook table is made."""
        if not self._is_set_up:
            return
        table.wrap(self.profiler.wrap)
        # The region of a step contains the hooks: its start comes before them, and its end after them.
        steps = _Steps(self.profiler)
        hooks = vars(table)
        hooks["on_train_step_start"] = (steps.on_train_step_start, *table.on_train_step_start)
        hooks["on_train_step_end"] = (*table.on_train_step_end, steps.on_train_step_end)
        if self._stage != "fit":
            name = "validation" if self._stage == "validate" else self._stage
            hooks[f"on_{name}_batch_end"] = (*hooks[f"on_{name}_batch_end"], steps.end_batch)

    def watch_modules(self, task: TaskModule) -> None:
        """Mark the modules of the prepared task in the profile, unless the task is compiled."""
        if self._is_set_up and self._engine.settings.compile_options is None:
            self.profiler.watch(task)

    def end(self, print_line: Callable[..., None]) -> None:
        """Write the summary and release the profiler, also after an exception. Not collective.

        Args:
            print_line: prints on the main process.
        """
        if not self._is_set_up:
            return
        self._is_set_up = False
        vars(self._engine).pop("make_step", None)
        self._data.on_created = None
        self.profiler.close()
        self.profiler.describe(print_line)
        self.profiler.teardown(self._stage)


class _Steps(Callback):
    """Recorder of optimizer steps under the name `run_training_batch`, Lightning's.

    It reports the end of each step to the profiler.
    """

    reads_only = True

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler
        self._is_open = False

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
    attributes = vars(step)
    task = type(step.task).__name__
    wrap = profiler.wrap
    if step._transfer is not None:
        step._transfer = wrap(f"{strategy}.batch_to_device", step._transfer)
    step._training_step = wrap(f"{strategy}.training_step", step._training_step)
    if isinstance(step, AutomaticStep):
        step._backward = wrap(f"{strategy}.backward", step._backward or torch.Tensor.backward)
    if isinstance(step, ManualStep):
        attributes["backward"] = wrap(f"{strategy}.backward", step.backward)
        attributes["step_optimizer"] = wrap(f"[TaskModule]{task}.optimizer_step", step.step_optimizer)
    else:
        attributes["optimizer_step"] = wrap(f"[TaskModule]{task}.optimizer_step", step.optimizer_step)
    evaluate = step.evaluate

    def evaluate_recorded(name: Any, *args: Any) -> Any:
        step_name = name if isinstance(name, str) else "evaluation_step"  # `evaluate` also calls functions
        with profiler.profile(f"{strategy}.{step_name}"):
            return evaluate(name, *args)

    attributes["evaluate"] = evaluate_recorded
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
                del item  # frees the batch's memory before the next one is read
        finally:
            # If the loop leaves early, a generator ends at once, and not when it is collected.
            close = getattr(items, "close", None)
            if close is not None:
                close()

    return lambda *args: timed(iterate(*args))
