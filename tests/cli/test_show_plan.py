"""`trainwright plan`: the plan of a configuration file, with the file or word that each setting comes from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.main import main

_PROJECT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


class Net(tw.TaskModule):
    def __init__(self):
        super().__init__()
        print("built")
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(tw.DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=2)
"""
_CONFIG = """
trainer: {max_epochs: 3, accelerator: cpu, devices: 2, strategy: ddp, max_skipped: 100}
task: {class_path: planned_project.Net}
data: {class_path: planned_project.Data}
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "planned_project.py").write_text(_PROJECT)
    (tmp_path / "config.yaml").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("planned_project", None)


def test_settings_name_the_file_the_command_line_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["plan", "config.yaml", "trainer.max_epochs=5", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    settings = {name: (each["value"], each["source"]) for name, each in found["settings"].items()}
    assert settings["max_epochs"] == (5, "command line")
    assert settings["devices"] == (2, "config.yaml")
    assert settings["max_skipped"] == (100, "config.yaml")
    assert settings["precision"] == ("bf16-mixed", "ACCELERATE_MIXED_PRECISION")
    assert settings["seed"] == (None, "default")
    assert (found["data"]["global_batch"], found["data"]["total_steps"]) == (4, 25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "planned_project.py"]


def test_setup_data_counts_the_batches_of_the_data_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    project = tmp_path / "planned_project.py"
    project.write_text(f"{_PROJECT}\n    def setup(self, stage):\n        pass\n")
    assert main(["plan", "config.yaml"]) == 0
    assert "trainwright plan --setup-data" in capsys.readouterr().out
    assert main(["plan", "config.yaml", "--setup-data", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert (found["batches_per_epoch"], found["samples_per_epoch"], found["total_steps"]) == (5, 20, 15)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["trainer.max_epoch=3", "--ckpt_path=missing", "trainer.min_epochs=9"])
def test_errors_are_those_of_fit(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "config.yaml", word]) == 2
    of_fit = capsys.readouterr().err
    assert main(["plan", "config.yaml", word]) == 2
    assert capsys.readouterr().err == of_fit


def test_seed_everything_is_the_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"seed_everything: 3\n{_CONFIG}")
    assert main(["plan", "config.yaml"]) == 0
    assert "seed 3 seed_everything of config.yaml" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "config.yaml", "seed_everything=4"]) == 0
    assert "seed 4 seed_everything of command line" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "config.yaml", "trainer.seed=5"]) == 0
    assert "seed 5 command line" in " ".join(capsys.readouterr().out.split())
