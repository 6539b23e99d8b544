from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import SchedulerConfig

PARAMETER = torch.nn.Parameter(torch.zeros(1))


def sgd(**options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, **options)


def fit(
    callback: LearningRateMonitor, root: Path, optimizers: list[Any], configs: list[SchedulerConfig], **how: Any
) -> FakeRun:
    """Train 2 epochs of 4 steps, logging every second; step schedulers move after the step, as in the loop."""
    run = FakeRun([callback], root)
    run.optimizers, run.lr_scheduler_configs, run.log_every_n_steps = optimizers, configs, 2

    def move(run: FakeRun) -> None:
        for config in configs:
            if config.interval == "step" or run.state.step_in_epoch == 4:
                for group in config.scheduler.optimizer.param_groups:
                    group["lr"] *= 0.5

    run.fit(epochs=2, batches=4, on_step=move, **how)
    return run


@pytest.mark.parametrize(
    ("chosen", "interval", "logged"),
    [
        (None, "step", [(2, 0.5), (4, 0.125), (6, 0.5**5), (8, 0.5**7)]),
        (None, "epoch", [(1, 1.0), (5, 0.5)]),
        ("step", "epoch", [(2, 1.0), (4, 1.0), (6, 0.5), (8, 0.5)]),
        ("epoch", None, [(1, 1.0), (5, 1.0)]),
    ],
    ids=["each logged step", "each epoch's first step", "the chosen interval wins", "without a scheduler"],
)
def test_rates_are_those_that_the_steps_used(
    chosen: Any, interval: Any, logged: list[tuple[int, float]], tmp_path: Path
) -> None:
    optimizer = sgd()
    configs = [SchedulerConfig(ExponentialLR(optimizer, 0.5), interval=interval)] if interval else []
    run = fit(LearningRateMonitor(chosen), tmp_path, [optimizer], configs)
    assert run.logged == [(step, {"lr-SGD": pytest.approx(rate)}) for step, rate in logged]


def _groups(*names: dict[str, str]) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **name} for name in names], lr=1.0)


@pytest.mark.parametrize(
    ("optimizers", "names"),
    [
        ([sgd(), torch.optim.AdamW([PARAMETER]), sgd()], ["lr-SGD", "lr-AdamW", "lr-SGD-1"]),
        ([_groups({}, {"name": "head"})], ["lr-SGD/pg1", "lr-SGD/head"]),
    ],
    ids=["a second optimizer of one class", "groups with and without a name"],
)
def test_optimizers_and_groups_are_numbered_or_named(optimizers: Any, names: list[str], tmp_path: Path) -> None:
    assert list(fit(LearningRateMonitor("epoch"), tmp_path, optimizers, []).logged[0][1]) == names


def test_groups_of_one_name_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'lr-SGD/a'"):
        fit(LearningRateMonitor("epoch"), tmp_path, [_groups({"name": "a"}, {"name": "a"})], [])


def test_momentum_and_weight_decay_are_logged_when_wanted(tmp_path: Path) -> None:
    callback = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    adam = torch.optim.AdamW([PARAMETER], lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    run = fit(callback, tmp_path, [adam, sgd(momentum=0.7)], [])
    assert run.logged[0][1] == {
        "lr-AdamW": 0.1,
        "lr-AdamW-momentum": 0.8,
        "lr-AdamW-weight_decay": 0.3,
        "lr-SGD": 1.0,
        "lr-SGD-momentum": 0.7,
        "lr-SGD-weight_decay": 0.0,
    }
    assert callback.lrs == {"lr-AdamW": [0.1] * len(run.logged), "lr-SGD": [1.0] * len(run.logged)}


def test_without_a_logger_it_has_nothing_to_do_and_says_so(tmp_path: Path) -> None:
    run = FakeRun([LearningRateMonitor()], tmp_path, loggers=[])
    with pytest.raises(ConfigurationError, match="no logger"):
        run.fit(epochs=1, batches=1)


def test_momentum_that_no_optimizer_has_is_warned_of(tmp_path: Path) -> None:
    optimizer = torch.optim.ASGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.warns(TrainwrightWarning, match="do not have momentum"):
        fit(LearningRateMonitor(log_momentum=True), tmp_path, [optimizer], [])
