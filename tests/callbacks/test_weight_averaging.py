from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from trainwright.callbacks.callback import Callback, Order
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.task import TaskModule


class Normed(RegressionTask):
    def __init__(self, momentum: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__(momentum=momentum, dropout=dropout)
        self.net.insert(1, nn.BatchNorm1d(8))


class Notes(Callback):
    """Note the weights after each step, before the average is taken up, and those that validation runs on."""

    order = Order.FIRST - 1

    def __init__(self) -> None:
        self.trained: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []
        self.before_validation: dict[str, torch.Tensor] = {}
        self.after_validation: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.trained.append(weights_of(task))

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        self.before_validation = weights_of(task)

    def on_validation_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            self.validated.append(weights_of(task))

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.after_validation.append((self.before_validation, weights_of(task)))


def ema_of(history: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """Return the moving average, by the formula; what does not float is the newest."""
    average = dict(history[0])
    for weights in history[1:]:
        for name, value in weights.items():
            average[name] = torch.lerp(average[name], value, 1 - decay) if value.is_floating_point() else value
    return average


def mean_of(history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the plain mean of floating-point tensors, and the newest of the others."""
    return {
        name: torch.stack([weights[name] for weights in history]).mean(0) if newest.is_floating_point() else newest
        for name, newest in history[-1].items()
    }


def fit(task: TaskModule, callbacks: list[Callback], *, ckpt_path: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(arguments.get("seed", 0))  # dropout draws from it
    trainer = quiet_trainer(callbacks=callbacks, **arguments)
    trainer.fit(task, regression_loader(16, 4, shuffle=True), regression_loader(8, 4), ckpt_path=ckpt_path)
    return trainer


def test_without_a_function_all_updates_weigh_the_same() -> None:
    task, notes = Normed(), Notes()
    fit(task, [WeightAveraging(), notes], max_epochs=2, seed=1)
    torch.testing.assert_close(weights_of(task), mean_of(notes.trained))


def test_validation_runs_on_the_formulas_average_and_training_goes_on_from_exactly_where_it_was() -> None:
    task, with_it, without = Normed(momentum=0.9), Notes(), Notes()
    fit(task, [EMAWeightAveraging(decay=0.5), with_it], max_epochs=2, seed=1)
    assert len(with_it.trained) == 8
    torch.testing.assert_close(weights_of(task), ema_of(with_it.trained, 0.5))
    fit(Normed(momentum=0.9), [without], max_epochs=2, seed=1)
    assert_equal_weights(with_it.trained[-1], without.trained[-1])
    for number, seen in enumerate(with_it.validated, start=1):
        torch.testing.assert_close(seen, ema_of(with_it.trained[: 4 * number], 0.5))
    for before, after in with_it.after_validation:
        assert_equal_weights(before, after)


def test_an_average_that_never_began_leaves_the_weights_and_says_so() -> None:
    task, notes = RegressionTask(), Notes()
    with pytest.warns(TrainwrightWarning, match="did not average anything"):
        fit(task, [EMAWeightAveraging(update_starting_at_step=1000), notes], max_epochs=1)
    assert_equal_weights(weights_of(task), notes.trained[-1])


def test_a_checkpoint_holds_the_average_as_its_model_and_the_current_weights_beside(tmp_path: Path) -> None:
    notes, saver = Notes(), ModelCheckpoint(tmp_path, filename="saved")
    averaging = EMAWeightAveraging(decay=0.5)
    fit(Normed(), [averaging, notes, saver], max_epochs=1)
    saved = read_checkpoint(tmp_path / "saved")
    assert saved.model is not None
    torch.testing.assert_close(saved.model, ema_of(notes.trained, 0.5))
    current = saved.trainer["callbacks"][averaging.state_key]["current_model_state"]
    assert_equal_weights(current, {name: notes.trained[-1][name] for name in current})
    assert set(notes.trained[-1]) - set(current) == {"net.1.num_batches_tracked"}
    loaded = Normed.load_from_checkpoint(tmp_path / "saved")
    assert_equal_weights(weights_of(loaded), saved.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightAveraging(device="cpu", use_buffers=False),
        lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_step=3),
        lambda: EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=0),
    ],
    ids=["mean", "exponential", "epochs"],
)
def test_a_resumed_run_ends_with_the_same_average_bit_for_bit(
    make: Callable[[], WeightAveraging], tmp_path: Path
) -> None:
    whole, resumed = Normed(0.9, 0.2), Normed(0.9, 0.2)
    fit(whole, [make()], max_epochs=4, seed=1)
    saver, later = (ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last=True) for _ in range(2))
    fit(Normed(0.9, 0.2), [make(), saver], seed=1, max_steps=6)
    fit(resumed, [make(), later], max_epochs=4, seed=7, ckpt_path=saver.last_model_path)
    assert_equal_weights(weights_of(resumed), weights_of(whole))


def test_weights_that_do_not_belong_to_the_task_are_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="saved")
    fit(Normed(), [WeightAveraging(use_buffers=True), saver], max_epochs=1)
    other = [WeightAveraging(use_buffers=False), ModelCheckpoint(tmp_path)]
    with pytest.raises(CheckpointError, match="use_buffers"):
        fit(Normed(), other, max_epochs=2, ckpt_path=tmp_path / "saved")


def _ranks(folder: Path) -> list[dict[str, list[float]]]:
    found = []
    for epochs, ckpt_path in ((3, None), (2, None), (3, folder / "after-2")):
        task = RegressionTask(momentum=0.9)
        options = {"devices": "auto", "strategy": "ddp", "seed": 1, "callbacks": EMAWeightAveraging(decay=0.5)}
        trainer = quiet_trainer(max_epochs=epochs, **options)
        trainer.fit(task, regression_loader(16, 2, shuffle=True), ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(folder / f"after-{epochs}")
        found.append({name: value.flatten().tolist() for name, value in weights_of(task).items()})
    return found


@pytest.mark.distributed
def test_two_ranks_have_the_same_average_and_resume_it_exactly(tmp_path: Path) -> None:
    first, second = run_distributed(_ranks, 2, tmp_path, init=False)
    assert first == second
    whole, shorter, resumed = first
    assert whole == resumed != shorter
