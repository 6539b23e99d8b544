"""Whole trainings whose checkpoints live elsewhere: uploaded, deleted, broken off, and resumed on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from trainwright.checkpoint import read_manifest
from trainwright.checkpoint.remote import RemoteIndex, _Remote, find_remote
from trainwright.cli.main import main
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning

STEPS = 8  # of one epoch


def new_task() -> RegressionTask:
    return RegressionTask(momentum=0.9, dropout=0.3)


def fit(root: Path, url: str, max_epochs: int = 2, *, ckpt_path: Any = None, **arguments: Any) -> Any:
    """Train on a machine whose disk is `root`, saving to `url` after each epoch; returns the Trainer."""
    own = {name: arguments.pop(name) for name in list(arguments) if name in ("async_save", "callbacks")}
    torch.manual_seed(1)
    saver = ModelCheckpoint(url, **{"filename": "{epoch}", **arguments})
    callbacks = [saver, *own.pop("callbacks", [])]
    trainer = quiet_trainer(default_root_dir=root, max_epochs=max_epochs, seed=1, callbacks=callbacks, **own)
    trainer.fit(new_task(), regression_loader(STEPS, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def uninterrupted(root: Path, max_epochs: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    trainer = quiet_trainer(default_root_dir=root, max_epochs=max_epochs, seed=1)
    trainer.fit(new_task(), regression_loader(STEPS, shuffle=True))
    return weights_of(trainer.task)


def names(url: str) -> list[str]:
    """Return the names of the complete checkpoints at `url`, in order."""
    return [item.url.rpartition("/")[2] for item in find_remote(url)]


def folders(url: str) -> list[str]:
    """Return the names of all folders at `url`, complete or not."""
    return _Remote(url, None).folders()


@pytest.mark.parametrize("ckpt_path", ["last", "url"])
def test_another_machine_goes_on_exactly_and_keeps_the_folder_up(memory: str, tmp_path: Path, ckpt_path: str) -> None:
    url = f"{memory}/run"
    fit(tmp_path / "a", url, 2, save_top_k=1)
    trainer = fit(tmp_path / "b", url, 4, ckpt_path="last" if ckpt_path == "last" else f"{url}/epoch=1")
    assert_equal_weights(weights_of(trainer.task), uninterrupted(tmp_path / "c", 4))
    assert folders(url) == ["epoch=3"]


def test_an_earlier_checkpoint_that_cannot_be_deleted_there_is_named(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: RemoteIndex, name: str) -> None:
        raise CheckpointError(f"no permission for {name}")

    monkeypatch.setattr(RemoteIndex, "delete", refuse)
    with pytest.warns(TrainwrightWarning, match="an earlier checkpoint was not deleted: no permission for epoch=0"):
        fit(tmp_path, f"{memory}/run", 2, save_top_k=1)


class Breaks(Callback):
    """From the end of an epoch on, uploads fail after so many more files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, epoch: int, files: int) -> None:
        self.epoch = epoch
        self.files = files
        self.monkeypatch = monkeypatch

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.run.saves.finish()  # what has begun to go up may arrive
            send, left = _Remote.send, iter(range(self.files))

            def broken(remote: _Remote, *arguments: Any) -> None:
                if next(left, None) is None:
                    raise CheckpointError(f"could not write {remote.url}: the network is gone")
                send(remote, *arguments)

            self.monkeypatch.setattr(_Remote, "send", broken)


@pytest.mark.slow
def test_an_upload_that_fails_is_an_error_of_the_run_and_the_earlier_ones_stay(memory: str, tmp_path: Path) -> None:
    url = f"{memory}/run"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(CheckpointError, match="the network is gone"):
        fit(tmp_path / "a", url, 4, callbacks=[Breaks(monkeypatch, epoch=1, files=1)])
    assert names(url) == ["epoch=0"]
    # Another machine has what went up.
    trainer = fit(tmp_path / "b", url, 5, ckpt_path="last", callbacks=[first := FirstStep()])
    assert first.step == STEPS + 1
    assert_equal_weights(weights_of(trainer.task), uninterrupted(tmp_path / "c", 5))
    assert names(url) == ["epoch=4"]


def test_a_resume_uploads_what_has_not_arrived(memory: str, tmp_path: Path) -> None:
    fit(tmp_path, memory, 1, filename="same")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(RemoteIndex, "upload", lambda *given, **options: "")
        fit(tmp_path, memory, 2, filename="same", ckpt_path="last")
    fit(tmp_path, memory, 2, filename="same", ckpt_path="last")
    assert [found.manifest.step for found in find_remote(memory)] == [2 * STEPS]


class FirstStep(Callback):
    """Note the first step."""

    step: int | None = None

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.step = self.step or trainer.global_step


def test_ls_lists_what_is_there(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, f"{memory}/run", 2, save_top_k=-1)
    capsys.readouterr()
    assert main(["checkpoint", "ls", f"{memory}/run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["NAME", "STEP"], ["epoch=0", "8"], ["epoch=1", "16"]]
    assert main(["checkpoint", "ls", f"{memory}/nothing"]) == 0
    assert "no checkpoints" in capsys.readouterr().out


def _ranks(root: Path, url: str) -> tuple[list[Any], str]:
    found = []
    for epochs, ckpt_path in ((2, None), (3, "last")):
        saver = ModelCheckpoint(url, filename="{epoch}")
        trainer = quiet_trainer(
            default_root_dir=root / str(epochs), devices="auto", strategy="ddp", max_epochs=epochs, seed=1,
            callbacks=saver,
        )  # fmt: skip
        trainer.fit(RegressionTask(), regression_loader(STEPS), ckpt_path=ckpt_path)
        found.append([trainer.global_step, saver.best_model_path])
    saver = ModelCheckpoint("nosuch://bucket/run")
    trainer = quiet_trainer(default_root_dir=root, devices="auto", strategy="ddp", max_epochs=1, callbacks=saver)
    with pytest.raises(CheckpointError) as refused:
        trainer.fit(RegressionTask(), regression_loader(STEPS))
    return found, str(refused.value)


@pytest.mark.distributed
def test_two_ranks_save_there_resume_from_there_and_both_hear_of_an_unknown_service(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote/run"
    (first, refused), (second, told) = run_distributed(_ranks, 2, tmp_path, url, init=False)
    assert first == second == [[STEPS, f"{url}/epoch=1"], [3 * STEPS // 2, f"{url}/epoch=2"]]
    assert folders(url) == ["epoch=2"]
    assert refused.startswith("nosuch://bucket/run: ")
    assert "rank 0 could not list nosuch://bucket/run" in told


def test_links_and_plain_folders_have_no_meaning_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not support links"):
        ModelCheckpoint("s3://bucket/run", save_last="link")
    with pytest.raises(ConfigurationError, match="expected a local folder"):
        OnExceptionCheckpoint("s3://bucket/run")


def test_save_checkpoint_takes_a_url(memory: str, tmp_path: Path) -> None:
    trainer = fit(tmp_path, f"{memory}/run", 1)
    path = trainer.save_checkpoint(f"{memory}/by hand/now")
    assert names(f"{memory}/by hand") == ["now"]
    assert read_manifest(path).step == STEPS
    trainer.save_checkpoint(f"{memory}/by hand/now", weights_only=True)
    assert find_remote(f"{memory}/by hand")[0].manifest.kind == "weights"
