"""Models that are no stack of trained blocks train with weights at home elsewhere as they do in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from trainwright import OffloadStrategy, TaskModule

WIDTH = 8

Body = Callable[["Odd", torch.Tensor], torch.Tensor]


class HalfFrozen(nn.Module):
    """A frozen layer below a trained one, as with an adapter: the last gradient comes before the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.frozen(hidden)))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, sparse=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((hidden.detach().sum(1) > 0).long())
        return hidden + found


class Picture(nn.Module):
    """A convolution whose weight lies with its channels last, and a weight that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 8, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(0.3 * torch.randn(3, 8).t())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        picture = hidden.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return self.mix(picture).flatten(1) @ self.turned @ self.turned.t()


class Odd(TaskModule):
    """Three units between two layers; `body` says how the units are run."""

    def __init__(self, unit: type[nn.Module], body: Body | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.units = nn.ModuleList(unit() for _ in range(3))
            self.last = nn.Linear(WIDTH, 1)
            self.prompt = nn.Parameter(torch.randn(1, WIDTH))
        self.body = body

    def shard_units(self) -> list[nn.Module]:
        return list(self.units)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch)
        if self.body is not None:
            hidden = self.body(self, hidden)
        else:
            for unit in self.units:
                hidden = unit(hidden)
        return self.last(hidden).pow(2).mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:  # what was frozen is thawed
            self.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def recomputed(task: Odd, hidden: torch.Tensor) -> torch.Tensor:
    for unit in task.units:
        hidden = checkpoint(unit, hidden, use_reentrant=True)
    return hidden


def prompted(task: Odd, hidden: torch.Tensor) -> torch.Tensor:
    for unit in task.units:
        hidden = hidden + unit(task.prompt)  # a leaf
    return hidden


def train(task: Odd, strategy: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(3, WIDTH, generator=generator) for _ in range(6)]
    quiet_trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=2).fit(task, batches)
    return weights_of(task)


ODD = {
    "units_that_a_reentrant_checkpoint_computes_anew": (HalfFrozen, recomputed),
    "units_whose_input_is_a_parameter": (HalfFrozen, prompted),
    "sparse_gradients": (Lookup, None),
    "channels_last": (Picture, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(("place", "stream"), [("cpu", True), ("disk", None)])
def test_every_bit_is_that_of_training_in_one_place(name: str, place: Any, stream: bool | None) -> None:
    unit, body = ODD[name]
    wanted = train(Odd(unit, body), "single")
    found = train(Odd(unit, body), OffloadStrategy(place, place, stream=stream))
    assert_equal_weights(found, wanted)
    assert {key: value.stride() for key, value in found.items()} == {key: v.stride() for key, v in wanted.items()}
