"""Notes and messages that the Trainer adds to torch's errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, StepTask, regression_loader
from trainwright import Accelerator, DistributedDataParallelKwargs
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, TaskError
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


def test_errors_outside_steps_get_no_note() -> None:
    class Fails(Callback):
        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        quiet_trainer(max_epochs=1, callbacks=[Fails()]).fit(RegressionTask(), regression_loader(4))
    assert not hasattr(caught.value, "__notes__")

    with pytest.raises(TaskError) as said:
        quiet_trainer(max_epochs=1).fit(StepTask(lambda task, batch, idx: torch.tensor(1.0)), regression_loader(4))
    assert not hasattr(said.value, "__notes__")


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


class _LeavesOut(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.left_out = torch.nn.Linear(2, 2)


class _Told(Callback):
    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        self.errors.append(exception)


def _leave_out() -> tuple[str, int, str, int]:
    told, options = _Told(), {"devices": "auto", "max_epochs": 1}
    with pytest.raises(TaskError) as caught:
        quiet_trainer(strategy="ddp", callbacks=[told], **options).fit(_LeavesOut(), regression_loader(8))
    assert told.errors == [caught.value]
    looks = fitted(_LeavesOut(), regression_loader(8), strategy="ddp_find_unused_parameters_true", **options)
    with pytest.raises(TaskError) as in_a_loop:
        _own_loop()
    steps = _own_loop(DistributedDataParallelKwargs(find_unused_parameters=True))
    return str(caught.value), looks.global_step, str(in_a_loop.value), steps


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs).mean()


def _own_loop(*handlers: Any) -> int:
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = accelerator.prepare(_Model())
    for _ in range(3):
        accelerator.backward(model(torch.ones(4, 2)))
    return 3


@pytest.mark.slow
@pytest.mark.distributed
def test_unused_parameters_are_an_error_that_names_the_option_in_fits_and_user_written_loops() -> None:
    for of_fit, steps_of_fit, of_loop, num_steps in run_distributed(_leave_out, 2, init=False):
        assert (
            "_LeavesOut's last step does not depend on some of its parameters: left_out.weight, left_out.bias."
            in of_fit
        )
        assert "frozen" not in of_fit
        assert "DDPStrategy(find_unused_parameters=True)" in of_fit
        assert "strategy='ddp_find_unused_parameters_true'" in of_fit
        assert (
            "_Model's last step does not depend on some of its parameters: left_out.weight, left_out.bias." in of_loop
        )
        assert "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]" in of_loop
        assert (steps_of_fit, num_steps) == (4, 3)
