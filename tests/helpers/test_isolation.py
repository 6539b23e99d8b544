"""tests/conftest.py keeps its promises: pytest itself is run on small test files that misbehave."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import is_present, wait_for_threads
from tests.helpers.demo_report import results
from tests.helpers.sources import ROOT


def _run_pytest(folder: Path, text: str) -> tuple[dict[str, int], str]:
    """Run a test file under a copy of the conftest; return the counts of outcomes and the output."""
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "RANK": "3", "SLURM_JOB_ID": "7", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder / "test_it.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    return {word: int(count) for count, word in itertools.pairwise(words) if count.isdigit()}, done.stdout


_PAIRS = """
import os, random, signal, pathlib
import numpy as np, torch, torch.distributed as dist

def test_a_misbehaves(tmp_path):
    os.environ["LEFT_OVER"] = "1"
    del os.environ["HOME"]
    os.chdir(tmp_path)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_b_environment(): assert "LEFT_OVER" not in os.environ and "HOME" in os.environ
def test_b_launcher_is_hidden(): assert not {"RANK", "SLURM_JOB_ID"} & set(os.environ)
def test_b_home_is_temporary(): assert pathlib.Path.home().is_relative_to(pathlib.Path(os.environ["BASE"]))
def test_b_folder(): assert os.getcwd() == os.environ["START"]
def test_b_signals(): assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
def test_b_dtype(): assert torch.get_default_dtype() == torch.float32
def test_b_threads(): assert torch.get_num_threads() == 1
def test_b_gradients(): assert torch.is_grad_enabled() and not torch.is_anomaly_enabled()
def test_b_process_group(): assert not dist.is_initialized()

def test_b_generators_start_from_one_seed():
    seed = torch.initial_seed()
    assert random.random() == random.Random(seed).random()
    assert np.random.rand() == np.random.RandomState(seed).rand()

_drawn = set()
def test_c_draws(): _drawn.add((random.random(), np.random.rand(), torch.rand(()).item()))
def test_d_draws_the_same(): test_c_draws(); assert len(_drawn) == 1
"""

_LEAK = """
import threading, pytest

release = threading.Event()

def test_leaks(): threading.Thread(target=release.wait, args=(20,), name="forgotten").start()
def test_daemons_may_stay(): threading.Thread(target=release.wait, args=(20,), daemon=True).start()

@pytest.mark.requires("no_such_package", reason="it shows the reason")
def test_needs_a_package(): raise AssertionError

@pytest.mark.requires("torch>=99", reason="it shows the version")
def test_needs_a_newer_torch(): raise AssertionError

@pytest.mark.requires("torch", reason="everybody has it")
@pytest.mark.requires("torch>=2.9", reason="the oldest supported one")
def test_needs_torch(): release.set()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_a_test_changes_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("START", str(tmp_path))
    monkeypatch.setenv("BASE", str(tmp_path))
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))
    counts, output = _run_pytest(tmp_path, _PAIRS)
    assert counts == {"passed": _PAIRS.count("def test_")}, output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_left_over_thread_fails_its_test_and_a_missing_package_skips(tmp_path: Path) -> None:
    counts, output = _run_pytest(tmp_path, _LEAK)
    assert counts == {"passed": 3, "skipped": 2, "error": 1}, output
    assert "threads left running: ['forgotten']" in output
    assert "needs no_such_package: it shows the reason" in output
    assert "needs torch>=99: it shows the version" in output


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
