"""Nothing is restored in part without a word: what is absent is an error that names it, or was allowed by name.

`tests/trainer/test_partial_resume.py` goes into every name that can be allowed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RecordingCallback, RegressionTask, regression_loader
from trainwright.checkpoint import read_checkpoint, read_manifest
from trainwright.core.errors import CheckpointError, TrainwrightWarning


class AdamTask(RegressionTask):
    """Has an optimizer whose state matters."""

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint after one of two epochs."""
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(AdamTask(), regression_loader(8, 2))
    return trainer.save_checkpoint(tmp_path / "saved")


def resume(checkpoint: Path, *callbacks: Any, **arguments: Any) -> AdamTask:
    """Resume for another epoch."""
    task = AdamTask(seed=3)
    trainer = quiet_trainer(max_epochs=2, callbacks=list(callbacks))
    trainer.fit(task, regression_loader(8, 2), ckpt_path=checkpoint, **arguments)
    return task


FILES = [
    "trainer.json", "rng/rank-00000.json", "rng/rank-00000.safetensors", "optimizer/optimizer-00000.json",
    "optimizer/optimizer-00000.safetensors", "model/model-00001-of-00001.safetensors",
    "model/model.safetensors.index.json",
]  # fmt: skip


def test_the_list_of_files_is_complete(checkpoint: Path) -> None:
    listed = {file for part in read_manifest(checkpoint).parts.values() for file in part.files}
    assert listed == set(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("allow_missing", [[], ["optimizer", "rng"]], ids=["strict", "allowed"])
def test_each_file_that_is_gone_is_an_error_that_names_it(
    checkpoint: Path, file: str, allow_missing: list[str]
) -> None:
    (checkpoint / file).unlink()
    begun = RecordingCallback("on_train_start")
    # Half a part is damage, which nobody can allow; trainer.json is the whole of its part, which nobody can miss.
    with pytest.raises(CheckpointError, match=re.escape(file)):
        resume(checkpoint, begun, allow_missing=allow_missing)
    assert begun.events == []


def test_a_deleted_optimizer_is_never_replaced_by_a_fresh_one_in_silence(checkpoint: Path) -> None:
    whole = weights_of(resume(checkpoint))
    for file in (checkpoint / "optimizer").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"the part 'optimizer' is missing: optimizer/optimizer-00000\.json"):
        resume(checkpoint)
    with pytest.warns(TrainwrightWarning, match="has no optimizer part"):
        task = resume(checkpoint, allow_missing=["optimizer"])
    assert task.trainer.global_step == 8
    assert any(not torch.equal(tensor, whole[name]) for name, tensor in weights_of(task).items())


def test_weights_alone_are_taken_from_what_lacks_the_rest_only_when_asked_for(checkpoint: Path) -> None:
    for file in [*(checkpoint / "optimizer").iterdir(), *(checkpoint / "rng").iterdir()]:
        file.unlink()
    weights = read_checkpoint(checkpoint, parts=["model"]).model or {}
    begun = RecordingCallback("on_train_start", note=lambda _, trainer: weights_of(trainer.task))
    resume(checkpoint, begun, load_weights_only=True)
    assert_equal_weights(begun.notes[0][1], dict(weights))
