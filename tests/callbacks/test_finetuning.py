"""Freezing and unfreezing, against a hand-written loop, on one process and on two, with a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import regression_loader
from trainwright import ConfigurationError, TaskModule, Trainer, seed_everything
from trainwright.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from trainwright.core.errors import TrainwrightWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*holds the state of a callback:UserWarning")
_EPOCHS, _UNFROZEN_AT = 4, 2


class Net(TaskModule):
    """A backbone with batch normalization, and a head; the optimizer gets what is trained at first."""

    def __init__(self, schedule: str = "none") -> None:
        super().__init__()
        seed_everything(3)
        self.schedule = schedule
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)
        if self.schedule == "none":
            return optimizer
        made = {
            "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            "factor": lambda: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5),
            "sequence": lambda: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1), torch.optim.lr_scheduler.StepLR(optimizer, 1)],
                milestones=[2],
            ),
        }
        return [optimizer], [made[self.schedule]()]


class Both(BaseFinetuning):
    """Unfreezes the first layer of the backbone in one epoch and its normalization in the next one."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[1], optimizer, lr=0.02)


def _trainer(folder: Path, callback: Any, *, saves: bool = True, **arguments: Any) -> Trainer:
    saver = ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, every_n_train_steps=1)
    arguments = {"max_epochs": _EPOCHS, "default_root_dir": folder, **arguments}
    return quiet_trainer(callbacks=[callback, saver] if saves else callback, **arguments)


def _resumed(folder: Path, step: int, callback: Any, net: Net, loader: Any = None, **arguments: Any) -> Net:
    (path,) = folder.glob(f"epoch=*-step={step}*")
    _trainer(folder, callback, saves=False, **arguments).fit(net, loader or regression_loader(32, 8), ckpt_path=path)
    return net


def _by_hand() -> Net:
    net = Net()
    net.backbone[0].requires_grad_(False)
    optimizer = torch.optim.Adam([*net.backbone[1].parameters(), *net.head.parameters()], lr=0.1)
    rate = 0.0
    for epoch in range(_EPOCHS):
        if epoch == _UNFROZEN_AT:
            net.backbone[0].requires_grad_(True)
            rate = 0.01
            optimizer.add_param_group({"params": list(net.backbone[0].parameters()), "lr": rate})
        elif epoch > _UNFROZEN_AT:
            rate = min(0.1, 2 * rate)
            optimizer.param_groups[-1]["lr"] = rate
        for inputs, targets in regression_loader(32, 8):
            optimizer.zero_grad()
            nn.functional.mse_loss(net.head(net.backbone(inputs)), targets).backward()
            optimizer.step()
    return net


def _assert_equal(net: nn.Module, expected: nn.Module) -> None:
    assert_equal_weights(weights_of(net), weights_of(expected))


@pytest.mark.slow
def test_a_backbone_is_trained_as_by_hand_and_a_resume_in_any_epoch_is_exact(tmp_path: Path) -> None:
    net = Net()
    _trainer(tmp_path, BackboneFinetuning(_UNFROZEN_AT)).fit(net, regression_loader(32, 8))
    _assert_equal(net, _by_hand())
    for step in (3, 10, 12):  # in the middle of epochs and at the start of one, before and after
        _assert_equal(_resumed(tmp_path, step, BackboneFinetuning(_UNFROZEN_AT), Net()), net)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["lambda", "factor", "sequence"])
def test_schedules_know_new_groups_and_a_resume_is_exact(schedule: str, tmp_path: Path) -> None:
    net = Net(schedule)
    trainer = _trainer(tmp_path, Both())
    trainer.fit(net, regression_loader(32, 8))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert len(rates) == 3
    if schedule in ("lambda", "factor"):  # added in epoch 1 and 2 with these rates, which stay
        assert rates[1:] == [0.1 * 0.5 / 10, 0.02]
    _assert_equal(_resumed(tmp_path, 10, Both(), Net(schedule)), net)


def _without_statistics() -> Net:  # they differ between processes
    net = Net()
    net.backbone[1] = nn.Identity()
    return net


def _rank(folder: Path, strategy: str) -> dict[str, torch.Tensor]:
    net, loader = _without_statistics(), DataLoader(regression_loader(32).dataset, batch_size=4)
    arguments = {"devices": 2, "strategy": strategy}
    _trainer(folder, BackboneFinetuning(_UNFROZEN_AT), **arguments).fit(net, loader)
    callback = BackboneFinetuning(_UNFROZEN_AT)
    _assert_equal(_resumed(folder, 10, callback, _without_statistics(), loader, **arguments), net)
    return weights_of(net)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.exhaustive), "fsdp"])
def test_two_ranks_train_as_one(strategy: str, tmp_path: Path) -> None:
    net = _without_statistics()
    _trainer(tmp_path / "one", BackboneFinetuning(_UNFROZEN_AT)).fit(net, regression_loader(32, 8))
    for found in run_distributed(_rank, 2, tmp_path / strategy, strategy, init=False):
        torch.testing.assert_close(found, weights_of(net))


class Headless(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    training_step, configure_optimizers = Net.training_step, Net.configure_optimizers


class All(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_a_backbone_that_is_in_the_optimizer_from_the_start_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(TrainwrightWarning, match="2 parameters to be unfrozen are in the optimizer already"):
        _trainer(tmp_path, BackboneFinetuning(0), saves=False, max_epochs=1).fit(All(), regression_loader(32, 8))


@pytest.mark.parametrize(
    ("task", "arguments", "text"),
    [
        (Headless, {}, "needs a module Headless.backbone"),
        (Net, {"strategy": "deepspeed"}, "Use strategy='ddp' or 'fsdp'"),
    ],
)
def test_what_cannot_be_is_an_error(task: Any, arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=text):
        _trainer(tmp_path, BackboneFinetuning(1), **arguments).fit(task(), regression_loader(32, 8))


def test_a_callback_of_an_earlier_run_begins_again_in_a_new_one() -> None:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=_UNFROZEN_AT, verbose=False)
    data = regression_loader(8, batch_size=4)
    quiet_trainer(max_epochs=_EPOCHS, callbacks=[callback]).fit(Net(), data)
    task = Net()
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback])
    trainer.fit(task, data)
    assert not any(parameter.requires_grad for parameter in task.backbone[0].parameters())
    assert len(trainer.optimizers[0].param_groups) == 1
