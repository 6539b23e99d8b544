"""A signal to any one rank, wherever it stands, ends all with 143, and the run goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.selection import mostly_exhaustive
from tests.trainer.runs import MemoryLogger
from tests.trainer.test_exact_resume import NoisySamples, RestlessTask
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import find_checkpoints, verify
from trainwright.core.errors import ConfigurationError, Preempted
from trainwright.core.process import job, slurm_job
from trainwright.processes import agreement

PLACES = ("train step", "validation", "late validation", "last step of an epoch", "save", "epoch end")
_EPOCHS, _STEPS = 3, 6


class Victim(RestlessTask):
    """Sends itself a signal at a chosen place in its second epoch, on one rank."""

    def __init__(self, place: str | None, rank: int = 0, number: int = signal.SIGTERM) -> None:
        super().__init__("two optimizers")
        self.place, self.rank, self.number = place, rank, number
        self.val_losses: list[float] = []

    def die(self, place: str) -> None:
        if place == self.place and self.current_epoch == 1 and self.trainer.global_rank == self.rank:
            self.place = None
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx in (1, _STEPS - 1):
            self.die("train step" if batch_idx == 1 else "last step of an epoch")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.die("validation" if self.trainer.state.batch_in_epoch == 3 else "late validation")
        value = self.head(self.body(batch[1])).mean() + torch.rand(())
        self.val_losses.append(float(value))
        self.log("val_loss", value)
        self.log("age", -float(self.global_step))  # so that each validation saves, whatever a machine's noise is

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.die("save")

    def on_train_epoch_end(self) -> None:
        self.die("epoch end")


def run(folder: Path, task: Victim, *, resume: bool = False, **arguments: Any) -> str | None:
    """Fit; return the signal's name if the run was preempted."""
    torch.manual_seed(78 if resume else 77)
    saver = ModelCheckpoint(folder, filename="{step}", monitor="age", save_top_k=2)
    trainer = quiet_trainer(
        devices="auto", max_epochs=_EPOCHS, val_check_interval=3, callbacks=[saver], default_root_dir=folder,
        num_sanity_val_steps=0, **arguments,
    )  # fmt: skip
    batch_size = 48 // _STEPS // trainer.settings.selection.topology.world_size
    loader = DataLoader(NoisySamples(), batch_size=batch_size, shuffle=True)
    try:
        trainer.fit(task, loader, DataLoader(NoisySamples(), batch_size=6), ckpt_path="last" if resume else None)
    except Preempted as end:
        return end.signal_name
    return None


def compare(folder: Path, place: str, rank: int, strategy: str = "auto") -> None:
    whole, first, second = Victim(None), Victim(place, rank), Victim(None)
    assert run(folder / "whole", whole, strategy=strategy) is None
    assert run(folder / "run", first, strategy=strategy) == "SIGTERM"
    newest = max(find_checkpoints(folder / "run"), key=lambda found: found.manifest.created)
    assert verify(newest.path) == []
    pieces = [file for part in newest.manifest.parts.values() for file in part.files if "rank-00001.safe" in file]
    assert {file.partition("/")[0] for file in pieces} >= ({"model", "optimizer"} if strategy == "fsdp" else set())
    assert run(folder / "run", second, resume=True, strategy=strategy) is None
    assert first.ids + second.ids == whole.ids, place
    assert first.losses + second.losses == whole.losses, place
    batches = len(whole.val_losses) // (2 * _EPOCHS)
    assert place != "validation" or len(first.val_losses) % batches == 2  # it ends before its third batch
    kept = len(whole.val_losses) - len(second.val_losses)  # a validation that was broken off is done again
    assert second.val_losses == whole.val_losses[kept:], place
    assert_equal_weights(weights_of(second), weights_of(whole))


@pytest.mark.slow
@pytest.mark.parametrize("place", mostly_exhaustive(PLACES, keep=["train step", "late validation", "save"]))
def test_one_process_goes_on_as_if_nothing_had_happened(place: str, tmp_path: Path) -> None:
    compare(tmp_path, place, 0)


