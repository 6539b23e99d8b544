"""A run is an object of its own: made for a stage, asked through the Trainer, sent nowhere."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback


class _Notes(Callback):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, Any]] = []

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self.heard.append((trainer, trainer.run))


def test_each_stage_has_a_run_of_its_own_and_goes_on_with_one_history() -> None:
    trainer, task, notes = quiet_trainer(max_epochs=1), RegressionTask(), _Notes()
    idle = trainer.run
    trainer.callbacks.append(notes)  # between two verbs: it counts from the next one on
    trainer.fit(task, regression_loader(4, 2))
    fitted = trainer.run
    assert notes.heard == [(trainer, fitted)]
    trainer.validate(task, regression_loader(4, 2), verbose=False)
    assert len({id(run) for run in (idle, fitted, trainer.run)}) == 3
    assert trainer.run.history is fitted.history is idle.history
    assert trainer.global_step == fitted.state.step == 2
    trainer.max_epochs = 2
    trainer.fit(task, regression_loader(4, 2))
    assert [run for _, run in notes.heard] == [fitted, trainer.run]
    assert trainer.global_step == 4


def test_what_a_run_knows_can_be_read_and_not_set() -> None:
    trainer = quiet_trainer()
    with pytest.raises(AttributeError, match="global_step can be read, not set"):
        trainer.global_step = 3
    with pytest.raises(AttributeError, match=r"pass Trainer\(limit_val_batches=3\)"):
        trainer.limit_val_batches = 3
    trainer.log_every_n_steps = 7
    assert trainer.settings.log_every_n_steps == trainer.log_every_n_steps == 7


def test_a_trainer_is_sent_without_its_run() -> None:
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(RegressionTask(), regression_loader(4, 2))
    sent = pickle.loads(pickle.dumps(trainer))
    assert sent.global_step == 2
    assert sent.history.run_id == trainer.history.run_id
    assert sent.run.stage is None
    assert sent.model is None
    assert sent.run.optimizers == []
    assert sent.state.fn == "fit"
    assert sent.state.finished


def test_a_search_leaves_the_run_as_it_was() -> None:
    class Search(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            self.before, step = trainer.run, trainer.global_step
            with trainer.rehearse(alone=False) as rehearsal:
                self.losses: list[float] = []
                self.during: list[Any] = []

                def after(loss: float) -> bool:
                    self.losses.append(loss)
                    self.during.append(trainer.run)
                    return False

                assert rehearsal.train(3, before_step=lambda number: None, after_step=after) == 3
            assert trainer.run is self.before
            assert trainer.global_step == step

    search = Search()
    quiet_trainer(max_epochs=1, callbacks=[search]).fit(RegressionTask(), regression_loader(4, 2))
    assert len(search.losses) == 3
    assert all(run is not search.before and run.strategy is search.before.strategy for run in search.during)
