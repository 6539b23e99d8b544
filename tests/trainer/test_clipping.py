from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import fitted


class _SeesGradients(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad.reshape(-1).clone() for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat(grads))
        return super().step(closure)


class _Task(RegressionTask):
    def configure_optimizers(self) -> Any:
        return _SeesGradients(self.parameters(), lr=self.lr)


def _gradients(task: RegressionTask | None = None, num_samples: int = 6, **arguments: Any) -> list[torch.Tensor]:
    trainer = fitted(task or _Task(), regression_loader(num_samples), max_epochs=1, **arguments)
    seen: list[torch.Tensor] = trainer.optimizers[0].seen
    return seen


@pytest.mark.parametrize(("precision", "k"), [("32-true", 1), ("16-mixed", 2)])
def test_clipping_by_norm_leaves_that_total_norm(precision: str, k: int) -> None:
    found = _gradients(gradient_clip_val=0.05, precision=precision, accumulate_grad_batches=k)
    # The scaler of 16-mixed leaves out the steps whose scaled gradients overflow, until its scale is small enough.
    assert len(found) == 6 // k or (precision == "16-mixed" and 0 < len(found) < 6 // k)
    for gradient in found:
        torch.testing.assert_close(gradient.norm(), torch.tensor(0.05), rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_clipping_by_value_leaves_that_largest_element(precision: str) -> None:
    found = _gradients(gradient_clip_val=1e-10, gradient_clip_algorithm="value", precision=precision)
    for gradient in found:
        torch.testing.assert_close(gradient.abs().max(), torch.tensor(1e-10))


@pytest.mark.parametrize("value", [0, 1e6])
def test_nothing_is_clipped_without_a_value_or_below_it(value: Any) -> None:
    torch.testing.assert_close(_gradients(gradient_clip_val=value), _gradients(), rtol=0, atol=0)
