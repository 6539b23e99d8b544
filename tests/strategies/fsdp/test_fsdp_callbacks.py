"""What runs beside training works on a sharded model as on a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights
from tests.strategies.fsdp.sharded import Blocks, train
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from trainwright.callbacks.weight_averaging import EMAWeightAveraging
from trainwright.checkpoint import read_checkpoint


class TwoOptimizers(Blocks):
    """Trains its blocks with one optimizer and what is around them with another, each with its own schedule."""

    automatic_optimization = True  # all of its optimizers step on one loss

    def configure_optimizers(self) -> Any:
        blocks = list(self.blocks.parameters())
        mine = {id(p) for p in blocks}
        rest = [p for p in self.parameters() if id(p) not in mine and p.requires_grad]
        optimizers = [torch.optim.AdamW(blocks, lr=0.05), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9) for optimizer in optimizers]
        return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


def first_checkpoint(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if "step=2" in path.name)


def train_all(strategy: str, folder: Path) -> dict[str, Any]:
    """Train three epochs in every way, and once more from a checkpoint of step 2; `folder` is the strategy's own."""

    def run(name: str, task: Blocks, callbacks: list[Callback], ckpt_path: Path | None = None) -> dict[str, Any]:
        root = {"default_root_dir": str(folder), "callbacks": callbacks, "max_epochs": 3}
        after = folder / f"after {name}"
        processes = 1 if strategy == "single" else 2
        return train(strategy, processes, task, ckpt_path=ckpt_path, save_to=after, **root) | {"after": after}

    def saver(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(folder / name, every_n_train_steps=2, save_top_k=-1)

    kinds: dict[str, tuple[type[Blocks], Callable[[], list[Callback]]]] = {
        "ema": (Blocks, lambda: [EMAWeightAveraging(decay=0.7)]),
        "swa": (Blocks, lambda: [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)]),
        "two": (TwoOptimizers, list),
    }
    found = {name: run(name, task(), [*make(), saver(name)]) for name, (task, make) in kinds.items()}
    found["stopped"] = run("stopped", Blocks(lr=1e-9), [EarlyStopping("val_loss", patience=1, min_delta=1.0)])
    for name, (task, make) in kinds.items():
        for kind, start in ((f"{name} resumed", folder), (f"{name} from single", folder.parent / "single")):
            path = first_checkpoint(start / name)
            found[kind] = run(kind, task(), [*make(), saver(name if start == folder else kind)], path)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return train_all("single", folder / "single")


@pytest.fixture(scope="module")
def sharded(folder: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    assert alone
    return run_distributed(train_all, 2, "fsdp", folder / "fsdp", timeout=300)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ema", "swa", "two"])
def test_a_resume_goes_on_exactly_and_so_does_one_from_a_single_process(
    name: str, sharded: list[dict[str, Any]]
) -> None:
    for of_rank in sharded:
        assert_equal_weights(of_rank[f"{name} resumed"]["weights"], of_rank[name]["weights"])
        elsewhere = of_rank[f"{name} from single"]["weights"]
        torch.testing.assert_close(elsewhere, of_rank[name]["weights"], rtol=0, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ema", "swa"])
def test_checkpoints_hold_averages_and_what_training_goes_on_from_whole(
    name: str, folder: Path, alone: dict[str, Any], sharded: list[dict[str, Any]]
) -> None:
    pairs = [
        (first_checkpoint(folder / "single" / name), first_checkpoint(folder / "fsdp" / name)),
        (alone[name]["after"], sharded[0][name]["after"]),
    ]
    for ours, theirs in pairs:
        one, two = read_checkpoint(ours), read_checkpoint(theirs)
        assert one.model is not None
        assert two.model is not None
        for key, value in one.model.items():
            torch.testing.assert_close(torch.as_tensor(two.model[key]), value, rtol=0, atol=1e-5)
        (first,), (second,) = (
            [state for state in snapshot.trainer["callbacks"].values() if "num_averaged" in state]
            for snapshot in (one, two)
        )
        assert first["num_averaged"] == second["num_averaged"]
        torch.testing.assert_close(second["current_model_state"], first["current_model_state"], rtol=0, atol=1e-5)
