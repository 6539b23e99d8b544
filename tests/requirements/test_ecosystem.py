"""Libraries on Lightning compute the same numbers on Lightning and on Trainwright (docs/ecosystem.md)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.requirements.on_lightning import PROGRAMS

PYTHON = Path(".venv-ecosystem/bin/python").absolute()
PROGRAM = Path(__file__).with_name("on_lightning.py")


def run_program(name: str, folder: Path, *options: str) -> list[float]:
    folder.mkdir()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), *options, str(PROGRAM), name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.engines
@pytest.mark.skipif(not PYTHON.exists(), reason="`make test-engines` installs these libraries in .venv-ecosystem")
@pytest.mark.parametrize("name", [program.__name__ for program in PROGRAMS])
def test_numbers_are_those_of_lightning(name: str, tmp_path: Path) -> None:
    expected = run_program(name, tmp_path / "lightning")
    found = run_program(name, tmp_path / "trainwright", "-m", "trainwright.as_lightning")
    assert len(expected) > 4
    assert found == pytest.approx(expected, abs=1e-6)
