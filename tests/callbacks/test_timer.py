from __future__ import annotations

from pathlib import Path

import pytest

from tests.callbacks.fake_run import FakeRun, pass_time
from trainwright.callbacks.timer import Timer
from trainwright.core.errors import ConfigurationError


def test_it_stops_after_the_step_in_which_time_is_up(tmp_path: Path, now: list[float]) -> None:
    run = FakeRun([Timer({"seconds": 5})], tmp_path)
    run.fit(epochs=1, batches=10, on_step=pass_time(now, 2.0))
    assert run.state.step == 3
    assert run.stops == [(0, "Timer: the 5 s of training are over.")]
    assert run.printed == ["Timer: the 5 s of training are over."]


def test_the_time_used_counts_on_after_a_resume_and_the_time_between_does_not(tmp_path: Path, now: list[float]) -> None:
    first = Timer({"seconds": 10})
    FakeRun([first], tmp_path).fit(epochs=1, batches=3, on_step=pass_time(now, 2.0))
    state = first.state_dict()
    now[0] += 1000
    second = Timer({"seconds": 10})
    second.load_state_dict(state)
    run = FakeRun([second], tmp_path)
    run.fit(epochs=1, batches=10, on_step=pass_time(now, 2.0))
    assert (run.state.step, second.time_elapsed()) == (2, 10.0)


def test_an_unknown_stage_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'validate'"):
        Timer().time_elapsed("validation")


def test_by_epoch_it_waits_for_the_end_of_the_epoch(tmp_path: Path, now: list[float]) -> None:
    run = FakeRun([Timer({"seconds": 5}, interval="epoch", verbose=False)], tmp_path)
    run.fit(epochs=5, batches=4, on_step=pass_time(now, 2.0))
    assert (run.state.step, run.printed) == (4, [])
