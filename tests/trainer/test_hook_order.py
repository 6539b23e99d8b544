"""In which order hooks run, and which outputs of steps they receive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer
from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.hooks import DataHooks, TaskHooks
from trainwright.core.state import StepResult
from trainwright.core.tree import iterate_tensors

_OF_STEP_ONLY = ("on_train_step_start", "on_train_step_end")


class _EveryCallbackHook(Callback):
    def __init__(self, notes: list[str]) -> None:
        for event in EVENTS:
            if event not in _OF_STEP_ONLY:
                setattr(self, event, _noting(notes, f"callback.{event}", None))


def _noted_loader(kind: str) -> Any:
    def load(self: Any) -> Any:
        self.notes.append(f"task.{kind}_dataloader")
        return regression_loader(2)

    return load


class _EveryTaskHook(RegressionTask):
    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        steps = ("training_step", "validation_step", "test_step", "predict_step", "forward", "backward")
        own = ("configure_callbacks", "configure_model", "configure_optimizers", "optimizer_step")
        own += ("optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")
        for name in (*vars(TaskHooks), *vars(DataHooks), *steps, *own):
            if not name.startswith("__") and not name.endswith("_dataloader"):
                object.__setattr__(self, name, _noting(notes, f"task.{name}", getattr(self, name)))
        self.notes = notes

    train_dataloader, val_dataloader = _noted_loader("train"), _noted_loader("val")
    test_dataloader, predict_dataloader = _noted_loader("test"), _noted_loader("predict")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _noting(notes: list[str], name: str, then: Any) -> Any:
    def hook(*args: Any, **kwargs: Any) -> Any:
        notes.append(name)
        return None if then is None else then(*args, **kwargs)

    return hook if then is None else functools.wraps(then)(hook)  # the Trainer looks at the arguments that steps take


def _both(*events: str) -> list[str]:
    """Return the events as the callback hears them and then the task, one after the other."""
    return [f"{who}.{event}" for event in events for who in ("callback", "task")]


def _evaluation(event: str, *, sanity: bool = False, loader: str | None = None) -> list[str]:
    """Return an evaluation of two batches."""
    batch = [f"task.{name}" for name in ("on_before_batch_transfer", "transfer_batch_to_device")]
    batch += ["task.on_after_batch_transfer", *_both(f"on_{event}_batch_start")]
    batch += [f"task.{event}_step", "task.forward", *_both(f"on_{event}_batch_end")]
    return [
        *([f"task.{loader}_dataloader"] if loader else []),
        f"task.on_{event}_model_eval",
        *_both(f"on_{event}_start", f"on_{event}_epoch_start"),
        *batch,
        *batch,
        *_both(f"on_{event}_epoch_end", f"on_{event}_end"),
        f"task.on_{event}_model_train",
    ]


def _training_batch(*, last: bool) -> list[str]:
    return [
        "task.on_before_batch_transfer",
        "task.transfer_batch_to_device",
        "task.on_after_batch_transfer",
        *_both("on_train_batch_start"),
        "task.training_step",
        "task.forward",
        *_both("on_before_zero_grad"),
        "task.optimizer_zero_grad",
        *_both("on_before_backward"),
        "task.backward",
        *_both("on_after_backward", "on_before_optimizer_step"),
        "task.configure_gradient_clipping",
        "task.optimizer_step",
        *(["task.lr_scheduler_step"] if last else []),
        *_both("on_train_batch_end"),
    ]


def test_a_fit_runs_every_hook_in_the_promised_order(tmp_path: Path) -> None:
    notes: list[str] = []
    saver = ModelCheckpoint(tmp_path)
    fitted(_EveryTaskHook(notes), max_epochs=1, num_sanity_val_steps=-1, callbacks=[_EveryCallbackHook(notes), saver])
    assert notes == [
        "task.configure_callbacks",
        "task.prepare_data",
        *_both("setup"),
        "task.configure_model",
        "task.configure_optimizers",
        *_both("on_fit_start"),
        "callback.on_sanity_check_start",
        *_evaluation("validation", loader="val"),
        "callback.on_sanity_check_end",
        "task.train_dataloader",
        *_both("on_train_start", "on_train_epoch_start"),
        *_training_batch(last=False),
        *_training_batch(last=True),
        *_evaluation("validation"),
        *_both("on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown"),
    ]


@pytest.mark.parametrize(
    ("stage", "event", "loader"), [("validate", "validation", "val"), ("test", "test", "test"), ("predict",) * 3]
)
def test_an_evaluation_runs_every_hook_in_the_promised_order(stage: str, event: str, loader: str) -> None:
    notes: list[str] = []
    getattr(quiet_trainer(callbacks=_EveryCallbackHook(notes)), stage)(_EveryTaskHook(notes))
    assert notes == [
        "task.configure_callbacks",
        "task.prepare_data",
        *_both("setup"),
        "task.configure_model",
        *_evaluation(event, loader=loader),
        *_both("teardown"),
    ]


@pytest.mark.parametrize("stage", ["test", "fit"])
def test_without_batches_the_loops_hooks_are_silent_but_setup_and_teardown_are_not(stage: str) -> None:
    notes: list[str] = []
    limits = {"limit_train_batches": 0, "limit_val_batches": 0, "limit_test_batches": 0}
    getattr(quiet_trainer(max_epochs=1, callbacks=_EveryCallbackHook(notes), **limits), stage)(_EveryTaskHook(notes))
    assert [note for note in notes if "setup" in note or "teardown" in note] == _both("setup", "teardown")
    assert [note for note in notes if "batch" in note or "epoch" in note or "_step" in note] == []


def test_callbacks_of_the_task_replace_the_trainers_of_the_same_type() -> None:
    notes: list[str] = []

    class Says(Callback):
        def __init__(self, word: str) -> None:
            self.word = word

        def on_fit_start(self, trainer: Any, task: Any) -> None:
            notes.append(self.word)

    class Task(RegressionTask):
        def configure_callbacks(self) -> Any:
            return Says("the task's")

    trainer = fitted(Task(), regression_loader(1), max_epochs=1, callbacks=[Says("the trainer's")])
    trainer.fit(RegressionTask(), regression_loader(1))
    assert notes == ["the task's", "the trainer's"]


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
