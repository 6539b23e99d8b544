from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import regression_loader
from trainwright.core.errors import ConfigurationError


def foreign(module: str, name: str, *bases: type) -> type:
    """Return a class that says of itself that it is another library's."""
    return types.new_class(name, bases, {}, lambda body: body.update(__module__=module))


LightningModule = foreign("lightning.pytorch.core.module", "LightningModule", torch.nn.Module)
OldModule = foreign("pytorch_lightning.core.module", "LightningModule", torch.nn.Module)
LightningDataModule = foreign("lightning.pytorch.core.datamodule", "LightningDataModule")
EarlyStopping = foreign("lightning.pytorch.callbacks.early_stopping", "EarlyStopping")
CSVLogger = foreign("lightning.pytorch.loggers.csv_logs", "CSVLogger")


class Net(LightningModule):  # type: ignore[misc, valid-type]
    """A user's module."""


class OldNet(OldModule):  # type: ignore[misc, valid-type]
    """A user's module of the older package."""


def fit(task: Any, *loaders: Any, **arguments: Any) -> None:
    quiet_trainer(max_epochs=1, **arguments).fit(task, *loaders)


@pytest.mark.parametrize("made", [Net, OldNet])
def test_a_lightning_module_is_an_error_with_the_import_to_change(made: type) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fit(made(), regression_loader(2))
    assert str(caught.value) == (
        f"{made.__name__} is a LightningModule of Lightning, not of Trainwright. Change `from lightning.pytorch import "
        f"LightningModule` to `from trainwright import TaskModule` in {__file__}, or run: "
        f"trainwright migrate {__file__}"
    )


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("trainwright", "LightningModule", "LightningModule of Lightning is trainwright.TaskModule here."),
        ("trainwright", "Fabric", "Fabric of Lightning is not here: use trainwright.Accelerator"),
        ("trainwright", "set_seed", "set_seed of Accelerate is trainwright.utils.set_seed here."),
        ("trainwright.callbacks", "ThroughputMonitor", "is trainwright.callbacks.Throughput here."),
        ("trainwright.loggers", "NeptuneLogger", "NeptuneLogger of Lightning is not here: "),
        ("trainwright.callbacks", "EarlyStoping", "Did you mean 'EarlyStopping'?"),
    ],
)
def test_a_missing_name_is_an_error_with_its_replacement(module: str, name: str, says: str) -> None:
    with pytest.raises(AttributeError) as by_attribute:
        getattr(importlib.import_module(module), name)
    assert says in str(by_attribute.value)
    with pytest.raises(ImportError) as by_import:
        exec(f"from {module} import {name}")
    assert says in str(by_import.value)


def test_a_librarys_lightning_module_is_an_error_that_does_not_ask_to_change_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site-packages/some_library/nets.py"
    file.parent.mkdir(parents=True)
    file.write_text("def net_of(base):\n    class Net(base):\n        pass\n    return Net()\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    with pytest.raises(ConfigurationError) as caught:
        fit(importlib.import_module("some_library.nets").net_of(LightningModule), regression_loader(2))
    assert "Net is a LightningModule of Lightning" in str(caught.value)
    assert "the installed package some_library" in str(caught.value)
    assert "migrate" not in str(caught.value)
