"""The table of docs/optimizers.md against what it describes, and the configuration of a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizers.test_optimizers import Autoencoder, batches
from trainwright import DataModule
from trainwright.cli.main import main

pytestmark = [
    pytest.mark.requires("bitsandbytes", reason="AdamW in 8 bits"),
    pytest.mark.requires("torchao", reason="AdamW in 8 and 4 bits"),
    pytest.mark.filterwarnings("ignore"),
]


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return batches()


QUIET: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}


def test_a_configuration_names_the_optimizer_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    created: list[Any] = []
    monkeypatch.setattr(Autoencoder, "on_fit_end", lambda task: created.append(task.optimizers()), raising=False)
    settings = [f"--trainer.{key}={value}" for key, value in QUIET.items()]
    here = "tests.optimizers.test_documented_optimizers"
    with torch.compiler.set_stance("force_eager"):
        line = [f"--task={Autoencoder.__module__}.Autoencoder", "--task.name=adamw_8bit", f"--data={here}.Data"]
        assert main(["fit", *line, *settings]) == 0
    assert type(created[0]).__name__ == "AdamW8bit"
