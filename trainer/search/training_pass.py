"""One pass over the training data without learning from it."""

from __future__ import annotations

import torch

from trainwright.core.rng import isolate_rng
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.trainer.run import StageRun


def pass_training_data(run: StageRun) -> None:
    """Run `training_step` on this rank's batches of one epoch; see `Run.pass_training_data`.

    Args:
        run: between two epochs or after the last; the next epoch calls `begin_epoch` on its training data.
    """
    task, strategy, data = run.task, run.strategy, run.data.train()
    unread = MetricBuffer()  # what the task logs here describes no step of the run
    unread.begin("train")
    unread.in_step = True
    sink, task._sink = task._sink, unread
    try:
        with isolate_rng(strategy.device), torch.no_grad():
            data.begin_epoch(run.state.epoch)
            for group in data.groups(run.state, 1):
                for idx, batch in enumerate(group.batches, start=group.first_idx):
                    unread.batch = strategy.step.to_device(batch)
                    strategy.step.evaluate("training_step", unread.batch, idx)
    finally:
        task._sink = sink
