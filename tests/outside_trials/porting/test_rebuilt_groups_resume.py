"""A run whose callback added parameter groups resumes: the callback rebuilds them, then optimizers get their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import Callback
from trainwright.core.errors import CheckpointError, TaskError


class _Head(RegressionTask):
    """Trains its last layer; the first one comes later."""

    def __init__(self) -> None:
        super().__init__(momentum=0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[3].parameters(), lr=self.lr, momentum=self.momentum)


class _Unfreeze(Callback):
    """Adds the first layer as a group in the second epoch."""

    def __init__(self, rebuilds: bool = True) -> None:
        self.added = False
        self.rebuilds = rebuilds

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.added}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.added = state_dict["added"]

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        if self.added and self.rebuilds:
            self._add(trainer, task)

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == 1 and not self.added:
            self.added = True
            self._add(trainer, task)

    def _add(self, trainer: Any, task: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": list(task.net[0].parameters()), "lr": 0.01})


def _runs(folder: Path, strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    options: dict[str, Any] = {"devices": "auto", "strategy": strategy, "default_root_dir": folder}
    whole = _Head()
    quiet_trainer(max_epochs=3, callbacks=_Unfreeze(), **options).fit(whole, regression_loader(16, 2))
    first = quiet_trainer(max_epochs=2, callbacks=_Unfreeze(), **options)
    first.fit(_Head(), regression_loader(16, 2))
    first.save_checkpoint(folder / "saved")
    resumed, trainer = _Head(), quiet_trainer(max_epochs=3, callbacks=_Unfreeze(), **options)
    trainer.fit(resumed, regression_loader(16, 2), ckpt_path=folder / "saved")
    return weights_of(whole), weights_of(resumed)


def test_a_run_with_a_group_that_was_added_resumes_exactly(tmp_path: Path) -> None:
    assert_equal_weights(*_runs(tmp_path, "auto"))


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_resume_with_a_group_that_was_added(strategy: str, tmp_path: Path) -> None:
    for whole, resumed in run_distributed(_runs, 2, tmp_path, strategy, init=False, timeout=300):
        torch.testing.assert_close(whole, resumed)


def _added_under(strategy: str) -> str:
    task = _Head()
    with pytest.raises(TaskError) as refused:
        quiet_trainer(devices="auto", strategy=strategy, max_epochs=3, callbacks=_Unfreeze()).fit(
            task, regression_loader(16, 2)
        )
    return str(refused.value)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_an_engine_that_cannot_take_a_group_refuses_it_when_it_is_added(strategy: str) -> None:
    for text in run_distributed(_added_under, 2, strategy, init=False, timeout=300):
        assert "a parameter group was added to _Head's SGD" in text
        assert "call fit once for each training phase" in text


def test_groups_that_nobody_rebuilds_are_an_error(tmp_path: Path) -> None:
    first = quiet_trainer(max_epochs=2, callbacks=_Unfreeze())
    first.fit(_Head(), regression_loader(8))
    first.save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError):
        quiet_trainer(max_epochs=3, callbacks=_Unfreeze(rebuilds=False)).fit(
            _Head(), regression_loader(8), ckpt_path=tmp_path / "saved"
        )


def test_callbacks_have_their_states_before_optimizers_have_theirs(tmp_path: Path) -> None:
    first = quiet_trainer(max_epochs=2, callbacks=_Unfreeze())
    first.fit(_Head(), regression_loader(8))
    first.save_checkpoint(tmp_path / "saved")
    momenta: list[bool] = []

    class Looks(_Unfreeze):
        state_key = "_Unfreeze"

        def setup(self, trainer: Any, task: Any, stage: Any) -> None:
            self.trainer = trainer

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            momenta.append(bool(self.trainer.optimizers[0].state))

        def on_fit_end(self, trainer: Any, task: Any) -> None:
            momenta.append(bool(trainer.optimizers[0].state))

    quiet_trainer(max_epochs=2, callbacks=Looks()).fit(_Head(), regression_loader(8), ckpt_path=tmp_path / "saved")
    assert momenta == [False, True]
