"""Local SGD: steps of each rank's own, averages every so many, and whatever is evaluated or saved is an average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_data, regression_loader
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError
from trainwright.strategies import LocalSGDStrategy

_STEPS = 3  # between two averages
_NUM, _NUM_BY_HAND = 43, 40  # samples: rank 1's last group is short in the first


class Task(RegressionTask):
    """Has a momentum, and a buffer that each rank moves in its own way."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, momentum=0.9)
        self.register_buffer("moved", torch.zeros(1))
        self.net[0].bias.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].bias.requires_grad_(self.current_epoch == 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.moved.add_(1 + self.global_rank)
        return super().training_step(batch, batch_idx)


class ByHand(Task):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()


def train(task: Task, ckpt_path: str | None = None, **arguments: Any) -> Any:
    """Train two epochs on this rank; one sample a micro-batch, two in a step."""
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, **arguments}
    if task.automatic_optimization:
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **settings}
    trainer = quiet_trainer(devices="auto", strategy=LocalSGDStrategy(_STEPS), **settings)
    trainer.fit(task, regression_loader(_NUM if task.automatic_optimization else _NUM_BY_HAND), ckpt_path=ckpt_path)
    return trainer


def by_hand(num: int) -> dict[str, torch.Tensor]:
    """Do the same in plain PyTorch. Collective."""
    task, data = Task(), regression_data(num)
    optimizer, step = task.configure_optimizers(), 0
    mine = [[part.unsqueeze(0) for part in data[i]] for i in range(dist.get_rank(), num, 2)]

    def average() -> None:
        for parameter in task.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= 2

    for epoch in range(2):
        task.net[0].bias.requires_grad_(epoch == 1)
        for start in range(0, len(mine), 2):
            optimizer.zero_grad()
            group = mine[start : start + 2]
            for batch in group:
                (task.loss(batch) / len(group)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(task.parameters(), 0.5)
            optimizer.step()
            step += 1
            if step % _STEPS == 0:
                average()
    average()
    return weights_of(task)


def _train_all(folder: Path) -> dict[str, Any]:
    task, manual = Task(), ByHand()
    train(task)
    train(manual)
    found = {"ours": (weights_of(task), by_hand(_NUM)), "manual": (weights_of(manual), by_hand(_NUM_BY_HAND))}
    # Saves are points of average: the run that is compared with makes the same ones.
    saver = {"every_n_train_steps": 5, "save_top_k": -1}
    whole, half = Task(), Task()
    train(whole, callbacks=[ModelCheckpoint(folder / "whole", **saver)])
    train(half, callbacks=[ModelCheckpoint(folder / "half", **saver)], max_steps=10)
    resumed = Task()
    path = str(next(p for p in sorted((folder / "half").iterdir()) if "step=5" in p.name))
    train(resumed, path, callbacks=[ModelCheckpoint(folder / "half", **saver)])
    return found | {"whole": weights_of(whole), "resumed": weights_of(resumed), "path": path}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_train_all, 2, tmp_path_factory.mktemp("local"), timeout=120)


@pytest.mark.distributed
def test_it_is_the_loop_that_one_would_write(runs: list[dict[str, Any]]) -> None:
    for of_rank in runs:
        for name in ("ours", "manual"):
            found, expected = ({key: value for key, value in w.items() if key != "moved"} for w in of_rank[name])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.distributed
def test_ranks_end_equal_with_rank_zeros_buffers(runs: list[dict[str, Any]]) -> None:
    assert_equal_weights(runs[0]["ours"][0], runs[1]["ours"][0])
    assert runs[0]["ours"][0]["moved"] == _NUM + 1


@pytest.mark.distributed
def test_a_resume_goes_on_as_the_run_that_saved(runs: list[dict[str, Any]]) -> None:
    assert_equal_weights(runs[0]["whole"], runs[0]["resumed"])
    assert_equal_weights(runs[1]["whole"], runs[1]["resumed"])
    snapshot = read_checkpoint(Path(runs[0]["path"]))
    assert snapshot.state["step"] % _STEPS != 0


@pytest.mark.parametrize("steps", [0, True, "8"])
def test_a_number_of_steps_that_is_none_is_an_error(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="local_sgd_steps"):
        LocalSGDStrategy(steps)


def test_a_scaled_loss_is_refused_at_construction() -> None:
    with pytest.raises(ConfigurationError, match="bf16-mixed"):
        quiet_trainer(devices=2, strategy="local_sgd", precision="16-mixed")
