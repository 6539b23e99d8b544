"""Programs of the XLA tests. Each runs in a process of its own, because SPMD and the first backward are chosen once.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python -m tests.strategies.xla.programs equal_losses '{"strategy": "xla_fsdp"}'

The last line of the output is the result as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import TaskModule, Trainer, seed_everything

WIDTH, SAMPLES = 8, 64


class Regression(TaskModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.second(torch.relu(self.first(x))))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97), "interval": "step"}]


def loader(batch_size: int = 16, samples: int = SAMPLES) -> DataLoader[Any]:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def trainer(folder: str, **options: Any) -> Trainer:
    given = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 4, **options}
    return Trainer(enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **given)


def fit(folder: str, **options: Any) -> tuple[Regression, Trainer]:
    task, run = Regression(), trainer(folder, **options)
    run.fit(task, loader(), loader(32))
    return task, run


def equal_losses(folder: str, **options: Any) -> dict[str, Any]:
    """Train under XLA and on the CPU; the differences, and where the weights are afterwards."""
    task, run = fit(folder, **options)
    options = {name: value for name, value in options.items() if name != "strategy"}
    other, reference = fit(folder, accelerator="cpu", **options)
    pairs = zip(task.parameters(), other.parameters(), strict=True)
    metrics = [(run.callback_metrics[name], value) for name, value in reference.callback_metrics.items()]
    return {
        "weights": max((a - b).abs().max().item() for a, b in pairs),
        "losses": max((a.cpu() - b).abs().item() for a, b in zip(task.losses, other.losses, strict=True)),
        "metrics": max(abs(float(a) - float(b)) for a, b in metrics),
        "tied": task.first.weight is task.second.weight,
        "devices": sorted({parameter.device.type for parameter in task.parameters()}),
    }


def counters() -> dict[str, int]:
    import torch_xla.debug.metrics as metrics

    compiled = metrics.metric_data("CompileTime")
    return {
        "compilations": compiled[0] if compiled else 0,
        "marks": metrics.counter_value("MarkStep") or 0,
        "reads": metrics.counter_value("aten::_local_scalar_dense") or 0,
    }


def counted_steps(folder: str, accumulate: int = 1, **options: Any) -> list[dict[str, int]]:
    """Return the counters at each optimizer step of a training without validation."""
    found: list[dict[str, int]] = []

    class Counted(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % accumulate == 0:
                found.append(counters())

    options |= {"max_epochs": 1, "log_every_n_steps": 1000, "gradient_clip_val": 1.0}
    run = trainer(folder, accumulate_grad_batches=accumulate, **options)
    run.fit(Counted(), loader(samples=16 * 12 * accumulate))
    return found


def saves(folder: str, strategy: str = "xla") -> dict[str, Any]:
    """Interrupt a training under XLA, go on under XLA and on the CPU, and go on under XLA with the CPU's."""
    checkpoint = str(Path(folder, "half"))
    options: dict[str, Any] = {"strategy": strategy}

    def half(name: str, dropout: float, **options: Any) -> str:
        run = trainer(folder, max_epochs=1, **options)
        seed_everything(3)
        run.fit(Regression(dropout), loader())
        run.save_checkpoint(f"{checkpoint}-{name}")
        return f"{checkpoint}-{name}"

    def rest(path: str, dropout: float, **options: Any) -> Regression:
        task = Regression(dropout)
        seed_everything(4)  # is overwritten by the checkpoint's
        trainer(folder, max_epochs=3, **options).fit(task, loader(), ckpt_path=path)
        return task

    def apart(a: Regression, b: Regression) -> float:
        return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))

    seed_everything(3)
    whole = Regression(0.5)
    trainer(folder, max_epochs=3, **options).fit(whole, loader())
    resumed = rest(half("xla", 0.5, **options), 0.5, **options)
    plain = half("plain", 0.0, **options)
    there, here = rest(plain, 0.0, **options), rest(plain, 0.0, accelerator="cpu")
    back = rest(half("cpu", 0.0, accelerator="cpu"), 0.0, **options)
    return {"resumed": apart(whole, resumed), "to_cpu": apart(there, here), "from_cpu": apart(there, back)}


def ragged(folder: str) -> list[str]:
    """Train with a last batch of another size; the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(folder, strategy="xla", max_epochs=2).fit(Regression(), loader(samples=70))
    return [str(one.message) for one in caught if "XLA compiled" in str(one.message)]


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        found = globals()[name](folder, **options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
