"""A schedule of one's own over DeepSpeed's configured optimizer would move nothing: it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwright import DeepSpeedStrategy, DummyOptim, DummyScheduler
from trainwright.core.errors import ConfigurationError


def _take(scheduler: Any) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    run: Any = SimpleNamespace(lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler, interval="epoch")])
    DeepSpeedStrategy(config=config)._take_schedule(None, run)


def test_a_real_schedule_of_a_dummy_optimizer_is_refused() -> None:
    dummy = DummyOptim([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for schedule in (
        torch.optim.lr_scheduler.LambdaLR(dummy, lambda step: 0.5),
        torch.optim.lr_scheduler.ReduceLROnPlateau(dummy),
    ):
        with pytest.raises(ConfigurationError, match=rf"{type(schedule).__name__} of it.*DummyScheduler"):
            _take(schedule)


def test_real_schedules_of_real_optimizers_are_taken() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    _take(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5))
    with pytest.raises(ConfigurationError, match="no 'scheduler'"):
        _take(DummyScheduler(optimizer))
