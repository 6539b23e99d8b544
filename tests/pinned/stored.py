"""Checkpoints in the middle of an epoch, one by each strategy, and the losses of the five steps after them.

    python -m tests.pinned.stored [NAME …]

writes them anew, which is right only where the format has changed on purpose; then the former ones stay beside them,
as checkpoints that users have.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, quiet_trainer
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.strategies.offload.training import OffloadStrategy

FOLDER = Path(__file__).parent / "checkpoints"
SAVED_AT, NUM_LOSSES = 5, 5  # steps; an epoch has 3

# name → (the Trainer's argument, or what makes it, processes)
STRATEGIES: dict[str, tuple[str | Callable[[], Any], int]] = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "zero2": ("deepspeed_stage_2", 2),
    "zero3": ("deepspeed_stage_3", 2),
    "tp": ("tp", 2),
    "offload": (lambda: OffloadStrategy("disk", "disk", min_num_params=1, stream=True), 1),
}


class PinnedTask(TaskModule):
    """Draws numbers in its steps; its optimizer, schedule, buffer and metrics all have a state."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        self.seen += 1
        loss = functional.mse_loss(self.net(functional.dropout(inputs, 0.2)), targets)
        self.log("loss", loss)
        return loss

    def tensor_parallel_plan(self, mesh: Any) -> dict[str, Any]:
        """Split both layers over the width between them."""
        return {"net.0": "colwise", "net.2": "rowwise"}

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        biases = [p for p in self.net.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def _samples() -> TensorDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, torch.sin(inputs.sum(dim=1, keepdim=True)))


def _train(name: str, max_steps: int, path: Path, *, save: bool) -> list[float]:
    torch.manual_seed(3)
    strategy, processes = STRATEGIES[name]
    data_ranks = 1 if name == "tp" else processes
    recorder = StepRecorder()
    trainer = quiet_trainer(
        devices="auto" if processes > 1 else 1,
        strategy=strategy if isinstance(strategy, str) else strategy(),
        max_steps=max_steps, max_epochs=-1,
        accumulate_grad_batches=4 // data_ranks,
        gradient_clip_val=0.5,
        callbacks=[recorder, *([_Save(path)] if save else [])],
    )  # fmt: skip
    trainer.fit(PinnedTask(), DataLoader(_samples(), 2, shuffle=True), ckpt_path=None if save else path)
    return recorder.losses


def _over_ranks(name: str, max_steps: int, path: Path, *, save: bool) -> list[float]:
    _, processes = STRATEGIES[name]
    if processes == 1:
        return _train(name, max_steps, path, save=save)
    by_rank = run_distributed(lambda: _train(name, max_steps, path, save=save), processes, timeout=180)
    return [sum(shares) / processes for shares in zip(*by_rank, strict=True)]


def continued(name: str, checkpoint: Path) -> list[float]:
    """Return the losses of the five steps after a checkpoint, the mean over ranks."""
    return _over_ranks(name, SAVED_AT + NUM_LOSSES, checkpoint, save=False)


def processor() -> str:
    """Return what decides in which order this machine sums."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    wide = sorted(flag for flag in flags.split() if flag.startswith(("avx", "fma", "amx")))
    return f"{torch.__version__.split('+')[0]} {torch.backends.cpu.get_cpu_capability()} {' '.join(wide)}"


def main(names: list[str]) -> None:
    for name in names or list(STRATEGIES):
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        losses = _over_ranks(name, SAVED_AT + NUM_LOSSES, folder / "checkpoint", save=True)[SAVED_AT:]
        facts = {"losses": [loss.hex() for loss in losses], "processor": processor()}
        (folder / "next.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(name, losses)


if __name__ == "__main__":
    main(sys.argv[1:])
