"""How a batch of ragged sequences is cut into micro-batches and dealt to ranks changes no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.runs import quiet_trainer
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule

_LENGTHS = [7, 1, 12, 3, 5, 2, 9, 4]  # tokens that count in each of the 8 sequences of a step
_IGNORED = -100
_STEPS = 2


def sequences(seed: int = 0, empty: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """Return two steps' worth of sequences, padded to 12; those in `empty` have no token that counts."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, length in enumerate(_LENGTHS * _STEPS):
        tokens = torch.randint(16, (12,), generator=generator)
        labels = torch.randint(16, (12,), generator=generator)
        labels[0 if index in empty else length :] = _IGNORED
        found.append({"input_ids": tokens, "labels": labels})
    return found


def batches(size: int, empty: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    found = sequences(empty=empty)
    return [
        {key: torch.stack([row[key] for row in found[i : i + size]]) for key in found[0]}
        for i in range(0, len(found), size)
    ]


class TokenTask(TaskModule):
    """A tiny language model whose loss is the mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.embed = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embed(batch["input_ids"])))
        total = functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=_IGNORED, reduction="sum"
        )
        return total / (batch["labels"] != _IGNORED).sum().clamp(min=1)

    def num_items(self, batch: Any) -> torch.Tensor:
        return (batch["labels"] != _IGNORED).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, so that a wrong gradient shows in the weights in proportion."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


class GradientKeeper(Callback):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in task.named_parameters()})

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.losses.append(float(result.loss))


def gradients(
    size: int, accumulate: int, kind: type[TokenTask] = TokenTask, empty: tuple[int, ...] = (), **arguments: Any
) -> GradientKeeper:
    keeper = GradientKeeper()
    trainer = quiet_trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[keeper], devices="auto", **arguments
    )
    trainer.fit(kind(), batches(size, empty))
    assert trainer.global_step == _STEPS
    return keeper


def assert_close(found: GradientKeeper, wanted: GradientKeeper, losses: list[float] | None = None) -> None:
    torch.testing.assert_close(found.gradients, wanted.gradients, rtol=0, atol=1e-6)
    assert (losses or found.losses) == pytest.approx(wanted.losses, abs=1e-6)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 8), (2, 4), (4, 2)])
def test_micro_batches_of_one_process_give_the_gradient_of_the_whole_batch(size: int, accumulate: int) -> None:
    assert_close(gradients(size, accumulate), gradients(8, 1))


def test_a_micro_batch_without_any_item_weighs_nothing() -> None:
    empty = (0, 5, 9)
    assert_close(gradients(1, 8, empty=empty), gradients(8, 1, empty=empty))


def test_a_step_without_any_item_has_a_gradient_of_zero() -> None:
    keeper = gradients(1, 8, empty=tuple(range(8)))
    assert all((gradient == 0).all() for gradient in keeper.gradients[0].values())
    assert any((gradient != 0).any() for gradient in keeper.gradients[1].values())
