"""The table of docs/optimizers.md against what it describes, and the configuration of a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.sources import ROOT
from tests.optimizers.test_optimizers import Autoencoder, batches
from trainwright import DataModule
from trainwright.checkpoint.format.optimizer import named_optimizer_state
from trainwright.cli.main import main
from trainwright.core.tree import iterate_tensors
from trainwright.optimizers import create_optimizer, optimizer_names

pytestmark = [
    pytest.mark.requires("bitsandbytes", reason="AdamW in 8 bits"),
    pytest.mark.requires("torchao", reason="AdamW in 8 and 4 bits"),
    pytest.mark.filterwarnings("ignore"),
]


def documented_table() -> dict[str, dict[str, str]]:
    text = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    lines = [line for line in text.partition("<!-- optimizers:")[2].splitlines() if line.startswith("|")]
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): dict(zip(titles, row, strict=True)) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizer_names())
def test_the_table_has_the_class_the_package_and_the_bytes_of_its_state(name: str) -> None:
    row = documented_table()[name]
    layer = nn.Linear(1024, 1024, bias=name != "muon")  # one of ten equal layers
    optimizer = create_optimizer(name, layer.parameters(), **({"momentum": 0.9} if name == "sgd" else {}))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    names: dict[torch.Tensor, str] = {parameter: key for key, parameter in layer.named_parameters()}
    tensors = iterate_tensors(named_optimizer_state(optimizer, names)["state"])
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert float(row["bytes"]) == pytest.approx(size / sum(p.numel() for p in layer.parameters()), abs=0.006)
    path = row["class"].split("`")[1]
    assert type(optimizer).__name__ == path.rpartition(".")[2]
    assert row["package"] == path.partition(".")[0]


def test_the_table_has_every_name() -> None:
    assert list(documented_table()) == optimizer_names()


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
