from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers import JSONLinesLogger, RunInfo


def started(folder: Path) -> JSONLinesLogger:
    logger = JSONLinesLogger(folder, version=0)
    logger.start(RunInfo(folder))
    return logger


def strict(line: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    return json.loads(line, parse_constant=refuse)


def lines(logger: JSONLinesLogger) -> list[Any]:
    assert logger.log_dir is not None
    return [strict(line) for line in Path(logger.log_dir, "metrics.jsonl").read_text().splitlines()]


def test_a_line_cut_off_by_a_crash_is_removed_before_the_next(tmp_path: Path) -> None:
    first = started(tmp_path)
    for step in (1, 2):
        first.log_metrics({"a": 1.0}, step)
    path = first.metrics_file
    first.finish("failed")
    path.write_text(path.read_text()[:-5])
    second = started(tmp_path)
    second.log_metrics({"a": 3.0}, 3)
    second.finish("success")
    assert [(line["step"], line["a"]) for line in lines(second)] == [(1, 1.0), (3, 3.0)]


def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    first = started(tmp_path)
    first.log_metrics({"a": 1.0}, 1)
    path = first.metrics_file
    first.finish("failed")
    path.write_text(path.read_text() + "{oops\n")
    with pytest.raises(ConfigurationError, match=r"line 2 of .*metrics\.jsonl is not JSON"):
        started(tmp_path).remove_from(1)


def test_text_is_a_line_of_its_own(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_text("sample", "two\nlines", 4)
    logger.finish("success")
    assert [(line["step"], line["sample"]) for line in lines(logger)] == [(4, "two\nlines")]


def test_metrics_named_like_the_lines_own_fields_are_left_out_with_a_warning(tmp_path: Path) -> None:
    logger = started(tmp_path)
    with pytest.warns(TrainwrightWarning, match="skips the metric 'time'"):
        logger.log_metrics({"time": -1.0, "a": 1.0}, 1)
    logger.finish("success")
    assert lines(logger)[0]["time"] > 0


def test_the_file_is_valid_json_with_values_that_are_not_finite(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_hyperparams({"limit": math.inf})
    logger.log_metrics({"a": math.nan, "b": -math.inf}, 1)
    logger.finish("success")
    (line,) = lines(logger)
    assert (line["a"], line["b"]) == ("NaN", "-Infinity")
    assert logger.log_dir is not None
    assert strict(Path(logger.log_dir, "hparams.json").read_text()) == {"limit": "Infinity"}
