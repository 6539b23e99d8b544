"""Timer: when it stops, and what it counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.timer import Timer
from trainwright.core.errors import ConfigurationError


class Clock:
    """Stands for `time.monotonic`; `tick` is a function for `FakeRun.fit`."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 100.0
        self.step_s = step_s

    def __call__(self) -> float:
        return self.now_s

    def tick(self, run: Any) -> None:
        self.now_s += self.step_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(step_s=2.0)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_it_stops_after_the_step_in_which_time_is_up(tmp_path: Path, clock: Clock) -> None:
    run = FakeRun([Timer({"seconds": 5})], tmp_path)
    run.fit(epochs=1, batches=10, on_step=clock.tick)
    assert run.state.step == 3
    assert run.stops == [(0, "Timer: the 5 s of training are over.")]
    assert run.printed == ["Timer: the 5 s of training are over."]


def test_the_time_used_counts_on_after_a_resume_and_the_time_between_does_not(tmp_path: Path, clock: Clock) -> None:
    first = Timer({"seconds": 10})
    FakeRun([first], tmp_path).fit(epochs=1, batches=3, on_step=clock.tick)
    state = first.state_dict()
    clock.now_s += 1000
    second = Timer({"seconds": 10})
    second.load_state_dict(state)
    run = FakeRun([second], tmp_path)
    run.fit(epochs=1, batches=10, on_step=clock.tick)
    assert (run.state.step, second.time_elapsed()) == (2, 10.0)


def test_an_unknown_stage_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'validate'"):
        Timer().time_elapsed("validation")


def test_by_epoch_it_waits_for_the_end_of_the_epoch(tmp_path: Path, clock: Clock) -> None:
    run = FakeRun([Timer({"seconds": 5}, interval="epoch", verbose=False)], tmp_path)
    run.fit(epochs=5, batches=4, on_step=clock.tick)
    assert (run.state.step, run.printed) == (4, [])
