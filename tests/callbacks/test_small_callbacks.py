from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import Callback, ConfigurationError
from trainwright.callbacks import GarbageCollection
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler


class Fails(Callback):
    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        raise RuntimeError("an accident")


def test_steps_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, tuple[int, ...], bool]] = []
    collect = gc.collect
    task = RegressionTask()
    trainer = quiet_trainer(max_epochs=1, callbacks=[GarbageCollection(every_n_steps=16, generation=0), Fails()])

    def note(*generation: int) -> int:
        seen.append((trainer.global_step, generation, gc.isenabled()))
        return collect(*generation)

    monkeypatch.setattr("trainwright.callbacks.garbage_collection.gc.collect", note)
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="an accident"):
        trainer.fit(task, regression_loader())
    assert gc.isenabled()
    within = [(step, generation) for step, generation, enabled in seen if not enabled]
    assert within == [(16, (0,)), (32, (0,)), (48, (0,)), (64, (0,))]


def test_a_task_that_optimizes_by_hand_is_refused(tmp_path: Path) -> None:
    run = FakeRun([GradientAccumulationScheduler({0: 4})], tmp_path)
    run.task.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        run.fit(epochs=1, batches=1)
