from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.resealing import edit_trainer, reseal
from tests.checkpoint.snapshots import write_small
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.checkpoint import check_checkpoint, newest_valid, read_checkpoint, verify
from trainwright.core.errors import CheckpointError, TrainwrightWarning

SENSELESS: dict[str, Any] = {
    "SyntaxError": {"$": "ndarray", "dtype": "(2,i4", "shape": [2]},
    "RuntimeError": {"$": "device", "v": "cuda:999999999999"},
    "a shape beyond memory": {"$": "pieces", "v": "w", "shape": [2**62, 2**62], "dtype": "F32"},
}


@pytest.mark.parametrize("name", SENSELESS)
def test_an_invalid_value_is_a_checkpoint_error_and_an_earlier_checkpoint_is_used(name: str, tmp_path: Path) -> None:
    earlier, later = write_small(tmp_path, 1), write_small(tmp_path, 2)
    edit_trainer(later, lambda entries: entries.update(callbacks={"x": SENSELESS[name]}))
    assert verify(later) == []  # its files are those that the manifest lists
    for read in (read_checkpoint, check_checkpoint):
        with pytest.raises(CheckpointError, match=later.name):
            read(later)
    with pytest.warns(TrainwrightWarning, match="skipping the damaged checkpoint"):
        assert newest_valid(tmp_path) == earlier


_OPTIMIZER, _NO_STATES = "optimizer/optimizer-00000.json", "optimizer 0 has no groups and states"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (_OPTIMIZER, lambda tree: tree.update(state=None), _NO_STATES),
        (_OPTIMIZER, lambda tree: tree["groups"][0]["params"].append(None), _NO_STATES),
        ("rng/rank-00000.json", lambda tree: tree.update(dict.fromkeys(tree)), "invalid generator states"),
    ],
)
def test_an_invalid_optimizer_or_generator_is_a_checkpoint_error(
    name: str, change: Any, message: str, tmp_path: Path
) -> None:
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(RegressionTask(), regression_loader())
    trainer.save_checkpoint(tmp_path / "saved")
    tree = json.loads((tmp_path / "saved" / name).read_text())
    change(tree)
    (tmp_path / "saved" / name).write_text(json.dumps(tree))
    reseal(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=message):
        quiet_trainer(max_steps=3).fit(RegressionTask(), regression_loader(), ckpt_path=tmp_path / "saved")


def loop(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.name)
