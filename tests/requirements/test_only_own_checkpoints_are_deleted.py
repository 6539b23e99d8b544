"""Retention deletes only what this run wrote, by names relative to the folder, which may be moved."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.snapshots import write_small
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import RunIndex, set_fault_hook, verify
from trainwright.checkpoint.format.manifests import open_checkpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.host.folders import mark_in_use


def fit(folder: Path, steps: int, *, ckpt_path: Any = None, extra: list[Callback] | None = None, **saver: Any) -> Any:
    callback = ModelCheckpoint(folder, **{"filename": "{step}", "every_n_train_steps": 1, **saver})
    trainer = quiet_trainer(max_epochs=1, max_steps=steps, callbacks=[callback, *(extra or [])])
    trainer.fit(RegressionTask(), regression_loader(16), ckpt_path=ckpt_path)
    return trainer


def saved(folder: Path) -> list[str]:
    """Return the names of the checkpoints, all of them whole."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    assert [problem for name in found for problem in verify(folder / name)] == []
    return found


class At(Callback):
    def __init__(self, step: int, action: Any) -> None:
        self.step = step
        self.action = action

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        if trainer.global_step == self.step:
            trainer.run.saves.finish()
            self.action()


def test_two_processes_that_resume_one_run_give_their_last_checkpoints_names_of_their_own(tmp_path: Path) -> None:
    saver: dict[str, Any] = {"save_last": True, "save_top_k": -1}
    fit(tmp_path, 2, **saver)

    class Other(Callback):
        def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
            if trainer.global_step == 3:
                trainer.run.saves.writer.wait()
                fit(tmp_path, 4, ckpt_path=tmp_path / "step=2", **saver)

    fit(tmp_path, 5, ckpt_path=tmp_path / "step=2", extra=[Other()], **saver)
    steps = ["step=1", "step=2", "step=3", "step=3-v1", "step=4", "step=4-v1", "step=5"]
    assert saved(tmp_path) == ["last", "last-v1", *steps]
    assert [open_checkpoint(tmp_path / name).manifest.step for name in ("last", "last-v1")] == [5, 4]
    assert not list(tmp_path.glob(".*tmp*"))


def test_a_folder_that_was_moved_between_two_sessions_is_kept_up_in_its_new_place(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    fit(old, 7, keep_every=3)
    assert saved(old) == ["step=3", "step=6", "step=7"]
    new.parent.mkdir()
    shutil.move(old, new)
    fit(new, 10, ckpt_path="last", keep_every=3)
    assert saved(new) == ["step=10", "step=3", "step=6", "step=9"]
    assert not old.exists()


def test_a_folder_that_is_moved_away_while_the_run_goes_on_keeps_all_that_it_holds(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with pytest.warns(TrainwrightWarning, match="not deleted.*not among the checkpoints"):
        fit(old, 6, extra=[At(3, lambda: shutil.move(old, new))])
    assert saved(new) == ["step=3"]
    assert saved(old) == ["step=6"]


def test_a_link_is_never_followed_to_delete_what_it_leads_to(tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"

    def link() -> None:
        shutil.move(run / "step=3", precious)
        (run / "step=3").symlink_to(precious, target_is_directory=True)

    with pytest.warns(TrainwrightWarning, match="no longer the checkpoint that this run wrote"):
        fit(run, 5, extra=[At(3, link)])
    assert verify(precious) == []
    assert (run / "step=3").is_symlink()
    assert saved(run) == ["step=3", "step=5"]


def test_an_index_that_was_edited_to_point_outside_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    fit(tmp_path, 2, filename="precious")
    run = tmp_path / "run"
    fit(run, 3)
    index = run / ".index.json"
    values = json.loads(index.read_text())
    values["checkpoints"].append({**values["checkpoints"][0], "name": "../precious"})
    del values["seal"]  # with one that does not fit, the index is rebuilt from the manifests
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"refused|points outside|outside|not a checkpoint in its folder"):
        fit(run, 6, ckpt_path=run / "step=3")
    assert verify(tmp_path / "precious") == []
    assert verify(run / "step=3") == []


def test_a_name_under_which_another_run_is_just_writing_is_taken(tmp_path: Path) -> None:
    theirs = tmp_path / f".step=2.tmp-{'0' * 16}"
    theirs.mkdir(parents=True)
    with mark_in_use(theirs):
        fit(tmp_path, 2, save_top_k=-1)
    assert saved(tmp_path) == ["step=1", "step=2-v1"]
    assert theirs.is_dir()


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_what_another_run_writes_under_the_same_name_meanwhile_is_not_replaced(
    async_save: bool, tmp_path: Path
) -> None:
    run, theirs = tmp_path / "run", write_small(tmp_path, 9)

    def come_between(event: str, path: Path) -> None:
        if event == "open" and path.name == "manifest.json" and not (run / "step=2").exists():
            shutil.copytree(theirs, run / "step=2")

    callback = ModelCheckpoint(run, filename="{step}", every_n_train_steps=2)
    trainer = quiet_trainer(max_epochs=1, max_steps=2, callbacks=[callback], async_save=async_save)
    set_fault_hook(come_between)
    try:
        with pytest.raises(CheckpointError, match=r"another run has written .*step=2.* not replaced"):
            trainer.fit(RegressionTask(), regression_loader(16))
    finally:
        set_fault_hook(None)
    assert (run / "step=2" / "manifest.json").read_bytes() == (theirs / "manifest.json").read_bytes()
    assert [path.name for path in run.iterdir()] == ["step=2"]


def test_runs_that_enter_checkpoints_at_the_same_moment_keep_each_others_entries(tmp_path: Path) -> None:
    for step in (1, 2):
        write_small(tmp_path, step)
    other = threading.Thread(target=lambda: RunIndex(tmp_path, run="other").add(tmp_path / "step-00000002"))

    def come_between(event: str, path: Path) -> None:
        if event == "open" and ".index.json" in path.name and other.ident is None:
            other.start()
            other.join(timeout=0.5)  # it waits for us, or it would be through by now

    set_fault_hook(come_between)
    try:
        RunIndex(tmp_path, run="one").add(tmp_path / "step-00000001")
    finally:
        set_fault_hook(None)
    other.join()
    assert [len(RunIndex(tmp_path, run=run).entries()) for run in ("one", "other")] == [1, 1]
