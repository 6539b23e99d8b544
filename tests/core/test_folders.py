from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.core.errors import ConfigurationError


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null/none", "file/below"])
def test_checkpoints_that_cannot_be_written_are_an_error_before_the_first_step(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    task = RegressionTask()
    trainer = quiet_trainer(max_steps=2, callbacks=[ModelCheckpoint(tmp_path / place)])
    with pytest.raises(ConfigurationError, match=r"cannot write into .*Pass another dirpath"):
        trainer.fit(task, regression_loader())
    assert trainer.global_step == 0
