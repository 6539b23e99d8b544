"""Lightning's argument `weights_only`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a full checkpoint of two steps."""
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(RegressionTask(), regression_loader(8))
    return trainer.save_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("weights_only", [None, False, True])
def test_weights_only_does_not_change_how_a_fit_resumes(checkpoint: Path, weights_only: bool | None) -> None:
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(RegressionTask(), regression_loader(8), ckpt_path=checkpoint, weights_only=weights_only)
    assert (trainer.global_step, trainer.resumed) == (3, True)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluations_accept_weights_only(checkpoint: Path, verb: str) -> None:
    trainer = quiet_trainer()
    getattr(trainer, verb)(RegressionTask(), regression_loader(8), ckpt_path=checkpoint, weights_only=True)
    assert isinstance(RegressionTask.load_from_checkpoint(checkpoint, weights_only=True), RegressionTask)
