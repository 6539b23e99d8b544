"""Parameters that are frozen or unfrozen during a fit, as fine-tuning does layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from trainwright.core.task import TaskModule
from trainwright.strategies.ddp.local_sgd import LocalSGDStrategy
from trainwright.strategies.ddp.strategy import DDPStrategy

pytestmark = pytest.mark.distributed


class Thawing(Blocks):
    """Its middle block is unfrozen before the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.blocks[1].requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ThawingLater(Thawing):
    """The block is unfrozen between two micro-batches of one step."""

    def on_train_epoch_start(self) -> None:
        """Leave it as it is."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Unfreeze before the last micro-batch of an epoch, which is this one's on any number of ranks."""
        if torch.equal(batch, batches()[-1]) or torch.equal(batch, batches()[-2]):
            self.blocks[1].requires_grad_(True)


class ThawingAll(Thawing):
    """Nothing is trained when the strategy takes the task."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.requires_grad_(True)


class Freezing(Blocks):
    """Its middle block is frozen after the first epoch of two steps, which end between two averages."""

    def on_train_epoch_start(self) -> None:
        self.blocks[1].requires_grad_(self.current_epoch == 0)


_TASKS: dict[str, type[TaskModule]] = {"epoch": Thawing, "step": ThawingLater, "all": ThawingAll}


def _train_all() -> dict[str, Any]:
    found: dict[str, Any] = {name: train(DDPStrategy(), 2, task()) for name, task in _TASKS.items()}
    frozen = Freezing()
    trainer = quiet_trainer(devices="auto", strategy=LocalSGDStrategy(3), max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(frozen, batches())
    return found | {"local_sgd": weights_of(frozen)}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_distributed(_train_all, 2, timeout=120, init=False)


@pytest.mark.parametrize("name", list(_TASKS))
def test_replicas_average_what_is_unfrozen_during_a_fit(name: str, trained: list[dict[str, Any]]) -> None:
    assert_trained_alike([found[name] for found in trained], train("single", 1, _TASKS[name]()))


def test_local_sgd_averages_what_was_frozen_since_the_last_average(trained: list[dict[str, Any]]) -> None:
    assert_equal_weights(trained[0]["local_sgd"], trained[1]["local_sgd"])
