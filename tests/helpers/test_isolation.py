"""What tests/conftest.py and the helpers of programs promise."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.conftest import is_present, wait_for_threads
from tests.helpers.demo_report import results


def test_a_thread_that_ends_in_time_is_no_leak() -> None:
    before = set(threading.enumerate())
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert wait_for_threads(before, grace_s=0.01) == [thread]
    release.set()
    assert wait_for_threads(before, grace_s=5) == []


def test_presence_is_told_of_packages_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_present("torch")
    assert not is_present("no_such_package")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert is_present("cuda")
    assert not is_present("cuda:2")


def test_the_demo_report_names_what_is_there_and_what_is_missing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs/checkpoints/step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (tmp_path / "runs/metrics.csv").write_text("step,train_loss,test_acc\n1,0.5,\n2,,0.75\n")
    lines, missing = results(tmp_path)
    assert lines == ["accuracy:   75.0 % of the test images", f"checkpoint: {checkpoint}"]
    assert missing == ["report"]
