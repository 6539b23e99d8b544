"""When gradients cross ranks: counted, in automatic optimization and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import REDUCE_SCATTER, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import TaskError
from trainwright.strategies import DDPStrategy, FSDPStrategy, Strategy


class Crossings(Callback):
    """Counts, micro-batch by micro-batch, how often gradients cross ranks."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the function of torch.distributed that they cross in
        self.counts: list[int] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count calls meanwhile."""
        exchange = getattr(dist, self.name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.counts:
                self.counts[-1] += 1
            return exchange(*args, **kwargs)

        setattr(dist, self.name, counted)
        try:
            yield
        finally:
            setattr(dist, self.name, exchange)

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        self.counts.append(0)


class ByHand(RegressionTask):
    """Steps after every third batch; holds gradients back before that if told."""

    def __init__(self, holds_back: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.holds_back = holds_back

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer, last = self.optimizers(), batch_idx % 3 == 2
        if self.holds_back and not last:
            with self.no_sync():
                self.manual_backward(self.loss(batch) / 3)
        else:
            self.manual_backward(self.loss(batch) / 3)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def _count(
    strategy: Strategy, name: str, task: RegressionTask, **arguments: Any
) -> tuple[list[int], dict[str, torch.Tensor]]:
    crossings = Crossings(name)
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1, callbacks=[crossings], **arguments)
    with crossings.counting():
        trainer.fit(task, regression_loader(12))
    return crossings.counts, weights_of(task)


_AUTOMATIC: dict[str, Callable[[], tuple[list[int], dict[str, torch.Tensor]]]] = {
    # A hook of Python's is counted; torch's own exchange runs where Python cannot see it.
    "ddp": lambda: _count(
        DDPStrategy(ddp_comm_wrapper=lambda hook: hook), "all_reduce", RegressionTask(), accumulate_grad_batches=3
    ),
    "ddp, each": lambda: _count(
        DDPStrategy(ddp_comm_wrapper=lambda hook: hook, sync_each_batch=True), "all_reduce", RegressionTask(),
        accumulate_grad_batches=3,
    ),
    "fsdp": lambda: _count(FSDPStrategy(), REDUCE_SCATTER, RegressionTask(), accumulate_grad_batches=3),
    "fsdp, each": lambda: _count(
        FSDPStrategy(sync_each_batch=True), REDUCE_SCATTER, RegressionTask(), accumulate_grad_batches=3
    ),
}  # fmt: skip


def _count_all() -> dict[str, tuple[list[int], dict[str, torch.Tensor]]]:
    found = {name: count() for name, count in _AUTOMATIC.items()}
    for holds_back in (False, True):
        found[f"by hand, {holds_back}"] = _count(DDPStrategy(), "all_reduce", ByHand(holds_back))
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, tuple[list[int], dict[str, torch.Tensor]]]]:
    return run_distributed(_count_all, 2, timeout=120)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_gradients_cross_in_every_micro_batch_if_asked_and_in_the_last_one_otherwise(name: str, runs: Any) -> None:
    for of_rank in runs:
        assert of_rank[name][0] == [0, 0, 1, 0, 0, 1]
        assert of_rank[f"{name}, each"][0] == [1, 1, 1, 1, 1, 1]
        torch.testing.assert_close(of_rank[f"{name}, each"][1], of_rank[name][1], rtol=0, atol=1e-6)


@pytest.mark.distributed
def test_backward_by_hand_keeps_gradients_on_its_rank_where_it_is_told_to(runs: Any) -> None:
    for of_rank in runs:
        assert of_rank["by hand, False"][0] == [1, 1, 1, 1, 1, 1]
        assert of_rank["by hand, True"][0] == [0, 0, 1, 0, 0, 1]
        torch.testing.assert_close(of_rank["by hand, True"][1], of_rank["by hand, False"][1], rtol=0, atol=1e-6)
        torch.testing.assert_close(of_rank["by hand, True"][1], of_rank["ddp"][1], rtol=0, atol=1e-6)


def test_holding_back_in_automatic_optimization_is_refused() -> None:
    class Task(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            with self.no_sync():
                return self.loss(batch)

    with pytest.raises(TaskError, match="accumulate_grad_batches"):
        quiet_trainer(max_epochs=1).fit(Task(), regression_loader(2))
