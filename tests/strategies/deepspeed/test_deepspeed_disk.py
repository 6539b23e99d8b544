"""DeepSpeed on a disk: weights and states swap there, and a task trains as in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.deepspeed_operations import needs_operation
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, quiet_trainer, weights_of
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.strategies.deepspeed.placeholders import DummyOptim
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive, needs_operation("AsyncIOBuilder")]

WIDTH = 1500  # no multiple of a disk's block: see `keep_unaligned_gradients`


class Wide(TaskModule):
    """Nine million parameters, so that swapping pays: DeepSpeed leaves what is small on the host."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.net: Any = None
        self.named = named

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
            self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.net(batch)
        return output.square().mean() + output.mean()

    def configure_optimizers(self) -> Any:
        if self.named:
            return DummyOptim(self.parameters(), lr=1e-4, weight_decay=0.01)
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01)


def batches(number: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(number)]


def strategy(disk: Path) -> DeepSpeedStrategy:
    place = {"device": "nvme", "nvme_path": str(disk)}
    return DeepSpeedStrategy(
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 3_000_000,
                "offload_optimizer": place,
                "offload_param": {**place, "buffer_count": 8, "buffer_size": 3_000_000},
            },
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        }
    )


class Halfway(Callback):
    """Saves after the first epoch."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.checkpoint)


def run(folder: Path) -> dict[str, Any]:
    """Train, and continue from the middle, on the disk."""
    warnings.simplefilter("ignore")
    disk, checkpoint = folder / "disk", folder / "half"
    settings = {"devices": "auto", "max_epochs": 2, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0}
    recorder, halfway, task = StepRecorder(), Halfway(checkpoint), Wide(named=True)
    quiet_trainer(strategy=strategy(disk), callbacks=[recorder, halfway], **settings).fit(task, batches())
    continued = Wide(named=True)
    quiet_trainer(strategy=strategy(disk), **settings).fit(continued, batches(), ckpt_path=checkpoint)
    return {
        "losses": torch.tensor(recorder.losses), "weights": weights_of(task), "continued": weights_of(continued)
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch:UserWarning")
def test_weights_and_states_on_a_disk_train_save_and_continue(tmp_path: Path) -> None:
    first, second = run_distributed(run, 2, tmp_path, timeout=290, init=False)
    recorder, task = StepRecorder(), Wide(named=False)
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    quiet_trainer(callbacks=[recorder], **settings).fit(task, batches())
    losses = (first["losses"] + second["losses"]) / 2
    torch.testing.assert_close(losses, torch.tensor(recorder.losses), rtol=0, atol=1e-5)
    for found in (first, second):
        torch.testing.assert_close(found["weights"], weights_of(task), rtol=0, atol=1e-5)
        torch.testing.assert_close(found["continued"], found["weights"], rtol=0, atol=1e-5)
    alone = Wide(named=False)
    quiet_trainer(**settings).fit(alone, batches(), ckpt_path=tmp_path / "half")
    torch.testing.assert_close(weights_of(alone), weights_of(task), rtol=0, atol=1e-5)
