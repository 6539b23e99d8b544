"""Automatically named states: the limit and the newest state over starts, failures and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.project import ProjectConfiguration
from trainwright.checkpoint.format import writer
from trainwright.core.errors import TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


def _start(root: Path, **options: Any) -> tuple[Accelerator, nn.Linear]:
    configuration = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, **options)
    accelerator, net = Accelerator(cpu=True, project_config=configuration), nn.Linear(1, 1)
    accelerator.prepare(net)
    return accelerator, net


def _save(accelerator: Accelerator, net: nn.Linear, value: float) -> Path:
    nn.init.constant_(net.bias, value)
    path = Path(accelerator.save_state())
    accelerator._checkpoints.wait()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_states_are_never_overwritten_or_deleted_too_early(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    first, net = _start(tmp_path, total_limit=2, async_save=async_save)
    theirs = [_save(first, net, 1.0), _save(first, net, 2.0)]
    (tmp_path / "checkpoints/checkpoint_2").mkdir()  # belongs to no run
    later, net = _start(tmp_path, total_limit=1, async_save=async_save)
    with pytest.warns(TrainwrightWarning, match="which this process has not written"):
        own = [_save(later, net, value) for value in (3.0, 4.0)]
    with monkeypatch.context() as patch:
        patch.setattr(writer.Draft, "write", full)
        with pytest.raises(Exception, match="No space left"):
            _save(later, net, 5.0)
    found = {path.parent for path in tmp_path.glob("checkpoints/checkpoint_*/manifest.json")}
    assert found == {*theirs, own[1]}
    (own[1] / "trainer.json").write_text("{")
    again, net = _start(tmp_path)
    with pytest.warns(TrainwrightWarning, match="skipping the damaged"):
        again.load_state()
    assert net.bias.item() == 2.0


def test_trackers_write_into_the_folder_of_the_project_unless_they_have_their_own() -> None:
    assert ProjectConfiguration("run").logging_dir == "run"
    own = ProjectConfiguration("run", logging_dir="logs")
    own.set_directories("elsewhere")
    assert (own.project_dir, own.logging_dir) == ("elsewhere", "logs")
