"""Thousands of damaged and forged files for every reader; see `tests.checkpoint.fuzz_readers`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checkpoint.fuzz_readers import KINDS

pytestmark = pytest.mark.torture
_FILES = 500  # for each process, so that a failure comes early and memory is bounded


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_noticed_or_harmless(kind: str, block: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.fuzz_readers", kind, str(block * _FILES), str(_FILES)],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
