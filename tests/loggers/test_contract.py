"""What every logger must do: the same tests over all of them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loggers.wandb_file import read_run
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers import (
    ConsoleLogger,
    CSVLogger,
    JSONLinesLogger,
    Logger,
    RunInfo,
    TensorBoardLogger,
    WandbLogger,
)

Points = list[tuple[int, float]]


def csv_points(logger: Any, name: str) -> Points:
    with open(Path(logger.log_dir, "metrics.csv"), newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def jsonl_points(logger: Any, name: str) -> Points:
    lines = Path(logger.log_dir, "metrics.jsonl").read_text().splitlines()
    return [(row["step"], float(row[name])) for row in map(json.loads, lines) if name in row]


def console_points(logger: Any, name: str) -> Points:
    lines = [line.split(" | ") for line in logger._stream.getvalue().splitlines() if line.startswith("step ")]
    rows = [(int(head.split()[1]), dict(part.rsplit(" ", 1) for part in rest)) for head, *rest in lines]
    return [(step, float(row[name])) for step, row in rows if name in row]


def tensorboard_points(logger: Any, name: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)] if name in events.Tags()["scalars"] else []


def wandb_points(logger: Any, name: str) -> Points:
    history = read_run(logger.log_dir)["history"]
    return [(row["trainer/global_step"], float(row[name])) for row in history if name in row]


@dataclass
class Case:
    """One logger: how it is made, and how its points are read back once it is finished."""

    make: Callable[..., Logger]
    points: Callable[[Any, str], Points]
    appends: bool = True
    is_folder: bool = True


CASES = {
    "csv": Case(CSVLogger, csv_points),
    "jsonl": Case(JSONLinesLogger, jsonl_points),
    "tensorboard": Case(TensorBoardLogger, tensorboard_points),
    "console": Case(lambda **options: ConsoleLogger(**options, stream=io.StringIO()), console_points, is_folder=False),
    "wandb": Case(
        lambda **options: WandbLogger(**options, save_dir=None, offline=True, project="contract"),
        wandb_points,
        appends=False,  # offline, a session's file is its own
        is_folder=False,
    ),
}


MARKS = {"wandb": [pytest.mark.engines, pytest.mark.requires("wandb", "its own format")]}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(root_dir=tmp_path)


@pytest.mark.slow
def test_what_is_logged_can_be_read_back_under_its_prefix(case: Case, run: RunInfo) -> None:
    logger = case.make(prefix="exp")
    logger.start(run)
    logger.log_metrics({"loss": 0.5, "lr": 0.25}, 1)
    logger.log_metrics({"loss": 0.125}, 2)
    logger.log_metrics({"val": 2.0}, 2)
    logger.log_metrics({"odd": math.nan, "high": math.inf, "low": -math.inf}, 3)
    assert str(run.root_dir) not in json.dumps(logger.state_dict())
    logger.finish("success")
    logger.finish("success")
    assert not logger.is_started
    assert case.points(logger, "exp-loss") == [(1, 0.5), (2, 0.125)]
    assert case.points(logger, "exp-val") == [(2, 2.0)]
    assert case.points(logger, "exp-lr") == [(1, 0.25)]
    assert math.isnan(case.points(logger, "exp-odd")[0][1])
    assert case.points(logger, "exp-high") == [(3, math.inf)]
    assert case.points(logger, "exp-low") == [(3, -math.inf)]
    assert case.points(logger, "loss") == []


def test_started_again_after_its_end_a_logger_goes_on(case: Case, run: RunInfo) -> None:
    logger = case.make()
    for step in (1, 2):
        logger.start(run)
        logger.log_metrics({"loss": float(step)}, step)
        version = logger.version
        logger.finish("success")
        assert logger.version == version
    expected = [(1, 1.0), (2, 2.0)]
    assert case.points(logger, "loss") == (expected if case.appends else expected[1:])


def test_a_muted_logger_does_nothing(case: Case, tmp_path: Path) -> None:
    logger = case.make()
    logger.muted = True
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_image("picture", torch.zeros(3, 4, 4), 0)
    logger.log_text("note", "text", 0)
    logger.experiment.config.update({"a": 1})
    with logger.experiment.context() as inner:
        inner["x"] = inner["y"]
    assert next(iter(logger.experiment["runs"]), None) is None
    assert "name" not in logger.experiment
    assert not logger.is_started
    assert list(tmp_path.iterdir()) == []


# Folders of their own


@pytest.fixture(params=[name for name, case in CASES.items() if case.is_folder])
def folder_case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def write(case: Case, run: RunInfo, steps: range, *, value: float = 1.0, metric: str = "loss", **options: Any) -> Any:
    logger = case.make(**options)
    logger.start(run)
    for step in steps:
        logger.log_metrics({metric: value, "epoch": 0.0}, step)  # as the loop does
    return logger


def test_each_run_has_a_numbered_folder(folder_case: Case, run: RunInfo) -> None:
    (run.root_dir / "trainwright_logs" / "version_41").mkdir(parents=True)
    (run.root_dir / "trainwright_logs" / "other").mkdir()
    for number in (42, 43):
        logger = write(folder_case, run, range(1, 2))
        logger.finish("success")
        assert logger.version == number
        assert logger.log_dir == str(run.root_dir / "trainwright_logs" / f"version_{number}")


def test_a_resumed_run_continues_the_curves_and_no_step_is_doubled(folder_case: Case, run: RunInfo) -> None:
    first = write(folder_case, run, range(1, 6))
    state = first.state_dict()  # as in a checkpoint at step 5
    for step in range(6, 9):
        first.log_metrics({"loss": -1.0, "late": -1.0}, step)
    first.finish("failed")
    second = folder_case.make()
    second.load_state_dict(json.loads(json.dumps(state)))
    second.start(run)
    for step in range(7, 10):
        second.log_metrics({"loss": 2.0}, step)
    second.finish("success")
    assert second.log_dir == first.log_dir
    assert folder_case.points(second, "loss") == [*((step, 1.0) for step in range(1, 6)), (7, 2.0), (8, 2.0), (9, 2.0)]
    assert folder_case.points(second, "late") == []


def test_another_run_in_the_same_folder_replaces_with_a_warning_what_it_logs_again(
    folder_case: Case, run: RunInfo
) -> None:
    write(folder_case, run, range(1, 6), version=0).finish("success")
    with pytest.warns(TrainwrightWarning, match=re.escape("loss from step 3 on are replaced")):
        second = write(folder_case, run, range(3, 5), version=0, value=2.0)
    second.finish("success")
    assert folder_case.points(second, "loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize("value", ["../../up", "..", "a/../../b", "/etc/x", "..\\up"])
@pytest.mark.parametrize("argument", ["name", "version", "sub_dir"])
def test_folders_must_be_inside_the_folder_of_the_logger(argument: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}="):
        TensorBoardLogger(tmp_path / "logs", **{argument: value})
    assert not os.listdir(tmp_path)
