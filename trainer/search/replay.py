"""A batch that a rank evaluates again because the others still have one of their own, and that counts for nothing."""

from __future__ import annotations

from typing import Literal

import torch

from trainwright.core.tree import Batch, map_tensors
from trainwright.loggers.epoch_state import load_objects_state, objects_state
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.trainer.run import StageRun


def replay_batch(
    run: StageRun,
    kind: Literal["validate", "test", "predict"],
    step: str,
    batch: Batch,
    idx: int,
    dataloader_idx: int | None,
) -> None:
    """Run an evaluation step for what it communicates only: nothing is logged, kept or told to anybody.

    Metric objects of the task are put back; what else the step changes by itself is not.

    Args:
        run: the Trainer, in an evaluation in lock step.
        kind: `"validate"`, `"test"` or `"predict"`.
        step: the task's method.
        batch: some batch, on the host.
        idx: its round.
        dataloader_idx: its loader's index; None with a single loader.
    """
    task, device = run.task, run.strategy.device
    unread = MetricBuffer()
    unread.begin(kind, num_dataloaders=(dataloader_idx or 0) + 1)
    unread.in_step = True
    before = map_tensors(torch.clone, objects_state(task))
    sink, task._sink = task._sink, unread
    try:
        unread.batch = run.strategy.step.to_device(batch, dataloader_idx or 0)
        run.strategy.step.evaluate(step, unread.batch, idx, dataloader_idx)
    finally:
        task._sink = sink
    parts = dict(task.named_modules())
    for name in objects_state(task).keys() - before.keys():
        parts[name].reset()
    load_objects_state(task, before, device)
