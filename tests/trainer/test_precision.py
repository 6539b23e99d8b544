from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer, weights_of

# name → dtype of the parameters, dtype that a matrix product gives in a training step
_PRECISIONS = {
    "64-true": (torch.float64, torch.float64),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}

# What torch 2.13's compiler warns itself of, and hides from users, becomes an error where warnings are errors.
_COMPILER_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit.script_method`")


@pytest.mark.parametrize("precision", _PRECISIONS)
def test_a_precision_sets_the_dtypes_of_parameters_and_products(precision: str) -> None:
    dtypes: set[tuple[torch.dtype, ...]] = set()

    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        dtypes.add((task.net[0].weight.dtype, task.net(batch[0]).dtype, torch.zeros(1).dtype))
        return task.loss(batch)

    trainer = fitted(StepTask(step), regression_loader(16, 4), max_epochs=1, precision=precision)
    of_parameters, of_products = _PRECISIONS[precision]
    assert dtypes == {(of_parameters, of_products, of_parameters)}
    assert torch.get_default_dtype() == torch.float32
    assert trainer.precision == precision


@pytest.mark.slow
def test_repeatable_kernels_are_used_when_asked_and_two_runs_from_one_seed_are_equal() -> None:
    seen: list[tuple[bool, bool]] = []

    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), warns))
        return task.loss(batch)

    def run(deterministic: Any) -> torch.Tensor:
        torch.manual_seed(3)
        task = StepTask(step, dropout=0.5, momentum=0.9)
        fitted(task, regression_loader(16, 2, shuffle=True), max_epochs=2, deterministic=deterministic, seed=3)
        return weights_of(task)

    assert torch.equal(run(True), run(True))
    assert set(seen) == {(True, False)}
    seen.clear()
    run("warn")
    assert set(seen) == {(True, True)}
    assert not torch.are_deterministic_algorithms_enabled()


@_COMPILER_WARNS
@pytest.mark.slow
def test_a_compiled_run_trains_like_a_plain_one_and_keeps_the_users_names() -> None:
    compiled, plain = RegressionTask(), RegressionTask()
    trainer, other = quiet_trainer(max_epochs=2, compile={"backend": "aot_eager"}), quiet_trainer(max_epochs=2)
    trainer.fit(compiled, regression_loader(8, 2), regression_loader(4, 2))
    other.fit(plain, regression_loader(8, 2), regression_loader(4, 2))
    assert list(compiled.state_dict()) == list(RegressionTask().state_dict())
    assert list(trainer.strategy.state.model_state()) == list(compiled.state_dict())
    torch.testing.assert_close(weights_of(compiled), weights_of(plain))
    assert trainer.callback_metrics["val_loss"] == pytest.approx(other.callback_metrics["val_loss"])


def test_anomaly_detection_names_the_operation_behind_a_nan() -> None:
    with (
        pytest.warns(UserWarning, match=r"Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match=r"returned nan values"),
    ):
        quiet_trainer(max_epochs=1, detect_anomaly=True).fit(
            StepTask(lambda task, batch, idx: torch.sqrt(0 * task.loss(batch))), regression_loader(2)
        )
    assert not torch.is_anomaly_enabled()
