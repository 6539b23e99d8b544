from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, StepTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer
from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.hooks import DataHooks, TaskHooks

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


def test_callbacks_of_the_task_replace_the_trainers_of_the_same_type() -> None:
    notes: list[str] = []

    def says(word: str) -> Callback:
        return LambdaCallback(on_fit_start=lambda trainer, task: notes.append(word))

    task = RegressionTask()
    task.configure_callbacks = lambda: says("the task's")  # type: ignore[method-assign]
    trainer = fitted(task, regression_loader(1), max_epochs=1, callbacks=[says("the trainer's")])
    trainer.fit(RegressionTask(), regression_loader(1))
    assert notes == ["the task's", "the trainer's"]


@pytest.mark.filterwarnings("ignore:.*training_step returned None for each", "ignore:.*it is skipped")
@pytest.mark.parametrize("factor", [None, float("nan")], ids=["no loss", "NaN"])
def test_outputs_are_empty_where_no_loss_was_used(factor: float | None) -> None:
    seen: list[Any] = []
    keeps = LambdaCallback(on_train_batch_end=lambda trainer, task, outputs, batch, idx: seen.append(outputs))
    task = StepTask(lambda task, batch, idx: factor and task.loss(batch) * factor)
    quiet_trainer(max_epochs=1, callbacks=keeps, on_nonfinite="skip").fit(task, regression_loader(3))
    assert seen == [{}] * 3
