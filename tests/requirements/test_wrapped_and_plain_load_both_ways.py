"""Whatever compiles or wraps a model, its checkpoint holds the model's own names and loads into any other form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.checkpoint import plain_name

pytestmark = [
    pytest.mark.slow,
    # torch 2.13's own, at a log of a compiled step
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def _task(wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> RegressionTask:
    task = RegressionTask(momentum=0.9)  # whose state is keyed by names
    task.net = wrap(task.net)
    return task


def _compile(module: nn.Module) -> nn.Module:
    # "eager" compiles without generating code: what could rename a weight is the wrapping.
    return torch.compile(module, backend="eager")  # type: ignore[assignment]


def _wrap_inside(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        setattr(module, name, checkpoint_wrapper(child))
    return module


FORMS: dict[str, Callable[[], tuple[RegressionTask, dict[str, Any]]]] = {
    "plain": lambda: (_task(), {}),
    "compiled step": lambda: (_task(), {"compile": {"backend": "eager"}}),
    "compiled module": lambda: (_task(_compile), {}),
    "wrapped modules": lambda: (_task(_wrap_inside), {}),
    "both": lambda: (_task(lambda module: _compile(_wrap_inside(module))), {}),
}


def _fit(form: str, max_epochs: int, ckpt_path: Path | None = None) -> Any:
    task, arguments = FORMS[form]()
    trainer = quiet_trainer(max_epochs=max_epochs, **arguments)
    trainer.fit(task, regression_loader(8, 2), ckpt_path=ckpt_path)
    return trainer


def _plain_weights(task: nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): tensor for name, tensor in weights_of(task).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    return {form: _fit(form, 1).save_checkpoint(folder / form.replace(" ", "-")) for form in FORMS}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("plain", "compiled step"),
        ("compiled module", "wrapped modules"),
        ("wrapped modules", "plain"),
        ("both", "plain"),
    ],
)
def test_each_form_goes_on_from_the_checkpoint_of_each_other(writer: str, reader: str, saved: dict[str, Path]) -> None:
    resumed = _fit(reader, 2, saved[writer])
    assert resumed.global_step == 8
    expected = _plain_weights(_fit("plain", 2).task)
    torch.testing.assert_close(_plain_weights(resumed.task), expected, rtol=1e-6, atol=1e-6)
