"""Garbage is collected at given steps only, and the switch is put back however a fit ends."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import Callback, ConfigurationError
from trainwright.callbacks import GarbageCollection


class Fails(Callback):
    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        raise RuntimeError("an accident")


@pytest.mark.parametrize("fails", [False, True])
def test_steps_are_those_that_were_asked_for(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, tuple[int, ...], bool]] = []
    collect = gc.collect
    task = RegressionTask()
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[GarbageCollection(every_n_steps=16, generation=0), *([Fails()] if fails else [])]
    )

    def note(*generation: int) -> int:
        seen.append((trainer.global_step, generation, gc.isenabled()))
        return collect(*generation)

    monkeypatch.setattr("trainwright.callbacks.garbage_collection.gc.collect", note)
    assert gc.isenabled()
    if fails:
        with pytest.raises(RuntimeError, match="an accident"):
            trainer.fit(task, regression_loader())
    else:
        trainer.fit(task, regression_loader())
    assert gc.isenabled()
    within = [(step, generation) for step, generation, enabled in seen if not enabled]
    assert within == [(16, (0,)), (32, (0,)), (48, (0,)), (64, (0,))]


@pytest.mark.parametrize("arguments", [{"every_n_steps": 0}, {"generation": 3}])
def test_wrong_arguments_are_errors(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="and generation 0, 1 or 2"):
        GarbageCollection(**arguments)
