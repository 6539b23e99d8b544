"""A group whose loss is None leaves the clock where it is: whoever logs or saves by it must not do so twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelCheckpoint, Throughput
from trainwright.callbacks.callback import Callback


def skip_odd_groups(run: FakeRun) -> None:
    if run.state.batches % 2:
        run.state.step -= 1


@pytest.mark.parametrize("callback", [DeviceStatsMonitor(), LearningRateMonitor("step"), Throughput()])
def test_a_skipped_group_is_not_logged(tmp_path: Path, callback: Callback) -> None:
    run = FakeRun([callback], tmp_path)
    run.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)]
    run.fit(epochs=1, batches=6, on_step=skip_odd_groups)
    assert [step for step, _ in run.logged] == [1, 2, 3]


def test_a_skipped_group_is_not_saved(tmp_path: Path) -> None:
    run = FakeRun([ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)], tmp_path)
    run.fit(epochs=1, batches=6, on_step=skip_odd_groups)
    assert [step for step, _ in run.written] == [1, 2, 3]
