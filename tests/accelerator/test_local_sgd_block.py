"""Local SGD in user-written loops, on two processes: equal to averaging parameters by hand."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import weights_of
from trainwright import LocalSGD
from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.errors import ConfigurationError
from trainwright.strategies import LocalSGDStrategy, Strategy
from trainwright.strategies.ddp.comm_hooks import DistributedDataParallelKwargs

_ACCUMULATE, _PERIOD = 2, 2
_NUM = 40  # samples of five optimizer steps of two ranks


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def _data(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(num) % 3 + 1)


def _loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    squares = (net(x) - y).square().squeeze(1)
    return (squares * n).sum() / n.sum()


def _by_hand() -> dict[str, torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def average() -> None:
        for parameter in net.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)

    data = _data(_NUM)
    batches = [data[start : start + 2] for start in range(0, _NUM, 2)][rank::world]
    for step in range(len(batches) // _ACCUMULATE):
        group = batches[step * _ACCUMULATE : (step + 1) * _ACCUMULATE]
        total = sum(int(n.sum()) for *_, n in group)
        for x, y, n in group:
            (_loss(net, x, y, n) * float(n.sum()) / total).backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % _PERIOD == 0:
            average()
    average()
    return weights_of(net)


def _loop(strategy: Strategy | str, num: int = _NUM) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Return the weights at the end, and whether all ranks had the same ones after each step."""
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=_ACCUMULATE, seed=0)
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, prepared, loader = accelerator.prepare(net, optimizer, DataLoader(_data(num), batch_size=2))
    equal = []
    with ExitStack() as stack:
        local = stack.enter_context(LocalSGD(accelerator, model, _PERIOD)) if strategy == "ddp" else None
        for x, y, n in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, x, y, n), num_items=n.sum())
                prepared.step()
                prepared.zero_grad()
            if accelerator.sync_gradients:
                if local is not None:
                    local.step()
                first, second = accelerator.gather(net[0].weight.detach().flatten()[None])
                equal.append(torch.equal(first, second))
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}, equal


def _cases() -> dict[str, Any]:
    Accelerator()  # joins the processes
    strategy = LocalSGDStrategy(_PERIOD)
    return {
        "by hand": _by_hand(),
        "block": _loop("ddp"),
        "strategy": _loop(strategy),
        "uneven": [_loop(one, _NUM - 2)[0] for one in ("ddp", strategy)],  # the second rank has one micro-batch less
        "refusals": _refusals(strategy),
    }


def _refusals(strategy: Strategy) -> list[str]:
    found = []
    static = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    for accelerator in (Accelerator(strategy=strategy), Accelerator(strategy="fsdp"), static, Accelerator()):
        model = accelerator.prepare(_net()) if accelerator is static else _net()
        with pytest.raises(ConfigurationError) as caught, LocalSGD(accelerator, model):
            pass
        found.append(str(caught.value))
    return found


@pytest.mark.distributed
@pytest.mark.slow
def test_parameters_are_averaged_as_by_hand() -> None:
    first, second = run_distributed(_cases, 2, init=False, timeout=240)
    for way in ("block", "strategy"):
        weights, equal = first[way]
        torch.testing.assert_close(weights, first["by hand"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(weights, second[way][0], rtol=0, atol=0)
        assert equal == [False, True, False, True, False]
    torch.testing.assert_close(*first["uneven"], rtol=0, atol=0)
    refusals = ("averaged already", "FSDPStrategy", "static_graph", "prepare")
    for text, words in zip(first["refusals"], refusals, strict=True):
        assert words in text
