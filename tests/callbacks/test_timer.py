from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun, pass_time
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.timer import Timer
from trainwright.core.errors import ConfigurationError, TrainwrightWarning


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


def test_the_time_of_steps_that_a_rollback_discards_counts(tmp_path: Path) -> None:
    class RollsBack(RegressionTask):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.05)
            if self.global_step == 8 and self.trainer.num_rollbacks == 0:
                self.trainer.request_rollback("the loss rises", before_step=1)

    timer = Timer({"seconds": 0.6})
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(max_steps=40, callbacks=[saver, timer])
    with pytest.warns(TrainwrightWarning, match="Rolled back"):
        trainer.fit(RollsBack(), regression_loader(160, 2))
    assert trainer.num_rollbacks == 1
    assert trainer.global_step < 8  # the 8 steps before took most of the time
    assert timer.time_elapsed() >= 0.6


def test_an_unknown_stage_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'validate'"):
        Timer().time_elapsed("validation")


def test_by_epoch_it_waits_for_the_end_of_the_epoch(tmp_path: Path, now: list[float]) -> None:
    run = FakeRun([Timer({"seconds": 5}, interval="epoch", verbose=False)], tmp_path)
    run.fit(epochs=5, batches=4, on_step=pass_time(now, 2.0))
    assert (run.state.step, run.printed) == (4, [])
