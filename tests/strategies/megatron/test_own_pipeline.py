"""A pipeline in a user-written loop, and one that ends in the middle of an epoch: both continue exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.runs import StepRecorder, assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.megatron.test_pipeline import Language, batches
from trainwright import Accelerator
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.megatron.strategy import MegatronStrategy


class WithLoss(Language):
    """As a model of transformers: with labels it returns its loss, too."""

    def forward(self, tokens: torch.Tensor, labels: Any = None) -> Any:
        logits = super().forward(tokens)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _loop(strategy: Any, folder: Path | None, *, load: bool = False, whole: bool = True, **options: Any) -> Any:
    """Train with half the batches, save, and train with the others; return losses and logits."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy, seed=0, cpu=True, **options)
    model: Any = WithLoss()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    if load:
        accelerator.load_state(str(folder))
    losses = []
    for i, tokens in enumerate(batches()):
        if i == 6 and folder is not None and not load:
            accelerator.save_state(str(folder))
        if load and i < 6:
            continue
        if whole:
            loss = model(tokens, labels=tokens)["loss"]
            accelerator.backward(loss)
        else:
            loss = accelerator.forward_backward(lambda t: model(t, labels=t)["loss"], list(tokens.split(1)))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, model(batches()[0])["logits"]


@pytest.mark.distributed
def test_a_loop_is_that_of_one_process_and_continues_its_checkpoints(tmp_path: Path) -> None:
    def runs() -> Any:
        strategy = MegatronStrategy(pp=2, num_micro_batches=3)
        return [
            _loop(strategy, tmp_path / "two"),
            _loop(strategy, None, whole=False),
            _loop(MegatronStrategy(pp=2, schedule="interleaved1f1b", num_micro_batches=2), None),
            _loop(strategy, tmp_path / "one", load=True),
        ]

    losses, logits = _loop("single", tmp_path / "one")
    torch.testing.assert_close(_loop("single", None, whole=False)[1], logits, rtol=1e-4, atol=1e-4)
    for rank in run_distributed(runs, 2, init=False, timeout=90):
        for found in rank:
            assert found[0] == pytest.approx(losses[-len(found[0]) :], rel=1e-5)
            torch.testing.assert_close(found[1], logits, rtol=1e-4, atol=1e-4)
    again = _loop("single", tmp_path / "two", load=True)
    assert again[0] == pytest.approx(losses[6:], rel=1e-5)


# Each resumed run writes to a folder of its own, and reports that the earlier checkpoints are not there.
pytestmark = [pytest.mark.filterwarnings("ignore:ModelCheckpoint.*not found:UserWarning"), pytest.mark.slow]

_SAMPLES, _GLOBAL_BATCH, _EPOCHS, _MIDDLE = 48, 8, 2, 9  # 6 steps in an epoch
_STEPS = _EPOCHS * _SAMPLES // _GLOBAL_BATCH


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """(index, input); some of it is drawn where a sample is fetched."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(1.0, 5.0) * index) + 0.1 * torch.randn(4)


class Layer(nn.Sequential):
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
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch[0].tolist(), float(batch[1].sum())))
        drawn = torch.rand(())  # before the model is called
        return nn.functional.mse_loss(self(batch[1]) * (1 + drawn), batch[1].sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.002, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.005, total_steps=_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(strategy: Any, folder: Path, ckpt_path: Path | None = None) -> dict[str, Any]:
    """Train to the end, with a checkpoint of every third step. Only the checkpoint has the generators' states."""
    torch.manual_seed(77 if ckpt_path is None else 78)
    task, recorder = Layers(), StepRecorder()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=_EPOCHS, callbacks=[saver, recorder])
    trainer.fit(task, DataLoader(Samples(), batch_size=_GLOBAL_BATCH, shuffle=True), ckpt_path=ckpt_path)
    return {"losses": recorder.losses, "seen": task.seen, "weights": weights_of(task)}


@pytest.mark.distributed
def test_a_pipeline_resumes_exactly_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    strategy = MegatronStrategy(pp=2, num_micro_batches=4, schedule="interleaved1f1b", recompute="full")

    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        whole = train(strategy, tmp_path / "whole")
        return whole, train(strategy, tmp_path / "later", tmp_path / "whole" / f"step={_MIDDLE}")

    ranks = run_distributed(run, 2, init=False, timeout=180)
    for whole, later in ranks:
        assert len(whole["losses"]) == _STEPS
        assert later["losses"] == whole["losses"][_MIDDLE:]
        assert_equal_weights(later["weights"], whole["weights"])
    (whole, _), (other, later) = ranks
    assert sorted(whole["seen"]) == sorted(other["seen"])  # both ranks have drawn the same noise
    assert sorted(later["seen"]) == sorted(whole["seen"][_MIDDLE * len(whole["seen"]) // _STEPS :])


@pytest.mark.distributed
def test_what_a_pipeline_cannot_do_in_a_loop_is_an_error() -> None:
    def without_labels() -> None:
        accelerator = Accelerator(strategy=MegatronStrategy(pp=2), cpu=True)
        accelerator.prepare(WithLoss())(batches()[0])

    def accumulates() -> None:
        accelerator = Accelerator(strategy=MegatronStrategy(pp=2), cpu=True, gradient_accumulation_steps=2)
        with pytest.raises(ConfigurationError, match="Use num_micro_batches"):
            accelerator.prepare(WithLoss())

    run_distributed(accumulates, 2, init=False, timeout=60)
    with pytest.raises(RankError, match=r"returned no loss.*accelerator\.forward_backward"):
        run_distributed(without_labels, 2, init=False, timeout=60)


@pytest.mark.distributed
def test_four_ranks_divide_stages_and_shards_in_bfloat16() -> None:
    def run() -> Any:
        return _loop(MegatronStrategy(pp=2, dp_shard=2, num_micro_batches=3), None, mixed_precision="bf16")

    losses, _ = _loop("single", None, mixed_precision="bf16")
    for found, _ in run_distributed(run, 4, init=False, timeout=90):
        assert found == pytest.approx(losses, rel=1e-2)
