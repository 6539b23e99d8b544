"""OnExceptionCheckpoint: what is asked for when a run ends badly."""

from __future__ import annotations

from pathlib import Path

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint


def raised(root: Path, **run_options: int) -> FakeRun:
    callback = OnExceptionCheckpoint(root / "rescue")
    run = FakeRun([callback], root, **run_options)
    run.callback_metrics = {"loss": 1.5}
    callback.on_exception(run, run.task, KeyboardInterrupt())  # type: ignore[arg-type]
    return run


def test_the_main_process_asks_for_an_emergency_checkpoint_in_its_folder(tmp_path: Path) -> None:
    (request,) = raised(tmp_path).emergencies
    assert (request.folder, request.name, request.metrics) == (tmp_path / "rescue", "on_exception", {"loss": 1.5})


def test_the_other_processes_ask_for_nothing(tmp_path: Path) -> None:
    assert raised(tmp_path, rank=1, world_size=2).emergencies == []


def test_an_exception_outside_of_training_saves_nothing(tmp_path: Path) -> None:
    callback = OnExceptionCheckpoint(tmp_path)
    run = FakeRun([callback], tmp_path)
    run.stage = "test"
    callback.on_exception(run, run.task, ValueError())  # type: ignore[arg-type]
    assert run.emergencies == []


def test_its_path_is_known_beforehand(tmp_path: Path) -> None:
    assert OnExceptionCheckpoint(tmp_path, "rescue").ckpt_path == str(tmp_path / "rescue")
