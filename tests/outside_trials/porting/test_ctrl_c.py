"""P20: Ctrl-C ends a script, and returns to a prompt."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import verify
from trainwright.core.errors import ConfigurationError


class _Interrupted(RegressionTask):
    """Ctrl-C comes in its fourth step, and in its second evaluation batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            signal.raise_signal(signal.SIGINT)
        return self.loss(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            signal.raise_signal(signal.SIGINT)


def test_a_script_does_not_go_on_with_a_model_that_is_half_trained(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_on_exception=True)
    trainer = quiet_trainer(max_epochs=2, callbacks=saver)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(_Interrupted(), regression_loader(8))
    assert trainer.interrupted
    (saved,) = tmp_path.glob("*step=3*")  # it was written before
    assert verify(saved) == []
    with pytest.raises(KeyboardInterrupt):
        trainer.test(_Interrupted(), regression_loader(8))


def test_it_returns_if_asked_to() -> None:
    trainer = quiet_trainer(max_epochs=2, on_interrupt="return")
    trainer.fit(_Interrupted(), regression_loader(8))
    assert trainer.interrupted
    assert trainer.test(_Interrupted(), regression_loader(8)) == []
    assert trainer.interrupted


def test_it_returns_to_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(_Interrupted(), regression_loader(8))
    assert trainer.interrupted
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(max_epochs=2, on_interrupt="raise").fit(_Interrupted(), regression_loader(8))


@pytest.mark.parametrize("wrong", ["stop", True, 1])
def test_another_word_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"on_interrupt=.* Write 'return' or 'raise'"):
        quiet_trainer(on_interrupt=wrong)
