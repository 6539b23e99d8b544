from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_data, regression_loader
from trainwright.callbacks import ModelCheckpoint, StochasticWeightAveraging
from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule


class Scheduled(RegressionTask):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(lr=0.4, **arguments)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Normed(RegressionTask):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.net.insert(1, nn.BatchNorm1d(8))
        self.inputs: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self.inputs.append(batch[0])
        return super().training_step(batch, batch_idx)


class Notes(Callback):
    order = Order.FIRST - 1

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        if group.first_idx == 0:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.weights.append(weights_of(task))


def fit(task: TaskModule, callbacks: list[Callback], *, ckpt_path: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(1)
    trainer = quiet_trainer(callbacks=callbacks, seed=1, **arguments)
    trainer.fit(task, regression_loader(16, 4, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def mean_of(weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([each[name] for each in weights]).mean(0) for name in weights[0]}


def test_the_rate_anneals_to_its_own_and_the_schedule_of_the_task_rests() -> None:
    notes = Notes()
    fit(Scheduled(), [StochasticWeightAveraging(0.01, 3, annealing_epochs=4), notes], max_epochs=9)
    shares = [(1 - math.cos(math.pi * min(epoch / 4, 1.0))) / 2 for epoch in range(7)]
    assert notes.rates == pytest.approx([0.4, 0.2, *(0.01 * share + 0.1 * (1 - share) for share in shares)])


def test_the_task_ends_with_the_mean_of_the_weights_that_the_last_epochs_began_with() -> None:
    task, notes = RegressionTask(), Notes()
    averaging = StochasticWeightAveraging(0.05, 0.5)
    fit(task, [averaging, notes], max_epochs=6)
    assert averaging.swa_start == 2
    torch.testing.assert_close(weights_of(task), mean_of(notes.weights[1:5]))


def test_batch_normalization_is_measured_anew_on_the_mean_over_the_training_data() -> None:
    task = Normed()
    trainer = fit(task, [StochasticWeightAveraging(0.05, 1)], max_epochs=3)
    norm = task.net[1]
    assert isinstance(norm, nn.BatchNorm1d)
    outputs = [task.net[0](inputs).detach() for inputs in task.inputs]
    assert torch.cat(task.inputs).shape == (16, 4)
    assert {tuple(row) for row in torch.cat(task.inputs).tolist()} == {
        tuple(row) for row in regression_data(16).tensors[0].tolist()
    }
    torch.testing.assert_close(norm.running_mean, torch.stack([output.mean(0) for output in outputs]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([output.var(0) for output in outputs]).mean(0))
    assert norm.momentum == 0.1
    assert trainer.global_step == 12
    assert "train_loss" in trainer.callback_metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "stop"), [(Scheduled, {"max_steps": 6}), (Scheduled, {"max_epochs": 4}), (Normed, {"max_steps": 14})]
)
def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(
    make: Callable[[], TaskModule], stop: dict[str, int], tmp_path: Path
) -> None:
    whole, resumed = make(), make()
    notes, later = Notes(), Notes()
    fit(whole, [StochasticWeightAveraging(0.05, 3), notes], max_epochs=6)
    saver, again = (ModelCheckpoint(tmp_path, every_n_train_steps=2) for _ in range(2))
    nothing_yet = stop == {"max_steps": 6}
    with pytest.warns(TrainwrightWarning, match="not average anything") if nothing_yet else contextlib.nullcontext():
        fit(make(), [StochasticWeightAveraging(0.05, 3), saver], **{"max_epochs": 6, **stop})
    fit(resumed, [StochasticWeightAveraging(0.05, 3), again, later], max_epochs=6, ckpt_path=saver.best_model_path)
    assert later.rates == notes.rates[len(notes.rates) - len(later.rates) :]
    assert_equal_weights(weights_of(resumed), weights_of(whole))


def _ranks() -> list[dict[str, list[float]]]:
    task = Normed()
    trainer = quiet_trainer(
        devices="auto", strategy="ddp", max_epochs=3, seed=1, callbacks=[StochasticWeightAveraging(0.05, 1)]
    )
    trainer.fit(task, regression_loader(16, 2, shuffle=True))
    own = torch.stack([task.net[0](inputs).detach().mean(0) for inputs in task.inputs]).mean(0)
    saved = {name: value.flatten().tolist() for name, value in weights_of(task).items()}
    return [saved, {"own": own.tolist()}]


@pytest.mark.distributed
def test_two_ranks_end_with_the_same_mean_and_with_statistics_of_all_the_data() -> None:
    first, second = run_distributed(_ranks, 2, init=False)
    assert first[0] == second[0]
    both = (torch.tensor(first[1]["own"]) + torch.tensor(second[1]["own"])) / 2
    torch.testing.assert_close(torch.tensor(first[0]["net.1.running_mean"]), both)


class _Several(RegressionTask):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("make", "share", "arguments", "message"),
    [
        (_Several, 0.8, {"max_epochs": 1}, "one optimizer and at most one schedule"),
        (RegressionTask, 0.8, {"max_steps": 4, "max_epochs": -1}, "fraction of max_epochs"),
    ],
)
def test_what_a_fit_lacks_is_refused(make: Any, share: float, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(make(), [StochasticWeightAveraging(0.05, share)], **arguments)


def test_a_function_of_the_users_own_averages() -> None:
    task, notes = RegressionTask(), Notes()
    fit(task, [StochasticWeightAveraging(0.05, 2, avg_fn=lambda mean, now, num: torch.maximum(mean, now)), notes],
        max_epochs=4)  # fmt: skip
    first, second, third, _ = notes.weights
    largest = {name: torch.maximum(torch.maximum(first[name], second[name]), third[name]) for name in first}
    assert_equal_weights(weights_of(task), largest)
