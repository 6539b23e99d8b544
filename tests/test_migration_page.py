"""The migration page's table of names agrees with the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.sources import ROOT
from tests.helpers.tasks import RegressionTask
from trainwright import callbacks, loggers, profilers, strategies, utilities
from trainwright.core.errors import TrainwrightError
from trainwright.data import DataModule

# What the first column names → something that has the names.
OBJECTS: dict[str, Any] = {
    "Trainer": quiet_trainer,
    "trainer.state": lambda: quiet_trainer().state,
    "LightningModule": RegressionTask,
    "LightningDataModule": DataModule,
    "Callback": callbacks.Callback,
    "callbacks": lambda: callbacks,
    "ModelCheckpoint": callbacks.ModelCheckpoint,
    "EarlyStopping": lambda: callbacks.EarlyStopping("loss"),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({1: 2}),
    "LearningRateMonitor": callbacks.LearningRateMonitor,
    "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
    "ModelSummary": callbacks.ModelSummary,
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.1),
    "TQDMProgressBar": callbacks.TQDMProgressBar,
    "RichProgressBar": callbacks.RichProgressBar,
    "loggers": lambda: loggers,
    "CSVLogger": loggers.CSVLogger,
    "TensorBoardLogger": loggers.TensorBoardLogger,
    "WandbLogger": loggers.WandbLogger,
    "strategies": lambda: strategies,
    "profilers": lambda: profilers,
    "utilities": lambda: utilities,
}


def _verdicts() -> Iterator[tuple[str, str, str]]:
    text = (ROOT / "docs/migration-names.md").read_text().partition("<!-- verdicts:")[2]
    for line in text.splitlines():
        row = re.fullmatch(r"\| `([\w.]+)` \| (.+?) \| (.+) \|", line)
        if row is not None:
            for name in re.findall(r"`(\w+)`", row[2]):
                yield row[1], name, row[3]


VERDICTS = list(_verdicts())


@pytest.mark.slow
@pytest.mark.parametrize(("of", "name", "verdict"), VERDICTS, ids=[f"{of}.{name}" for of, name, _ in VERDICTS])
def test_the_page_agrees_with_the_package(of: str, name: str, verdict: str) -> None:
    found = OBJECTS[of]()
    if verdict.startswith("there"):
        assert name in dir(type(found)) or name in dir(found) or name in found.__all__
    elif verdict.startswith("instead: "):
        with pytest.raises((AttributeError, TrainwrightError), match=rf"{name}\b.*(\. |: ).+"):
            getattr(found, name)()
    else:
        assert verdict.startswith(("not there: ", "not there yet: ")), verdict
        with pytest.raises((AttributeError, ImportError)):
            getattr(found, name)


# Names of Lightning that its classes inherit from torch, or that it has deprecated for all of them.
PAIRS = {
    "Trainer": ("", "Trainer"),
    "LightningModule": ("", "LightningModule"),
    "LightningDataModule": ("", "LightningDataModule"),
    "Callback": ("", "Callback"),
    **{name: ("callbacks", name) for name in OBJECTS if hasattr(callbacks, name) and name != "Callback"},
    **{name: ("loggers", name) for name in OBJECTS if name.endswith("Logger")},
}
