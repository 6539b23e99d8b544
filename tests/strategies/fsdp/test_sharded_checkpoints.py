"""Checkpoints that every rank writes its pieces of: on other numbers of ranks, in commands, and when a rank cannot."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.checkpoint.snapshots import same
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import SaveAtEnd, assert_equal_weights, quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, batches, train
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint, read_manifest, set_fault_hook, verify
from trainwright.core.errors import CheckpointError
from trainwright.strategies.fsdp.strategy import FSDPStrategy

pytestmark = pytest.mark.distributed


def _save_weights(path: Path) -> None:
    train(FSDPStrategy(device_mesh=(2, 1)), 2, max_epochs=1, callbacks=[SaveAtEnd(path, weights_only=True)])


def test_what_all_replicas_hold_is_written_once_by_turns(tmp_path: Path) -> None:
    run_distributed(lambda: _save_weights(tmp_path / "a"), 2, init=False, timeout=300)
    assert read_manifest(tmp_path / "a").kind == "weights"
    sizes = [(tmp_path / "a" / "model" / f"rank-0000{rank}.safetensors").stat().st_size for rank in (0, 1)]
    total = sum(parameter.numel() * 4 for parameter in Blocks().parameters())
    assert sum(sizes) < total + 4000  # with their headers
    assert min(sizes) > total / 3
    assert verify(tmp_path / "a") == []
    assert set(read_checkpoint(tmp_path / "a").model or {}) == set(Blocks().state_dict())


class Precise(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p] = {
                    "sum": torch.zeros_like(p, dtype=torch.float64), "count": torch.tensor(2**53 + 1, device=p.device)
                }  # fmt: skip
                if not isinstance(p, DTensor):
                    self.state[p]["odd"] = torch.ones(3)
            self.state[p]["sum"] += p.grad.double() / 3
            self.state[p]["count"] += 1
            p.data -= (0.1 * self.state[p]["sum"]).to(p.dtype)
        return loss


class PreciseBlocks(Blocks):
    """Blocks with an optimizer whose states have other dtypes than the parameters."""

    def configure_optimizers(self) -> Any:
        return Precise([p for p in self.parameters() if p.requires_grad])


def _resume_with_precise_states(folder: Path) -> tuple[Any, Any]:
    def run(name: str, **options: Any) -> Any:
        return train("fsdp", 2, PreciseBlocks(), callbacks=[SaveAtEnd(folder / name)], **options)["weights"]

    with pytest.raises(CheckpointError, match=r"keeps 'odd' of shape \(3,\) .* cannot be sharded"):
        run("odd", ckpt_path=folder / "alone")
    run("first", max_epochs=1)
    return run("second", ckpt_path=folder / "first"), run("whole")


def test_states_of_other_dtypes_than_the_parameters_continue_bit_for_bit(tmp_path: Path) -> None:
    train("single", 1, PreciseBlocks(), max_epochs=1, callbacks=[SaveAtEnd(tmp_path / "alone")])
    (resumed, expected), _ = run_distributed(_resume_with_precise_states, 2, tmp_path, init=False, timeout=300)
    assert_equal_weights(resumed, expected)
    (tree,), (whole,) = (read_checkpoint(tmp_path / name).optimizers for name in ("second", "whole"))
    assert tree["state"]["blocks.0.mix.weight"]["sum"].dtype == torch.float64
    assert same(tree, whole)


class FullDisk:
    """A fault hook: from a given step on nothing can be written on this rank."""

    def __init__(self) -> None:
        self.full = False

    def __call__(self, event: str, path: Path) -> None:
        if self.full and event == "write":
            raise OSError(28, "No space left on device", str(path))


def _fill_the_disk_of_rank_one(folder: Path, async_save: bool) -> str:
    disk = FullDisk()

    class Fill(Callback):
        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            disk.full = trainer.global_rank == 1 and trainer.global_step >= 2

    set_fault_hook(disk)
    try:
        trainer = quiet_trainer(
            devices="auto", strategy=FSDPStrategy(timeout=datetime.timedelta(seconds=120)), max_epochs=1,
            async_save=async_save,
            callbacks=[Fill(), ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        )  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            trainer.fit(Blocks(), batches())
    finally:
        set_fault_hook(None)
    return str(caught.value)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_rank_whose_disk_is_full_fails_the_save_on_all_and_nothing_half_is_left(
    async_save: bool, tmp_path: Path
) -> None:
    texts = run_distributed(lambda: _fill_the_disk_of_rank_one(tmp_path, async_save), 2, init=False, timeout=300)
    for text in texts:
        assert "rank 1 could not write its files: OSError" in text
        assert "No space left" in text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".index.json", "step=1"]
    assert verify(tmp_path / "step=1") == []
