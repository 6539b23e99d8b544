"""The callbacks under the real Trainer: what is written, when training stops, what the loggers get."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import (
    DeviceStatsMonitor,
    RichProgressBar,
    TQDMProgressBar,
)
from trainwright.core.errors import ConfigurationError


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
