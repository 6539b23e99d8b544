"""Train on the device type `open`, in a process of its own: `open_device_run.py FOLDER KIND BUILD`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import open_device
from trainwright import Accelerator, TaskModule, Trainer
from trainwright.cli.env import collect
from trainwright.core.tree import move_module
from trainwright.processes.devices import device_type


class Task(TaskModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return and log the loss."""
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


def loader() -> DataLoader[Any]:
    """Return the batches."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)


def host(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights on the host."""
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def trained(folder: Path, accelerator: str, precision: str) -> dict[str, Any]:
    """Train, save, resume and validate, and return weights and metrics."""
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


def own_loop(folder: Path, cpu: bool) -> dict[str, Any]:
    """Train with an Accelerator, save and load, and return the weights."""
    accelerator = Accelerator(cpu=cpu, mixed_precision="bf16", gradient_accumulation_steps=2)
    net, batches = Task().net, loader()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    net, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    for _ in range(2):
        for inputs, targets in batches:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(folder / "state")
    before = host(accelerator.unwrap_model(net))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    accelerator.load_state(folder / "state")
    after = host(accelerator.unwrap_model(net))
    assert all(torch.equal(before[name], after[name]) for name in before)
    return {"weights": after, "loss": accelerator.gather(loss).item(), "devices": [accelerator.device.type]}


def keeps_parameters(kind: str) -> bool:
    """Return whether a module keeps its parameters on its way to the device and back, tied ones too."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = weight = net[0].weight
    there = move_module(net, torch.device(kind))[0].weight
    assert there.device.type == kind
    back = move_module(net, torch.device("cpu"))
    return back[0].weight is back[1].weight is there is weight


if __name__ == "__main__":
    home, kind = Path(sys.argv[1]), sys.argv[2]
    facts: dict[str, Any] = {}
    if kind != "cpu":
        open_device.register(Path(sys.argv[3]))
        assert device_type("auto") == device_type("gpu") == kind
        shown = collect()
        facts = {"accelerator": shown["accelerator"], "names": shown["devices"], "kept": keeps_parameters(kind)}
    runs = {precision: trained(home, kind, precision) for precision in ("32-true", "64-true", "bf16-mixed")}
    torch.save({"runs": runs, "loop": own_loop(home, kind == "cpu"), "facts": facts}, home / "found.pt")