def _compare_on_rank(folder: Path, places: tuple[str, ...], strategy: str) -> int:
    for number, place in enumerate(places):
        agreement._PERIOD_S = 0.0 if place == "validation" else 1.0  # ranks then exchange before each batch
        compare(folder / str(number), place, number % 2, strategy)
        compare(folder / f"{number}-other", place, (number + 1) % 2, strategy)
    return len(places)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("places", "strategy"),
    [
        pytest.param(PLACES[:3], "ddp", id="within an epoch-ddp"),
        pytest.param(PLACES[3:], "fsdp", id="at its end-fsdp", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_to_either_of_two_ranks_ends_both_and_both_go_on(
    places: tuple[str, ...], strategy: str, tmp_path: Path
) -> None:
    assert run_distributed(_compare_on_rank, 2, tmp_path, places, strategy, init=False, timeout=200) == [3, 3]


def test_another_runs_preempted_checkpoint_in_the_same_folder_stays(tmp_path: Path) -> None:
    assert run(tmp_path, Victim("train step")) == "SIGTERM"
    theirs = (tmp_path / "preempted" / "manifest.json").read_bytes()
    assert run(tmp_path, Victim("train step")) == "SIGTERM"
    assert run(tmp_path, Victim("late validation"), resume=True) == "SIGTERM"  # replaces its own
    assert (tmp_path / "preempted" / "manifest.json").read_bytes() == theirs
    assert sorted(path.name for path in tmp_path.glob("preempted*")) == ["preempted", "preempted-v1"]


def test_without_checkpointing_the_process_still_ends_in_order() -> None:
    trainer = quiet_trainer(max_epochs=3)
    with pytest.raises(Preempted, match="143"):
        trainer.fit(Victim("train step"), DataLoader(NoisySamples(), batch_size=8))
    assert (trainer.global_step, trainer.interrupted) == (8, False)


def test_a_checkpoint_of_the_same_step_is_not_written_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, Victim("epoch end")) == "SIGTERM"
    assert "already holds this step" in capsys.readouterr().out
    assert not (tmp_path / "preempted").exists()


def test_the_users_handlers_hear_of_the_signal_and_are_put_back(tmp_path: Path) -> None:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert run(tmp_path, Victim("train step")) == "SIGTERM"
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    os.kill(os.getpid(), signal.SIGUSR1)  # a process that leaves is not ended by another signal


def test_signals_are_left_alone_when_asked(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        assert run(tmp_path, Victim("train step"), preemption_grace=None) is None
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_grace_that_is_no_time_is_an_error() -> None:
    for wrong in (0, "3 steps", True):
        with pytest.raises(ConfigurationError, match=r"preemption_grace=.* is not a duration in time"):
            quiet_trainer(preemption_grace=wrong)


_SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainwright import ModelCheckpoint, TaskModule, Trainer

class Task(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5 and self.trainer.is_global_zero:
            print("running", flush=True)
        if {fails}:
            raise ValueError("the first attempt's own")
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

torch.manual_seed(3)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2, shuffle=True, num_workers={workers})
trainer = Trainer(max_steps={steps}, max_epochs=-1, logger=False, enable_progress_bar=False,
                  enable_model_summary=False, accelerator="cpu", default_root_dir=sys.argv[1],
                  callbacks=[ModelCheckpoint(every_n_train_steps=3)], {arguments})
task = Task()
trainer.fit(task, loader)
if trainer.is_global_zero:
    torch.save(task.net.weight.detach(), sys.argv[1] + "/weights.pt")
print("resumed at", trainer.resumed, "ended at", trainer.global_step)
"""


def _script(folder: Path, *, steps: int, fails: str = "False", workers: int = 0, arguments: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(_SCRIPT.format(steps=steps, fails=fails, workers=workers, arguments=arguments))
    return path


def _kill(script: Path, folder: Path) -> int:
    command = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            for line in process.stdout:
                if line == "running\n":
                    break
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    newest = max(find_checkpoints(folder / "checkpoints"), key=lambda found: found.manifest.created)
    assert newest.manifest.step >= 5
    assert verify(newest.path) == []
    return process.returncode


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [pytest.param({"workers": 2}, marks=pytest.mark.exhaustive), {"arguments": "devices=2"}], ids=str
)
def test_processes_that_were_started_end_with_the_first_one_and_143(options: dict[str, Any], tmp_path: Path) -> None:
    # Sent to the whole group of processes, loader workers included, as Slurm and most machines do it.
    assert _kill(_script(tmp_path, steps=10**9, **options), tmp_path) == 143


@pytest.mark.exhaustive
def test_a_process_that_hangs_outside_of_python_ends_after_the_grace(tmp_path: Path) -> None:
    # A collective that another rank does not reach hangs so, too: Python runs no handler until it returns.
    hang = "mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock"
    script = _script(tmp_path, steps=10**9, fails="self.trainer.global_step == 5 and hang()")
    hang = f"import ctypes\ndef hang():\n    {hang}\n    lock(mutex), lock(mutex)\n"
    script.write_text(hang + script.read_text().replace("callbacks=", "preemption_grace=2, callbacks="))
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "running\n" in iter(process.stdout.readline, "")
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 143
    assert "no step ended within preemption_grace=2" in errors


_SLURM = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}


def _slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    """Put a scontrol in the path that notes what it is asked; return the note."""
    for name, value in _SLURM.items():
        monkeypatch.setenv(name, value)
    note, command = folder / "asked", folder / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {note}\n[ {status} = 0 ] || echo "no such job" >&2\nexit {status}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    return note


def test_slurm_runs_the_job_again_after_its_warning_and_it_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = _slurm(tmp_path, monkeypatch)
    whole, first, second = Victim(None), Victim("train step", number=signal.SIGUSR1), Victim(None)
    assert run(tmp_path / "whole", whole) is None
    monkeypatch.setattr("trainwright.trainer.checkpoints.auto_resume._fits", 0)
    assert run(tmp_path / "run", first) == "SIGUSR1"
    assert note.read_text() == "requeue 41\n"
    monkeypatch.setattr("trainwright.trainer.checkpoints.auto_resume._fits", 0)  # a process of its own, in truth
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run(tmp_path / "run", second) is None  # the script passes no ckpt_path
    assert "trainwright: start 2 of this job resumes" in capsys.readouterr().out
    assert first.losses + second.losses == whole.losses
    next_fit = Victim(None)  # of the same script: not a part of the job that has a checkpoint
    assert run(tmp_path / "run", next_fit) is None
    assert next_fit.losses == whole.losses


def test_a_job_that_cannot_be_requeued_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _slurm(tmp_path, monkeypatch, status=1)
    assert run(tmp_path / "run", Victim("train step", number=signal.SIGUSR1)) == "SIGUSR1"
    assert "Job 41 was not requeued: scontrol failed: no such job" in capsys.readouterr().out


def test_what_a_broken_off_validation_follows_is_logged(tmp_path: Path) -> None:
    logger, task = MemoryLogger(), Victim("late validation")
    task.on_train_batch_end = lambda outputs, batch, batch_idx: task.log("batch", batch_idx)  # type: ignore[method-assign]
    assert run(tmp_path, task, logger=logger, log_every_n_steps=6) == "SIGTERM"
    assert logger.values("batch") == {5: 5, 11: 5}
    assert len(task.val_losses) == 3 * 8 + 2  # of the fourth validation, two batches


@pytest.mark.parametrize(
    ("variables", "name", "attempt"),
    [
        ({}, None, 0),
        (_SLURM, "slurm-41", 0),
        ({**_SLURM, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "slurm-40_3", 0),
        ({"SLURM_JOB_ID": "41"}, None, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None, 1),
    ],
)
def test_the_launcher_says_which_job_and_which_attempt_this_is(
    variables: dict[str, str], name: str | None, attempt: int
) -> None:
    found = job(variables)
    assert (found.name, found.attempt) == (name, attempt)
    assert (slurm_job(variables) is None) == (name is None)


def test_the_next_attempt_of_torchrun_resumes_by_what_its_agent_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first, second, of_another_agent = Victim(None), Victim("train step"), Victim(None), Victim(None)
    assert run(tmp_path / "whole", whole) is None
    agents = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for attempt, agent, task in ((0, 0, first), (1, 0, second), (1, 1, of_another_agent)):
        monkeypatch.setattr("trainwright.trainer.checkpoints.auto_resume._fits", 0)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("MASTER_PORT", str(agents[agent].port))
        assert run(tmp_path / "run", task) == ("SIGTERM" if task is first else None)
    assert first.losses + second.losses == of_another_agent.losses == whole.losses


def test_a_fresh_job_in_the_same_folder_does_not_take_up_another_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slurm(tmp_path, monkeypatch)
    assert run(tmp_path / "run", Victim("train step")) == "SIGTERM"
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    task = Victim(None)
    assert run(tmp_path / "run", task) is None
    assert len(task.losses) == _EPOCHS * _STEPS
