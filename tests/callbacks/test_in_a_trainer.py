"""The callbacks under the real Trainer: what is written, when training stops, what the loggers get."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    Throughput,
    Timer,
    TQDMProgressBar,
)
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.loggers import CSVLogger
from trainwright.trainer.trainer import Trainer


def fit(task: TaskModule, root: Path, callbacks: list[Callback], *, batches: int = 5, **arguments: Any) -> Trainer:
    loaders = regression_loader(batches), regression_loader(2)
    defaults = {"default_root_dir": root, "num_sanity_val_steps": 0, "max_epochs": 1}
    return fitted(task, *loaders, callbacks=callbacks, **{**defaults, **arguments})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_checkpoint_is_scored_by_what_later_callbacks_log_at_the_same_event(tmp_path: Path) -> None:
    class Late(Callback):
        def on_validation_end(self, trainer: Any, task: Any) -> None:
            trainer.callback_metrics["late"] = 7.0

    saver = ModelCheckpoint(tmp_path / "c", monitor="late")
    trainer = fit(RegressionTask(), tmp_path, [saver, Late()], max_epochs=1)
    assert trainer.callbacks[-1] is saver
    assert saver.best_model_score == 7.0


def test_monitors_write_to_the_loggers_at_log_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")
    callbacks = [LearningRateMonitor("step"), Throughput(measure_flops=True), DeviceStatsMonitor()]
    trainer = fit(RegressionTask(lr=0.05), tmp_path, callbacks, batches=6, log_every_n_steps=2, logger=logger)
    assert trainer.callback_metrics["lr-SGD"].item() == pytest.approx(0.05)
    (path,) = (tmp_path / "logs").rglob("*.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    rates = {row["step"]: float(row["lr-SGD"]) for row in rows if row.get("lr-SGD")}
    assert rates == {"1": 0.05, "3": 0.05, "5": 0.05}
    assert any(row.get("throughput/flops_per_s") for row in rows)
    assert any(row.get("DeviceStatsMonitor/process_rss_bytes") for row in rows)


def test_the_bar_and_the_summary_are_printed_as_plain_text_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [TQDMProgressBar(), ModelSummary()]
    options = {"enable_progress_bar": True, "enable_model_summary": True}
    fit(RegressionTask(), tmp_path, callbacks, max_epochs=2, **options)
    out = capsys.readouterr().out
    assert "trainable parameters" in out
    assert [line.split("[")[0] for line in out.splitlines() if line.startswith("Epoch")] == [
        "Epoch 0/1: 5/5 (100%) ",
        "Epoch 1/1: 5/5 (100%) ",
    ]


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


@pytest.mark.parametrize("save_last", [None, True])
def test_an_interval_of_no_epochs_saves_nothing_unless_the_last_is_asked_for(
    save_last: bool | None, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=0, save_last=save_last)
    quiet_trainer(max_epochs=2, callbacks=saver).fit(RegressionTask(), regression_loader(4))
    assert (tmp_path / "last").exists() == bool(save_last)
    assert any(tmp_path.iterdir()) == bool(save_last)


def test_device_statistics_without_a_logger_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="DeviceStatsMonitor has nothing to log to"):
        quiet_trainer(max_epochs=1, callbacks=DeviceStatsMonitor()).fit(RegressionTask(), regression_loader(4))


@pytest.mark.parametrize(
    ("base", "name"), [(TQDMProgressBar, "init_train_tqdm"), (RichProgressBar, "configure_columns")]
)
def test_overriding_an_unused_method_of_a_progress_bar_is_an_error(base: Any, name: str) -> None:
    bar = type("Bar", (base,), {name: lambda self, *args: None})
    with pytest.raises(ConfigurationError, match=f"{name} is never called"):
        bar()
