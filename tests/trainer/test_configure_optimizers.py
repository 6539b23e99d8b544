from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer, weights_of
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.trainer.optimization import parse_optimizers
from trainwright.trainer.trainer import Trainer

Configure = Callable[[RegressionTask], Any]


def _task(configure: Configure) -> RegressionTask:
    class Task(RegressionTask):
        automatic_optimization = True  # all of its optimizers step on one loss

        def configure_optimizers(self) -> Any:
            return configure(self)

    return Task()


def _fit(configure: Configure, epochs: int = 1, batches: int = 2, **arguments: Any) -> Trainer:
    return fitted(_task(configure), regression_loader(batches), max_epochs=epochs, **arguments)


def _sgd(task: RegressionTask) -> Optimizer:
    return SGD(task.parameters(), lr=1.0)


def _halves(task: RegressionTask) -> tuple[Optimizer, Optimizer]:
    return SGD(task.net[0].parameters(), lr=0.1), SGD(task.net[3].parameters(), lr=0.1)


def _with_step(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def _two_lists(task: RegressionTask) -> Any:
    optimizers = _halves(task)
    return list(optimizers), [_with_step(optimizer) for optimizer in optimizers]


def _one_dict(task: RegressionTask) -> Any:
    optimizer = _sgd(task)
    return {"optimizer": optimizer, "lr_scheduler": _with_step(optimizer)}


def _list_of_dicts(task: RegressionTask) -> Any:
    first, second = _halves(task)
    return [{"optimizer": first, "lr_scheduler": _with_step(first)}, {"optimizer": second}]


@pytest.mark.parametrize(
    ("configure", "optimizers", "schedules"),
    [
        pytest.param(_sgd, 1, 0, id="one"),
        pytest.param(_halves, 2, 0, id="tuple of two"),
        pytest.param(_two_lists, 2, 2, id="two lists"),
        pytest.param(lambda task: ([(o := _sgd(task))], [{"scheduler": _with_step(o)}]), 1, 1, id="two lists, dict"),
        pytest.param(_one_dict, 1, 1, id="dict with schedule"),
        pytest.param(_list_of_dicts, 2, 1, id="list of dicts"),
    ],
)
def test_every_form_trains_and_steps_its_schedules(configure: Configure, optimizers: int, schedules: int) -> None:
    task = _task(configure)
    before = weights_of(task)
    trainer = fitted(task, regression_loader(2), max_epochs=2)
    assert (len(trainer.optimizers), len(trainer.lr_scheduler_configs)) == (optimizers, schedules)
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [2] * schedules
    assert {(config.interval, config.frequency) for config in trainer.lr_scheduler_configs} <= {("epoch", 1)}
    assert (weights_of(task) != before).all()


def _scheduled(task: RegressionTask, **options: Any) -> Any:
    optimizer = _sgd(task)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _with_step(optimizer), **options}}


