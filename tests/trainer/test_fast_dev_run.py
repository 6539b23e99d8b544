"""A fast development run keeps the callbacks that would save or stop: programs ask them for paths afterwards."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import EarlyStopping, ModelCheckpoint


def test_callbacks_that_save_or_stop_are_there_and_do_nothing(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", monitor="never_logged", save_last=True, save_on_exception=True)
    stopper = EarlyStopping("never_logged")
    trainer = quiet_trainer(fast_dev_run=2, callbacks=[saver, stopper], default_root_dir=tmp_path)
    task = RegressionTask()
    trainer.fit(task, regression_loader(), regression_loader())
    assert trainer.checkpoint_callback is saver
    assert trainer.early_stopping_callback is stopper
    assert (saver.best_model_path, saver.last_model_path) == ("", "")
    trainer.test(task, regression_loader(), ckpt_path=saver.best_model_path or None, verbose=False)
    assert list(tmp_path.iterdir()) == []
