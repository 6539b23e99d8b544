"""Everything that a step uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.run import Run
from trainwright.core.task import TaskModule
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.gradients import Gradients


@dataclass(frozen=True, slots=True)
class StepParts:
    """Everything that a step uses: what the engine has prepared, the run and its hooks.

    Attributes:
        task: The prepared task.
        optimizers: Optimizers in the task's order.
        device, precision: Device and precision of the computation.
        ranks: Data-parallel ranks.
        rank: Rank of this process, for messages.
        context: Context of each forward, or None.
        scaler: Loss scaler, or None.
        training_call, eval_call: `call(name, *args)` runs a step in the engine. None calls the task's method.
        inputs: Precision to which batches are cast.
        gradients: Gradients of the task.
        run: The run that is passed to hooks.
        hooks: Registered hooks.
        sink: Buffer of logged metrics. It also receives the current micro-batch.
        counts_items: Weigh micro-batches by `TaskModule.num_items` if the task defines it.
        synchronize: Called before each of several micro-batches with True if its backward must average gradients over
            ranks. Also called with True after a step was discarded. May be None.
        placed: Function that is called with each batch on the device, and returns the batch. May be None.
        split: Returns this rank's part of a batch's sequences, and the part's weight in the mean over the ranks of the
            batch (1 on average). None if sequences are not split.
        finish: Called with the index of the last batch, and True after an optimizer step, False after an evaluation.
    """

    task: TaskModule
    optimizers: list[Optimizer]
    device: torch.device
    precision: Precision
    ranks: DataRanks
    rank: int
    context: AbstractContextManager[Any] | None
    scaler: torch.amp.GradScaler | None
    training_call: Callable[..., Any] | None
    eval_call: Callable[..., Any] | None
    inputs: Precision
    gradients: Gradients
    run: Run
    hooks: HookTable
    sink: MetricBuffer
    counts_items: bool = True
    synchronize: Callable[[bool], None] | None = None
    placed: Callable[[Any], Any] | None = None
    split: Callable[[Any], tuple[Any, float]] | None = None
    finish: Callable[[int, bool], None] | None = None
