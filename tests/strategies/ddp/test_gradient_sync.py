"""When gradients cross ranks: counted, in automatic optimization and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import TaskError
from trainwright.strategies import DDPStrategy
from trainwright.strategies.ddp.replicas import flat_gradients


class Crossings(Callback):
    """Counts, micro-batch by micro-batch, how often gradients are averaged."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        exchange = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.counts:
                self.counts[-1] += 1
            return exchange(*args, **kwargs)

        dist.all_reduce = counted
        try:
            yield
        finally:
            dist.all_reduce = exchange

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


def _count(task: RegressionTask, strategy: DDPStrategy, **arguments: Any) -> tuple[list[int], Any]:
    crossings = Crossings()
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1, callbacks=[crossings], **arguments)
    with crossings.counting():
        trainer.fit(task, regression_loader(12))
    return crossings.counts, weights_of(task)


def _count_all() -> dict[str, tuple[list[int], Any]]:
    def wrapper(hook: Any) -> Any:  # which is counted; torch's own exchange runs where Python cannot see it
        return hook

    each = DDPStrategy(ddp_comm_wrapper=wrapper, sync_each_batch=True)
    return {
        "last": _count(RegressionTask(), DDPStrategy(ddp_comm_wrapper=wrapper), accumulate_grad_batches=3),
        "each": _count(RegressionTask(), each, accumulate_grad_batches=3),
        "by hand": _count(ByHand(holds_back=False), DDPStrategy()),
        "held back": _count(ByHand(holds_back=True), DDPStrategy()),
    }


@pytest.mark.distributed
def test_gradients_cross_in_the_last_micro_batch_unless_each_is_asked_for() -> None:
    for of_rank in run_distributed(_count_all, 2, timeout=120):
        for name in ("last", "held back"):
            assert of_rank[name][0] == [0, 0, 1, 0, 0, 1]
        for name in ("each", "by hand"):
            assert of_rank[name][0] == [1, 1, 1, 1, 1, 1]
        for _, weights in of_rank.values():
            torch.testing.assert_close(weights, of_rank["last"][1], rtol=0, atol=1e-6)


def test_a_mean_of_gradients_counts_each_replica_by_its_weight() -> None:
    one, other = ([torch.nn.Parameter(torch.zeros(2)) for _ in range(3)] for _ in range(2))
    one[0].grad, other[0].grad = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    other[1].grad = torch.tensor([3.0, 6.0])  # without a gradient on one replica
    [of_one], [of_other] = flat_gradients(one, weight=2.0), flat_gradients(other)
    of_one.values += of_other.values
    of_one.write_mean(3.0)
    torch.testing.assert_close(one[0].grad, torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(one[1].grad, torch.tensor([1.0, 2.0]))
    assert one[2].grad is None
    [alone] = flat_gradients([torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))])
    assert alone.values.tolist() == [0, 0]
    assert alone.values.dtype is torch.bfloat16


def test_holding_back_in_automatic_optimization_is_refused() -> None:
    class Task(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            with self.no_sync():
                return self.loss(batch)

    with pytest.raises(TaskError, match="accumulate_grad_batches"):
        quiet_trainer(max_epochs=1).fit(Task(), regression_loader(2))
