from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RecordingCallback, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import find_checkpoints, read_checkpoint, set_fault_hook, verify
from trainwright.core.errors import Preempted, TrainwrightWarning


@pytest.fixture(autouse=True)
def _no_hook_left() -> Iterator[None]:
    yield
    set_fault_hook(None)


class FailOnce:
    """A fault hook by which one checkpoint cannot be written: the one with this number, counted from 0."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: list[Path] = []

    def __call__(self, event: str, path: Path) -> None:
        if path.name == "trainer.json" and path not in self.seen:
            self.seen.append(path)
        if event == "write" and self.seen[self.number :] == [path]:
            raise OSError(28, "No space left on device")


class Gate(Callback):
    """Holds the writing thread at its first write until the second step has ended, and notes what stood by then."""

    def __init__(self, folder: Path) -> None:
        self.opened = threading.Event()
        self.folder = folder
        self.found: list[int] = []

    def __call__(self, event: str, path: Path) -> None:
        if event == "write" and threading.current_thread() is not threading.main_thread():
            assert self.opened.wait(30)

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.state.step == 2:
            self.found = _steps_in(self.folder)
            self.opened.set()


def _fit(max_steps: int, *callbacks: Callback, task: RegressionTask | None = None, **options: Any) -> Any:
    trainer = quiet_trainer(max_steps=max_steps, callbacks=list(callbacks), num_sanity_val_steps=0, **options)
    trainer.fit(task or RegressionTask(), regression_loader())
    return trainer


def _steps_in(folder: Path) -> list[int]:
    return [found.manifest.step for found in find_checkpoints(folder)]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_reach_it(tmp_path: Path) -> None:
    gate, kept = Gate(tmp_path), RecordingCallback("on_train_step_end", note=lambda _, t: weights_of(t.task))
    set_fault_hook(gate)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    _fit(3, saver, kept, gate)
    assert gate.opened.is_set()
    assert gate.found == []  # two steps were done, and not a byte of the first checkpoint written
    checkpoints = find_checkpoints(tmp_path)
    assert [found.manifest.step for found in checkpoints] == [1, 2, 3]
    for found, (_, weights) in zip(checkpoints, kept.notes, strict=True):
        assert_equal_weights(dict(read_checkpoint(found.path).model or {}), weights)


class Fails(RegressionTask):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise ValueError("the first error")


def test_a_run_that_fails_still_publishes_what_was_being_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the first error"):
        _fit(20, ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1), task=Fails())
    assert _steps_in(tmp_path) == [3]


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_a_run_that_is_told_to_goes_on_without_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, async_save: bool
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    set_fault_hook(FailOnce(2))  # of step 2, the one that is called by its step
    with pytest.warns(TrainwrightWarning, match=r"No space left on device.*Training continues") as caught:
        trainer = _fit(4, saver, async_save=async_save, on_save_error="warn")
    assert len(caught) == 1
    assert trainer.state.step == 4
    found = find_checkpoints(tmp_path)
    assert [item.path.name for item in found if item.manifest.step in (3, 4)] == ["step=3", "step=4", "last"]
    assert all(verify(item.path) == [] for item in found)
    assert (tmp_path / "step=2").exists() is False
    assert saver.best_model_path == str(tmp_path / "step=4")


def test_a_preempted_run_whose_checkpoint_does_not_fit_on_the_disk_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Signalled(RegressionTask):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

    set_fault_hook(FailOnce(0))
    with pytest.raises(Preempted):
        _fit(9, ModelCheckpoint(tmp_path), task=Signalled(), on_save_error="warn")
    assert "the checkpoint could not be written: " in (said := capsys.readouterr().out)
    assert "No space left on device" in said
    assert find_checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_preempted_run_drops_a_write_that_outlasts_the_grace_and_keeps_the_earlier_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate(tmp_path)

    class Signalled(RegressionTask):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 1:
                self.trainer.run.saves.writer.wait()
                set_fault_hook(gate)
            if self.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    start_s = time.monotonic()
    dropped = pytest.warns(TrainwrightWarning, match="not written before the deadline and is dropped")
    with dropped, pytest.raises(Preempted):
        _fit(9, saver, task=Signalled(), preemption_grace=2)
    took_s = time.monotonic() - start_s
    assert "of preemption_grace are left" in capsys.readouterr().out
    for thread in threading.enumerate():
        if thread.name == "trainwright-checkpoint-exit":  # Python may exit within its next look
            thread.join(1.0)
            assert not thread.is_alive()
    gate.opened.set()
    assert took_s < 5
    assert _steps_in(tmp_path)[:1] == [1]


def test_a_preempted_run_that_was_about_to_roll_back_ends_without_the_rollback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Signalled(RegressionTask):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                self.trainer.request_rollback("the loss rises", before_step=2)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(max_steps=6, callbacks=[saver], val_check_interval=1)
    with pytest.raises(Preempted):
        trainer.fit(Signalled(), regression_loader(12, 2), regression_loader(4, 2))
    assert "the run was about to roll back: the loss rises" in capsys.readouterr().out
    assert trainer.num_rollbacks == 0
