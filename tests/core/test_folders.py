from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.folders import is_in_use, mark_in_use


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null/none", "file/below"])
def test_checkpoints_that_cannot_be_written_are_an_error_before_the_first_step(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    task = RegressionTask()
    trainer = quiet_trainer(max_steps=2, callbacks=[ModelCheckpoint(tmp_path / place)])
    with pytest.raises(ConfigurationError, match=r"cannot write into .*Pass another dirpath"):
        trainer.fit(task, regression_loader())
    assert trainer.global_step == 0


@pytest.mark.skipif(os.name == "nt", reason="no locks of folders")
def test_a_folder_is_marked_although_another_process_checks_it_at_that_moment(tmp_path: Path) -> None:
    import fcntl

    # `flock` belongs to the opened folder: this handle excludes others as one of another process does.
    check = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(check, fcntl.LOCK_EX)
    end_of_check = threading.Timer(0.1, os.close, [check])
    end_of_check.start()
    with mark_in_use(tmp_path):
        end_of_check.join()
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)
