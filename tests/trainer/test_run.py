"""A run is an object of its own: made for a stage, asked through the Trainer, sent nowhere."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError


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


class _Calls(Callback):
    """Call a verb of a Trainer (default: the one that fits) within a fit."""

    def __init__(self, verb: str, other: Any = None) -> None:
        self.verb, self.other = verb, other

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run = trainer.run
        with pytest.raises(ConfigurationError, match=rf"trainer\.{self.verb}\(\) was called while fit\(\) runs"):
            getattr(self.other or trainer, self.verb)(task, regression_loader(1, 2))
        assert trainer.run is run


@pytest.mark.parametrize("verb", ["fit", "predict"])
@pytest.mark.parametrize("other", [False, True])
def test_a_verb_within_a_fit_is_refused_and_the_fit_goes_on(verb: str, other: bool) -> None:
    calls = _Calls(verb, quiet_trainer() if other else None)
    trainer = fitted(RegressionTask(), regression_loader(4, 2), max_epochs=2, callbacks=[calls])
    assert trainer.global_step == 4
    assert trainer.state.finished


def test_what_a_run_knows_can_be_read_and_not_set() -> None:
    trainer = quiet_trainer()
    with pytest.raises(AttributeError, match="global_step is read-only"):
        trainer.global_step = 3
    with pytest.raises(AttributeError, match=r"pass Trainer\(limit_val_batches=3\)"):
        trainer.limit_val_batches = 3
    trainer.log_every_n_steps = 7
    assert trainer.settings.log_every_n_steps == trainer.log_every_n_steps == 7


def test_a_trainer_is_sent_without_its_run() -> None:
    trainer = fitted(RegressionTask(), regression_loader(4, 2), max_epochs=1)
    sent = pickle.loads(pickle.dumps(trainer))
    assert sent.global_step == 2
    assert sent.history.run_id == trainer.history.run_id
    assert sent.run.status.stage is None
    assert sent.model is None
    assert sent.run.engine.optimizers == []
    assert sent.state.fn == "fit"
    assert sent.state.finished