def _foreign_schedule(task: RegressionTask) -> Any:
    return [_sgd(task)], [_with_step(_sgd(task))]


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda task: [_sgd(task), 3], r"Return an optimizer, a list of them"),
        (lambda task: {"optimiser": _sgd(task)}, "unknown key 'optimiser'. Did you mean 'optimizer'"),
        (lambda task: {"optimizer": 3}, "'optimizer' is int"),
        (lambda task: _scheduled(task, intervall="step"),
         "unknown key 'intervall' of a scheduler's dict. Did you mean 'interval'"),
        (lambda task: _scheduled(task, interval="steps"),
         "interval='steps' is unknown. Did you mean 'step'"),
        (lambda task: _scheduled(task, frequency=0),
         "frequency=0 must be at least 1"),
        (lambda task: {"optimizer": _sgd(task), "lr_scheduler": 0.5}, "float is not a learning-rate scheduler"),
        (_foreign_schedule, "belongs to an optimizer .SGD. that was not returned"),
        (lambda task: ([(o := _sgd(task))], [ReduceLROnPlateau(o)]), "needs a metric to watch"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_meant_is_refused(configure: Configure, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _fit(configure)


def test_a_schedule_of_the_step_counts_optimizer_steps() -> None:
    trainer = _fit(lambda task: _scheduled(task, interval="step"), batches=4, accumulate_grad_batches=3)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


class _SeenBySchedule(RegressionTask):
    """Logs the number of completed steps, and notes what its plateau schedule is stepped with."""

    def __init__(self, **schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.log("train", float(self.global_step + 1))
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val", float(self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = _sgd(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), **self.schedule}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append((self.global_step, float(metric)))


@pytest.mark.parametrize(
    ("interval", "frequency", "val_check_interval", "accumulate"),
    [("step", 2, 2, 1), ("step", 2, "2 steps", 3), ("epoch", 1, "1 epoch", 1), ("epoch", 2, 4, 1)],
)
@pytest.mark.parametrize("monitor", ["val", "train"])
def test_a_plateau_sees_the_validation_of_its_own_step(
    monitor: str, interval: str, frequency: int, val_check_interval: Any, accumulate: int
) -> None:
    steps_per_epoch, epochs = 6 // accumulate, 4
    task = _SeenBySchedule(interval=interval, frequency=frequency, monitor=monitor)
    trainer = quiet_trainer(
        max_epochs=epochs, val_check_interval=val_check_interval, accumulate_grad_batches=accumulate
    )
    trainer.fit(task, regression_loader(6), regression_loader(1))

    # The same by a plain model.
    if interval == "epoch":
        frequency *= steps_per_epoch
    every = {"1 epoch": steps_per_epoch, "2 steps": 2}.get(val_check_interval, val_check_interval)
    validations = [step for step in range(1, 6 * epochs + 1) if (step - 1) % steps_per_epoch % every == every - 1]
    due = range(frequency, steps_per_epoch * epochs + 1, frequency)
    model = [(s, float(s if monitor == "train" else max(v for v in validations if v <= s))) for s in due]

    assert task.seen == model


@pytest.mark.parametrize("strict", [True, False])
def test_a_plateau_whose_metric_was_not_logged_is_an_error_or_a_warning(strict: bool) -> None:
    def configure(task: RegressionTask) -> Any:
        optimizer = _sgd(task)
        plateau = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "train_los", "strict": strict}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

    message = r"'train_los', which was not logged. Did you mean 'train_loss'"
    with (
        pytest.raises(ConfigurationError, match=message) if strict else pytest.warns(TrainwrightWarning, match=message)
    ):
        _fit(configure)


def test_several_optimizers_with_automatic_optimization_are_a_warning_once() -> None:
    task = type("Task", (RegressionTask,), {"configure_optimizers": _halves})()
    with pytest.warns(UserWarning, match=r"Task.* returned 2 optimizers.*automatic_optimization = False"):
        quiet_trainer(max_epochs=1).fit(task, regression_loader(2))
    quiet_trainer(max_epochs=1).fit(task, regression_loader(2))  # warnings are errors here


def test_a_schedule_whose_step_requires_an_epoch_is_an_error_without_lr_scheduler_step() -> None:
    steps: list[int] = []

    class ByEpoch:
        def step(self, epoch: int) -> None:
            steps.append(epoch)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Mine(RegressionTask):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [ByEpoch()]

    class Stepping(Mine):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(self.current_epoch)

    with pytest.raises(ConfigurationError, match=r"ByEpoch.step requires other arguments.*Define lr_scheduler_step"):
        fitted(Mine(), regression_loader(2), max_epochs=1)
    fitted(Stepping(), regression_loader(2), max_epochs=2)
    assert steps == [0, 1]


def test_a_schedule_of_one_cycle_without_an_interval_warns() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    with pytest.warns(TrainwrightWarning, match="OneCycleLR steps once per epoch"):
        _, [config] = parse_optimizers(([optimizer], [cycle]), "Task")
    assert (config.interval, config.reduce_on_plateau) == ("epoch", False)
