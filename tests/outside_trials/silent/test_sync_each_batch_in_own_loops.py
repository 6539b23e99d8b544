"""`sync_each_batch` is honoured in loops of one's own: gradients cross the processes in every micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator.test_accelerator_distributed import Exchanges
from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DDPStrategy, GradientAccumulationPlugin

pytestmark = pytest.mark.distributed


def _loop(accelerator: Accelerator, *, hold_back: bool = False) -> tuple[int, torch.Tensor]:
    """Train two steps of three micro-batches; returns the exchanges of gradients, and the weights."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    with Exchanges() as exchanges:
        for number in range(6):
            x = torch.randn(2, 3, generator=generator)
            if hold_back and number % 3 < 2:
                with accelerator.no_sync(model):
                    accelerator.backward(model(x).square().mean())
                continue
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return exchanges.counts["c10d.allreduce_.default"], torch.cat([p.detach().flatten() for p in net.parameters()])


def _loops() -> dict[str, Any]:
    return {
        "held back": _loop(Accelerator(cpu=True, gradient_accumulation_steps=3)),
        "strategy": _loop(
            Accelerator(cpu=True, gradient_accumulation_steps=3, strategy=DDPStrategy(sync_each_batch=True))
        ),
        "plugin": _loop(
            Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(3, sync_each_batch=True))
        ),
        "no_sync": _loop(Accelerator(cpu=True, strategy=DDPStrategy(sync_each_batch=True)), hold_back=True),
    }


def test_gradients_cross_in_every_micro_batch_and_train_the_same() -> None:
    for found in run_distributed(_loops, 2, init=False, timeout=120):
        assert {name: count for name, (count, _) in found.items()} == {
            "held back": 2, "strategy": 6, "plugin": 6, "no_sync": 2,
        }  # fmt: skip
        for name in ("strategy", "plugin"):
            torch.testing.assert_close(found[name][1], found["held back"][1])
