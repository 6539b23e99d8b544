"""`log` never waits for another rank, so ranks may log what they like, when they like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader

_COLLECTIVES = [
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list",
    "barrier", "reduce", "gather", "gather_object", "send", "recv", "monitored_barrier",
]  # fmt: skip


class _Forbidden(Exception):
    """A collective was called inside `log`."""


class DifferentKeysTask(RegressionTask):
    """Each rank logs names of its own, in an order of its own, some of them only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.in_log = False
        self.collectives_in_log = 0

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log, and note that it is going on."""
        self.in_log = True
        try:
            super().log(*args, **kwargs)
        finally:
            self.in_log = False

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Log differently on each rank."""
        rank, loss = self.global_rank, self.loss(batch)
        names = ["common", f"own_{rank}", "b", "a"]
        for name in names if rank == 0 else reversed(names):
            self.log(name, loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        if batch_idx % 3 == rank:
            self.log(f"seldom_{rank}", float(rank + 1), on_step=False, on_epoch=True)
        if rank == 1:
            self.log("only_on_one", 7.0, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log a name of this rank's own."""
        self.log(f"val_{self.global_rank}", 1.0)


def _train_on_rank() -> tuple[int, dict[str, float]]:
    task = DifferentKeysTask()
    for name in _COLLECTIVES:
        real = getattr(dist, name)

        def watched(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
            if task.in_log:
                raise _Forbidden(_real.__name__)
            return _real(*args, **kwargs)

        setattr(dist, name, watched)
    trainer = quiet_trainer(devices="auto", max_epochs=2, log_every_n_steps=2)
    trainer.fit(task, regression_loader(16), regression_loader(3))
    return trainer.global_step, dict(trainer.callback_metrics)


@pytest.mark.distributed
def test_ranks_that_log_different_keys_finish_and_all_learn_every_aggregate() -> None:
    for steps, metrics in run_distributed(_train_on_rank, 2, timeout=60):
        assert steps == 16
        assert metrics["seldom_0"] == 1
        assert metrics["seldom_1"] == 2
        assert metrics["only_on_one"] == 7
        assert {"common_epoch", "own_0_epoch", "own_1_epoch", "val_0", "val_1"} <= set(metrics)
