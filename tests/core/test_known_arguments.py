"""Keywords that a function does not have are told by name at run time, and found by type checkers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

_PROGRAM = """
from trainwright import Accelerator, Trainer

Trainer(max_epochs=3)
Trainer(max_epoch=3)
Trainer(max_epochs="3")
Accelerator(mixed_precision="bf16")
Accelerator(mixed_precison="bf16")
"""


@pytest.mark.engines
def test_type_checkers_find_a_misspelt_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy import api

    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    monkeypatch.chdir(ROOT)
    found = [line.partition("program.py:")[2] for line in api.run([str(program)])[0].splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in found] == ["5", "6", "8"]
    assert "max_epoch" in found[0]
    assert "mixed_precison" in found[2]
