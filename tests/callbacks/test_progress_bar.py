from __future__ import annotations

import io
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun, pass_time
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.progress_bar import Kind, ProgressBar
from trainwright.callbacks.rich_progress_bar import RichProgressBar
from trainwright.callbacks.tqdm_progress_bar import TQDMProgressBar
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

DRAWN = [TQDMProgressBar, RichProgressBar]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recording(ProgressBar):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[tuple[Any, ...]] = []

    def can_draw(self) -> bool:
        return True

    def open(self, kind: Kind, description: str, total: int | None, done: int) -> None:
        self.calls.append(("open", kind, description, total, done))

    def draw(self, kind: Kind, done: int, metrics: Mapping[str, str]) -> None:
        self.calls.append(("draw", kind, done, dict(metrics)))

    def close(self, kind: Kind, *, leave: bool, paused_s: float = 0.0) -> None:
        self.calls.append(("close", kind, leave, paused_s))


def test_an_epoch_s_bar_is_opened_moved_and_closed(tmp_path: Path, now: list[float]) -> None:
    bar = Recording()
    run = FakeRun([bar], tmp_path, max_epochs=1, progress_bar_metrics={"loss": 0.123456})
    run.fit(epochs=1, batches=2, on_step=pass_time(now, 1.0))
    shown = {"loss": "0.1235"}
    assert bar.calls == [
        ("open", "train", "Epoch 0/0", 2, 0),
        ("draw", "train", 1, shown),
        ("draw", "train", 2, shown),
        ("draw", "train", 2, shown),
        ("close", "train", True, 0.0),
    ]


def test_it_is_drawn_at_most_once_in_refresh_rate_batches(tmp_path: Path, now: list[float]) -> None:
    bar = Recording(refresh_rate=4)
    FakeRun([bar], tmp_path).fit(epochs=1, batches=9, on_step=pass_time(now, 1.0))
    assert [call[2] for call in bar.calls if call[0] == "draw"] == [4, 8, 9]


@pytest.mark.parametrize("how", ["rank", "barebones", "refresh_rate", "disable"])
def test_nothing_is_shown_when_it_is_off_or_not_the_main_process(tmp_path: Path, how: str) -> None:
    bar = Recording(refresh_rate=0 if how == "refresh_rate" else 1)
    run = FakeRun([bar], tmp_path, rank=int(how == "rank"), barebones=how == "barebones", has_validation=True)
    if how == "disable":
        bar.disable()
    run.fit(epochs=2, batches=2)
    assert bar.calls == []
    bar.enable()
    assert bar.is_enabled == (how != "refresh_rate")


@pytest.mark.parametrize("cls", [ProgressBar, *DRAWN])
def test_without_a_terminal_an_epoch_is_one_readable_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: list[float], cls: type[ProgressBar]
) -> None:
    run = FakeRun([cls()], tmp_path, max_epochs=2, has_validation=True, progress_bar_metrics={"loss": 0.5})
    run.fit(epochs=2, batches=4, on_step=pass_time(now, 0.5), on_validation=pass_time(now, 100))
    out = capsys.readouterr()
    assert out.out.splitlines() == [
        "Epoch 0/1: 4/4 (100%) [00:02, 2 batch/s] loss=0.5",
        "Epoch 1/1: 4/4 (100%) [00:02, 2 batch/s] loss=0.5",
    ]
    assert "\r" not in out.out
    assert out.err == ""


def test_a_long_epoch_is_reported_every_thirty_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    FakeRun([ProgressBar()], tmp_path).fit(epochs=1, batches=100, on_step=pass_time(now, 1.0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Epoch 0: 30/100 (30%) [00:30<01:10, 1 batch/s]"
    assert len(lines) == 4


@pytest.mark.parametrize("cls", DRAWN)
def test_in_a_terminal_the_bars_show_epoch_place_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[ProgressBar]
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "120")
    before = threading.active_count()
    run = FakeRun([cls()], tmp_path, max_epochs=2, has_validation=True, progress_bar_metrics={"loss": 0.25})
    run.fit(epochs=2, batches=3)
    text = screen.getvalue()
    assert "Epoch 1/1" in text
    assert "3/3" in text
    assert "loss=0.25" in text
    assert "Validation" in text
    assert threading.active_count() == before


@pytest.mark.parametrize("cls", DRAWN)
def test_a_line_printed_in_a_terminal_stands_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[ProgressBar]
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    bar = cls()
    FakeRun([bar], tmp_path).fit(epochs=1, batches=2, on_step=lambda run: bar.print("hello", run.state.step))
    assert any(line.strip("\r").endswith("hello 1") for line in screen.getvalue().split("\n"))


class _NoReader(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize(
    ("bar", "stream"), [(ProgressBar, lambda: None), (TQDMProgressBar, _NoReader), (RichProgressBar, _NoReader)]
)
def test_a_fit_trains_on_where_standard_output_cannot_be_written(
    bar: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(max_epochs=2, enable_progress_bar=True, callbacks=[bar()])
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream())
        with pytest.warns(TrainwrightWarning, match="Standard output cannot be written") as warned:
            trainer.fit(RegressionTask(), regression_loader(4))
    assert trainer.global_step == 8
    assert len([each for each in warned if "Standard output" in str(each.message)]) == 1


@pytest.mark.parametrize(
    ("base", "name"), [(TQDMProgressBar, "init_train_tqdm"), (RichProgressBar, "configure_columns")]
)
def test_overriding_an_unused_method_is_an_error(base: Any, name: str) -> None:
    bar = type("Bar", (base,), {name: lambda self, *args: None})
    with pytest.raises(ConfigurationError, match=f"{name} is never called"):
        bar()


@pytest.mark.parametrize(("leave", "kept"), [(False, [False, True]), (True, [True, True])])
def test_the_bar_of_an_epoch_that_is_not_the_last_stays_if_wished(
    tmp_path: Path, leave: bool, kept: list[bool]
) -> None:
    bar = Recording(leave=leave)
    FakeRun([bar], tmp_path).fit(epochs=2, batches=1)
    assert [call[2] for call in bar.calls if call[0] == "close"] == kept
