"""What runs beside training works on a sharded model as on a whole one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.fsdp.test_fsdp import Blocks, batches
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


def train(strategy: str, name: str, task: Blocks, callbacks: list[Callback], **arguments: Any) -> dict[str, Any]:
    """Train three epochs and save under `name`, which no other run may use; return what can be compared."""
    processes = 1 if strategy == "single" else 2
    path = arguments.pop("ckpt_path", None)
    trainer = quiet_trainer(
        devices=1 if strategy == "single" else "auto", strategy=strategy, accumulate_grad_batches=4 // processes,
        gradient_clip_val=0.5, num_sanity_val_steps=0, callbacks=callbacks, **{"max_epochs": 3, **arguments},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # generators that start anew on another number of processes
        trainer.fit(task, batches(), batches(7), ckpt_path=path)
    after = trainer.save_checkpoint(Path(arguments["default_root_dir"], f"after {name}"), weights_only=False)
    return {"weights": weights_of(task), "val": float(trainer.callback_metrics["val_loss"]), "after": after,
            "step": trainer.global_step}  # fmt: skip


def ema() -> EMAWeightAveraging:
    """Return a fast average."""
    return EMAWeightAveraging(decay=0.7)


def swa() -> StochasticWeightAveraging:
    """Return an average of the last two epochs."""
    return StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)


def saver(folder: Path) -> ModelCheckpoint:
    """Return a callback that keeps a checkpoint after the first epoch's steps."""
    return ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)


def first_checkpoint(folder: Path) -> Path:
    """Return the one of step 2."""
    return next(path for path in folder.iterdir() if "step=2" in path.name)


def train_all(strategy: str, folder: Path) -> dict[str, Any]:
    """Train in every way; `folder` is the strategy's own."""
    root = {"default_root_dir": str(folder)}
    found = {
        "ema": train(strategy, "ema", Blocks(), [ema(), saver(folder / "ema")], **root),
        "swa": train(strategy, "swa", Blocks(), [swa(), saver(folder / "swa")], **root),
        "two": train(strategy, "two", TwoOptimizers(), [saver(folder / "two")], **root),
        "stopped": train(
            strategy, "stopped", Blocks(lr=1e-9), [EarlyStopping("val_loss", patience=1, min_delta=1.0)], **root
        ),
    }
    for name, task, callbacks in (("ema", Blocks, [ema()]), ("swa", Blocks, [swa()]), ("two", TwoOptimizers, [])):
        again = [*callbacks, saver(folder / name)]
        path = first_checkpoint(folder / name)
        found[f"{name} resumed"] = train(strategy, f"{name} resumed", task(), again, ckpt_path=path, **root)
        elsewhere = first_checkpoint(folder.parent / "single" / name)
        again = [*callbacks, saver(folder / f"{name}-elsewhere")]
        found[f"{name} from single"] = train(
            strategy, f"{name} from single", task(), again, ckpt_path=elsewhere, **root
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both strategies save."""
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process does."""
    return train_all("single", folder / "single")


@pytest.fixture(scope="module")
def sharded(folder: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two ranks with pieces does."""
    assert alone
    return run_distributed(train_all, 2, "fsdp", folder / "fsdp", timeout=300)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ema", "swa", "two", "stopped"])
@pytest.mark.exhaustive
def test_it_comes_to_what_one_process_comes_to(name: str, alone: dict[str, Any], sharded: list[dict[str, Any]]) -> None:
    for of_rank in sharded:
        torch.testing.assert_close(of_rank[name]["weights"], alone[name]["weights"], rtol=0, atol=1e-5)
        assert of_rank[name]["val"] == pytest.approx(alone[name]["val"], abs=1e-5)
        assert of_rank[name]["step"] == alone[name]["step"]
    assert alone["stopped"]["step"] == 4  # two of three epochs


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
