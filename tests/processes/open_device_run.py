"""Train on the device type `open`, in a process of its own: `open_device_run.py FOLDER KIND BUILD`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import open_device
from trainwright import TaskModule, Trainer
from trainwright.cli.env import collect
from trainwright.processes.devices import device_type


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)


def host(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def trained(folder: Path, accelerator: str, precision: str) -> dict[str, Any]:
    quiet: dict[str, Any] = {
        "accelerator": accelerator, "precision": precision, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    devices: list[str] = []

    class Seen(Task):
        def on_train_start(self) -> None:
            devices.append(self.device.type)

    first = Trainer(max_epochs=2, gradient_clip_val=0.5, **quiet)
    first.fit(Seen(), loader(), loader())
    path = folder / f"{accelerator}-{precision}"
    first.save_checkpoint(path)
    task = Seen()
    second = Trainer(max_epochs=4, gradient_clip_val=0.5, **quiet)
    second.fit(task, loader(), loader(), ckpt_path=path)
    metrics = second.validate(task, loader(), verbose=False)
    return {"weights": host(task), "metrics": metrics, "devices": devices}


if __name__ == "__main__":
    home, kind = Path(sys.argv[1]), sys.argv[2]
    facts: dict[str, Any] = {}
    if kind != "cpu":
        open_device.register(Path(sys.argv[3]))
        assert device_type("auto") == device_type("gpu") == kind
        shown = collect()
        facts = {"accelerator": shown["accelerator"], "names": shown["devices"]}
    runs = {precision: trained(home, kind, precision) for precision in ("32-true", "64-true", "bf16-mixed")}
    torch.save({"runs": runs, "facts": facts}, home / "found.pt")
