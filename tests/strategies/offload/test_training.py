"""Training with weights at home on the host or on disk equals training in one place, to the last bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.helpers.runs import StepRecorder, assert_equal_weights, quiet_trainer, weights_of
from trainwright import ConfigurationError, OffloadStrategy, TaskModule, TrainwrightWarning
from trainwright.callbacks import EMAWeightAveraging
from trainwright.callbacks.callback import Callback

WIDTH, DEPTH = 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        changed: torch.Tensor = self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))
        return hidden + changed


class Tiny(TaskModule):
    def __init__(self, *, recompute: bool = False, units: bool = True) -> None:
        super().__init__()
        self.recompute, self.units = recompute, units
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.head = nn.Linear(WIDTH, 11)
            self.head.weight = self.embed.weight

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks) if self.units else []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return self.head(hidden)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


def batches(count: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 11, (2, 7), generator=generator) for _ in range(count)]


def train(
    task: TaskModule, strategy: Any = "single", **options: Any
) -> tuple[StepRecorder, dict[str, torch.Tensor], Any]:
    recorder = StepRecorder()
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options}
    trainer = quiet_trainer(strategy=strategy, **{**settings, "callbacks": [recorder, *settings.get("callbacks", [])]})
    torch.manual_seed(3)
    trainer.fit(task, batches(), batches(2) if settings.get("limit_val_batches") != 0 else None)
    return recorder, weights_of(task), trainer


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0].losses == wanted[0].losses
    assert found[0].norms == wanted[0].norms
    assert_equal_weights(found[1], wanted[1])
    assert found[2].callback_metrics == wanted[2].callback_metrics


_VARIANTS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "activations computed anew": ({"recompute": True}, dict),
    "averages evaluated": ({}, lambda: {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
    "clipped by value": ({}, lambda: {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": ({}, lambda: {"precision": "bf16-mixed", "limit_val_batches": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["cpu", "device"])
@pytest.mark.parametrize("name", _VARIANTS)
def test_a_variant_equals_that_in_one_place(name: str, parameters: Any) -> None:
    task, options = _VARIANTS[name]
    found = train(Tiny(**task), OffloadStrategy(parameters, stream=True), **options())
    assert_same(found, train(Tiny(**task), **options()))


def test_units_are_found_by_size_where_nobody_names_them() -> None:
    found: list[int] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            found.append(len(trainer.strategy.weight_stream.units))

        def on_after_backward(self, trainer: Any, task: Any) -> None:
            flats = [flat for unit in trainer.strategy.weight_stream.units for _, flat in unit.flats]
            assert sum(flat.untyped_storage().nbytes() for flat in flats) == 0  # units leave the device

    strategy = OffloadStrategy(stream=True)
    assert_same(train(Tiny(units=False), strategy, callbacks=[Look()]), train(Tiny(units=False)))
    assert found[0] >= DEPTH


def _file_of(tensor: torch.Tensor) -> str:
    """Return the path of the file that the tensor's memory is mapped to, by Linux's list of mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return path
    return ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="lists no mappings")
@pytest.mark.parametrize("stream", [True, False])
def test_the_state_of_the_optimizer_is_in_files_of_the_folder(stream: bool, tmp_path: Path) -> None:
    files: set[str] = set()

    class Look(Callback):
        def on_train_end(self, trainer: Any, task: Any) -> None:
            for state in trainer.optimizers[0].state.values():
                files.update((_file_of(state["exp_avg"]), _file_of(state["exp_avg_sq"])))

    parameters = "disk" if stream else "device"
    train(Tiny(), OffloadStrategy(parameters, "disk", stream=stream, offload_folder=tmp_path), callbacks=[Look()])
    assert files
    assert all(file.startswith(str(tmp_path)) for file in files)


def test_a_full_disk_is_an_error_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    task = Tiny()
    before = weights_of(task)
    with pytest.raises(ConfigurationError, match=r"do not fit into.*Set offload_folder"):
        train(task, OffloadStrategy("disk", stream=True, offload_folder=tmp_path))
    assert_equal_weights(weights_of(task), before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: OffloadStrategy("gpu"), "parameters='gpu', expected one of 'cpu', 'disk', 'device'"),
        (lambda: OffloadStrategy(optimizer_state="nvme"), "optimizer_state='nvme', expected one of 'cpu', 'disk'"),
        (lambda: OffloadStrategy(prefetch=-1), "expected 0 or more"),
        (lambda: quiet_trainer(strategy="offload", compile=True), "Remove compile="),
        (lambda: quiet_trainer(strategy="offload", devices=2), "one process"),
    ],
)
def test_what_it_cannot_do_is_refused_at_once(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_a_model_without_units_is_warned_of() -> None:
    class Flat(Tiny):
        def shard_units(self) -> list[nn.Module]:
            return []

    task = Flat()
    task.embed, task.blocks, task.head = nn.Embedding(11, 11), nn.ModuleList(), nn.Identity()  # type: ignore[assignment]
    strategy = OffloadStrategy(stream=True, min_num_params=10**6)
    with pytest.warns(TrainwrightWarning, match="Flat has no units to stream"):
        train(task, strategy, limit_val_batches=0)
