"""Resuming from checkpoints that are damaged or lack a part, for their weights alone, and by several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.resealing import edit_trainer, remove_part
from tests.checkpoint.snapshots import small_snapshot, write_small
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, assert_equal_weights, fitted, quiet_trainer, weights_of
from tests.helpers.tasks import RecordingCallback, RegressionTask, regression_data, regression_loader
from tests.strategies.fsdp.sharded import Blocks, batches
from tests.trainer.runs import DecayingTask, WiderTask
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.data import DataModule
from trainwright.loggers import CSVLogger
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.search import left_by_earlier

FOUR_BATCHES = 8  # samples, by 2


def loader() -> Any:
    return regression_loader(FOUR_BATCHES, 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with a checkpoint of each of three epochs under `checkpoints`."""
    saver = ModelCheckpoint(filename="{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    quiet_trainer(max_epochs=3, callbacks=[saver], default_root_dir=tmp_path).fit(DecayingTask(), loader())
    return tmp_path


def damage(checkpoint: Path) -> None:
    file = checkpoint / "model" / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def resume(run: Path, ckpt_path: Any, task: RegressionTask | None = None, **arguments: Any) -> list[int]:
    """Resume in a run's folder until the fourth epoch's end; returns the steps at the ends of batches."""
    seen = RecordingCallback("on_train_batch_end", note=lambda event, trainer: trainer.global_step)
    saver = ModelCheckpoint(filename="{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    trainer = quiet_trainer(max_epochs=4, callbacks=[seen, saver], default_root_dir=run)
    trainer.fit(task or DecayingTask(), loader(), ckpt_path=ckpt_path, **arguments)
    return [note for _, note in seen.notes]


def test_last_falls_back_to_the_newest_whole_checkpoint_and_says_so(run: Path) -> None:
    damage(run / "checkpoints" / "2")
    with pytest.warns(TrainwrightWarning, match="skipping the damaged checkpoint .*/2"):
        assert resume(run, "last")[0] == 9


def test_damage_is_an_error_unless_the_resume_may_fall_back(run: Path) -> None:
    damage(run / "checkpoints" / "1")
    with pytest.raises(CheckpointError, match="/1 is damaged"):
        resume(run, run / "checkpoints" / "1")
    with pytest.warns(TrainwrightWarning, match=r"/1 is damaged: .*Falling back to .*/0\."):
        assert resume(run, run / "checkpoints" / "1", on_damaged="fall_back")[0] == 5
    damage(run / "checkpoints" / "0")
    with pytest.raises(CheckpointError, match=r"/0 is damaged: .*No older checkpoint in .*checkpoints is valid"):
        resume(run, run / "checkpoints" / "0", on_damaged="fall_back")


class Scored(DecayingTask):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def on_train_epoch_end(self) -> None:
        self.log("score", self.values[self.current_epoch])


def test_a_damaged_best_gives_way_to_the_next_best(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", monitor="score", mode="max", save_top_k=-1)
    trainer = fitted(Scored([1.0, 3.0, 2.0]), loader(), max_epochs=3, callbacks=[saver])
    trainer.max_epochs = 4
    damage(tmp_path / "step=8")
    with pytest.warns(TrainwrightWarning, match=r"step=8 is damaged.* Falling back to .*step=12, the best valid"):
        trainer.fit(Scored([1.0] * 4), loader(), ckpt_path="best", on_damaged="fall_back")
    assert trainer.global_step == 16


@pytest.mark.parametrize("part", ["optimizer", "rng"])
def test_a_part_that_is_missing_is_an_error_unless_allowed(run: Path, part: str) -> None:
    remove_part(run / "checkpoints" / "2", part)
    with pytest.raises(CheckpointError, match=rf"the part '{part}' is missing.*allow_missing=\['{part}'\]"):
        resume(run, run / "checkpoints" / "2")
    recorder = StepRecorder()
    trainer = quiet_trainer(max_epochs=4, callbacks=[recorder], default_root_dir=run)
    with pytest.warns(TrainwrightWarning) as caught:
        trainer.fit(DecayingTask(), loader(), ckpt_path="last", allow_missing=part)
    assert any(f"has no {part} part" in str(warning.message) for warning in caught)
    assert trainer.global_step == 16
    assert [lrs[0] for lrs in recorder.lrs] == [pytest.approx(0.05 * 0.9**step) for step in range(12, 16)]


class AdamTask(DecayingTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allow_missing": ["optimiser"]}, "'optimiser' is unknown. Did you mean 'optimizer'"),
        ({"allow_missing": ["model"]}, "load_weights_only=True"),
        ({"on_damaged": "ignore"}, "Use 'error' or 'fall_back'"),
    ],
)
def test_a_wish_that_cannot_be_is_a_configuration_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer().fit(RegressionTask(), loader(), **arguments)


def test_an_optimizer_of_another_class_starts_anew_only_if_allowed(run: Path) -> None:
    with pytest.raises(CheckpointError, match="the state of SGD, and this optimizer is Adam"):
        resume(run, "last", AdamTask())
    with pytest.warns(TrainwrightWarning) as caught:
        assert resume(run, "last", AdamTask(), allow_missing=["optimizer", "schedulers"])[0] == 13
    texts = " ".join(str(warning.message) for warning in caught)
    assert "Adam starts from scratch" in texts
    assert "holds 1 learning-rate schedule(s), but configure_optimizers returned 0" in texts


class Counting(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


def test_a_new_callback_or_logger_starts_anew_with_a_warning_unless_allowed(run: Path) -> None:
    def resumed(*callbacks: Callback, logger: Any = False, **options: Any) -> None:
        trainer = quiet_trainer(
            max_epochs=3, callbacks=[ModelCheckpoint(), *callbacks], default_root_dir=run, logger=logger
        )
        trainer.fit(DecayingTask(), loader(), ckpt_path="last", **options)

    with pytest.warns(TrainwrightWarning, match="holds no state of the callback 'Counting'"):
        resumed(Counting())
    resumed(Counting(), allow_missing=["callbacks"])
    with pytest.warns(TrainwrightWarning, match="holds no state of the CSVLogger"):
        resumed(logger=CSVLogger(run / "logs"))


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Any] | None = None

    def train_dataloader(self) -> Any:
        return loader()

    def state_dict(self) -> dict[str, Any]:
        return {"place": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def _saved(folder: Path, **data: Any) -> Path:
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(DecayingTask(), **(data or {"train_dataloaders": loader()}))
    return trainer.save_checkpoint(folder / "saved")


def test_the_state_of_a_data_module_comes_back_and_is_not_dropped_silently(tmp_path: Path) -> None:
    saved, data = _saved(tmp_path, datamodule=Data()), Data()
    quiet_trainer(max_epochs=2).fit(DecayingTask(), datamodule=data, ckpt_path=saved)
    assert data.loaded == {"place": 3}
    with pytest.warns(TrainwrightWarning, match="holds the state of a data module, but this run has none"):
        quiet_trainer(max_epochs=2).fit(DecayingTask(), loader(), ckpt_path=saved)
    without = _saved(tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"no state of the data module, and Data has one.*\['datamodule'\]"):
        quiet_trainer(max_epochs=2).fit(DecayingTask(), datamodule=Data(), ckpt_path=without)
    with pytest.warns(TrainwrightWarning, match="data module"):
        quiet_trainer(max_epochs=2).fit(
            DecayingTask(), datamodule=Data(), ckpt_path=without, allow_missing=["datamodule"]
        )


def test_a_loss_scale_that_was_lost_is_an_error_and_one_for_a_new_precision_a_warning(tmp_path: Path) -> None:
    saved = _saved(tmp_path)

    def resumed(**arguments: Any) -> None:
        trainer = quiet_trainer(max_epochs=2, precision="16-mixed")
        trainer.fit(DecayingTask(), loader(), ckpt_path=saved, **arguments)

    with pytest.warns(TrainwrightWarning, match="no state of the scaler of precision='16-mixed'"):
        resumed()
    edit_trainer(saved, lambda entries: entries.update(precision="16-mixed"))
    with pytest.raises(CheckpointError, match=r"lacks its scaler.*allow_missing=\['scaler'\]"):
        resumed()
    with pytest.warns(TrainwrightWarning, match="lacks its scaler; it starts from scratch"):
        resumed(allow_missing=["scaler"])


def test_strict_false_loads_the_weights_that_fit_and_names_the_others(run: Path) -> None:
    task = WiderTask()
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        resume(run, "last", task)
    with pytest.warns(TrainwrightWarning, match=r"2 weights of the task are not in it: extra\.weight, extra\.bias"):
        resume(run, "last", task, strict=False, load_weights_only=True)


@pytest.mark.parametrize("kind", ["full", "weights"])
def test_weights_only_begins_a_new_run_at_step_0_from_the_weights(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fitted(DecayingTask(), loader(), max_epochs=2)
    saved = first.save_checkpoint(tmp_path / "saved", weights_only=kind == "weights")
    recorder, begun = StepRecorder(), RecordingCallback("on_train_start", note=lambda _, t: weights_of(t.task))
    trainer = quiet_trainer(max_epochs=1, callbacks=[recorder, begun])
    trainer.fit(DecayingTask(seed=5), loader(), ckpt_path=saved, load_weights_only=True)
    assert_equal_weights(begun.notes[0][1], read_checkpoint(saved).model or {})
    assert trainer.global_step == 4
    assert recorder.lrs[0] == [0.05]
    assert "begins at step 0 from the weights of" in capsys.readouterr().out


def test_a_weights_checkpoint_is_no_run_to_resume_and_says_what_to_do(tmp_path: Path) -> None:
    first = fitted(DecayingTask(), loader(), max_epochs=1)
    saved = first.save_checkpoint(tmp_path / "saved", weights_only=True)
    with pytest.raises(CheckpointError, match=r"holds weights only.*load_weights_only=True"):
        quiet_trainer(max_epochs=2).fit(DecayingTask(), loader(), ckpt_path=saved)


def _resume_damaged(folder: Path) -> str:
    """Let both ranks damage a file of the second one, and return with which error this rank's resume ends."""

    def fit(ckpt_path: Path | None = None) -> None:
        saver = ModelCheckpoint(folder, filename="saved")
        trainer = quiet_trainer(
            devices="auto", strategy="fsdp", max_steps=2, callbacks=[saver], default_root_dir=folder
        )
        trainer.fit(Blocks(), batches(8), ckpt_path=ckpt_path)

    fit()
    with (folder / "saved" / "optimizer" / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"damaged!")
    with pytest.raises(CheckpointError) as refused:
        fit(folder / "saved")
    return str(refused.value)


@pytest.mark.distributed
def test_damage_that_any_rank_finds_is_an_error_on_all(tmp_path: Path) -> None:
    for refused in run_distributed(_resume_damaged, 2, tmp_path, init=False, timeout=120):
        assert "optimizer/rank-00001.safetensors has changed" in refused


def _write(folder: Path, step: int, job: str) -> Path:
    return write_small(folder, step, trainer={**small_snapshot().trainer, "job": job})


def _left(attempt: Attempt, folder: Path) -> Path | None:
    found = left_by_earlier(attempt, RunFolder(folder))
    return None if found is None else found.path


def test_a_later_attempt_takes_the_newest_checkpoint_of_its_own_job(tmp_path: Path) -> None:
    mine = _write(tmp_path, 1, "mine")
    _write(tmp_path, 2, "another")
    assert _left(Attempt("mine", 1), tmp_path) == mine
    assert _left(Attempt("mine", 0), tmp_path) is None
    assert _left(Attempt("third", 1), tmp_path) is None


def test_a_newer_format_is_no_damage_to_fall_back_from(run: Path) -> None:
    manifest = run / "checkpoints" / "2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 99'))
    for ckpt_path in ("last", manifest.parent):
        with pytest.raises(CheckpointError, match="format_version=99 is newer"):
            resume(run, ckpt_path, on_damaged="fall_back")


@pytest.mark.parametrize(
    "changed",
    [
        lambda: regression_loader(10, 2, shuffle=True),
        lambda: regression_loader(8, 2),
        lambda: DataLoader(regression_data(8), batch_sampler=[[0, 1, 2, 3]] * 4),
    ],
    ids=["more samples", "not shuffled", "a sampler of its own"],
)
def test_data_in_another_order_in_the_middle_of_an_epoch_is_warned_of(changed: Any, tmp_path: Path) -> None:
    first = regression_loader(8, 2, shuffle=True)
    for steps in (3, 4):
        trainer = fitted(RegressionTask(), first, max_steps=steps)
        trainer.save_checkpoint(tmp_path / f"step={steps}")
    with pytest.warns(TrainwrightWarning, match="a different order, so some samples are repeated"):
        quiet_trainer(max_steps=4).fit(RegressionTask(), changed(), ckpt_path=tmp_path / "step=3")
    quiet_trainer(max_epochs=2).fit(RegressionTask(), changed(), ckpt_path=tmp_path / "step=4")  # an epoch's end


@pytest.mark.parametrize("entry", ["data", "seed", "run_id", "strategy"])
def test_an_entry_that_every_run_needs_is_not_offered_to_allow_missing(run: Path, entry: str) -> None:
    checkpoint = run / "checkpoints" / "2"
    edit_trainer(checkpoint, lambda entries: entries.pop(entry))
    with pytest.raises(CheckpointError, match=f"has no entry '{entry}' in its trainer part. Use another") as error:
        resume(run, checkpoint)
    assert "allow_missing" not in str(error.value)


def test_missing_schedules_that_may_be_missing_are_warned_of_once(run: Path) -> None:
    checkpoint = run / "checkpoints" / "2"
    edit_trainer(checkpoint, lambda entries: entries.pop("schedulers"))
    with pytest.warns(TrainwrightWarning, match="starts from scratch") as caught:
        resume(run, checkpoint, allow_missing=["schedulers"])
    assert len([each for each in caught if "schedulers" in str(each.message)]) == 1


def test_optimizers_are_restored_before_on_fit_start_unless_it_has_to_create_their_groups(run: Path) -> None:
    momentum: list[int] = []

    class Momentum(DecayingTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    class Reader(Callback):
        def on_fit_start(self, trainer: Any, task: Any) -> None:
            momentum.append(len(trainer.optimizers[0].state))

    folder = run / "adam"
    for epochs, ckpt_path in ((1, None), (2, "last")):
        trainer = quiet_trainer(max_epochs=epochs, callbacks=[Reader(), ModelCheckpoint()], default_root_dir=folder)
        trainer.fit(Momentum(), loader(), ckpt_path=ckpt_path)
    assert momentum[0] == 0
    assert momentum[1] > 0
