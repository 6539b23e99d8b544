from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import Untouched
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.data import DataModule


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_every_form_of_a_step_receives_its_declared_arguments(num_loaders: int) -> None:
    seen: list[Any] = []
    several = num_loaders > 1

    def opaque(step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        return wrapper

    forms: list[tuple[Callable[..., Any], Any]] = [
        (lambda self, batch: seen.append(()), ()),
        (lambda self, batch, batch_idx: seen.append(batch_idx), 0),
        (lambda self, batch, batch_idx, dataloader_idx: seen.append(dataloader_idx), 0),
        (lambda self, batch, batch_idx, dataloader_idx=5: seen.append(dataloader_idx), 0 if several else 5),
        (lambda self, batch, batch_idx, prefix="mine": seen.append(prefix), 0 if several else "mine"),
        (lambda self, batch, *, batch_idx: seen.append(batch_idx), 0),
        (lambda self, batch, *, batch_idx, dataloader_idx: seen.append((batch_idx, dataloader_idx)), (0, 0)),
        (lambda self, batch, batch_idx, **more: seen.append(more), {}),
        (opaque(lambda self, batch, batch_idx, dataloader_idx=5: seen.append(dataloader_idx)), 0 if several else 5),
        (torch.no_grad()(lambda self, batch, batch_idx: seen.append("no_grad")), "no_grad"),
        (functools.partialmethod(lambda self, extra, batch, batch_idx: seen.append(extra), "partial"), "partial"),
    ]
    for step, expected in forms:
        seen.clear()
        task = type("Mine", (RegressionTask,), {"test_step": step})()
        loaders = [regression_loader(2)] * num_loaders
        quiet_trainer().test(task, loaders if several else loaders[0], verbose=False)
        assert seen[0] == expected


def _refused(task: TaskModule | None = None, callback: Any = None, **data: Any) -> str:
    trainer = quiet_trainer(max_epochs=1, callbacks=callback)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(task or Untouched(), **(data or {"train_dataloaders": regression_loader(2)}))
    return str(error.value)


def _made(base: type, name: str, method: Any) -> Any:
    return type("Mine", (base,), {name: method})()


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (
            {"callback": _made(Callback, "on_train_batch_end", lambda self, trainer, task: None)},
            [
                "is called with (trainer, task, outputs, batch, batch_idx)",
                "def on_train_batch_end(self, trainer, task, ",
            ],
        ),
        (
            {"task": _made(Untouched, "training_step", lambda self, batch, batch_idx, *, scale: None)},
            ["Mine.training_step declares (batch, batch_idx, *, scale)", "def training_step(self, batch, batch_idx)"],
        ),
        ({"task": _made(Untouched, "setup", lambda self: None)}, ["def setup(self, stage)"]),
        ({"datamodule": _made(DataModule, "setup", lambda self: None)}, ["Mine.setup declares ()"]),
        (
            {"callback": LambdaCallback(on_fit_start=lambda trainer: None)},
            ["LambdaCallback.on_fit_start declares (trainer)"],
        ),
    ],
)
def test_a_hook_that_cannot_be_called_is_an_error_with_the_signature_to_write(
    given: dict[str, Any], texts: list[str]
) -> None:
    refused = _refused(**given)
    assert all(text in refused for text in texts), refused


def _task(name: str, **more: Any) -> Any:
    return type("Mine", (RegressionTask,), {name: lambda self, *args: None, **more})()


@pytest.mark.parametrize("name", ["train_step", "configure_optimizer"])
def test_a_method_named_like_a_hook_is_a_warning_once(name: str) -> None:
    task, trainer = _task(name), quiet_trainer(max_epochs=1)
    with pytest.warns(TrainwrightWarning, match=f"Mine.{name} resembles the hook"):
        trainer.fit(task, regression_loader(1))
    trainer.fit(task, regression_loader(1))  # warnings are errors here


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("on_train_epoch_edn", "the hook is named 'on_train_epoch_end'"),
        ("predict_stap", "the hook is named 'predict_step'"),
        ("training_step_end", r"it was removed.*on_train_batch_end\(self, outputs, batch, batch_idx\)"),
        ("validation_epoch_end", r"it was removed.*self.outputs.append.* in validation_step.*on_validation_epoch_end"),
    ],
)
def test_a_misspelt_or_removed_hook_is_an_error_with_its_replacement(name: str, answer: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Mine.{name} is never called: {answer}"):
        quiet_trainer(max_epochs=1).fit(_task(name), regression_loader(1))


def test_a_hook_that_is_set_to_none_counts_as_not_defined() -> None:
    names = ("setup", "configure_model", "validation_step", "val_dataloader", "on_train_batch_end", "optimizer_step")
    task = RegressionTask()
    vars(task).update(dict.fromkeys(names))
    quiet_trainer(max_epochs=1).fit(task, regression_loader(2))
    with pytest.raises(ConfigurationError, match="has no validation_step"):
        quiet_trainer().validate(task, regression_loader(2))


def test_a_hook_that_is_not_a_method_is_an_error() -> None:
    task = Untouched()
    task.setup = {"rank": 4}  # type: ignore[method-assign, assignment]
    assert "Untouched.setup is a dict" in _refused(task)


def test_clipping_receives_the_arguments_of_the_trainer_and_refuses_others() -> None:
    class Clips(RegressionTask):
        own: tuple[Any, ...] = ()

        def configure_gradient_clipping(self, optimizer: Any, *given: Any) -> None:  # type: ignore[override]
            self.given = given
            self.clip_gradients(optimizer, *self.own)
            self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])

    task = Clips()
    quiet_trainer(max_steps=1, gradient_clip_val=1e-3).fit(task, regression_loader(1))
    assert task.given == (1e-3, None)
    assert task.norm.item() == pytest.approx(1e-3, rel=1e-3)
    for own, text in (((1.0,), "gradient_clip_val=1.0"), ((None, "norm"), "gradient_clip_algorithm='norm'")):
        task.own = own
        with pytest.raises(ConfigurationError, match=f"clip_gradients received {text}, but the Trainer"):
            quiet_trainer(max_steps=1, gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(
                task, regression_loader(1)
            )
    task.own = (None, "foo")
    with pytest.raises(ConfigurationError, match="'foo' is unknown"):
        quiet_trainer(max_steps=1).fit(task, regression_loader(1))
