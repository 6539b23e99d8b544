"""With its default bounds the range test suggests a rate that trains well, not the beginning of the range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.runs import quiet_trainer
from trainwright.callbacks import LearningRateFinder
from trainwright.callbacks.lr_finder import LRFinder
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.trainer.search.tuner import Tuner


class _Problem(TaskModule):
    def __init__(self, net: nn.Module, loss: Any, optimizer: Any, lr: float = 1.0) -> None:
        super().__init__()
        self.net, self.loss, self.optimizer, self.lr = net, loss, optimizer, lr

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        found: torch.Tensor = self.loss(outputs.flatten(0, -2), targets.flatten(0, outputs.dim() - 2))
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.optimizer(self.parameters(), lr=self.lr)
        return made


def _regression(batch_size: int = 64) -> tuple[_Problem, DataLoader[Any]]:
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs @ torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    return _Problem(nn.Linear(8, 1), mse_loss, torch.optim.SGD), DataLoader(
        TensorDataset(inputs, targets), batch_size, shuffle=True
    )


def _characters() -> tuple[_Problem, DataLoader[Any]]:
    text = "".join(f"{a} plus {b} is {a + b}, and so {b} plus {a} is {a + b}. " for a in range(12) for b in range(12))
    codes = torch.tensor([sorted(set(text)).index(character) for character in text])
    windows = codes[: len(codes) // 16 * 16 - 16].view(-1, 16), codes[1 : len(codes) // 16 * 16 - 15].view(-1, 16)
    size = int(codes.max()) + 1
    net = nn.Sequential(nn.Embedding(size, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, size))
    return _Problem(net, cross_entropy, torch.optim.AdamW), DataLoader(TensorDataset(*windows), 16, shuffle=True)


def _digits() -> tuple[_Problem, DataLoader[Any]]:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return _Problem(net, cross_entropy, torch.optim.AdamW), DataLoader(data, 32, shuffle=True)


# The bounds: rates at which 200 steps take the loss to a fiftieth (regression), or near the lowest that any rate gives.
@pytest.mark.parametrize(
    ("problem", "lowest", "highest"),
    [
        pytest.param(lambda: _regression(64), 5e-3, 3e-1, id="regression-without-noise"),
        pytest.param(lambda: _regression(8), 5e-3, 3e-1, id="regression-in-small-batches"),
        pytest.param(_characters, 1e-3, 3e-1, id="characters"),
        pytest.param(_digits, 3e-3, 1e-1, id="digits"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_bounds_give_a_rate_that_is_known_to_be_good(
    problem: Any, lowest: float, highest: float, seed: int
) -> None:
    torch.manual_seed(seed)
    task, loader = problem()
    found = Tuner(quiet_trainer(max_epochs=100)).lr_find(task, loader)
    assert found is not None
    assert lowest <= task.lr <= highest
    assert task.lr == found.suggestion()


@pytest.mark.parametrize(
    ("problem", "bounds", "says"),
    [
        (_characters, {"min_lr": 1e-8, "max_lr": 1e-2}, "at the end of the tested range.*Increase max_lr"),
        (_regression, {"min_lr": 1e-8, "max_lr": 1e-4}, "slope there is not larger than the noise.*Increase max_lr"),
        (_regression, {"min_lr": 0.02, "max_lr": 1.0}, "at the beginning of the tested range.*Decrease min_lr"),
    ],
)
def test_a_suggestion_at_the_edge_of_the_range_or_out_of_noise_is_a_warning(
    problem: Any, bounds: dict[str, float], says: str
) -> None:
    torch.manual_seed(0)
    task, loader = problem()
    with pytest.warns(TrainwrightWarning, match=says) as told:
        Tuner(quiet_trainer(max_epochs=100)).lr_find(task, loader, **bounds)
    assert len(told) == 1
    assert bounds["min_lr"] < task.lr < bounds["max_lr"]


def test_a_loss_that_never_falls_gives_no_rate_and_leaves_the_attribute() -> None:
    task, loader = _regression()
    task.loss = lambda outputs, targets: 0 * mse_loss(outputs, targets) + 1.0
    with pytest.warns(TrainwrightWarning, match=r"does not fall.*lr is unchanged"):
        quiet_trainer(max_steps=1, callbacks=LearningRateFinder()).fit(task, loader)
    assert task.lr == 1.0


def test_equal_curves_give_equal_suggestions_in_both_modes() -> None:
    lrs = [10 ** (-4 + k / 10) for k in range(41)]
    losses = [2.0 - 1.5 / (1 + (0.01 / lr) ** 2) for lr in lrs]  # falls around 0.01, over the logarithm
    for mode in ("exponential", "linear"):
        found = LRFinder(mode, lrs[0], lrs[-1], len(lrs))
        found.results = {"lr": lrs, "loss": losses}
        assert found.suggestion(skip_begin=0, skip_end=0) == pytest.approx(0.01)


def test_points_without_a_finite_loss_are_left_out() -> None:
    lrs = [10 ** (-4 + k / 10) for k in range(41)]
    losses = [2.0 - 1.5 / (1 + (0.01 / lr) ** 2) for lr in lrs]
    losses[5], losses[12] = float("nan"), float("inf")
    found = LRFinder("exponential", lrs[0], lrs[-1], len(lrs))
    found.results = {"lr": lrs, "loss": losses}
    assert found.suggestion(skip_begin=0, skip_end=0) == pytest.approx(0.01, rel=0.3)


def test_a_loss_below_zero_does_not_end_the_test_at_once() -> None:
    task, loader = _regression()
    task.loss = lambda outputs, targets: mse_loss(outputs, targets) - 100.0
    found = Tuner(quiet_trainer(max_epochs=100)).lr_find(task, loader)
    assert found is not None
    assert len(found.results["lr"]) == 100
