"""Requeueing of Slurm jobs by signals that arrive before a fit."""

from __future__ import annotations

import os
import signal
import subprocess
from types import FrameType
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import Preempted
from trainwright.trainer.recovery import preemption


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let a job of Slurm begin; returns the commands that it is told."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(preemption.subprocess, "run", run)
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    preemption._ExitHandler.begun = False
    return commands


def _warn() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_warning_signal_before_the_fit_requeues_the_job(
    requeued: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    quiet_trainer(devices="auto", max_epochs=1)
    with pytest.raises(Preempted) as end:
        _warn()
    assert (end.value.code, end.value.signal_name) == (143, "SIGUSR1")
    assert requeued == [["scontrol", "requeue", "77"]]
    assert "Job 77 is requeued" in capfd.readouterr().err


def test_signal_handlers_of_the_user_are_kept(requeued: list[list[str]]) -> None:
    heard: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    quiet_trainer(devices="auto", preemption_grace=None)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.signal(signal.SIGUSR1, own)
    quiet_trainer(devices="auto", max_epochs=1).fit(RegressionTask(), regression_loader(2))
    assert signal.getsignal(signal.SIGUSR1) is own
    _warn()
    assert (heard, requeued) == ([signal.SIGUSR1], [])
