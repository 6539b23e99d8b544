from __future__ import annotations

import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.callbacks.fake_run import FakeRun
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks import LossSpikeDetector, ModelCheckpoint
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import SaveRequest
from trainwright.core.state import StepResult


def feed(detector: LossSpikeDetector, losses: list[float], root: Path, log_every: int = 1) -> FakeRun:
    run = FakeRun([detector], root, log_every_n_steps=log_every)
    detector.setup(run, run.task, "fit")  # type: ignore[arg-type]
    for loss in losses:
        run.state.step += 1
        detector.on_train_step_end(run, run.task, StepResult(torch.tensor(loss)))  # type: ignore[arg-type]
    return run


QUIET = [1.0 + 0.1 * math.sin(i) for i in range(20)]


def test_a_jump_is_warned_of_with_its_step_loss_and_bound(tmp_path: Path) -> None:
    detector = LossSpikeDetector(window=10)
    with pytest.warns(TrainwrightWarning, match=r"jumped at step 20: 5, above 1\.[0-9]+\.") as warned:
        feed(detector, [*QUIET, 5.0, *QUIET], tmp_path)
    assert len(warned) == 1
    assert (detector.num_spikes, detector.last_spike) == (1, 20)


@given(
    losses=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60),
    window=st.integers(4, 20),
    threshold=st.floats(0.5, 20.0),
    every=st.integers(1, 7),
)
def test_spikes_are_those_of_the_formula_however_often_losses_are_read(
    losses: list[float], window: int, threshold: float, every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    losses = [torch.tensor(loss).item() for loss in losses]  # as float32 holds them
    detector = LossSpikeDetector(window=window, threshold=threshold, action="rollback")
    run = feed(detector, losses, tmp_path_factory.getbasetemp(), every)
    detector.on_train_epoch_end(run, run.task)  # type: ignore[arg-type]
    rows: list[int] = []
    before = False
    for i, loss in enumerate(losses):
        last = losses[max(0, i - window) : i]
        spike = False
        if len(last) >= window // 2:
            median = statistics.median(last)
            mad = statistics.median([abs(other - median) for other in last])
            spike = loss > median + threshold * max(1.4826 * mad, 0.01 * abs(median))
        if spike and not before:
            rows.append(i)
        before = spike
    asked = [before_step for _, before_step, _ in run.rollbacks]
    assert set(asked) <= set(rows)  # several between two readings are one event
    assert asked[:1] == rows[:1]
    if every == 1:
        assert asked == rows


def test_a_task_that_optimizes_by_hand_is_refused(tmp_path: Path) -> None:
    task = RegressionTask()
    task.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        quiet_trainer(callbacks=LossSpikeDetector()).fit(task, regression_loader(4))


class Jumps(RegressionTask):
    """The loss is much larger in some (epoch, batch)."""

    def __init__(self, *jumps: tuple[int, int], rank: int | None = None) -> None:
        super().__init__(momentum=0.5, lr=1e-3)
        self.jumps = jumps
        self.rank = rank
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        here = self.current_epoch, batch_idx
        self.seen.append(here)
        loss = 1.0 + 1e-3 * self.loss(batch)
        jump = here in self.jumps and self.rank in (None, self.global_rank)
        return loss * 50 if jump else loss


def test_stop_ends_the_run(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=2, callbacks=LossSpikeDetector(window=10, action="stop"))
    with pytest.warns(TrainwrightWarning, match="jumped at step 10"):
        trainer.fit(Jumps((0, 10)), regression_loader(20))
    assert trainer.global_step == 12  # the next step at which losses are read


def rolls_back() -> LossSpikeDetector:
    return LossSpikeDetector(window=10, action="rollback")


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_rollback_goes_before_the_spike_and_leaves_out_what_came_since(log_every: int, tmp_path: Path) -> None:
    task = Jumps((0, 13))
    stop = 14 if log_every == 1 else 16  # where the loss is read

    def save(run: Any, *_: object) -> None:
        if run.state.step == run.state.batches == stop:
            run.request_save(SaveRequest("spike"))

    savers = [ModelCheckpoint(every_n_train_steps=5, save_top_k=-1), LambdaCallback(on_train_step_end=save)]
    options = {"max_epochs": 1, "log_every_n_steps": log_every, "callbacks": [rolls_back(), *savers]}
    with pytest.warns(TrainwrightWarning, match="jumped at step 13.* Rolled back from step .* to step 10"):
        trainer = fitted(task, regression_loader(20), default_root_dir=tmp_path, **options)
    assert not list(tmp_path.rglob("spike"))
    assert task.seen == [(0, i) for i in range(stop)] + [(0, i) for i in range(stop, 20)]
    assert (trainer.global_step, trainer.state.batches) == (20 - (stop - 10), 20)
    (skipped,) = trainer.skipped_batches
    assert (skipped.first_batch, skipped.num_batches, skipped.start, skipped.stop) == (10, stop - 10, 10, stop)
    assert "LossSpikeDetector" in skipped.reason


def _two_ranks(root: Path) -> tuple[Any, ...]:
    warnings.simplefilter("ignore")
    task, detector = Jumps((0, 13), rank=1), rolls_back()
    trainer = quiet_trainer(
        devices="auto", max_epochs=1, log_every_n_steps=4, default_root_dir=root, num_sanity_val_steps=0,
        callbacks=[detector, ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(task, regression_loader(40))
    return trainer.global_step, trainer.skipped_batches, detector.num_spikes, detector.state_dict()


@pytest.mark.distributed
def test_a_spike_on_one_rank_only_sends_all_of_them_back(tmp_path: Path) -> None:
    first, second = run_distributed(_two_ranks, 2, tmp_path, init=False, timeout=120)
    assert first[:2] == second[:2]
    (skipped,) = first[1]
    assert (skipped.first_batch, skipped.num_batches, skipped.unit, skipped.start, skipped.stop) == (
        10, 6, "samples", 20, 32,
    )  # fmt: skip
    assert first[0] == 20 - 6
    assert first[2] == 1


def test_a_new_run_begins_without_the_losses_of_the_last_one(tmp_path: Path) -> None:
    detector = LossSpikeDetector(window=10)
    feed(detector, QUIET, tmp_path)
    feed(detector, [loss + 10 for loss in QUIET], tmp_path)  # no warning, which would be an error
    assert (detector.num_spikes, detector.last_spike) == (0, None)
