from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.loggers import LOGGERS, CSVLogger, TensorBoardLogger, resolve_loggers


def test_the_default_is_tensorboard_and_without_it_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = resolve_loggers(None, tmp_path)
    assert isinstance(found, TensorBoardLogger)
    assert found.save_dir == str(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    (found,) = resolve_loggers(True, tmp_path)
    assert type(found) is CSVLogger


def test_every_name_gives_its_logger(tmp_path: Path) -> None:
    for name in LOGGERS:
        (found,) = resolve_loggers(name, tmp_path)
        assert type(found) is LOGGERS.get(name)


@pytest.mark.parametrize(
    ("spec", "text"),
    [("tensorbord", r"unknown logger 'tensorbord'.*'tensorboard'"), (5, "logger="), ([True], "logger=")],
)
def test_what_is_no_logger_is_refused(spec: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=text):
        resolve_loggers(spec, tmp_path)
