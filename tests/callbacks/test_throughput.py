from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.fake_run import FakeRun, Task, pass_time
from trainwright.callbacks import Throughput


class Tokens(Task):
    def num_tokens(self, batch: Any) -> int:
        return 4


def test_rates_are_logged_at_log_steps(tmp_path: Path, now: list[float]) -> None:
    run = FakeRun([Throughput()], tmp_path, log_every_n_steps=2)
    run.fit(epochs=1, batches=5, on_step=pass_time(now, 0.5))
    assert run.logged == [(step, {"throughput/steps_per_s": 2.0, "throughput/samples_per_s": 4.0}) for step in (2, 4)]


def test_tokens_are_counted_when_the_task_says_how_many(tmp_path: Path, now: list[float]) -> None:
    run = FakeRun([Throughput()], tmp_path, task=Tokens())
    run.fit(epochs=1, batches=1, on_step=pass_time(now, 0.5))
    assert run.logged[0][1]["throughput/tokens_per_s"] == 16.0


def test_the_rate_is_that_of_the_latest_window(tmp_path: Path, now: list[float]) -> None:
    run = FakeRun([Throughput(window_size=2)], tmp_path)
    pace = iter([1.0, 1.0, 1.0, 0.25, 0.25])
    run.fit(epochs=1, batches=5, on_step=lambda run: pass_time(now, next(pace))(run))
    assert run.logged[2][1]["throughput/steps_per_s"] == 1.0
    assert run.logged[4][1]["throughput/steps_per_s"] == 4.0


@pytest.mark.parametrize(("option", "value"), [("flops_per_step", 50.0), ("flops_per_sample", 25.0)])
def test_given_flops_become_a_utilization_of_all_devices(
    tmp_path: Path, now: list[float], option: str, value: float
) -> None:
    callback = Throughput(**{option: value}, peak_flops=100.0)  # type: ignore[arg-type]
    run = FakeRun([callback], tmp_path, world_size=2)
    run.fit(epochs=1, batches=1, on_step=pass_time(now, 0.5))
    assert run.logged[0][1]["throughput/flops_per_s"] == 100.0
    assert run.logged[0][1]["throughput/mfu"] == 0.5


def test_the_first_step_s_flops_are_counted_forward_and_backward(tmp_path: Path) -> None:
    callback = Throughput(measure_flops=True, peak_flops=1e9)
    run = FakeRun([callback], tmp_path, world_size=2)
    x = torch.ones(8, 4, requires_grad=True)

    def step(run: FakeRun) -> None:
        run.task(x).sum().backward()

    run.fit(epochs=1, batches=3, on_step=step)
    forward = 2 * 8 * 4 * 2  # multiply and add, batch 8, 4 → 2
    assert callback.flops_per_step == 3 * forward * 2  # gradients of input and weight; two ranks
    assert "throughput/mfu" in run.logged[-1][1]
