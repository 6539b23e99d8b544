"""Weights go to the device before the next forward, and whoever writes them before that is heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.offload.overlapped import assert_same, train, writer, writes
from tests.strategies.offload.test_training import Tiny
from trainwright import OffloadStrategy
from trainwright.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Throughput, Timer
from trainwright.callbacks.callback import Callback

EVENTS = ("on_train_batch_start", "on_train_step_end", "on_train_epoch_end", "on_validation_epoch_start")


@pytest.mark.parametrize("event", EVENTS)
def test_what_a_callback_writes_is_what_is_trained_on(event: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    wanted = train("single", writer(event), **options)
    for parameters in ("cpu", "device"):
        assert_same(train(OffloadStrategy(parameters, stream=True), writer(event), **options), wanted)


class Assigning(Callback):
    """Puts other tensors in the place of weights: for good after a step, for the time of an evaluation."""

    def on_train_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
        for parameter in task.parameters():
            parameter.data = parameter.data.clamp(-0.3, 0.3)

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        self.own = [parameter.data for parameter in task.parameters()]
        for parameter in task.parameters():
            parameter.data = parameter.data * 0.5

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        for parameter, own in zip(task.parameters(), self.own, strict=True):
            parameter.data = own


@pytest.mark.parametrize(("parameters", "state"), [("cpu", "cpu"), ("disk", "disk"), ("device", "cpu")])
def test_what_is_assigned_is_used_and_may_be_put_back(parameters: Any, state: Any) -> None:
    wanted = train("single", Assigning())
    assert_same(train(OffloadStrategy(parameters, state, stream=True), Assigning()), wanted)


def test_what_a_task_writes_is_what_is_trained_on() -> None:
    class Writing(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            writes(None, self)

    class Scheduling(Tiny):
        def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
            super().lr_scheduler_step(scheduler, metric)
            writes(None, self)

    for kind in (Writing, Scheduling):
        assert_same(train(OffloadStrategy("device", stream=True), task=kind()), train(task=kind()))


def test_what_torch_sees_written_is_copied_again() -> None:
    class Visibly(Callback):
        reads_only = True

        @torch.no_grad()
        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            for parameter in task.parameters():
                parameter.mul_(0.9)

    for parameters in ("cpu", "device"):
        assert_same(train(OffloadStrategy(parameters, stream=True), Visibly()), train("single", Visibly()))


def test_what_comes_with_a_run_by_default_only_reads(tmp_path: Path) -> None:
    found: list[tuple[int, bool]] = []

    class Look(Callback):
        reads_only = True

        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            units = trainer.strategy.weight_stream.all_units
            found.append((trainer.global_step, all(unit.fresh for unit in units)))

    options: dict[str, Any] = {"enable_checkpointing": True, "enable_progress_bar": True, "logger": "csv"}
    callbacks = [
        EarlyStopping("val_loss"), LearningRateMonitor(), ModelCheckpoint(every_n_train_steps=2), Throughput(), Timer()
    ]  # fmt: skip
    strategy = OffloadStrategy("device", stream=True)
    run = train(strategy, Look(), *callbacks, default_root_dir=tmp_path, **options)
    assert found == [(step, True) for step in range(1, 11)]
    assert_same(run, train())
