from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from tests.strategies.fsdp.sharded import Blocks, batches
from trainwright import DataModule, Trainer
from trainwright.callbacks.callback import Callback
from trainwright.strategies import FSDPStrategy
from trainwright.trainer.planning.run_plan import Plan


class _Late(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
        self.net[0].bias.requires_grad_(False)


def _source(plan: Plan, name: str) -> tuple[Any, str]:
    return plan.settings[name].value, plan.settings[name].source


def test_a_plan_of_one_process() -> None:
    plan = quiet_trainer(max_epochs=3, max_steps=20).plan(RegressionTask(), regression_loader(18, 4))
    assert (plan.strategy["name"], plan.processes["count"], plan.processes["mesh"]) == ("SingleDeviceStrategy", 1, {})
    of_model = {"total": 49, "trainable": 49, "frozen": 0}
    assert plan.parameters == {**of_model, **{f"{name}_per_device": number for name, number in of_model.items()}}
    assert (plan.data["micro_batch"], plan.data["global_batch"], plan.data["samples_per_epoch"]) == (4, 4, 18)
    assert (plan.data["batches_per_epoch"], plan.data["steps_per_epoch"], plan.data["total_steps"]) == (5, 5, 15)
    assert plan.precision["reduction"] == "none"
    assert plan.memory["forecast_bytes"] == 4 * (49 + 2 * 49 + 49 + 2 * 32)  # two temporary copies of the largest
    assert "peak_bytes" not in plan.memory
    unsharded = FSDPStrategy(reshard_after_forward=False)
    plan = quiet_trainer(devices=2, strategy=unsharded).plan(RegressionTask(), regression_loader())
    assert plan.memory["forecast_bytes"] is None


def test_settings_name_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = quiet_trainer(min_steps=2)
    trainer.max_epochs = 4
    plan = trainer.plan(RegressionTask(), regression_loader())
    assert _source(plan, "precision") == ("bf16-mixed", "ACCELERATE_MIXED_PRECISION")
    assert _source(plan, "min_steps") == (2, "argument")
    assert _source(plan, "max_epochs") == (4, "attribute")
    assert _source(plan, "log_every_n_steps") == (50, "default")
    plan = Trainer(accelerator="cpu", devices=1, fast_dev_run=2).plan(RegressionTask(), regression_loader())
    assert _source(plan, "limit_train_batches") == (2, "fast_dev_run")
    assert (plan.data["total_steps"], plan.loggers) == (2, ["DummyLogger"])


def test_a_model_of_configure_model_is_built_as_a_copy() -> None:
    task = _Late()
    plan = quiet_trainer(devices=2, strategy="fsdp").plan(task, regression_loader())
    assert list(task.parameters()) == []
    assert (plan.parameters["total"], plan.parameters["trainable"], plan.parameters["frozen"]) == (43, 36, 7)
    assert plan.parameters["total_per_device"] == 4 * 4 + 4 + 7 + 1  # the largest chunks of 7, 7, 1 and 1 rows
    assert plan.memory["forecast_bytes"] is None
    assert "forecast_bytes: memory is not estimated for models with frozen parameters" in plan.notes


class _NeedsValues(RegressionTask):
    def configure_model(self) -> None:
        nn.Linear(2, 2).weight.sum().item()


class _WithSetup(DataModule):
    def setup(self, stage: str) -> None:
        raise AssertionError("a plan calls no setup")

    def train_dataloader(self) -> Any:
        raise AssertionError("a plan reads no data before its setup")


def test_what_is_not_known_has_a_reason() -> None:
    plan = quiet_trainer().plan(_NeedsValues(), datamodule=_WithSetup())
    assert (plan.parameters["total"], plan.data["global_batch"], plan.data["total_steps"]) == (None, None, None)
    assert any("data: _WithSetup.setup is not called by a plan, because it may" in note for note in plan.notes)
    assert any("_NeedsValues.configure_model failed on the device 'meta'" in note for note in plan.notes)
    assert ["total", "not", "known"] in [line.split() for line in str(plan).splitlines()]


def test_after_a_fit_the_peak_is_measured() -> None:
    task, trainer = RegressionTask(), quiet_trainer(max_steps=1)
    trainer.fit(task, regression_loader())
    plan = trainer.plan(task, regression_loader())
    assert isinstance(plan.memory["peak_bytes"], int)
    assert plan.memory["peak_bytes"] > 2**20
    assert plan.memory["peak_of"] == "all host memory of this process since its start"


def _shard_sizes() -> tuple[int, int]:
    """Return the numbers of parameters of rank 0's plan, and of this rank's shards in a fit."""
    task, found = Blocks(), list[int]()

    class Counts(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            shards = [p.to_local() if isinstance(p, DTensor) else p for p in task.parameters()]
            found.append(sum(shard.numel() for shard in shards))

    trainer = quiet_trainer(devices="auto", strategy="fsdp", max_steps=1, callbacks=Counts())
    plan = trainer.plan(task, batches(2))
    trainer.fit(task, batches(2))
    return plan.parameters["total_per_device"] or 0, found[0]


@pytest.mark.distributed
def test_the_parameters_of_a_device_are_those_of_a_run() -> None:
    (planned, on_first), (_, on_second) = run_distributed(_shard_sizes, 2)
    assert planned == on_first
    assert on_first + on_second == sum(p.numel() for p in Blocks().parameters())
