"""The Trainer computes what a loop written by hand computes: bit for bit in one process, to 1e-5 in two."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.reference import ALL_CASES, Case, ReferenceTask, Trace, make_loader, train_by_hand
from tests.helpers.runs import StepRecorder, quiet_trainer, weights_of

_EPOCHS = 2
# Each value of a setting occurs in two of these.
_COVERING = [
    Case("mlp", 1, None, "constant", "32-true"),
    Case("mlp", 4, 1.0, "cosine", "32-true"),
    Case("gpt", 1, 1.0, "cosine", "bf16-mixed"),
    Case("gpt", 4, None, "constant", "bf16-mixed"),
]


def _of_all(case: Case) -> Any:
    return case if case in _COVERING else pytest.param(case, marks=pytest.mark.exhaustive)


def _train(case: Case, loader: Any, **arguments: Any) -> tuple[Trace, StepRecorder]:
    """Train a case with the Trainer on this process's rank."""
    recorder, task = StepRecorder(), ReferenceTask(case)
    trainer = quiet_trainer(
        max_epochs=_EPOCHS,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        precision=case.precision,
        callbacks=[recorder],
        **arguments,
    )
    trainer.fit(task, loader)
    lrs = [of_step[0] for of_step in recorder.lrs]
    return Trace(recorder.losses, lrs, recorder.norms, weights_of(task.model)), recorder


# 77 samples by 8 are 10 batches, the last of 5 samples; by 4 micro-batches they are groups of 4, 4 and 2.
@cache
def _single(case: Case) -> tuple[Trace, Trace, StepRecorder]:
    by_hand = train_by_hand(case, make_loader(case, 77, 8), accumulate=case.accumulate, epochs=_EPOCHS)
    return by_hand, *_train(case, make_loader(case, 77, 8))


@pytest.mark.slow
@pytest.mark.parametrize("case", [_of_all(case) for case in ALL_CASES], ids=str)
def test_losses_learning_rates_norms_and_weights_are_those_of_a_loop_by_hand_bit_for_bit(case: Case) -> None:
    by_hand, trained, _ = _single(case)
    middle = len(by_hand.losses) // 2
    assert sum(by_hand.losses[middle:]) < sum(by_hand.losses[:middle])
    assert len(by_hand.losses) == _EPOCHS * (10 if case.accumulate == 1 else 3)
    assert trained.losses == by_hand.losses
    assert trained.lrs == by_hand.lrs
    assert trained.norms == by_hand.norms
    torch.testing.assert_close(trained.weights, by_hand.weights, rtol=0, atol=0)


@pytest.mark.parametrize("case", [c for c in _COVERING if c.clip is not None], ids=str)
def test_the_norm_that_clipping_reports_is_the_one_before_clipping(case: Case) -> None:
    by_hand, _, recorder = _single(case)
    assert max(by_hand.norms) > 1.0  # something was clipped
    assert recorder.reported == by_hand.norms


def _train_on_rank() -> list[Trace]:
    return [_train(case, make_loader(case, 80, 4), devices="auto")[0] for case in _COVERING]


@pytest.mark.distributed
def test_two_processes_train_as_one_loop_by_hand_over_the_micro_batches_of_both() -> None:
    # 80 samples by 4: ranks take turns, so that a group of one loop is the groups of both ranks; 10 rounds by 4 again
    # leave a short group of 2.
    by_rank = run_distributed(_train_on_rank, 2, init=False, timeout=60)
    for case, *of_ranks in zip(_COVERING, *by_rank, strict=True):
        loader = make_loader(case, 80, 4)
        by_hand = train_by_hand(case, loader, accumulate=2 * case.accumulate, epochs=_EPOCHS)
        losses = [sum(shares) / 2 for shares in zip(*(trace.losses for trace in of_ranks), strict=True)]
        assert losses == pytest.approx(by_hand.losses, rel=0, abs=1e-5), case
        for trace in of_ranks:
            assert trace.lrs == by_hand.lrs, case
            assert trace.norms == pytest.approx(by_hand.norms, rel=1e-5, abs=1e-5), case
            torch.testing.assert_close(trace.weights, by_hand.weights, rtol=0, atol=1e-5)
