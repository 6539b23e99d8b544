"""User-written loops with OffloadStrategy: bit for bit those of one device, however forwards and backwards mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.accelerator.accelerator import Accelerator
from trainwright.strategies import OffloadStrategy, Strategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.middle.requires_grad_(False)

    def shard_units(self) -> list[nn.Module]:
        return list(self.units)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(inputs)
        for unit in self.units:
            hidden = unit(self.middle(hidden))
        return {"outputs": self.head(self.norm(hidden)), "hidden": hidden}


Step = Callable[[Accelerator, nn.Module, list[torch.Tensor]], None]


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch)["outputs"] - batch.sum(1, keepdim=True)).square().mean()


def _one_backward_of_two_forwards(accelerator: Accelerator, model: nn.Module, batches: list[torch.Tensor]) -> None:
    accelerator.backward(_loss(model, batches[0]) + _loss(model, batches[1]))


def _backward_that_fails(accelerator: Accelerator, model: nn.Module, batches: list[torch.Tensor]) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("fails")

    found = model(batches[0])
    found["hidden"].register_hook(fail)
    with pytest.raises(RuntimeError, match="fails"):
        accelerator.backward(found["outputs"].sum())
    for parameter in model.parameters():
        parameter.grad = None
    accelerator.backward(_loss(model, batches[1]))


def _evaluation_between(accelerator: Accelerator, model: nn.Module, batches: list[torch.Tensor]) -> None:
    loss = _loss(model, batches[0])
    with torch.no_grad():
        model.eval()
        model(batches[1])
        model.train()
    accelerator.backward(loss)


_STEPS = {
    "one backward of two forwards": _one_backward_of_two_forwards,
    "backward that fails": _backward_that_fails,
    "evaluation between": _evaluation_between,
}
_OFFLOADED: dict[str, Callable[[], Strategy]] = {
    "host": lambda: OffloadStrategy(stream=True),
    "disk": lambda: OffloadStrategy("disk", "disk", stream=True, prefetch=2),
    "copy stays": lambda: OffloadStrategy("device", stream=True),
}


def _train(strategy: Strategy | str, step: Step, folder: Path) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    own = Net()
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(1)
    for i in range(4):
        step(accelerator, model, [torch.randn(3, 4, generator=generator) for _ in range(2)])
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if i == 1:
            accelerator.save_state(folder)
        if i == 2:  # the third step is undone
            accelerator.load_state(folder)
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", _OFFLOADED)
@pytest.mark.parametrize("step", _STEPS)
def test_a_loop_equals_that_of_one_device(step: str, offloaded: str, tmp_path: Path) -> None:
    wanted = _train("single", _STEPS[step], tmp_path / "one")
    found = _train(_OFFLOADED[offloaded](), _STEPS[step], tmp_path / "two")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class RecordingAdamW(torch.optim.AdamW):
    """Records how many parameters each step has, and how many of them are without state."""

    sizes: list[int]

    def _init_group(self, group: Any, params_with_grad: list[Any], *rest: Any) -> Any:
        found = super()._init_group(group, params_with_grad, *rest)  # type: ignore[no-untyped-call]  # torch
        self.sizes.append(len(params_with_grad))
        return found


@pytest.mark.parametrize("order", ["schedule first", "schedule last"])
def test_state_on_the_disk_is_stepped_unit_by_unit(order: str) -> None:
    rates: list[list[float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for strategy in ("single", OffloadStrategy("disk", "disk", stream=True)):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        net = Net()
        own = RecordingAdamW(net.parameters(), lr=0.05)
        own.sizes = []
        if order == "schedule first":
            scheduler: Any = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
        model, optimizer = accelerator.prepare(net, own)
        if order == "schedule last":
            scheduler = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
        scheduler = accelerator.prepare(scheduler)
        rates.append([])
        for _ in range(3):
            accelerator.backward(_loss(model, torch.ones(3, 4)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates[-1] += scheduler.get_last_lr()
        assert optimizer.step(lambda: 3.0) == 3.0
        weights.append(net.state_dict())
        if strategy != "single":
            assert own.sizes == [4, 4, 4, 6] * 3 + [
                0
            ]  # what is in no unit last, as its first layer's gradient comes last
            accelerator.engine.close()
            own.step()
    assert rates[0] == rates[1]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
