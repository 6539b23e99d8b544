"""EarlyStopping under the Trainer: in which epoch a run ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.early_stopping import EarlyStopping


class _Worsening(RegressionTask):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", float(self.global_step))


def _stopped_early() -> tuple[int, int, int]:
    record = RecordingCallback("on_validation_start")
    trainer = quiet_trainer(
        devices="auto",
        max_epochs=3,
        val_check_interval=2,
        num_sanity_val_steps=0,
        callbacks=[EarlyStopping("val_loss", patience=2), record],
    )
    trainer.fit(_Worsening(), regression_loader(40, 2), regression_loader(4, 2))
    return trainer.global_step, len(record.events), trainer.current_epoch


def test_early_stopping_within_an_epoch_stops_at_the_step_of_the_request() -> None:
    assert _stopped_early() == (6, 3, 1)


@pytest.mark.distributed
def test_two_ranks_stop_at_the_step_of_the_request() -> None:
    assert run_distributed(_stopped_early, 2, init=False) == [(6, 3, 1)] * 2


class _StopsAtSafePoint(Callback):
    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == self.step:
            trainer.at_step_end(partial(self._stop, trainer))

    def _stop(self, trainer: Any) -> None:
        if self.how == "request":
            trainer.request_stop("enough")
        else:
            trainer.should_stop = True


@pytest.mark.parametrize("how", ["request", "attribute"])
def test_an_action_at_a_safe_point_stops_at_its_step(how: str) -> None:
    trainer = fitted(RegressionTask(), regression_loader(10), max_epochs=2, callbacks=_StopsAtSafePoint(3, how))
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
