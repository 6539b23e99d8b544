"""`trainwright replay`: a step of a run again, on one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.cli.main import main
from trainwright.cli.reports.run_files import read_run
from trainwright.cli.reports.step_replay import _is_close, replay_step
from trainwright.core.errors import ConfigurationError
from trainwright.loggers.csv_logger import CSVLogger
from trainwright.loggers.run_record import RECORD_FILE

_PROJECT = """
import torch
from torch.utils.data import DataLoader
from tests.helpers.tasks import RegressionTask, regression_data
from trainwright import DataModule

class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(regression_data(32), batch_size=2, shuffle=True)

class Net(RegressionTask):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr, momentum=0.9, dropout=0.5)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
"""
_CONFIG = """
seed_everything: 3
trainer:
  max_epochs: 2
  gradient_clip_val: 0.5
  accumulate_grad_batches: 2
  log_every_n_steps: 1
  default_root_dir: {root}
  enable_progress_bar: false
  enable_model_summary: false
  logger: {{class_path: CSVLogger, init_args: {{save_dir: {root}}}}}
  callbacks: [{{class_path: ModelCheckpoint, init_args: {{every_n_train_steps: 5, save_top_k: -1}}}}]
task: {{class_path: replayed_project.Net}}
data: {{class_path: replayed_project.Data}}
"""


@pytest.mark.slow
def test_a_replayed_step_equals_the_logged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "replayed_project.py").write_text(_PROJECT)
    root = tmp_path / "runs"
    (tmp_path / "config.yaml").write_text(_CONFIG.format(root=root))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["fit", str(tmp_path / "config.yaml")]) == 0
    (checkpoint,) = (root / "checkpoints").glob("*step=5")
    capsys.readouterr()
    assert main(["replay", str(checkpoint), "--step", "12"]) == 2  # the folder's own configuration is code
    assert f"pass --config {root / 'config.yaml'}" in capsys.readouterr().err
    config = ["--config", str(root / "config.yaml")]
    assert main(["replay", str(checkpoint), "--step", "12", "--tolerance", "0", "--json", *config]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])
    logged = {line["step"]: line for line in read_run(root).progress}
    assert [row[:3] for row in found["compared"]] == [
        [step, name, logged[step][name]] for step in range(6, 13) for name in ("loss", "grad_norm")
    ]
    assert sorted(found["gradients"]) == ["net.0.bias", "net.0.weight", "net.3.bias", "net.3.weight"]
    assert len(found["samples"]) == 4
    # Another bound changes the steps after the first replayed one.
    assert main(["replay", str(checkpoint), "--step", "7", *config, "trainer.gradient_clip_val=0.1"]) == 1
    assert "differs" in capsys.readouterr().out
    for record in root.rglob(RECORD_FILE):
        record.unlink()
    assert main(["replay", str(checkpoint), "--step", "7", *config]) == 0
    assert "no record of the run was found" in capsys.readouterr().out


def test_several_ranks_are_replayed_by_further_micro_batches(tmp_path: Path) -> None:
    loader = regression_loader(32, 2, shuffle=True)
    arguments: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 4, "seed": 1}
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    logger = CSVLogger(tmp_path, version=0)
    trainer = quiet_trainer(
        **arguments, callbacks=[saver], logger=logger, log_every_n_steps=1, default_root_dir=tmp_path
    )
    trainer.fit(RegressionTask(), loader)
    (checkpoint,) = (tmp_path / "checkpoints").glob("*step=4")
    arguments |= {"accumulate_grad_batches": 2, "train_dataloaders": loader}
    found = replay_step(RegressionTask(), checkpoint, 6, num_ranks=2, **arguments)
    logged = {line["step"]: line["loss"] for line in read_run(tmp_path).progress}
    assert found.losses == {5: logged[5], 6: logged[6]}
    weights_only = tmp_path / "weights"
    trainer.save_checkpoint(weights_only, weights_only=True)
    for path, step in ((checkpoint, 4), (weights_only, 9)):
        with pytest.raises(ConfigurationError, match=f"step {step} cannot be reached"):
            replay_step(RegressionTask(), path, step, train_dataloaders=loader)


def test_a_missing_checkpoint_or_configuration_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "absent"), "--step", "1"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "replay needs the configuration of the run" in capsys.readouterr().err


def test_a_finite_value_is_not_close_to_an_infinite_one() -> None:
    infinity = float("inf")
    assert not _is_close(1.0, infinity, 1e-3)
    assert not _is_close(-infinity, infinity, 1e-3)
    assert _is_close(infinity, infinity, 1e-3)
    assert _is_close(float("nan"), float("nan"), 1e-3)
