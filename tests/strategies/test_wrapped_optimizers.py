"""Wrappers of optimizers that engines step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.strategies.deepspeed.step import EngineOptimizer
from trainwright.strategies.deepspeed.zero_loop import ZeroOptimizer
from trainwright.strategies.steps.binding import ScaledOptimizer


def _engine_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    return EngineOptimizer(optimizer, None)


def _zero_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    model: Any = SimpleNamespace(optimizer=optimizer)
    gradients: Any = None
    return ZeroOptimizer(model, gradients, None)


def _scaled_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    scale: Any = None
    return ScaledOptimizer(optimizer, scale)


@pytest.mark.parametrize("wrap", [_engine_optimizer, _zero_optimizer, _scaled_optimizer])
def test_a_copy_of_a_wrapper_wraps_the_same_optimizer(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    copied = copy.copy(wrap(optimizer))
    assert copied.optimizer is optimizer
    assert copied.param_groups is optimizer.param_groups
    assert not hasattr(copied, "unknown")
