"""How a sharded model comes into being, and what is left of it: no rank need ever hold the whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import QUIET, assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.fsdp.sharded import Block, Blocks
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.units import warn_of_large_rest
from trainwright.trainer.trainer import Trainer

_WIDTH, _NUM_BLOCKS = 64, 6


class Grown(TaskModule):
    """Builds its blocks in `configure_model`, and reads their first values from a file on rank 0 if told."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self.built_on = ""
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        self.blocks = nn.ModuleList([Block(_WIDTH) for _ in range(_NUM_BLOCKS)])
        self.norm = nn.BatchNorm1d(_WIDTH, affine=False)  # is not used, and has buffers
        self.built_on = self.blocks[0].mix.weight.device.type
        if self.path is not None and self.global_rank == 0:
            self.blocks.load_state_dict(torch.load(self.path))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = batch
        for block in self.blocks:
            hidden = block(hidden)
        return functional.mse_loss(hidden, batch.flip(1))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", self.training_step(batch, batch_idx))

    def shard_units(self) -> Any:
        return self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _batches(num: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, _WIDTH, generator=generator) for _ in range(num)]


def _fit(strategy: Any, task: TaskModule, *, steps: int = 2, ckpt_path: Any = None, **arguments: Any) -> Any:
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_steps=steps, num_sanity_val_steps=0, **arguments)
    trainer.fit(task, _batches(8), ckpt_path=ckpt_path)
    return trainer


def _build(path: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(3)
    task = Grown()
    trainer = _fit(FSDPStrategy(meta_init=True), task)
    found["from meta"] = (task.built_on, weights_of(task))
    trainer.save_checkpoint(folder / "two-steps")
    whole, resumed = Grown(), Grown()
    torch.manual_seed(3)
    _fit(FSDPStrategy(meta_init=True), whole, steps=4)
    torch.manual_seed(4)
    _fit(FSDPStrategy(meta_init=True), resumed, steps=4, ckpt_path=folder / "two-steps")
    found["whole"], found["resumed"] = weights_of(whole), weights_of(resumed)
    task = Grown(path)
    _fit(FSDPStrategy(cpu_ram_efficient_loading=True), task)
    found["from rank 0"] = (task.built_on, weights_of(task))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("built")
    torch.manual_seed(8)
    torch.save(nn.ModuleList([Block(_WIDTH) for _ in range(_NUM_BLOCKS)]).state_dict(), folder / "weights.pt")
    return run_distributed(_build, 2, folder / "weights.pt", folder, timeout=120), folder / "weights.pt"


@pytest.mark.distributed
def test_a_model_is_built_without_values_on_every_rank_and_begins_as_its_layers_say(built: Any) -> None:
    (device, first), (other_device, second) = (rank["from meta"] for rank in built[0])
    assert device == other_device == "meta"
    assert_equal_weights(first, second)
    bound = _WIDTH**-0.5 + 0.1  # of nn.Linear's first values, and two steps
    assert all(value.isfinite().all() and value.abs().max() < 1.1 for value in first.values())
    assert torch.equal(first["norm.running_var"], torch.ones(_WIDTH))
    assert 0.05 < float(first["blocks.0.mix.weight"].abs().max()) < bound


@pytest.mark.distributed
def test_a_checkpoint_is_resumed_by_a_model_that_is_built_without_values(built: Any) -> None:
    for rank in built[0]:
        assert_equal_weights(rank["resumed"], rank["whole"])


@pytest.mark.distributed
def test_rank_zero_reads_a_file_and_the_others_build_without_values(built: Any) -> None:
    by_rank, path = built
    assert [rank["from rank 0"][0] for rank in by_rank] == ["cpu", "meta"]
    alone = Grown(path)
    _fit("single", alone, accumulate_grad_batches=2)
    for rank in by_rank:
        torch.testing.assert_close(rank["from rank 0"][1], weights_of(alone), rtol=0, atol=1e-5)


def _end(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for which in ("all", "main", "none"):
        torch.manual_seed(5)
        task = Grown()
        trainer = Trainer(
            **QUIET | {"devices": "auto", "max_steps": 2}, strategy=FSDPStrategy(weights_after_stage=which)
        )
        trainer.fit(task, _batches(8))
        found[which] = {
            name: value if which == "all" else value.device.type for name, value in weights_of(task.blocks).items()
        }
        found[which, "states"] = {
            value.device.type for state in trainer.optimizers[0].state.values() for value in state.values()
        }
        if which == "main":
            trainer.save_checkpoint(folder / "main")
    with pytest.raises(CheckpointError) as unsaved:
        trainer.save_checkpoint(folder / "none")
    with pytest.raises(ConfigurationError) as unloaded:
        trainer.test(task, _batches(), verbose=False)
    found["texts"] = str(unsaved.value), str(unloaded.value)
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_end, 2, tmp_path_factory.mktemp("ended"), timeout=120, init=False)


@pytest.mark.distributed
def test_whole_weights_are_left_on_the_ranks_that_were_asked_for(ended: Any) -> None:
    assert FSDPStrategy().weights_after_stage == "main"
    for rank, kept in enumerate(("cpu", "meta")):
        assert {value.device.type for value in ended[rank]["all"].values()} == {"cpu"}
        assert set(ended[rank]["main"].values()) == {kept}
        assert set(ended[rank]["none"].values()) == {"meta"}
        assert ended[rank]["none", "states"] == {"meta"}


@pytest.mark.distributed
def test_a_task_that_has_given_its_weights_up_is_neither_saved_nor_used_without_a_checkpoint(ended: Any) -> None:
    for rank in ended:
        saved, used = rank["texts"]
        assert "ModelCheckpoint" in saved or "rank 0" in saved
        assert "Pass ckpt_path" in used


@pytest.mark.parametrize("option", ["meta_init", "cpu_ram_efficient_loading"])
def test_a_task_that_builds_everything_early_is_told_to_build_later(option: str) -> None:
    trainer = quiet_trainer(strategy=FSDPStrategy(**{option: True}), max_steps=1)
    with pytest.raises(ConfigurationError, match=f"{option}=True needs Blocks.configure_model"):
        trainer.fit(Blocks(), _batches())


def _large(inside: int) -> tuple[TaskModule, list[nn.Module]]:
    task = TaskModule()
    with torch.device("meta"):
        task.blocks = nn.ModuleList([nn.Linear(20_000, 20_000) for _ in range(4)])
    return task, list(task.blocks)[:inside]


@pytest.mark.parametrize(("inside", "pieces", "warned"), [(1, 2, True), (3, 2, False), (0, 1, False)])
def test_a_large_model_that_is_mostly_gathered_at_once_is_warned_of(inside: int, pieces: int, warned: bool) -> None:
    task, units = _large(inside)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_large_rest(task, units, pieces)
    texts = [str(warning.message) for warning in caught if warning.category is TrainwrightWarning]
    assert len(texts) == warned
    assert not warned or f"{(4 - inside) * 400_020_000:,}" in texts[0]
