from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright.core.errors import TrainwrightWarning
from trainwright.loggers import CSVLogger, JSONLinesLogger, Logger, LoggerGroup, RunInfo, TensorBoardLogger


def _noting(method: str) -> Any:
    def note(self: Any, *args: Any, **options: Any) -> None:
        self.calls.append(method)
        if method in self.fails:
            raise OSError("the disk is full")

    return note


class Recorder(Logger):
    """Remembers its calls; raises in the methods named in `fails`."""

    def __init__(self, *fails: str) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails = fails

    def start(self, run: RunInfo) -> None:
        _noting("start")(self)
        super().start(run)

    log_hyperparams, log_metrics, flush, finish = map(_noting, ("log_hyperparams", "log_metrics", "flush", "finish"))
    log_checkpoint, load_state_dict = map(_noting, ("log_checkpoint", "load_state_dict"))


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(tmp_path)


def test_every_logger_gets_every_call(run: RunInfo) -> None:
    first, second = Recorder(), Recorder()
    group = LoggerGroup([first, second])
    group.start(run)
    group.log_hyperparams({"lr": 1})
    group.log_metrics({"a": 1.0}, 1)
    group.log_metrics({}, 2)
    group.log_checkpoint(Path("a"), aliases=("best",))
    group.flush()
    group.finish("success")
    called = ["start", "log_hyperparams", "log_metrics", "log_checkpoint", "flush", "finish"]
    assert first.calls == second.calls == called
    assert list(group) == [first, second]
    assert (len(group), group[1]) == (2, second)


@pytest.mark.parametrize("method", ["start", "log_metrics", "flush", "finish"])
def test_a_logger_that_raises_is_reported_once_and_left_out_and_the_others_go_on(run: RunInfo, method: str) -> None:
    broken, sound = Recorder(method), Recorder()
    group = LoggerGroup([broken, sound])

    def whole_run() -> None:
        group.start(run)
        group.log_hyperparams({})
        for step in (1, 2):
            group.log_metrics({"a": 1.0}, step)
            group.flush()
        group.finish("success")

    with pytest.warns(TrainwrightWarning, match=rf"Recorder\.{method} failed with OSError: the disk is full") as caught:
        whole_run()
    assert len(caught) == 1
    assert broken.calls[-1] == method
    assert broken.calls.count(method) == 1
    assert sound.calls == ["start", "log_hyperparams", *["log_metrics", "flush"] * 2, "finish"]


def test_on_other_ranks_nothing_is_called_or_written(run: RunInfo) -> None:
    logger, files = Recorder(), CSVLogger()
    group = LoggerGroup([logger, files], is_main=False)
    group.start(run)
    group.log_hyperparams({})
    group.log_metrics({"a": 1.0}, 1)
    group.load_state_dict([{"logger": "Recorder", "id": 1}])
    group.finish("success")
    assert logger.calls == []
    assert logger.muted
    assert list(run.root_dir.iterdir()) == []


def test_loggers_in_one_place_share_the_numbered_folder(run: RunInfo) -> None:
    (run.root_dir / "trainwright_logs" / "version_0").mkdir(parents=True)
    loggers: list[Logger] = [CSVLogger(), JSONLinesLogger(), TensorBoardLogger(), CSVLogger(name="apart")]
    group = LoggerGroup(loggers)
    group.start(run)
    group.log_metrics({"a": 1.0}, 1)
    group.finish("success")
    assert [logger.version for logger in loggers] == [1, 1, 1, 0]
    assert group.log_dir == str(run.root_dir / "trainwright_logs" / "version_1")
