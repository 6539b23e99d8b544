"""On ranks other than the main one a logger takes every call and does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainwright.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from trainwright.loggers.logger import DummyExperiment


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger, TensorBoardLogger])
def test_a_muted_logger_takes_calls_that_a_task_makes_directly(kind: type[Logger], tmp_path: Path) -> None:
    logger = kind.in_folder(tmp_path)
    logger.muted = True
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_image("picture", torch.zeros(3, 4, 4), 0)
    logger.log_text("note", "text", 0)
    assert list(tmp_path.iterdir()) == []


def test_the_csv_file_stays_known_after_the_end(tmp_path: Path) -> None:
    from trainwright.loggers.logger import RunInfo

    logger = CSVLogger(tmp_path)
    logger.start(RunInfo(tmp_path))
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finish("success")
    assert "loss" in logger.metrics_file.read_text()


def test_iterating_over_a_muted_experiment_ends() -> None:
    experiment = DummyExperiment()
    assert next(iter(experiment["runs"]), None) is None
    assert "name" not in experiment
