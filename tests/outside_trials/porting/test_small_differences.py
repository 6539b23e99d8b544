"""Zero intervals never save; what would be ignored in a monitor or a progress bar is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import DeviceStatsMonitor, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from trainwright.core.errors import ConfigurationError


@pytest.mark.parametrize("save_last", [None, True])
def test_an_interval_of_no_epochs_saves_nothing_unless_the_last_is_asked_for(
    save_last: bool | None, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=0, save_last=save_last)
    quiet_trainer(max_epochs=2, callbacks=saver).fit(RegressionTask(), regression_loader(4))
    assert (tmp_path / "last").exists() == bool(save_last)
    assert any(tmp_path.iterdir()) == bool(save_last)


def test_a_run_that_is_shorter_than_the_interval_leaves_its_end(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=100)
    quiet_trainer(max_epochs=1, callbacks=saver).fit(RegressionTask(), regression_loader(4))
    assert saver.best_model_path


def test_device_statistics_without_a_logger_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="DeviceStatsMonitor has nothing to log to"):
        quiet_trainer(max_epochs=1, callbacks=DeviceStatsMonitor()).fit(RegressionTask(), regression_loader(4))


@pytest.mark.parametrize("name", ["init_train_tqdm", "init_validation_tqdm", "train_description"])
def test_a_bar_that_overrides_what_nothing_calls_is_an_error(name: str) -> None:
    bar = type("Bar", (TQDMProgressBar,), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=rf"Bar\.{name} is never called.*open\(kind, description"):
        bar()


def test_the_columns_of_another_rich_bar_are_an_error() -> None:
    bar = type("Bar", (RichProgressBar,), {"configure_columns": lambda self, trainer: []})
    with pytest.raises(ConfigurationError, match="configure_columns is never called"):
        bar()
