"""No weight is changed by a loss or gradient that is no number; every rank decides alike; nothing is altered."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.calls import Operators
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import NonFiniteError
from trainwright.strategies.steps import non_finite


class _BadOn(RegressionTask):
    """One rank's loss is NaN, or its gradient infinite, in one micro-batch of the first epoch."""

    def __init__(self, rank: int, what: str, batch_idx: int = 5) -> None:
        super().__init__(momentum=0.9)
        self.rank = rank
        self.what = what
        self.batch_idx = batch_idx
        self.num_steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        loss = self.loss(batch)
        if (self.global_rank, self.current_epoch, batch_idx) == (self.rank, 0, self.batch_idx):
            loss = loss * float("nan") if self.what == "loss" else loss + (0 * self.net[3].bias.sum()).sqrt()
        self.log("train_loss", loss)
        return loss


def _train(
    policy: str, rank: int, what: str, accumulate: int, root: Path | None = None, precision: str = "32-true"
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    task = _BadOn(rank, what)
    callbacks = [] if root is None else [ModelCheckpoint(root, every_n_train_steps=2, save_top_k=-1)]
    trainer = quiet_trainer(
        devices="auto", max_epochs=2, seed=1, num_sanity_val_steps=0, accumulate_grad_batches=accumulate,
        on_nonfinite=policy, callbacks=callbacks, precision=precision,
    )  # fmt: skip
    error = None
    try:
        trainer.fit(task, regression_loader(32, 2, shuffle=True))
    except NonFiniteError as raised:
        error = raised
    return {
        "step": trainer.global_step, "state": {**trainer.state.to_dict(), "seconds": 0.0}, "num_steps": task.num_steps,
        "skipped": trainer.skipped_batches, "weights": weights_of(task), "error": error,
    }  # fmt: skip


def _same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert {**first, "weights": 0, "error": 0} == {**second, "weights": 0, "error": 0}
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert all(tensor.isfinite().all() for tensor in first["weights"].values())


@pytest.mark.distributed
def test_all_ranks_skip_what_is_bad_on_one_of_them() -> None:
    first, second = run_distributed(_train, 2, "skip", 1, "loss", 2, init=False, timeout=120)
    _same(first, second)
    (skipped,) = first["skipped"]
    assert (first["step"], first["state"]["batches"]) == (7, 16)
    assert (skipped.first_batch, skipped.num_batches) == (4, 2)
    assert skipped.stop - skipped.start == 8
    assert [len(ids) for ids in skipped.sample_ids] == [4, 4]
    assert skipped.reason == "the loss is nan on rank 1"


@pytest.mark.distributed
def test_all_ranks_raise_and_say_on_which_of_them_it_was() -> None:
    first, second = run_distributed(_train, 2, "raise", 1, "loss", 1, init=False, timeout=120)
    _same(first, second)
    for result in (first, second):
        assert (result["error"].ranks, result["error"].source, result["error"].step) == ((1,), "loss", 5)
        assert [len(ids) for ids in result["error"].sample_ids] == [2, 2]
    assert str(first["error"]) == str(second["error"])


def _train_behind(*arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(non_finite, "reading_waits", lambda device: True)
        return _train(*arguments)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_all_ranks_raise_when_they_look_at_what_one_has_noted(rank: int) -> None:
    """Under a scaled loss, the other rank has nothing noted itself."""
    results = run_distributed(_train_behind, 2, "raise", rank, "loss", 1, None, "16-mixed", init=False, timeout=120)
    for result in results:
        assert (result["error"].ranks, result["error"].source, result["error"].step) == ((rank,), "loss", 5)
        assert "Weights have changed since" in str(result["error"])


@pytest.mark.distributed
def test_all_ranks_go_back_and_end_as_if_the_group_had_been_skipped(tmp_path: Path) -> None:
    first, second = run_distributed(_train, 2, "rollback", 1, "loss", 1, tmp_path, init=False, timeout=120)
    skipping, _ = run_distributed(_train, 2, "skip", 1, "loss", 1, init=False, timeout=120)
    _same(first, second)
    _same({**first, "num_steps": 0}, {**skipping, "num_steps": 0})
    assert first["num_steps"] == skipping["num_steps"] + 1  # from step 4 on


class _Counts(Callback):
    """Counts operators from the second step's end to the second but last's."""

    def __init__(self) -> None:
        self.operators = Operators()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == 2:
            self.operators.__enter__()
        elif trainer.global_step == 12:
            self.operators.__exit__(None, None, None)


@pytest.mark.parametrize(("policy", "reads"), [(None, 0), ("raise", 1), ("skip", 1), ("rollback", 1)])
def test_a_step_reads_one_flag_and_none_when_nothing_is_to_be_looked_at(policy: str | None, reads: int) -> None:
    counts = _Counts()
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1000, callbacks=counts, on_nonfinite=policy)
    trainer.fit(RegressionTask(), regression_loader(14))
    # The operator behind `item()`, `float(t)` and `if t`.
    assert counts.operators.counts["aten._local_scalar_dense.default"] == 10 * reads


def test_the_logged_loss_is_never_altered() -> None:
    class Epochs(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch) * (float("nan") if batch_idx == 1 else 1)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    trainer = quiet_trainer(max_epochs=1, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="it is skipped"):
        trainer.fit(Epochs(), regression_loader(3))
    assert math.isfinite(trainer.callback_metrics["loss_step"])
    assert math.isnan(trainer.callback_metrics["loss_epoch"])
