"""Outputs of steps as callbacks and hooks receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.core.state import StepResult
from trainwright.core.tree import iterate_tensors

# Handed over so that hooks may look at, or change, what backward is run on.
_BEFORE_BACKWARD = "on_before_backward"


class _Keeps(Callback):
    """Keeps the arguments of every event but the model, the optimizers and the loss before its backward."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}
        for event in EVENTS:
            if event not in (_BEFORE_BACKWARD, "on_save_checkpoint", "on_load_checkpoint"):
                setattr(self, event, self._noting(event))

    def _noting(self, event: str) -> Callable[..., None]:
        def note(trainer: Any, task: Any, *args: Any) -> None:
            kept = [arg for arg in args if not isinstance(arg, torch.optim.Optimizer)]
            kept = [[arg.loss, arg.grad_norm] if isinstance(arg, StepResult) else arg for arg in kept]
            self.seen.setdefault(event, []).append(kept)
            self.seen.setdefault("metrics", []).append(dict(trainer.callback_metrics))

        return note


class _Returns(RegressionTask):
    """Returns what it is told of its loss and its predictions, with gradients switched on in evaluations too."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any], automatic: bool = True) -> None:
        super().__init__()
        self.form = form
        self.automatic_optimization = automatic

    def _step(self, batch: Any, name: str) -> Any:
        with torch.enable_grad():
            predicted = self(batch[0].clone())
            loss = torch.nn.functional.mse_loss(predicted, batch[1].clone())
        self.log(name, loss)
        return self.form(loss, predicted), loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned, loss = self._step(batch, "train_loss")
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return returned

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "val_loss")[0]

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            return self(batch[0].clone())


def _dict(loss: torch.Tensor, predicted: torch.Tensor) -> Any:
    return {"loss": loss, "predicted": [predicted, {"twice": predicted * 2}]}


def _run(task: _Returns, keeps: _Keeps, **arguments: Any) -> Any:
    trainer = quiet_trainer(max_epochs=1, callbacks=keeps, inference_mode=False, **arguments)
    trainer.fit(task, regression_loader(6), regression_loader(2))
    trainer.test(task, regression_loader(2), verbose=False)
    return trainer.predict(task, regression_loader(2))


@pytest.mark.parametrize(("form", "automatic"), [(_dict, True), (lambda loss, predicted: loss, False)])
def test_outputs_of_all_events_are_detached(form: Any, automatic: bool) -> None:
    keeps, task = _Keeps(), _Returns(form, automatic)
    predictions = _run(task, keeps)
    assert len(keeps.seen) > 30
    tensors = list(iterate_tensors([keeps.seen, predictions]))
    assert len(tensors) > 50
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in tensors)


@pytest.mark.filterwarnings("ignore:.*training_step returned None for each", "ignore:.*it is skipped")
@pytest.mark.parametrize(
    "form", [lambda loss, predicted: None, lambda loss, predicted: loss * float("nan")], ids=["no loss", "NaN"]
)
def test_outputs_are_empty_where_no_loss_was_used(form: Any) -> None:
    keeps = _Keeps()
    quiet_trainer(max_epochs=1, callbacks=keeps, on_nonfinite="skip").fit(_Returns(form), regression_loader(3))
    assert [outputs for outputs, *_ in keeps.seen["on_train_batch_end"]] == [{}] * 3
