"""The callbacks under the real Trainer: what is written, when training stops, what the loggers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import fitted
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import EarlyStopping, ModelCheckpoint, Timer
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.trainer.trainer import Trainer


def fit(task: TaskModule, root: Path, callbacks: list[Callback], *, batches: int = 5, **arguments: Any) -> Trainer:
    loaders = regression_loader(batches), regression_loader(2)
    defaults = {"default_root_dir": root, "num_sanity_val_steps": 0, "max_epochs": 1}
    return fitted(task, *loaders, callbacks=callbacks, **{**defaults, **arguments})


class RankDependent(RegressionTask):
    """Logs another `val_loss` on each rank, and does not average it: from epoch 2 on rank 0's is bad."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        good = 5.0 - self.current_epoch
        value = 10.0 if self.global_rank == 0 and self.current_epoch >= 2 else good
        self.log("val_loss", value, sync_dist=False)


def _fit_on_two_ranks(root: str) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    stopper = EarlyStopping("val_loss", patience=1)
    keeper = ModelCheckpoint(Path(root) / "c", monitor="val_loss", save_last="link")
    timer = Timer({"hours": 1})
    options = {"devices": 2, "strategy": "ddp", "launcher": "torchrun", "max_epochs": 6}
    run = fit(RankDependent(), Path(root), [stopper, keeper, timer], batches=8, **options)
    return stopper.stopped_epoch, run.state.step, stopper.state_dict(), keeper.state_dict()


@pytest.mark.distributed
@pytest.mark.slow
def test_all_ranks_stop_and_save_by_rank_zero_s_numbers(tmp_path: Path) -> None:
    first, second = run_distributed(_fit_on_two_ranks, 2, str(tmp_path), init=False, timeout=90)
    assert first == second
    assert first[0] == 2
    assert first[3]["scores"] == {"epoch=1-step=8": 4.0}


def test_a_fit_that_ends_before_its_first_validation_saves_by_a_metric_of_training(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path / "c", monitor="train_loss")
    unknown = ModelCheckpoint(tmp_path / "d", monitor="val_loss")
    fit(RegressionTask(), tmp_path, [keeper, unknown], max_epochs=-1, max_steps=2)
    assert keeper.best_model_path == str(tmp_path / "c" / "epoch=0-step=2")
    assert unknown.best_model_path == ""


class OwnNames(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "last-{epoch}"
    CHECKPOINT_EQUALS_CHAR = "_"
    FILE_EXTENSION = ".saved"


def test_a_sub_class_names_checkpoints_and_the_last_link_is_replaced(tmp_path: Path) -> None:
    fit(RegressionTask(), tmp_path, [OwnNames(tmp_path / "c", save_last="link")], batches=1, max_epochs=2)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "epoch_1-step_2.saved",
        "last-epoch_1.saved",
        ".index.json",
    }
