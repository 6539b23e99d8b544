"""Notes and messages that the Trainer adds to torch's errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.trainer.recovery.failure import describe


class _OneCycle(RegressionTask):
    def __init__(self, total_steps: int | None) -> None:
        super().__init__()
        self.total_steps = total_steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.total_steps or int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_one_cycle_schedule_has_to_be_as_long_as_estimated_stepping_batches() -> None:
    quiet_trainer(max_epochs=2).fit(_OneCycle(None), regression_loader(4))
    with pytest.raises(ConfigurationError, match=r"OneCycleLR is shorter.*self.trainer.estimated_stepping_batches"):
        quiet_trainer(max_epochs=2).fit(_OneCycle(4), regression_loader(4))


class _WrongShape(RegressionTask):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = batch[0][:, :2] if batch_idx == 3 else batch[0]
        return self.net(inputs).square().mean()  # the user's line

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0][:, :3])  # the user's line in a validation


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def _notes(task: Any, *loaders: Any, **arguments: Any) -> list[str]:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        quiet_trainer(max_epochs=1, num_sanity_val_steps=0, **arguments).fit(task, *loaders)
    notes: list[str] = caught.value.__notes__
    return notes


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 3), (4, 0), (3, 1)])
def test_wrong_shapes_in_a_step_name_the_line_and_the_batch(accumulate: int, steps: int) -> None:
    (note,) = _notes(_WrongShape(), regression_loader(8), accumulate_grad_batches=accumulate)
    line = _line_of("the user's line")
    assert f"_WrongShape.training_step, {__file__}:{line}: return" in note
    assert f"epoch 0, step {steps}, batch_idx 3\n" in note
    assert "batch: [float32[1, 4] on cpu, float32[1, 1] on cpu]" in note


def test_wrong_shapes_in_validation_and_manual_optimization_name_the_line() -> None:
    (note,) = _notes(_WrongShape(), regression_loader(2), regression_loader(2))
    line = _line_of("the user's line in a validation")
    assert f"_WrongShape.validation_step, {__file__}:{line}: self.net" in note
    assert "epoch 0, step 2, batch_idx 0\n" in note

    class ByHand(_WrongShape):
        automatic_optimization = False

    (note,) = _notes(ByHand(), regression_loader(8))
    assert "ByHand.training_step" in note
    assert "batch_idx 3\n" in note


def test_batches_of_any_type_are_described() -> None:
    tensor = torch.zeros(2, 3)
    assert describe({"x": tensor, "y": (1, tensor.long())}) == (
        "{'x': float32[2, 3] on cpu, 'y': (int, int64[2, 3] on cpu)}"
    )
    assert describe([0] * 20).endswith("int, and 12 more]")
    assert describe(_Pair(tensor, "a")) == "_Pair(first=float32[2, 3] on cpu, second=str)"


@dataclass
class _Pair:
    first: torch.Tensor
    second: str
