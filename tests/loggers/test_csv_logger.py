from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import ConfigurationError
from trainwright.loggers import CSVLogger, RunInfo


def started(folder: Path, **options: int | str) -> CSVLogger:
    logger = CSVLogger(folder, version=0, **options)  # type: ignore[arg-type]
    logger.start(RunInfo(folder))
    return logger


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    assert logger.log_dir is not None
    with open(Path(logger.log_dir, "metrics.csv"), newline="") as file:
        return list(csv.DictReader(file))


NAMES = st.sampled_from(["a", "b", "c,d", 'e"f', "g/h", "i\nj", "k\r\nl", "=1+1"])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.dictionaries(NAMES, st.floats(allow_nan=False), min_size=1), st.booleans()), max_size=12))
def test_every_value_is_read_back_whatever_the_columns_and_flushes(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[dict[str, float], bool]]
) -> None:
    logger = started(tmp_path_factory.mktemp("csv"))
    for step, (metrics, flushes) in enumerate(calls):
        logger.log_metrics(metrics, step)
        if flushes:
            logger.flush()
    logger.finish("success")
    if calls:
        found = [{k: float(v) for k, v in row.items() if v and k != "step"} for row in rows(logger)]
        assert found == [metrics for metrics, _ in calls]


def test_a_flush_counts_as_the_last_write(tmp_path: Path) -> None:
    logger = started(tmp_path, flush_logs_every_n_steps=10)
    for step in range(10):
        logger.log_metrics({"a": 1.0}, step)
    logger.flush()
    logger.log_metrics({"a": 1.0}, 10)
    assert len(rows(logger)) == 10
    for step in range(11, 20):
        logger.log_metrics({"a": 1.0}, step)
    assert len(rows(logger)) == 20
    logger.finish("success")


def test_a_row_cut_off_by_a_crash_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    first = started(tmp_path)
    for step in (1, 2):
        first.log_metrics({"a": 0.125}, step)
    first.flush()
    path = first.metrics_file
    path.write_text(path.read_text()[:-3])  # "2,0.1": a number that was never logged
    second = started(tmp_path)
    second.log_metrics({"a": 0.5}, 3)
    second.finish("success")
    assert rows(second) == [{"step": "1", "a": "0.125"}, {"step": "3", "a": "0.5"}]


def test_a_resume_removes_the_empty_folder_of_a_version_that_was_read_too_early(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None)
    assert logger.version == 0
    logger.load_state_dict({"version": 7, "last_step": 3})
    assert (logger.version, [path.name for path in tmp_path.iterdir()]) == (7, ["version_7"])


def test_variables_are_replaced_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGS", str(tmp_path))
    assert CSVLogger("$LOGS/a", name="b", version=0).log_dir == str(tmp_path / "a" / "b" / "version_0")


def test_a_url_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not to a URL"):
        CSVLogger("s3://bucket/logs")


def test_sub_classes_can_name_the_folders(tmp_path: Path) -> None:
    class Named(CSVLogger):
        name = "experiment"
        version = "first"

    logger = Named(tmp_path)
    assert logger.log_dir == str(tmp_path / "experiment" / "first")
    logger.log_hyperparams()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.flush()
    assert Path(logger.metrics_file_path).exists()
