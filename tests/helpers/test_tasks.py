"""The shared tasks keep what other tests rely on: the same weights and data every time, and a faithful record."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.tasks import RecordingCallback, RegressionTask, regression_data, regression_loader
from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.callbacks.hook_table import HookTable


def test_two_tasks_start_from_the_same_weights_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = RegressionTask(), RegressionTask()
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_other_weights() -> None:
    assert not torch.equal(RegressionTask().net[0].weight, RegressionTask(seed=1).net[0].weight)


def test_the_data_is_the_same_every_time() -> None:
    first, second = regression_data(), regression_data()
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))
    assert len(regression_loader()) == 64


def test_the_task_learns() -> None:
    task = RegressionTask()
    optimizer = task.configure_optimizers()
    batch = list(regression_data().tensors)
    start = task.loss(batch).item()
    for _ in range(50):
        optimizer.zero_grad()
        task.loss(batch).backward()
        optimizer.step()
    assert task.loss(batch).item() < 0.5 * start


def test_a_recorder_listens_to_the_named_events_only() -> None:
    recorder = RecordingCallback("on_fit_start", "on_fit_end", note=lambda event, trainer: trainer)
    table = HookTable([recorder, Callback()], RegressionTask())
    listened = {event for event in EVENTS if getattr(table, event)}
    assert listened == {"on_fit_start", "on_fit_end"}
    for listener in (*table.on_fit_start, *table.on_fit_end):
        listener("the run", None)
    assert recorder.events == ["on_fit_start", "on_fit_end"]
    assert recorder.notes == [("on_fit_start", "the run"), ("on_fit_end", "the run")]


def test_a_recorder_of_everything_listens_to_every_event() -> None:
    table = HookTable([RecordingCallback()], RegressionTask())
    assert [event for event in EVENTS if not getattr(table, event)] == []


def test_an_event_that_does_not_exist_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="on_fit_begin"):
        RecordingCallback("on_fit_begin")
