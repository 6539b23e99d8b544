"""Operations and Python calls of a training step, compared with a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.helpers.calls import calls_of
from tests.helpers.runs import quiet_trainer
from trainwright import TaskModule

Run = Callable[[int], Any]
_OF_OUR_OWN = 16  # Python calls that a step may make beside the loop's


def _batches(num_steps: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader([torch.randint(11, (2, 9), generator=generator) for _ in range(num_steps)], batch_size=None)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, 11)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class _Task(TaskModule):
    def __init__(self, *, logs: bool = False) -> None:
        super().__init__()
        self.net = _Model()
        self.logs = logs

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _by_hand(num_steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for text in _batches(num_steps):
        loss = model(text)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def _fit(num_steps: int, **arguments: Any) -> list[Tensor]:
    torch.manual_seed(0)
    task = _Task(logs=arguments.pop("logs", False))
    quiet_trainer(max_epochs=1, gradient_clip_val=1.0, **arguments).fit(task, _batches(num_steps))
    return list(task.parameters())


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _operations(run: Run, num_steps: int) -> int:
    with _Operations() as counter:
        run(num_steps)
    return counter.num


def _python_calls(run: Run, num_steps: int) -> int:
    return len(calls_of(lambda: run(num_steps))[0])


def _per_step(measure: Callable[[Run, int], int], run: Run) -> float:
    run(12)  # what is cached at the first call
    return (measure(run, 24) - measure(run, 12)) / 12


@pytest.mark.slow
def test_a_step_runs_no_more_operations_than_a_hand_written_loop() -> None:
    assert 0 < _per_step(_operations, _fit) <= _per_step(_operations, _by_hand)


def test_a_step_adds_few_python_calls() -> None:
    assert _per_step(_python_calls, _fit) <= _per_step(_python_calls, _by_hand) + _OF_OUR_OWN
