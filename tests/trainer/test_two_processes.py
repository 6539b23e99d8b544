from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from tests.trainer.runs import ByHand, MemoryLogger, Tally, fitted, quiet_trainer, weights_of
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import WorkerError

pytestmark = pytest.mark.distributed


def test_a_trainer_with_two_devices_starts_the_other_process_and_keeps_the_result(tmp_path: Path) -> None:
    together, alone = RegressionTask(), RegressionTask()
    tally, logger = Tally(), MemoryLogger()
    trainer = quiet_trainer(devices=2, max_epochs=2, callbacks=tally, logger=logger, log_every_n_steps=2)
    trainer.fit(together, regression_loader(16, 2), regression_loader(8, 2))
    quiet_trainer(max_epochs=2).fit(alone, regression_loader(16, 4))
    torch.testing.assert_close(weights_of(together), weights_of(alone))
    assert (trainer.global_step, trainer.state.samples) == (8, 32)
    assert tally.validations == [(0, 4), (1, 8)]
    assert list(logger.values("train_loss")) == [1, 3, 5, 7]
    assert logger.steps.count(1) == 1  # one process writes
    assert "RANK" not in os.environ
    assert "WORLD_SIZE" not in os.environ
    saved = read_checkpoint(trainer.save_checkpoint(tmp_path / "after"))  # by the process that is left
    assert (saved.world_size, saved.state["step"]) == (1, 8)
    torch.testing.assert_close(saved.model, together.state_dict(), rtol=0, atol=0)


def test_evaluations_have_processes_of_their_own() -> None:
    task, trainer = RegressionTask(), quiet_trainer(devices=2)
    (result,) = trainer.test(task, regression_loader(7), verbose=False)
    predictions = trainer.predict(task, regression_loader(7, 2))
    (expected,) = quiet_trainer().test(task, regression_loader(7), verbose=False)
    assert result == pytest.approx(expected)
    assert predictions is not None
    torch.testing.assert_close(torch.cat(predictions), task(torch.cat([b[0] for b in regression_loader(7)])).detach())


class _FailsOnRankOne(RegressionTask):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 1:
            raise ValueError("only here")
        return self.loss(batch)


def test_the_failure_of_a_started_process_is_raised_with_its_own_traceback() -> None:
    with pytest.raises(WorkerError, match="only here") as caught:
        quiet_trainer(devices=2, max_epochs=1).fit(_FailsOnRankOne(), regression_loader(8))
    assert "rank 1" in str(caught.value)
    assert "in training_step" in str(caught.value)


def _by_hand(every: int, batch_size: int) -> tuple[torch.Tensor, int]:
    task, trainer = ByHand(every), quiet_trainer(devices="auto", max_epochs=1)
    trainer.fit(task, regression_loader(16, batch_size))
    return weights_of(task), trainer.global_step


class _WithoutLossOnRankOne(RegressionTask):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor | None:
        return None if self.global_rank == 1 else self.loss(batch)


def _fit_without_loss() -> None:
    quiet_trainer(devices="auto", max_epochs=1).fit(_WithoutLossOnRankOne(), regression_loader(8))


def _in_ranks_of_a_launcher(folder: Path) -> tuple[Any, bool]:
    return _by_hand(2, 2), _save_after_the_fit(folder)


@pytest.fixture(scope="module")
def of_launcher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder, and what two ranks of a launcher have found."""
    folder = tmp_path_factory.mktemp("launcher")
    return folder, run_distributed(_in_ranks_of_a_launcher, 2, folder, init=False)


def test_gradients_by_hand_are_averaged_over_processes(of_launcher: Any) -> None:
    (first, steps), (second, _) = (by_hand for by_hand, _ in of_launcher[1])
    alone, steps_alone = _by_hand(2, 4)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone)
    assert steps == steps_alone == 2


def test_a_step_without_loss_on_one_rank_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RankError, match=r"returned None on rank 1, but .* Return a zero loss"):
        run_distributed(_fit_without_loss, 2, init=False)


def _save_after_the_fit(folder: Path) -> bool:
    task = RegressionTask()
    trainer = fitted(task, regression_loader(4), devices="auto", max_epochs=1)
    trainer.save_checkpoint(folder / "after")
    more = fitted(RegressionTask(), regression_loader(4), ckpt_path=folder / "after", devices="auto", max_epochs=2)
    return more.global_step == 2 * trainer.global_step


def test_all_ranks_of_a_launcher_can_save_after_the_fit(of_launcher: Any) -> None:
    folder, found = of_launcher
    assert [went_on for _, went_on in found] == [True, True]
    saved = read_checkpoint(folder / "after")
    assert (saved.world_size, len(saved.rng)) == (2, 2)
