"""Sealed files that make no sense: each is a `CheckpointError`, and `ckpt_path="last"` falls back past it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fuzz_readers import KINDS
from tests.checkpoint.resealing import edit_trainer
from tests.checkpoint.snapshots import write_small
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.checkpoint import check_checkpoint, newest_valid, read_checkpoint, verify
from trainwright.core.errors import CheckpointError, TrainwrightWarning

SENSELESS: dict[str, Any] = {
    "TypeError": {"$": "size", "v": None},
    "SyntaxError": {"$": "ndarray", "dtype": "(2,i4", "shape": [2]},
    "IsADirectoryError": {"$": "datetime", "v": "2026-01-01T00:00:00", "fold": 0, "zone": "Europe"},
    "OverflowError": {"$": "timedelta", "v": [1e300]},
    "UnicodeEncodeError": {"$": "datetime", "v": "2026-01-01T00:00:00", "fold": 0, "zone": "\ud800"},
    "RuntimeError": {"$": "device", "v": "cuda:999999999999"},
    "an unhashable key": {"$": "dict", "v": [[[1], 2]]},
    "a shape beyond memory": {"$": "pieces", "v": "w", "shape": [2**62, 2**62], "dtype": "F32"},
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_senseless_value_is_our_error_and_gives_way(name: str, tmp_path: Path) -> None:
    earlier, later = write_small(tmp_path, 1), write_small(tmp_path, 2)
    edit_trainer(later, lambda entries: entries.update(callbacks={"x": SENSELESS[name]}))
    assert verify(later) == []  # its files are those that the manifest lists
    for read in (read_checkpoint, check_checkpoint):
        with pytest.raises(CheckpointError, match=later.name):
            read(later)
    with pytest.warns(TrainwrightWarning, match="passing over the damaged checkpoint"):
        assert newest_valid(tmp_path) == earlier


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries["progress"].update(step="2"),
        lambda entries: entries["progress"].update(epoch=-1),
        lambda entries: entries.update(callbacks=[]),
        lambda entries: entries.update(schedulers={"a": 1}),
        lambda entries: entries.update(loggers={"$": "float", "v": "1"}),
    ],
)
def test_last_falls_back_past_what_is_sealed_and_makes_no_sense(change: Any, tmp_path: Path) -> None:
    def fit(steps: int, ckpt_path: str | None = None) -> Any:
        saver = ModelCheckpoint(tmp_path / "run", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = quiet_trainer(max_steps=steps, default_root_dir=tmp_path, callbacks=[saver])
        trainer.fit(RegressionTask(), regression_loader(), ckpt_path=ckpt_path)
        return trainer

    fit(4)
    edit_trainer(tmp_path / "run" / "step=4", change)
    with pytest.warns(TrainwrightWarning, match="passing over the damaged checkpoint"):
        assert fit(6, "last").global_step == 6


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_noticed_or_harmless(kind: str) -> None:
    """The short form of tests/torture/test_readers.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.fuzz_readers", kind, "1000000", "60"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
