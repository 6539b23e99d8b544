"""Each tracker in a process of its own: some of their libraries replace Python's import function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

REASON = "the tracker's library writes the files that are read"


@pytest.mark.engines
@pytest.mark.distributed
@pytest.mark.parametrize(
    "package",
    [
        pytest.param(name, marks=pytest.mark.requires(name, REASON))
        for name in ("mlflow", "comet_ml", "dvclive", "clearml", "trackio", "swanlab")
    ],
)
def test_what_a_tracker_wrote_offline_is_read_back(package: str, tmp_path: Path) -> None:
    words = {"comet_ml": "comet"}.get(package, package)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("offline_cases.py")), "-k", words],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
