"""tests/helpers/run_suite.py repeats failed tests alone, and stays red for those that fail again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

_TESTS = """
import pathlib

def test_that_fails_beside_others():
    mark = pathlib.Path("failed before")
    seen = mark.exists()
    mark.touch()
    assert seen

def test_that_always_fails():
    assert {passes}
"""


@pytest.mark.slow
@pytest.mark.parametrize("passes", [True, False])
def test_a_test_that_passes_alone_is_flaky_and_one_that_fails_again_is_not(passes: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS.format(passes=passes))
    command = [sys.executable, str(ROOT / "tests/helpers/run_suite.py"), "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if passes else 1), done.stdout
    *_, alone = done.stdout.partition("once more, alone")
    assert ("1 passed" if passes else "1 failed, 1 passed") in alone
    assert ("test_it.py::test_that_fails_beside_others" in alone.partition("flaky")[2]) == passes
