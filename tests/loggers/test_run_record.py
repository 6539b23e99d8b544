from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.core.errors import TrainwrightWarning
from trainwright.loggers.csv_logger import CSVLogger
from trainwright.loggers.run_record import RunRecord
from trainwright.trainer.trainer import Trainer


def _trainer(root: Path, **options: Any) -> Any:
    given = {"logger": CSVLogger(root, version=0), "default_root_dir": root, "log_every_n_steps": 2, **options}
    return quiet_trainer(**given)


def _events(root: Path) -> list[dict[str, Any]]:
    text = (root / "trainwright_logs/version_0/run.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_fit_records_its_start_progress_validations_saves_and_end(tmp_path: Path) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=-1)
    trainer = _trainer(tmp_path, max_epochs=2, gradient_clip_val=1.0, callbacks=[saver], async_save=False)
    trainer.fit(RegressionTask(lr=0.1), regression_loader(8, 2), regression_loader(4, 2))
    events = _events(tmp_path)
    assert [(event["event"], event["step"]) for event in events] == [
        ("fit", 0),
        ("progress", 2),
        ("validation", 4),
        ("progress", 4),
        ("save", 4),
        ("progress", 6),
        ("validation", 8),
        ("progress", 8),
        ("save", 8),
        ("end", 8),
    ]
    start, progress = events[0], events[1]
    assert start["task"] == "RegressionTask"
    assert start["parameters"] == 49
    assert start["settings"]["max_epochs"] == [2, "argument"]
    assert start["precision"]["parameters"] == "float32"
    assert start["folders"] == {"logs": ["."], "checkpoints": "../../checkpoints"}
    assert progress["lr"] == [0.1]
    assert progress["samples"] == 4
    assert progress["loss"] > 0
    assert progress["grad_norm"] > 0
    assert progress["memory"] > 2**20
    saves = [event for event in events if event["event"] == "save"]
    assert [save["of_step"] for save in saves] == [4, 8]
    folder = tmp_path / "checkpoints" / saves[-1]["name"]
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json")
    assert saves[-1]["bytes"] == on_disk
    assert events[-1]["status"] == "success"


class _TrainerWithItsOwnArguments(Trainer):
    def __init__(self, num_steps: int, **arguments: Any) -> None:
        super().__init__(max_steps=num_steps, **arguments)


def test_a_fit_of_a_trainer_with_its_own_arguments_records_those_of_trainer(tmp_path: Path) -> None:
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = _TrainerWithItsOwnArguments(
        2, logger=CSVLogger(tmp_path, version=0), accelerator="cpu", devices=1, default_root_dir=tmp_path, **options
    )
    trainer.fit(RegressionTask(), regression_loader(8, 2))
    settings = _events(tmp_path)[0]["settings"]
    assert settings["max_steps"] == [2, "argument"]
    assert settings["min_steps"] == [None, "default"]


def test_a_resumed_run_continues_the_record(tmp_path: Path) -> None:
    saver = ModelCheckpoint(save_last=True)
    _trainer(tmp_path, max_steps=2, callbacks=[saver]).fit(RegressionTask(), regression_loader(8))
    trainer = _trainer(tmp_path, max_steps=4, callbacks=[ModelCheckpoint(save_last=True)])
    trainer.fit(RegressionTask(), regression_loader(8), ckpt_path="last")
    starts = [event for event in _events(tmp_path) if event["event"] == "fit"]
    assert [start["step"] for start in starts] == [0, 2]
    assert starts[0]["resumed_from"] is None
    assert Path(starts[1]["resumed_from"]).parent.name == "checkpoints"
    assert starts[0]["run_id"] == starts[1]["run_id"]


def test_an_error_of_the_disk_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(TrainwrightWarning, match="cannot be written"):
        RunRecord(tmp_path / "file").add("fit", 0, {})
