from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from tests.trainer.runs import MemoryLogger, quiet_trainer
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import verify
from trainwright.core.errors import Preempted, TrainwrightWarning
from trainwright.core.run import Stage


class _RecordsEndings(Callback):
    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []
        self.torn_down: list[str] = []

    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)

    def teardown(self, trainer: Any, task: Any, stage: Stage) -> None:
        self.torn_down.append(stage)


class _FailsAt(RegressionTask):
    def __init__(self, epoch: int, batch_idx: int, fail: Any) -> None:
        super().__init__()
        self.at = (epoch, batch_idx)
        self.fail = fail

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if (self.current_epoch, batch_idx) == self.at:
            self.fail()
        return self.loss(batch)


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class _InterruptedTwice(_FailsAt):
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            self.fail()


def test_ctrl_c_ends_the_fit_quietly_and_callbacks_are_called() -> None:
    endings, logger = _RecordsEndings(), MemoryLogger()
    trainer = quiet_trainer(max_epochs=3, callbacks=endings, logger=logger, on_interrupt="return")
    trainer.fit(_FailsAt(0, 3, _press_ctrl_c), regression_loader(8))
    assert (trainer.interrupted, trainer.global_step) == (True, 3)
    assert [type(error) for error in endings.exceptions] == [KeyboardInterrupt]
    assert endings.torn_down == ["fit"]
    assert logger.statuses == ["interrupted"]
    trainer.fit(RegressionTask(), regression_loader(8))
    assert (trainer.interrupted, trainer.global_step, trainer.current_epoch) == (False, 24, 3)


def test_another_error_is_raised_unchanged_and_everyone_endings_of_it() -> None:
    error = ValueError("the user's own")

    def fail() -> None:
        raise error

    endings, logger = _RecordsEndings(), MemoryLogger()
    trainer = quiet_trainer(max_epochs=3, callbacks=endings, logger=logger)
    with pytest.raises(ValueError, match=r"the user's own") as caught:
        trainer.fit(_FailsAt(0, 3, fail), regression_loader(8))
    assert caught.value is error
    assert endings.exceptions == [error]
    assert logger.statuses == ["failed"]
    assert not trainer.interrupted


@pytest.mark.parametrize(("place", "status"), [("setup", None), ("on_train_end", "success"), ("teardown", "success")])
def test_a_signal_before_and_after_training_ends_the_fit_in_order(place: str, status: str | None) -> None:
    def signalled(self: Any, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return getattr(RegressionTask, place)(self, *args)

    task = type("Signalled", (RegressionTask,), {place: signalled})()
    endings, logger = _RecordsEndings(), MemoryLogger()
    trainer = quiet_trainer(max_epochs=1, callbacks=[endings], logger=logger)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(Preempted) as end:
        trainer.fit(task, regression_loader(2))
    signal.signal(signal.SIGTERM, before)
    assert (end.value.code, end.value.signal_name) == (143, "SIGTERM")
    assert endings.torn_down == ["fit"]
    assert logger.statuses == ([] if status is None else [status])


def test_ctrl_c_is_raised_in_a_script(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_on_exception=True)
    trainer = quiet_trainer(max_epochs=2, callbacks=saver)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(_InterruptedTwice(0, 3, _press_ctrl_c), regression_loader(8))
    assert trainer.interrupted
    (saved,) = tmp_path.glob("*step=3*")  # it was written before
    assert verify(saved) == []
    with pytest.raises(KeyboardInterrupt):
        trainer.test(_InterruptedTwice(0, 3, _press_ctrl_c), regression_loader(8))


def test_a_callback_that_fails_while_it_endings_of_an_error_does_not_hide_it() -> None:
    class Clumsy(Callback):
        def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
            raise RuntimeError("clumsy")

    endings = _RecordsEndings()
    trainer = quiet_trainer(max_epochs=1, callbacks=[Clumsy(), endings])
    with (
        pytest.warns(TrainwrightWarning, match=r"on_exception itself failed: RuntimeError: clumsy"),
        pytest.raises(ZeroDivisionError),
    ):
        trainer.fit(_FailsAt(0, 1, lambda: 1 / 0), regression_loader(4))
    assert len(endings.exceptions) == 1
