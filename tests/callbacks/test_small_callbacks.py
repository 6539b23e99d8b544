from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.callbacks.fake_run import FakeRun
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import ConfigurationError
from trainwright.callbacks import GarbageCollection, LambdaCallback
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler


def test_steps_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, tuple[int, ...], bool]] = []
    collect = gc.collect
    task = RegressionTask()
    fails = LambdaCallback(on_train_epoch_end=lambda trainer, task: 1 / 0)
    trainer = quiet_trainer(max_epochs=1, callbacks=[GarbageCollection(every_n_steps=16, generation=0), fails])

    def note(*generation: int) -> int:
        seen.append((trainer.global_step, generation, gc.isenabled()))
        return collect(*generation)

    monkeypatch.setattr("trainwright.callbacks.garbage_collection.gc.collect", note)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(task, regression_loader())
    assert gc.isenabled()
    within = [(step, generation) for step, generation, enabled in seen if not enabled]
    assert within == [(16, (0,)), (32, (0,)), (48, (0,)), (64, (0,))]


def test_a_task_that_optimizes_by_hand_is_refused(tmp_path: Path) -> None:
    run = FakeRun([GradientAccumulationScheduler({0: 4})], tmp_path)
    run.task.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        run.fit(epochs=1, batches=1)
