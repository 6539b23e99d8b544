"""Learning-rate schedules over the optimizer of DeepSpeed's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import DeepSpeedStrategy, DummyOptim, DummyScheduler
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.deepspeed.zero_model import connect_schedule


class _Configured(RegressionTask):
    """Leaves the optimizer to DeepSpeed's config and brings a schedule of its own, or DeepSpeed's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        dummy = DummyOptim(self.parameters(), lr=0.1)
        own = torch.optim.lr_scheduler.LambdaLR(dummy, lambda step: 0.5) if self.own else DummyScheduler(dummy)
        return {"optimizer": dummy, "lr_scheduler": {"scheduler": own, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def _fit() -> tuple[str, list[float]]:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 4,
                                                     "warmup_type": "linear"}},
        "zero_optimization": {"stage": 1},
    }  # fmt: skip
    strategy, own, theirs = DeepSpeedStrategy(config=config), _Configured(True), _Configured(False)
    with pytest.raises(ConfigurationError) as refused:
        quiet_trainer(devices="auto", strategy=strategy, max_epochs=1).fit(own, regression_loader(16, 2))
    assert own.rates == []
    quiet_trainer(devices="auto", strategy=strategy, max_epochs=1).fit(theirs, regression_loader(16, 2))
    return str(refused.value), theirs.rates


@pytest.mark.distributed
def test_a_schedule_over_dummy_optim_is_an_error_and_dummy_scheduler_works() -> None:
    for text, rates in run_distributed(_fit, 2, init=False, timeout=300):
        assert "LambdaLR was created with a DummyOptim" in text
        assert rates[0] < rates[-1] <= 0.1
        assert rates == sorted(rates)


def _take(scheduler: Any) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    run: Any = SimpleNamespace(lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler, interval="epoch")])
    connect_schedule(None, None, run, DeepSpeedStrategy(config=config).config.origin)


def test_a_torch_schedule_over_dummy_optim_is_an_error() -> None:
    dummy = DummyOptim([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for schedule in (
        torch.optim.lr_scheduler.LambdaLR(dummy, lambda step: 0.5),
        torch.optim.lr_scheduler.ReduceLROnPlateau(dummy),
    ):
        with pytest.raises(
            ConfigurationError, match=rf"{type(schedule).__name__} was created with a DummyOptim.*DummyScheduler"
        ):
            _take(schedule)


def test_a_torch_schedule_over_a_torch_optimizer_is_accepted() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    _take(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5))
    with pytest.raises(ConfigurationError, match="needs a 'scheduler'"):
        _take(DummyScheduler(optimizer))
