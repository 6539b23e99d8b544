"""A pipeline that ends in the middle of an epoch continues exactly, and on other meshes as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, assert_equal_weights, quiet_trainer, weights_of
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.task import TaskModule
from trainwright.strategies.megatron.strategy import MegatronStrategy

# Each resumed run writes to a folder of its own, and reports that the earlier checkpoints are not there.
pytestmark = [pytest.mark.filterwarnings("ignore:ModelCheckpoint.*not found:UserWarning"), pytest.mark.slow]

_SAMPLES, _GLOBAL_BATCH, _EPOCHS, _MIDDLE = 48, 8, 3, 9  # 6 steps in an epoch
_STEPS = _EPOCHS * _SAMPLES // _GLOBAL_BATCH


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """(index, input); some of it is drawn where a sample is fetched."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(1.0, 5.0) * index) + 0.1 * torch.randn(4)


class Layer(nn.Sequential):
    """Two linear layers with dropout, added to their input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Dropout(0.3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)


class Layers(TaskModule):
    """Layers with dropout, and momentum; notes the samples of each micro-batch and a sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first = nn.Linear(4, 8)
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.last = nn.Linear(8, 1)
        self.seen: list[tuple[list[int], float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.last(x)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch[0].tolist(), float(batch[1].sum())))
        drawn = torch.rand(())  # before the model is called
        return nn.functional.mse_loss(self(batch[1]) * (1 + drawn), batch[1].sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.002, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.005, total_steps=_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    strategy: Any,
    folder: Path,
    ckpt_path: Path | None = None,
    *,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train to the end, with a checkpoint of every third step. Only the checkpoint has the generators' states."""
    torch.manual_seed(77 if ckpt_path is None else 78)
    task, recorder = Layers(), StepRecorder()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        devices="auto",
        strategy=strategy,
        max_epochs=_EPOCHS,
        accumulate_grad_batches=accumulate,
        callbacks=[saver, recorder],
    )
    loader = DataLoader(Samples(), batch_size=_GLOBAL_BATCH // accumulate, shuffle=True)
    trainer.fit(task, loader, ckpt_path=ckpt_path)
    return {"losses": recorder.losses, "seen": task.seen, "weights": weights_of(task)}


_SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "divided batches": ({"num_micro_batches": 4}, 1),
    "several stages on a rank": ({"schedule": "interleaved1f1b"}, 4),
    "layers recomputed": ({"recompute": "full", "split_points": ["layers.3"]}, 2),
}


@pytest.mark.distributed
def test_a_pipeline_resumes_exactly_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def run() -> dict[str, Any]:
        found = {}
        for name, (options, accumulate) in _SETTINGS.items():
            folder = tmp_path / name
            whole = train(MegatronStrategy(pp=2, **options), folder / "whole", accumulate=accumulate)
            start = folder / "whole" / f"step={_MIDDLE}"
            later = train(MegatronStrategy(pp=2, **options), folder / "later", start, accumulate=accumulate)
            found[name] = (whole, later)
        return found

    ranks = run_distributed(run, 2, init=False, timeout=180)
    for name in _SETTINGS:
        for rank, found in enumerate(ranks):
            whole, later = found[name]
            assert len(whole["losses"]) == _STEPS, name
            assert later["losses"] == whole["losses"][_MIDDLE:], (name, rank)
            assert_equal_weights(later["weights"], whole["weights"])
        seen = [sorted(rank[name][0]["seen"]) for rank in ranks]
        assert seen[0] == seen[1], name  # both ranks have drawn the same noise
        per_step = len(seen[0]) // _STEPS
        rest = ranks[0][name][0]["seen"][_MIDDLE * per_step :]
        assert sorted(ranks[0][name][1]["seen"]) == sorted(rest), name  # a schedule may change the order within a step
