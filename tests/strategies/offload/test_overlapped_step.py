"""Steps overlap with copies: no bit changes by that, and whoever writes weights meanwhile is heard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import assert_equal_weights
from tests.strategies.offload.overlapped import LateStream, assert_same, train, writer, writes
from tests.strategies.offload.test_training import Tiny
from trainwright import OffloadStrategy
from trainwright.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    Throughput,
    Timer,
)
from trainwright.callbacks.callback import Callback
from trainwright.strategies.offload import prefetch, streaming


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all copies made as late as can be. Without it, they are made as early as can be."""
    for module in (streaming, prefetch):
        monkeypatch.setattr(module, "CopyStream", LateStream)
    yield
    LateStream.all.clear()


LISTENERS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "averages": lambda: [EMAWeightAveraging(decay=0.5)],
}


@functools.cache
def plainly(listener: str, accumulate: int, clip: float | None) -> Any:
    return train("single", *LISTENERS[listener](), accumulate_grad_batches=accumulate, gradient_clip_val=clip)


@pytest.mark.slow
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    ("parameters", "state", "listener"),
    [("device", "cpu", "none"), ("disk", "disk", "none"), ("cpu", "cpu", "averages")],
)
def test_every_bit_is_that_of_training_in_one_place(parameters: Any, state: Any, listener: str, tmp_path: Path) -> None:
    for accumulate, clip in ((1, None), (3, None), (3, 0.5)):
        strategy = OffloadStrategy(parameters, state, stream=True, offload_folder=tmp_path)
        found = train(strategy, *LISTENERS[listener](), accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        assert_same(found, plainly(listener, accumulate, clip))


class SharedNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("state", ["cpu", "disk"])
def test_an_optimizer_that_joins_its_parameters_steps_once(state: Any) -> None:
    def task() -> Tiny:
        made = Tiny()
        made.configure_optimizers = lambda: SharedNorm(made.parameters(), lr=0.1, momentum=0.9)  # type: ignore[method-assign]
        return made

    assert_same(train(OffloadStrategy("device", state, stream=True), task=task()), train(task=task()))


EVENTS = ("on_train_step_end", "on_validation_epoch_start")


@pytest.mark.slow
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

    class Constraining(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            with torch.no_grad():
                for parameter in self.blocks.parameters():
                    parameter.mul_(0.9)
            return super().training_step(batch, batch_idx)

    for kind in (Writing, Scheduling, Constraining):
        assert_same(train(OffloadStrategy("device", stream=True), task=kind()), train(task=kind()))


@pytest.mark.usefixtures("late")
def test_a_task_may_run_backward_and_zero_gradients_itself_and_leave_a_micro_batch_out() -> None:
    class LeavesOut(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return None if self.training and batch_idx == 1 else super().training_step(batch, batch_idx)

    class Own(LeavesOut):
        def backward(self, loss: torch.Tensor) -> None:
            (2 * loss).backward()  # type: ignore[no-untyped-call]  # torch has no types here

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()

    for kind in (LeavesOut, Own):
        found = train(OffloadStrategy("cpu", stream=True), task=kind(), accumulate_grad_batches=3)
        assert_same(found, train(task=kind(), accumulate_grad_batches=3))


def test_what_comes_with_a_run_by_default_only_reads(tmp_path: Path) -> None:
    found: list[tuple[int, bool]] = []

    class Look(Callback):
        reads_only = True

        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            units = trainer.strategy.weight_stream.all_units
            found.append((trainer.global_step, all(unit.is_current for unit in units)))

    options: dict[str, Any] = {"enable_checkpointing": True, "enable_progress_bar": True, "logger": "csv"}
    callbacks = [
        EarlyStopping("val_loss"), LearningRateMonitor(), ModelCheckpoint(every_n_train_steps=2), Throughput(), Timer()
    ]  # fmt: skip
    strategy = OffloadStrategy("device", stream=True)
    run = train(strategy, Look(), *callbacks, default_root_dir=tmp_path, **options)
    assert found == [(step, True) for step in range(1, 11)]
    assert_same(run, train())


@pytest.mark.usefixtures("late")
def test_a_group_is_looked_at_when_all_its_gradients_are_there() -> None:
    class Odd(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            # The loss is finite, and the gradient that is computed last is NaN.
            return loss + (0 * self.embed.weight).sum().sqrt() if batch_idx == 2 else loss

    options: dict[str, Any] = {"on_nonfinite": "skip"}
    with pytest.warns(UserWarning, match="not finite"):
        found = train(OffloadStrategy("device", stream=True), task=Odd(), **options)
    with pytest.warns(UserWarning, match="not finite"):
        wanted = train(task=Odd(), **options)
    assert found[2].skipped_batches == wanted[2].skipped_batches
    assert_equal_weights(found[1], wanted[1])
