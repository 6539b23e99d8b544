"""What the framework adds to a step of split layers: the collectives, operators and calls of a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.test_fsdp_cost import _FIRST, _LAST, _STEPS, Calls, Counting, Operators
from trainwright.core.task import TaskModule

_NUM_BLOCKS = 3


class Feed(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.down(torch.relu(self.up(inputs)))
        return outputs


class Feeds(TaskModule):
    """Several blocks, of which everything is split but the norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.blocks = nn.Sequential(*(Feed() for _ in range(_NUM_BLOCKS)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(self.blocks(self.norm(batch)), batch)

    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _batches() -> list[torch.Tensor]:
    return list(torch.randn(_LAST + 2, 4, 6))


def _by_hand(counter: Any) -> None:
    task = Feeds()
    plan: Any = {f"blocks.{i}.up": ColwiseParallel() for i in range(_NUM_BLOCKS)}
    plan |= {f"blocks.{i}.down": RowwiseParallel() for i in range(_NUM_BLOCKS)}
    parallelize_module(task, init_device_mesh("cpu", (2,)), plan)
    optimizer = task.configure_optimizers()
    for step, batch in enumerate(_batches()):
        if step == _FIRST:
            counter.__enter__()
        task.training_step(batch, step).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        optimizer.zero_grad()
        if step == _LAST:
            counter.__exit__(None, None, None)


def _by_trainer(counter: Any) -> None:
    trainer = quiet_trainer(
        devices="auto", strategy="tp", max_epochs=1, num_sanity_val_steps=0, callbacks=[Counting(counter)]
    )
    data: Any = _batches()
    trainer.fit(Feeds(), DataLoader(data, batch_size=None))


def _count() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loop in (("hand", _by_hand), ("ours", _by_trainer)):
        operators, calls = Operators(), Calls()
        loop(operators)
        loop(calls)
        found[name] = operators.counts, sum(calls.counts.values()) / _STEPS
    return found


@pytest.mark.distributed
@pytest.mark.requires("torch>=2.13", reason="torch 2.9 itself makes more calls and operations")
def test_a_step_of_split_layers_costs_what_a_hand_written_one_costs() -> None:
    counted = run_distributed(_count, 2, timeout=240)[0]
    (ours, calls), (hand, calls_by_hand) = counted["ours"], counted["hand"]
    sent, by_hand = ({n: c for n, c in counts.items() if "c10d" in n} for counts in (ours, hand))
    assert sum(by_hand.values()) >= 2 * _NUM_BLOCKS * _STEPS  # one sum in each block's forward, one in its backward
    assert sent == by_hand
    assert sum(ours.values()) <= sum(hand.values()) + _STEPS  # a step's loss is detached
    assert calls <= 1.02 * calls_by_hand  # how each gradient lies is compared with how its parameter does
