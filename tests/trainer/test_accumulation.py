from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tests.helpers.tasks import RecordingCallback, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer, weights_of
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.core.errors import ConfigurationError


@pytest.mark.parametrize(("limit", "batches", "k"), [(1.0, 64, 3), (0.7, 44, 4)])
def test_weights_change_at_the_end_of_a_group_and_of_the_epoch_only(limit: float, batches: int, k: int) -> None:
    recorder = RecordingCallback("on_train_start", "on_train_batch_end", note=lambda _, run: weights_of(run.task))
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=limit, accumulate_grad_batches=k, callbacks=recorder)
    trainer.fit(RegressionTask(), regression_loader())
    steps = pairwise(weights for _, weights in recorder.notes)
    changed = [index for index, (before, after) in enumerate(steps) if not torch.equal(before, after)]
    assert changed == [i for i in range(batches) if (i + 1) % k == 0 or i == batches - 1]
    assert trainer.global_step == math.ceil(batches / k)


def test_accumulation_follows_a_schedule_by_epoch() -> None:
    scheduling, steps = {1: 2, 3: 4}, [10, 5, 5, 3]
    recorder = RecordingCallback("on_train_epoch_end", note=lambda _, trainer: trainer.state.step_in_epoch)
    trainer = quiet_trainer(max_epochs=4, callbacks=[GradientAccumulationScheduler(scheduling), recorder])
    trainer.fit(RegressionTask(), regression_loader(10))
    assert [count for _, count in recorder.notes] == steps
    assert trainer.global_step == sum(steps)


def test_an_accumulation_schedule_and_a_fixed_number_contradict_each_other() -> None:
    trainer = quiet_trainer(accumulate_grad_batches=2, callbacks=GradientAccumulationScheduler({1: 2}))
    with pytest.raises(ConfigurationError, match=r"contradict each other"):
        trainer.fit(RegressionTask(), regression_loader(2))


@pytest.mark.parametrize("late", [False, True])
def test_accumulated_groups_train_like_batches_of_their_size(late: bool) -> None:
    """Sixteen samples as 4 × 4 and as 4 × (4 × 1) end with the same weights; whoever listens changes nothing."""
    one, other = RegressionTask(), RegressionTask()
    quiet_trainer(max_epochs=2).fit(one, regression_loader(16, 4))
    listener = RecordingCallback("on_before_zero_grad" if late else "on_before_backward")
    quiet_trainer(max_epochs=2, accumulate_grad_batches=4, callbacks=listener).fit(other, regression_loader(16, 1))
    torch.testing.assert_close(weights_of(one), weights_of(other))


def test_a_micro_batch_without_loss_is_left_out_of_the_mean() -> None:
    skipping, plain = StepTask(lambda task, batch, idx: None if idx % 2 else task.loss(batch)), RegressionTask()
    quiet_trainer(max_epochs=1, accumulate_grad_batches=4).fit(skipping, regression_loader(8))
    batches = list(regression_loader(8))[::2]
    quiet_trainer(max_epochs=1, accumulate_grad_batches=2).fit(plain, [(x, y) for x, y in batches])
    torch.testing.assert_close(weights_of(skipping), weights_of(plain))


def test_a_micro_batch_without_loss_is_left_out_of_the_mean_over_items() -> None:
    class Counts(StepTask):
        def num_items(self, batch: list[torch.Tensor]) -> int:
            return len(batch[0])

    x, y = next(iter(regression_loader(6, 6)))
    parts = list(zip(x.split([1, 2, 3]), y.split([1, 2, 3]), strict=True))
    counts, plain = Counts(lambda task, batch, idx: None if idx == 1 else task.loss(batch)), RegressionTask()
    fitted(counts, parts, max_epochs=1, accumulate_grad_batches=3)
    plain.loss([x[[0, 3, 4, 5]], y[[0, 3, 4, 5]]]).backward()
    plain.configure_optimizers().step()
    torch.testing.assert_close(weights_of(counts), weights_of(plain))


def test_a_group_without_any_loss_is_no_step() -> None:
    recorder = RecordingCallback("on_before_optimizer_step", "on_train_batch_end")
    trainer = fitted(
        StepTask(lambda task, batch, idx: None if idx in (2, 3) else task.loss(batch)),
        regression_loader(6),
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=recorder,
    )
    assert trainer.global_step == recorder.events.count("on_before_optimizer_step") == 2
    assert recorder.events.count("on_train_batch_end") == 6
    assert trainer.state.batches == 6
