from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, regression_loader
from tests.trainer.runs import quiet_trainer


class _PartlyFrozen(RegressionTask):
    """Has a backbone that the user has put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.backbone.eval()
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(False)
        self.modes: list[tuple[str, bool, bool]] = []

    def _note(self, where: str) -> None:
        assert not any(module.training for module in self.backbone.modules())
        self.modes.append((where, self.training, self.net.training))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._note("train")
        return self.loss([self.backbone(batch[0]), batch[1]])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("validate")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        self._note("predict")
        return batch[0]


def test_modules_in_evaluation_mode_stay_so_and_the_others_follow_the_stage() -> None:
    task, trainer = _PartlyFrozen(), quiet_trainer(max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(task, regression_loader(1), regression_loader(1))
    trainer.test(task, regression_loader(1), verbose=False)
    trainer.predict(task, regression_loader(1))
    trains, evaluates = ("train", True, True), ("validate", False, False)
    in_fit = [evaluates, trains, evaluates, trains, evaluates]
    assert task.modes == [*in_fit, ("test", False, False), ("predict", False, False)]
    assert task.training
    assert task.net.training
    assert not task.backbone.training
    assert not any(parameter.requires_grad for parameter in task.backbone.parameters())


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize(("stage", "event"), [("test", "on_test_batch_end"), ("predict", "on_predict_batch_end")])
def test_evaluation_records_no_gradients_with_and_without_inference_mode(
    stage: str, event: str, inference_mode: bool
) -> None:
    recorder = RecordingCallback(event, note=lambda *_: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    trainer = quiet_trainer(inference_mode=inference_mode, callbacks=recorder)
    getattr(trainer, stage)(RegressionTask(), regression_loader(2))
    assert [modes for _, modes in recorder.notes] == [(False, inference_mode)] * 2
    assert torch.is_grad_enabled()


def test_freezing_and_unfreezing_return_the_task() -> None:
    task = RegressionTask()
    assert task.freeze() is task
    assert not task.training
    assert task.unfreeze() is task
    assert all(parameter.requires_grad for parameter in task.parameters())
