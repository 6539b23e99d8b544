"""The loss, the outputs and the batch of one step are gone before the next forward; memory stays flat."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback


class _Watches(RegressionTask):
    """Checks at the start of each step that what the last one made is gone."""

    def __init__(self, *, watch_batch: bool) -> None:
        super().__init__()
        self.watch_batch = watch_batch  # where nothing is moved, batches of a group live until the group is done
        self.references: dict[str, Any] = {}
        self.checked = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Check, then return a dict with the loss and an output that still has its graph."""
        alive = [name for name, reference in self.references.items() if reference() is not None]
        assert not alive, f"still alive before step {batch_idx}: {alive}"
        self.checked += len(self.references) > 0
        hidden = self.net(batch[0])
        loss = nn.functional.mse_loss(hidden, batch[1])
        self.log("loss", loss)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True)
        kept = {"loss": loss, "hidden": hidden, "graph": _GraphMark.apply(hidden)}
        self.references = {name: weakref.ref(value) for name, value in kept.items()}
        if self.watch_batch:
            self.references["batch"] = weakref.ref(batch[0])
        return kept


class _GraphMark(torch.autograd.Function):
    """A node of the graph, so that the graph itself is part of what must go."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Listens(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs is not None


@pytest.mark.parametrize(("accumulate", "clip", "callbacks"), [(1, None, []), (1, 1.0, [_Listens()]), (3, 1.0, [])])
def test_what_a_step_made_is_gone_before_the_next_forward(
    accumulate: int, clip: float | None, callbacks: list[Callback]
) -> None:
    task = _Watches(watch_batch=accumulate == 1)
    trainer = quiet_trainer(
        max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip, callbacks=callbacks
    )
    gc.disable()  # reference counts alone must do it
    try:
        trainer.fit(task, regression_loader(8))
    finally:
        gc.enable()
    assert task.checked == 15
